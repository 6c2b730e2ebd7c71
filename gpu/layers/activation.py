"""Activations beyond those of ``pointwise``, and the base that they share with ``functions``.

No forward or backward pass here makes an array: work space is the scratch that all layers share.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from types import ModuleType
from typing import ClassVar

import numpy as np

from datasets import caffe_pb2
from gpu.layers.base import Array, ParamShape, Shape, as_flags, register
from gpu.layers.pointwise import Pointwise

_BNLL_LIMIT = np.float32(50)
_ONE, _ZERO = np.float32(1), np.float32(0)


def sigmoid(xp: ModuleType, x: Array, out: Array, room: Array) -> None:
    """1 / (1 + exp(-x)), as exp(min(x, 0)) / (1 + exp(-|x|)): no overflow, and all digits far below 0; out may be x."""
    xp.abs(x, out=room)
    xp.negative(room, out=room)
    xp.exp(room, out=room)
    room += _ONE
    xp.minimum(x, _ZERO, out=out)
    xp.exp(out, out=out)
    out /= room


class Activation(Pointwise):
    """y = f(x). ``rooms``: float32 arrays of the input's size that one pass works in."""

    rooms: ClassVar[int] = 0

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self.context.scratch.reserve(*[bottoms[0]] * self.rooms)
        return super().shapes(bottoms)

    def _rooms(self) -> list[Array]:
        return self.context.scratch.arrays(*[self._shape] * self.rooms)

    @abstractmethod
    def _value(self, x: Array, y: Array) -> None:
        """y = f(x); y may be x."""

    def _gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = f'(x) dy; dx may be dy where the layer does not read its bottom."""
        raise self.error("has no backward pass")

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        self._value(bottoms[0], tops[0])

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        if bottom_diffs[0] is not None:
            self._gradient(bottoms[0], tops[0], top_diffs[0], bottom_diffs[0])


@register("BNLL")
class BNLL(Activation):
    """y = log(1 + exp(x)), as max(x, 0) + log(1 + exp(-|x|)), which cannot overflow."""

    rooms = 2

    def _value(self, x: Array, y: Array) -> None:
        part, _ = self._rooms()
        self.xp.abs(x, out=part)
        self.xp.negative(part, out=part)
        self.xp.exp(part, out=part)
        self.xp.log1p(part, out=part)
        self.xp.maximum(x, _ZERO, out=y)
        y += part

    def _gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        part, more = self._rooms()
        self.xp.minimum(x, _BNLL_LIMIT, out=part)
        self.xp.exp(part, out=part)
        self.xp.add(part, _ONE, out=more)
        part /= more
        self.xp.multiply(dy, part, out=dx)


@register("ELU")
class ELU(Activation):
    """Clevert et al. 2015: y = x above 0, alpha * (exp(x) - 1) below."""

    rooms = 2

    def setup(self) -> None:
        self._alpha = np.float32(self.spec.elu_param.alpha)

    def reads_bottom(self) -> bool:
        return bool(self._alpha < 0)  # otherwise the output has the sign of the input

    def reads_top(self) -> bool:
        return True

    def _value(self, x: Array, y: Array) -> None:
        part, _ = self._rooms()
        self.xp.minimum(x, _ZERO, out=part)
        self.xp.expm1(part, out=part)
        part *= self._alpha
        self.xp.maximum(x, _ZERO, out=y)
        y += part

    def _gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        slope, room = self._rooms()
        above = as_flags(room)
        self.xp.add(y, self._alpha, out=slope)
        self.xp.greater(x if self.reads_bottom() else y, 0, out=above)
        self.xp.copyto(slope, 1.0, where=above)
        self.xp.multiply(dy, slope, out=dx)


@register("PReLU")
class PReLU(Activation):
    """He et al. 2015: y = max(x, 0) + a * min(x, 0), with a learned slope a per channel, or one for all.

    Slopes begin at 0.25 unless a filler is given. The input is kept for backward, also where it is written in place.
    """

    rooms = 2

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        p, shape = self.spec.prelu_param, bottoms[0]
        if len(shape) < 2:
            raise self.error("needs an input of (images, channels, ...)", found=shape)
        filler = p.filler if p.HasField("filler") else caffe_pb2.FillerParameter(type="constant", value=0.25)
        slopes = () if p.channel_shared else shape[1:2]
        self.param_shapes = [ParamShape(slopes, filler)]
        self._spread = () if p.channel_shared else (shape[1], *[1] * (len(shape) - 2))
        self._summed = tuple(i for i in range(len(shape)) if p.channel_shared or i != 1)
        return super().shapes(bottoms)

    def _slopes(self) -> Array:
        return self.blobs[0].device_data.reshape(self._spread)

    def _value(self, x: Array, y: Array) -> None:
        part, _ = self._rooms()
        self.xp.minimum(x, _ZERO, out=part)
        part *= self._slopes()
        self.xp.maximum(x, _ZERO, out=y)
        y += part

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        x, dy, dx = bottoms[0], top_diffs[0], bottom_diffs[0]
        part, room = self._rooms()
        if param_diffs[0] is not None:
            self.xp.minimum(x, _ZERO, out=part)
            part *= dy
            self.xp.sum(part, axis=self._summed, out=param_diffs[0])
        if dx is not None:
            above = as_flags(room)
            self.xp.greater(x, 0, out=above)
            part[...] = self._slopes()
            self.xp.copyto(part, 1.0, where=above)
            self.xp.multiply(dy, part, out=dx)


@register("Swish")
class Swish(Activation):
    """Ramachandran et al. 2017: y = x * sigmoid(beta * x)."""

    rooms = 1

    def setup(self) -> None:
        self._beta = np.float32(self.spec.swish_param.beta)

    def allocate(self) -> None:
        self._sigmoid = self.keep("sigmoid", self._shape)

    def reads_bottom(self) -> bool:
        return False

    def reads_top(self) -> bool:
        return True

    def _value(self, x: Array, y: Array) -> None:
        self.xp.multiply(x, self._beta, out=self._sigmoid)
        sigmoid(self.xp, self._sigmoid, self._sigmoid, *self._rooms())
        self.xp.multiply(x, self._sigmoid, out=y)

    def _gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        (slope,) = self._rooms()
        self.xp.subtract(_ONE, self._sigmoid, out=slope)  # b·y + s·(1 − b·y) = s + b·y·(1 − s)
        slope *= y
        slope *= self._beta
        slope += self._sigmoid
        self.xp.multiply(dy, slope, out=dx)
