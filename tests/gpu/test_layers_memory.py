"""Once a layer is built, its passes make no arrays of their own: NumPy's allocations are counted."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from gpu.backend import Backend
from gpu.net import Net

pytestmark = pytest.mark.filterwarnings("ignore::gpu.fields.FieldWarning")  # see test_fields

PAIRS = 'top: "y" bottom: "x" bottom: "other"'
LABELS = 'top: "y" bottom: "x" bottom: "l"'
LAYERS = {
    "AbsVal": 'type: "AbsVal" bottom: "x" top: "y"',
    "BNLL": 'type: "BNLL" bottom: "h" top: "h"',
    "Clip": 'type: "Clip" bottom: "h" top: "h" clip_param { min: -1 max: 1 }',
    "ELU": 'type: "ELU" bottom: "h" top: "h"',
    "Exp": 'type: "Exp" bottom: "h" top: "h" exp_param { base: 2 shift: 1 }',
    "Log": 'type: "Log" bottom: "x" top: "y" log_param { base: 2 shift: 9 }',
    "PReLU": 'type: "PReLU" bottom: "h" top: "h"',
    "Swish": 'type: "Swish" bottom: "h" top: "h"',
    "Threshold": 'type: "Threshold" bottom: "x" top: "y"',
    "Bias": 'type: "Bias" bottom: "h" top: "h"',
    "Bias of a bottom": f'type: "Bias" {PAIRS} bias_param {{ axis: 0 }}',
    "Scale": 'type: "Scale" bottom: "h" top: "h" scale_param { bias_term: true }',
    "MVN": 'type: "MVN" bottom: "h" top: "h"',
    "Softmax": 'type: "Softmax" bottom: "h" top: "h"',
    "SoftmaxWithLoss": f'type: "SoftmaxWithLoss" {LABELS} loss_param {{ ignore_label: 3 }}',
    "HingeLoss": 'type: "HingeLoss" bottom: "x" bottom: "image" top: "y" hinge_loss_param { norm: L2 }',
    "ContrastiveLoss": 'type: "ContrastiveLoss" bottom: "flat" bottom: "flat" bottom: "image" top: "y"',
    "SigmoidCrossEntropyLoss": f'type: "SigmoidCrossEntropyLoss" {PAIRS} loss_param {{ ignore_label: 3 }}',
    "MultinomialLogisticLoss": 'type: "MultinomialLogisticLoss" bottom: "x" bottom: "image" top: "y"',
    "InfogainLoss": f'type: "InfogainLoss" {LABELS} bottom: "H" loss_param {{ ignore_label: 3 }}',
}


def peak(name: str, backend: str, size: int) -> int:
    """Most bytes that one more forward and backward pass held at a time, on top of what the net has."""
    shape = (8, 16, size, size)
    inputs = {"x": shape, "other": shape, "l": (8, size, size), "image": (8,), "H": (16, 16), "flat": (8, 16 * size**2)}
    text = 'force_backward: true\n layer { name: "copy" type: "Split" bottom: "x" top: "h" }\n'
    used = {top: shape for top, shape in inputs.items() if f'"{top}"' in LAYERS[name] or top == "x"}
    for top, shape in used.items():
        dims = " ".join(f"dim: {size}" for size in shape)
        text = f'layer {{ name: "{top}" type: "Input" top: "{top}" input_param {{ shape {{ {dims} }} }} }}\n' + text
    net = Net(text + f'layer {{ name: "L" {LAYERS[name]} }}', "TRAIN", backend=Backend(backend, np, "test"))
    for top, shape in used.items():
        labels = np.arange(np.prod(shape)).reshape(shape) % 2
        net.blobs[top].data = labels if top in ("l", "image", "H") else np.linspace(-4, 4, labels.size).reshape(shape)
    for _ in range(2):
        net.forward_only()
        net.backward_only()
    tracemalloc.start()
    try:
        net.forward_only()
        net.backward_only()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("backend", ["numpy", "portable"])
@pytest.mark.parametrize("name", LAYERS)
def test_passes_make_no_arrays(name: str, backend: str) -> None:
    """What is left are views and NumPy's buffers of 8192 values, for casts: they do not grow with the arrays.

    The smallest arrays that do, one byte for each label, would add 55 kB.
    """
    small, large = peak(name, backend, 48), peak(name, backend, 96)
    assert large < small + 10_000
    assert small < 200_000
