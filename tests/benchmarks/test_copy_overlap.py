"""The benchmark of copies ahead of their steps, run small: it must go on working."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks import copy_overlap
from pipeline.run import run
from pipeline.settings import load


def here(command: list[str], **options: Any) -> None:
    """Run the job in this process: a new interpreter for each is not what is tested."""
    assert command[:3] == [sys.executable, "-m", "pipeline.train"]
    assert options["check"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert run(load(None, command[3:])) == 0


@pytest.mark.long
def test_it_measures_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_overlap, "subprocess", types.SimpleNamespace(run=here))
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
