"""A step of training allocates nothing: NumPy's allocations are counted, one by one, over 100 steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu.loss_scale import LossScale
from gpu.net import Net
from gpu.python_layer import PythonLayer
from gpu.solver import Solver
from tests.gpu import nets, test_layers
from tests.gpu.counting import counted

STEPS = 100
SCALAR = 64
"""Bytes: what a sum or a counter of four words takes. Anything larger is an array."""
LENET = nets.DATA / "proto" / "lenet_train_test.prototxt"
NETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "every": (nets.every_layer(), {}),
    "lenet": (LENET, {"input_shapes": {"data": (2, 1, 28, 28)}}),
    "quick": (nets.DATA / "nets" / "cifar10_quick_b4.prototxt", {}),
}
RULES = {
    "SGD": "momentum: 0.9 weight_decay: 0.01",
    "Nesterov": "momentum: 0.9 clip_gradients: 1",
    "AdaGrad": 'weight_decay: 0.01 regularization_type: "L1"',
    "RMSProp": "rms_decay: 0.9",
    "AdaDelta": "momentum: 0.9 delta: 1e-6",
    "Adam": "momentum: 0.9 momentum2: 0.999",
}


def arrays(counts: dict[tuple[str, int], int]) -> dict[tuple[str, int], int]:
    return {key: count for key, count in counts.items() if key[1] > SCALAR}


def test_the_counter_counts() -> None:
    with counted() as counts:
        a = np.zeros(1000)
        _ = a + 1
    assert arrays(counts) == {("?", 8000): 2}


@pytest.mark.parametrize(
    ("name", "phase", "reuse"),
    [("every", "TRAIN", False), ("every", "TRAIN", True), ("every", "TEST", True), ("lenet", "TRAIN", True),
     ("quick", "TRAIN", False)],
)  # fmt: skip
def test_passes_allocate_nothing(name: str, phase: str, reuse: bool) -> None:
    text, how = NETS[name]
    net = Net(text, phase, reuse=reuse, **how)
    if phase == "TEST" and "batch_norm" in str(text):
        net.params["bn"][2].data = np.ones(1)
    given = nets.feed(net)

    def step() -> None:
        net.forward_only(**given)
        if phase == "TRAIN":
            net.clear_param_diffs()
            net.backward_only()

    for _ in range(2):
        step()
    with counted() as counts:
        for _ in range(STEPS):
            step()
    assert arrays(counts) == {}
    assert sum(counts.values()) % STEPS == 0  # of scalars, too, every step takes the same


def check_steps(solver: Solver, given: Any) -> None:
    """After two steps, many more allocate no array."""
    for _ in range(2):
        solver.step_on(given)
    with counted() as counts:
        for _ in range(STEPS):
            solver.step_on(given)
    assert arrays(counts) == {}


@pytest.mark.parametrize("rule", RULES)
def test_updates_allocate_nothing(rule: str) -> None:
    text = f'base_lr: 0.001 lr_policy: "inv" gamma: 0.001 power: 0.75 type: "{rule}" {RULES[rule]}\n'
    net = Net(LENET, "TRAIN", input_shapes={"data": (1, 1, 28, 28)})
    solver = Solver(text, net=net, backend="numpy")
    check_steps(solver, nets.feed(net))


def test_every_layer_that_is_compared_with_caffe_allocates_nothing() -> None:
    """Not even an array of a value a channel."""
    found: dict[str, set[tuple[str, int]]] = {}
    for case in test_layers.CASES:
        net, golden = test_layers.load(case, "compiled")
        given = {name: golden[f"in_{name}"] for name in net.inputs}
        diffs = {key[5:]: np.asarray(golden[key], np.float32) for key in golden if key.startswith("dout_")}

        def step(net: Net = net, given: Any = given, diffs: Any = diffs) -> None:
            net.forward_only(**given)
            if diffs:
                for name, diff in diffs.items():
                    net.blobs[name].diff = diff
                net.clear_param_diffs()
                net.backward_only()

        for _ in range(2):
            step()
        with counted() as counts:
            for _ in range(2):
                step()
        if larger := {key for key in counts if key[1] > 16}:
            found[case] = larger
    assert found == {}


@pytest.mark.parametrize("name", ["every", "lenet"])
@pytest.mark.parametrize("scale", ["dynamic", 1024])
def test_steps_in_float16_allocate_nothing(name: str, scale: Any) -> None:
    """With the scale growing, and with steps that are skipped: what they put back is kept in memory of their own."""
    text, how = NETS[name]
    net = Net(text, "TRAIN", reuse=True, precision="fp16", **how)
    solver = Solver(
        'base_lr: 0.0001 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.01\n',
        net=net, backend="numpy", loss_scale=LossScale.of(scale, start=2.0**15, growth=7),
    )  # fmt: skip
    given = nets.feed(net)
    wrong = {key: np.full_like(value, np.nan) if value.ndim > 1 else value for key, value in given.items()}
    for _ in range(20):
        solver.step_on(given)
    assert solver.scaler is not None
    solver.step_on(wrong)
    with counted() as counts:
        for step in range(STEPS):
            solver.step_on(wrong if step == STEPS // 2 else given)
    assert solver.scaler.loss_scale.skipped
    assert arrays(counts) == {}


def test_a_step_of_several_batches_with_tests_between_allocates_nothing() -> None:
    text = 'base_lr: 0.001 lr_policy: "fixed" momentum: 0.9 iter_size: 3 test_iter: 2 test_interval: 10\n'
    shapes = {"data": (2, 1, 28, 28)}
    solver = Solver(text, net=LENET, backend="numpy", input_shapes=shapes, test_input_shapes=shapes)
    given, tested = nets.feed(solver.net), nets.feed(solver.test_nets[0])

    def steps(count: int) -> None:
        for step in range(count):
            solver.step_on([given] * 3)
            if step % 10 == 0:
                solver.test(0, [tested] * 2)

    steps(2)
    with counted() as counts:
        steps(STEPS)
    assert arrays(counts) == {}


class Doubling(PythonLayer):
    """In place of the caller's arrays: what a layer of one's own allocates is its own affair, what is round it ours."""

    def setup(self, bottom: Any, top: Any) -> None: ...

    def reshape(self, bottom: Any, top: Any) -> None:
        top[0].reshape(*bottom[0].data.shape)

    def forward(self, bottom: Any, top: Any) -> None:
        np.multiply(bottom[0].data, 2, out=top[0].data)

    def backward(self, top: Any, propagate_down: Any, bottom: Any) -> None:
        np.multiply(top[0].diff, 2, out=bottom[0].diff)


def test_a_net_with_a_python_layer_allocates_nothing() -> None:
    text = nets.inputs(x=(6, 40), l=(6,)) + nets.dense("a", "x", "a", 30)
    text += nets.layer(
        "Python", "twice", ["a"], ["twice"], f'python_param {{ module: "{__name__}" layer: "Doubling" }}'
    )
    text += nets.dense("b", "twice", "b", 5) + nets.layer("SoftmaxWithLoss", "loss", ["b", "l"], ["loss"])
    net = Net(text, "TRAIN", reuse=True)
    solver = Solver('base_lr: 0.001 lr_policy: "fixed"\n', net=net, backend="numpy")
    check_steps(solver, nets.feed(net))
