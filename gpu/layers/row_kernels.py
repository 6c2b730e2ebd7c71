"""Compiled loops of layers that choose rows or places; rules as in :mod:`gpu.layers.kernels`. They make no arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from profiler.jit import njit

_NAN = np.int32(2**31 - 1)
_INFINITY = np.int32(0x7F800000)
_POSITION = np.int64(2**32 - 1)
_LOWEST = np.int64(-(2**63))


@njit
def read_rows(values: Any, rows: int, index: Any) -> int:
    """index[i] = values[i] as a whole number; returns the first position whose value names none of ``rows``, or -1."""
    for i in range(values.size):
        value = values[i]
        if not (value >= 0 and value < rows and value == np.floor(value)):  # written so that NaN is not good
            return i
        index[i] = np.int64(value)
    return -1


@njit
def sort_picks(index: Any, order: Any, start: Any) -> Any:
    """The picks of row r, as they came: order[start[r]] .. order[start[r + 1] - 1]. Returns the most that a row has."""
    start[:] = 0
    for row in index:
        start[row + 1] += 1
    most = np.int64(0)
    for row in range(start.size - 1):
        most = max(most, start[row + 1])
        start[row + 1] += start[row]
    for i in range(index.size):
        order[start[index[i]]] = i
        start[index[i]] += 1
    for row in range(start.size - 1, 0, -1):  # each has moved to where the next one begins
        start[row] = start[row - 1]
    start[0] = 0
    return most


@njit
def sum_picks(
    picked: Any, order: Any, start: Any, most: int, sums: Any, into: Any, width: int, first: int, last: int
) -> None:
    """into[r] = the sum of picked[order[i]] over row r's picks, for rows first to last; sums[picks, width]: work space.

    Neighbours are added at distances 1, 2, 4, .. as array arithmetic does it for all rows at one time. So what has no
    neighbour gets 0 added, which makes 0 of -0.
    """
    count = order.size
    for row in range(first, last):
        begin, end = start[row], start[row + 1]
        for i in range(begin, end):
            for p in range(width):
                sums[i, p] = picked[order[i], p]
        shift = np.int64(1)
        while shift < most:
            for i in range(begin, min(end, count - shift)):
                if i + shift < end:
                    for p in range(width):
                        sums[i, p] += sums[i + shift, p]
                else:
                    for p in range(width):
                        sums[i, p] += np.float32(0)
            shift *= 2
        for p in range(width):
            into[row, p] = sums[begin, p] if begin < end else np.float32(0)


@njit
def choose_rows(selector: Any, chosen: Any) -> int:
    """The positions at which ``selector`` is not 0, in order; returns how many there are."""
    count = 0
    for i in range(selector.size):
        if selector[i] != 0:
            chosen[count] = i
            count += 1
    return count


@njit
def spread_rows(chosen: Any, rows: Any, into: Any) -> None:
    """into[chosen[i]] = rows[i], 0 in all other rows; ``chosen`` rises."""
    i = 0
    for row in range(len(into)):
        if i < chosen.size and chosen[i] == row:
            for p in range(into.shape[1]):
                into[row, p] = rows[i, p]
            i += 1
        else:
            for p in range(into.shape[1]):
                into[row, p] = np.float32(0)


@njit
def _sink(heap: Any, value: int, size: int) -> None:
    """Put ``value`` in the place of heap[0], the smallest of ``size``, and make the smallest of all heap[0]."""
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = value


@njit
def largest(x: Any, heaps: Any, y: Any, values: bool, first: int, last: int) -> None:
    """The k largest of x[outer, :, inner], largest first, the later of equals first, NaN above all, for lanes first to
    last of outer * inner. To y[outer, r, k, inner]: their places, or with ``values`` the values; both where r is 2.

    heaps[lanes, k] is work space. A value's rank is its bits, as an integer in its order (both zeros being 0), above
    its place: no two are equal, so a heap of the k largest finds what a stable sort does.
    """
    size, inner = x.shape[1:]
    bits = x.view(np.int32)
    kinds, k = y.shape[1:3]
    for lane in range(first, last):
        o, i = lane // inner, lane % inner
        heap = heaps[lane]
        for j in range(k):
            heap[j] = _LOWEST
        for c in range(size):
            value = bits[o, c, i]
            magnitude = value & np.int32(0x7FFFFFFF)
            order = -magnitude if value < 0 else magnitude
            order = _NAN if magnitude > _INFINITY else order
            rank = (np.int64(order) << np.int64(32)) | np.int64(c)
            if rank > heap[0]:
                _sink(heap, rank, k)
        for count in range(k - 1, 0, -1):
            rank = heap[count]
            heap[count] = heap[0]
            _sink(heap, rank, count)
        for j in range(k):
            place = heap[j] & _POSITION
            if not values or kinds == 2:
                y[o, 0, j, i] = np.float32(place)
            if values:
                y[o, kinds - 1, j, i] = x[o, place, i]
