"""Solver steps against PyTorch's optimizers and schedulers: random shapes, hyper-parameters, policies, several kinds of
weights. PyTorch computes in float64. Where Caffe means something else, PyTorch is set so that the mathematics is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.solver import Solver
from gpu.update import TYPES
from tests.gpu.nets import inputs, layer

pytestmark = pytest.mark.oracle
STEPS = 8
some = settings(max_examples=12, deadline=None)


def real(low: float, high: float) -> st.SearchStrategy[float]:
    """What a solver's text can hold: float32."""
    return st.floats(float(np.float32(low)), float(np.float32(high)), width=32)


shapes = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=3)
multipliers = st.sampled_from([0.25, 1.0, 2.0]), st.sampled_from([0.0, 0.5, 1.0, 3.0])


@st.composite
def rules(draw: Any) -> dict[str, Any]:
    """What a solver of any type says about its updates; its momenta are left out by types without them."""
    return {
        "base_lr": draw(real(1e-4, 0.5)),
        "weight_decay": draw(st.sampled_from([0.0, 5e-4, 0.1])),
        "regularization_type": draw(st.sampled_from(["L1", "L2"])),
        "clip_gradients": draw(st.sampled_from([-1.0, 0.1, 2.0, 100.0])),
        "iter_size": draw(st.integers(1, 3)),
        "delta": draw(st.sampled_from([1e-8, 1e-6, 1e-3, 0.1])),
        "momentum": draw(real(0, 0.99)),
        "momentum2": draw(real(0.5, 0.9999)),
        "rms_decay": draw(real(0.5, 0.99)),
    }


def solver_of(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a solver of this type."""
    unread = {"momentum2"} if kind != "Adam" else set()
    unread |= {"rms_decay"} if kind != "RMSProp" else set()
    unread |= {"momentum"} if kind in ("AdaGrad", "RMSProp") else set()
    return {"type": kind} | {name: value for name, value in fields.items() if name not in unread}


def policy(name: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"lr_policy": st.just(name), **fields})


policies = st.one_of(
    policy("fixed"),
    policy("step", gamma=real(0.1, 1.5), stepsize=st.integers(1, 4)),
    policy("exp", gamma=real(0.7, 1.2)),
    policy("inv", gamma=real(0, 2), power=real(0, 2)),
    policy(
        "multistep",
        gamma=real(0.1, 1.5),
        stepvalue=st.lists(st.integers(1, STEPS), min_size=1, max_size=3).map(sorted),
    ),
    policy("poly", power=real(0, 3), max_iter=st.integers(STEPS // 2, 2 * STEPS)),
    policy("sigmoid", gamma=real(-2, 2), stepsize=st.integers(1, STEPS)),
)


def scheduler(torch: Any, optimizer: Any, fields: dict[str, Any]) -> Any:
    """PyTorch's scheduler of a policy; ``inv`` and ``sigmoid``, which it lacks, by their formulas."""
    schedules = torch.optim.lr_scheduler
    gamma, power = fields.get("gamma", 0.0), fields.get("power", 0.0)
    match fields["lr_policy"]:
        case "step":
            return schedules.StepLR(optimizer, fields["stepsize"], gamma)
        case "exp":
            return schedules.ExponentialLR(optimizer, gamma)
        case "multistep":
            return schedules.MultiStepLR(optimizer, fields["stepvalue"], gamma)
        case "poly":
            return schedules.PolynomialLR(optimizer, fields["max_iter"], power)
        case "inv":
            return schedules.LambdaLR(optimizer, lambda i: (1 + gamma * i) ** -power)
        case "sigmoid":
            return schedules.LambdaLR(optimizer, lambda i: 1 / (1 + math.exp(-gamma * (i - fields["stepsize"]))))
        case _:
            return schedules.ConstantLR(optimizer, factor=1.0)


class Theirs:
    """An optimizer of PyTorch's behind Caffe's clipping, division and decay."""

    def __init__(self, torch: Any, fields: dict[str, Any], params: list[tuple[Any, float, float]]) -> None:
        self.torch, self.fields = torch, fields
        self.groups = [
            {"params": [tensor], "lr": fields["base_lr"] * lr, "decay": fields["weight_decay"] * decay}
            for tensor, lr, decay in params
        ]
        self.tensors = [tensor for tensor, _, _ in params]
        momentum, delta, optim = fields.get("momentum", 0.0), fields["delta"], torch.optim
        made: dict[str, Callable[[], Any]] = {
            # PyTorch refuses Nesterov without momentum, which is plain descent.
            "SGD": lambda: optim.SGD(self.groups, momentum=momentum),
            "Nesterov": lambda: optim.SGD(self.groups, momentum=momentum, nesterov=momentum > 0),
            "AdaGrad": lambda: optim.Adagrad(self.groups, eps=delta),
            "RMSProp": lambda: optim.RMSprop(self.groups, alpha=fields.get("rms_decay", 0.99), eps=delta),
            "AdaDelta": lambda: optim.Adadelta(self.groups, rho=momentum, eps=delta),
            "Adam": lambda: optim.Adam(self.groups, betas=(momentum, fields.get("momentum2", 0.999)), eps=delta),
        }
        self.optimizer = made[fields["type"]]()
        self.schedule = scheduler(torch, self.optimizer, fields)
        self.steps = 0

    def rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self) -> None:
        """One update with the gradients that were summed over the sub-batches."""
        torch, fields = self.torch, self.fields
        self.steps += 1
        clip, gradients = fields["clip_gradients"], [tensor.grad for tensor in self.tensors]
        norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))
        for group, tensor in zip(self.optimizer.param_groups, self.tensors, strict=True):
            if 0 <= clip < norm:  # by hand: clip_grad_norm_ divides by norm + 1e-6
                tensor.grad *= clip / norm
            tensor.grad /= fields["iter_size"]
            weights = tensor.detach()
            tensor.grad += group["decay"] * (weights.sign() if fields["regularization_type"] == "L1" else weights)
        given = self.rates()
        for group in self.optimizer.param_groups:
            if fields["type"] in ("SGD", "Nesterov"):
                # PyTorch multiplies the momentum with this step's rate; Caffe's momentum holds each gradient times the
                # rate of its own step. The two differ as soon as the rate changes.
                (tensor,) = group["params"]
                tensor.grad *= group["lr"]
                group["lr"] = 1.0
            elif fields["type"] == "Adam":
                # u = r * sqrt(c2) / c1 * a / (sqrt(v) + delta), with c = 1 - m^t: Caffe adds delta before the
                # correction, PyTorch eps after it: a / c1 / (sqrt(v) / sqrt(c2) + eps).
                group["eps"] = fields["delta"] / math.sqrt(1 - fields.get("momentum2", 0.999) ** self.steps)
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, given, strict=True):
            group["lr"] = rate
        self.schedule.step()
        self.optimizer.zero_grad()

    def history(self) -> list[Any]:
        """What it remembers, in the order in which Caffe stores it."""
        names = {
            "SGD": ["momentum_buffer"], "Nesterov": ["momentum_buffer"], "AdaGrad": ["sum"], "RMSProp": ["square_avg"],
            "AdaDelta": ["square_avg", "acc_delta"], "Adam": ["exp_avg", "exp_avg_sq"],
        }[self.fields["type"]]  # fmt: skip
        return [self.optimizer.state[tensor].get(name) for name in names for tensor in self.tensors]


def text_of(fields: dict[str, Any]) -> str:
    lines = []
    for name, value in fields.items():
        quoted = name in ("type", "lr_policy", "regularization_type")
        for one in value if isinstance(value, list) else [value]:
            lines.append(f'{name}: "{one}"' if quoted else f"{name}: {one!r}")
    return "\n".join(lines) + "\n"


def close(found: Any, wanted: Any, scale: float, limit: float, what: str) -> None:
    gap = float(np.linalg.norm(np.asarray(found, np.float64) - wanted.detach().numpy()))
    assert gap <= limit * scale, (what, gap / scale)


@pytest.mark.parametrize("kind", TYPES)
@some
@given(
    fields=rules(), rate=policies, sizes=shapes, mults=st.lists(st.tuples(*multipliers), min_size=3, max_size=3),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_every_type_of_solver_as_pytorchs(
    kind: str,
    fields: dict[str, Any],
    rate: dict[str, Any],
    sizes: list[list[int]],
    mults: list[tuple[float, float]],
    seed: int,
) -> None:
    """Weights of any shape whose gradients are what is fed in: only the solver's own arithmetic is compared."""
    torch = pytest.importorskip("torch")
    fields = {**solver_of(kind, fields), **rate}
    rng = np.random.default_rng(seed)
    net = inputs(**{f"g{i}": tuple(size) for i, size in enumerate(sizes)})
    for i, (size, (lr, decay)) in enumerate(zip(sizes, mults, strict=False)):
        dims = " ".join(f"dim: {n}" for n in size)
        own = f"param {{ lr_mult: {lr} decay_mult: {decay} }} parameter_param {{ shape {{ {dims} }} }}"
        net += layer("Parameter", f"w{i}", [], [f"w{i}"], own)
        net += layer("Eltwise", f"p{i}", [f"w{i}", f"g{i}"], [f"p{i}"], "eltwise_param { operation: PROD }")
        net += layer("Reduction", f"s{i}", [f"p{i}"], [f"s{i}"], "loss_weight: 1")
    ours = Solver(text_of(fields), net=net, backend="numpy")
    params = []
    for param, (lr, decay) in zip(ours.net.learnable, mults, strict=False):
        param.blob.data = rng.standard_normal(param.blob.shape)
        params.append((torch.tensor(param.blob.data.astype(np.float64), requires_grad=True), lr, decay))
    theirs = Theirs(torch, fields, params)
    travelled = [0.0] * len(params)
    for _ in range(STEPS):
        assert ours.lr * mults[0][0] == pytest.approx(theirs.rates()[0], rel=1e-6, abs=1e-12)
        batches = [
            {f"g{i}": rng.standard_normal(size).astype(np.float32) for i, size in enumerate(sizes)}
            for _ in range(fields["iter_size"])
        ]
        loss = ours.step_on(batches)
        total = sum(
            (tensor * torch.tensor(batch[f"g{i}"])).sum()
            for i, tensor in enumerate(theirs.tensors)
            for batch in batches
        )
        total.backward()
        assert loss == pytest.approx(total.item() / fields["iter_size"], rel=1e-4, abs=1e-3 * sum(travelled) + 1e-4)
        before = [tensor.detach().clone() for tensor in theirs.tensors]
        theirs.step()
        for i, (tensor, old) in enumerate(zip(theirs.tensors, before, strict=True)):
            travelled[i] += float(torch.linalg.vector_norm(tensor.detach() - old))
    for i, (param, tensor) in enumerate(zip(ours.net.learnable, theirs.tensors, strict=True)):
        # Rounding of the weights, and of each update.
        scale = 0.01 * float(torch.linalg.vector_norm(tensor.detach())) + travelled[i]
        close(param.blob.data, tensor, scale, 1e-4, f"w{i}")
    for i, (found, wanted) in enumerate(zip(ours.history, theirs.history(), strict=True)):
        if wanted is not None:  # PyTorch keeps nothing where momentum is 0
            close(found, wanted, float(torch.linalg.vector_norm(wanted)), 1e-4, f"history {i}")


@pytest.mark.parametrize("kind", TYPES)
@some
@given(
    fields=rules(), rate=policies, sizes=st.tuples(*[st.integers(1, 6)] * 4), seed=st.integers(0, 2**31),
    mults=st.lists(st.tuples(*multipliers), min_size=4, max_size=4),
)  # fmt: skip
def test_small_nets_train_as_pytorchs(
    kind: str,
    fields: dict[str, Any],
    rate: dict[str, Any],
    sizes: tuple[int, int, int, int],
    mults: list[tuple[float, float]],
    seed: int,
) -> None:
    """Forward, backward and update together, loss by loss."""
    torch = pytest.importorskip("torch")
    # Where the root of a mean of squares is small, adaptive types turn rounding of a gradient into whole updates.
    fields = {
        **solver_of(kind, fields),
        **rate,
        "delta": max(fields["delta"], 1e-3),
        "base_lr": min(fields["base_lr"], 0.05),
    }
    n, size, hidden, classes = sizes
    net = inputs(x=(n, size), t=(n, classes))
    for name, outputs, bottom, (a, b) in (("a", hidden, "x", mults[:2]), ("b", classes, "h", mults[2:])):
        own = "".join(f"param {{ lr_mult: {lr} decay_mult: {decay} }} " for lr, decay in (a, b))
        fill = 'weight_filler { type: "xavier" } bias_filler { type: "uniform" min: -1 max: 1 }'
        own += f"inner_product_param {{ num_output: {outputs} {fill} }}"
        net += layer("InnerProduct", name, [bottom], [name], own)
        if name == "a":
            net += layer("TanH", "h", ["a"], ["h"])
    net += layer("EuclideanLoss", "loss", ["b", "t"], ["loss"])
    ours = Solver(text_of(fields), net=net, backend="numpy", seed=seed)
    theirs = Theirs(
        torch,
        fields,
        [
            (torch.tensor(param.blob.data.astype(np.float64), requires_grad=True), lr, decay)
            for param, (lr, decay) in zip(ours.net.learnable, mults, strict=True)
        ],
    )
    wa, ba, wb, bb = theirs.tensors
    rng = np.random.default_rng(seed)
    for _ in range(STEPS):
        batches = [
            {"x": rng.standard_normal((n, size), np.float32), "t": rng.standard_normal((n, classes), np.float32)}
            for _ in range(fields["iter_size"])
        ]
        loss, wanted = ours.step_on(batches), 0.0
        for batch in batches:
            x, t = (torch.tensor(batch[name].astype(np.float64)) for name in ("x", "t"))
            one = ((torch.tanh(x @ wa.T + ba) @ wb.T + bb - t) ** 2).sum() / (2 * n)
            one.backward()
            wanted += one.item() / fields["iter_size"]
        assert loss == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        theirs.step()
    for param, tensor in zip(ours.net.learnable, theirs.tensors, strict=True):
        close(param.blob.data, tensor, float(torch.linalg.vector_norm(tensor.detach())) + 0.01, 1e-3, param.name)


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
