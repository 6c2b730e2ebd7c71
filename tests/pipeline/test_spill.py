"""Case E1: what Ray writes to disk for want of room in its object stores is noticed, and a full disk ends the feed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import spill
from pipeline.spill import Counters, StoreFull
from profiler import report, store
from profiler.events import Stage
from profiler.recorder import Recorder


def test_counters_become_events_and_one_note_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mib, second = 1 << 20, 10**9
    times = iter(range(100 * second, 200 * second, second // 2))
    monkeypatch.setattr(spill.time, "monotonic_ns", lambda: next(times))

    def reader(*found: Counters | Exception) -> Any:
        left: Iterator[Counters | Exception] = iter(found)

        def read() -> Counters:
            now = next(left)
            if isinstance(now, Exception):
                raise now
            return now

        return read

    with Recorder.open(tmp_path, "trainer", "trainer") as recorder:
        watch = spill.Watch(
            recorder,
            {
                "a": reader(
                    Counters(50 * mib, 0, 9.0, 80 * mib), Counters(50 * mib, 0, 9.0, 80 * mib),
                    Counters(70 * mib, 0, 11.5, 80 * mib), Counters(70 * mib, 10 * mib, 11.6, 80 * mib),
                ),
                "b": reader(RuntimeError("gone"), Counters(), RuntimeError("gone"), Counters()),
            },
        )  # fmt: skip
        for _ in range(4):
            watch.look()
    run = store.load_run(tmp_path)
    found = [row for row in run.events.to_pylist() if row["stage"] == Stage.SPILL]
    assert [(row["bytes"], row["items"], row["actor"]) for row in found] == [(20 * mib, 0, 0), (0, 10 * mib, 0)]
    lengths = [(row["t1_ns"] - row["t0_ns"]) / second for row in found]
    assert lengths == [2.5, 1.0], "what ended in that second may have begun before; what was there before counts not"
    notes = [note for note in run.notes if note["note"] in ("objects_spilled", "spill_unknown")]
    assert [(note["note"], note["node"]) for note in notes] == [("spill_unknown", "b"), ("objects_spilled", "a")]
    (finding,) = [finding for finding in report.build(run).findings if finding.kind == "objects_spilled"]
    assert finding.level == "warning"
    assert "a (80 MiB): 20 MiB of objects were written to disk and 10 MiB read back" in finding.text


def test_a_ray_that_tells_no_counters_is_no_hindrance(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, "trainer", "trainer") as recorder, spill.watching(recorder, [{"NodeID": "0" * 56}]):
        pass
    (note,) = [note for note in store.load_run(tmp_path).notes if note["note"] == "spill_unknown"]
    assert "NodeManagerHostname" in note["reason"]


def test_a_full_store_and_a_full_disk_have_names() -> None:
    import ray

    disk, memory = ray.exceptions.OutOfDiskError("x"), ray.exceptions.ObjectStoreFullError("x")
    for error, words in ((disk, "so is the disk"), (memory, "object store is full"), (Wrapped(disk), "so is the disk")):
        found = spill.store_full(error, "from there")
        assert isinstance(found, StoreFull)
        assert words in found.what
        assert "from there" in found.what
    assert spill.store_full(ray.exceptions.RayError("x"), "") is None
    assert spill.store_full(Wrapped(ValueError("x")), "") is None


class Wrapped(Exception):
    """As Ray hands on what a task of its ended with."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause
