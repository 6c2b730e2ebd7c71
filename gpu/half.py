"""Casts between float32 and float16 that count what they lose.

IEEE 754 binary16: 11 significant bits, normal from 2^-14 to 65504, subnormal down to 2^-24. Casts round to nearest,
ties to even; what rounds to 2^16 or more becomes infinity; NaN stays NaN. On the host the conversion is integer and
float32 arithmetic that a compiler turns into vector instructions, so that its bits depend on no CPU feature.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from profiler.jit import njit

Array = Any
OVERFLOW, FLUSHED, SUBNORMAL, NONZERO = range(4)
"""Columns of a row of counts: finite values that became infinite, values other than 0 that became 0, or subnormal, and
all finite values other than 0."""
COLUMNS = 4
LARGEST = 65504.0

_HALF, _STEPS = np.float32(0.5), np.float32(2**24)
_NAN = np.float32(np.nan)
_SCALES = np.empty(64, np.float32)
"""By sign and exponent: what a step of the significand is worth."""
for _exponent in range(31):
    _SCALES[_exponent] = 2.0 ** (max(_exponent, 1) - 25)
_SCALES[31] = np.inf
_SCALES[32:] = -_SCALES[:32]


@njit
def _to_half(value: Any, bits: Any) -> Any:
    """The bits of a float32 value, as float16."""
    size = bits & 0x7FFFFFFF
    small = size < 0x38800000  # below 2^-14: subnormal or 0
    # Adding 1/2 leaves steps of 2^-24, those of the subnormals; the addition rounds as it should.
    near = np.uint32(((abs(value) if small else _HALF - _HALF) + _HALF - _HALF) * _STEPS)
    half = (size - 0x38000000 + 0xFFF + ((size >> 13) & 1)) >> 13
    half = near if small else half
    half = 0x7C00 if size >= 0x477FF000 else half
    half = 0x7E00 if size > 0x7F800000 else half
    return half | ((bits >> 16) & 0x8000)


@njit
def _from_half(half: Any, scales: Any) -> Any:
    significand = (half & 0x3FF) + (1024 if half & 0x7C00 else 0)
    value = scales[half >> 10] * np.float32(significand)
    return _NAN if half & 0x7FFF > 0x7C00 else value


@njit
def _encode(values: Any, bits: Any, out: Any, counts: Any) -> None:
    overflow = flushed = subnormal = nonzero = 0
    for i in range(values.size):
        half = _to_half(values[i], bits[i])
        out[i] = half
        size, kept = bits[i] & 0x7FFFFFFF, half & 0x7FFF
        finite = size < 0x7F800000
        some = finite and size != 0
        nonzero += some
        overflow += finite and kept == 0x7C00
        flushed += some and kept == 0
        subnormal += kept != 0 and kept < 0x400
    counts[0] += overflow
    counts[1] += flushed
    counts[2] += subnormal
    counts[3] += nonzero


@njit
def _decode(halves: Any, scales: Any, out: Any) -> None:
    for i in range(halves.size):
        out[i] = _from_half(halves[i], scales)


@njit
def _round(values: Any, bits: Any, scales: Any, out: Any, counts: Any) -> None:
    overflow = flushed = subnormal = nonzero = 0
    for i in range(values.size):
        half = _to_half(values[i], bits[i])
        out[i] = _from_half(half, scales)
        size, kept = bits[i] & 0x7FFFFFFF, half & 0x7FFF
        finite = size < 0x7F800000
        some = finite and size != 0
        nonzero += some
        overflow += finite and kept == 0x7C00
        flushed += some and kept == 0
        subnormal += kept != 0 and kept < 0x400
    counts[0] += overflow
    counts[1] += flushed
    counts[2] += subnormal
    counts[3] += nonzero


@njit
def _finite(bits: Any) -> Any:
    bad = 0
    for i in range(bits.size):
        bad += bits[i] & 0x7FFFFFFF >= 0x7F800000
    return bad == 0


def encode(values: Array, out: Array, counts: Array) -> None:
    """Round float32 ``values`` into float16 ``out`` (contiguous, of one shape); adds to ``counts``, uint64[4]."""
    if isinstance(values, np.ndarray):
        flat = values.reshape(-1)
        _encode(flat, flat.view(np.uint32), out.reshape(-1).view(np.uint16), counts)
    else:
        _device("encode", "float16 y", "y = h;")(values, counts, out)


def decode(halves: Array, out: Array) -> None:
    """Copy float16 ``halves`` to float32 ``out``; every value is kept."""
    if isinstance(halves, np.ndarray):
        _decode(halves.reshape(-1).view(np.uint16), _SCALES, out.reshape(-1))
    else:
        out[...] = halves


def rounded(values: Array, out: Array, counts: Array) -> None:
    """:func:`encode` and :func:`decode` in one: float32 ``out`` holds ``values`` rounded to float16."""
    if isinstance(values, np.ndarray):
        flat = values.reshape(-1)
        _round(flat, flat.view(np.uint32), _SCALES, out.reshape(-1), counts)
    else:
        _device("round", "float32 y", "y = (float)h;")(values, counts, out)


def all_finite(values: Array) -> bool:
    """Whether a float32 array (contiguous) holds neither NaN nor infinity."""
    if isinstance(values, np.ndarray):
        return bool(_finite(values.reshape(-1).view(np.uint32)))
    import cupy

    return bool(cupy.isfinite(values).all())


@functools.cache
def _device(name: str, out: str, store: str) -> Any:
    """A cupy kernel. Its counters are integers, whose sums depend on no order; without losses none is touched but
    the last."""
    import cupy

    return cupy.ElementwiseKernel(
        "float32 x, raw uint64 counts",
        out,
        f"""
        float16 h = float16(x);
        float v = (float)h, size = fabsf(x);
        {store}
        bool finite = size <= 3.402823466e38f, some = finite && size != 0.0f;
        unsigned long long* n = (unsigned long long*)&counts[0];
        unsigned group = __activemask(), mine = __ballot_sync(group, some);
        if ((threadIdx.x & 31) == __ffs(group) - 1 && mine) atomicAdd(n + 3, (unsigned long long)__popc(mine));
        if (finite && isinf(v)) atomicAdd(n, 1ULL);
        if (some && v == 0.0f) atomicAdd(n + 1, 1ULL);
        if (v != 0.0f && fabsf(v) < 6.103515625e-05f) atomicAdd(n + 2, 1ULL);
        """,
        f"stallscope_half_{name}",
    )
