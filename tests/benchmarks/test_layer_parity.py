"""How near each type of layer is to Caffe: limits, committed figures, and what the docs say of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import layer_parity
from benchmarks.gpu_nets import Amount, cases, load

ROOT = Path(__file__).parents[2]
TYPES = json.loads((ROOT / "benchmarks" / "layer_parity.json").read_text(encoding="utf-8"))["types"]


def test_the_committed_figures_are_of_every_type_and_within_todays_limits() -> None:
    assert set(TYPES) == set(layer_parity.LIMITS)
    for name, limit in layer_parity.LIMITS.items():
        row = TYPES[name]
        assert (row["limit"], row["limit_of_gradients"], row["why"]) == (limit.outputs, limit.gradients, limit.why)
        assert max(row["outputs"], row["statistics"] or 0) <= limit.outputs <= 1e-5
        assert (row["gradients"] is None) == (limit.gradients is None)
        if limit.gradients is not None:
            assert row["gradients"] <= limit.gradients <= 1e-5
    assert sum(row["files"] for row in TYPES.values()) == len(cases(Amount())) - 1  # Dropout's random masks


def test_the_docs_have_a_line_for_each_type_with_its_limits() -> None:
    assert layer_parity.table(TYPES) in (ROOT / "docs" / "nets.md").read_text(encoding="utf-8")


def test_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["bn_train", "elt_max", "pool_max_k2s2", "pool_ave_k2s2", "relu", "relu_neg", layer_parity.RANDOM]
    monkeypatch.setattr(layer_parity, "cases", lambda amount: few)
    assert layer_parity.main(["--out", str(tmp_path / "out.json")]) == 0
    types = json.loads((tmp_path / "out.json").read_text())["types"]
    assert {name: row["files"] for name, row in types.items()} == {
        "BatchNorm": 1, "Eltwise MAX": 1, "Pooling AVE": 1, "Pooling MAX": 1, "ReLU": 2,
    }  # fmt: skip
    assert types["BatchNorm"]["statistics"] is not None
    assert types["ReLU"]["statistics"] is None
    assert capsys.readouterr().out == layer_parity.table(types) + "\n"


@pytest.mark.parametrize("key", ["out_y", "din_x", "dp0"])
def test_an_array_that_is_off_shows_by_as_much(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = load("conv_3x3")
    monkeypatch.setattr(layer_parity, "load", lambda name: golden | {key: golden[key] * np.float32(1 + 1e-3)})
    row = layer_parity.measure(["conv_3x3"])["Convolution"]
    part, other = ("outputs", "gradients") if key == "out_y" else ("gradients", "outputs")
    assert row[part] == pytest.approx(1e-3, rel=0.02)
    assert row[other] < 1e-6


def test_what_cannot_be_compared_is_beyond_every_limit() -> None:
    ones = np.ones(3, np.float32)
    assert layer_parity.relative(ones, ones) == 0
    assert layer_parity.relative(ones, np.ones((3, 1), np.float32)) == np.inf
    assert layer_parity.relative(ones * np.nan, ones) == np.inf
