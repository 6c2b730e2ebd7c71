"""Records of a shuffled LMDB are announced while they come from storage, once each, and never to other bytes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from datasets.guarded_map import GuardedMap
from datasets.lmdb_source import LmdbSource
from datasets.source import open_source
from pipeline import readahead
from pipeline.feed import Feed
from pipeline.maker import stream_of
from pipeline.readahead import ReadAhead
from pipeline.spec import FeedSpec, TransformSpec
from profiler import osread, store
from profiler.errors import StallscopeError
from profiler.events import Stage
from profiler.recorder import Recorder
from tests.pipeline.build import encoded, picture, raw, write_leveldb, write_lmdb

SHAPE, RECORDS, BATCH = (3, 44, 40), 120, 10


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_lmdb(tmp_path_factory.mktemp("large") / "db", [raw(picture(i, SHAPE), i) for i in range(RECORDS)])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that were announced, in order."""
    ranges: list[tuple[int, int]] = []
    original = os.posix_fadvise

    def note(fd: int, start: int, size: int, advice: int) -> None:
        if advice == os.POSIX_FADV_WILLNEED:
            ranges.append((start, size))
        original(fd, start, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", note)
    return ranges


def spec(source: str, **more: Any) -> FeedSpec:
    settings = {"shuffle": "full", "seed": 2, "stop_step": 9, "transform": TransformSpec(crop=30, mirror=True), **more}
    return FeedSpec(source, BATCH, fingerprints="step", **settings)  # type: ignore[arg-type]


def blocks(monkeypatch: pytest.MonkeyPatch, readings: list[int]) -> None:
    """What the system says was read from storage, at each batch."""
    left = iter(readings)
    fake = SimpleNamespace(getrusage=lambda _: SimpleNamespace(ru_inblock=next(left)))
    monkeypatch.setattr(readahead, "resource", fake)


def places(source: str, asked: FeedSpec, *steps: int) -> list[tuple[int, int]]:
    with LmdbSource(source) as opened:
        stream = stream_of(asked, len(opened))
        found = [opened.locate(stream.at(asked.place(step)).records) for step in steps]
    return [pair for one in found for pair in zip(one.offsets.tolist(), one.lengths.tolist(), strict=True)]


def test_this_batch_and_the_next_are_announced_once_as_long_as_blocks_are_read(
    large: str, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 3 * 44 * 40 + 15  # a record, about
    cold = 10 * size // 512
    # Batches 0 and 1 come from storage, 2 and 3 do not (and a record or a block is not enough), 4 does, then none.
    blocks(monkeypatch, [7, 7 + cold, 7 + 2 * cold, 8 + 2 * cold, 8 + 2 * cold, 9 + 3 * cold, *[9 + 3 * cold] * 3])
    asked = spec(large)
    with Feed.from_spec(asked) as feed:
        list(feed)
    assert told == places(large, asked, 0, 1, 2, 3, 5, 6)


def test_the_last_batch_has_none_after_it(
    large: str, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks(monkeypatch, [10_000 * i for i in range(3)])
    asked = spec(large, stop_step=3)
    with Feed.from_spec(asked) as feed:
        list(feed)
    assert told == places(large, asked, 0, 1, 2)


@pytest.mark.parametrize("more", [
    {"shuffle": "none"}, {"readahead": False}, {"readahead": True}, {"shuffle": "none", "readahead": False},
], ids=str)  # fmt: skip
def test_it_is_left_to_the_kernel_where_that_reads_ahead_or_the_job_says_so(
    large: str, told: list[tuple[int, int]], more: dict[str, Any]
) -> None:
    with Feed.from_spec(spec(large, **more)) as feed:
        list(feed)
    assert told == []


@pytest.mark.parametrize("kind", ["raw", "jpeg"])
def test_bytes_do_not_depend_on_it(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = raw if kind == "raw" else encoded
    path = write_lmdb(tmp_path / "db", [make(picture(i, SHAPE), i) for i in range(40)])
    with Feed.from_spec(spec(path, readahead=False)) as feed:
        without = [batch.hashes for batch in feed]
    blocks(monkeypatch, [1_000_000 * i for i in range(9)])
    with Feed.from_spec(spec(path)) as feed:
        assert [batch.hashes for batch in feed] == without


def test_small_records_and_other_databases_are_not_announced(tmp_path: Path, told: list[tuple[int, int]]) -> None:
    small = [raw(picture(i, (1, 20, 20)), i) for i in range(40)]
    for path in (write_lmdb(tmp_path / "lmdb", small), write_leveldb(tmp_path / "leveldb", small)):
        with Feed.from_spec(spec(path, transform=TransformSpec())) as feed:
            list(feed)
    with open_source(str(tmp_path / "leveldb")) as source:
        assert ReadAhead.of(spec(str(tmp_path / "leveldb")), source, stream_of(spec("x"), 40)) is None
    assert told == []


def test_a_file_in_memory_is_announced_for_the_first_batch_alone(large: str, told: list[tuple[int, int]]) -> None:
    Path(large, "data.mdb").read_bytes()
    asked = spec(large)
    for _ in range(2):  # the first one may load code from the disk
        told.clear()
        with Feed.from_spec(asked) as feed:
            list(feed)
    assert told == places(large, asked, 0, 1)


def test_what_cannot_be_located_is_told_by_the_batch_that_needs_it(large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def announce(self: LmdbSource, indices: np.ndarray) -> int:
        raise StallscopeError("no such page")

    monkeypatch.setattr(LmdbSource, "announce", announce)
    with Feed.from_spec(spec(large)) as feed:
        assert len(list(feed)) == 9


def test_a_cold_file_is_announced_batch_after_batch(
    large: str, told: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The pages of a map cannot be dropped, and a fault in one brings in its neighbours: half of so small a file.
    monkeypatch.setattr(GuardedMap, "of", staticmethod(lambda fd, nbytes: None))
    path = os.path.join(large, "data.mdb")
    with Recorder.open(tmp_path, "trainer", "trainer") as recorder, Feed(spec(large), recorder=recorder) as feed:
        next(feed)
        told.clear()
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        resident = osread.resident_bytes(path)
        if isinstance(resident, osread.Missing) or resident > os.path.getsize(path) // 10:
            pytest.skip("this file system keeps its pages in memory")
        for _ in feed:
            pass
    wanted = places(large, spec(large), *range(3, 9))
    assert set(told) >= set(wanted)  # batch 1 shows it, so 2 is announced, and all after it
    assert len(told) <= 2 * len(set(told))
    rows = store.load_run(tmp_path).events.to_pylist()
    reads = [row for row in rows if row["stage"] == Stage.READ]
    assert sum(row["inblock"] for row in reads) * 512 >= sum(size for _, size in set(wanted)) // 2
