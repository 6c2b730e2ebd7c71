"""Casts of arrays on a device to float16 that count what they lose: the bits and counts of :mod:`gpu.half`."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu.cuda.kernels import Launcher

Array = Any
_THREADS = 1 << 16  # enough to fill a device; each leaves four counts


def encode(own: Launcher, xp: Any, values: Array, out: Array, counts: Array) -> None:
    """Round float32 ``values`` into float16 ``out``; adds to ``counts``, int64[4]."""
    _cast(own, xp, "half_encode", values, out, counts)


def rounded(own: Launcher, xp: Any, values: Array, out: Array, counts: Array) -> None:
    """Round float32 ``values`` to float16's values, into float32 ``out``; adds to ``counts``, int64[4]."""
    _cast(own, xp, "half_round", values, out, counts)


def _cast(own: Launcher, xp: Any, name: str, values: Array, out: Array, counts: Array) -> None:
    threads = min(values.size, _THREADS)
    if threads:
        lost = xp.empty((len(counts), threads), np.int64)
        # reshape() of what is not contiguous would round into a copy; as it stands the launch refuses it.
        own.launch(name, threads, _words(values), out, lost, values.size)
        counts += lost.sum(axis=1)


def _words(values: Array) -> Array:
    return values.reshape(1).view(np.uint32) if not values.ndim else values.view(np.uint32)
