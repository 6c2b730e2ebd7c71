"""Decisions carried out: workers come and go and the ring grows, and not a byte of any batch depends on it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline import adaptive
from pipeline.adaptive import Decision, Look, Tuner
from pipeline.engines import CrewEngine
from pipeline.feed import Feed
from pipeline.maker import Probe, probe
from pipeline.ring import RingAddress
from pipeline.spec import FeedSpec, TransformSpec
from pipeline.worker import open_data
from profiler import report, store
from profiler.recorder import NULL, Recorder
from tests.pipeline.spawned import FillingLauncher, SpawnLauncher

MNIST = "tests/data/db/mnist_test_lmdb"
SPEC = FeedSpec(
    MNIST, 16, shuffle="full", seed=4, depth=4, fingerprints="step", poison=True,
    transform=TransformSpec(crop=20, mirror=True, python="tests.pipeline.functions:slow"),
)  # fmt: skip


def probed(spec: FeedSpec) -> Probe:
    with open_data(spec) as source:
        return probe(spec, source)


def scripted(monkeypatch: pytest.MonkeyPatch, settings: list[tuple[int, int]]) -> None:
    """Decisions that do not depend on times: these (workers, depth), one a look of six batches."""
    left = [*settings]

    def decide(looks: Any, limits: Any) -> Decision:
        workers, depth = left.pop(0)
        return Decision(workers, depth, "the script says so", settled=not left)

    monkeypatch.setattr(adaptive, "decide", decide)
    monkeypatch.setattr(adaptive, "LOOK_BATCHES", 6)
    monkeypatch.setattr(adaptive, "LOOK_S", 0.0)


def take(made: CrewEngine, step: int) -> Any:
    ready = made.get(step)
    made.delivered(ready, step_ns=1, wait_ns=1, held=1)
    return ready


def until(condition: Any, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.01)


def test_workers_come_and_go_and_every_step_is_made_once_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [(3, 5), (1, 9), (2, 9), (2, 9)])
    spec = replace(SPEC, workers="auto", depth="auto")
    launchers: list[FillingLauncher] = []

    def launch(address: RingAddress) -> FillingLauncher:
        launchers.append(FillingLauncher(address))
        return launchers[-1]

    with Recorder.open(tmp_path, "trainer", "trainer") as recorder:
        made = CrewEngine(spec, probed(spec), recorder, launch, 1, most=4)
        assert made.ring.depth == 4
        step, sizes = 0, []
        while not made.tuning()["settled"] or step < 120:
            ready = take(made, step)
            assert (made.ring.payload(ready.slot) == step % 251).all()
            made.ring.release(step)
            sizes.append((made._crew.size, made.ring.depth))
            step += 1
            assert step < 5000
        assert [size for size, _ in zip(sizes, [*sizes[1:], None], strict=True) if size != _] == [
            (1, 4), (3, 5), (1, 9), (2, 9),
        ]  # fmt: skip
        jobs = launchers[0].jobs
        assert len(jobs) == 4  # 1, two more, and one anew after two had gone
        until(lambda: (made._crew.notice(), len(made.pids) == 2)[1])
        gone = [job for job in jobs if job.process.exitcode is not None]
        assert [job.process.exitcode for job in gone] == [0, 0]  # ended by themselves
        assert made.restarts == 0
        told = made.tuning()
        made.close()
    assert told is not None
    assert [(one["workers"], one["depth"], one["final"]) for one in told["decisions"]] == [
        (3, 5, False), (1, 9, False), (2, 9, False), (2, 9, True),
    ]  # fmt: skip
    run = store.load_run(tmp_path)
    notes = [note for note in run.notes if note["note"] == "feed_tuned"]
    assert [note["workers"] for note in notes] == [3, 1, 2, 2]
    assert [note["step"] for note in notes] == sorted(note["step"] for note in notes)
    found = [finding.text for finding in report.build(run).findings if finding.kind == "feed_tuned"]
    assert [text.partition(" on the TRAIN feed has ")[2] for text in found] == [
        "3 workers and 5 slots (before: 1 and 4): the script says so.",
        "1 workers and 9 slots (before: 3 and 5): the script says so.",
        "2 workers and 9 slots (before: 1 and 9): the script says so.",
        "2 workers and 9 slots (final): the script says so.",
    ]


def test_a_worker_that_was_sent_away_and_dies_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(SPEC, workers="auto", max_restarts=0)
    made = CrewEngine(spec, probed(spec), NULL, FillingLauncher, 2, most=2)
    until(lambda: len(made.pids) == 2)
    victim = made._crew._members[1]
    os.kill(victim.process.pid, signal.SIGSTOP)
    made._crew.resize(1)
    assert made._crew.size == 1
    os.kill(victim.process.pid, signal.SIGKILL)
    for step in range(40):
        made.get(step)
        made.ring.release(step)
    until(lambda: (made._crew.notice(), len(made.pids) == 1)[1])
    assert made._crew._members != []
    made.close()


def test_no_memory_for_more_slots_is_told_and_the_feed_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline import shared

    spec = replace(SPEC, workers=1, depth="auto")
    made = CrewEngine(spec, probed(spec), NULL, FillingLauncher, 1)
    scripted(monkeypatch, [(1, 20), (1, 4)])
    monkeypatch.setattr(shared, "available_memory", lambda: 100)
    for step in range(60):
        take(made, step)
        made.ring.release(step)
    assert made.ring.depth == 4
    first = made.tuning()["decisions"][0]
    assert (first["depth"], first["refused"].split(":")[0]) == (4, "no memory for 20 slots of 0.0 MiB in the ring")
    made.close()


def test_what_the_user_gave_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = CrewEngine(SPEC, probed(SPEC), NULL, FillingLauncher, 1)
    assert made.tuning() is None
    made.close()
    spec = replace(SPEC, workers=3, depth="auto")
    seen: list[adaptive.Limits] = []
    monkeypatch.setattr(Tuner, "__post_init__", lambda self: seen.append(self.limits))
    CrewEngine(spec, probed(spec), NULL, FillingLauncher, 3).close()
    CrewEngine(replace(SPEC, workers="auto"), probed(SPEC), NULL, FillingLauncher, 1, most=2).close()
    assert [(one.workers, one.depth[0]) for one in seen] == [((3, 3), 6), ((1, 2), 4)]
    assert seen[0].depth[1] > 6
    assert seen[1].depth == (4, 4)


@pytest.mark.long  # five processes that load numba
def test_batches_do_not_depend_on_the_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(SPEC, stop_step=90)
    with Feed.from_spec(spec) as feed:
        expected = [batch.hashes for batch in feed]
    auto = replace(spec, workers="auto", depth="auto")
    scripted(monkeypatch, [(3, 6), (1, 7), (3, 12), (2, 12)])
    made = CrewEngine(auto, probed(auto), NULL, lambda address: SpawnLauncher(auto, probed(auto), address), 1, most=3)
    got = []
    for step in range(90):
        ready = take(made, step)
        got.append(ready.hashes)
        made.ring.release(step)
        if not made.tuning()["settled"] and step > 20:
            until(lambda: made._crew.all_started)
    assert [one["workers"] for one in made.tuning()["decisions"]][:2] == [3, 1]
    made.close()
    assert got == expected


@pytest.mark.ray
@pytest.mark.long  # decides by the time that things take: nothing else should run beside it
def test_a_feed_of_ray_settles_on_what_its_batches_ask_for(tmp_path: Path) -> None:
    """A user function that sleeps: 16 ms a batch at least, a consumer that needs one in 8 ms, CPUs that are idle."""
    from pipeline import ray_runtime

    spec = replace(SPEC, stop_step=1200, engine="ray", workers="auto", depth="auto", poison=False)
    with Feed.from_spec(replace(spec, engine="inline", stop_step=60)) as feed:
        expected = [batch.hashes["fill"] for batch in feed]
    got: list[int] = []
    with (
        ray_runtime.running(num_cpus=4),
        Recorder.open(tmp_path, "trainer", "trainer") as recorder,
        Feed.from_spec(spec, recorder) as feed,
    ):
        for batch in feed:
            got.append(batch.hashes["fill"])
            time.sleep(0.008)
            if feed.stats()["tuning"]["settled"] and batch.step > 60:
                break
        stats = feed.stats()
    assert got[:60] == expected
    assert stats["tuning"]["settled"]
    assert len(stats["tuning"]["decisions"]) <= adaptive.MOST_LOOKS
    assert stats["tuning"]["decisions"][-1]["workers"] in (2, 3, 4)
    notes = [note for note in store.load_run(tmp_path).notes if note["note"] == "feed_tuned"]
    assert [note["reason"] for note in notes] == [one["reason"] for one in stats["tuning"]["decisions"]]
    assert feed.stats()["tuning"] == stats["tuning"]  # also when it is closed


def test_a_look_says_how_starved_and_how_loaded() -> None:
    look = Look(2, 4, 40.0, 40.0, 10.0, 10.0, 10.0, 1, 0.0)
    assert (look.period_ns, look.starved, look.load) == (20.0, 0.5, 2.0)
