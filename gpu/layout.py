"""A net's arrays in its block: views by buffer, whose numbers they hold at the moment, and poison for tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gpu import arena
from gpu.blob import BlobReused
from gpu.lifetimes import Lifetimes
from gpu.memory import MemoryPlan, plan
from profiler.errors import UsageError

_NEVER = -1
_TYPES = {4: np.float32, 2: np.float16}


class Layout:
    """The block of a net with its plan.

    With ``poison`` every buffer is filled with NaN when its lifetime has ended, and everything not kept is NaN at the
    start: whoever reads what it did not declare to read shows up in the results.
    """

    def __init__(self, xp: Any, *, reuse: bool, poison: bool) -> None:
        self._xp, self.reuse, self._poison = xp, reuse, poison
        self._block: Any = None
        self._plans: dict[tuple[Any, ...], MemoryPlan] = {}
        self.plan = MemoryPlan((), (), 0, 0, 0, reuse)

    def prepare(self, wanted: Lifetimes) -> MemoryPlan:
        """The plan for these lifetimes, without taking memory."""
        key = tuple((request.nbytes, request.itemsize, request.live) for request in wanted.requests)
        made = self._plans.get(key)
        if made is None:
            if len(self._plans) >= _PLANS:
                del self._plans[next(iter(self._plans))]
            made = self._plans[key] = plan(wanted.requests, wanted.times, self.reuse)
        return made

    def take(self, wanted: Lifetimes) -> None:
        """Lay out anew. The block stays where it is large enough, and grows otherwise: it never shrinks."""
        self.plan = self.prepare(wanted)
        if self._block is None or self._block.size < self.plan.total:
            self._views: list[Any] = []
            self._block = None  # given back first: the old and the new one need not fit at one time
            total = self.plan.total
            self._block = arena.with_room(self._xp, lambda: arena.blocks(self._xp).take(total))
        else:
            self._block[...] = 0
        self._views = [
            arena.view(self._block, b.offset, (b.nbytes // b.itemsize,), _TYPES[b.itemsize]) for b in self.plan.buffers
        ]
        self._overlaps: dict[int, list[int]] = {}
        self._base = {False: _NEVER, True: _NEVER}  # when the last forward and the last backward began
        self._clock = 0
        self._broken = False
        self._layers = next((i for i, time in enumerate(self.plan.times) if time == "backward"), len(self.plan.times))
        if self._poison:
            for buffer, view in zip(self.plan.buffers, self._views, strict=True):
                if not buffer.pinned:
                    view[...] = np.nan
            self._ending: dict[int, list[Any]] = {}
            for buffer, view in zip(self.plan.buffers, self._views, strict=True):
                for _, end in () if buffer.pinned else buffer.live:
                    self._ending.setdefault(end, []).append((buffer, view))

    def array(self, index: int, shape: tuple[int, ...]) -> Any:
        """The array of a buffer, float32 or float16; its beginning, where the shape takes less than was planned."""
        whole, count = self._views[index], math.prod(shape)
        return (whole if shape == (-1,) else whole[:count]).reshape(shape)

    @property
    def nbytes(self) -> int:
        """Size of the block."""
        return 0 if self._block is None else int(self._block.nbytes)

    def begin(self, backward: bool) -> None:
        """A pass begins. Raises UsageError for a second backward pass after one forward where memory is reused."""
        if backward and self.reuse and (self._broken or self._base[True] >= self._base[False]):
            raise UsageError(
                "backward needs a forward pass of its own in a net that reuses memory",
                found="no forward pass since the last backward",
                hint="Net(..., reuse=False) keeps all blobs",
            )
        self._clock += len(self.plan.times) + 1
        self._base[backward] = self._clock
        self._broken = True

    def done(self, time: int) -> None:
        """The layer at ``time`` is through (called in poison mode only)."""
        for buffer, view in self._ending.get(time, ()):
            if max(end for start, end in buffer.live if end <= time) == time:
                view[...] = np.nan

    def end(self) -> None:
        """The pass is complete."""
        self._broken = False

    @property
    def poisons(self) -> bool:
        """Whether :meth:`done` wants to be called."""
        return self._poison

    def guard(self, name: str, data: int | None, diff: int | None) -> Callable[[str], None] | None:
        """What a blob calls before it shows its arrays; None where nobody else writes to either."""
        indices = {"data": data, "diff": diff}
        if not any(self._touching(index) for index in indices.values() if index is not None):
            return None

        def check(what: str) -> None:
            index = indices[what]
            thief = self._thief(index) if index is not None else None
            if thief is not None:
                raise BlobReused(
                    f"{what} of blob {name!r} is gone: its memory was given to {thief}",
                    expected="an output, an input, a parameter, or a blob that nothing has written over yet",
                    hint="Net(..., reuse=False) keeps all blobs",
                )

        return check

    def _touching(self, index: int) -> list[int]:
        if index not in self._overlaps:
            buffers = self.plan.buffers
            mine = buffers[index]
            self._overlaps[index] = [i for i, other in enumerate(buffers) if i != index and mine.touches(other)]
        return self._overlaps[index]

    def _thief(self, index: int) -> str | None:
        """Which buffer was written to the same bytes since this one was."""
        others = [(self._written(i), i) for i in self._touching(index)]
        latest, who = max(others, default=(_NEVER, -1))
        if self._broken and others:
            return "others, in a pass that failed"
        return repr(self.plan.buffers[who].name) if latest > self._written(index) else None

    def _written(self, index: int) -> int:
        """When the buffer was last begun to be written to."""
        moments = [_NEVER]
        for start, _ in self.plan.buffers[index].live:
            base = self._base[start >= self._layers]
            if base != _NEVER:
                moments.append(base + start)
        return max(moments)


_PLANS = 64
"""Plans kept for nets whose inputs change their size."""
