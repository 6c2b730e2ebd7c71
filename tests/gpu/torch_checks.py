"""One layer against what PyTorch makes of it in float64: values and every gradient, stored in float32 or float16."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from gpu.net import Net
from tests.gpu.layer_checks import BACKENDS
from tests.gpu.nets import inputs as input_layers
from tests.gpu.nets import layer as layer_text

backends = st.sampled_from(sorted(BACKENDS))
precisions = st.sampled_from(["fp32", "fp16"])
LOSS_WEIGHT = 0.5
Pick = Callable[[st.SearchStrategy[Any]], Any]
"""Hypothesis' ``data.draw``."""


@dataclass(frozen=True)
class Case:
    """A layer and what it should do.

    ``inputs`` by name: a shape stands for normal numbers of that shape; whole numbers are labels or places, which have
    no gradient. ``wanted(torch, *inputs, *parameters)`` returns the tops. ``tops``: how many there are, 0 for a loss.
    """

    kind: str
    settings: str
    inputs: Mapping[str, Any]
    wanted: Callable[..., Any]
    tops: int = 1
    smooth: bool = True
    phase: str = "TRAIN"
    params: Sequence[np.ndarray] | None = None
    constant: tuple[str, ...] = ()
    """Inputs of floats without a gradient."""


def halves(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def distinct(rng: np.random.Generator, *shapes: Sequence[int]) -> list[np.ndarray]:
    """Arrays no two of whose values are equal, also in float16: where the largest is, is then no matter of rounding."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    order = (rng.permutation(sum(sizes)) - sum(sizes) // 2) / np.float32(64)
    assert sum(sizes) < 2048
    parts = np.split(order.astype(np.float32), np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def as_torch(case: Case, backend: str, precision: str, seed: int) -> None:
    """Assert that forward and backward of the case agree with PyTorch.

    float32: relative L2 of 1e-5, the limit for single layers against Caffe's files, and for gradients that cancel an
    absolute part of 1e-6 for each term. float16: everything given is a float16, so PyTorch sees the same numbers; what
    comes out has been rounded to 11 bits (2^-11 each), and backward reads rounded tops, whose error it passes on:
    2^-9, four roundings, relative to the whole, and one relative to 1.
    """
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    half = precision == "fp16"

    def given(what: Any) -> np.ndarray:
        array = rng.standard_normal(what, np.float32) if isinstance(what, tuple) else np.asarray(what)
        return halves(array) if half and array.dtype.kind == "f" else array

    values = {name: given(what) for name, what in case.inputs.items()}
    floats = [name for name, array in values.items() if array.dtype.kind == "f" and name not in case.constant]
    tops = [f"y{i}" for i in range(case.tops or 1)]
    text = "force_backward: true\n" + input_layers(**{name: array.shape for name, array in values.items()})
    bottoms = {name: name for name in values}
    if half:
        # Inputs of losses stay in float32: a learned 1 before them, which changes nothing, makes them scores.
        for name in floats:
            bottoms[name] = f"{name}1"
            text += layer_text("Scale", f"one {name}", [name], [f"{name}1"], "scale_param { axis: 0 num_axes: 0 }")
    settings = case.settings + (f" loss_weight: {LOSS_WEIGHT}" if not case.tops else "")
    text += layer_text(case.kind, "L", list(bottoms.values()), tops, settings)
    net = Net(text, case.phase, backend=BACKENDS[backend], precision=precision)
    blobs = net.params.get("L", [])
    for i, blob in enumerate(blobs):
        blob.data = given(blob.shape if case.params is None else case.params[i])
    learned = next(layer.learned for layer in net.layers if layer.name == "L")
    leaves = {
        name: torch.tensor(array.astype(np.float64), requires_grad=name in floats)
        if array.dtype.kind == "f"
        else torch.tensor(array)
        for name, array in values.items()
    }
    params = [torch.tensor(blob.data.astype(np.float64), requires_grad=learned) for blob in blobs]
    wanted = case.wanted(torch, *leaves.values(), *params)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    net.forward_only(**values)
    found = [np.asarray(net.blobs[name].data, np.float64) for name in tops]
    limit, floor = (2.0**-9, 2.0**-11) if half else (1e-5, 1e-6)

    def close(what: str, have: np.ndarray, want: Any, terms: int) -> None:
        want = want.detach().numpy()
        assert have.shape == want.shape, what
        gap, size = np.linalg.norm(have - want), np.linalg.norm(want)
        # A gradient that cancels to nothing is as exact as its terms are.
        assert gap <= limit * size + floor * np.sqrt(want.size * terms), (what, gap, size)

    for name, have, want in zip(tops, found, wanted, strict=True):
        close(name, have, want, 1)
    if not case.smooth:
        return
    slopes = {} if not case.tops else {name: given(want.shape) for name, want in zip(tops, wanted, strict=True)}
    starts = [torch.tensor(slope.astype(np.float64)) for slope in slopes.values()] or [
        torch.tensor(LOSS_WEIGHT).double()
    ]
    torch.autograd.backward(wanted, starts)
    net.clear_param_diffs()
    gradients = net.backward(**slopes)
    # With force_backward labels have a gradient, too: 0.
    assert set(gradients) >= set(floats)
    assert all(not array.any() for name, array in gradients.items() if name not in floats)
    terms = 1 if half else sum(slope.size for slope in slopes.values()) or 1
    for name in floats:
        close(f"gradient of {name}", gradients[name], leaves[name].grad, terms)
    for i, (blob, leaf) in enumerate(zip(blobs, params, strict=True)):
        if learned:
            close(f"gradient of parameter {i}", blob.diff, leaf.grad, terms)
