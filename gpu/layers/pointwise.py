"""Layers that treat every value by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gpu.cuda import layers as cuda
from gpu.fillers import name_key
from gpu.layers.base import Array, Layer, Shape, as_flags, register
from gpu.philox import dropout_mask

_DROPOUT_STREAM = 3
_CHUNK = 16_384
"""Mask values drawn at a time: a temporary of 64 KiB, whatever the size of the blob."""


class Pointwise(Layer):
    """One input, one output of the same shape; may work in place."""

    in_place = True

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self._shape = bottoms[0]
        return [bottoms[0]]

    def _room(self) -> Array:
        """Work space of the input's shape, where ``shapes`` reserved it."""
        (room,) = self.context.scratch.arrays(self._shape)
        return room


@register("ReLU")
class ReLU(Pointwise):
    """y = max(x, 0) + negative_slope * min(x, 0)."""

    def setup(self) -> None:
        self._slope = np.float32(self.spec.relu_param.negative_slope)

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.context.scratch.reserve(*[bottoms[0]] * (1 if self._slope == 0 else 2))
        return super().shapes(bottoms)

    def _flags_and_rest(self) -> tuple[Array, Array]:
        """Work space for a bool and a number for each value."""
        flags, rest = self.context.scratch.arrays(self._shape, self._shape)
        return as_flags(flags), rest

    def reads_bottom(self) -> bool:
        return bool(self._slope < 0)  # otherwise the output has the sign of the input

    def reads_top(self) -> bool:
        return not self.reads_bottom()

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        x, y = bottoms[0], tops[0]
        if self._slope == 0:
            self.xp.maximum(x, np.float32(0), out=y)
        else:
            negative, rest = self._flags_and_rest()
            self.xp.multiply(x, self._slope, out=rest)
            self.xp.greater(x, 0, out=negative)
            self.xp.logical_not(negative, out=negative)  # so that NaN is there, too
            if y is not x:
                y[...] = x
            self.xp.copyto(y, rest, where=negative)

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        dy, dx = top_diffs[0], bottom_diffs[0]
        if dx is None:
            return
        source = bottoms[0] if self.reads_bottom() else tops[0]
        if self._slope == 0:
            positive = as_flags(self._room())
            self.xp.greater(source, 0, out=positive)
            self.xp.multiply(dy, positive, out=dx)
        else:
            negative, rest = self._flags_and_rest()
            self.xp.greater(source, 0, out=negative)
            self.xp.logical_not(negative, out=negative)
            self.xp.multiply(dy, self._slope, out=rest)
            if dx is not dy:
                dx[...] = dy
            self.xp.copyto(dx, rest, where=negative)


@register("Sigmoid")
class Sigmoid(Pointwise):
    """y = 1 / (1 + exp(-x)), by way of tanh, which cannot overflow."""

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.context.scratch.reserve(bottoms[0])
        return super().shapes(bottoms)

    def reads_bottom(self) -> bool:
        return False

    def reads_top(self) -> bool:
        return True

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        half, y = np.float32(0.5), tops[0]
        self.xp.multiply(bottoms[0], half, out=y)
        self.xp.tanh(y, out=y)
        y *= half
        y += half

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        if bottom_diffs[0] is not None:
            y, slope = tops[0], self._room()
            self.xp.subtract(np.float32(1), y, out=slope)
            slope *= y
            self.xp.multiply(top_diffs[0], slope, out=bottom_diffs[0])


@register("TanH")
class TanH(Pointwise):
    """y = tanh(x)."""

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.context.scratch.reserve(bottoms[0])
        return super().shapes(bottoms)

    def reads_bottom(self) -> bool:
        return False

    def reads_top(self) -> bool:
        return True

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        self.xp.tanh(bottoms[0], out=tops[0])

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        if bottom_diffs[0] is not None:
            y, slope = tops[0], self._room()
            self.xp.multiply(y, y, out=slope)
            self.xp.subtract(np.float32(1), slope, out=slope)
            self.xp.multiply(top_diffs[0], slope, out=bottom_diffs[0])


@register("Power")
class Power(Pointwise):
    """y = (shift + scale * x) ^ power."""

    def setup(self) -> None:
        p = self.spec.power_param
        self._power, self._scale, self._shift = np.float32(p.power), np.float32(p.scale), np.float32(p.shift)

    def reads_bottom(self) -> bool:
        return self._power not in (0, 1)

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.context.scratch.reserve(bottoms[0])
        return super().shapes(bottoms)

    def _base(self, x: Array, out: Array) -> None:
        self.xp.multiply(x, self._scale, out=out)
        out += self._shift

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        y = tops[0]
        self._base(bottoms[0], y)
        if self._power == 2:
            self.xp.multiply(y, y, out=y)
        elif self._power != 1:
            self.xp.power(y, self._power, out=y)

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
        factor = self._power * self._scale
        if not self.reads_bottom():
            self.xp.multiply(top_diffs[0], factor, out=bottom_diffs[0])
            return
        slope = self._room()
        self._base(bottoms[0], slope)
        if self._power != 2:
            self.xp.power(slope, self._power - np.float32(1), out=slope)
        slope *= factor
        self.xp.multiply(top_diffs[0], slope, out=bottom_diffs[0])


@register("Dropout")
class Dropout(Pointwise):
    """In TRAIN: values are dropped with chance ``dropout_ratio``, the others divided by what is kept. In TEST: y = x.

    The mask is a function of (seed, layer name, iteration, shard) alone, see docs/design.md 2.2: value i is dropped
    where the i-th 32-bit word (low half of a Philox word first) is below ratio * 2^32.
    """

    def setup(self) -> None:
        self._ratio = float(self.spec.dropout_param.dropout_ratio)
        if not 0 < self._ratio < 1:
            raise self.error("dropout_ratio is out of range", expected="between 0 and 1", found=self._ratio)
        self._active = self.context.phase == "TRAIN"
        self._key = np.array([self.context.seed % 2**64, name_key(self.name)], np.uint64)

    def allocate(self) -> None:
        if self._active:
            self._mask = self.keep("mask", self._shape)

    def reads_bottom(self) -> bool:
        return False

    def _draw(self) -> None:
        """One mask value per item, 0 or 1 / (1 - ratio)."""
        count, context = math.prod(self._shape), self.context
        if context.compiled or context.own is not None:
            below, value = np.uint64(int(self._ratio * 2**32)), np.float32(1 / (1 - self._ratio))
            rest = (np.uint64(_DROPOUT_STREAM), np.uint64(context.iteration), np.uint64(context.shard))
            mask, numbers = self._mask.reshape(-1), (below, value, self._key[0], self._key[1], *rest)
            if context.own is None:
                dropout_mask(mask, *numbers)
            else:
                cuda.dropout_mask(context.own, mask, *numbers)
            return
        counter = np.array([0, _DROPOUT_STREAM, self.context.iteration, self.context.shard], np.uint64)
        draws = np.random.Philox(key=self._key, counter=counter)
        limit, kept = np.uint32(self._ratio * 2**32), np.float32(1 / (1 - self._ratio))
        mask = self._mask.reshape(-1)
        for start in range(0, count, _CHUNK):  # a piece at a time: the library has no way to draw into an array
            part = mask[start : start + _CHUNK]
            words = draws.random_raw((part.size + 1) // 2)
            halves = words.astype("<u8", copy=False).view("<u4")[: part.size]
            np.multiply(halves >= limit, kept, out=part)

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        if self._active:
            self._draw()
            self.xp.multiply(bottoms[0], self._mask, out=tops[0])
        elif bottoms[0] is not tops[0]:
            tops[0][...] = bottoms[0]

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
        if self._active:
            self.xp.multiply(top_diffs[0], self._mask, out=bottom_diffs[0])
        elif bottom_diffs[0] is not top_diffs[0]:
            bottom_diffs[0][...] = top_diffs[0]
