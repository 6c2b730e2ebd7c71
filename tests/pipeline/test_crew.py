from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.crew import FeedError
from pipeline.engines import CrewEngine
from pipeline.feed import Feed
from pipeline.maker import probe
from pipeline.process import Process
from pipeline.spec import FeedSpec, TransformSpec
from pipeline.transforms import TransformError
from pipeline.worker import open_data
from profiler import report, store
from profiler.events import Kind, Stage
from profiler.recorder import NULL, Recorder
from tests.pipeline.spawned import SpawnLauncher

MNIST = "tests/data/db/mnist_test_lmdb"
SPEC = FeedSpec(
    MNIST, 16, shuffle="full", seed=4, stop_step=40, depth=4, fingerprints="step", poison=True,
    transform=TransformSpec(crop=20, mirror=True, python="tests.pipeline.functions:slow"),
)  # fmt: skip


def engine(spec: FeedSpec, workers: int = 2, recorder: Recorder = NULL, never: tuple[int, ...] = ()) -> CrewEngine:
    with open_data(spec) as source:
        probed = probe(spec, source)
    return CrewEngine(spec, probed, recorder, lambda address: SpawnLauncher(spec, probed, address, never), workers)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with Feed.from_spec(SPEC) as feed:
        return [batch.hashes["fill"] for batch in feed]


def deliver(made: CrewEngine, first: int, last: int) -> Iterator[tuple[int, int]]:
    """(step, fill hash) of the steps, each released after it was looked at."""
    for step in range(first, last):
        ready = made.get(step)
        yield step, ready.hashes["fill"]
        made.ring.release(step)


def test_same_batches_as_inline_and_nothing_left(expected: list[int]) -> None:
    fds = set(os.listdir("/proc/self/fd"))
    made = engine(SPEC)
    assert [fill for _, fill in deliver(made, 0, 40)] == expected
    workers = [Process(pid) for pid in made.pids]
    made.close()
    assert made.pids == []
    for worker in workers:
        assert not worker.alive
        worker.close()
    assert len(os.listdir("/proc/self/fd")) <= len(fds) + 1  # the resource tracker of multiprocessing stays


def both(made: CrewEngine) -> list[int]:
    """The process ids of two workers, waited for until the second has started too."""
    for _ in range(1200):
        if len(made.pids) == 2:
            break
        time.sleep(0.1)
    return made.pids


def test_a_worker_that_was_gone_before_anybody_met_it_is_replaced(expected: list[int]) -> None:
    """Killed and collected between its entering the ring and the consumer's first look: there is no handle on it."""
    made = engine(SPEC, workers=1)
    row = 0
    while not made.ring.worker(row)[0]:
        time.sleep(0.01)
    pid = made.ring.worker(row)[0]
    (job,) = [member.job for member in made._crew._members]
    os.kill(pid, signal.SIGKILL)
    job.process.join(60)  # type: ignore[attr-defined]
    assert Process(pid).fileno() < 0, "not even its number is left"
    assert [fill for _, fill in deliver(made, 0, 40)] == expected
    assert made.restarts == 1
    made.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_worker_is_replaced_and_nothing_is_lost(tmp_path: Path, expected: list[int], how: signal.Signals) -> None:
    spec = replace(SPEC, stall_timeout_s=2.0)
    with Recorder.open(tmp_path, "trainer", "trainer") as recorder:
        made = engine(spec, recorder=recorder)
        got: list[int] = []
        victims: list[int] = []
        for step, fill in deliver(made, 0, 40):
            got.append(fill)
            if step == 8:
                # Both: else the other one makes every batch, and a stopped one that held no lease is never waited for.
                # (It is told at the end as silent, which has its own test.)
                victims = both(made)
                for victim in victims:
                    os.kill(victim, how)
        restarts = made.restarts
        made.close()  # first: what a failure leaves open would fail the tests of other files
    assert got == expected
    assert restarts == len(victims) == 2
    (notes,) = (tmp_path / "events").glob("*.jsonl")
    lost = [line for line in map(json.loads, notes.read_text().splitlines()) if line["note"] == "worker_lost"]
    assert sorted(note["lost_pid"] for note in lost) == sorted(victims)
    for note in lost:
        assert note["exit"] in ("SIGKILL", "unknown")
        assert note["worker"] in (1, 2)
        assert ("no sign of life" in note["how"]) == (how is signal.SIGSTOP)
        if note["step"] >= 0:
            assert note["epoch"] == 0
            assert len(note["records"]) == 2
    for victim in victims:
        assert not Path(f"/proc/{victim}").exists()


def test_too_many_losses_end_the_feed_with_one_message() -> None:
    made = engine(replace(SPEC, max_restarts=1), workers=1)

    def kill_them_all() -> None:
        for _ in deliver(made, 0, 40):
            if made.pids:
                os.kill(made.pids[0], signal.SIGKILL)

    with pytest.raises(FeedError, match="worker 1 of the feed") as caught:
        kill_them_all()
    assert "feed.max_restarts" in str(caught.value)
    assert "SIGKILL" in str(caught.value)
    made.close()


def test_an_error_comes_at_its_own_step_and_not_before() -> None:
    spec = replace(
        SPEC, batch=1, shuffle="none", stop_step=None,
        transform=TransformSpec(python="tests.pipeline.functions:breaks_on_label_7"),
    )  # fmt: skip
    with open_data(spec) as source:
        probe(spec, source)
        labels = []
        with Feed.from_spec(replace(spec, transform=TransformSpec(), stop_step=50)) as feed:
            labels = [int(batch.labels[0]) for batch in feed]
    first = labels.index(7)
    assert first > 0
    made = engine(spec)
    assert len(list(deliver(made, 0, first))) == first
    with pytest.raises(TransformError, match="seven is right out") as caught:
        made.get(first)
    assert f"record {first} " in str(caught.value)
    assert MNIST in str(caught.value)
    made.close()


def test_an_error_at_set_up_comes_at_once() -> None:
    with open_data(SPEC) as source:
        probed = probe(SPEC, source)
    broken = replace(SPEC, transform=TransformSpec(python="no_such_module_here:f"))
    made = CrewEngine(SPEC, probed, NULL, lambda address: SpawnLauncher(broken, probed, address), 2)
    with pytest.raises(Exception, match="no_such_module_here"):
        made.get(0)
    made.close()


def test_workers_that_never_start_are_listed() -> None:
    made = engine(replace(SPEC, start_timeout_s=0.3), workers=2, never=(0, 1))
    with pytest.raises(FeedError, match="no worker of the feed has started") as caught:
        made.get(0)
    assert "worker 1 (1 process); worker 2 (1 process)" in str(caught.value)
    made.close()


@pytest.mark.alone
def test_one_worker_that_never_starts_does_not_stop_the_other(tmp_path: Path, expected: list[int]) -> None:
    with Recorder.open(tmp_path, "trainer", "trainer") as recorder:
        made = engine(replace(SPEC, start_timeout_s=3.0), recorder=recorder, never=(1,))
        assert [fill for _, fill in deliver(made, 0, 40)] == expected
        made.close()


def test_back_pressure_never_more_ready_than_slots() -> None:
    made = engine(replace(SPEC, stop_step=None))
    made.get(0)
    deadline = time.monotonic() + 60
    while made.ring.counts()["ready"] < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    assert made.ring.counts() == {"free": 0, "filling": 0, "ready": 3, "leased": 1, "redo": 0}
    assert made.ring.next_step == 4
    made.close()


def test_workers_record_every_batch_once_and_their_waits(tmp_path: Path) -> None:
    from profiler import store

    spec = replace(SPEC, recorder_folder=str(tmp_path), detail="full")
    made = engine(spec)
    for step, _ in deliver(made, 0, 40):
        if step == 0:
            time.sleep(0.3)
    made.close()
    events: Any = store.load_run(tmp_path).events.to_pydict()
    columns = zip(*(events[name] for name in ("kind", "stage", "step", "actor")), strict=True)
    rows = [row[1:] for row in columns if row[0] != Kind.OPEN]
    for stage in (Stage.BATCH, Stage.READ, Stage.DECODE, Stage.AUGMENT, Stage.COLLATE, Stage.READY):
        assert sorted(step for kind, step, _ in rows if kind == stage) == list(range(40)), stage
    assert {actor for kind, _, actor in rows if kind == Stage.BATCH} <= {1, 2}
    assert [kind for kind, _, _ in rows if kind == Stage.SLOT_WAIT]


def test_a_worker_that_hangs_while_nobody_waits_for_it_is_noted_at_the_close(tmp_path: Path) -> None:
    """It is stopped between two steps, with all slots filled: no consumer ever misses it."""
    with Recorder.open(tmp_path, "trainer", "trainer") as recorder:
        made = engine(replace(SPEC, stop_step=None), workers=1, recorder=recorder)
        deadline = time.monotonic() + 60
        while made.ring.counts()["ready"] < 4:
            assert time.monotonic() < deadline
            made.ring.wait_ready()
        (pid,) = made.pids
        os.kill(pid, signal.SIGSTOP)
        made.ring.stop()
        made._crew.close(patience_s=0.5)
        made.close()
    (notes,) = (tmp_path / "events").glob("*.jsonl")
    lines = map(json.loads, notes.read_text().splitlines())
    (note,) = (line for line in lines if line["note"] == "worker_silent")
    assert (note["pid"], note["worker"], note["step"]) == (pid, 1, -1)
    assert note["silent_s"] >= 0.4
    (finding,) = [f for f in report.build(store.load_run(tmp_path)).findings if f.kind == "worker_silent"]
    assert finding.level == "warning"
    assert f"Worker 1 (process {pid}) hung: at the end of the run it had given no sign of life for" in finding.text
    assert not Path(f"/proc/{pid}").exists()


def test_warming_up_waits_for_the_first_batch_and_no_longer_than_it_is_told(expected: list[int]) -> None:
    made = engine(SPEC, workers=1)
    made.warm_up(0, 0.0, lambda: False)
    made.warm_up(0, 60.0, lambda: True)
    assert not made.ring.is_ready(0)
    made.warm_up(0, 60.0, lambda: False)
    assert made.ring.is_ready(0)
    assert [fill for _, fill in deliver(made, 0, 2)] == expected[:2]
    made.close()


@pytest.mark.long  # a share of CPUs is measured: nothing else should run beside it
def test_two_workers_decode_python_code_in_parallel() -> None:
    """Case C17: processes do not share an interpreter lock. 5 ms of pure Python a record, on two CPUs."""
    spec = replace(SPEC, transform=TransformSpec(python="tests.pipeline.functions:burns_5_ms"))

    def rate(workers: int) -> float:
        made = engine(spec, workers)
        try:
            list(deliver(made, 0, 8))
            while not all(made.ring.worker(row)[0] for row in range(workers)):
                time.sleep(0.05)
            began = time.monotonic()
            list(deliver(made, 8, 40))
            return 32 / (time.monotonic() - began)
        finally:
            made.close()

    assert max(rate(2) for _ in range(3)) > 1.6 * max(rate(1) for _ in range(3))
