"""Where every array of a net lies in one block: lifetimes in, offsets out.

Offsets are found by greedy best fit: buffers by falling size, each into the smallest gap between those placed already
whose lifetimes overlap with its own (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference",
2020). Buffers that are never in use at one time may share bytes. The plan depends on names, sizes and lifetimes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiler.errors import StallscopeError

if TYPE_CHECKING:
    from gpu.arena import Usage

ALIGNMENT = 64
"""Bytes that offsets, and the block itself, are a multiple of: a cache line, and as wide as vectors get."""

Interval = tuple[int, int]


@dataclass(frozen=True)
class Request:
    """An array that is wanted. ``live``: intervals (first, last) of times, both included, at which its bytes are its
    own. ``kind``: data, diff, work (a layer's work space), cast (what it sees of float16) or sum (gradients before they
    are added up).
    ``pinned``: kept from one pass to the next, whoever writes it. ``itemsize``: bytes of a value, 4 or 2."""

    name: str
    kind: str
    nbytes: int
    live: tuple[Interval, ...]
    pinned: bool = False
    itemsize: int = 4

    @property
    def first(self) -> int:
        """Time of the first use."""
        return min(start for start, _ in self.live)

    @property
    def last(self) -> int:
        """Time of the last use."""
        return max(end for _, end in self.live)

    def meets(self, other: Request) -> bool:
        """Whether the two are in use at one time."""
        return any(a <= d and c <= b for a, b in self.live for c, d in other.live)


@dataclass(frozen=True)
class Buffer(Request):
    """A request with its place: ``offset`` in bytes from the start of the block."""

    offset: int = 0

    @property
    def end(self) -> int:
        """Offset of the first byte behind it."""
        return self.offset + aligned(self.nbytes)

    def touches(self, other: Buffer) -> bool:
        """Whether the two share bytes."""
        return self.offset < other.end and other.offset < self.end


@dataclass(frozen=True)
class MemoryPlan:
    """Layout of one net's block. ``times``: what happens at each time, e.g. "forward conv1". Bytes throughout.

    ``total``: size of the block. ``unshared``: what the buffers would take without reuse. ``peak``: most bytes in use
    at one time; no layout can need less.
    """

    buffers: tuple[Buffer, ...]
    times: tuple[str, ...]
    total: int
    unshared: int
    peak: int
    reuse: bool

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The plan as text: a line per buffer by offset, and the sums."""
        width = max([4, *(len(buffer.name) for buffer in self.buffers)])
        when = max([9, *(len(time) for time in self.times)])
        lines = [f"{'name':<{width}}  kind  {'bytes':>14}  {'offset':>14}  {'first use':<{when}}  last use"]
        for b in sorted(self.buffers, key=lambda b: (b.offset, b.first, b.name)):
            first, last = ("kept", "kept") if b.pinned else (self.times[b.first], self.times[b.last])
            lines.append(f"{b.name:<{width}}  {b.kind:<4}  {b.nbytes:>14,}  {b.offset:>14,}  {first:<{when}}  {last}")
        share = f" ({100 * self.total / self.unshared:.0f} %)" if self.unshared else ""
        lines.append(
            f"total {self.total:,} bytes{share} of {self.unshared:,} without reuse; in use at one time {self.peak:,}"
        )
        return "\n".join(lines)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def plan(requests: Sequence[Request], times: Sequence[str], reuse: bool) -> MemoryPlan:
    """Give every request its place. Without ``reuse`` they lie one after the other."""
    unshared = sum(aligned(request.nbytes) for request in requests)
    placed: list[Buffer] = []
    if reuse:
        order = sorted(range(len(requests)), key=lambda i: (-requests[i].nbytes, requests[i].first, i))
        offsets = [0] * len(requests)
        for i in order:
            offsets[i] = _best_fit(requests[i], placed)
            placed.append(_at(requests[i], offsets[i]))
        buffers = tuple(_at(request, offset) for request, offset in zip(requests, offsets, strict=True))
    else:
        start = 0
        shared = sum(aligned(request.nbytes) for request in requests if request.kind != "cast")
        for request in requests:  # nobody sees what layers see of float16: one place, where they all fit
            placed.append(_at(request, shared if request.kind == "cast" else start))
            start += aligned(request.nbytes) if request.kind != "cast" else 0
        buffers = tuple(placed)
    total = max((buffer.end for buffer in buffers), default=0)
    return MemoryPlan(buffers, tuple(times), total, unshared, _peak(requests), reuse)


def _at(r: Request, offset: int) -> Buffer:
    return Buffer(r.name, r.kind, r.nbytes, r.live, r.pinned, r.itemsize, offset)


def _best_fit(request: Request, placed: Sequence[Buffer]) -> int:
    """Offset of the smallest gap that holds the request, or behind everything that it may not touch."""
    size = aligned(request.nbytes)
    best: tuple[int, int] | None = None  # gap, offset
    end = 0
    for other in sorted((b for b in placed if b.meets(request)), key=lambda b: (b.offset, b.end)):
        gap = other.offset - end
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, end)
        end = max(end, other.end)
    return end if best is None else best[1]


def _peak(requests: Sequence[Request]) -> int:
    """Most bytes in use at one time."""
    changes: dict[int, int] = {}
    for request in requests:
        for start, end in request.live:
            changes[start] = changes.get(start, 0) + aligned(request.nbytes)
            changes[end + 1] = changes.get(end + 1, 0) - aligned(request.nbytes)
    peak = now = 0
    for time in sorted(changes):
        now += changes[time]
        peak = max(peak, now)
    return peak


def shortage(
    what: str,
    inputs: Mapping[str, tuple[int, ...]],
    plan: MemoryPlan,
    needed: int,
    usage: Usage,
    found: str,
    room: int | None = None,
) -> StallscopeError:
    """The error for a net that does not fit: what is used and free, the largest request, and how many images would fit.

    ``needed``: bytes of the whole net. ``room``: bytes that there are, None where that is not known.
    """
    sizes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in inputs.items())
    told = [found, f"nets of this process use {_gib(usage.used)}"]
    if usage.largest_free is not None:
        told.append(f"largest free block {_gib(usage.largest_free)}")
    largest = max(plan.buffers, key=lambda buffer: buffer.nbytes, default=None)
    if largest is not None:
        told.append(f"largest request {_gib(largest.nbytes)} for {largest.name} ({plan.times[largest.first]})")
    hint, first = "a smaller batch", next(iter(inputs.values()), ())
    if room is not None and first and plan.total:
        # What lies in the block grows with the number of images, the rest does not.
        growing = plan.total - sum(aligned(b.nbytes) for b in plan.buffers if b.kind == "sum" and "diff" not in b.name)
        count = int((1 - 1.01 * (needed - room) / max(1, growing)) * first[0])
        hint += f": about {count} would fit" if 1 <= count < first[0] else ""
    return StallscopeError(
        what + (f" with inputs {sizes}" if sizes else ""),
        expected=f"at least {_gib(needed)}",
        found="; ".join(told),
        hint=hint,
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f} GiB"
