"""Hashes and statistics of arrays on a device, in one pass and without copying them to the host.

The hashes are those of :mod:`profiler.hashing`, bit for bit; so are the counts and ``max_abs``. ``l2`` is summed in
another order (of float64 values): equal at every run on any device, and within 1e-12 (relative) of the host's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu.cuda.kernels import Launcher
from profiler.errors import StallscopeError
from profiler.hashing import Stats, finish

Array = Any
_MASK = (1 << 64) - 1
_THREADS = 1 << 16  # enough to fill a device; their results are 60 bytes each


@dataclass(frozen=True)
class Print:
    """``ordered`` and ``multiset`` as :func:`profiler.hashing.ordered` and :func:`~profiler.hashing.multiset` (rows
    along the first axis) give them, and the statistics."""

    ordered: int
    multiset: int
    stats: Stats


def device_print(own: Launcher, xp: Any, array: Array) -> Print:
    """Fingerprint a float32 array of the device.

    Raises StallscopeError for other types and for arrays that are not C-contiguous.
    """
    if array.dtype != np.float32 or not array.flags.c_contiguous:
        raise StallscopeError(
            "only contiguous float32 arrays are fingerprinted on the device",
            expected="float32, C-contiguous",
            found=f"{array.dtype}, strides {array.strides}",
        )
    rows, units = (len(array), array.size // len(array)) if array.ndim and array.size else (1, array.size)
    if not array.size:
        return Print(finish(0, 0), _empty_rows(array), Stats(0.0, 0.0, 0, 0, 0, 0))
    lanes = max(1, min(-(-units // 2), _THREADS // rows))
    threads = rows * lanes
    ordered, multiset = xp.empty(threads, np.uint64), xp.empty(threads, np.uint64)
    largest, squares, counts = (
        xp.empty(threads, np.uint32),
        xp.empty(threads, np.float64),
        xp.empty((4, threads), np.int64),
    )
    data = array.reshape(-1).view(np.uint32)
    own.launch("fingerprint", threads, data, ordered, multiset, largest, squares, counts, lanes, rows, units)
    hashes = xp.empty(rows, np.uint64)
    own.launch("finish_rows", rows, multiset, hashes, lanes, 4 * units)
    # Two small copies: integers whose order does not matter are added up there, squares here in one order.
    totals = _host(xp, xp.stack([ordered.sum(), hashes.sum(), largest.max().astype(np.uint64)]))
    seen, squared = _host(xp, counts.sum(axis=1)), _host(xp, squares)
    try:
        norm = math.sqrt(math.fsum(squared))
    except OverflowError:
        norm = math.inf
    most = float(np.array([totals[2]], np.uint64).astype(np.uint32).view(np.float32)[0])
    return Print(
        finish(int(totals[0]), array.nbytes), int(totals[1]), Stats(most, norm, *(int(count) for count in seen))
    )


def _empty_rows(array: Array) -> int:
    return (len(array) if array.ndim else 0) * finish(0, 0) & _MASK


def _host(xp: Any, array: Array) -> np.ndarray:
    return np.asarray(array if isinstance(array, np.ndarray) else xp.asnumpy(array))
