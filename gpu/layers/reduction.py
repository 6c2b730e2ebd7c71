"""Layers that keep one or a few numbers of many: sums over the last axes, and the places of the largest values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gpu.layers import row_kernels
from gpu.layers.base import Array, Layer, Shape, register
from gpu.threads import spread

_SUM, _ASUM, _SUMSQ, _MEAN = 1, 2, 3, 4


@register("Reduction")
class Reduction(Layer):
    """``coeff`` times the sum (of absolute values, of squares) or the mean over ``axis`` and all that follow."""

    def setup(self) -> None:
        self._operation = self.spec.reduction_param.operation

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        p, shape = self.spec.reduction_param, bottoms[0]
        axis = self.axis(p.axis, len(shape))
        self._view = (math.prod(shape[:axis]), math.prod(shape[axis:]))
        self._factor = np.float32(p.coeff / (self._view[1] if p.operation == _MEAN else 1))
        if self._operation in (_ASUM, _SUMSQ):
            self.context.scratch.reserve(self._view)
        return [shape[:axis]]

    def allocate(self) -> None:
        self._scaled = self.keep("scaled", (self._view[0], 1))

    def reads_bottom(self) -> bool:
        return self._operation in (_ASUM, _SUMSQ)

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        xp, x, y = self.xp, bottoms[0].reshape(self._view), tops[0].reshape(-1)
        if self._operation in (_ASUM, _SUMSQ):
            (part,) = self.context.scratch.arrays(self._view)
            if self._operation == _ASUM:
                xp.absolute(x, out=part)
            else:
                xp.multiply(x, x, out=part)
            x = part
        xp.sum(x, axis=1, out=y)
        y *= self._factor

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
        xp, x, dx = self.xp, bottoms[0].reshape(self._view), bottom_diffs[0].reshape(self._view)
        factor = self._factor * np.float32(2 if self._operation == _SUMSQ else 1)
        xp.multiply(top_diffs[0].reshape(-1, 1), factor, out=self._scaled)
        if self._operation == _ASUM:
            xp.sign(x, out=dx)
            dx *= self._scaled
        elif self._operation == _SUMSQ:
            xp.multiply(x, self._scaled, out=dx)
        else:
            dx[...] = self._scaled


@register("ArgMax")
class ArgMax(Layer):
    """Places of the ``top_k`` largest values, largest first; of equal ones the later place comes first (as in Caffe).

    With ``axis``: along it, the places, or with ``out_max_val`` the values. Without: over everything but the first
    axis, to (images, 1, top_k), or with ``out_max_val`` places and values as (images, 2, top_k); at least three axes.
    NaN counts as the largest value (in Caffe the order is undefined then).
    """

    differentiable = False

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        p, shape = self.spec.argmax_param, bottoms[0]
        self._k, self._values, self._along = p.top_k, p.out_max_val, p.HasField("axis")
        if self._along:
            axis = self.axis(p.axis, len(shape))
            self._view = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
            top = (*shape[:axis], self._k, *shape[axis + 1 :])
        else:
            if not shape:
                raise self.error("needs an input with at least one axis", found=shape)
            self._view = (shape[0], math.prod(shape[1:]), 1)
            top = (shape[0], 2 if self._values else 1, self._k, *[1] * (len(shape) - 3))
        if not 1 <= self._k <= self._view[1]:
            raise self.error("top_k is out of range", expected=f"1 to {self._view[1]} values", found=self._k)
        return [top]

    def allocate(self) -> None:
        if self.context.compiled:
            outer, _, inner = self._view
            self._heaps = self.keep("heaps", (outer * inner, self._k), np.int64)

    def reads_bottom(self) -> bool:
        return False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        xp, (outer, size, inner) = self.xp, self._view
        x = bottoms[0].reshape(self._view)
        if self.context.compiled:
            y = tops[0].reshape(outer, 2 if self._values and not self._along else 1, self._k, inner)
            spread(row_kernels.largest, outer * inner, x.size, x, self._heaps, y, self._values)
            return
        if self._k == 1:
            place = size - 1 - xp.argmax(x[:, ::-1], axis=1)[:, None]
        else:
            place = xp.argsort(x, axis=1, kind="stable")[:, ::-1][:, : self._k]
        if not self._values:
            tops[0].reshape(outer, self._k, inner)[...] = place
        elif self._along:
            tops[0].reshape(outer, self._k, inner)[...] = xp.take_along_axis(x, place, axis=1)
        else:
            y = tops[0].reshape(outer, 2, self._k)
            y[:, 0] = place[:, :, 0]
            y[:, 1] = xp.take_along_axis(x, place, axis=1)[:, :, 0]
