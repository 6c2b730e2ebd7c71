"""The training step: what comes after what, when tests and snapshots are due, and that it stays readable."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import loop
from profiler import store
from profiler.events import Kind, Stage
from profiler.recorder import NULL, Recorder
from profiler.timeline import as_events, build


class FakeBatch:
    def __init__(self, log: list[str], step: int) -> None:
        self.log, self.step, self.epoch, self.slot = log, step, 0, step % 2

    def __len__(self) -> int:
        return 4

    def on_device(self) -> dict[str, Any]:
        self.log.append(f"wait {self.step}")
        return {"data": np.zeros(1, np.float32)}


class FakeJob:
    """Answers the loop's questions from plain numbers and writes down what it is told to do."""

    def __init__(
        self, steps: int, *, tests: tuple[int, ...] = (), snapshots: tuple[int, ...] = (), stop_after: int = 10**9
    ) -> None:
        self.log: list[str] = []
        self.recorder: Recorder = NULL
        self.first_step = self.step = 0
        self.steps, self.tests, self.snapshots, self.stop_after = steps, tests, snapshots, stop_after
        self.device = self.solver = self.batches = self

    def done(self) -> bool:
        return self.step >= min(self.steps, self.stop_after)

    def test_is_due(self) -> bool:
        return self.step in self.tests

    def test(self) -> None:
        self.log.append(f"test {self.step}")

    def __next__(self) -> FakeBatch:
        self.log.append(f"next {self.step}")
        return FakeBatch(self.log, self.step)

    def copy_ahead(self) -> None:
        self.log.append(f"ahead of {self.step}")

    def fingerprint_inputs(self, batch: FakeBatch, arrays: dict[str, Any]) -> None:
        self.log.append(f"look {batch.step}")

    @contextlib.contextmanager
    def compute(self, *, step: int, epoch: int) -> Iterator[None]:
        self.log.append(f"begin {step}")
        yield
        self.log.append(f"end {step}")

    def learn(self, batch: FakeBatch, arrays: dict[str, Any]) -> float:
        self.log.append(f"learn from {batch.step}")
        return 0.5

    def fingerprint_outcome(self, loss: float) -> None:
        self.log.append(f"loss {loss}")

    def note_memory(self) -> None:
        """Nothing to note."""

    def show(self, items: int, loss: float) -> None:
        self.log.append(f"show {items}")

    def snapshot_is_due(self) -> bool:
        return self.step in self.snapshots

    def snapshot(self) -> None:
        self.log.append(f"snapshot {self.step}")


def test_one_step_from_top_to_bottom() -> None:
    job = FakeJob(1, tests=(0,), snapshots=(1,))
    loop.train(job)  # type: ignore[arg-type]
    assert job.log == [
        "test 0", "next 0", "wait 0", "ahead of 0", "look 0", "begin 0", "learn from 0", "end 0", "loss 0.5",
        "show 4", "snapshot 1",
    ]  # fmt: skip


def test_tests_come_before_their_step_and_snapshots_after_theirs() -> None:
    job = FakeJob(4, tests=(0, 2), snapshots=(2, 4))
    loop.train(job)  # type: ignore[arg-type]
    order = [entry for entry in job.log if entry.split()[0] in ("test", "learn", "snapshot")]
    assert order == [
        "test 0", "learn from 0", "learn from 1", "snapshot 2",
        "test 2", "learn from 2", "learn from 3", "snapshot 4",
    ]  # fmt: skip


def test_a_request_to_stop_lets_the_step_finish() -> None:
    job = FakeJob(10, stop_after=3)
    loop.train(job)  # type: ignore[arg-type]
    assert job.step == 3
    assert job.log[-1] == "show 4"
    assert "next 3" not in job.log


def test_a_job_that_is_done_takes_no_batch() -> None:
    job = FakeJob(0)
    loop.train(job)  # type: ignore[arg-type]
    assert job.log == []


def test_the_spans_of_a_step_nest_and_add_up(tmp_path: Path) -> None:
    job = FakeJob(3, tests=(0,), snapshots=(2,))
    with Recorder.open(tmp_path, "trainer", "trainer") as job.recorder:
        loop.train(job)  # type: ignore[arg-type]
    events = as_events(store.load_run(tmp_path).events)
    spans = events[events["kind"] == Kind.SPAN]
    assert (spans["stage"] == Stage.STEP).sum() == 3
    assert {Stage(stage) for stage in spans["stage"].tolist()} == {
        Stage.STEP, Stage.TEST, Stage.HOST, Stage.COMPUTE, Stage.CHECKPOINT,
    }  # fmt: skip
    timeline = build(events)
    assert timeline.step.tolist() == [0, 1, 2]
    assert timeline.first.tolist() == [True, False, False]
    np.testing.assert_array_equal(timeline.parts_ns.sum(axis=1), timeline.wall_ns)


def test_an_error_leaves_the_loop_as_it_is() -> None:
    job = FakeJob(3)
    job.learn = lambda batch, arrays: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        loop.train(job)  # type: ignore[arg-type]


def test_the_loop_is_the_beginners_file() -> None:
    assert len(inspect.getsource(loop).splitlines()) <= 60
