"""Convolution with one input channel a group, summed directly: a matrix product a group would be all overhead.

Compiled for two spatial axes (numba for NumPy arrays, CUDA on a device); in all other cases one elementwise pass for
each offset of the kernel.
Outputs c * m to c * m + m - 1 belong to channel c, m being the number of outputs a channel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gpu.cuda import layers as cuda
from gpu.layers import kernels
from gpu.threads import spread

if TYPE_CHECKING:
    from gpu.layers.base import Context
    from gpu.layers.geometry import Geometry

Array = Any
_ALL = (slice(None),)


def forward(geometry: Geometry, x: Array, weight: Array, bias: Array, y: Array, context: Context) -> None:
    """y[n, O, *out] from x[n, C, *size] and weight[O, *kernel]; an empty bias counts as none."""
    if context.compiled and len(geometry.size) == 2:
        x, y = _planes(x), _planes(y)
        spread(kernels.depthwise, len(y), _work(geometry, y), x, weight, bias, y, *geometry.numbers[2:])
        return
    if context.own is not None and len(geometry.size) == 2:
        cuda.depthwise(context.own, geometry.planar, x, weight, bias, y)
        return
    x, y, weight = _by_channel(geometry, x, y, weight)
    y[...] = bias.reshape(*y.shape[1:3], *[1] * len(geometry.size)) if bias.size else 0
    for offset, image, out in geometry.slices():
        y[_ALL * 3 + out] += _spread(weight, offset) * x[_ALL * 3 + image]


def backward_data(geometry: Geometry, dy: Array, weight: Array, dx: Array, context: Context) -> None:
    """The gradient with respect to x."""
    if context.compiled and len(geometry.size) == 2:
        dy, dx = _planes(dy), _planes(dx)
        spread(kernels.depthwise_back, len(dx), _work(geometry, dy), dy, weight, dx, *geometry.numbers[2:])
        return
    if context.own is not None and len(geometry.size) == 2:
        cuda.depthwise_back(context.own, geometry.planar, dy, weight, dx)
        return
    dx[...] = 0
    _, dy, weight = _by_channel(geometry, dx, dy, weight)
    for offset, image, out in geometry.slices():
        # One offset after the other, so every position is added to in the same order, without atomics.
        dx[_ALL * 2 + image] += (_spread(weight, offset) * dy[_ALL * 3 + out]).sum(axis=2)


def backward_weight(geometry: Geometry, x: Array, dy: Array, dw: Array, sums: Array, context: Context) -> None:
    """The gradient with respect to weight, written to dw[O, *kernel]; sums: see ``sums_shape``."""
    if context.compiled and len(geometry.size) == 2:
        x, dy = _planes(x), _planes(dy)
        numbers = geometry.numbers[2:]
        spread(kernels.depthwise_weights, len(dw), _work(geometry, dy), x, dy, dw, sums, *numbers)
        return
    if context.own is not None and len(geometry.size) == 2:
        cuda.depthwise_weights(context.own, geometry.planar, x, dy, dw, sums)
        return
    x, dy, dw = _by_channel(geometry, x, dy, dw)
    axes = (0, *range(3, 3 + len(geometry.size)))
    for offset, image, out in geometry.slices():
        dw[_ALL * 2 + offset] = (x[_ALL * 3 + image] * dy[_ALL * 3 + out]).sum(axis=axes)


def sums_shape(geometry: Geometry, outputs: int, context: Context) -> tuple[int, ...]:
    """Shape of the work space of ``backward_weight``: a row of sums for each output, or for each weight."""
    if context.own is not None and len(geometry.size) == 2:
        return cuda.depthwise_columns_shape(outputs, geometry.planar)
    return outputs, geometry.out[-1]


def _planes(array: Array) -> Array:
    return array.reshape(-1, *array.shape[2:])


def _work(geometry: Geometry, y: Array) -> int:
    return int(y.size) * math.prod(geometry.kernel)


def _by_channel(geometry: Geometry, x: Array, y: Array, weight: Array) -> tuple[Array, Array, Array]:
    """x[n, C, 1, *size], y[n, C, m, *out], weight[C, m, *kernel]: views."""
    n, channels = x.shape[:2]
    return (
        x[:, :, None],
        y.reshape(n, channels, -1, *geometry.out),
        weight.reshape(channels, -1, *geometry.kernel),
    )


def _spread(weight: Array, offset: tuple[int, ...]) -> Array:
    """One weight of each output, to be multiplied with (channel, output, *spatial)."""
    return weight[_ALL * 2 + offset][(..., *[None] * len(offset))]
