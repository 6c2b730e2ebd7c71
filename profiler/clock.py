"""Putting the clocks of several processes side by side, or saying that it cannot be done.

Durations never come from here: they are differences of one monotonic clock. Only lanes of different machines in one
picture need an offset, and an offset without an error is not shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profiler.osread import Missing


@dataclass(frozen=True)
class Offset:
    """``other + offset_ns`` is the reference's time, within ``error_ns`` either way."""

    offset_ns: int
    error_ns: int


def between(
    reference: Mapping[str, Any], other: Mapping[str, Any], trips: Sequence[tuple[int, int, int]] = ()
) -> Offset | Missing:
    """Offset from one process's monotonic clock to the reference's (both as in ``Run.processes``).

    Processes of one boot share the clock. Otherwise ``trips`` are needed, see :func:`from_round_trips`; wall clocks
    are no substitute, since nothing bounds their error.
    """
    if reference["boot_id"] == other["boot_id"]:
        return Offset(0, 0)
    if not trips:
        return Missing(f"no round trips measured between {reference['host']} and {other['host']}")
    return from_round_trips(trips)


def from_round_trips(trips: Sequence[tuple[int, int, int]]) -> Offset:
    """Offset from round trips (sent, answered, received): sent and received in reference ns, answered in the other's.

    The smallest round trip bounds the offset best (Cristian 1989): the answer lies between its two ends.
    """
    sent, answered, received = min(trips, key=lambda trip: trip[2] - trip[0])
    return Offset((sent + received) // 2 - answered, (received - sent + 1) // 2)
