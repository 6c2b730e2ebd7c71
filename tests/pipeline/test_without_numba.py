"""A process makes batches without numba where an earlier one has compiled the kernels, and they are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from datasets import datum
from datasets.writer import WRITERS
from pipeline import Feed
from profiler import jit

ROOT = Path(__file__).parents[2]
OPTIONS = {"batch": 16, "shuffle": True, "crop": 9, "mirror": True, "mean_value": [3.0], "fingerprints": "step"}
CHILD = """
import sys
from pipeline import Feed
with Feed(sys.argv[1], **{options}) as feed:
    print(*(batch.hashes["fill"] for batch, _ in zip(feed, range(3))), "numba" in sys.modules)
"""


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_a_feed_of_a_later_process(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "db"
    folder.mkdir()
    writer = WRITERS[backend](folder)
    for number in range(70):
        pixels = bytes((number * 7 + place) % 251 for place in range(3 * 12 * 12))
        writer.put(b"%08d" % number, datum.serialize(channels=3, height=12, width=12, data=pixels, label=number))
    writer.close()
    with monkeypatch.context() as patched, Feed(str(folder), **OPTIONS) as feed:  # type: ignore[arg-type]
        patched.setattr(jit.Kernel, "__call__", lambda self, *args: self.dispatcher(*args))
        wanted = [batch.hashes["fill"] for batch, _ in zip(feed, range(3), strict=False)]
    for _ in range(2):  # the first one compiles, where nobody has yet
        child = subprocess.run(
            [sys.executable, "-c", CHILD.format(options=OPTIONS), str(folder)], text=True, capture_output=True,
            check=False, timeout=240, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert child.returncode == 0, child.stderr
        *found, numba = child.stdout.split()
        assert [int(value) for value in found] == wanted
    assert numba == "False"
