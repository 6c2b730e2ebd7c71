"""Where rules of gpu.lint begin and end: what is found, and what looks like it and is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.lint.check import check
from tests.gpu.nets import inputs, layer

FILL = 'weight_filler { type: "xavier" }'
LOSS = layer("InnerProduct", "end", ["y"], ["end"], f"inner_product_param {{ num_output: 3 {FILL} }}") + layer(
    "SoftmaxWithLoss", "loss", ["end", "l"], ["loss"]
)
STILL = "param { lr_mult: 0 }"
UP = 'convolution_param { num_output: 4 kernel_size: 4 stride: 2 group: %d weight_filler { type: "bilinear" } }'
IP = "inner_product_param { num_output: 4 %s }"


def found(tmp_path: Path, body: str, solver: str | None = None) -> set[tuple[str, str | None]]:
    net = tmp_path / "net.prototxt"
    net.write_text(inputs(x=(2, 4, 6, 6), l=(2,)) + body + LOSS)
    given = None
    if solver is not None:
        given = tmp_path / "solver.prototxt"
        given.write_text(f'net: "{net}" base_lr: 0.1 lr_policy: "fixed" max_iter: 9 {solver}')
    return {(finding.rule, finding.layer) for finding in check(net, given)}


@pytest.mark.parametrize(
    ("body", "rule", "there"),
    [
        (layer("InnerProduct", "a", ["x"], ["y"], IP % ""), "implicit-filler", True),
        (layer("InnerProduct", "a", ["x"], ["y"], f"{STILL} {IP % ''}"), "implicit-filler", False),
        (layer("InnerProduct", "a", ["x"], ["y"], IP % "weight_filler { value: 0 }"), "zero-weights", True),
        (layer("InnerProduct", "a", ["x"], ["y"], f"{STILL} {IP % 'weight_filler { value: 0 }'}"), "zero-weights",
         False),
        (layer("InnerProduct", "o", ["x"], ["o"], f'param {{ name: "w" }} {IP % FILL}')
         + layer("InnerProduct", "a", ["x"], ["a"], f'param {{ name: "w" }} {IP % ""}')
         + layer("Eltwise", "s", ["o", "a"], ["y"]), "implicit-filler", False),
        (layer("Deconvolution", "a", ["x"], ["y"], UP % 1), "bilinear-group", True),
        (layer("Deconvolution", "a", ["x"], ["y"], UP % 2), "bilinear-group", True),
        (layer("Deconvolution", "a", ["x"], ["y"], UP % 4), "bilinear-group", False),
        (layer("ReLU", "r", ["x"], ["y"]) + layer("Dropout", "a", ["y"], ["y"]), "in-place-overwrites", False),
        (layer("ReLU", "r", ["x"], ["y"], "relu_param { negative_slope: 0.1 }")
         + layer("Dropout", "a", ["y"], ["y"]), "in-place-overwrites", True),
    ],
)  # fmt: skip
def test_a_rule_begins_and_ends(tmp_path: Path, body: str, rule: str, there: bool) -> None:
    assert ((rule, "a") in found(tmp_path, body)) == there


@pytest.mark.parametrize(("solver", "there"), [("", True), ("random_seed: -1", True), ("random_seed: 0", False)])
def test_a_seed_of_0_is_one(tmp_path: Path, solver: str, there: bool) -> None:
    body = layer("InnerProduct", "a", ["x"], ["y"], IP % FILL)
    assert (("missing-seed", None) in found(tmp_path, body, solver)) == there
