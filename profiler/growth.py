"""Why the memory of a service grows: steady, cache, fragmentation or leak, told from what it says of itself each step.

Readings per step: ``used`` (bytes that something points to), ``reserved`` (bytes taken from the system),
``largest_free`` (the largest free block inside what is reserved) and ``live`` (blobs that exist). The rule, on what
comes after a warm-up of a fifth of the readings:

* neither used nor reserved grows by more than 2 % of its level and 1 MiB: steady;
* used grows and keeps growing to the end: leak (``live`` grows with it: blobs are kept; it does not: they get
  larger);
* used grew and has levelled off: cache, it filled up;
* used does not grow, reserved does, and the largest piece is less than half of the free space: fragmentation;
* used does not grow, reserved does, and the free space is mostly one block: cache, kept for later.

Growth is a robust slope (Theil 1950, Sen 1968: the median over pairs), so single spikes decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Verdict = Literal["steady", "cache", "fragmentation", "leak"]

MIN_READINGS = 20
"""Fewer say nothing."""
WARM_UP = 0.2
MIB = 1 << 20
_SHARE, _FLOOR = 0.02, MIB
_LEVELLED = 0.25
"""A service has levelled off when the last third grows at less than this share of the slope of the whole."""
_PIECES = 0.5
_MOST = 240
"""Readings that slopes are taken from: medians of as many stretches."""

REMEDY = {
    "steady": "",
    "cache": "Nothing to mend as long as it fits: give the cache a limit, or expect this much memory.",
    "fragmentation": "Take the largest size first (reshape to the largest input once), or round sizes up to a few.",
    "leak": "Something keeps what it should let go: look for lists of blobs or outputs that only grow.",
}


@dataclass(frozen=True)
class Growth:
    """A verdict with its reasons. ``evidence``: bytes (or bytes per step), None where there is no reading."""

    verdict: Verdict | None
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDY.get(self.verdict or "", "")


def classify(
    steps: Sequence[int],
    used: Sequence[float],
    reserved: Sequence[float],
    largest_free: Sequence[float] | None = None,
    live: Sequence[float] | None = None,
) -> Growth:
    """Judge one service. All of one length, by step; ``largest_free`` and ``live`` None where they are not known."""
    count = len(steps)
    if count < MIN_READINGS:
        return Growth(None, f"{count} readings, {MIN_READINGS} are needed")
    skipped = int(count * WARM_UP)
    at = _thin(np.asarray(steps, np.float64)[skipped:])
    series = {"used": used, "reserved": reserved, "largest_free": largest_free, "live": live}
    known = {n: _thin(np.asarray(v, np.float64)[skipped:]) for n, v in series.items() if v is not None}
    grown = {name: _grown(at, values) for name, values in known.items()}
    evidence: dict[str, Any] = {
        "steps": int(at[-1] - at[0]),
        "used_first": _level(known["used"][:5]), "used_last": _level(known["used"][-5:]),
        "reserved_first": _level(known["reserved"][:5]), "reserved_last": _level(known["reserved"][-5:]),
        "used_per_step": grown["used"] / max(1.0, at[-1] - at[0]),
        "live_first": _level(known["live"][:5]) if "live" in known else None,
        "live_last": _level(known["live"][-5:]) if "live" in known else None,
        "largest_free_last": _level(known["largest_free"][-5:]) if "largest_free" in known else None,
    }  # fmt: skip
    if _matters(grown["used"], evidence["used_first"]):
        return _using_more(at, known, grown, evidence)
    if not _matters(grown["reserved"], evidence["reserved_first"]):
        return Growth("steady", "neither what is used nor what is reserved grows", evidence)
    free = evidence["reserved_last"] - evidence["used_last"]
    largest = evidence["largest_free_last"]
    evidence["free_last"] = free
    if largest is None:
        return Growth(None, "reserved grows and used does not, but the largest free block is not known", evidence)
    if largest < _PIECES * free:
        text = f"reserved grows and used does not; of {_mib(free)} free the largest block is {_mib(largest)}"
        return Growth("fragmentation", text, evidence)
    return Growth("cache", f"reserved grows and used does not; the free {_mib(free)} are mostly one block", evidence)


def _using_more(
    at: np.ndarray, known: dict[str, np.ndarray], grown: dict[str, float], evidence: dict[str, Any]
) -> Growth:
    values = known["used"]
    third = len(values) // 3
    late, whole = _slope(at[-third:], values[-third:]), _slope(at, values)
    evidence["used_per_step_late"] = late
    peak = _level(values[-third:])
    if late < _LEVELLED * whole or not _matters(late * (at[-1] - at[-third]), peak, floor=_FLOOR / 4):
        return Growth("cache", "used grew and has levelled off", evidence)
    more = grown.get("live", 0.0)
    blobs = f", and {more:,.0f} blobs more" if more >= 1 else ", with as many blobs as before"
    return Growth("leak", f"used grows by {late:,.0f} bytes a step to the end{blobs}", evidence)


def _matters(growth: float, level: float, floor: float = _FLOOR) -> bool:
    return growth > max(_SHARE * level if floor == _FLOOR else 0.0, floor)


def _thin(values: np.ndarray) -> np.ndarray:
    if len(values) <= _MOST:
        return values
    return np.array([np.median(part) for part in np.array_split(values, _MOST)])


def _level(values: np.ndarray) -> float:
    return float(np.median(values))


def _slope(at: np.ndarray, values: np.ndarray) -> float:
    i, j = np.triu_indices(len(at), 1)
    apart = at[j] - at[i]
    return float(np.median((values[j] - values[i])[apart > 0] / apart[apart > 0])) if (apart > 0).any() else 0.0


def _grown(at: np.ndarray, values: np.ndarray) -> float:
    """Growth over the whole. A curve that levels off early has a median slope of 0, so ends are compared too."""
    fifth = max(1, len(values) // 5)
    ends = _level(values[-fifth:]) - _level(values[:fifth])
    return max(_slope(at, values) * float(at[-1] - at[0]), ends)


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.1f} MiB"
