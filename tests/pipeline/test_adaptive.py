"""Decisions about workers and slots, against a simulated feed whose best settings are found by trying them all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import adaptive
from pipeline.adaptive import LOOK_BATCHES, MOST_LOOKS, Decision, IdleCpus, Limits, Look, Tuner, decide

MS = 1e6
LIMITS = Limits((1, 8), (4, 32))


@dataclass
class Simulated:
    """Strict order, a ring, workers that claim greedily. ``cpus``: of the machine; ``cpu``: share of the making that
    needs one. ``scale``: a limit that workers share (a disk): no more batches a second than it gives."""

    make_ms: Callable[[int], float]
    step_ms: Callable[[int], float]
    cpus: float = 16
    cpu: float = 1.0
    shared_ms: float = 0.0
    held: int = 1
    step: int = 0
    workers_free: list[float] = field(default_factory=list)

    def run(self, workers: int, depth: int, batches: int) -> Look:
        """So many batches from the present one on, in a ring that is empty at the start of it."""
        stretch = max(1.0, workers * self.cpu / max(0.1, self.cpus))
        free, released, disk = [0.0] * workers, [0.0] * depth, 0.0
        makes, steps, waits, now = [], [], [], 0.0
        warm = 2 * depth
        for i in range(warm + batches):
            k = self.step + i
            worker = min(range(workers), key=free.__getitem__)
            claim = max(free[worker], released[i % depth])
            took = self.make_ms(k) * stretch
            ready = max(claim + took, disk + self.shared_ms) if self.shared_ms else claim + took
            disk = ready if self.shared_ms else 0.0
            free[worker] = ready
            wait = max(0.0, ready - now)
            now = max(now, ready)
            step = self.step_ms(k)
            now += step
            released[i % depth] = now
            if i == warm:
                begun = now - step - wait
            if i >= warm:
                makes.append(ready - claim)
                steps.append(step)
                waits.append(wait)
        self.step += warm + batches
        busy = sum(makes) / stretch * self.cpu * min(1.0, stretch) if makes else 0.0
        idle = max(0.0, self.cpus - min(self.cpus, busy / max(1e-9, now - begun)))
        return Look(
            workers, depth, float(np.mean(makes)) * MS, max(makes) * MS, float(np.median(steps)) * MS,
            sorted(steps)[len(steps) * 9 // 10] * MS, float(np.mean(waits)) * MS, self.held, idle,
        )  # fmt: skip


def settle(feed: Simulated, limits: Limits, workers: int, depth: int) -> tuple[list[Look], Decision]:
    looks: list[Look] = []
    for _ in range(2 * MOST_LOOKS):
        looks.append(feed.run(workers, depth, LOOK_BATCHES))
        decision = decide(looks, limits)
        assert limits.workers[0] <= decision.workers <= limits.workers[1]
        assert depth <= decision.depth <= limits.depth[1], "slots in use are never fewer"
        assert decision.reason
        workers, depth = decision.workers, decision.depth
        if decision.settled:
            return looks, decision
    raise AssertionError("never settled")


def always(value: float) -> Callable[[int], float]:
    return lambda k: value


def jitter(mean: float, spread: float, seed: int) -> Callable[[int], float]:
    draws = np.random.default_rng(seed).gamma(1 / spread**2, mean * spread**2, 4096)
    return lambda k: float(draws[k % 4096])


def every(n: int, slow: float, otherwise: float) -> Callable[[int], float]:
    return lambda k: slow if k % n == n - 1 else otherwise


def test_decode_bound_takes_the_workers_that_the_services_ask_for() -> None:
    looks, decision = settle(Simulated(always(50), always(10), cpus=16), LIMITS, 2, 5)
    assert 5 <= decision.workers <= 7
    assert looks[-1].starved < 0.05
    assert len(looks) <= 5


def test_no_more_than_the_cpus_bear() -> None:
    _, decision = settle(Simulated(always(200), always(1), cpus=3), LIMITS, 1, 4)
    assert decision.workers == 3
    _, decision = settle(Simulated(always(200), always(1), cpus=16), LIMITS, 2, 5)
    assert decision.workers == 8


def test_a_busy_machine_gets_no_more_workers() -> None:
    look = Look(1, 4, 50 * MS, 50 * MS, 10 * MS, 10 * MS, 40 * MS, 1, 0.1)
    decision = decide([look], LIMITS)
    assert (decision.workers, decision.depth) == (1, 4)
    assert "no CPU is idle" in decision.reason
    assert not decide([look, look], LIMITS).settled  # busy with the start of the job, perhaps
    assert decide([look, look, replace(look, idle_cpus=2.0)], LIMITS).workers > 1
    last = decide([look] * MOST_LOOKS, LIMITS)
    assert (last.workers, last.settled) == (1, True)
    assert "no CPU is idle" in last.reason


def test_consumer_bound_stays_with_few() -> None:
    looks, decision = settle(Simulated(always(5), always(20), cpus=16), LIMITS, 1, 4)
    assert (decision.workers, decision.depth, len(looks)) == (1, 4, 2)


def test_workers_beyond_need_are_parked_and_never_below_what_starved() -> None:
    _, decision = settle(Simulated(always(5), always(20), cpus=16), LIMITS, 8, 11)
    assert decision.workers == 1
    assert "enough" in decision.reason or decision.settled
    few = Look(2, 8, 50 * MS, 50 * MS, 20 * MS, 20 * MS, 5 * MS, 1, 9.0)
    many = Look(8, 11, 10 * MS, 10 * MS, 20 * MS, 20 * MS, 0.0, 1, 9.0)
    assert decide([few, many], LIMITS).workers == 3


def test_rare_slow_batches_get_slots_and_not_workers() -> None:
    feed = Simulated(every(12, 60, 4), always(10), cpus=16)
    looks, decision = settle(feed, LIMITS, 2, 5)
    assert decision.depth >= 9
    assert decision.workers <= 3
    assert feed.run(decision.workers, decision.depth, 240).starved < 0.5 * looks[0].starved


def test_a_shared_limit_is_found_by_trying_and_left_alone() -> None:
    """A disk that gives one batch in 20 ms to whoever asks: more workers only queue, and they are sent away again."""
    feed = Simulated(always(15), always(1), cpus=16, cpu=0.1, shared_ms=20)
    looks, decision = settle(feed, LIMITS, 1, 4)
    assert decision.workers == 1
    assert "no faster" in decision.reason
    assert len(looks) == 2


def test_workers_that_mostly_do_nothing_are_reduced_to_those_that_do() -> None:
    before = Look(2, 5, 100 * MS, 100 * MS, 1 * MS, 1 * MS, 49 * MS, 1, 20.0)
    after = Look(20, 23, 400 * MS, 400 * MS, 1 * MS, 1 * MS, 19 * MS, 1, 15.0)
    decision = decide([before, after], Limits((1, 32), (4, 32)))
    assert 5 <= decision.workers <= 6
    assert decision.settled


def test_reasons_hold_the_figures() -> None:
    look = Look(1, 4, 50 * MS, 60 * MS, 10 * MS, 10 * MS, 40 * MS, 1, 3.0)
    assert decide([look], LIMITS).reason == (
        "the consumer waits 80 % of its time: a batch takes 50 ms to make and a step 10 ms; 3.0 CPUs are idle"
    )


SERVICES = st.builds(
    lambda mean, spread, seed: jitter(mean, spread, seed),
    st.floats(0.5, 100), st.floats(0.05, 1.2), st.integers(0, 1000),
)  # fmt: skip


@given(
    make=SERVICES, step=SERVICES, cpus=st.integers(1, 16), most=st.integers(1, 12), deepest=st.integers(4, 32),
    fixed=st.sampled_from(["nothing", "workers", "depth"]), held=st.integers(1, 3), start=st.integers(1, 12),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_it_always_settles_within_the_limits(
    make: Callable[[int], float], step: Callable[[int], float], cpus: int, most: int, deepest: int, fixed: str,
    held: int, start: int,
) -> None:  # fmt: skip
    start = min(start, most)
    limits = Limits((start, start) if fixed == "workers" else (1, most), (4, 4) if fixed == "depth" else (4, deepest))
    looks, decision = settle(Simulated(make, step, cpus=cpus, held=held), limits, start, 4)
    assert len(looks) <= MOST_LOOKS
    settings_seen = [(look.workers, look.depth) for look in looks]
    changes = sum(a != b for a, b in itertools.pairwise(settings_seen))
    assert changes <= MOST_LOOKS
    # Hysteresis: who was sent away is not called back.
    downs = [b[0] < a[0] for a, b in itertools.pairwise(settings_seen) if a[0] != b[0]]
    assert sum(a and not b for a, b in itertools.pairwise(downs)) <= 1
    if fixed == "workers":
        assert decision.workers == start
    if fixed == "depth":
        assert decision.depth == 4


@given(
    make=st.floats(1, 200), step=st.floats(1, 50), spread=st.floats(0.02, 0.3), cpus=st.integers(2, 16),
    seed=st.integers(0, 50),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_where_it_settles_is_near_the_best_there_is(
    make: float, step: float, spread: float, cpus: int, seed: int
) -> None:
    """At most as many workers as CPUs: 0.88 of the throughput of the best settings, found by trying all."""
    limits = Limits((1, min(8, cpus)), (4, 32))
    feed = Simulated(jitter(make, spread, seed), always(step), cpus=cpus)
    _, decision = settle(feed, limits, min(2, cpus - 1), 5)

    def period(workers: int, depth: int) -> float:
        return replace(feed, step=0).run(workers, depth, 400).period_ns

    best = min(period(workers, 32) for workers in range(1, limits.workers[1] + 1))
    assert best >= 0.88 * period(decision.workers, decision.depth)
    # And not by taking everything: half the workers would not do.
    if decision.workers > 3:
        assert period(math.ceil(decision.workers / 2), 32) > 1.02 * period(decision.workers, decision.depth)


def test_limits_of_memory_and_the_start() -> None:
    assert adaptive.start_depth(0) == 2
    assert [adaptive.start_depth(workers) for workers in (1, 2, 6)] == [4, 5, 9]
    assert adaptive.most_depth(4, 1 << 20, 1 << 40) == 32
    assert adaptive.most_depth(4, 100 << 20, 1 << 40) == 10  # 1 GiB
    assert adaptive.most_depth(4, 1 << 20, 64 << 20) == 16  # a quarter of what is there
    assert adaptive.most_depth(5, 1 << 30, 1 << 30) == 5  # what it starts with is not its to refuse


def feed_tuner(tuner: Tuner, batches: int, wait_ns: int = int(40 * MS), **settings: int) -> list[Decision]:
    found = []
    for step in range(batches):
        decision = tuner.delivered(
            step, settings.get("workers", 1), settings.get("depth", 4), make_ns=int(50 * MS), step_ns=int(10 * MS),
            wait_ns=wait_ns, held=1,
        )  # fmt: skip
        if decision is not None:
            found.append(decision)
    return found


def ticking(tick: float) -> Callable[[], float]:
    times = itertools.count()
    return lambda: next(times) * tick


def test_tuner_looks_once_a_look_and_skips_what_was_under_way() -> None:
    tuner = Tuner(LIMITS, idle_cpus=lambda: 3.0, clock=ticking(1.0))
    tuner.wait(10)
    assert feed_tuner(tuner, 10 + LOOK_BATCHES - 1) == []
    (decision,) = feed_tuner(tuner, 1)
    assert decision.workers > 1
    assert tuner.decisions[0]["before"] == {"workers": 1, "depth": 4}
    assert feed_tuner(tuner, 4 + LOOK_BATCHES - 1, workers=4, depth=7) == []  # the ring's content first


def test_a_look_takes_a_quarter_of_a_second_at_least() -> None:
    tuner = Tuner(LIMITS, idle_cpus=lambda: 3.0, clock=ticking(0.001))
    assert feed_tuner(tuner, LOOK_BATCHES + 240) == []
    assert len(feed_tuner(tuner, 20)) == 1


def test_tuner_ends_and_nothing_is_changed_from_then_on() -> None:
    tuner = Tuner(LIMITS, idle_cpus=lambda: 0.0, clock=ticking(1.0))
    (last,) = feed_tuner(tuner, MOST_LOOKS * LOOK_BATCHES)
    assert last.settled
    assert tuner.settled
    assert [made["final"] for made in tuner.decisions] == [True]
    assert feed_tuner(tuner, 200) == []


def test_nothing_is_decided_where_the_user_said_all() -> None:
    tuner = Tuner(Limits((2, 2), (8, 8)))
    assert tuner.settled
    assert not tuner.decides
    assert feed_tuner(tuner, 200) == []


def test_slots_that_could_not_be_had_are_the_limit() -> None:
    tuner = Tuner(LIMITS, idle_cpus=lambda: 3.0, clock=ticking(1.0))
    feed_tuner(tuner, LOOK_BATCHES)
    tuner.refused(workers=4, depth=4, why="no memory")
    assert tuner.limits.depth == (4, 4)
    assert tuner.decisions[-1]["refused"] == "no memory"


def test_idle_cpus_reads_what_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive.os, "sched_getaffinity", lambda pid: {0, 2})
    monkeypatch.setattr(adaptive, "usable_cpus", lambda: 2)
    stat = tmp_path / "stat"

    def write(*rows: tuple[int, int, int]) -> None:
        lines = [f"cpu{name} {used} 0 0 {idle} 0 0 0 0 0 0" for name, used, idle in rows]
        stat.write_text("cpu 1 2 3 4\n" + "\n".join(lines) + "\n")

    write((0, 100, 100), (1, 0, 0), (2, 100, 100))
    idle = IdleCpus(stat)
    write((0, 150, 150), (1, 900, 0), (2, 100, 200))
    assert idle() == pytest.approx(2 * 150 / 200)
    monkeypatch.setattr(adaptive, "usable_cpus", lambda: 1)
    write((0, 150, 150), (1, 900, 0), (2, 100, 200))
    limited = IdleCpus(stat)
    write((0, 150, 250), (1, 900, 0), (2, 100, 300))
    assert limited() == 1.0, "no more than the control group may use"
    stat.unlink()
    assert idle() == 2.0
    assert 0 <= IdleCpus()() <= 4096
