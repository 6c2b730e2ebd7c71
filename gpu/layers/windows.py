"""Layers that look at a blob through windows without learning anything: unrolled windows, and a pyramid of poolings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from datasets import caffe_pb2
from gpu.layers.base import Array, Layer, Shape, register
from gpu.layers.pooling import Pooling
from gpu.layers.windowed import Windowed


@register("Im2col")
class Im2col(Windowed):
    """The values of each window as channels: (n, C, H, W) to (n, C * kh * kw, OH, OW), zeros in the padding (Caffe
    Im2col). Settings are those of a convolution; ``axis`` may be any but the last."""

    n_bottoms = (1, 1)
    n_tops = (1, 1)

    def setup(self) -> None:
        self._param = self.spec.convolution_param

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape, axis = bottoms[0], self.axis(self._param.axis, len(bottoms[0]))
        self._parts = math.prod(shape[:axis])
        g = self._geometry = self._windows([(self._parts, *shape[axis:])])
        self._image = (1, *shape[axis:])
        return [(*shape[:axis], g.rows, *g.out)]

    def reads_bottom(self) -> bool:
        return False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        g = self._geometry
        x, y = bottoms[0].reshape(self._parts, *self._image), tops[0].reshape(self._parts, g.rows, g.positions)
        for i in range(self._parts):
            g.unroll(x[i], y[i], self.context)

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
        g = self._geometry
        dy = top_diffs[0].reshape(self._parts, g.rows, g.positions)
        dx = bottom_diffs[0].reshape(self._parts, *self._image)
        for i in range(self._parts):
            g.fold(dy[i], dx[i], self.context)


@register("SPP")
class SPP(Layer):
    """Spatial pyramid pooling (He et al. 2014): level l pools to 2^l x 2^l bins, all bins end to end per image.

    Window, padding and what is refused are those of Caffe's SPP, which pads by half of what is missing (rounded up) on
    all four sides. A pyramid of height 1 is one global pooling and keeps four axes.
    """

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        p, shape = self.spec.spp_param, bottoms[0]
        if len(shape) != 4:
            raise self.error("needs an input of (images, channels, height, width)", found=shape)
        if p.pyramid_height < 1:
            raise self.error("pyramid_height is missing or 0", expected=">= 1", found=p.pyramid_height)
        self._levels = [self._level(level, shape[2:]) for level in range(p.pyramid_height)]
        self._maps = [level.shapes(bottoms)[0] for level in self._levels]
        self._bottom = shape
        if len(self._maps) == 1:
            return self._maps
        self.context.scratch.reserve(shape)
        return [(shape[0], sum(math.prod(maps[1:]) for maps in self._maps))]

    def _level(self, level: int, size: Shape) -> Pooling:
        p, bins = self.spec.spp_param, 2**level
        spec = caffe_pb2.LayerParameter(name=self.name, type=self.type, bottom=self.spec.bottom, top=self.spec.top)
        kernel = [-(-length // bins) for length in size]
        pad = [(k * bins - length + 1) // 2 for k, length in zip(kernel, size, strict=True)]
        if any(width >= k for width, k in zip(pad, kernel, strict=True)):
            raise self.error(
                f"level {level} of the pyramid does not fit the input: it would pad by a whole window",
                expected="a smaller pyramid_height",
                found=f"{bins} x {bins} bins on {size[0]} x {size[1]}: kernel {kernel}, pad {pad}",
            )
        q = spec.pooling_param
        q.pool = p.pool
        q.kernel_h, q.kernel_w = kernel
        q.stride_h, q.stride_w = kernel
        q.pad_h, q.pad_w = pad
        return Pooling(spec, self.context)

    def allocate(self) -> None:
        for level in self._levels:
            level.allocate()
        self._pooled = (
            [self.keep(f"pooled{i}", maps) for i, maps in enumerate(self._maps)] if len(self._maps) > 1 else []
        )

    def reads_bottom(self) -> bool:
        return False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        if not self._pooled:
            self._levels[0].forward(bottoms, tops)
            return
        start = 0
        for level, pooled in zip(self._levels, self._pooled, strict=True):
            level.forward(bottoms, [pooled])
            flat = pooled.reshape(self._bottom[0], -1)
            tops[0][:, start : start + flat.shape[1]] = flat
            start += flat.shape[1]

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        dx = bottom_diffs[0]
        if dx is None:
            return
        if not self._pooled:
            self._levels[0].backward(bottoms, tops, top_diffs, bottom_diffs, param_diffs)
            return
        (part,) = self.context.scratch.arrays(self._bottom)
        start = 0
        for i, (level, pooled) in enumerate(zip(self._levels, self._pooled, strict=True)):
            flat = pooled.reshape(self._bottom[0], -1)  # its values have been copied to the top: room for a gradient
            flat[...] = top_diffs[0][:, start : start + flat.shape[1]]
            start += flat.shape[1]
            level.backward(bottoms, [], [pooled], [part if i else dx], [])
            if i:
                dx += part
