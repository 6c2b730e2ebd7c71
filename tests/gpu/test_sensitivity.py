"""gpu.crosscheck --precision: each figure against nets that are made, run and compared here."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from gpu.net import Net
from gpu.sensitivity import sensitivity
from tests.gpu.nets import inputs, layer

FILL = 'inner_product_param { num_output: %d weight_filler { type: "xavier" } }'
NET = (
    inputs(x=(6, 8), l=(6,))
    + layer("InnerProduct", "a", ["x"], ["a"], FILL % 12)
    + layer("TanH", "t", ["a"], ["t"])
    + layer("Power", "small", ["t"], ["s"], "power_param { scale: 1e-6 }")
    + layer("Power", "back", ["s"], ["u"], "power_param { scale: 1e6 }")
    + layer("InnerProduct", "b", ["u"], ["b"], FILL % 3)
    + layer("SoftmaxWithLoss", "loss", ["b", "l"], ["loss"])
)
RNG = np.random.default_rng(0)
GIVEN = {"x": RNG.standard_normal((6, 8)).astype(np.float32), "l": np.array([0, 1, 2, 0, 1, 2])}


def build(precision: str, keep: Collection[str]) -> Net:
    return Net(NET, "TRAIN", seed=4, precision=precision, keep_fp32=keep)


def run(net: Net, scale: float) -> tuple[float, np.ndarray]:
    """Loss, and all gradients in one row."""
    net.loss_scale = scale
    net.clear_param_diffs()
    net.forward(**GIVEN)
    net.backward()
    return float(net.loss), np.concatenate([p.blob.diff.ravel() for p in net.learnable]).astype(np.float64) / scale


def test_every_figure() -> None:
    found = sensitivity(build, GIVEN, 0.02)
    truth = build("fp32", ())
    loss, gradient = run(truth, 1)
    assert found["loss"] == loss
    largest = max(float(np.abs(truth.blobs[name].diff).max()) for name in ("a", "t", "s", "u", "b"))
    scale = found["loss_scale"]
    assert math.log2(scale) % 1 == 0
    assert 65504 / 16 < scale * largest <= 65504 / 8
    names = [each.name for each in truth.layers]

    def change(net: Net) -> dict[str, Any]:
        its_loss, its_gradient = run(net, scale)
        apart = np.linalg.norm(its_gradient - gradient) / np.linalg.norm(gradient)
        return {"loss": pytest.approx(abs(its_loss / loss - 1), abs=1e-9), "gradient": pytest.approx(apart, rel=1e-6)}

    assert sorted(row["layer"] for row in found["layers"]) == sorted(names)
    damages = []
    for row in found["layers"]:
        alone = build("fp16", [name for name in names if name != row["layer"]])
        wanted = change(alone)
        counts = alone.precision.counts()
        assert {key: row[key] for key in ("loss", "gradient")} == wanted, row["layer"]
        assert (row["overflow"], row["lost"]) == (counts[:, 0].sum(), counts[:, 1].sum())
        damages.append(max(row["loss"], row["gradient"]))
        assert row["sensitive"] == (damages[-1] > 0.02)
    assert damages == sorted(damages, reverse=True)
    worst = found["layers"][0]
    assert (worst["layer"], worst["overflow"]) == ("small", 0)  # 1e-6 is a subnormal of float16 with few digits
    assert found["all_fp16"] == change(build("fp16", ()))
    assert found["keep_fp32"] == [row["layer"] for row in found["layers"] if row["sensitive"]] == ["small"]
    assert found["with_keep"] == change(build("fp16", ["small"]))
    assert found["enough"]


def test_small_damage_of_many_layers_adds_up() -> None:
    """The worst are kept, sensitive or not, until the rest is within the tolerance; told in the net's order."""
    first = sensitivity(build, GIVEN, 0.9)
    damage = [max(row["loss"], row["gradient"]) for row in first["layers"]]
    assert not first["keep_fp32"]
    order = [row["layer"] for row in first["layers"]]
    names = [each.name for each in build("fp32", ()).layers]
    tolerance = damage[1] * 1.0001  # one layer is above, the others together as well
    found = sensitivity(build, GIVEN, tolerance)
    kept = found["keep_fp32"]
    assert [row["layer"] for row in found["layers"] if row["sensitive"]] == order[:1]
    assert kept == sorted(order[: len(kept)], key=names.index)
    assert len(kept) > 1
    assert found["enough"]
    assert max(found["with_keep"].values()) <= tolerance
    loss, gradient = run(build("fp32", ()), 1)
    fewer = run(build("fp16", order[: len(kept) - 1]), found["loss_scale"])
    off = np.linalg.norm(fewer[1] - gradient) / np.linalg.norm(gradient)
    assert max(off, abs(fewer[0] / loss - 1)) > tolerance, "one layer fewer was not enough"


def test_not_enough_is_said() -> None:
    """Every layer is kept in the end, and the net is float32: enough, whatever was asked."""
    found = sensitivity(build, GIVEN, 1e-12)
    assert found["enough"] == (max(found["with_keep"].values()) <= 1e-12)
    assert len(found["keep_fp32"]) > 2
