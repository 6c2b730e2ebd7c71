"""Case A11: data sets larger than the memory that a job may use. What looks like a leak is page cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import plyvel
import pytest

from datasets import datum
from tests.pipeline.limited import Limited, memory_limit

LIMIT = 256 << 20
RECORDS, SHAPE = 1664, (3, 256, 256)  # 312 MiB
BATCH = 16
STEPS = RECORDS * 5 // 4 // BATCH  # more than an epoch: what was read once comes again

JOB = """
import json, sys
from pipeline.run import run
from pipeline.settings import load
sys.exit(run(load(None, json.loads(sys.argv[1]))))
"""
HOG = """
import mmap, sys
block = mmap.mmap(-1, int(sys.argv[1]), mmap.MAP_PRIVATE)
for at in range(0, len(block), 4096):
    block[at] = 1
"""


def values() -> Iterator[tuple[bytes, bytes]]:
    pixels = bytearray(os.urandom(SHAPE[0] * SHAPE[1] * SHAPE[2]))
    for index in range(RECORDS):
        pixels[:8] = index.to_bytes(8, "little")
        record = datum.serialize(
            channels=SHAPE[0], height=SHAPE[1], width=SHAPE[2], data=bytes(pixels), label=index % 10
        )
        yield b"%08d" % index, record


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("large")
    with (
        lmdb.open(str(folder / "lmdb"), map_size=1 << 30, lock=False, sync=False) as env,
        env.begin(write=True) as txn,
        plyvel.DB(str(folder / "leveldb"), create_if_missing=True, compression=None) as db,
    ):
        for key, value in values():
            txn.put(key, value)
            db.put(key, value)
    return {name: folder / name for name in ("lmdb", "leveldb")}


def forget(folder: Path) -> int:
    """Drop the files' pages from memory, so that whoever reads them pays for them. Size in bytes."""
    total = 0
    for file in folder.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        total += os.fstat(fd).st_size
        os.close(fd)
    return total


def report(limited: Limited | None, source: Path, folder: Path, **more: Any) -> dict[str, Any]:
    """Of a job that reads ``source``, in that group or without a limit."""
    flags = {
        "data.train.source": str(source), "data.train.batch": BATCH, "run.iterations": STEPS,
        "data.transform.crop": 32, "feed.engine": "inline", "device.backend": "emulated", "device.step_ms": 0,
        "run.log_level": "error", "run.folder": str(folder), **more,
    }  # fmt: skip
    arguments = ["-c", JOB, json.dumps(flags)]
    if limited is None:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    else:
        done = limited.run(*arguments)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return dict(json.loads((folder / "report.json").read_text()))


def test_a_database_is_no_memory_of_the_process_that_reads_it(databases: dict[str, Path], tmp_path: Path) -> None:
    """LevelDB's own library maps its tables, and resident memory grows to their size; plain reads leave it alone."""
    size = sum(file.stat().st_size for file in databases["leveldb"].iterdir())
    found = report(None, databases["leveldb"], tmp_path / "run", **{"data.order.shuffle": "full"})
    (trainer,) = found["memory"]["processes"]
    peak = trainer["peak"]
    assert peak["anonymous"] + peak["file"] + peak["shared"] < size
    assert peak["anonymous"] < LIMIT < size


@pytest.mark.parametrize(
    ("kind", "shuffle"),
    [
        ("lmdb", "full"),
        pytest.param("lmdb", "none", marks=pytest.mark.long),
        pytest.param("leveldb", "full", marks=pytest.mark.long),
    ],
)
def test_a_data_set_larger_than_the_memory_allowed(
    databases: dict[str, Path], tmp_path: Path, kind: str, shuffle: str
) -> None:
    size = forget(databases[kind])
    assert size > 1.2 * LIMIT
    with memory_limit(LIMIT) as limited:
        found = report(limited, databases[kind], tmp_path / "run", **{"data.order.shuffle": shuffle})
        assert limited.killed() == 0
        assert 0.9 * LIMIT < limited.peak() <= LIMIT, "page cache takes what there is"
    (trainer,) = found["memory"]["processes"]
    peak = trainer["peak"]
    assert 0 < peak["anonymous"] + peak["shared"] < LIMIT
    assert peak["file"] > 0
    made = found["making"]
    # What does not fit is read again, and shows as bytes and as time of storage, not of decoding.
    assert made["storage_bytes"] > size
    assert made["ms_per_batch"]["storage"] > 0
    assert made["ms_per_batch"]["decode"] < made["ms_per_batch"]["storage"] + made["ms_per_batch"]["read"]


def test_the_limit_is_one(tmp_path: Path) -> None:
    """What the tests above would have met with a copy of the data set in memory."""
    with memory_limit(LIMIT) as limited:
        assert limited.run("-c", HOG, str(LIMIT // 2)).returncode == 0
        assert limited.killed() == 0
        assert limited.run("-c", HOG, str(LIMIT * 5 // 4)).returncode == -9
        assert limited.killed() == 1
