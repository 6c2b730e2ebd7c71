"""A step of training allocates nothing: NumPy's allocations are counted, one by one, over 100 steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu.net import Net
from gpu.solver import Solver
from tests.gpu import nets
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


@pytest.mark.parametrize("rule", RULES)
def test_updates_allocate_nothing(rule: str) -> None:
    text = f'base_lr: 0.001 lr_policy: "inv" gamma: 0.001 power: 0.75 type: "{rule}" {RULES[rule]}\n'
    net = Net(LENET, "TRAIN", input_shapes={"data": (1, 1, 28, 28)})
    solver = Solver(text, net=net, backend="numpy")
    given = nets.feed(net)
    for _ in range(2):
        solver.step_on(given)
    with counted() as counts:
        for _ in range(STEPS):
            solver.step_on(given)
    assert arrays(counts) == {}
