"""Layers that cut a blob out of another, repeat it, or bring a learned one in."""

from __future__ import annotations

import math
from collections.abc import Sequence

from datasets import caffe_pb2
from gpu.layers.base import Array, Layer, ParamShape, Shape, register


@register("Crop")
class Crop(Layer):
    """The first bottom cut to the size of the second from ``axis`` on, at ``offset`` (one for all axes, or one each).

    Of the second bottom only the shape counts: it gets no gradient (Caffe leaves its gradient at 0).
    """

    n_bottoms = (2, 2)
    takes_empty = True

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        p, (shape, size) = self.spec.crop_param, bottoms
        axis = self.axis(p.axis, len(shape))
        offsets = list(p.offset) or [0]
        if len(offsets) == 1:
            offsets *= len(shape) - axis
        if len(offsets) != len(shape) - axis:
            raise self.error(
                "offset must be given once or once per axis to crop", expected=len(shape) - axis, found=list(p.offset)
            )
        if len(size) < len(shape):
            raise self.error("the second bottom has too few axes", expected=f"{len(shape)} axes", found=size)
        part: list[slice] = [slice(None)] * axis
        for i, offset in enumerate(offsets, axis):
            if offset + size[i] > shape[i]:
                raise self.error(
                    f"the crop leaves the input on axis {i}",
                    expected=f"offset + size <= {shape[i]}",
                    found=f"offset {offset}, size {size[i]}",
                )
            part.append(slice(offset, offset + size[i]))
        self._part = tuple(part)
        return [(*shape[:axis], *size[axis : len(shape)])]

    def reads_bottom(self) -> bool:
        return False

    def allows_gradient(self, index: int) -> bool:
        return index == 0

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        tops[0][...] = bottoms[0][self._part]

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        if bottom_diffs[0] is not None:
            bottom_diffs[0][...] = 0
            bottom_diffs[0][self._part] = top_diffs[0]


@register("Tile")
class Tile(Layer):
    """The bottom repeated ``tiles`` times along ``axis``; gradients are summed in the order of the tiles."""

    def setup(self) -> None:
        self._tiles = self.spec.tile_param.tiles
        if self._tiles < 1:
            raise self.error("tiles is missing or below 1", expected=">= 1", found=self._tiles)

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape = bottoms[0]
        axis = self.axis(self.spec.tile_param.axis, len(shape))
        self._outer, self._inner = math.prod(shape[:axis]), math.prod(shape[axis:])
        return [(*shape[:axis], shape[axis] * self._tiles, *shape[axis + 1 :])]

    def reads_bottom(self) -> bool:
        return False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        x = bottoms[0].reshape(self._outer, 1, self._inner)
        tops[0].reshape(self._outer, self._tiles, self._inner)[...] = x

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
        dy = top_diffs[0].reshape(self._outer, self._tiles, self._inner)
        dx = bottom_diffs[0].reshape(self._outer, self._inner)
        dx[...] = dy[:, 0]
        for tile in range(1, self._tiles):
            dx += dy[:, tile]


@register("Parameter")
class Parameter(Layer):
    """A learned blob as a top; it starts at 0, as in Caffe, until weights are copied or written."""

    n_bottoms = (0, 0)

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape = tuple(self.spec.parameter_param.shape.dim)
        self.param_shapes = [ParamShape(shape, caffe_pb2.FillerParameter())]
        return [shape]

    def reads_bottom(self) -> bool:
        return False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        tops[0][...] = self.blobs[0].device_data

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        if param_diffs[0] is not None:
            param_diffs[0][...] = top_diffs[0]
