"""Does a slow batch come with a slow step? Pearson's r of the making of a batch and the step's length, by lag."""

from __future__ import annotations

from typing import Any

import numpy as np

from profiler.services import Model
from profiler.timeline import PART, Timeline

_LAGS = 5
_ENOUGH = 20


def feed_and_steps(timeline: Timeline, models: tuple[Model, ...]) -> dict[str, Any]:
    """``{"feed_latency_step": [{"lag", "r"}], "n"}``: at lag L, batch i against the step i + L; n/a says why."""
    if not models:
        return _missing("no step was recorded")
    model = max(models, key=lambda part: len(part.rows))
    use = model.known & ~timeline.first[model.rows] & ~timeline.open[model.rows]
    if use.sum() < _ENOUGH:
        return _missing(f"{int(use.sum())} steps with a recorded batch, {_ENOUGH} are needed")
    feed = model.make.sum(axis=1)
    steps = (timeline.wall_ns - timeline.parts_ns[:, PART["test"]])[model.rows].astype(float)
    found = []
    for lag in range(_LAGS + 1):
        a, b = feed[: len(feed) - lag], steps[lag:]
        both = use[: len(use) - lag] & use[lag:]
        a, b = a[both], b[both]
        if len(a) < _ENOUGH or a.std() < 1e-3 * a.mean() or b.std() < 1e-3 * b.mean():
            return _missing("feed or steps hardly vary, so there is nothing to correlate")
        found.append({"lag": lag, "r": float(np.corrcoef(a, b)[0, 1])})
    return {"feed_latency_step": found, "n": int(use.sum()), "reason": None}


def _missing(reason: str) -> dict[str, Any]:
    return {"feed_latency_step": None, "n": 0, "reason": reason}
