"""Blame: the injected fault is named, its size is the simulator's, hidden faults get nothing, shares add up."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler import timeline
from profiler.advice import Setting
from profiler.events import WHERE, WHY
from profiler.services import CAUSE, CAUSES
from profiler.stalls import Attribution, _spread, attribute, shapley_weights
from profiler.timeline import PART
from tests.profiler.synthetic import Job, Log, simulate, stall_s, wall_s


def blame(job: Job, log: Log | None = None) -> Attribution:
    log = log or simulate(job)
    events = log.events()
    lost = {note["step"] for note in log.notes if note["note"] == "worker_lost"}
    return attribute(timeline.build(events), events, depth=job.depth, lost_steps=lost, setting=Setting(cores=2))


def seconds(found: Attribution, where: str, why: str | None = None) -> float:
    return sum(c.seconds for c in found.causes if c.where == where and why in (None, c.why))


def test_a_feed_that_keeps_up_is_no_stall() -> None:
    found = blame(Job(compute=20))
    assert found.causes == ()
    assert found.stall_s == 0
    assert found.slack["decode"]["slack_ms"] == pytest.approx(17.6, abs=1.0)


@pytest.mark.parametrize("stage", ["read", "decode", "function", "augment", "collate"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_slow_stage_is_named(stage: str, workers: int) -> None:
    """A 40 ms feed before a 20 ms step; with two workers twice as slow, so that it still shows."""
    job = Job(workers=workers, **{stage: 40.0 * workers})
    found = blame(job)
    top = found.causes[0]
    assert (top.where, top.why) == (stage, "throughput")
    assert top.share > 0.9
    truth = wall_s(simulate(job)) - wall_s(simulate(job.without(**{stage: 0.0})))
    assert top.gain_alone_s == pytest.approx(truth, rel=0.05)
    assert top.seconds == pytest.approx(truth, rel=0.12)
    assert "feed.workers" in top.remedy


def test_the_stall_is_wall_less_compute() -> None:
    job = Job(read=40)
    found = blame(job)
    assert found.stall_s == pytest.approx(stall_s(simulate(job), job), rel=1e-6)
    assert found.replay_error == pytest.approx(0, abs=1e-3)


def test_two_equal_stages_share_the_blame() -> None:
    found = blame(Job(read=30, decode=30, workers=2))
    assert seconds(found, "read") == pytest.approx(seconds(found, "decode"), rel=0.02)


def test_a_hidden_fault_gets_nothing() -> None:
    """30 ms decodes by two workers fit under a 20 ms step; the checkpoint does not."""
    found = blame(Job(workers=2, decode=30, checkpoint_every=40, checkpoint=300))
    assert (found.causes[0].where, found.causes[0].share > 0.9) == ("checkpoint", True)
    assert seconds(found, "decode") - seconds(found, "decode", "cold_start") < 0.01
    assert found.slack["decode"]["slack_ms"] > 1


def test_blocked_reads_are_storage() -> None:
    found = blame(Job(read=40, blocked=True))
    assert found.causes[0].where == "storage"
    assert found.causes[0].evidence["blocks_read"] > 0


def test_reads_without_readings_stay_reads() -> None:
    found = blame(Job(read=40, blocked=True, readings=False))
    assert found.causes[0].where == "read"
    assert found.causes[0].evidence["blocks_read"] is None
    assert "no reading" in found.causes[0].evidence["blocks_read_reason"]


def test_run_queue_time_is_contention() -> None:
    found = blame(Job(decode=60, runq=45))
    assert found.causes[0].where == "cpu_contention"
    assert seconds(found, "cpu_contention") > 2 * seconds(found, "decode")


def test_single_slow_batches_are_stragglers() -> None:
    job = Job(workers=2, jitter=0.2, slow=lambda step: {"decode": 400.0} if step % 50 == 25 else {})
    found = blame(job)
    top = found.causes[0]
    assert (top.where, top.why) == ("decode", "straggler")
    assert {worst["step"] for worst in top.evidence["worst_steps"]} <= {25, 75, 125, 175}
    truth = wall_s(simulate(job)) - wall_s(simulate(job.without(slow=None)))
    assert top.seconds == pytest.approx(truth, rel=0.05)


def test_a_ring_of_depth_one_is_backpressure() -> None:
    job = Job(depth=1, read=10, release_late=True)
    found = blame(job)
    top = found.causes[0]
    assert (top.where, top.why) == ("read", "backpressure")
    assert "feed.depth" in top.remedy
    by_depth = sum(cause.seconds for cause in found.causes if cause.why == "backpressure")
    truth = wall_s(simulate(job)) - wall_s(simulate(job.without(depth=8)))
    assert by_depth == pytest.approx(truth, rel=0.05)


def test_a_late_start_is_cold() -> None:
    found = blame(Job(startup=2000))
    assert {cause.why for cause in found.causes} == {"cold_start"}
    assert found.cold_stall
    assert not found.steady_stall
    assert found.stall_s == pytest.approx(2.0, abs=0.1)


def test_a_lost_worker_is_a_fault() -> None:
    job = Job(read=15, kill_worker_at=80, restart=900)
    found = blame(job)
    top = found.causes[0]
    assert (top.where, top.why) == ("unknown", "fault")
    assert top.evidence["worst_steps"][0]["step"] == 80
    assert top.seconds == pytest.approx(
        wall_s(simulate(job)) - wall_s(simulate(job.without(kill_worker_at=-1))), rel=0.1
    )


def test_the_inline_engine_is_serial() -> None:
    job = Job(inline=True, read=10)
    found = blame(job)
    assert found.causes[0].where == "read"
    assert found.causes[0].seconds == pytest.approx(job.steps * 0.010, rel=0.02)
    assert "feed.engine" in found.causes[0].remedy


def test_without_worker_records_the_wait_is_of_unknown_origin() -> None:
    log = simulate(Job(read=40))
    log.rows[:] = [row for row in log.rows if row[3] == 0]
    found = blame(Job(), log)
    assert (found.causes[0].where, found.causes[0].share > 0.9) == ("unknown", True)


def test_a_killed_run_is_blamed_up_to_its_end() -> None:
    found = blame(Job(read=40, stop_at=3010))
    assert found.causes[0].where == "read"
    assert found.replay_error < 0.01


def test_events_lost_with_a_process_are_filled_in() -> None:
    log = simulate(Job(read=40))
    log.rows[:] = [row for row in log.rows if not (row[3] == 1 and 100 <= row[6] < 105)]
    found = blame(Job(), log)
    assert found.causes[0].where == "read"
    assert found.replay_error < 0.03


def test_pairs_to_fix_together() -> None:
    """The copy and the feed each hold the step up to the same point: alone, neither helps."""
    found = blame(Job(read=27, h2d=8, compute=20))
    assert any(set(pair["where"]) == {"read", "h2d"} for pair in found.fix_together)


def test_a_hidden_copy_is_no_stall_and_shows_its_slack() -> None:
    found = blame(Job(copy=8, compute=20))
    assert not [cause for cause in found.causes if cause.where == "h2d"]
    assert found.slack["h2d"]["service_ms"] == pytest.approx(8, abs=0.1)
    assert found.slack["h2d"]["slack_ms"] == pytest.approx(12.3, abs=0.6)


def test_of_a_long_copy_what_compute_does_not_hide_is_blamed() -> None:
    job = Job(copy=30, compute=20, steps=100)
    log = simulate(job)
    found = blame(job, log)
    assert found.causes[0].where == "h2d"
    assert found.causes[0].share > 0.95
    assert found.causes[0].seconds == pytest.approx(100 * 10e-3, rel=0.05)
    table = timeline.build(log.events())
    np.testing.assert_array_equal(table.parts_ns.sum(axis=1), table.wall_ns)
    assert np.median(table.parts_ns[:, PART["h2d"]]) / 1e6 == pytest.approx(10, abs=0.2)


def test_a_fast_feed_does_not_hide_the_copy_behind_it() -> None:
    """Waiting for the feed and for the copy is not the sum of both: without the feed's the copy would hide."""
    found = blame(Job(read=45, copy=8, compute=20))
    assert found.causes[0].where == "read"


def test_intervals_hold_the_figure_and_are_repeatable() -> None:
    job = Job(read=40, jitter=0.5)
    one, two = blame(job), blame(job)
    assert one.causes == two.causes
    low, high = one.causes[0].ci95_s
    assert low < one.causes[0].seconds < high


@settings(max_examples=25, deadline=None)
@given(
    read=st.floats(0.1, 60), decode=st.floats(0.1, 60), workers=st.integers(1, 3), depth=st.integers(1, 6),
    h2d=st.floats(0, 5), host=st.floats(0, 5), jitter=st.floats(0, 0.9), late=st.booleans(), inline=st.booleans(),
    checkpoint=st.integers(0, 9), copy=st.sampled_from([0.0, 0.0, 3.0, 19.0, 31.0]), staging=st.integers(1, 3),
)  # fmt: skip
def test_shares_add_up(
    read, decode, workers, depth, h2d, host, jitter, late, inline, checkpoint, copy, staging
) -> None:  # type: ignore[no-untyped-def]
    job = Job(
        steps=30, read=read, decode=decode, workers=workers, depth=depth, h2d=h2d, host=host, jitter=jitter,
        release_late=late and not copy, inline=inline, checkpoint_every=checkpoint, checkpoint=60, copy=copy,
        staging=staging,
    )  # fmt: skip
    found = blame(job)
    assert found.replay_error < 0.02
    assert all(cause.where in WHERE and cause.why in WHY for cause in found.causes)
    assert all(cause.seconds >= 0 for cause in found.causes)
    if found.causes:
        assert sum(cause.share for cause in found.causes) == pytest.approx(1, abs=1e-9)
        assert sum(cause.seconds for cause in found.causes) == pytest.approx(found.stall_s, rel=1e-9)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_shapley_weights_are_the_definition(k: int) -> None:
    value = np.random.default_rng(k).random(1 << k)
    expected = np.zeros(k)
    orders = list(itertools.permutations(range(k)))
    for order in orders:
        seen = 0
        for player in order:
            expected[player] += value[seen | (1 << player)] - value[seen]
            seen |= 1 << player
    np.testing.assert_allclose(value @ shapley_weights(k), expected / len(orders))


def test_the_outage_of_one_of_two_workers_is_the_fault_too() -> None:
    """While one worker is away the other cannot keep up alone; with both there is no stall."""
    job = Job(workers=2, read=32, kill_worker_at=80, restart=1500)
    found = blame(job)
    truth = wall_s(simulate(job)) - wall_s(simulate(job.without(kill_worker_at=-1)))
    assert truth > 0.4
    assert (found.causes[0].where, found.causes[0].why) == ("unknown", "fault")
    assert seconds(found, "unknown", "fault") == pytest.approx(truth, rel=0.15)
    assert found.causes[0].gain_alone_s == pytest.approx(truth, rel=0.1)


def test_merged_causes_are_split_by_each_steps_own_services() -> None:
    """Copies of 10 us and a few short snapshots are judged together; each keeps to the steps that had it."""
    found = blame(Job(h2d=0.01, host=1.0, checkpoint_every=50, checkpoint=0.9))
    assert {"h2d", "checkpoint"} <= set(found.merged)
    ms = {cause.where: cause.evidence for cause in found.causes}
    assert [worst["step"] for worst in ms["checkpoint"]["worst_steps"]] in ([49, 99, 149], [99, 149, 199])
    assert ms["checkpoint"]["steps"] == 4
    assert ms["checkpoint"]["worst_steps"][0]["ms"] == pytest.approx(0.9, rel=0.05)
    h2d = found.per_step_ms[:, CAUSE["h2d"]]
    assert h2d.max() == pytest.approx(0.01, rel=0.05)


def test_lateness_is_booked_at_the_step_that_made_it() -> None:
    service = np.zeros((4, len(CAUSES)))
    service[1, CAUSE["read"]], service[1, CAUSE["gc"]] = 3.0, 1.0
    spread = _spread(np.array([[1.0], [2.0], [4.0], [1.0]]), [["read", "gc"]], service)
    assert spread[:, CAUSE["read"]].tolist() == [0, 6, 0, 0]
    assert spread[:, CAUSE["gc"]].tolist() == [0, 2, 0, 0]


def test_no_cause_is_folded_into_a_place_it_is_not_of() -> None:
    """Small causes of known places are no unknown time, and the loop's own gaps are none of the feed's."""
    found = blame(Job(read=40, gap=0.3, checkpoint_every=100, checkpoint=2))
    unknown = [cause for cause in found.causes if cause.where == "unknown"]
    assert sum(cause.seconds for cause in unknown if cause.side == "loop") < 200 * 0.3e-3
    assert any(cause.where == "checkpoint" for cause in found.causes)
