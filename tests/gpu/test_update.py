"""Update rules against PyTorch's optimizers, where the two mean the same."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from datasets import caffe_pb2
from gpu.blob import Blob
from gpu.solver import Solver
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


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["SGD", "Nesterov"])
@hypothesis_settings(max_examples=40, deadline=None, derandomize=True)
@given(
    momentum=st.floats(0, 0.99),
    decay=st.floats(0, 0.1),
    clip=st.none() | st.floats(0.05, 20),
    sub_batches=st.integers(1, 4),
    multipliers=st.lists(st.tuples(st.floats(0.125, 4), st.floats(0, 4)), min_size=3, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_clip_division_decay_and_multipliers_are_made_in_caffes_order(
    kind: str,
    momentum: float,
    decay: float,
    clip: float | None,
    sub_batches: int,
    multipliers: list[tuple[float, float]],
    seed: int,
) -> None:
    """Sum, clip, divide by iter_size, decay, update: PyTorch given the same steps by hand. The rate is constant, since
    Caffe's momentum holds rates and PyTorch's does not."""
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(seed)
    start = [draw.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    text = {"type": kind, "momentum": momentum, "weight_decay": decay, "iter_size": sub_batches}
    rule = Rule.from_proto(caffe_pb2.SolverParameter(**text, clip_gradients=-1 if clip is None else clip))
    params = [
        SimpleNamespace(blob=Blob(shape), lr_mult=lr, decay_mult=d)
        for shape, (lr, d) in zip(SHAPES, multipliers, strict=True)
    ]
    tensors = [torch.tensor(values, requires_grad=True) for values in start]
    for param, values in zip(params, start, strict=True):
        param.blob.data = values
    groups = [
        {"params": [tensor], "lr": LR * lr, "weight_decay": rule.weight_decay * d}
        for tensor, (lr, d) in zip(tensors, multipliers, strict=True)
    ]
    nesterov = kind == "Nesterov" and rule.momentum > 0
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=rule.momentum, nesterov=nesterov)
    updater = Updater(rule, params)
    for step in range(6):
        updater.clear_gradients()
        optimizer.zero_grad()
        for _ in range(sub_batches):
            for param, tensor in zip(params, tensors, strict=True):
                gradient = draw.standard_normal(tensor.shape).astype(np.float32)
                param.blob.device_diff[...] += gradient
                tensor.grad = torch.tensor(gradient) if tensor.grad is None else tensor.grad + torch.tensor(gradient)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(tensors, rule.clip)
        for tensor in tensors:
            tensor.grad /= sub_batches
        optimizer.step()
        updater.apply(LR, step)
    for param, tensor in zip(params, tensors, strict=True):
        values = tensor.detach().numpy()
        np.testing.assert_allclose(param.blob.data, values, rtol=1e-4, atol=1e-4 * np.abs(values).max())


@pytest.mark.oracle
def test_tied_weights_and_two_weighted_losses_train_as_in_pytorch() -> None:
    torch = pytest.importorskip("torch")
    text = """
    layer { name: "in" type: "Input" top: "data" top: "t" input_param { shape { dim: 4 dim: 6 } } }
    layer { name: "a" type: "InnerProduct" bottom: "data" top: "a" param { name: "w" } param { name: "b" }
      inner_product_param { num_output: 6 weight_filler { type: "xavier" } } }
    layer { name: "tanh" type: "TanH" bottom: "a" top: "h" }
    layer { name: "b" type: "InnerProduct" bottom: "h" top: "y" param { name: "w" } param { name: "b" }
      inner_product_param { num_output: 6 weight_filler { type: "xavier" } } }
    layer { name: "end" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "end" loss_weight: 2 }
    layer { name: "middle" type: "EuclideanLoss" bottom: "h" bottom: "t" top: "middle" loss_weight: 0.25 }
    """
    solver = Solver("base_lr: 0.1 momentum: 0.9 weight_decay: 0.01\n", net=text, backend="numpy", seed=1)
    w, b = (torch.tensor(blob.data.copy(), requires_grad=True) for blob in solver.net.params["a"])
    optimizer = torch.optim.SGD([w, b], lr=0.1, momentum=0.9, weight_decay=0.01)
    draw = np.random.default_rng(0)
    for _ in range(10):
        data, t = (draw.standard_normal((4, 6), np.float32) for _ in range(2))
        hidden = torch.tanh(torch.tensor(data) @ w.T + b)
        out = hidden @ w.T + b
        target = torch.tensor(t)
        loss = 2 * ((out - target) ** 2).sum() / 8 + 0.25 * ((hidden - target) ** 2).sum() / 8
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert solver.step_on({"data": data, "t": t}) == pytest.approx(float(loss.detach()), rel=1e-5)
    for blob, tensor in zip(solver.net.params["b"], (w, b), strict=True):
        np.testing.assert_allclose(blob.data, tensor.detach().numpy(), rtol=1e-4, atol=1e-5)
