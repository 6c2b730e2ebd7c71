"""``emit: arrival``: every step of an epoch once, as it becomes ready, whatever is slow or killed, over resumes too."""

from __future__ import annotations

import heapq
import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline import Feed
from pipeline.crew import FeedError
from pipeline.emission import MOST_AHEAD, OVERTAKE, Given, checked, resumed
from pipeline.process import Process
from pipeline.ring import Blocked, Claim, State
from pipeline.ring_arrival import ArrivalRing, attach
from pipeline.shared import RingError
from pipeline.spec import FeedSpec, TransformSpec
from pipeline.transforms import TransformError
from profiler.errors import UsageError
from profiler.events import Kind, Stage
from profiler.recorder import Recorder
from profiler.store import load_run

# -- which steps were given out --------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(st.integers(0, 50), st.permutations(range(40)), st.integers(0, 40))
def test_given_counts_like_a_set(oldest: int, order: list[int], taken: int) -> None:
    steps, out = Given(oldest), set[int]()
    for step in order[:taken]:
        out.add(oldest + step)
        assert steps.add(oldest + step) == steps.oldest
    missing = [step for step in range(oldest, oldest + 60) if step not in out]
    assert steps.oldest == missing[0]
    assert [steps.missing(ahead) for ahead in range(5)] == missing[:5]
    assert steps.count == oldest + taken
    saved = checked(steps.oldest, json.loads(json.dumps(steps.ranges())))
    again = Given(steps.oldest, saved)
    assert (again.oldest, again.beyond) == (steps.oldest, steps.beyond)
    assert all(first <= last for first, last in saved)
    assert all(b - a > 1 for (_, a), (b, _) in itertools.pairwise(saved)), "as few ranges as there can be"
    assert resumed(steps.count, steps.count + 4, {"next_step": steps.oldest, "given": saved}) == (
        steps.oldest, missing[4], saved
    )  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [3, "ab", [[1]], [[5, 4]], [[4, 5]], [[7, 8], [8, 9]], [[7, 8], [9, 9]], [[6, "7"]], [[6, 7.0]], [[True, 9]],
     [[6, 5 + MOST_AHEAD]]],
    ids=repr,
)  # fmt: skip
def test_what_is_no_set_of_steps_beyond_the_position_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="given holds no steps beyond next_step"):
        checked(5, wrong)
    assert checked(5, [[6, 4 + MOST_AHEAD]]) == ((6, 4 + MOST_AHEAD),)


def test_a_position_of_another_number_of_steps_than_iterations_is_refused() -> None:
    assert resumed(7, 9, {}) == (7, 9, ())
    with pytest.raises(UsageError, match="position of another number of steps") as caught:
        resumed(7, 9, {"next_step": 3, "given": [[5, 6]]})
    assert "next_step 3 and 2 steps beyond it" in str(caught.value)


# -- the ring, in virtual time ---------------------------------------------------------------------------------------

EPOCH = 17


def simulate(
    depth: int, workers: int, services: list[int], taking: list[int], start: int, before: set[int], stop: int
) -> tuple[list[int], dict[int, int]]:
    """Steps in the order in which they are leased, and how many others overtook each."""
    runs = Given(start, ((step, step) for step in before)).ranges()
    ring = ArrivalRing.create(depth, 8, start_step=start, stop_step=stop, poison=True, given=runs)
    ring.epoch_end = lambda step: (step // EPOCH + 1) * EPOCH
    order: list[int] = []
    ready: list[int] = []  # in the order of becoming so
    claimed: list[int] = []
    news: list[tuple[int, int, int, Claim | int | None]] = []  # time, number, row (-1: the consumer)
    idle, free, now, number = list(range(workers)), True, 0, 0
    for row in idle:
        ring.enter(row)
    wanted = {step for step in range(start, stop) if step not in before}
    try:
        while True:
            for row in list(idle):
                found = ring.claim(row)
                if isinstance(found, Claim):
                    assert found.step in wanted
                    assert found.step < min(wanted - set(order)) + OVERTAKE * depth
                    claimed.append(found.step)
                    idle.remove(row)
                    number += 1
                    heapq.heappush(news, (now + services[found.step % len(services)], number, row, found))
            turn = ring.turn(-1) if free else -1
            if turn >= 0:
                epoch = min(wanted - set(order)) // EPOCH
                assert turn == next(step for step in ready if step // EPOCH == epoch), (
                    "the oldest ready one of its epoch"
                )
                ready.remove(turn)
                leased = ring.lease(turn)
                assert leased.hashes["fill"] == turn
                assert ring.payload(leased.slot)[0] == turn % 251
                order.append(turn)
                free, number = False, number + 1
                heapq.heappush(news, (now + taking[len(order) % len(taking)], number, -1, turn))
            if not news:
                break
            now, _, row, what = heapq.heappop(news)
            if isinstance(what, Claim):
                ring.payload(what.slot)[0] = what.step % 251
                ring.ready(row, what, items=1, epoch=0, hashes={"fill": what.step})
                ready.append(what.step)
                idle.append(row)
            else:
                assert isinstance(what, int)
                ring.release(what)
                free = True
        assert claimed == sorted(wanted), "claimed in order, each once"
        assert {ring.claim(row) for row in idle} == {Blocked.DONE}
        assert ring.counts()["free"] == depth
    finally:
        ring.close()
    return order, {step: sum(other > step for other in order[: order.index(step)]) for step in order}


times = st.lists(st.integers(0, 40), min_size=1, max_size=25)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), times, times, st.integers(0, 20), st.sets(st.integers(1, 30), max_size=12))
def test_any_service_times_give_each_step_once_oldest_first_an_epoch_after_the_other(
    depth: int, workers: int, services: list[int], taking: list[int], start: int, ahead: set[int]
) -> None:
    before = {start + step for step in ahead}
    order, overtaken = simulate(depth, workers, services, taking, start, before, 4 * EPOCH)
    assert sorted(order) == [step for step in range(start, 4 * EPOCH) if step not in before]
    assert [step // EPOCH for step in order] == sorted(step // EPOCH for step in order)
    assert max(overtaken.values(), default=0) < OVERTAKE * depth
    if workers == 1:
        assert order == sorted(order)


def test_one_slow_batch_costs_one_slot_and_not_the_ring() -> None:
    """Two workers, one batch takes as long as a whole epoch: the others are given out meanwhile, then it."""
    order, overtaken = simulate(3, 2, [10_000, *[1] * (EPOCH - 1)], [1], 0, set(), EPOCH)
    assert order == [*range(1, EPOCH), 0]
    assert overtaken[0] == EPOCH - 1


def test_a_worker_killed_inside_a_claim_leaves_its_step_to_nobody_else_until_that_is_noticed(dead: Process) -> None:
    ring = ArrivalRing.create(3, 8)
    try:
        for row in (0, 1):
            ring.enter(row)
        ring._slots[0] = (State.FILLING.value, 0, 0, 0, 0, 0, 1, 0, (0,) * 5)  # all but the cursor was written
        assert ring.claim(1) is Blocked.SLOT
        assert ring.reclaim(0, dead) is None
        found = ring.claim(1)
        assert isinstance(found, Claim)
        assert found.step == 0
        ring.ready(1, found, items=1, epoch=0, hashes={})
        assert ring.turn(0) == 0
    finally:
        ring.close()


def test_a_lost_batch_is_made_again_before_any_new_one_and_a_late_answer_is_refused(dead: Process) -> None:
    ring = ArrivalRing.create(2, 8, most=4)
    there = attach(ring.address)
    try:
        assert isinstance(there, ArrivalRing)
        for row in (0, 1):
            ring.enter(row)
        lost, other = there.claim(0), there.claim(1)
        assert isinstance(lost, Claim)
        assert isinstance(other, Claim)
        assert ring.reclaim(0, dead) == 0
        there.ready(1, other, items=1, epoch=0, hashes={})
        again = there.claim(1)
        assert again == (0, lost.slot, 1)
        assert ring.turn(0) == 1
        ring.lease(1)
        assert not ring.is_leased(0)
        ring.grow(3)
        ring.release(1)
        with pytest.raises(RingError, match="which it does not hold"):
            there.ready(0, lost, items=1, epoch=0, hashes={})
    finally:
        there.close()
        ring.close()


class AnyOrder(RuleBasedStateMachine):
    """Any sequence of events, workers lost among them: each step is leased once, none by two, none is forgotten."""

    rows = 3

    def __init__(self) -> None:
        super().__init__()
        self.ring = ArrivalRing.create(2, 16, most=5, given=((1, 2), (4, 4)))
        self.claims: dict[int, Claim] = {}
        self.ready: list[int] = []
        self.leased: list[int] = []
        self.taken = {1, 2, 4}
        with subprocess.Popen(["/bin/true"]) as child:
            child.wait()
            self.dead = Process(child.pid)
        for row in range(self.rows):
            self.ring.enter(row)

    @rule(row=st.integers(0, rows - 1))
    def claim(self, row: int) -> None:
        if row not in self.claims and isinstance(found := self.ring.claim(row), Claim):
            assert found.step not in {*self.taken, *self.ready, *(other.step for other in self.claims.values())}
            self.claims[row] = found

    @rule(row=st.integers(0, rows - 1))
    def make(self, row: int) -> None:
        if row in self.claims:
            done = self.claims.pop(row)
            self.ring.ready(row, done, items=1, epoch=0, hashes={"fill": done.step})
            self.ready.append(done.step)

    @rule(row=st.integers(0, rows - 1))
    def lose(self, row: int) -> None:
        lost = self.claims.pop(row, None)
        assert self.ring.reclaim(row, self.dead) == (lost.step if lost else None)
        self.ring.enter(row)

    @precondition(lambda self: self.ring.depth < 5)
    @rule()
    def grow(self) -> None:
        self.ring.grow(self.ring.depth + 1)

    @rule()
    def lease(self) -> None:
        turn = self.ring.turn(0)
        assert turn == (self.ready[0] if self.ready else -1)
        if turn >= 0:
            assert self.ring.lease(turn).hashes["fill"] == turn
            self.leased.append(self.ready.pop(0))
            self.taken.add(turn)

    @precondition(lambda self: self.leased)
    @rule(which=st.integers(0, 4))
    def release(self, which: int) -> None:
        self.ring.release(self.leased.pop(which % len(self.leased)))

    @invariant()
    def nothing_is_forgotten(self) -> None:
        counts = self.ring.counts()
        assert sum(counts.values()) == self.ring.depth
        assert (counts["filling"], counts["ready"], counts["leased"]) == (
            len(self.claims), len(self.ready), len(self.leased)
        )  # fmt: skip
        begun = set(range(self.ring.next_step)) - self.taken
        assert len(begun) == counts["filling"] + counts["ready"] + counts["redo"]

    def teardown(self) -> None:
        self.ring.close()
        self.dead.close()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


@pytest.fixture
def dead() -> Iterator[Process]:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    process = Process(child)
    yield process
    process.close()


# -- a feed whose first thread is stuck ------------------------------------------------------------------------------

STUCK = FeedSpec(
    "memory:records=24,shape=1x4x4", 2, shuffle="full", seed=3, tail="partial", stop_step=36, threads=2, depth=2,
    emit="arrival", fingerprints="step", poison=True,
    transform=TransformSpec(python="tests.pipeline.functions:waits_at_the_gate"),
)  # fmt: skip
IN_ORDER = replace(STUCK, threads=0, emit="strict", transform=TransformSpec(python="tests.pipeline.functions:same"))


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with Feed(IN_ORDER) as feed:
        return [batch.hashes["fill"] for batch in feed]


def taken_while_stuck(feed: Feed, most: int) -> list[Any]:
    """Batches until there are ``most``, or until none comes within half a second."""
    got: list[Any] = []
    deadline = time.monotonic() + 20
    while len(got) < most and time.monotonic() < deadline:
        if feed.peek() is None:
            time.sleep(0.002)
            continue
        got.append(next(feed))
        got[-1].release()
        deadline = time.monotonic() + 0.5
    return got


def test_no_epoch_is_overtaken_and_the_stuck_batch_is_its_last(gate: Any, expected: list[int]) -> None:
    with Feed(STUCK) as feed:
        first = [batch.step for batch in taken_while_stuck(feed, 99)]
        assert len(first) == 11, "an epoch has twelve: the next one's are ready and wait"
        assert feed.stats()["slots"]["ready"] == 1
        stuck = ({*range(12)} - {*first}).pop()
        assert feed.next_step == stuck
        gate.set()
        rest = [(batch.step, batch.epoch, batch.hashes["fill"]) for batch in feed]
    assert rest[0][0] == stuck
    assert sorted([*first, *(step for step, _, _ in rest)]) == [*range(36)]
    assert [epoch for _, epoch, _ in rest] == [0, *[1] * 12, *[2] * 12]
    assert all(expected[step] == fill for step, _, fill in rest)


def test_a_stuck_batch_is_overtaken_by_so_many_and_then_waited_for(gate: Any) -> None:
    with Feed(replace(STUCK, source="memory:records=200,shape=1x4x4", stop_step=None)) as feed:
        got = [batch.step for batch in taken_while_stuck(feed, 99)]
        assert feed.next_step + OVERTAKE * STUCK.depth == max(got) + 1 == len(got) + 1
        gate.set()
        assert next(feed).step not in got
        assert feed.next_step == len(got) + 1


@pytest.mark.parametrize(
    "change",
    [{}, {"threads": 1, "depth": 5}, {"threads": 0}, {"emit": "strict"}, {"emit": "strict", "threads": 0, "depth": 1}],
    ids=str,
)
def test_a_position_with_gaps_is_gone_on_with_by_any_feed(
    gate: Any, expected: list[int], change: dict[str, Any], tmp_path: Path
) -> None:
    with Feed(STUCK) as feed:
        first = [(batch.step, batch.hashes["fill"]) for batch in taken_while_stuck(feed, 7)]
        deadline = time.monotonic() + 20
        while feed.peek() is None and time.monotonic() < deadline:
            time.sleep(0.002)  # leased before its turn: not given out
        state = json.loads(json.dumps(feed.state_dict()))
        gate.set()
    assert state["given"], "there is a gap"
    with Feed(replace(STUCK, **change)) as feed:
        feed.load_state_dict(state)
        assert feed.state_dict() == state
        assert len(feed) == 36 - 7
        gone_on = [(batch.step, batch.hashes["fill"]) for batch in feed]
        assert feed.state_dict().get("given") is None
    assert sorted(first + gone_on) == list(enumerate(expected)), "each step once, with its own bytes"
    if change.get("emit") == "strict" or change.get("threads") == 0:
        assert gone_on == sorted(gone_on)


def test_the_record_says_which_batch_each_turn_got(gate: Any, tmp_path: Path) -> None:
    with Recorder.open(tmp_path, "trainer", "trainer", 0) as recorder, Feed(STUCK, recorder=recorder) as feed:
        got = [batch.step for batch in taken_while_stuck(feed, 11)]
        gate.set()
        got += [batch.step for batch in feed]
    run = load_run(tmp_path)
    rows = run.events.filter(run.events["stage"].to_numpy() == Stage.ORDER).to_pylist()
    told = {row["step"]: row["items"] for row in rows if row["kind"] == Kind.MARK}
    assert told == {turn: step for turn, step in enumerate(got) if turn != step}
    assert len(told) >= 1
    waits = run.events.filter(run.events["stage"].to_numpy() == Stage.FEED_WAIT)["step"].to_pylist()
    assert sorted(set(waits)) == [*range(36)]
    assert [note["most_ahead"] for note in run.notes if note["note"] == "emission"] == [32]


def test_an_error_comes_when_no_other_batch_of_the_epoch_is_ready() -> None:
    """One thread ends with the first seven, the other goes on as far as it can: to the second one."""
    spec = replace(
        STUCK, source="memory:records=60,shape=1x4x4", batch=1, shuffle="none", stop_step=None,
        transform=TransformSpec(python="tests.pipeline.functions:breaks_on_label_7"),
    )  # fmt: skip
    with Feed(replace(spec, threads=0, stop_step=60, transform=TransformSpec())) as feed:
        sevens = [batch.step for batch in feed if batch.labels[0] == 7]
    got: list[int] = []
    with Feed(spec) as feed, pytest.raises(TransformError, match="seven is right out"):
        got.extend(batch.step for batch in feed)
    assert len(set(got)) == len(got)
    assert {*range(sevens[0])} <= {*got}
    assert not {*got} & {*sevens}


def test_tests_stay_strict_and_one_maker_is_in_order() -> None:
    with pytest.raises(UsageError, match="emit: arrival is for training batches alone"):
        Feed("memory:records=10,shape=1x4x4", "TEST", batch=2, emit="arrival")
    with pytest.raises(UsageError, match="emit: arrival is for training batches alone"):
        Feed("memory:records=10,shape=1x4x4", cycle=3, batch=2, emit="arrival")
    with pytest.raises(UsageError, match="unknown emit"):
        Feed("memory:records=10,shape=1x4x4", batch=2, emit="fair")
    with Feed("memory:records=10,shape=1x4x4", batch=2, emit="arrival", epochs=2) as feed:
        assert [batch.step for batch in feed] == [*range(10)]


def test_whoever_holds_all_slots_is_told(gate: Any) -> None:
    gate.set()
    with Feed(STUCK) as feed:
        held = [next(feed).hold() for _ in range(2)]
        with pytest.raises(FeedError, match="needs a slot, which the consumer still holds"):
            next(feed)
        for batch in held:
            batch.release()
        assert len({batch.step for batch in held} | {batch.step for batch in feed}) == 36
