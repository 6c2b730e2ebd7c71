"""Compiled loops for NumPy arrays, where NumPy would make one small copy after another.

Every item of a range (``first`` to ``last``: channels, planes) is computed by one thread and in one order, so the bits
do not depend on the number of threads (:mod:`gpu.threads`).
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
def _copy_rows(
    target: Any, to: int, source: Any, at: int, rows: int, count: int, pitch: int, step: int, width: int
) -> None:
    """target[to + r * pitch + i] = source[at + r * width + i * step] for ``rows`` rows of ``count``."""
    # Unsigned, as numba looks at the sign of any other index; numbers that are constants make vectors.
    t, s, n = np.uintp(to), np.uintp(at), np.uintp(count)
    for _ in range(rows):
        if step == 1 and count == 8:
            for i in range(np.uintp(8)):
                target[t + i] = source[s + i]
        elif step == 1:
            for i in range(n):
                target[t + i] = source[s + i]
        elif step == 2:
            for i in range(n):
                target[t + i] = source[s + i + i]
        else:
            for i in range(n):
                target[t + i] = source[s + i * np.uintp(step)]
        t += np.uintp(pitch)
        s += np.uintp(width)


@njit
def _zero(target: Any, to: int, count: int) -> None:
    t = np.uintp(to)
    for i in range(np.uintp(count)):
        target[t + i] = np.float32(0)


@njit
def im2col(
    x: Any, col: Any, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int, dh: int, dw: int, first: int, last: int
) -> None:
    """x[n, C, H, W] to col[C, kh, kw, n, OH, OW] for channels first to last; positions in the padding are 0."""
    n, channels, height, width = x.shape
    oh, ow = col.shape[4], col.shape[5]
    # Flat indices: a view per row of eight values would cost more than its copy.
    flat, out = x.reshape(-1), col.reshape(-1)
    for c in range(first, last):
        for i in range(kh):
            y0, y1 = _span(oh, height, sh, ph, i * dh)
            for j in range(kw):
                x0, x1 = _span(ow, width, sw, pw, j * dw)
                start = ((c * kh + i) * kw + j) * n * oh * ow
                for b in range(n):
                    at = ((b * channels + c) * height + y0 * sh - ph + i * dh) * width + x0 * sw - pw + j * dw
                    to = start + y0 * ow + x0
                    if y0 == y1 or x0 == x1:
                        _zero(out, start, oh * ow)
                    elif sw == 1 and sh == 1 and ow == width:
                        # One run, over the ends of the rows; what that brings into the padding is put right.
                        _zero(out, start, y0 * ow + x0)
                        _copy_rows(out, to, flat, at, 1, (y1 - y0 - 1) * ow + x1 - x0, 0, 1, 0)
                        edge = ow - x1 + x0
                        if edge > 0:
                            for oy in range(y0, y1 - 1):
                                _zero(out, start + oy * ow + x1, edge)
                        _zero(out, start + (y1 - 1) * ow + x1, (oh - y1 + 1) * ow - x1)
                    else:
                        if y0 > 0 or y1 < oh or x0 > 0 or x1 < ow:
                            _zero(out, start, oh * ow)
                        _copy_rows(out, to, flat, at, y1 - y0, x1 - x0, ow, sw, sh * width)
                    start += oh * ow


@njit
def col2im(
    col: Any, x: Any, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int, dh: int, dw: int, first: int, last: int
) -> None:
    """The transpose of im2col: x is set to the sum of what belongs to each position, in kernel order."""
    n, channels, height, width = x.shape
    oh, ow = col.shape[4], col.shape[5]
    flat, source = x.reshape(-1), col.reshape(-1)
    for c in range(first, last):
        for b in range(n):
            _zero(flat, (b * channels + c) * height * width, height * width)
            for i in range(kh):
                y0, y1 = _span(oh, height, sh, ph, i * dh)
                for j in range(kw):
                    x0, x1 = _span(ow, width, sw, pw, j * dw)
                    row = ((((c * kh + i) * kw + j) * n + b) * oh + y0) * ow + x0
                    at = ((b * channels + c) * height + y0 * sh - ph + i * dh) * width + x0 * sw - pw + j * dw
                    count, step = np.uintp(max(x1 - x0, 0)), np.uintp(sw)
                    for _ in range(y0, y1):
                        s, t = np.uintp(row), np.uintp(at)
                        if sw == 1:
                            for p in range(count):
                                flat[t + p] += source[s + p]
                        else:
                            for p in range(count):
                                flat[t + p * step] += source[s + p]
                        row += ow
                        at += sh * width


@njit
def depthwise(
    x: Any, weight: Any, bias: Any, y: Any, sh: int, sw: int, ph: int, pw: int, dh: int, dw: int, first: int, last: int
) -> None:
    """Convolution with one input channel a group, for planes first to last of y[n * O, OH, OW]; weight[O, kh, kw]."""
    planes, oh, ow = y.shape
    outputs, kh, kw = weight.shape
    height, width = x.shape[1:]
    each = planes // x.shape[0]
    flat, out = x.reshape(-1), y.reshape(-1)
    for plane in range(first, last):
        o = plane % outputs
        start = plane * oh * ow
        value = bias[o] if bias.size else np.float32(0)
        s = np.uintp(start)
        for p in range(np.uintp(oh * ow)):
            out[s + p] = value
        for i in range(kh):
            y0, y1 = _span(oh, height, sh, ph, i * dh)
            for j in range(kw):
                x0, x1 = _span(ow, width, sw, pw, j * dw)
                w = weight[o, i, j]
                at = ((plane // each) * height + y0 * sh - ph + i * dh) * width + x0 * sw - pw + j * dw
                to = start + y0 * ow + x0
                count, step = np.uintp(max(x1 - x0, 0)), np.uintp(sw)
                for _ in range(y0, y1):
                    a, t = np.uintp(at), np.uintp(to)
                    if sw == 1:
                        for p in range(count):
                            out[t + p] += w * flat[a + p]
                    elif sw == 2:
                        for p in range(count):
                            out[t + p] += w * flat[a + p + p]
                    else:
                        for p in range(count):
                            out[t + p] += w * flat[a + p * step]
                    at += sh * width
                    to += ow


@njit
def depthwise_back(
    dy: Any, weight: Any, dx: Any, sh: int, sw: int, ph: int, pw: int, dh: int, dw: int, first: int, last: int
) -> None:
    """Gradient of depthwise with respect to x, for planes first to last of dx[n * C, H, W]."""
    planes, height, width = dx.shape
    oh, ow = dy.shape[1:]
    outputs, kh, kw = weight.shape
    each = dy.shape[0] // planes
    flat, source = dx.reshape(-1), dy.reshape(-1)
    for plane in range(first, last):
        _zero(flat, plane * height * width, height * width)
        for m in range(each):
            o = (plane * each + m) % outputs
            for i in range(kh):
                y0, y1 = _span(oh, height, sh, ph, i * dh)
                for j in range(kw):
                    x0, x1 = _span(ow, width, sw, pw, j * dw)
                    w = weight[o, i, j]
                    at = (plane * height + y0 * sh - ph + i * dh) * width + x0 * sw - pw + j * dw
                    row = ((plane * each + m) * oh + y0) * ow + x0
                    count, step = np.uintp(max(x1 - x0, 0)), np.uintp(sw)
                    for _ in range(y0, y1):
                        t, s = np.uintp(at), np.uintp(row)
                        if sw == 1:
                            for p in range(count):
                                flat[t + p] += w * source[s + p]
                        else:
                            for p in range(count):
                                flat[t + p * step] += w * source[s + p]
                        at += sh * width
                        row += ow


@njit
def depthwise_weights(
    x: Any,
    dy: Any,
    gradient: Any,
    sums: Any,
    sh: int,
    sw: int,
    ph: int,
    pw: int,
    dh: int,
    dw: int,
    first: int,
    last: int,
) -> None:
    """Gradient of depthwise with respect to weight[O, kh, kw], for outputs first to last; sums[O, OW] is work space.

    Each column is summed by itself, image by image and row by row, then the columns: in one order, and by vectors.
    """
    outputs, kh, kw = gradient.shape
    height, width = x.shape[1:]
    planes, oh, ow = dy.shape
    each = planes // x.shape[0]
    flat, source, total = x.reshape(-1), dy.reshape(-1), sums.reshape(-1)
    for o in range(first, last):
        for i in range(kh):
            y0, y1 = _span(oh, height, sh, ph, i * dh)
            for j in range(kw):
                x0, x1 = _span(ow, width, sw, pw, j * dw)
                count, step = np.uintp(max(x1 - x0, 0)), np.uintp(sw)
                t = np.uintp(o * ow)
                _zero(total, o * ow, ow)
                for plane in range(o, planes, outputs):
                    at = ((plane // each) * height + y0 * sh - ph + i * dh) * width + x0 * sw - pw + j * dw
                    row = (plane * oh + y0) * ow + x0
                    for _ in range(y0, y1):
                        a, s = np.uintp(at), np.uintp(row)
                        if sw == 1:
                            for p in range(count):
                                total[t + p] += source[s + p] * flat[a + p]
                        elif sw == 2:
                            for p in range(count):
                                total[t + p] += source[s + p] * flat[a + p + p]
                        else:
                            for p in range(count):
                                total[t + p] += source[s + p] * flat[a + p * step]
                        at += sh * width
                        row += ow
                value = np.float32(0)
                for p in range(count):
                    value += total[t + p]
                gradient[o, i, j] = value


@njit
def add_bias(bias: Any, out: Any) -> None:
    """out[O, P] += bias[O]."""
    channels, size = out.shape
    flat = out.reshape(-1)
    for o in range(channels):
        value = bias[o]
        t = np.uintp(o * size)
        for p in range(np.uintp(size)):
            flat[t + p] += value


@njit
def row_sums(values: Any, into: Any, add: bool) -> None:
    """The sum of each row of values[O, P] written or added to into[O]: 64 partial sums, which are vectors."""
    rows, size = values.shape
    flat, part = values.reshape(-1), np.empty(64, np.float32)
    for o in range(rows):
        _zero(part, 0, 64)
        at, end = np.uintp(o * size), np.uintp((o + 1) * size)
        while at + np.uintp(64) <= end:
            for p in range(np.uintp(64)):
                part[p] += flat[at + p]
            at += np.uintp(64)
        for p in range(end - at):
            part[p] += flat[at + p]
        for width in (32, 16, 8, 4, 2, 1):
            for p in range(np.uintp(width)):
                part[p] += part[p + np.uintp(width)]
        into[o] = into[o] + part[0] if add else part[0]


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
