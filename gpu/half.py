"""Casts between float32 and float16 that count what they lose.

IEEE 754 binary16: 11 significant bits, normal from 2^-14 to 65504, subnormal down to 2^-24. Casts round to nearest,
ties to even; what rounds to 2^16 or more becomes infinity; NaN stays NaN. On the host the conversion is integer and
float32 arithmetic that a compiler turns into vector instructions, so that its bits depend on no CPU feature.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from profiler.jit import njit

Array = Any
OVERFLOW, FLUSHED, SUBNORMAL, NONZERO = range(4)
"""Columns of a row of counts: finite values that became infinite, values other than 0 that became 0, or subnormal, and
all finite values other than 0."""
COLUMNS = 4
LARGEST = 65504.0

_HALF, _STEPS, _NONE, _NAN = np.float32(0.5), np.float32(2**24), np.float32(0), np.float32(np.nan)
_SCALES = np.empty(64, np.float32)
"""By sign and exponent: what a step of the significand is worth."""
for _exponent in range(31):
    _SCALES[_exponent] = 2.0 ** (max(_exponent, 1) - 25)
_SCALES[31] = np.inf
_SCALES[32:] = -_SCALES[:32]
_BLOCK = 4096
"""Values whose casts are counted while they are in the nearest cache."""

# Every operation says uint32: numba would widen it to 64 bits, and a vector would hold half as many.
_U = np.uint32
_SIZE, _NORMAL, _TOO_LARGE, _INF = _U(0x7FFFFFFF), _U(0x38800000), _U(0x477FF000), _U(0x7F800000)
_REBIAS = _U(0x38000000 - 0xFFF)
_HALF_SIZE, _HALF_NORMAL, _HALF_INF = _U(0x7FFF), _U(0x400), _U(0x7C00)


@njit
def _to_half(value: Any, bits: Any) -> Any:
    """The bits of a float32 value, as float16."""
    size = _U(bits & _SIZE)
    small = size < _NORMAL  # below 2^-14: subnormal or 0
    # Adding 1/2 leaves steps of 2^-24, those of the subnormals; the addition rounds as it should.
    lifted = np.float32((abs(value) if small else _NONE) + _HALF)
    near = _U(np.int32(np.float32(np.float32(lifted - _HALF) * _STEPS)))
    half = _U(_U(_U(size - _REBIAS) + _U(_U(size >> _U(13)) & _U(1))) >> _U(13))
    half = near if small else half
    half = _U(0x7C00) if size >= _TOO_LARGE else half
    half = _U(0x7E00) if size > _INF else half
    return _U(half | _U(_U(bits >> _U(16)) & _U(0x8000)))


@njit
def _from_half(half: Any, scale: Any) -> Any:
    significand = _U(half & _U(0x3FF))
    significand = _U(significand | _U(0x400)) if _U(half & _HALF_INF) != _U(0) else significand
    value = np.float32(scale * np.float32(np.int32(significand)))
    return _NAN if _U(half & _HALF_SIZE) > _HALF_INF else value


@njit
def _count(before: Any, after: Any, counts: Any) -> None:
    """Compare float32 bits with those of the float16 they became."""
    zero_in = bad_in = zero = small = bad = _U(0)
    for i in range(before.size):
        old, new = _U(before[i] & _SIZE), _U(_U(after[i]) & _HALF_SIZE)
        zero_in = _U(zero_in + (_U(1) if old == _U(0) else _U(0)))
        bad_in = _U(bad_in + (_U(1) if old >= _INF else _U(0)))
        zero = _U(zero + (_U(1) if new == _U(0) else _U(0)))
        small = _U(small + (_U(1) if new < _HALF_NORMAL else _U(0)))
        bad = _U(bad + (_U(1) if new >= _HALF_INF else _U(0)))
    counts[0] += bad - bad_in
    counts[1] += zero - zero_in
    counts[2] += small - zero
    counts[3] += before.size - zero_in - bad_in


@njit
def _encode_block(values: Any, bits: Any, out: Any) -> None:
    for i in range(values.size):
        out[i] = _to_half(values[i], bits[i])


@njit
def _encode(values: Any, bits: Any, out: Any, counts: Any) -> None:
    for start in range(0, values.size, _BLOCK):
        stop = start + _BLOCK
        part, halves = bits[start:stop], out[start:stop]
        _encode_block(values[start:stop], part, halves)
        _count(part, halves, counts)


@njit
def _decode(halves: Any, scales: Any, out: Any) -> None:
    for i in range(halves.size):
        half = _U(halves[i])
        out[i] = _from_half(half, scales[half >> _U(10)])


@njit
def _round(values: Any, bits: Any, scales: Any, out: Any, counts: Any) -> None:
    room = np.empty(min(_BLOCK, values.size), np.uint16)
    for start in range(0, values.size, _BLOCK):
        part = bits[start : start + _BLOCK]
        halves = room[: part.size]
        _encode_block(values[start : start + _BLOCK], part, halves)
        _count(part, halves, counts)
        _decode(halves, scales, out[start : start + _BLOCK])


@njit
def _finite(bits: Any) -> Any:
    bad = 0
    for i in range(bits.size):
        bad += 1 if _U(bits[i] & _SIZE) >= _INF else 0
    return bad == 0


def encode(values: Array, out: Array, counts: Array) -> None:
    """Round float32 ``values`` into float16 ``out`` (contiguous, of one shape); adds to ``counts``, int64[4]."""
    if isinstance(values, np.ndarray):
        flat = values.reshape(-1)
        _encode(flat, flat.view(np.uint32), out.reshape(-1).view(np.uint16), counts)
    else:
        _on_device("encode", values, out, counts)


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
        _on_device("rounded", values, out, counts)


def all_finite(values: Array) -> bool:
    """Whether a float32 array (contiguous) holds neither NaN nor infinity."""
    if isinstance(values, np.ndarray):
        return bool(_finite(values.reshape(-1).view(np.uint32)))
    import cupy

    return bool(cupy.isfinite(values).all())


def _on_device(cast: str, values: Array, out: Array, counts: Array) -> None:
    import cupy

    from gpu.cuda import half
    from gpu.cuda.kernels import own_kernels

    getattr(half, cast)(own_kernels(cupy), cupy, values, out, counts)
