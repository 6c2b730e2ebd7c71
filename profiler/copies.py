"""The copy engine in the replay: how long each batch's copy took, and when the trainer had its arrays.

A copy that hides under compute costs nothing, and yet it is a service: whatever becomes faster beside it may bring it
to light. So where the record has copies (Stage.COPY), the replay makes them anew on an engine of its own, and what the
loop waited for them (Stage.H2D) is not taken over but follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler.events import Stage
from profiler.timeline import PART, Timeline


@dataclass(frozen=True)
class Copies:
    """Of the n rows of a model. Times in ns; where the record has no copy of a row's batch it took no time.

    length: float64[n], on the engine, and before that, of one begun ahead, until the loop had asked for it. late:
    float64[n], what the loop waited for beyond that: the engine's thread had to wake up, and then the loop's. arrived:
    int64[n], when the loop had the arrays. waited: float64[n], all that it waited for them. lag: float64[n], from a
    copy's end to the release of its slot. ahead: how many copies may begin before their batch's turn.
    """

    length: np.ndarray
    late: np.ndarray
    arrived: np.ndarray
    waited: np.ndarray
    lag: np.ndarray
    ahead: int


def copies(timeline: Timeline, rows: np.ndarray, ahead: int | None = None) -> Copies | None:
    """The copies of some rows; None where none was recorded. ``ahead``: of the configuration (None: as was seen)."""
    begin, end = timeline.copy_t0_ns[rows], timeline.copy_t1_ns[rows]
    known = end >= 0
    if not known.any():
        return None
    place = np.full(int(rows[-1]) + 1, -1, np.int64)
    place[rows] = np.arange(len(rows))
    n, tree = len(rows), timeline.nesting
    at = np.flatnonzero(
        (tree.events["stage"] == Stage.H2D)
        & (timeline.span_part == PART["h2d"])
        & (timeline.row >= rows[0])
        & (timeline.row <= rows[-1])
    )
    i = place[timeline.row[at]]
    at, i = at[known[i]], i[known[i]]
    arrived = timeline.wait_t1_ns[rows].copy()
    waited, under = np.zeros(n), np.zeros(n)
    t0, t1 = tree.events["t0_ns"][at], tree.events["t1_ns"][at]
    np.maximum.at(arrived, i, t1)
    np.add.at(waited, i, tree.own_ns[at])
    np.add.at(under, i, np.maximum(np.minimum(t1, end[i]) - np.maximum(t0, begin[i]), 0))
    begun_in = np.clip(np.searchsorted(timeline.t0_ns[rows], begin, side="right") - 1, 0, np.arange(n))
    could = np.maximum(arrived[begun_in], np.concatenate([begin[:1], end[:-1]]))
    asking = np.where(known & (begun_in < np.arange(n)), np.maximum(begin - could, 0), 0)
    deepest = int((np.arange(n) - begun_in)[known].max())
    return Copies(
        length=np.where(known, end - begin + asking, 0).astype(float),
        late=np.maximum(waited - under, 0),
        arrived=arrived,
        waited=waited,
        lag=np.where(known, np.maximum(timeline.release_ns[rows] - end, 0), 0).astype(float),
        ahead=max(0, deepest if ahead is None else ahead),
    )
