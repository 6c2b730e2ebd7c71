"""How many workers and slots a feed needs, from what its batches took. :func:`decide` is pure; :class:`Tuner` asks it.

A *look* is the means of some batches that were delivered under the same settings. After each, `decide` says what to
change and why, or that this is it. It starts with few, and the rules are:

* The consumer hardly waits: this is it. Workers that are certainly too many are parked.
* Making keeps up with nobody's steps (``load`` near 1 or above): more workers, as many as the services say and as the
  idle CPUs bear. If that is hardly faster, what limits the feed is something else: back again, and this is it.
* Making is fast enough on average, and the consumer waits all the same: batches or steps differ, and the ring is
  too shallow to even it out. More slots; a worker more where those do not help.

What was given by the user (limits that are equal) is never changed, and after :data:`MOST_LOOKS` looks nothing is.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from profiler.osread import usable_cpus

LOOK_BATCHES = 24
LOOK_S = 0.25
"""A look takes so many batches and so many seconds, whichever is longer: the kernel counts idle time in 10 ms."""
MOST_LOOKS = 12

QUIET, STARVED = 0.02, 0.05
"""Shares of its time that a consumer waits: below the first all is well, above the second something is done."""
_FASTER = 1.05  # less is no gain
_LOADED = 0.75  # above this share of what the workers can make at best, they and not the ring are short
_BARELY = 0.95  # nearly all that the workers can make: if nobody waits now, somebody soon will
_MARGIN = 1.15  # workers beyond the mean need
_IDLE = 0.5  # of a CPU must be free for one more worker
_MOST_SLOTS = 32
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Limits:
    """Fewest and most workers, and fewest and most slots. Equal where the user said how many."""

    workers: tuple[int, int]
    depth: tuple[int, int]


@dataclass(frozen=True)
class Look:
    """What some batches took under the same settings. Times are nanoseconds.

    Attributes
    ----------
    workers, depth: the settings.
    make_ns, slow_make_ns: from claim to ready: mean, and the slowest.
    step_ns, slow_step_ns: what the consumer did between two batches, without waiting: median, and the 9th of 10.
    wait_ns: how long it waited for a batch, mean.
    held: the most batches that it kept at once.
    idle_cpus: CPUs that nobody used meanwhile, on average.
    """

    workers: int
    depth: int
    make_ns: float
    slow_make_ns: float
    step_ns: float
    slow_step_ns: float
    wait_ns: float
    held: int
    idle_cpus: float

    @property
    def period_ns(self) -> float:
        """From batch to batch."""
        return max(1.0, self.step_ns + self.wait_ns)

    @property
    def starved(self) -> float:
        """Share of the consumer's time that it waits."""
        return self.wait_ns / self.period_ns

    @property
    def load(self) -> float:
        """What the consumer takes, if it never waits, as a share of what the workers can make."""
        return self.make_ns / (self.workers * max(1.0, self.step_ns))


@dataclass(frozen=True)
class Decision:
    """The settings from now on, why, whether they are final, and whether only a busy machine stood in the way."""

    workers: int
    depth: int
    reason: str
    settled: bool = False
    busy: bool = False


def depth_for(look: Look, workers: int) -> int:
    """Slots that even out what was seen: one for each worker, for each batch held, one ready; and as many as are used
    up while the slowest batch is late, or made while the slowest step lasts."""
    period = max(look.step_ns, look.make_ns / workers, 1.0)
    late = (look.slow_make_ns - look.make_ns) / period
    ahead = (look.slow_step_ns - look.step_ns) * workers / max(look.make_ns, 1.0) if look.load > 0.5 else 0.0
    return workers + max(1, look.held) + 1 + math.ceil(min(max(late, ahead, 0.0), 1e6))


def decide(looks: Sequence[Look], limits: Limits) -> Decision:
    """What to do after the last of these looks; those before it say what was tried. At least one look."""
    look = looks[-1]
    before = looks[-2] if len(looks) > 1 else None
    new = _next(looks, limits)
    if len(looks) >= MOST_LOOKS and not new.settled:
        return Decision(look.workers, look.depth, f"{MOST_LOOKS} looks are enough: {new.reason}", settled=True)
    same = (new.workers, new.depth) == (look.workers, look.depth)
    if same and not new.busy and before is not None and (before.workers, before.depth) == (look.workers, look.depth):
        return replace(new, settled=True)  # twice the same answer
    return new


def _next(looks: Sequence[Look], limits: Limits) -> Decision:
    look = looks[-1]
    fewest, most = limits.workers
    before = next((one for one in reversed(looks[:-1]) if _settings(one) != _settings(look)), None)
    waits = f"the consumer waits {100 * look.starved:.0f} % of its time"
    if look.starved < STARVED and look.load < _BARELY:
        return _quiet(looks, fewest, waits)
    grown = before is not None and look.workers > before.workers
    gain = before.period_ns / look.period_ns if before is not None else math.inf
    if before is not None and grown and gain < _FASTER:
        told = f"{look.workers} workers are no faster than {before.workers} ({gain:.2f} of the batches)"
        return Decision(before.workers, look.depth, told, settled=True)
    if before is not None and grown and gain < look.workers / before.workers / 2:
        told = f"{look.workers} workers make {gain:.2f} of the batches of {before.workers}: most of them do nothing"
        return Decision(math.ceil(_MARGIN * gain * before.workers), look.depth, told, settled=True)
    services = f"a batch takes {_ms(look.make_ns)} to make and a step {_ms(look.step_ns)}"
    room = min(most, look.workers + math.floor(look.idle_cpus + _IDLE)) if look.idle_cpus >= _IDLE else look.workers
    if look.load > _LOADED:
        need = math.ceil(min(_MARGIN * look.make_ns / max(1.0, look.step_ns), 1e6))
        workers = max(look.workers, min(room, max(need, look.workers + 1)))
        if workers > look.workers:
            depth = max(look.depth, min(limits.depth[1], depth_for(look, workers)))
            idle = f"{look.idle_cpus:.1f} CPUs are idle"
            return Decision(workers, depth, f"{waits}: {services}; {idle}")
    depth = min(limits.depth[1], max(depth_for(look, look.workers), look.depth + math.ceil(look.depth / 2)))
    deepened = before is not None and look.depth > before.depth and not grown
    useless = deepened and gain < _FASTER
    if look.starved >= STARVED and depth > look.depth and look.load <= 1.0 and not useless:
        slow = f"the slowest batch takes {_ms(look.slow_make_ns)}, a slow step {_ms(look.slow_step_ns)}"
        return Decision(look.workers, depth, f"{waits} though the workers keep up on average: {slow}")
    if look.load <= _LOADED and room > look.workers and useless:
        return Decision(look.workers + 1, look.depth, f"{waits}, and more slots did not help")
    if look.workers >= most and most > fewest:
        why = f"no more than {most} workers fit the CPUs"
    elif look.load > _LOADED and fewest < most:
        why = f"no CPU is idle ({look.idle_cpus:.1f})"
    elif look.load > _LOADED:
        why = f"feed.workers is {most}"
    else:
        why = "more slots did not help" if useless else f"feed.depth is at most {limits.depth[1]}"
    busy = look.load > _LOADED and look.workers < most and look.idle_cpus < _IDLE  # others may be starting, too
    return Decision(look.workers, look.depth, f"{waits}: {services}; {why}", busy=busy)


def _quiet(looks: Sequence[Look], fewest: int, waits: str) -> Decision:
    """The consumer does not wait. Fewer workers only where that is certain: none that were seen to be too few."""
    look = looks[-1]
    too_few = max((one.workers for one in looks if one.starved >= STARVED), default=0)
    # What is made ahead of its turn needs no worker while the ring is full: a half more than the mean need is plenty.
    enough = math.ceil(1.5 * look.make_ns / max(1.0, look.step_ns))
    workers = max(fewest, too_few + 1, enough)
    if look.starved < QUIET and workers < look.workers:
        told = f"{waits}: a batch takes {_ms(look.make_ns)} to make and a step {_ms(look.step_ns)}"
        return Decision(workers, look.depth, f"{told}; {workers} workers are enough")
    return Decision(look.workers, look.depth, waits)


def _settings(look: Look) -> tuple[int, int]:
    return look.workers, look.depth


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3g} ms"


def start_depth(workers: int) -> int:
    """Slots of ``depth: auto`` before anything is known; ``workers`` 0: batches are made when they are asked for."""
    return max(4, workers + 3) if workers else 2


def most_depth(start: int, slot_bytes: int, available: int) -> int:
    """Slots that ``depth: auto`` may come to use: at most 32, 1 GiB, and a quarter of the memory available now."""
    return max(start, min(_MOST_SLOTS, min(_MOST_BYTES, available // 4) // max(1, slot_bytes)))


class IdleCpus:
    """How many of this process's CPUs nobody used since the last time it was asked; no more than its limit allows."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat, self._names = stat, {f"cpu{number}" for number in os.sched_getaffinity(0)}
        self._most = float(usable_cpus())
        self._before = self._read()

    def __call__(self) -> float:
        """From 0 to the number of CPUs; that number where the kernel does not say: what is tried is judged anyway."""
        before, self._before = self._before, self._read()
        if before is None or self._before is None:
            return self._most
        used, idle = (now - then for now, then in zip(self._before, before, strict=True))
        return min(self._most, len(self._names) * idle / max(1, used + idle))

    def _read(self) -> tuple[int, int] | None:
        """Ticks of all these CPUs: used, idle."""
        try:
            lines = [line.split() for line in self._stat.read_text(encoding="ascii").splitlines()]
            ticks = [[int(word) for word in words[1:9]] for words in lines if words and words[0] in self._names]
        except (OSError, ValueError):
            return None
        if not ticks:
            return None
        idle = sum(row[3] + row[4] for row in ticks)
        return sum(map(sum, ticks)) - idle, idle


@dataclass
class Tuner:
    """Collects batches into looks and asks :func:`decide`; whoever owns it does what the decision says.

    Attributes
    ----------
    looks: so far, without those of settings that were still coming into force.
    decisions: those that changed something, and the final one, as plain values with the step they were taken at.
    settled: nothing will be changed any more. decides: the user left something to decide.
    """

    limits: Limits
    idle_cpus: Callable[[], float] = field(default_factory=IdleCpus)
    clock: Callable[[], float] = time.monotonic
    looks: list[Look] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    settled: bool = False
    decides: bool = True
    _batches: list[tuple[int, int, int, int]] = field(default_factory=list)
    _skip: int = 0
    _since: float = 0.0

    def __post_init__(self) -> None:
        (fewest, most), (start, deepest) = self.limits.workers, self.limits.depth
        self.decides = fewest != most or start != deepest
        self.settled = not self.decides

    def refused(self, *, workers: int, depth: int, why: str) -> None:
        """The last decision could not be carried out in full: these are the settings, and the most there can be."""
        self.decisions[-1] |= {"workers": workers, "depth": depth, "refused": why}
        self.limits = replace(self.limits, depth=(min(self.limits.depth[0], depth), depth))

    def wait(self, batches: int) -> None:
        """Begin anew after so many batches: those were made, or waited for, under other settings."""
        self._batches.clear()
        self._skip = batches

    def delivered(
        self, step: int, workers: int, depth: int, *, make_ns: int, step_ns: int, wait_ns: int, held: int
    ) -> Decision | None:
        """One more batch. A decision that says something new, once a look is full."""
        if self.settled:
            return None
        if self._skip:
            self._skip -= 1
            return None
        if not self._batches:
            self._since = self.clock()
            self.idle_cpus()
        self._batches.append((make_ns, step_ns, wait_ns, held))
        if len(self._batches) < LOOK_BATCHES or self.clock() - self._since < LOOK_S:
            return None
        makes, steps, waits, helds = zip(*self._batches, strict=True)
        self._batches.clear()
        self.looks.append(
            Look(
                workers, depth, statistics.fmean(makes), max(makes), statistics.median(steps),
                sorted(steps)[len(steps) * 9 // 10], statistics.fmean(waits), max(helds), round(self.idle_cpus(), 2),
            )
        )  # fmt: skip
        decision = decide(self.looks, self.limits)
        if not decision.settled and (decision.workers, decision.depth) == (workers, depth):
            return None
        self.settled = decision.settled
        self.decisions.append(
            {
                "step": step, "workers": decision.workers, "depth": decision.depth,
                "before": {"workers": workers, "depth": depth}, "reason": decision.reason, "final": decision.settled,
            }
        )  # fmt: skip
        self.wait(depth)
        return decision
