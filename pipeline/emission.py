"""Which steps a feed has given out, where they need not come in order (``emit: arrival``), and how that is saved.

The position of such a feed is two things: the oldest step that was not given out, and which of those after it were.
``state_dict`` holds them as ``next_step`` and ``given``, ranges of steps: ``[[5, 7], [9, 9]]`` for 5, 6, 7 and 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from profiler.errors import UsageError

OVERTAKE = 16
"""With ``emit: arrival`` no batch is made this many ring depths, or more, beyond the oldest one not given out."""
MOST_AHEAD = OVERTAKE * 1024
"""What a saved position can hold: steps from the oldest not given out to the last one given, of the deepest ring."""

Ranges = tuple[tuple[int, int], ...]


class Given:
    """The steps given out so far: all before :attr:`oldest`, and those in :attr:`beyond`."""

    def __init__(self, oldest: int, given: Iterable[Sequence[int]] = ()) -> None:
        self.oldest = oldest
        """The oldest step that was not given out."""
        self.beyond = {step for first, last in given for step in range(first, last + 1)}

    def add(self, step: int) -> int:
        """Note that a step was given out; returns the oldest one that was not."""
        if step != self.oldest:
            self.beyond.add(step)
            return self.oldest
        step += 1
        if self.beyond:
            while step in self.beyond:
                self.beyond.discard(step)
                step += 1
        self.oldest = step
        return step

    @property
    def count(self) -> int:
        """How many steps were given out, from step 0 on: the number of the turn that comes next."""
        return self.oldest + len(self.beyond)

    def missing(self, ahead: int) -> int:
        """The step that ``ahead`` others were left out before, counted from :attr:`oldest`."""
        if not self.beyond:
            return self.oldest + ahead
        step = self.oldest
        while ahead:
            step += 1
            ahead -= step not in self.beyond
        return step

    def ranges(self) -> Ranges:
        """What :attr:`beyond` holds, as (first, last) of each run of steps."""
        runs: list[tuple[int, int]] = []
        for step in sorted(self.beyond):
            if runs and runs[-1][1] == step - 1:
                runs[-1] = (runs[-1][0], step)
            else:
                runs.append((step, step))
        return tuple(runs)


def checked(oldest: int, given: Any) -> Ranges:
    """Ranges of steps beyond ``oldest`` as a saved position holds them. Raises :class:`UsageError`."""
    before = oldest
    try:
        ranges = tuple((first, last) for first, last in given)
        for first, last in ranges:
            if type(first) is not int or type(last) is not int or not before < first <= last:
                raise ValueError
            before = last + 1
    except (TypeError, ValueError):
        ranges, before = (), oldest + MOST_AHEAD + 1
    if before > oldest + MOST_AHEAD:
        raise UsageError(
            "this is no position of a feed: given holds no steps beyond next_step",
            expected=f"[first, last] of runs of steps, rising, from {oldest + 1} to {oldest + MOST_AHEAD - 1}",
            found=str(given)[:80],
        )
    return ranges


def resumed(iteration: int, iterations: int, position: Mapping[str, Any]) -> tuple[int, int, Ranges]:
    """Where the feed of a job goes on after ``iteration`` of ``iterations``: the oldest step not given out, the first
    that is not wanted, and those between that were given out.

    Raises :class:`UsageError` where a saved position does not hold as many steps as iterations were done.
    """
    oldest = position.get("next_step", iteration)
    given = checked(oldest, position.get("given", ()))
    steps = Given(oldest, given)
    if steps.count != iteration:
        raise UsageError(
            f"the snapshot of iteration {iteration} holds the position of another number of steps",
            expected=f"{iteration} steps given out",
            found=f"next_step {oldest} and {sum(last - first + 1 for first, last in given)} steps beyond it",
        )
    return oldest, steps.missing(iterations - iteration), given
