"""What layers ask of the kernels, with arrays in the layers' shapes. Float32, C-contiguous, on one device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu.cuda.kernels import Launcher, Windows

Array = Any


def im2col(own: Launcher, windows: Windows, x: Array, col: Array) -> None:
    """x[n, C, H, W] to col[C * kh * kw, n * OH * OW]."""
    own.launch("im2col", col.size, x, col, x.shape[0], x.shape[1], *windows.dilated)


def col2im(own: Launcher, windows: Windows, col: Array, x: Array) -> None:
    """The transpose of im2col; every value of x is written."""
    own.launch("col2im", x.size, col, x, x.shape[0], x.shape[1], *windows.dilated)


def max_pool(own: Launcher, windows: Windows, x: Array, y: Array, index: Array) -> None:
    """x[..., H, W] to y[..., OH, OW]; index (int32): where each maximum came from, y * width + x."""
    own.launch("max_pool", y.size, x, y, index, *windows.pooled)


def max_pool_back(own: Launcher, windows: Windows, dy: Array, index: Array, dx: Array) -> None:
    own.launch("max_pool_back", dx.size, dy, index, dx, *windows.pooled)


def ave_pool(own: Launcher, windows: Windows, x: Array, y: Array) -> None:
    own.launch("ave_pool", y.size, x, y, *windows.pooled)


def ave_pool_back(own: Launcher, windows: Windows, dy: Array, dx: Array) -> None:
    own.launch("ave_pool_back", dx.size, dy, dx, *windows.pooled)


def depthwise(own: Launcher, windows: Windows, x: Array, weight: Array, bias: Array, y: Array) -> None:
    """y[n, O, OH, OW] from x[n, C, H, W] and weight[O, kh, kw]; an empty bias counts as none."""
    outputs, each = len(weight), y.shape[1] // x.shape[1]
    given = bias if bias.size else weight  # a pointer that is never read, since memory of no size may have none
    own.launch("depthwise", y.size, x, weight, given, int(bias.size > 0), y, outputs, each, *windows.dilated)


def depthwise_back(own: Launcher, windows: Windows, dy: Array, weight: Array, dx: Array) -> None:
    own.launch("depthwise_back", dx.size, dy, weight, dx, len(weight), dy.shape[1] // dx.shape[1], *windows.dilated)


def depthwise_columns_shape(outputs: int, windows: Windows) -> tuple[int, ...]:
    """Shape of the work space of :func:`depthwise_weights`."""
    return (outputs, *windows.kernel, windows.out[1])


def depthwise_weights(own: Launcher, windows: Windows, x: Array, dy: Array, dw: Array, sums: Array) -> None:
    """The gradient with respect to weight[O, kh, kw]; ``sums``: work space."""
    n, outputs = dy.shape[:2]
    numbers = (n * outputs, outputs, outputs // x.shape[1], *windows.dilated)
    own.launch("depthwise_columns", sums.size, x, dy, sums, *numbers)
    own.launch("sum_rows", dw.size, sums, dw, sums.shape[-1])


def lrn_forward(own: Launcher, x: Array, scale: Array, y: Array, half: int, alpha: Any, base: Any, beta: Any) -> None:
    """y[n, C, H, W] and the ``scale`` that its gradient needs."""
    own.launch("lrn_forward", x.size, x, scale, y, x.shape[1], math.prod(x.shape[2:]), half, alpha, base, beta)


def lrn_backward(
    own: Launcher, x: Array, y: Array, scale: Array, dy: Array, dx: Array, half: int, alpha: Any, beta: Any
) -> None:
    factor = np.float32(2) * np.float32(alpha) * np.float32(beta)
    size = math.prod(x.shape[2:])
    own.launch("lrn_backward", x.size, x, y, scale, dy, dx, x.shape[1], size, half, factor, beta)


def dropout_mask(
    own: Launcher, mask: Array, limit: Any, kept: Any, key_0: Any, key_1: Any, c1: Any, c2: Any, c3: Any
) -> None:
    """As :func:`gpu.philox.dropout_mask`, whose arguments these are; mask[count] float32."""
    own.launch("dropout_mask", -(-mask.size // 8), mask, mask.size, limit, kept, key_0, key_1, c1, c2, c3)


def sum_picks(own: Launcher, picked: Array, order: Array, start: Array, into: Array) -> None:
    """into[r, W] = sum of picked[order[i]] for start[r] <= i < start[r + 1]; order and start are int64."""
    own.launch("sum_picks", into.size, picked, order, start, into, into.shape[1])
