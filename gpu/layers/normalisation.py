"""Local response, batch, and mean-variance normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from datasets import caffe_pb2
from gpu.cuda import layers as cuda
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
        self._sums = self.keep("sums", self._shape)

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

    def _divide(self, values: Array, out: Array, spare: Array) -> None:
        """values * s^-beta; the usual 3/4 by two square roots, as a power costs ten times as much."""
        if self._beta == np.float32(0.75):
            self.xp.sqrt(self._sums, out=out)
            self.xp.sqrt(out, out=spare)
            out *= spare
        else:
            self.xp.power(self._sums, self._beta, out=out)
        self.xp.divide(values, out, out=out)

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        x, y, own = bottoms[0], tops[0], self.context.own
        if own is not None and not self._within:
            cuda.lrn_forward(own, x, self._sums, y, self._half, self._alpha, self._base, self._beta)
            return
        square, spare, _ = self.context.scratch.arrays(*[self._shape] * 3)
        self.xp.multiply(x, x, out=square)
        self._window_sum(square, self._sums, spare)
        self._sums *= self._alpha
        self._sums += self._base
        self._divide(x, y, spare)

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
        own = self.context.own
        if own is not None and not self._within:
            cuda.lrn_backward(own, x, y, self._sums, dy, dx, self._half, self._alpha, self._beta)
            return
        ratio, spare, near = self.context.scratch.arrays(*[self._shape] * 3)
        self.xp.multiply(dy, y, out=ratio)
        ratio /= self._sums
        self._window_sum(ratio, near, spare)
        near *= x
        near *= np.float32(2) * self._alpha * self._beta
        self._divide(dy, dx, spare)
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
        channels = self._view[1]
        self._std = self.keep("std", (channels, 1))
        self._std[...] = 1
        self._normal = self.keep("normal", self._view)
        self._each = self.keep("each", self._view[:2])  # means of each image
        self._means = [self.keep(f"mean{i}", (channels,)) for i in range(2)]

    def reads_bottom(self) -> bool:
        return False

    def _mean(self, values: Array, which: int) -> Array:
        """Mean over images and positions, [C, 1], in place ``which`` of the two there are."""
        xp, out = self.xp, self._means[which]
        xp.sum(values, axis=2, out=self._each)  # mean() has the same bits, and makes an array to get them
        xp.divide(self._each, np.float32(values.shape[2]), out=self._each)
        xp.sum(self._each, axis=0, out=out)
        xp.divide(out, np.float32(values.shape[0]), out=out)
        return out[:, None]

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
            for value, out in zip((sums, squares), self._means, strict=True):
                self.xp.divide(value, total, out=out)
            mean, variance = (out[:, None] for out in self._means)
            self.xp.subtract(x, mean, out=self._normal)
        else:
            mean = self._mean(x, 0)
            self.xp.subtract(x, mean, out=self._normal)
            (square,) = self.context.scratch.arrays(self._view)
            self.xp.multiply(self._normal, self._normal, out=square)
            variance = self._mean(square, 1)
            m = self._view[0] * self._view[2]
            self.xp.multiply(variance, np.float32(m / (m - 1) if m > 1 else 1), out=self._std)
            for total, value in ((sums, mean), (squares, self._std)):
                total *= self._keep
                total += value[:, 0]
            weight *= self._keep
            weight += np.float32(1)
        self.xp.add(variance, self._eps, out=self._std)
        self.xp.sqrt(self._std, out=self._std)
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
        along = self._mean(part, 0)
        mean = self._mean(dy, 1)
        self.xp.multiply(self._normal, along, out=part)
        part += mean
        self.xp.subtract(dy, part, out=dx)
        dx /= self._std


@register("MVN")
class MVN(Layer):
    """y = (x - mean) / (std + eps), over each channel of each image, or over each image (``across_channels``).

    Without ``normalize_variance`` only the mean is taken away. The gradient is Caffe's, which takes std + eps for std:
    right as long as eps is small beside it.
    """

    in_place = True

    def setup(self) -> None:
        p = self._param = self.spec.mvn_param
        self._eps = np.float32(p.eps)

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape = bottoms[0]
        if not shape:
            raise self.error("needs an input with at least one axis", found=shape)
        first = 1 if self._param.across_channels else 2
        self._view = (math.prod(shape[:first]), math.prod(shape[first:]))
        self.context.scratch.reserve(self._view)
        return [shape]

    def allocate(self) -> None:
        self._mean, self._along, self._std = (self.xp.ones((self._view[0], 1), np.float32) for _ in range(3))

    def reads_bottom(self) -> bool:
        return False

    def reads_top(self) -> bool:
        return bool(self._param.normalize_variance)

    def _mean_of(self, values: Array, out: Array) -> Array:
        return self.xp.mean(values, axis=1, keepdims=True, out=out)

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        x, y = bottoms[0].reshape(self._view), tops[0].reshape(self._view)
        self.xp.subtract(x, self._mean_of(x, self._mean), out=y)
        if self._param.normalize_variance:
            (square,) = self.context.scratch.arrays(self._view)
            self.xp.multiply(y, y, out=square)
            self.xp.sqrt(self._mean_of(square, self._std), out=self._std)
            self._std += self._eps
            y /= self._std

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
        mean = self._mean_of(dy, self._mean)
        if not self._param.normalize_variance:
            self.xp.subtract(dy, mean, out=dx)
            return
        y = tops[0].reshape(self._view)
        (part,) = self.context.scratch.arrays(self._view)
        self.xp.multiply(dy, y, out=part)
        along = self._mean_of(part, self._along)
        self.xp.multiply(y, along, out=part)
        part += mean
        self.xp.subtract(dy, part, out=dx)
        dx /= self._std
