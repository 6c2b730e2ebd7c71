"""What a solver does to gradients, where it can be said without another program (PyTorch: test_solver_oracle)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from datasets import caffe_pb2
from gpu.blob import Blob
from gpu.update import Rule, Updater

SHAPES = [(4, 3), (5,), (2, 3, 2, 2)]
LR = 0.05


def run(text: dict[str, object], gradients: list[list[np.ndarray]], start: list[np.ndarray]) -> list[np.ndarray]:
    rule = Rule.from_proto(caffe_pb2.SolverParameter(**text))
    params = [SimpleNamespace(blob=Blob(shape), lr_mult=1.0, decay_mult=1.0) for shape in SHAPES]
    for param, values in zip(params, start, strict=True):
        param.blob.data = values
    updater = Updater(rule, params)
    for step, arrays in enumerate(gradients):
        updater.clear_gradients()
        for param, gradient in zip(params, arrays, strict=True):
            param.blob.device_diff[...] += gradient
        updater.apply(LR, step)
    return [param.blob.data for param in params]


def test_clipping_scales_the_whole_gradient_to_the_given_norm() -> None:
    start = [np.zeros(shape, np.float32) for shape in SHAPES]
    gradient = [np.full(shape, 3.0, np.float32) for shape in SHAPES]
    norm = np.sqrt(sum(9.0 * array.size for array in gradient))
    clipped = run({"clip_gradients": 1.0}, [gradient], start)
    for values in clipped:
        np.testing.assert_allclose(values, -LR * 3.0 / norm, rtol=1e-6)
    loose = run({"clip_gradients": norm * 1.01}, [gradient], start)
    for values in loose:
        np.testing.assert_allclose(values, -LR * 3.0, rtol=1e-6)


def test_no_momentum_no_decay_is_plain_descent() -> None:
    start = [np.ones(shape, np.float32) for shape in SHAPES]
    gradient = [np.full(shape, 2.0, np.float32) for shape in SHAPES]
    for values in run({}, [gradient, gradient], start):
        np.testing.assert_array_equal(values, np.float32(np.float32(1 - np.float32(0.1)) - np.float32(0.1)))
