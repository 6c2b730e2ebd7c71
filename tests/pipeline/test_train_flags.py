"""The command line of pipeline.train: what is short for a key is that key."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

from pipeline import train

DATABASE = Path(__file__).parents[1] / "data" / "db" / "mnist_test_lmdb"


@pytest.mark.parametrize("flags", [["--log-level", "debug"], ["--log-level=debug"], ["--run.log_level", "debug"]])
def test_the_log_level_has_a_short_flag(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("pipeline.run.run", lambda config, address: seen.append(config) or 0)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    feeds = ["--data.train.batch=4", "--device.backend=emulated", "--run.iterations=1"]
    assert train.main([f"--data.train.source={DATABASE}", *feeds, *flags]) == 0
    assert seen[0].run.log_level == "debug"
