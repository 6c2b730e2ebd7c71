"""Batches through a map of the database: the same bytes as by calls, told errors where the file is cut, no signal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from datasets.errors import DatasetTruncated
from datasets.guarded_map import GuardedMap
from pipeline import Feed, native_kernels, warm_map
from pipeline.warm_map import WarmMap

SOURCE = "tests/data/db/crops96_raw_40x48_lmdb"
OPTIONS: dict[str, Any] = {"batch": 7, "shuffle": True, "seed": 3, "crop": 24, "mirror": True, "fingerprints": "step"}


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes from storage, whatever else this process has to read meanwhile."""
    nothing = SimpleNamespace(ru_inblock=0, ru_majflt=0)
    monkeypatch.setattr(warm_map, "resource", SimpleNamespace(getrusage=lambda _: nothing))


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes that were mapped, of each batch that is made."""
    seen: list[int] = []
    make = native_kernels.make

    def told(fd: int, base: np.uint64, nbytes: int, *rest: Any) -> Any:
        if len(rest[0]):  # not the call that loads the kernel
            seen.append(nbytes)
        return make(fd, base, nbytes, *rest)

    monkeypatch.setattr(native_kernels, "make", told)
    return seen


def take(feed: Feed, steps: int) -> list[bytes]:
    return [(batch := next(feed)).data.tobytes() + batch.labels.tobytes() for _ in range(steps)]


def test_the_same_bytes_through_the_map_and_by_calls(mapped: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with Feed(SOURCE, **OPTIONS) as feed:
        found = take(feed, 30)
    assert set(mapped[1:]) == {os.path.getsize(f"{SOURCE}/data.mdb")}, "from the second batch on, since it is in memory"
    del mapped[:]
    monkeypatch.setattr(GuardedMap, "of", staticmethod(lambda fd, nbytes: None))
    with Feed(SOURCE, **OPTIONS) as feed:
        assert take(feed, 30) == found
    assert set(mapped) == {0}


def test_records_behind_what_is_mapped_are_read_by_calls(mapped: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with Feed(SOURCE, **OPTIONS) as feed:
        found = take(feed, 20)
    del mapped[:]
    of = GuardedMap.of
    monkeypatch.setattr(GuardedMap, "of", staticmethod(lambda fd, nbytes: of(fd, 200_000)))
    with Feed(SOURCE, **OPTIONS) as feed:
        assert take(feed, 20) == found
    assert set(mapped[1:]) == {200_000}


def test_a_file_that_is_cut_under_the_map_is_told(mapped: list[int], tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "db")
    with Feed(str(tmp_path / "db"), **OPTIONS) as feed:
        take(feed, 3)
        assert mapped[-1] > 0
        os.truncate(tmp_path / "db" / "data.mdb", 5 * 4096)
        with pytest.raises(DatasetTruncated, match="shorter"):
            take(feed, 40)


def test_a_fault_in_the_middle_of_a_batch_gives_no_batch(
    mapped: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut between the look at the file's size and the reads, and whole again before the next look."""
    shutil.copytree(SOURCE, tmp_path / "db")
    path = tmp_path / "db" / "data.mdb"
    content = path.read_bytes()
    with Feed(str(tmp_path / "db"), **OPTIONS) as feed:
        found = take(feed, 20)
    with Feed(str(tmp_path / "db"), **OPTIONS) as feed:
        assert take(feed, 3) == found[:3]
        make = native_kernels.make
        cut: list[int] = []

        def while_cut(*given: Any) -> Any:
            if given[2] and not cut:
                os.truncate(path, 5 * 4096)
            taken = make(*given)
            if given[2] and not cut:
                cut.append(taken)
                path.write_bytes(content)
            return taken

        monkeypatch.setattr(native_kernels, "make", while_cut)
        assert take(feed, 17) == found[3:20]
        assert cut
        assert mapped[-1] == 0, "by calls from then on"


@pytest.mark.parametrize("counter", ["ru_inblock", "ru_majflt"])
def test_what_comes_from_storage_is_read_by_calls(
    mapped: list[int], counter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = SimpleNamespace(ru_inblock=0, ru_majflt=0)
    readings: list[int] = []

    def usage(_: int) -> SimpleNamespace:
        readings.append(1)
        if 4 <= len(readings) // 2 < 8:
            setattr(cold, counter, getattr(cold, counter) + 1)
        return SimpleNamespace(**vars(cold))

    monkeypatch.setattr(warm_map.resource, "getrusage", usage)
    with Feed(SOURCE, readahead=True, **OPTIONS) as feed:
        take(feed, 14)
    warm = [nbytes > 0 for nbytes in mapped]
    assert warm[0] is False
    assert True in warm[1:4]
    assert warm[5:8] == [False] * 3
    assert warm[-1] is True


def test_a_file_that_is_opened_anew_is_mapped_anew(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    opened = []
    warm = WarmMap()
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number + 1]) * 8192)
        file = SimpleNamespace(fd=os.open(path, os.O_RDONLY), size=8192)
        opened.append(file)
        with warm.of(file) as (_, nbytes):  # type: ignore[arg-type]
            assert nbytes == 0
        with warm.of(file) as (base, nbytes):  # type: ignore[arg-type]
            import ctypes

            assert nbytes == 8192
            assert ctypes.string_at(int(base), 1) == bytes([number + 1])
    for file in opened:
        os.close(file.fd)
