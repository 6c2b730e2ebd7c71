"""Stallscope's profiler: what a run did, why it waited, where two runs parted.

Everything here is loaded at first use, so ``import profiler`` costs nothing.

    for batch in profiler.watch(loader, "runs/mine"):      # any loop
        train(batch)

    with profiler.record("runs/mine") as recorder:          # or with spans of one's own
        for batch in profiler.watch(loader):
            with recorder.span(profiler.Stage.COMPUTE):
                train(batch)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiler.errors import StallscopeError
    from profiler.events import Stage
    from profiler.loops import record, watch
    from profiler.store import load_run

__all__ = ["Stage", "StallscopeError", "load_run", "record", "watch"]

_HOMES = {
    "Stage": "profiler.events",
    "StallscopeError": "profiler.errors",
    "load_run": "profiler.store",
    "record": "profiler.loops",
    "watch": "profiler.loops",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'profiler' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
