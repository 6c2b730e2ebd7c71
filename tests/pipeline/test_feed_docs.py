"""Everything that docs/feed.md shows is run, in its order."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from pipeline import engines
from pipeline.engines import InlineEngine

PAGE = Path(__file__).parents[2] / "docs" / "feed.md"
CROPS = Path("tests/data/db/crops96_raw_40x48_lmdb").resolve()


def test_what_the_page_shows_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 9
    for name in ("train_lmdb", "test_lmdb"):
        shutil.copytree(CROPS, tmp_path / "data" / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(engines, "RayEngine", InlineEngine)  # the same bytes; a start of Ray is other tests' business
    names = {"__name__": "__main__"}
    for block in blocks:
        if block.startswith("# augment.py"):
            Path("augment.py").write_text(block)
            continue
        if "import torch" in block and importlib.util.find_spec("torch") is None:
            continue
        exec(compile(block, str(PAGE), "exec"), names)
    monkeypatch.delitem(sys.modules, "augment")
    printed = capsys.readouterr().out
    assert "2 steps an epoch, 5 in all" in printed
    assert "5 steps: 5" in printed
    assert "<Batch of step 0, epoch 0: float32[32, 3, 40, 48], int32[32]>" in printed
    assert "'restarts': 0" in printed
    assert not [name for name in os.listdir() if name not in ("data", "augment.py", "__pycache__")]
