"""How much of the steps' waiting for batches of other nodes falls to Ray's writing objects to disk.

Spilling is no service of a batch: it makes TRANSFER longer. So what it has cost is what a batch's transfer took more
than transfers usually take in the same run, where it overlaps with a time in which objects were written or read back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiler.events import Kind, Stage
from profiler.services import Batches, Model
from profiler.timeline import Timeline, overlap, union


@dataclass(frozen=True)
class Spilled:
    """``extra_ns``: float64[n], how much of each step's blame for transfer it can be at most; ``evidence``: what the
    counters said."""

    extra_ns: np.ndarray
    evidence: dict[str, Any] = field(default_factory=dict)


def look(events: np.ndarray, timeline: Timeline, parts: list[Model], made: Batches) -> Spilled:
    """``events``: EVENT[n] of all processes."""
    extra = np.zeros(len(timeline))
    seen = events[(events["stage"] == Stage.SPILL) & (events["kind"] == Kind.SPAN)]
    if not len(seen):
        return Spilled(extra)
    times = union(seen[np.argsort(seen["t0_ns"], kind="stable")])
    moved = events[(events["stage"] == Stage.TRANSFER) & (events["kind"] == Kind.SPAN)]
    took: dict[tuple[int, int], int] = {}
    inside: dict[tuple[int, int], int] = {}
    columns = (moved[name].tolist() for name in ("actor", "step", "t0_ns", "t1_ns"))
    for actor, step, begin, end in zip(*columns, strict=True):
        key = (actor, step)
        took[key] = took.get(key, 0) + end - begin
        inside[key] = inside.get(key, 0) + overlap(times, begin, end)
    calm = [took[key] for key in took if not inside[key]]
    usual = float(np.median(calm)) if calm else 0.0
    for model in parts:
        for row, batch in zip(model.rows[model.known].tolist(), model.batch[model.known].tolist(), strict=True):
            key = (int(made.actor[batch]), int(made.step[batch]))
            if inside.get(key) and not timeline.first[row]:
                # Without it a step would have waited less by that: what it hides is hidden first. Workers share it.
                extra[row] = min(inside[key], max(0.0, took[key] - usual)) / model.workers
    return Spilled(
        extra,
        {
            "spilled_mib": int(seen["bytes"].sum()) >> 20,
            "restored_mib": int(seen["items"].sum()) >> 20,
            "spilling_s": float((times[:, 1] - times[:, 0]).sum()) / 1e9,
            "transfer_ms_usual": usual / 1e6 if calm else None,
            "transfer_ms_usual_reason": None if calm else "Ray spilled during every transfer",
        },
    )
