"""Dropout's draws as a compiled loop that writes into the mask: the words of ``numpy.random.Philox``, Philox4x64-10.

(Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011; docs/design.md 2.2.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from profiler.jit import njit

_M0, _M1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_W0, _W1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@njit
def _high(a: Any, b: Any) -> Any:
    """The high 64 bits of a · b, in 32-bit limbs."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    first, second = a_low * b_low, a_high * b_low
    middle = (first >> _HALF) + (second & _LOW) + a_low * b_high
    return a_high * b_high + (second >> _HALF) + (middle >> _HALF)


@njit
def dropout_mask(mask: Any, limit: Any, kept: Any, key_0: Any, key_1: Any, c1: Any, c2: Any, c3: Any) -> None:
    """mask[count] float32: 0 where the i-th 32-bit word is below ``limit``, else ``kept``.

    Low half of a word first; counter words 1 to 3 given, word 0 counts blocks from 1.
    """
    count = mask.size
    for block in range((count + 7) // 8):
        w0, w1, w2, w3 = np.uint64(block + 1), c1, c2, c3
        k0, k1 = key_0, key_1
        for _ in range(10):
            high_0, low_0 = _high(_M0, w0), _M0 * w0
            high_1, low_1 = _high(_M1, w2), _M1 * w2
            w0, w1, w2, w3 = high_1 ^ w1 ^ k0, low_1, high_0 ^ w3 ^ k1, low_0
            k0 += _W0
            k1 += _W1
        at = block * 8
        for j in range(min(8, count - at)):
            word = w0 if j < 2 else w1 if j < 4 else w2 if j < 6 else w3
            half = (word >> _HALF) if j & 1 else (word & _LOW)
            mask[at + j] = np.float32(0) if half < limit else kept
