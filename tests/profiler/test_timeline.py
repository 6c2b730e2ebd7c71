"""Timeline: the partition adds up, tests and open spans are kept apart, resumed steps are kept twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler import timeline
from profiler.events import EVENT, PART_OF_STAGE, PARTITION, Flag, Kind, Stage
from tests.profiler import synthetic
from tests.profiler.synthetic import Job, simulate


def rows(*events: tuple[int, int, int, int, int]) -> np.ndarray:
    """EVENT[n] of the trainer from (stage, t0, t1, step, flags)."""
    out = np.zeros(len(events), EVENT)
    for name in ("cpu_ns", "runq_ns", "inblock", "slot"):
        out[name] = -1
    for i, (stage, t0, t1, step, flags) in enumerate(events):
        out[i]["kind"], out[i]["stage"], out[i]["t0_ns"], out[i]["t1_ns"] = Kind.SPAN, stage, t0, t1
        out[i]["step"], out[i]["flags"] = step, flags
    return out


def part(table: timeline.Timeline, name: str, row: int = 0) -> int:
    return int(table.parts_ns[row, PARTITION.index(name)])


def test_own_time_excludes_what_is_nested() -> None:
    table = timeline.build(
        rows(
            (Stage.STEP, 0, 1000, 0, 0),
            (Stage.FEED_WAIT, 0, 100, 0, 0),
            (Stage.COMPUTE, 200, 800, 0, 0),
            (Stage.GC, 300, 350, -1, 0),
            (Stage.ALLOC, 400, 420, 0, 0),
            (Stage.CHECKPOINT, 850, 950, 0, 0),
        )
    )
    expected = {"feed_wait": 100, "compute": 530, "gc": 50, "alloc": 20, "checkpoint": 100, "unattributed": 200}
    assert {name: part(table, name) for name in PARTITION if part(table, name)} == expected


def test_everything_inside_a_test_is_test() -> None:
    table = timeline.build(
        rows(
            (Stage.STEP, 0, 1000, 0, 0),
            (Stage.TEST, 0, 600, 0, 0),
            (Stage.FEED_WAIT, 10, 100, 0, Flag.TEST_PHASE),
            (Stage.FORWARD, 100, 500, 0, Flag.TEST_PHASE),
            (Stage.FEED_WAIT, 600, 700, 0, 0),
            (Stage.COMPUTE, 700, 1000, 0, 0),
        )
    )
    assert part(table, "test") == 600
    assert part(table, "feed_wait") == 100
    assert (table.wait_t0_ns[0], table.wait_t1_ns[0]) == (600, 700)
    assert table.stall_ns[0] == 100


def test_a_collection_across_a_border_is_counted_once() -> None:
    events = rows(
        (Stage.STEP, 0, 100, 0, 0),
        (Stage.FEED_WAIT, 0, 40, 0, 0),
        (Stage.GC, 30, 60, -1, 0),
        (Stage.COMPUTE, 50, 100, 0, 0),
    )
    table = timeline.build(events)
    assert table.parts_ns.sum() == 100
    assert part(table, "gc") == 20
    assert part(table, "feed_wait") == 40


def test_inline_stages_count_as_waiting() -> None:
    job = Job(inline=True, read=30, steps=5)
    table = timeline.build(simulate(job).events())
    wait = table.parts_ns[:, PARTITION.index("feed_wait")] / 1e6
    assert wait == pytest.approx([job.read + job.decode + job.augment + job.collate + 0.01] * 5, abs=1e-3)


def test_a_wait_while_the_device_computes_is_no_starvation() -> None:
    events = rows(
        (Stage.STEP, 0, 100, 0, 0),
        (Stage.FEED_WAIT, 10, 90, 0, 0),
        (Stage.DEVICE, 0, 60, 0, 0),
    )
    table = timeline.build(events)
    assert (part(table, "feed_wait"), part(table, "compute"), part(table, "unattributed")) == (30, 50, 20)


@pytest.mark.parametrize(
    "job",
    [Job(read=40, steps=30), Job(test_every=7, checkpoint_every=9, steps=30), Job(workers=3, jitter=0.5, steps=30)],
)
def test_parts_add_up_exactly(job: Job) -> None:
    table = timeline.build(simulate(job).events())
    assert (table.parts_ns.sum(axis=1) == table.wall_ns).all()
    assert len(table) == 30
    assert table.first.tolist() == [True] + [False] * 29


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_spans_add_up_to_the_step(data: st.DataObject) -> None:
    """Also spans that do not nest: an instant belongs to one part."""
    stages = st.sampled_from(sorted(PART_OF_STAGE))
    spans = data.draw(st.lists(st.tuples(stages, st.integers(0, 300), st.integers(0, 120)), max_size=12))
    events = rows(
        (Stage.STEP, 0, 100, 0, 0),
        (Stage.STEP, 100, 250, 1, 0),
        *((stage, t0, t0 + length, 0, 0) for stage, t0, length in spans),
    )
    table = timeline.build(events)
    assert table.wall_ns.tolist() == [100, 150]
    assert (table.parts_ns.sum(axis=1) == table.wall_ns).all()
    assert (table.parts_ns >= 0).all()


def test_open_spans_are_replaced_by_their_end() -> None:
    events = rows((Stage.STEP, 0, 50, 3, 0), (Stage.STEP, 0, 90, 3, 0), (Stage.STEP, 0, 100, 3, 0))
    events["kind"] = [Kind.OPEN, Kind.OPEN, Kind.SPAN]
    assert timeline.resolve_open(events)["t1_ns"].tolist() == [100]
    assert timeline.resolve_open(events[:2])["t1_ns"].tolist() == [90]
    table = timeline.build(events[:2])
    assert table.open.tolist() == [True]


def test_a_wait_in_progress_counts_when_the_run_was_killed() -> None:
    events = rows((Stage.STEP, 0, 100, 0, 0), (Stage.STEP, 100, 200, 1, 0), (Stage.FEED_WAIT, 210, 5000, 2, 0))
    events["kind"][2] = Kind.OPEN
    table = timeline.build(events)
    assert table.step.tolist() == [0, 1, 2]
    assert table.open.tolist() == [False, False, True]
    assert part(table, "feed_wait", 2) == 4790
    assert table.steady.tolist() == [False, True, False]


def test_a_resumed_run_keeps_repeated_steps_in_time_order() -> None:
    first = simulate(Job(steps=10)).events()
    again = simulate(Job(steps=8, first_step=6, origin=synthetic.T0 + 10**12)).events()
    table = timeline.build(np.concatenate([again, first]))
    assert table.step.tolist() == [*range(10), *range(6, 14)]
    assert table.segment.tolist() == [0] * 10 + [1] * 8
    assert np.flatnonzero(table.first).tolist() == [0, 10]


def test_a_run_without_steps_is_empty() -> None:
    table = timeline.build(np.zeros(0, EVENT))
    assert len(table) == 0
    assert table.parts_ns.shape == (0, len(PARTITION))
