"""Update rules against PyTorch's optimizers, where the two mean the same."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from datasets import caffe_pb2
from gpu.blob import Blob
from gpu.update import Rule, Updater

SHAPES = [(4, 3), (5,), (2, 3, 2, 2)]
STEPS = 12
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


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        ({"momentum": 0.9}, "SGD", {"momentum": 0.9}),
        ({"momentum": 0.9, "type": "Nesterov"}, "SGD", {"momentum": 0.9, "nesterov": True}),
        ({"type": "AdaGrad", "delta": 1e-6}, "Adagrad", {"eps": 1e-6}),
        ({"type": "RMSProp", "rms_decay": 0.95, "delta": 1e-6}, "RMSprop", {"alpha": 0.95, "eps": 1e-6}),
        ({"type": "AdaDelta", "momentum": 0.95, "delta": 1e-6}, "Adadelta", {"rho": 0.95, "eps": 1e-6}),
        # Caffe adds delta to the root of the uncorrected mean, PyTorch to the corrected one: equal for a tiny delta.
        (
            {"type": "Adam", "momentum": 0.9, "momentum2": 0.99, "delta": 1e-12},
            "Adam",
            {"betas": (0.9, 0.99), "eps": 1e-12},
        ),
    ],
    ids=["sgd", "nesterov", "adagrad", "rmsprop", "adadelta", "adam"],
)
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_rules_agree_with_pytorch(ours: dict[str, object], theirs: str, settings: dict, decay: float) -> None:
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(1)
    start = [draw.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    gradients = [[draw.standard_normal(shape).astype(np.float32) for shape in SHAPES] for _ in range(STEPS)]
    tensors = [torch.tensor(values, requires_grad=True) for values in start]
    optimizer = getattr(torch.optim, theirs)(tensors, lr=LR, weight_decay=decay, **settings)
    for arrays in gradients:
        for tensor, gradient in zip(tensors, arrays, strict=True):
            tensor.grad = torch.tensor(gradient)
        optimizer.step()
    result = run({**ours, "weight_decay": decay}, gradients, start)
    for values, tensor in zip(result, tensors, strict=True):
        np.testing.assert_allclose(values, tensor.detach().numpy(), rtol=2e-5, atol=2e-6)


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
