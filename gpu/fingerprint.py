"""Fingerprints of a training state: one hash that changes with any bit of any parameter, and what the values look like.

Hashes are those of :mod:`profiler.hashing`: integer arithmetic over the float bits, equal on every backend and machine.
What lies on a CUDA device is hashed there (:mod:`gpu.cuda.fingerprint`); nothing but the hash is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gpu.cuda.fingerprint import device_print
from gpu.cuda.kernels import own_kernels
from profiler.hashing import Stats, ordered, stats

Array = Any


def params(net: Any) -> Iterator[Array]:
    """The net's parameters where they lie, in layer order; one shared by several layers comes once for each."""
    for blobs in net.params.values():
        for blob in blobs:
            yield blob.device_data


def fingerprint_params(net: Any) -> int:
    """Hash (64 bits) of all parameters of a net, in layer order."""
    return fingerprint_parts(*params(net), xp=_library(net))


def fingerprint_history(solver: Any) -> int:
    """Hash (64 bits) of all histories of a solver, in Caffe's order."""
    return fingerprint_parts(*solver.history, xp=solver.backend.xp)


def fingerprint_parts(*arrays: Array, xp: Any = np) -> int:
    """:func:`profiler.hashing.ordered_parts` of arrays of ``xp`` or of NumPy."""
    return _together([_look(array, xp, counted=False)[0] for array in arrays])


def combined(parts: Iterable[Stats]) -> Stats:
    """The statistics of several arrays as if they were one."""
    parts = list(parts)
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
    return _record(recorder, step, "params", params(net), _library(net))


def record_history(recorder: Any, step: int, solver: Any) -> int:
    """The same for the solver's histories, as fingerprint ``history``."""
    return _record(recorder, step, "history", solver.history, solver.backend.xp)


def _record(recorder: Any, step: int, name: str, arrays: Iterable[Array], xp: Any) -> int:
    looks = [_look(array, xp, counted=True) for array in arrays]
    value, seen = _together([hashed for hashed, _ in looks]), combined(part for _, part in looks if part is not None)
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


def _look(array: Array, xp: Any, *, counted: bool) -> tuple[int, Stats | None]:
    """Hash and, if ``counted``, statistics of one array: on the device, where there is one and it can read it."""
    own = own_kernels(xp)
    if not counted and array.dtype == np.uint8 and array.nbytes % 4 == 0 and array.flags.c_contiguous:
        array = array.reshape(-1).view(np.float32)  # the hash is of the bytes
    readable = isinstance(array, xp.ndarray) and array.dtype == np.float32 and array.flags.c_contiguous
    if own is not None and readable:
        found = device_print(own, xp, array)
        return found.ordered, found.stats
    host = array if isinstance(array, np.ndarray) else xp.asnumpy(array)
    return ordered(host), stats(host) if counted else None


def _together(hashes: list[int]) -> int:
    return ordered(np.array(hashes, "<u8"))


def _library(net: Any) -> Any:
    return next((blob.xp for blobs in net.params.values() for blob in blobs), np)
