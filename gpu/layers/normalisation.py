"""Local response normalisation, batch normalisation and the learned scale that usually follows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from datasets import caffe_pb2
from gpu.layers.base import Array, Layer, ParamShape, Shape, register

_WITHIN = 1


@register("LRN")
class LRN(Layer):
    """Krizhevsky et al. 2012: y = x * s^-beta, where s grows with the squares of the neighbours.

    ACROSS_CHANNELS: s = k + alpha / n * sum over n channels. WITHIN_CHANNEL: s = 1 + alpha / n^2 * sum over n x n
    positions (k has no say there, as in Caffe). Positions outside count as 0.
    """

    def setup(self) -> None:
        p = self._param = self.spec.lrn_param
        if p.local_size % 2 == 0:
            raise self.error("local_size must be odd", found=p.local_size)
        self._within = p.norm_region == _WITHIN
        self._half = (p.local_size - 1) // 2
        if self._within:
            self._base, self._alpha = np.float32(1), np.float32(p.alpha / p.local_size**2)
        else:
            self._base, self._alpha = np.float32(p.k), np.float32(p.alpha / p.local_size)
        self._beta = np.float32(p.beta)

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        if len(bottoms[0]) != 4:
            raise self.error("needs an input of (images, channels, height, width)", found=bottoms[0])
        self._shape = bottoms[0]
        self.context.scratch.reserve(*[self._shape] * 3)
        return [bottoms[0]]

    def allocate(self) -> None:
        self._sums = self.xp.zeros(self._shape, np.float32)

    def reads_top(self) -> bool:
        return True

    def _window_sum(self, values: Array, out: Array, spare: Array) -> None:
        """Sum of each position's neighbourhood, neighbour by neighbour."""
        if not self._within:
            self._sum_along(values, out, 1)
            return
        self._sum_along(values, spare, 2)
        self._sum_along(spare, out, 3)

    def _sum_along(self, values: Array, out: Array, axis: int) -> None:
        out[...] = values
        for shift in range(1, min(self._half, values.shape[axis] - 1) + 1):
            near = (*[slice(None)] * axis, slice(None, -shift))
            far = (*[slice(None)] * axis, slice(shift, None))
            out[near] += values[far]
            out[far] += values[near]

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        x, y = bottoms[0], tops[0]
        square, spare, _ = self.context.scratch.arrays(*[self._shape] * 3)
        self.xp.multiply(x, x, out=square)
        self._window_sum(square, self._sums, spare)
        self._sums *= self._alpha
        self._sums += self._base
        self.xp.power(self._sums, -self._beta, out=y)
        y *= x

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        x, y, dy, dx = bottoms[0], tops[0], top_diffs[0], bottom_diffs[0]
        if dx is None:
            return
        ratio, spare, near = self.context.scratch.arrays(*[self._shape] * 3)
        self.xp.multiply(dy, y, out=ratio)
        ratio /= self._sums
        self._window_sum(ratio, near, spare)
        near *= x
        near *= np.float32(2) * self._alpha * self._beta
        self.xp.power(self._sums, -self._beta, out=dx)
        dx *= dy
        dx -= near


@register("BatchNorm")
class BatchNorm(Layer):
    """Ioffe and Szegedy 2015, without the learned scale: y = (x - mean) / sqrt(var + eps) per channel.

    Parameters: sums of means and of variances (unbiased, m / (m - 1)), and the weight both are to be divided by.
    TRAIN uses the statistics of the batch and adds them to the sums; TEST (or ``use_global_stats``) uses the sums. A
    weight of 0 means that statistics were never accumulated: that is refused, where Caffe multiplies by 1 / sqrt(eps).
    """

    in_place = True
    learned = False

    def setup(self) -> None:
        p = self.spec.batch_norm_param
        self._global = p.use_global_stats if p.HasField("use_global_stats") else self.context.phase == "TEST"
        self._keep, self._eps = np.float32(p.moving_average_fraction), np.float32(p.eps)
        if any(spec.lr_mult for spec in self.spec.param):
            raise self.error(
                "its statistics cannot be learned", expected="lr_mult: 0 in every param", hint="leave the params out"
            )

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape = bottoms[0]
        channels = shape[1] if len(shape) > 1 else 1
        none = caffe_pb2.FillerParameter()
        self.param_shapes = [ParamShape((channels,), none), ParamShape((channels,), none), ParamShape((1,), none)]
        self._view = (shape[0], channels, math.prod(shape[2:]))
        self.context.scratch.reserve(self._view)
        return [shape]

    def allocate(self) -> None:
        self._std = self.xp.ones((self._view[1], 1), np.float32)
        self._normal = self.xp.zeros(self._view, np.float32)

    def reads_bottom(self) -> bool:
        return False

    def _mean(self, values: Array) -> Array:
        """Mean over images and positions, [C, 1]."""
        return values.mean(axis=2).mean(axis=0)[:, None]

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        x, y = bottoms[0].reshape(self._view), tops[0].reshape(self._view)
        sums, squares, weight = (blob.device_data for blob in self.blobs)
        if self._global:
            total = float(weight[0])
            if total == 0:
                raise self.error(
                    "statistics never accumulated",
                    expected="a third parameter above 0",
                    found=0,
                    hint="train first, or load weights that hold statistics",
                )
            mean, variance = (sums / total)[:, None], (squares / total)[:, None]
            self.xp.subtract(x, mean, out=self._normal)
        else:
            mean = self._mean(x)
            self.xp.subtract(x, mean, out=self._normal)
            (square,) = self.context.scratch.arrays(self._view)
            self.xp.multiply(self._normal, self._normal, out=square)
            variance = self._mean(square)
            m = self._view[0] * self._view[2]
            for total, value in ((sums, mean), (squares, variance * np.float32(m / (m - 1) if m > 1 else 1))):
                total *= self._keep
                total += value[:, 0]
            weight *= self._keep
            weight += np.float32(1)
        self._std[...] = self.xp.sqrt(variance + self._eps)
        self._normal /= self._std
        y[...] = self._normal

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        if bottom_diffs[0] is None:
            return
        dy, dx = top_diffs[0].reshape(self._view), bottom_diffs[0].reshape(self._view)
        if self._global:
            self.xp.divide(dy, self._std, out=dx)
            return
        (part,) = self.context.scratch.arrays(self._view)
        self.xp.multiply(dy, self._normal, out=part)
        along = self._mean(part)
        mean = self._mean(dy)
        self.xp.multiply(self._normal, along, out=part)
        part += mean
        self.xp.subtract(dy, part, out=dx)
        dx /= self._std


@register("Scale")
class Scale(Layer):
    """y = x * s (+ b), with s spread over the axes it lacks; s is a parameter, or the second bottom."""

    n_bottoms = (1, 2)
    in_place = True

    def setup(self) -> None:
        self._param = self.spec.scale_param
        self._learned = len(self.spec.bottom) == 1

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        p, shape = self._param, bottoms[0]
        axis = self.axis(p.axis, len(shape))
        if self._learned:
            if p.num_axes < -1 or axis + p.num_axes > len(shape):
                raise self.error(
                    "num_axes reaches past the last axis", expected=f"<= {len(shape) - axis}", found=p.num_axes
                )
            inner = shape[axis:] if p.num_axes == -1 else shape[axis : axis + p.num_axes]
            filler = p.filler
            if not p.HasField("filler"):
                filler = caffe_pb2.FillerParameter(type="constant", value=1)
            self.param_shapes = [ParamShape(inner, filler)]
        else:
            inner = bottoms[1]
            axis = 0 if not inner else axis
            if shape[axis : axis + len(inner)] != inner:
                raise self.error("the second input does not fit the first", expected=shape[axis:], found=inner)
        if p.bias_term:
            self.param_shapes = [*self.param_shapes, ParamShape(inner, p.bias_filler)]
        rest = len(shape) - axis - len(inner)
        self._inner = inner
        self._spread = (*inner, *[1] * rest)
        self._summed = (*range(axis), *range(axis + len(inner), len(shape)))
        self.context.scratch.reserve(shape)
        return [shape]

    def _scale(self, bottoms: Sequence[Array]) -> Array:
        scale = self.blobs[0].device_data if self._learned else bottoms[1]
        return scale.reshape(self._spread)

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        self.xp.multiply(bottoms[0], self._scale(bottoms), out=tops[0])
        if self._param.bias_term:
            tops[0][...] += self.blobs[-1].device_data.reshape(self._spread)

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        x, dy = bottoms[0], top_diffs[0]
        scale = self._scale(bottoms)
        target: Any = param_diffs[0] if self._learned else bottom_diffs[1]
        if target is not None:
            (product,) = self.context.scratch.arrays(x.shape)
            self.xp.multiply(x, dy, out=product)
            target[...] = product.sum(axis=self._summed).reshape(self._inner)
        if self._param.bias_term and param_diffs[-1] is not None:
            param_diffs[-1][...] = dy.sum(axis=self._summed).reshape(self._inner)
        if bottom_diffs[0] is not None:
            self.xp.multiply(dy, scale, out=bottom_diffs[0])
