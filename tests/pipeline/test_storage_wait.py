"""What a job's report says about slow storage: apart from reading and decoding, of a cold file and of a slow one."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets.lmdb_source import LmdbSource
from pipeline import run as runs
from pipeline.native import Native
from pipeline.settings import load
from profiler import osread
from tests.pipeline.build import picture, raw, write_lmdb

pytestmark = pytest.mark.alone


def slow_function(image: np.ndarray, label: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Sleeps once a batch of four: a user's waiting is no storage."""
    if label % 4 == 0:
        time.sleep(0.02)
    return image, label


@pytest.fixture
def database(tmp_path: Path) -> str:
    return write_lmdb(tmp_path / "db", [raw(picture(i, (3, 64, 64)), i) for i in range(400)])


def report_of(tmp_path: Path, database: str, **more: Any) -> dict[str, Any]:
    flags = {
        "data.train.source": database, "data.train.batch": 4, "run.iterations": 40, "run.log_level": "error",
        "run.folder": str(tmp_path / "run"), "feed.engine": "inline", "device.backend": "emulated",
        "device.step_ms": 0, "data.order.shuffle": "none", **more,
    }  # fmt: skip
    assert runs.run(load(None, flags)) == 0
    return dict(json.loads((tmp_path / "run" / "report.json").read_text()))


@pytest.mark.parametrize("way", ["native", "general"])
def test_reads_that_block_are_storage(tmp_path: Path, database: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = "locate" if way == "native" else "read_many"
    real = getattr(LmdbSource, step)

    def slow(self: LmdbSource, indices: Any) -> Any:
        time.sleep(0.02)
        return real(self, indices)

    monkeypatch.setattr(LmdbSource, step, slow)
    if way == "general":
        monkeypatch.setattr(Native, "of", lambda *_: None)
    found = report_of(tmp_path, database)
    if not found["coverage"]["run_queue"]:
        pytest.skip("this kernel keeps no scheduler statistics")
    made = found["making"]["ms_per_batch"]
    assert made["storage"] > 5 * (made["read"] + made["decode"])
    storage = [cause for cause in found["stalls"] if cause["where"] == "storage"]
    assert sum(cause["seconds"] for cause in storage) > 0.3 * made["storage"] * found["making"]["batches"] / 1e3
    assert "seen" in storage[0]["evidence"]
    (trainer,) = found["memory"]["processes"]
    assert trainer["name"] == "trainer"
    assert min(trainer["peak"].values()) > 0


def test_a_function_that_sleeps_is_not(tmp_path: Path, database: str) -> None:
    function = "tests.pipeline.test_storage_wait:slow_function"
    made = report_of(tmp_path, database, **{"data.transform.python": function})["making"]["ms_per_batch"]
    assert made["function"] > 3 * made["storage"]


def test_a_cold_database_is_told_from_a_warm_one(tmp_path: Path, database: str) -> None:
    path = os.path.join(database, "data.mdb")
    fd = os.open(path, os.O_RDONLY)  # mapped by nobody: mapped pages stay
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    resident = osread.resident_bytes(path)
    if isinstance(resident, osread.Missing) or resident > os.path.getsize(path) // 10:
        pytest.skip("this file system keeps its pages in memory")
    cold = report_of(tmp_path / "cold", database, **{"data.readahead": "off", "run.folder": str(tmp_path / "cold/run")})
    warm = report_of(tmp_path / "warm", database, **{"data.readahead": "off", "run.folder": str(tmp_path / "warm/run")})
    assert cold["making"]["storage_bytes"] > 100 * 12_288
    assert warm["making"]["storage_bytes"] == 0
