"""Threads of our own for compiled kernels: as many as BLAS has, each with a part of what is independent.

A kernel that goes through :func:`spread` ends its arguments with ``first, last`` and computes every item of that range
alone, in one order. So its bits are the same for any number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_WORTH = 1 << 16
"""Values to be touched before a second thread pays for waking it."""

_count = 1
_team: tuple[int, int, ThreadPoolExecutor] | None = None
"""Process, number of threads and the threads: a forked child has none of its parent's."""


def set_threads(count: int) -> None:
    """How many threads kernels use from now on, the caller's included."""
    global _count
    _count = count


def spread(kernel: Callable[..., Any], items: int, values: int, *arguments: Any) -> None:
    """``kernel(*arguments, first, last)`` over 0 to ``items``, which touch ``values`` values in all."""
    parts = min(_count, items)
    if parts < 2 or values < _WORTH:
        kernel(*arguments, 0, items)
        return
    team = _threads(parts - 1)
    bounds = [items * i // parts for i in range(parts + 1)]
    others = [team.submit(kernel, *arguments, *bounds[i : i + 2]) for i in range(1, parts)]
    kernel(*arguments, 0, bounds[1])
    for other in others:
        other.result()


def _threads(count: int) -> ThreadPoolExecutor:
    global _team
    if _team is None or _team[0] != os.getpid() or _team[1] < count:
        _team = (os.getpid(), count, ThreadPoolExecutor(count, thread_name_prefix="kernels"))
    return _team[2]
