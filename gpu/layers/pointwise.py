"""Layers that treat every value by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gpu.fillers import name_key
from gpu.layers.base import Array, Layer, Shape, register

_DROPOUT_STREAM = 3


class Pointwise(Layer):
    """One input, one output of the same shape; may work in place."""

    in_place = True

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self._shape = bottoms[0]
        return [bottoms[0]]


@register("ReLU")
class ReLU(Pointwise):
    """y = max(x, 0) + negative_slope * min(x, 0)."""

    def setup(self) -> None:
        self._slope = np.float32(self.spec.relu_param.negative_slope)

    def allocate(self) -> None:
        self._mask = self.xp.zeros(self._shape, bool)

    def reads_bottom(self) -> bool:
        return bool(self._slope < 0)  # otherwise the output has the sign of the input

    def reads_top(self) -> bool:
        return not self.reads_bottom()

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        x, y = bottoms[0], tops[0]
        if self._slope == 0:
            self.xp.maximum(x, np.float32(0), out=y)
        else:
            y[...] = self.xp.where(x > 0, x, x * self._slope)

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
        self.xp.greater(bottoms[0] if self.reads_bottom() else tops[0], 0, out=self._mask)
        if self._slope == 0:
            self.xp.multiply(dy, self._mask, out=dx)
        else:
            dx[...] = self.xp.where(self._mask, dy, dy * self._slope)


@register("Sigmoid")
class Sigmoid(Pointwise):
    """y = 1 / (1 + exp(-x)), by way of tanh, which cannot overflow."""

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
            y = tops[0]
            self.xp.multiply(top_diffs[0], y * (np.float32(1) - y), out=bottom_diffs[0])


@register("TanH")
class TanH(Pointwise):
    """y = tanh(x)."""

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
            y = tops[0]
            self.xp.multiply(top_diffs[0], np.float32(1) - y * y, out=bottom_diffs[0])


@register("Power")
class Power(Pointwise):
    """y = (shift + scale * x) ^ power."""

    def setup(self) -> None:
        p = self.spec.power_param
        self._power, self._scale, self._shift = np.float32(p.power), np.float32(p.scale), np.float32(p.shift)

    def reads_bottom(self) -> bool:
        return self._power not in (0, 1)

    def _base(self, x: Array) -> Array:
        return x * self._scale + self._shift

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        base = self._base(bottoms[0])
        tops[0][...] = base if self._power == 1 else base * base if self._power == 2 else base**self._power

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
        base = self._base(bottoms[0])
        slope = base if self._power == 2 else base ** (self._power - np.float32(1))
        self.xp.multiply(top_diffs[0], factor * slope, out=bottom_diffs[0])


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
            self._mask = self.xp.zeros(self._shape, np.float32)

    def reads_bottom(self) -> bool:
        return False

    def _draw(self) -> None:
        """One mask value per item, 0 or 1 / (1 - ratio)."""
        count = math.prod(self._shape)
        counter = np.array([0, _DROPOUT_STREAM, self.context.iteration, self.context.shard], np.uint64)
        words = np.random.Philox(key=self._key, counter=counter).random_raw((count + 1) // 2)
        halves = words.astype("<u8", copy=False).view("<u4")[:count]
        kept = halves >= np.uint32(self._ratio * 2**32)
        values = np.multiply(kept, np.float32(1 / (1 - self._ratio)), dtype=np.float32).reshape(self._shape)
        self._mask[...] = values if self.xp is np else self.xp.asarray(values)

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
