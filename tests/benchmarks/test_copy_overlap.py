"""The benchmark of copies ahead of their steps, run small: it must go on working."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import copy_overlap


def test_it_measures_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--engine",
        "inline",
        "--steps",
        "12",
        "--rounds",
        "1",
        "--copies",
        "4",
        "--out",
        str(tmp_path / "out.json"),
    ]
    assert copy_overlap.main(flags) == 0
    results = json.loads((tmp_path / "out.json").read_text())
    assert json.loads(capsys.readouterr().out) == results
    found = results["copies"]["4 ms"]
    assert found["speed_up_limit"] == 1.2
    for staging in (1, 2):
        assert found[f"staging {staging}"]["step_ms"] >= copy_overlap.STEP_MS
        assert found[f"staging {staging}"]["exposed_ms"] >= 4, "an inline feed has nothing ready before it is asked"
