"""The replay reproduces simulated runs, and predicts what they become when something is taken out."""

from __future__ import annotations

import numpy as np
import pytest

from profiler import timeline
from profiler.events import Flag, Kind, Stage
from profiler.replay import Variants, recorded, replay, subsets
from profiler.services import CAUSE, CAUSES, Model, batches, models
from tests.profiler.synthetic import Job, simulate, wall_s

JOBS = {
    "instant": Job(),
    "slow_read": Job(read=40),
    "two_workers": Job(read=40, workers=2, jitter=0.4),
    "three_workers_shallow": Job(read=70, workers=3, depth=2, jitter=0.3),
    "depth_1": Job(depth=1, read=10, release_late=True),
    "inline": Job(inline=True, read=10, jitter=0.5),
    "tests_and_snapshots": Job(read=25, test_every=30, checkpoint_every=40),
    "startup": Job(startup=1500, workers=2, read=35),
    "stragglers": Job(workers=2, slow=lambda step: {"decode": 400.0} if step % 50 == 25 else {}),
    "lost_worker": Job(read=15, kill_worker_at=80, restart=900),
    "hidden_copy": Job(copy=8),
    "long_copy": Job(copy=30),
    "copy_of_late_batches": Job(copy=8, read=25, jitter=0.5),
    "copy_after_its_turn": Job(copy=8, staging=1),
    "copies_far_ahead": Job(copy=18, staging=4, read=15, jitter=0.9, workers=2),
    "copy_from_few_slots": Job(copy=12, depth=2, read=16, workers=2, jitter=0.3),
    "arrival": Job(workers=2, depth=4, read=14, jitter=0.9, compute=9, arrival=True),
    "arrival_of_stragglers": Job(
        workers=2, depth=4, compute=9, arrival=True, slow=lambda step: {"decode": 300.0} if step % 37 == 20 else {}
    ),
    "arrival_in_epochs": Job(
        workers=3,
        depth=3,
        read=40,
        jitter=0.9,
        arrival=True,
        epoch_steps=23,
        compute=9,
        slow=lambda step: {"decode": 200.0} if step % 23 == 12 else {},
    ),
    "inline_copy": Job(copy=8, inline=True, read=10),
}


def model_of(job: Job) -> Model:
    events = simulate(job).events()
    table = timeline.build(events)
    (model,) = models(table, batches(events, table), depth=job.depth, ahead=job.staging - 1)
    return model


@pytest.mark.parametrize("name", JOBS)
def test_the_run_as_it_was(name: str) -> None:
    job = JOBS[name]
    model = model_of(job)
    lengths, totals = replay(model, recorded())
    assert totals[0] == pytest.approx(model.measured_ns, rel=2e-3)
    assert lengths.sum() == pytest.approx(totals[0])
    assert model.measured_ns / 1e9 == pytest.approx(wall_s(simulate(job)), rel=1e-9)


@pytest.mark.parametrize(
    ("name", "removed", "changes"),
    [
        ("slow_read", ["read"], {"read": 0}),
        ("two_workers", ["read"], {"read": 0}),
        ("two_workers", ["decode"], {"decode": 0}),
        ("three_workers_shallow", ["read"], {"read": 0}),
        ("inline", ["read", "decode"], {"read": 0, "decode": 0}),
        ("tests_and_snapshots", ["checkpoint"], {"checkpoint": 0}),
        ("stragglers", ["decode"], {"decode": 0, "slow": None}),
        ("lost_worker", ["fault"], {"kill_worker_at": -1}),
        ("hidden_copy", ["h2d"], {"copy": 1e-6}),
        ("long_copy", ["h2d"], {"copy": 1e-6}),
        ("copy_of_late_batches", ["h2d"], {"copy": 1e-6}),
        ("copy_of_late_batches", ["read"], {"read": 0}),
        ("copy_after_its_turn", ["h2d"], {"copy": 1e-6}),
        ("copies_far_ahead", ["read"], {"read": 0}),
        ("copy_from_few_slots", ["read"], {"read": 0}),
        ("arrival", ["read"], {"read": 0}),
        ("arrival_of_stragglers", ["decode"], {"decode": 0, "slow": None}),
        ("arrival_in_epochs", ["decode"], {"decode": 0, "slow": None}),
        ("inline_copy", ["h2d"], {"copy": 1e-6}),
    ],
)
def test_removing_a_service_is_what_the_simulator_says(name: str, removed: list[str], changes: dict) -> None:
    job = JOBS[name]
    _, totals = replay(model_of(job), subsets([removed]))
    truth = wall_s(simulate(job.without(**changes)))
    assert totals[1] / 1e9 == pytest.approx(truth, rel=0.02)


def test_another_depth_is_what_the_simulator_says() -> None:
    job = JOBS["depth_1"]
    _, totals = replay(model_of(job), Variants(np.ones((1, len(CAUSES))), depth=4))
    assert totals[0] / 1e9 == pytest.approx(wall_s(simulate(job.without(depth=4))), rel=0.02)


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(JOBS["two_workers"])
    whole = replay(model, subsets([["read"], ["decode"], ["h2d"]]))
    monkeypatch.setattr("profiler.replay._CHUNK_VALUES", 8 * 7)
    parts = replay(model, subsets([["read"], ["decode"], ["h2d"]]))
    np.testing.assert_allclose(parts[0], whole[0])
    np.testing.assert_allclose(parts[1], whole[1])


def test_stages_are_split_by_cause() -> None:
    job = Job(steps=20, read=10, decode=8, blocked=True, runq=3)
    model = model_of(job)
    per_batch = model.make.mean(axis=0) / 1e6
    assert per_batch[CAUSE["storage"]] == pytest.approx(9, abs=0.01)
    assert per_batch[CAUSE["read"]] == pytest.approx(1, abs=0.01)
    assert per_batch[CAUSE["cpu_contention"]] == pytest.approx(3, abs=0.01)
    assert per_batch[CAUSE["decode"]] == pytest.approx(5, abs=0.01)


def test_a_missing_reading_is_not_taken_for_zero() -> None:
    events = simulate(Job(steps=20, read=10, blocked=True, runq=3, readings=False)).events()
    table = timeline.build(events)
    made = batches(events, table)
    assert made.coverage == {"cpu_ns": 0.0, "runq_ns": 0.0, "inblock": 0.0, "major_faults": 0.0}
    assert (made.inblock == -1).all()
    assert made.service_ns[:, CAUSE["storage"]].sum() == 0
    assert made.service_ns[:, CAUSE["cpu_contention"]].sum() == 0
    assert made.service_ns[:, CAUSE["read"]].mean() / 1e6 == pytest.approx(10)


def test_a_collection_during_the_wait_is_replayed_once() -> None:
    log = simulate(Job(inline=True, read=10, steps=10))
    waits = [row for row in log.rows if row[1] == Stage.READ and row[6] % 3 == 0]
    log.rows += [
        (Kind.SPAN, Stage.GC, 0, 0, 0, -1, -1, row[7] + 10, row[7] + 4_000_010, -1, -1, -1, 0, 0) for row in waits
    ]
    events = log.events()
    table = timeline.build(events)
    (model,) = models(table, batches(events, table))
    _, totals = replay(model, subsets([["gc"]]))
    assert totals[0] == pytest.approx(model.measured_ns, rel=1e-6)
    assert totals[0] - totals[1] == pytest.approx(4e6 * len(waits), rel=1e-6)


def test_batches_of_a_test_are_left_out() -> None:
    """Only the stages inside a test's batch carry the flag, and step numbers and slots are the same."""
    events = simulate(Job(steps=10)).events()
    copy = events[events["actor"] == 1].copy()
    copy["actor"] = 2
    copy["flags"][(copy["stage"] >= Stage.READ) & (copy["stage"] <= Stage.COLLATE)] = Flag.TEST_PHASE
    both = np.concatenate([events, copy])
    made = batches(both, timeline.build(both))
    assert len(made) == 10
    assert set(made.actor.tolist()) == {1}


def test_a_longer_copy_is_what_the_simulator_says() -> None:
    job = JOBS["hidden_copy"]
    _, totals = replay(model_of(job), Variants(np.ones((1, len(CAUSES))), extra_copy_ns=np.array([22e6])))
    assert totals[0] / 1e9 == pytest.approx(wall_s(simulate(job.without(copy=30))), rel=0.01)


def test_how_far_ahead_copies_go_is_seen_where_nobody_tells() -> None:
    for staging in (1, 2, 4):
        events = simulate(JOBS["copies_far_ahead"].without(staging=staging)).events()
        table = timeline.build(events)
        (model,) = models(table, batches(events, table), depth=8)
        assert model.copies is not None
        assert model.copies.ahead == staging - 1


def test_batches_taken_as_they_arrive_are_told_from_the_steps_that_took_them() -> None:
    job = JOBS["arrival_in_epochs"]
    table = timeline.build(simulate(job).events())
    assert table.step.tolist() == [*range(200)]
    assert table.batch.tolist() != table.step.tolist()
    assert sorted(table.batch.tolist()) == [*range(200)]
    model = model_of(job)
    assert model.claims is not None
    assert model.known.all()
    assert np.array_equal(table.batch[model.claims], np.arange(200))
    strict, _ = replay(model_of(job.without(arrival=False)), recorded())
    assert replay(model, recorded())[1][0] < strict.sum(), "it was worth it"
