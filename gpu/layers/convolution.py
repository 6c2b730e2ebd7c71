"""Convolution and deconvolution as matrix products over unrolled windows (im2col), one image or a few at a time.

Compiled kernels leave out what a convolution does not need: nothing is unrolled for 1 x 1 windows, and one image at a
time is multiplied from and into its place. Groups of one channel: :mod:`gpu.layers.depthwise`.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu.cudnn import ConvolutionShape
from gpu.layers import depthwise, kernels
from gpu.layers.base import Array, Shape, register
from gpu.layers.geometry import Geometry
from gpu.layers.library import LibraryConvolution
from gpu.layers.windowed import Windowed


@register("Convolution")
class Convolution(Windowed):
    """y = W * x + b over windows; groups, stride, pad, dilation, any number of spatial axes (Caffe Convolution)."""

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        geometry = self._windows(bottoms)
        n, channels = bottoms[0][:2]
        kernel, out, outputs = geometry.kernel, geometry.out, self._param.num_output
        weight = (outputs, channels // self._param.group, *kernel)
        self._depthwise = self._param.group == channels > 1
        if not self._depthwise and not self.context.compiled:
            numbers = geometry.stride, geometry.pad, geometry.dilation
            shape = ConvolutionShape(bottoms[0], weight, (n, outputs, *out), *numbers)
            self.library = LibraryConvolution(self.context, shape, len(bottoms))
            self.context.scratch.reserve(self.library.room)
            self.algorithms = self.library.algorithms
        self._plan(n, geometry, weight, outputs)
        if self._depthwise:
            self._depthwise_work = ((outputs, *kernel), depthwise.sums_shape(geometry, outputs, self.context))
            self.context.scratch.reserve(*self._depthwise_work)
        return [(n, outputs, *out)] * len(bottoms)

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        matmul = self.xp.matmul
        bias = self.blobs[1].device_data if len(self.blobs) > 1 else None
        if self._depthwise:
            self._forward_depthwise(bottoms, tops, self._none if bias is None else bias)
            return
        for x, y in zip(bottoms, tops, strict=True):
            if self.library is not None and self.library.run("forward", x, self.blobs[0].device_data, y):
                if bias is not None:
                    y += bias.reshape(-1, *[1] * len(self._geometry.size))
                continue
            for part in self._starts(x.shape[0]):
                col, packed, _ = self._chunk(part.stop - part.start)
                col = self._unroll(x[part], col)
                if self._in_place:
                    packed = y[part].reshape(packed.shape)
                for weight, maps, rows in self._groups():
                    matmul(weight, col[rows], out=packed[maps])
                if not self._in_place:
                    self._unpack(packed, y[part], bias)
                elif bias is not None:
                    kernels.add_bias(bias, packed)

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        matmul = self.xp.matmul
        dw = param_diffs[0]
        db = param_diffs[1] if len(param_diffs) > 1 else None
        if self._depthwise:
            self._backward_depthwise(bottoms, top_diffs, bottom_diffs, dw, db)
            return
        first = True
        for x, dy, dx in zip(bottoms, top_diffs, bottom_diffs, strict=True):
            if self.library is not None:
                if dx is not None and self.library.run("data", dy, self.blobs[0].device_data, dx):
                    dx = None
                if dw is not None and self.library.run("weights", x, dy, dw):
                    dw = None
                if dw is None and dx is None:
                    if db is not None:
                        axes = (0, *range(2, dy.ndim))
                        if first:
                            self.xp.sum(dy, axis=axes, out=db)
                        else:
                            db += self.xp.sum(dy, axis=axes)
                    first = False
                    continue
            for part in self._starts(x.shape[0]):
                col, packed, scratch = self._chunk(part.stop - part.start)
                packed = self._packed(dy[part], packed)
                if db is not None:
                    self._add_sums(packed, db, first)
                if dw is not None:
                    windows = self._unroll(x[part], col)
                    gradient = dw.reshape(self._work[1][0], -1)
                    for _, maps, rows in self._groups():
                        self._add_weight_gradient(packed[maps], windows[rows], gradient[maps], first, scratch)
                if dx is not None:
                    windows, done = self._fold_from(dx[part], col)
                    for weight, maps, rows in self._groups():
                        matmul(weight.T, packed[maps], out=windows[rows])
                    if not done:
                        self._geometry.fold(col, dx[part], self.context)
                first = False

    def _forward_depthwise(self, bottoms: Sequence[Array], tops: Sequence[Array], bias: Array) -> None:
        weight = self._window_weights(self.blobs[0].device_data)
        for x, y in zip(bottoms, tops, strict=True):
            depthwise.forward(self._geometry, x, weight, bias, y, self.context)

    def _backward_depthwise(
        self,
        bottoms: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        dw: Array | None,
        db: Array | None,
    ) -> None:
        weight = self._window_weights(self.blobs[0].device_data)
        part, sums = self.context.scratch.arrays(*self._depthwise_work)
        for i, (x, dy, dx) in enumerate(zip(bottoms, top_diffs, bottom_diffs, strict=True)):
            if db is not None:
                for b, maps in enumerate(dy):
                    self._add_sums(maps.reshape(len(weight), -1), db, i == b == 0)
            if dw is not None:
                gradient = self._window_weights(dw)
                depthwise.backward_weight(self._geometry, x, dy, part if i else gradient, sums, self.context)
                if i:
                    gradient += part
            if dx is not None:
                depthwise.backward_data(self._geometry, dy, weight, dx, self.context)

    def _window_weights(self, weight: Array) -> Array:
        return weight.reshape(-1, *self._geometry.kernel)


@register("Deconvolution")
class Deconvolution(Windowed):
    """The transpose of Convolution: what its backward pass does to its input (Caffe Deconvolution)."""

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        kernel, stride, pad, dilation = self._settings(bottoms)
        n, channels, *size = bottoms[0]
        out = [
            s * (length - 1) + d * (k - 1) + 1 - 2 * p
            for length, k, s, p, d in zip(size, kernel, stride, pad, dilation, strict=True)
        ]
        if min(out) < 1:
            raise self.error("the output would be empty", found=out)
        outputs = self._param.num_output
        # The windows slide over the output; the input holds one value per window.
        geometry = Geometry(outputs, tuple(out), kernel, stride, pad, dilation, tuple(size))
        self._plan(n, geometry, (channels, outputs // self._param.group, *kernel), channels)
        return [(n, outputs, *out)] * len(bottoms)

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        for x, y in zip(bottoms, tops, strict=True):
            for part in self._starts(x.shape[0]):
                col, packed, _ = self._chunk(part.stop - part.start)
                packed = self._packed(x[part], packed)
                for weight, maps, rows in self._groups():
                    self.xp.matmul(weight.T, packed[maps], out=col[rows])
                self._geometry.fold(col, y[part], self.context)
            if len(self.blobs) > 1:
                bias = self.blobs[1].device_data
                y += bias.reshape(-1, *[1] * len(self._geometry.size))

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        dw = param_diffs[0]
        db = param_diffs[1] if len(param_diffs) > 1 else None
        first = True
        for x, dy, dx in zip(bottoms, top_diffs, bottom_diffs, strict=True):
            for part in self._starts(x.shape[0]):
                col, packed, scratch = self._chunk(part.stop - part.start)
                if db is not None:
                    for i, maps_of in enumerate(dy[part]):
                        self._add_sums(maps_of.reshape(len(maps_of), -1), db, first and i == 0)
                self._geometry.unroll(dy[part], col, self.context)
                if dw is not None:
                    packed = self._packed(x[part], packed)
                    gradient = dw.reshape(self._work[1][0], -1)
                    for _, maps, rows in self._groups():
                        self._add_weight_gradient(packed[maps], col[rows], gradient[maps], first, scratch)
                if dx is not None:
                    if self._in_place:
                        packed = dx[part].reshape(packed.shape)
                    for weight, maps, rows in self._groups():
                        self.xp.matmul(weight, col[rows], out=packed[maps])
                    if not self._in_place:
                        self._unpack(packed, dx[part], None)
                first = False
