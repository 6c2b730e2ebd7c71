"""Compiled loops for NumPy arrays, where NumPy would make one small copy after another.

Every loop runs in one thread and in one order, so the bits do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from profiler.jit import njit


@njit
def _span(out: int, size: int, stride: int, pad: int, offset: int) -> Any:
    """First and one past the last output position whose input position stride * o - pad + offset is inside."""
    first = 0
    if pad > offset:
        first = (pad - offset + stride - 1) // stride
    room = size + pad - offset
    last = 0
    if room > 0:
        last = (room + stride - 1) // stride
    last = min(last, out)
    return min(first, last), last


@njit
def im2col(x: Any, col: Any, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int, dh: int, dw: int) -> None:
    """x[n, C, H, W] to col[C, kh, kw, n, OH, OW]; positions in the padding are 0. Both are contiguous."""
    n, channels, height, width = x.shape
    oh, ow = col.shape[4], col.shape[5]
    # Flat indices: a view per row of eight values would cost more than its copy.
    flat, out = x.reshape(-1), col.reshape(-1)
    for c in range(channels):
        for i in range(kh):
            y0, y1 = _span(oh, height, sh, ph, i * dh)
            for j in range(kw):
                x0, x1 = _span(ow, width, sw, pw, j * dw)
                covered = y0 == 0 and y1 == oh and x0 == 0 and x1 == ow
                start = ((c * kh + i) * kw + j) * n * oh * ow
                for b in range(n):
                    if not covered:
                        for p in range(start, start + oh * ow):
                            out[p] = 0
                    for oy in range(y0, y1):
                        to = start + oy * ow
                        at = ((b * channels + c) * height + oy * sh - ph + i * dh) * width + j * dw - pw
                        if sw == 1:
                            for ox in range(x0, x1):
                                out[to + ox] = flat[at + ox]
                        else:
                            for ox in range(x0, x1):
                                out[to + ox] = flat[at + ox * sw]
                    start += oh * ow


@njit
def col2im(col: Any, x: Any, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int, dh: int, dw: int) -> None:
    """The transpose of im2col: x is set to the sum of what belongs to each position, in kernel order."""
    n, channels, height, width = x.shape
    oh, ow = col.shape[4], col.shape[5]
    flat, source = x.reshape(-1), col.reshape(-1)
    flat[:] = 0
    for c in range(channels):
        for i in range(kh):
            y0, y1 = _span(oh, height, sh, ph, i * dh)
            for j in range(kw):
                x0, x1 = _span(ow, width, sw, pw, j * dw)
                start = ((c * kh + i) * kw + j) * n * oh * ow
                for b in range(n):
                    for oy in range(y0, y1):
                        row = start + oy * ow
                        at = ((b * channels + c) * height + oy * sh - ph + i * dh) * width + j * dw - pw
                        if sw == 1:
                            for ox in range(x0, x1):
                                flat[at + ox] += source[row + ox]
                        else:
                            for ox in range(x0, x1):
                                flat[at + ox * sw] += source[row + ox]
                    start += oh * ow


@njit
def unpack(packed: Any, bias: Any, out: Any) -> None:
    """packed[O, n, P] + bias[O] to out[n, O, P]; an empty bias counts as none."""
    channels, n, size = packed.shape
    for b in range(n):
        for o in range(channels):
            row = packed[o, b]
            target = out[b, o]
            if bias.size:
                value = bias[o]
                for p in range(size):
                    target[p] = row[p] + value
            else:
                for p in range(size):
                    target[p] = row[p]


@njit
def max_pool(x: Any, y: Any, index: Any, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int) -> None:
    """Largest value of each window of x[planes, H, W], the first one of equals, NaN if there is one; its position."""
    planes, height, width = x.shape
    oh, ow = y.shape[1], y.shape[2]
    for p in range(planes):
        plane = x[p]
        for oy in range(oh):
            top = oy * sh - ph
            y0, y1 = max(top, 0), min(top + kh, height)
            for ox in range(ow):
                left = ox * sw - pw
                x0, x1 = max(left, 0), min(left + kw, width)
                best = plane[y0, x0]
                where = y0 * width + x0
                for h in range(y0, y1):
                    for w in range(x0, x1):
                        value = plane[h, w]
                        better = (value > best) | ((value != value) & (best == best))
                        best = value if better else best
                        where = h * width + w if better else where
                y[p, oy, ox] = best
                index[p, oy, ox] = where


@njit
def max_pool_back(dy: Any, index: Any, dx: Any) -> None:
    """Give each gradient of dy[planes, P] to the position its maximum came from, in dx[planes, H * W]."""
    planes, size = dy.shape
    dx[:] = 0
    for p in range(planes):
        for i in range(size):
            dx[p, index[p, i]] += dy[p, i]


@njit
def ave_pool(x: Any, y: Any, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int) -> None:
    """Sum of each window of x[planes, H, W] over its size, which counts padding but ends at H + pad."""
    planes, height, width = x.shape
    oh, ow = y.shape[1], y.shape[2]
    for p in range(planes):
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
def ave_pool_back(dy: Any, dx: Any, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int) -> None:
    """The transpose of ave_pool."""
    planes, height, width = dx.shape
    oh, ow = dy.shape[1], dy.shape[2]
    dx[:] = 0
    for p in range(planes):
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
