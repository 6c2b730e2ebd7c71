"""Hashes of bytes that any order of work reproduces: integer arithmetic only, so they cannot drift with the schedule.

A buffer is read as little-endian 64-bit words, the tail filled with zeros. With word ``w`` at position ``i`` (all
arithmetic mod 2**64)::

    x = w ^ ((i + 1) * POSITION)
    x = (x ^ x >> 32) * M1;  x = (x ^ x >> 29) * M2;  x = x ^ x >> 32          # mix
    ordered = finish(sum of x, nbytes) = mix((sum + mix(nbytes ^ LENGTH)) ^ LENGTH)

The mix is a bijection, so a change of one word always changes the hash; it is non-linear, so changes in several words
(paired sign flips, swapped rows) do not cancel as they do in a weighted sum. Words can be summed in any order, by
any number of threads, on any device. These formulas are a contract: hashes of old runs stay comparable.

Small buffers are hashed with NumPy, larger ones with a compiled loop; both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler.errors import StallscopeError
from profiler.jit import njit

POSITION = 0xD6E8FEB86659FD93
M1 = 0xBF58476D1CE4E5B9
M2 = 0x94D049BB133111EB
LENGTH = 0x2545F4914F6CDD1D

_MASK = (1 << 64) - 1
_SMALL = 1 << 18  # bytes: below this NumPy is fast enough that importing numba would not pay
_BLOCK = 1 << 13  # words a NumPy block works on: its temporaries stay in the cache
_P, _A, _B, _L = (np.uint64(constant) for constant in (POSITION, M1, M2, LENGTH))
_S32, _S29, _ONE = np.uint64(32), np.uint64(29), np.uint64(1)

Buffer = Any
"""bytes, bytearray, memoryview or a NumPy array of plain values."""


@dataclass(frozen=True)
class Stats:
    """What values look like. ``max_abs`` and ``l2`` (Euclidean norm, float64) are over the finite values only."""

    max_abs: float
    l2: float
    zeros: int
    subnormals: int
    infs: int
    nans: int


def ordered(array: Buffer) -> int:
    """Hash of a buffer's bytes (C order), sensitive to every bit and its position. Returns 0 <= hash < 2**64."""
    data = as_bytes(array)
    total = _sum_of_words(data, use_numba=_worth_compiling(data.nbytes))
    return finish(total, data.nbytes)


def ordered_parts(parts: Iterable[Buffer]) -> int:
    """Hash of several buffers in their order: the ordered hash of their ordered hashes. Borders between parts count."""
    return ordered(np.array([ordered(part) for part in parts], dtype="<u8"))


def multiset(rows: Buffer | Sequence[Buffer]) -> int:
    """Sum (mod 2**64) of the ordered hashes of rows: insensitive to their order, sensitive to what and how many.

    Parameters
    ----------
    rows: an array whose first axis counts the rows (a one-dimensional array has rows of one value), or a sequence
        of buffers. Sums of disjoint parts add up (mod 2**64) to the sum of the whole.
    """
    if not isinstance(rows, np.ndarray):
        return sum(ordered(row) for row in rows) & _MASK
    if rows.ndim == 0:
        raise StallscopeError("rows to hash must be an array with a first axis", expected="ndim >= 1", found="ndim 0")
    if rows.size == 0:
        return len(rows) * finish(0, 0) & _MASK
    data = as_bytes(rows).reshape(len(rows), -1)
    return _sum_of_rows(data, use_numba=_worth_compiling(data.nbytes))


def stats(array: np.ndarray) -> Stats:
    """Largest magnitude, norm and counts of special values of a real array (floats, integers or bools)."""
    values = np.asarray(array)
    if values.dtype.kind not in "fiub" or values.dtype.itemsize > 8:
        raise StallscopeError("statistics need real numbers", expected="float, integer or bool", found=values.dtype)
    if values.dtype not in (np.float32, np.float64):
        tiny = 0
        if values.dtype == np.float16:  # its subnormals are normal numbers in float32: count them before widening
            magnitude = np.abs(values)
            tiny = int(np.count_nonzero((magnitude > 0) & (magnitude < np.finfo(np.float16).tiny)))
        wide = stats(values.astype(np.float32 if values.dtype == np.float16 else np.float64))
        return Stats(wide.max_abs, wide.l2, wide.zeros, tiny, wide.infs, wide.nans)
    flat = _frozen(np.ascontiguousarray(values).reshape(-1))
    tiny_normal = flat.dtype.type(np.finfo(flat.dtype).tiny)
    if _worth_compiling(flat.nbytes):
        return _as_stats(*_stats_compiled(flat, tiny_normal))
    return _as_stats(*_stats_numpy(flat, tiny_normal))


def as_bytes(array: Buffer) -> np.ndarray:
    """A read-only uint8 view of a buffer's bytes in C order; copies only what is not contiguous."""
    if isinstance(array, np.ndarray | np.generic):
        if array.dtype.hasobject:
            raise StallscopeError("only plain values can be hashed", expected="numbers or bytes", found=array.dtype)
        flat = np.ascontiguousarray(array).reshape(-1)
        return _frozen(flat.view(np.uint8) if flat.size else np.empty(0, np.uint8))
    view = memoryview(array)
    if not view.contiguous:
        view = memoryview(view.tobytes())
    if view.nbytes == 0:
        return _frozen(np.empty(0, np.uint8))
    return _frozen(np.frombuffer(view, np.uint8))


def _frozen(array: np.ndarray) -> np.ndarray:
    # One type (read-only) for every caller, so that a kernel is compiled once. A view: the caller's flag stays.
    array = array.view()
    array.flags.writeable = False
    return array


def _worth_compiling(nbytes: int) -> bool:
    return nbytes >= _SMALL or _sum_numba.loaded


def _sum_of_words(data: np.ndarray, *, use_numba: bool) -> int:
    """Sum of the mixed words of a uint8 array, as a Python integer."""
    total = 0
    for start, words in _aligned_words(data):
        if use_numba:
            total += int(_sum_numba(words, np.uint64(start)))
        else:
            total += _sum_numpy(words, start)
    return total & _MASK


def _aligned_words(data: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
    """(position of first word, words) pieces of a buffer; the tail and unaligned memory go through a small copy."""
    whole = data.nbytes // 8
    if data.ctypes.data % 8 == 0:
        if whole:
            yield 0, data[: whole * 8].view("<u8")
    else:
        for start in range(0, whole, _BLOCK):
            stop = min(start + _BLOCK, whole)
            yield start, _frozen(data[start * 8 : stop * 8].copy().view("<u8"))
    if data.nbytes % 8:
        tail = np.zeros(8, np.uint8)
        tail[: data.nbytes % 8] = data[whole * 8 :]
        yield whole, _frozen(tail.view("<u8"))


def _sum_of_rows(data: np.ndarray, *, use_numba: bool) -> int:
    """Sum of the row hashes of a uint8 array [rows, bytes of a row]."""
    nbytes = data.shape[1]
    if nbytes % 8 == 0 and data.ctypes.data % 8 == 0:
        blocks: Iterable[np.ndarray] = [data.view("<u8")] if nbytes else []
    else:
        blocks = _padded_rows(data)
    if use_numba:
        seed = np.uint64(_mix_int(nbytes ^ LENGTH))
        return sum(int(_rows_numba(block, seed)) for block in blocks) & _MASK
    step = max(1, _BLOCK // max(1, -(-nbytes // 8)))
    pieces = (block[i : i + step] for block in blocks for i in range(0, len(block), step))
    return sum(_rows_numpy(piece, nbytes) for piece in pieces) & _MASK


def _padded_rows(data: np.ndarray) -> Iterable[np.ndarray]:
    rows, nbytes = data.shape
    words = -(-nbytes // 8)
    step = max(1, _BLOCK // words)
    for start in range(0, rows, step):
        block = data[start : start + step]
        padded = np.zeros((len(block), words * 8), np.uint8)
        padded[:, :nbytes] = block
        yield _frozen(padded.view("<u8"))


# The reference: plain integers and NumPy -------------------------------------------------------------------------


def _mix_int(x: int) -> int:
    x = (x ^ x >> 32) * M1 & _MASK
    x = (x ^ x >> 29) * M2 & _MASK
    return x ^ x >> 32


def finish(total: int, nbytes: int) -> int:
    """The ordered hash of ``nbytes`` bytes whose mixed words add up to ``total``, wherever they were added up."""
    return _mix_int((total + _mix_int(nbytes ^ LENGTH) & _MASK) ^ LENGTH)


def _mix_numpy(x: np.ndarray) -> np.ndarray:
    x ^= x >> _S32
    x *= _A
    x ^= x >> _S29
    x *= _B
    x ^= x >> _S32
    return x


def _keys(start: int, count: int) -> np.ndarray:
    return np.arange(start + 1, start + 1 + count, dtype=np.uint64) * _P


def _sum_numpy(words: np.ndarray, start: int) -> int:
    total = 0
    for at in range(0, len(words), _BLOCK):
        block = words[at : at + _BLOCK]
        total += int(_mix_numpy(block ^ _keys(start + at, len(block))).sum(dtype=np.uint64))
    return total & _MASK


def _rows_numpy(words: np.ndarray, nbytes: int) -> int:
    totals = _mix_numpy(words ^ _keys(0, words.shape[1])).sum(axis=1, dtype=np.uint64)
    totals += np.uint64(_mix_int(nbytes ^ LENGTH))
    return int(_mix_numpy(totals ^ _L).sum(dtype=np.uint64))


_LANES = 8  # the norm is summed in eight interleaved lanes: fast, and the same bits in NumPy and compiled


def _stats_numpy(flat: np.ndarray, tiny: np.floating) -> tuple[float, np.ndarray, int, int, int, int]:
    magnitude = np.abs(flat)
    finite = np.isfinite(flat)
    squares = np.zeros(-(-flat.size // _LANES) * _LANES)
    with np.errstate(over="ignore", under="ignore"):
        np.square(np.where(finite, magnitude, 0).astype(np.float64), out=squares[: flat.size])
        lanes = squares.reshape(-1, _LANES).cumsum(axis=0)[-1] if flat.size else np.zeros(_LANES)
    largest = float(np.max(magnitude, where=finite, initial=0))
    zeros = int(np.count_nonzero(flat == 0))
    subnormals = int(np.count_nonzero((magnitude > 0) & (magnitude < tiny)))
    return largest, lanes, zeros, subnormals, int(np.isinf(flat).sum()), int(np.isnan(flat).sum())


def _stats_compiled(flat: np.ndarray, tiny: np.floating) -> tuple[float, np.ndarray, int, int, int, int]:
    # Into arrays of ours: a kernel that makes one, or returns several things, would need numba in every process.
    largest, lanes, counts = np.zeros(1, flat.dtype), np.zeros(8), np.zeros(4, np.int64)
    _stats_numba(flat, tiny, flat.dtype.type(np.inf), largest, lanes, counts)
    return largest[0], lanes, *counts.tolist()


def _as_stats(largest: float, lanes: np.ndarray, zeros: int, subnormals: int, infs: int, nans: int) -> Stats:
    try:
        norm = math.sqrt(math.fsum(lanes))
    except OverflowError:  # finite lanes whose sum is not
        norm = math.inf
    return Stats(float(largest), norm, int(zeros), int(subnormals), int(infs), int(nans))


# The compiled loops: same formulas -----------------------------------------------------------------------------------


@njit
def _mix_numba(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> _S32)) * _A
    x = (x ^ (x >> _S29)) * _B
    return x ^ (x >> _S32)


@njit
def _sum_numba(words, start):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    key = (start + _ONE) * _P
    for i in range(words.size):
        total += _mix_numba(words[i] ^ key)
        key += _P
    return total


@njit
def _rows_numba(words, seed):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for row in range(words.shape[0]):
        inner = np.uint64(0)
        key = _P
        for i in range(words.shape[1]):
            inner += _mix_numba(words[row, i] ^ key)
            key += _P
        total += _mix_numba((inner + seed) ^ _L)
    return total


@njit
def _stats_numba(flat, tiny, infinity, largest_of, lanes, counts):  # type: ignore[no-untyped-def]
    largest = flat.dtype.type(0)
    zeros = subnormals = infs = nans = 0
    for i in range(flat.size):
        magnitude = abs(flat[i])
        if magnitude < infinity:
            largest = max(largest, magnitude)
            square = np.float64(magnitude) * np.float64(magnitude)
            lanes[i & 7] += square
            zeros += magnitude == 0
            subnormals += (magnitude > 0) & (magnitude < tiny)
        elif magnitude == infinity:
            infs += 1
        else:
            nans += 1
    largest_of[0] = largest
    counts[0], counts[1], counts[2], counts[3] = zeros, subnormals, infs, nans
