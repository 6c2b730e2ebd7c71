"""Batches made ahead by threads of the consumer's process: the same bytes, errors where they belong, nothing left."""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import adaptive, threads
from pipeline.feed import Feed
from pipeline.spec import FeedSpec, TransformSpec
from pipeline.transforms import TransformError
from profiler import report, store
from profiler.errors import StallscopeError, UsageError
from profiler.events import Kind, Stage
from profiler.recorder import Recorder

DB = "tests/data/db"
SPEC = FeedSpec(
    f"{DB}/mnist_test_lmdb", 16, shuffle="full", seed=4, stop_step=60, depth=4, fingerprints="step", poison=True,
    transform=TransformSpec(crop=20, mirror=True),
)  # fmt: skip


def feeding() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("stallscope-feed")]


def hashes(spec: FeedSpec) -> list[dict[str, int]]:
    with Feed.from_spec(spec) as feed:
        return [batch.hashes for batch in feed]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"source": f"{DB}/mnist_test_leveldb"},
        {
            "source": f"{DB}/crops24_encoded_native_lmdb",
            "batch": 5,
            "stop_step": 9,
            "transform": TransformSpec(crop=16, mirror=True, color="color"),
        },
        {"source": "memory:records=50,shape=3x9x9", "transform": TransformSpec(crop=5), "tail": "partial", "batch": 7},
        {"transform": TransformSpec(python="tests.pipeline.functions:noise")},
    ],
)
def test_the_same_batches_for_any_number_of_threads(change: dict[str, Any]) -> None:
    spec = replace(SPEC, **change)
    expected = hashes(spec)
    for count, depth in ((1, 2), (3, 4), ("auto", "auto")):
        assert hashes(replace(spec, threads=count, depth=depth)) == expected, count
    assert feeding() == []


def test_it_resumes_at_any_step() -> None:
    expected = hashes(SPEC)
    with Feed.from_spec(replace(SPEC, threads=2)) as feed:
        for _ in range(13):
            next(feed)
        state = feed.state_dict()
    resumed = Feed.from_spec(replace(SPEC, threads=1))
    resumed.load_state_dict(state)
    with resumed:
        assert [batch.hashes for batch in resumed] == expected[13:]


def test_batches_are_made_ahead_and_no_further_than_the_ring_is_deep() -> None:
    with Feed.from_spec(replace(SPEC, threads=2, stop_step=None)) as feed:
        first = next(feed)
        deadline = time.monotonic() + 60
        while feed.stats()["slots"]["ready"] < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.1)
        assert feed.stats()["slots"] == {"free": 0, "filling": 0, "ready": 3, "leased": 1, "redo": 0}
        ahead = feed.peek()
        assert ahead is not None
        assert (first.step, ahead.step, feed.next_step) == (0, 1, 1)
    assert feeding() == []


@pytest.mark.parametrize("count", [1, 3])
def test_an_error_comes_at_its_own_step_with_data_set_key_and_record(count: int) -> None:
    spec = replace(SPEC, batch=1, shuffle="none", transform=TransformSpec())
    with Feed.from_spec(spec) as feed:
        first = [int(batch.labels[0]) for batch in feed].index(7)
    broken = replace(spec, threads=count, transform=TransformSpec(python="tests.pipeline.functions:breaks_on_label_7"))
    with Feed.from_spec(broken) as feed:
        for _ in range(first):
            next(feed)
        with pytest.raises(TransformError, match="seven is right out") as caught:
            next(feed)
    assert f"record {first} " in str(caught.value)
    assert f"{DB}/mnist_test_lmdb" in str(caught.value)
    assert feeding() == []


def test_an_error_at_set_up_and_an_end_by_a_users_exit_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(spec: FeedSpec) -> Any:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(threads, "open_data", broken)
        feed = Feed.from_spec(replace(SPEC, threads=2))
        with feed, pytest.raises(StallscopeError, match="OSError: the disk is gone"):
            next(feed)

    def leaves(self: Any, *args: Any) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(threads.ThreadCrew, "_make", leaves)
    with Feed.from_spec(replace(SPEC, threads=1)) as feed, pytest.raises(StallscopeError, match="SystemExit: 3"):
        next(feed)


def rings_mapped() -> set[str]:
    """The rings in this process's memory, by their inodes: some tests of staging leave theirs mapped."""
    with open("/proc/self/maps") as maps:
        return {line.split()[4] for line in maps if "stallscope-ring" in line}


def test_closing_waits_for_what_is_being_made_and_gives_the_memory_back() -> None:
    spec = replace(SPEC, threads=2, transform=TransformSpec(python="tests.pipeline.functions:slow"))
    fds: set[str] = set()
    rings: set[str] = set()
    for _ in range(2):  # what a process opens once for all is open after the first
        gc.collect()
        fds, rings = set(os.listdir("/proc/self/fd")), rings_mapped()
        with Feed.from_spec(spec) as feed:
            next(feed)
    gc.collect()
    assert feeding() == []
    assert set(os.listdir("/proc/self/fd")) <= fds
    assert rings_mapped() <= rings


def test_a_thread_that_hangs_is_left_behind_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_END_S", 0.2)
    go, reached = threading.Event(), threading.Event()
    make = threads.ThreadCrew._make

    def hangs(self: Any, row: int, claim: Any, *args: Any) -> None:
        if claim.step == 3:
            reached.set()
            assert go.wait(60)
        make(self, row, claim, *args)

    monkeypatch.setattr(threads.ThreadCrew, "_make", hangs)
    with Recorder.open(tmp_path, "trainer", "trainer") as recorder:
        with Feed.from_spec(replace(SPEC, threads=1), recorder) as feed:
            for _ in range(3):
                next(feed)
            assert reached.wait(60)
        assert len(feeding()) == 1
        go.set()  # it finds its ring closed, and ends
        while feeding():
            time.sleep(0.01)
    (note,) = [note for note in store.load_run(tmp_path).notes if note["note"] == "feed_thread_left"]
    assert note["thread"] == 1


def test_threads_have_lanes_of_their_own_and_the_consumers_steps_stay_whole(tmp_path: Path) -> None:
    spec = replace(SPEC, threads=2, recorder_folder=str(tmp_path), detail="full")
    with Recorder.open(tmp_path, "trainer", "trainer") as recorder, Feed.from_spec(spec, recorder) as feed:
        for step in range(60):
            with recorder.span(Stage.STEP, step=step):
                next(feed)
    run = store.load_run(tmp_path)
    rows = run.events.to_pylist()
    made = [(row["step"], row["actor"]) for row in rows if (row["stage"], row["kind"]) == (Stage.BATCH, Kind.SPAN)]
    assert sorted(step for step, _ in made) == list(range(60))
    assert {actor for _, actor in made} <= {1, 2}
    assert {row["stage"] for row in rows if row["actor"] == 0} == {Stage.STEP, Stage.FEED_WAIT, Stage.RELEASE}
    built = report.build(run)
    assert built.steps == 60
    assert sum(built.partition.values()) == pytest.approx(built.wall_s)
    assert built.making["batches"] == 60


def test_auto_settles_between_one_and_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.engines.usable_cpus", lambda: 3)
    monkeypatch.setattr(adaptive, "LOOK_BATCHES", 4)
    monkeypatch.setattr(adaptive, "LOOK_S", 0.0)
    monkeypatch.setattr(adaptive.IdleCpus, "__call__", lambda self: 3.0)
    spec = replace(
        SPEC,
        threads="auto",
        depth="auto",
        stop_step=400,
        transform=TransformSpec(python="tests.pipeline.functions:slow"),
    )
    with Feed.from_spec(replace(spec, threads=0, stop_step=20)) as feed:
        expected = [batch.hashes for batch in feed]
    got = []
    with Feed.from_spec(spec) as feed:
        for batch in feed:
            got.append(batch.hashes)
            tuning = feed.stats()["tuning"]
            if tuning["settled"] and batch.step >= 20:
                break
    assert got[:20] == expected
    assert tuning["settled"]
    assert {one["workers"] for one in tuning["decisions"]} <= {1, 2, 3}
    assert max(one["workers"] for one in tuning["decisions"]) > 1  # the function sleeps: a second thread is faster


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(UsageError, match=r"feed\.threads goes with feed\.engine: inline"):
        replace(SPEC, engine="ray", threads=2)
    with pytest.raises(UsageError, match=r"feed\.threads is out of range"):
        replace(SPEC, threads=65)


def test_values_do_not_move_while_they_are_held() -> None:
    with Feed.from_spec(replace(SPEC, threads=2, depth=6)) as feed:
        held = [next(feed).hold() for _ in range(4)]
        copies = [batch.data.copy() for batch in held]
        for _ in range(20):
            if len(held) > 2:
                held.pop(0).release()
                copies.pop(0)
            held.append(next(feed).hold())
            copies.append(held[-1].data.copy())
            for batch, copy in zip(held, copies, strict=True):
                np.testing.assert_array_equal(batch.data, copy)
