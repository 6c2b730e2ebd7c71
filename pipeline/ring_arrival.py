"""A ring whose batches are taken in the order in which they became ready (``emit: arrival``).

What differs from :class:`pipeline.ring.Ring`, which keeps the rest (states, lock, lost workers, memory):

* A step takes any free slot, so a slow batch keeps one slot and not all those behind it.
* The consumer leases the batch that became ready first, so none waits for longer than it takes to lease as many others
  as there are slots; but none of an epoch before all of the epoch before it.
* Steps are still claimed in order, and none that lies ``OVERTAKE`` ring depths or more beyond the oldest one that was
  not leased: so much a slow batch can be overtaken, then its worker is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Self

from pipeline import ring_layout as layout
from pipeline.emission import MOST_AHEAD, OVERTAKE, Given
from pipeline.ring import Ready, Ring, RingAddress, State

_FREE, _READY, _LEASED = State.FREE.value, State.READY.value, State.LEASED.value
_WINDOW, _OLDEST = map(layout.header_word, ("window", "oldest"))
_STEP, _READY_NS = map(layout.slot_word, ("step", "ready_ns"))


class ArrivalRing(Ring):
    """``epoch_end``: the first step of the epoch after that of a step; set by the consumer (None: one epoch)."""

    arrival = True
    epoch_end: Callable[[int], int] | None = None

    @classmethod
    def create(
        cls, depth: int, slot_bytes: int, *, most: int = 0, start_step: int = 0, stop_step: int | None = None,
        poison: bool = False, given: Iterable[Sequence[int]] = (),
    ) -> Self:  # fmt: skip
        given = tuple(given)
        ring = super().create(
            depth, slot_bytes, most=most, start_step=start_step, stop_step=stop_step, poison=poison, given=given
        )
        ring._header[0]["window"] = min(OVERTAKE * depth, MOST_AHEAD)
        ring._leased = Given(start_step, given)
        ring._fence = start_step
        return ring

    _leased: Given
    _fence: int

    def slot_of(self, step: int) -> int:
        """Where a step lives that is ready or leased; some slot for any other."""
        held = (slot for slot, state in enumerate(self._states()) if state in (_READY, _LEASED))
        return next((slot for slot in held if self._words[layout.slot_at(slot) + _STEP] == step), 0)

    def turn(self, step: int) -> int:
        """The step that became ready first, of those in the epoch of the oldest one not leased; -1 for none."""
        oldest = self._leased.oldest
        if oldest >= self._fence:
            self._fence = layout.NO_STOP if self.epoch_end is None else self.epoch_end(oldest)
        found, since = -1, layout.NO_STOP
        for slot, state in enumerate(self._states()):
            if state == _READY:
                at = layout.slot_at(slot)
                its, ready_ns = self._words[at + _STEP], self._words[at + _READY_NS]
                if its < self._fence and (ready_ns, its) < (since, found):
                    found, since = its, ready_ns
        return found

    def is_leased(self, step: int) -> bool:
        """Whether the consumer keeps all slots, so that ``step`` can get none. Takes no lock."""
        return all(state == _LEASED for state in self._states())

    def lease(self, step: int) -> Ready:
        ready = super().lease(step)
        self._words[_OLDEST] = self._leased.add(step)
        return ready

    def _room(self, step: int, states: Sequence[int]) -> int:
        if _FREE not in states or step >= self._words[_OLDEST] + self._words[_WINDOW]:
            return -1
        begin, size = layout.slot_at(0) + _STEP, layout.SLOT_WORDS
        steps = self._words[begin : begin + len(states) * size : size].tolist()
        if any(its == step and state for its, state in zip(steps, states, strict=True)):
            return -1  # its worker was killed inside claim(): until that is noticed the step has a slot already
        return states.index(_FREE)


def attach(address: RingAddress) -> Ring:
    """Map the ring of another process, of the kind that it is."""
    return (ArrivalRing if address.arrival else Ring).attach(address)
