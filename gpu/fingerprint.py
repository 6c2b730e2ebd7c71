"""Fingerprints of a training state: one hash that changes with any bit of any parameter, and what the values look like.

Hashes are those of :mod:`profiler.hashing`: integer arithmetic over the float bits, equal on every backend and machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from profiler.hashing import Stats, ordered_parts, stats


def params(net: Any) -> Iterator[np.ndarray]:
    """The net's parameters on the host, in layer order; a parameter shared by several layers comes once for each."""
    for blobs in net.params.values():
        for blob in blobs:
            yield blob.data


def history(solver: Any) -> Iterator[np.ndarray]:
    """The solver's histories on the host, in Caffe's order."""
    for array in solver.history:
        yield solver.backend.to_numpy(array)


def fingerprint_params(net: Any) -> int:
    """Hash (64 bits) of all parameters of a net, in layer order."""
    return ordered_parts(params(net))


def fingerprint_history(solver: Any) -> int:
    """Hash (64 bits) of all histories of a solver."""
    return ordered_parts(history(solver))


def combined_stats(arrays: Iterable[np.ndarray]) -> Stats:
    """The statistics of several arrays as if they were one."""
    parts = [stats(array) for array in arrays]
    return Stats(
        max_abs=max((part.max_abs for part in parts), default=0.0),
        l2=math.sqrt(sum(part.l2**2 for part in parts)),
        zeros=sum(part.zeros for part in parts),
        subnormals=sum(part.subnormals for part in parts),
        infs=sum(part.infs for part in parts),
        nans=sum(part.nans for part in parts),
    )


def record_params(recorder: Any, step: int, net: Any) -> int:
    """Record hash and statistics of the parameters after step ``step`` as fingerprint ``params``; returns the hash."""
    arrays = list(params(net))  # one transfer from the device for both
    return _record(recorder, step, "params", arrays)


def record_history(recorder: Any, step: int, solver: Any) -> int:
    """The same for the solver's histories, as fingerprint ``history``."""
    return _record(recorder, step, "history", list(history(solver)))


def _record(recorder: Any, step: int, name: str, arrays: list[np.ndarray]) -> int:
    value = ordered_parts(arrays)
    seen = combined_stats(arrays)
    recorder.fingerprint(
        step,
        name,
        value,
        max_abs=seen.max_abs,
        l2=seen.l2,
        zeros=seen.zeros,
        subnormals=seen.subnormals,
        infs=seen.infs,
        nans=seen.nans,
    )
    return value
