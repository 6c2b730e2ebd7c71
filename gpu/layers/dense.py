"""Fully connected layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpu.layers.base import Array, Layer, ParamShape, Shape, register


@register("InnerProduct")
class InnerProduct(Layer):
    """y = x W^T + b with x flattened from ``axis`` on; W is (outputs, inputs), or its transpose if so told."""

    def setup(self) -> None:
        self._param = self.spec.inner_product_param
        if not self._param.num_output:
            raise self.error("num_output is missing or 0", expected=">= 1")

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        p = self._param
        shape = bottoms[0]
        axis = self.axis(p.axis, len(shape))
        self._inputs = math.prod(shape[axis:])
        weight = (self._inputs, p.num_output) if p.transpose else (p.num_output, self._inputs)
        self.param_shapes = [ParamShape(weight, p.weight_filler)]
        if p.bias_term:
            self.param_shapes.append(ParamShape((p.num_output,), p.bias_filler))
        return [(*shape[:axis], p.num_output)]

    def _weight(self) -> Array:
        """The weights as (outputs, inputs)."""
        weight = self.blobs[0].device_data
        return weight.T if self._param.transpose else weight

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        x, y = bottoms[0].reshape(-1, self._inputs), tops[0].reshape(-1, self._param.num_output)
        self.xp.matmul(x, self._weight().T, out=y)
        if len(self.blobs) > 1:
            y += self.blobs[1].device_data

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        x, dy = bottoms[0].reshape(-1, self._inputs), top_diffs[0].reshape(-1, self._param.num_output)
        if param_diffs[0] is not None:
            left, right = (x, dy) if self._param.transpose else (dy, x)
            self.xp.matmul(left.T, right, out=param_diffs[0])
        if len(param_diffs) > 1 and param_diffs[1] is not None:
            self.xp.sum(dy, axis=0, out=param_diffs[1])
        if bottom_diffs[0] is not None:
            self.xp.matmul(dy, self._weight(), out=bottom_diffs[0].reshape(-1, self._inputs))
