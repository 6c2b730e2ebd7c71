"""Compiled loops of pooling; rules as in :mod:`gpu.layers.kernels`."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu.layers.kernels import _zero
from profiler.jit import njit

_LOW = np.int64(2**31 - 1)
_NAN = np.int32(2**31 - 1)
_INFINITY = np.int32(0x7F800000)


@njit
def _rank(bits: Any, start: int, rank: Any) -> None:
    """rank[p]: a number that is larger for a larger value, or for the first of equals; largest for the first NaN.

    The value's bits as an integer in its order (both zeros being 0) above 31 bits that count down with the position.
    """
    s = np.uintp(start)
    for p in range(np.uintp(rank.size)):
        value = bits[s + p]
        size = value & np.int32(0x7FFFFFFF)
        order = -size if value < 0 else size
        order = _NAN if size > _INFINITY else order
        rank[p] = (np.int64(order) << np.int64(32)) | (_LOW - np.int64(p))


@njit
def _largest(rank: Any, width: int, y0: int, y1: int, x0: int, x1: int) -> Any:
    best = rank[np.uintp(y0 * width + x0)]
    for y in range(y0, y1):
        for x in range(x0, x1):
            best = max(best, rank[np.uintp(y * width + x)])
    return best


@njit(inline="always")
def _two(rank: Any, at: Any) -> Any:
    return max(rank[at], rank[at + np.uintp(1)])


@njit
def max_pool(
    x: Any, y: Any, index: Any, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int, first: int, last: int
) -> None:
    """Largest value of each window of x[planes, H, W], the first one of equals, NaN if there is one; its position.

    Rows are too short for vectors, and processors guess wrong which value is larger: so values become integers that
    hold their position, whose maximum takes no branch.
    """
    height, width = x.shape[1:]
    oh, ow = y.shape[1:]
    flat, out, where = x.reshape(-1), y.reshape(-1), index.reshape(-1)
    bits = flat.view(np.int32)
    rank, best = np.empty(height * width, np.int64), np.empty(ow, np.int64)
    # Windows left to right of a row are whole.
    left = min(ow, (pw + sw - 1) // sw)
    right = max(left, min(ow, (width + pw - kw) // sw + 1))
    w, s = np.uintp(width), np.uintp(sw)
    for plane in range(first, last):
        _rank(bits, plane * height * width, rank)
        for oy in range(oh):
            top = oy * sh - ph
            y0, y1 = max(top, 0), min(top + kh, height)
            quick = y1 - y0 == kh == kw and (kh == 2 or kh == 3)
            at = np.uintp(y0 * width + left * sw - pw)
            if quick and kh == 2:
                for p in range(np.uintp(left), np.uintp(right)):
                    best[p] = max(_two(rank, at), _two(rank, at + w))
                    at += s
            elif quick:
                for p in range(np.uintp(left), np.uintp(right)):
                    a, b, c = at, at + w, at + w + w
                    last_column = max(max(rank[a + np.uintp(2)], rank[b + np.uintp(2)]), rank[c + np.uintp(2)])
                    best[p] = max(max(max(_two(rank, a), _two(rank, b)), _two(rank, c)), last_column)
                    at += s
            for ox in range(ow):
                if not quick or ox < left or ox >= right:
                    x0 = ox * sw - pw
                    best[ox] = _largest(rank, width, y0, y1, max(x0, 0), min(x0 + kw, width))
            start = np.uintp((plane * oh + oy) * ow)
            for p in range(np.uintp(ow)):
                place = _LOW - (best[p] & _LOW)
                where[start + p] = place
                out[start + p] = flat[np.uintp(plane * height * width + place)]


@njit
def max_pool_back(dy: Any, index: Any, dx: Any, first: int, last: int) -> None:
    """Give each gradient of dy[planes, P] to the position its maximum came from, in dx[planes, H * W]."""
    size, room = dy.shape[1], dx.shape[1]
    flat, source, where = dx.reshape(-1), dy.reshape(-1), index.reshape(-1)
    for plane in range(first, last):
        _zero(flat, plane * room, room)
        for i in range(plane * size, (plane + 1) * size):
            flat[np.uintp(plane * room + where[np.uintp(i)])] += source[np.uintp(i)]


@njit
def ave_pool(x: Any, y: Any, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int, first: int, last: int) -> None:
    """Sum of each window of x[planes, H, W] over its size, which counts padding but ends at H + pad."""
    height, width = x.shape[1:]
    oh, ow = y.shape[1], y.shape[2]
    for p in range(first, last):
        for oy in range(oh):
            top = oy * sh - ph
            rows = min(top + kh, height + ph) - top
            y0, y1 = max(top, 0), min(top + kh, height)
            for ox in range(ow):
                left = ox * sw - pw
                size = rows * (min(left + kw, width + pw) - left)
                x0, x1 = max(left, 0), min(left + kw, width)
                total = np.float32(0)
                for h in range(y0, y1):
                    for w in range(x0, x1):
                        total += x[p, h, w]
                y[p, oy, ox] = total / size


@njit
def ave_pool_back(
    dy: Any, dx: Any, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int, first: int, last: int
) -> None:
    """The transpose of ave_pool."""
    height, width = dx.shape[1:]
    oh, ow = dy.shape[1], dy.shape[2]
    for p in range(first, last):
        dx[p] = 0
        for oy in range(oh):
            top = oy * sh - ph
            rows = min(top + kh, height + ph) - top
            y0, y1 = max(top, 0), min(top + kh, height)
            for ox in range(ow):
                left = ox * sw - pw
                size = rows * (min(left + kw, width + pw) - left)
                x0, x1 = max(left, 0), min(left + kw, width)
                share = np.float32(dy[p, oy, ox] / size)
                for h in range(y0, y1):
                    for w in range(x0, x1):
                        dx[p, h, w] += share
