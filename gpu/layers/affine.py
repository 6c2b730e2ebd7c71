"""Learned or given scales and biases that are spread over the axes they lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import caffe_pb2
from gpu.layers.base import Array, Layer, ParamShape, Shape, register


class _Spread(Layer):
    """An operand for axes ``axis`` to ``axis + num_axes`` of the input: the first parameter, or the second bottom."""

    n_bottoms = (1, 2)
    in_place = True
    _param: Any

    def _fit(self, bottoms: Sequence[Shape]) -> Shape:
        """The operand's shape; checks it against the input, and sets how it spreads."""
        p, shape = self._param, bottoms[0]
        self._learned = len(bottoms) == 1
        if self._learned:
            axis = self.axis(p.axis, len(shape))
            if p.num_axes < -1 or axis + p.num_axes > len(shape):
                raise self.error(
                    "num_axes reaches past the last axis", expected=f"<= {len(shape) - axis}", found=p.num_axes
                )
            inner = shape[axis:] if p.num_axes == -1 else shape[axis : axis + p.num_axes]
        else:
            inner = bottoms[1]
            axis = self.axis(p.axis, len(shape)) if inner else 0
            if shape[axis : axis + len(inner)] != inner:
                raise self.error("the second input does not fit the first", expected=shape[axis:], found=inner)
        stop = axis + len(inner)
        self._spread = (*inner, *[1] * (len(shape) - stop))
        self._summed = (*range(axis), *range(stop, len(shape)))
        return inner

    def _operand(self, bottoms: Sequence[Array]) -> Array:
        operand = self.blobs[0].device_data if self._learned else bottoms[1]
        return operand.reshape(self._spread)

    def _sum_into(self, target: Array, values: Array) -> None:
        """Sum over the axes that the operand lacks."""
        if self._summed:
            self.xp.sum(values, axis=self._summed, out=target)
        else:
            target[...] = values


@register("Scale")
class Scale(_Spread):
    """y = x * s (+ b), with s spread over the axes it lacks; s is a parameter, or the second bottom."""

    def setup(self) -> None:
        self._param = self.spec.scale_param

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        p = self._param
        inner = self._fit(bottoms)
        if self._learned:
            one = caffe_pb2.FillerParameter(type="constant", value=1)
            self.param_shapes = [ParamShape(inner, p.filler if p.HasField("filler") else one)]
        if p.bias_term:
            self.param_shapes = [*self.param_shapes, ParamShape(inner, p.bias_filler)]
        self.context.scratch.reserve(bottoms[0])
        return [bottoms[0]]

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        y = tops[0]
        self.xp.multiply(bottoms[0], self._operand(bottoms), out=y)
        if self._param.bias_term:
            y += self.blobs[-1].device_data.reshape(self._spread)

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        x, dy = bottoms[0], top_diffs[0]
        target: Any = param_diffs[0] if self._learned else bottom_diffs[1]
        if target is not None:
            (product,) = self.context.scratch.arrays(x.shape)
            self.xp.multiply(x, dy, out=product)
            self._sum_into(target, product)
        if self._param.bias_term and param_diffs[-1] is not None:
            self._sum_into(param_diffs[-1], dy)
        if bottom_diffs[0] is not None:
            self.xp.multiply(dy, self._operand(bottoms), out=bottom_diffs[0])


@register("Bias")
class Bias(_Spread):
    """y = x + b, with b spread over the axes it lacks; b is a parameter, or the second bottom."""

    def setup(self) -> None:
        self._param = self.spec.bias_param

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        inner = self._fit(bottoms)
        if self._learned:
            self.param_shapes = [ParamShape(inner, self._param.filler)]
        return [bottoms[0]]

    def reads_bottom(self) -> bool:
        return False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        self.xp.add(bottoms[0], self._operand(bottoms), out=tops[0])

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        dy, dx = top_diffs[0], bottom_diffs[0]
        target: Any = param_diffs[0] if self._learned else bottom_diffs[1]
        if target is not None:
            self._sum_into(target, dy)
        if dx is not None and dx is not dy:
            dx[...] = dy
