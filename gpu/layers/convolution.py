"""Convolution and deconvolution as matrix products over unrolled windows (im2col), one image or a few at a time.

Compiled kernels leave out what a convolution does not need: nothing is unrolled for 1 x 1 windows, and one image at a
time is multiplied from and into its place. Groups of one channel: :mod:`gpu.layers.depthwise`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpu.cuda import layers as cuda
from gpu.cuda.kernels import Windows
from gpu.cudnn import ConvolutionShape
from gpu.layers import depthwise, kernels
from gpu.layers.base import Array, Context, Layer, ParamShape, Shape, register
from gpu.layers.library import LibraryConvolution
from gpu.threads import spread

_COLUMN_BYTES = {True: 1 << 20, False: 1 << 28}
"""Largest unrolled chunk: what a core's cache holds for compiled kernels, far more where launches cost time."""
_COLUMN_BYTES_MOST = 1 << 23
"""The same where large weights have to pay: BLAS packs them once a product, so up to twice their size is unrolled."""
_IMAGE_BYTES, _IMAGE_POSITIONS = 1 << 18, 256
"""From this size on (unrolled bytes, windows) one image is enough for a product, unless the weights are larger."""


@dataclass(frozen=True)
class Geometry:
    """A window sliding over ``size`` (spatial axes) of ``channels``, at ``out`` positions."""

    channels: int
    size: Shape
    kernel: Shape
    stride: Shape
    pad: Shape
    dilation: Shape
    out: Shape

    @property
    def rows(self) -> int:
        """Values in one window."""
        return self.channels * math.prod(self.kernel)

    @property
    def positions(self) -> int:
        """Windows in one image."""
        return math.prod(self.out)

    @property
    def numbers(self) -> tuple[int, ...]:
        return (*self.kernel, *self.stride, *self.pad, *self.dilation)

    @property
    def plain(self) -> bool:
        """Whether an image and its unrolled windows are the same values in the same order."""
        return math.prod(self.kernel) == 1 and self.size == self.out and not any(self.pad)

    def slices(self) -> Iterator[tuple[Shape, tuple[slice, ...], tuple[slice, ...]]]:
        """For each kernel offset: the offset, where it reads in the image, and which outputs that serves."""
        for offset in itertools.product(*(range(k) for k in self.kernel)):
            image, out = [], []
            for k, size, stride, pad, dilation, count in zip(
                offset, self.size, self.stride, self.pad, self.dilation, self.out, strict=True
            ):
                shift = k * dilation - pad
                first = max(0, -(shift // stride))
                last = min(count, (size - shift + stride - 1) // stride)
                last = max(first, last)
                begin = first * stride + shift
                image.append(slice(begin, begin + (last - first) * stride, stride))
                out.append(slice(first, last))
            yield offset, tuple(image), tuple(out)

    @property
    def planar(self) -> Windows:
        """The same for the CUDA kernels, which know two spatial axes."""
        return Windows(self.size, self.out, self.kernel, self.stride, self.pad, self.dilation)

    def unroll(self, x: Array, col: Array, context: Context) -> None:
        """x[n, channels, *size] to col[rows, n * positions]."""
        view = col.reshape(self.channels, *self.kernel, x.shape[0], *self.out)
        if context.compiled and len(self.size) == 2:
            spread(kernels.im2col, self.channels, col.size, x, view, *self.numbers)
            return
        if context.own is not None and len(self.size) == 2:
            cuda.im2col(context.own, self.planar, x, col)
            return
        whole = (slice(None),)
        if any(self.pad):
            view[...] = 0
        for offset, image, out in self.slices():
            view[whole + offset + whole + out] = x[whole * 2 + image].swapaxes(0, 1)

    def fold(self, col: Array, x: Array, context: Context) -> None:
        """The transpose of unroll: col[rows, n * positions] added up into x[n, channels, *size]."""
        view = col.reshape(self.channels, *self.kernel, x.shape[0], *self.out)
        if context.compiled and len(self.size) == 2:
            spread(kernels.col2im, self.channels, col.size, view, x, *self.numbers)
            return
        if context.own is not None and len(self.size) == 2:
            cuda.col2im(context.own, self.planar, col, x)
            return
        whole = (slice(None),)
        x[...] = 0
        for offset, image, out in self.slices():
            # One slice after the other: every position is added to in the same order each time, without atomics.
            x[whole * 2 + image] += view[whole + offset + whole + out].swapaxes(0, 1)


class Windowed(Layer):
    """What convolution and its transpose share: settings, shapes and the walk over chunks of the batch."""

    n_bottoms = (1, math.inf)
    n_tops = (1, math.inf)
    _param: Any
    _geometry: Geometry
    library: LibraryConvolution | None = None

    def setup(self) -> None:
        self._param = p = self.spec.convolution_param
        if not p.num_output:
            raise self.error("num_output is missing or 0", expected=">= 1")
        if p.group < 1 or p.num_output % p.group:
            raise self.error("num_output is no multiple of group", found=f"num_output {p.num_output}, group {p.group}")
        if len(self.spec.bottom) != len(self.spec.top):
            raise self.error("needs as many tops as bottoms", found=f"{len(self.spec.bottom)} and {len(self.spec.top)}")
        if p.axis not in (1, -3):
            raise self.error("only axis 1 can hold the channels", expected=1, found=p.axis)

    def _per_axis(self, field: str, axes: int, default: int | None, named: bool = True) -> Shape:
        """A setting for every spatial axis: given once, once per axis, or as _h and _w."""
        p = self._param
        values = tuple(getattr(p, field))
        base = field.removesuffix("_size")
        height, width = f"{base}_h", f"{base}_w"
        if named and (p.HasField(height) or p.HasField(width)):
            if values:
                raise self.error(f"{field} and {height}/{width} exclude each other", found=f"{field} {list(values)}")
            if axes != 2:
                raise self.error(f"{height} and {width} need two spatial axes", found=axes)
            if not (p.HasField(height) and p.HasField(width)) and default is None:
                raise self.error(f"{height} and {width} must be given together")
            given = [getattr(p, name) if p.HasField(name) else default for name in (height, width)]
            values = tuple(value for value in given if value is not None)
        elif not values and default is not None:
            values = (default,)
        if len(values) == 1:
            values *= axes
        if len(values) != axes:
            raise self.error(f"{field} must be given once or once per spatial axis", expected=axes, found=list(values))
        if field != "pad" and min(values) < 1:
            raise self.error(f"{field} must be at least 1", found=list(values))
        return values

    def _settings(self, bottoms: Sequence[Shape]) -> tuple[Shape, Shape, Shape, Shape]:
        """Kernel, stride, pad, dilation; checks the inputs against each other."""
        first = bottoms[0]
        if len(first) < 3:
            raise self.error("needs an input of (images, channels, spatial axes...)", found=first)
        if any(shape != first for shape in bottoms):
            raise self.error("all inputs must have one shape", expected=first, found=list(bottoms))
        if first[1] % self._param.group:
            raise self.error(
                "input channels are no multiple of group", found=f"{first[1]} channels, group {self._param.group}"
            )
        axes = len(first) - 2
        return (
            self._per_axis("kernel_size", axes, None),
            self._per_axis("stride", axes, 1),
            self._per_axis("pad", axes, 0),
            self._per_axis("dilation", axes, 1, named=False),
        )

    def _windows(self, bottoms: Sequence[Shape]) -> Geometry:
        """The windows that slide over the inputs."""
        kernel, stride, pad, dilation = self._settings(bottoms)
        channels, *size = bottoms[0][1:]
        out = []
        for length, k, s, p, d in zip(size, kernel, stride, pad, dilation, strict=True):
            extent = d * (k - 1) + 1
            if length + 2 * p < extent:
                raise self.error("the kernel exceeds the padded input", expected=f">= {extent}", found=length + 2 * p)
            out.append((length + 2 * p - extent) // s + 1)
        return Geometry(channels, tuple(size), kernel, stride, pad, dilation, tuple(out))

    def _plan(self, n: int, geometry: Geometry, weight: Shape, outputs: int) -> None:
        """Parameters, chunk size and scratch once the geometry is known; ``outputs``: channels on the packed side."""
        p = self._param
        self._geometry = geometry
        self.param_shapes = [ParamShape(weight, p.weight_filler)]
        if p.bias_term:
            self.param_shapes.append(ParamShape((p.num_output,), p.bias_filler))
        self._step = self._images(n, 4 * geometry.rows * geometry.positions, 4 * math.prod(weight))
        # One image at a time needs no copies between (images, maps) and (maps, images), the order of a chunk.
        self._in_place = self.context.compiled and self._step == 1
        width = self._step * geometry.positions
        self._work = ((geometry.rows, width), (outputs, width), weight)
        if self.library is None or not self.library.whole:
            self.context.scratch.reserve(*self._work)

    def _images(self, n: int, image_bytes: int, weight_bytes: int) -> int:
        """Images in a chunk, near the same number in each."""
        limit = _COLUMN_BYTES[self.context.compiled]
        if self.context.compiled:
            limit = max(limit, min(2 * weight_bytes, _COLUMN_BYTES_MOST))
            large = image_bytes >= _IMAGE_BYTES and self._geometry.positions >= _IMAGE_POSITIONS
            if large and image_bytes >= weight_bytes:
                return 1
        chunks = -(-n // max(1, limit // image_bytes))
        return -(-n // chunks) if n else 1

    def allocate(self) -> None:
        self._none = self.xp.zeros(0, "float32")
        self._sums = self.xp.zeros(self._param.num_output, "float32")

    def _unroll(self, x: Array, col: Array) -> Array:
        """The windows of x, [rows, n * P]: written to ``col``, or x itself where that is the same."""
        if self._in_place and self._geometry.plain:
            return x.reshape(col.shape)
        self._geometry.unroll(x, col, self.context)
        return col

    def _fold_from(self, x: Array, col: Array) -> tuple[Array, bool]:
        """Where to write the windows whose sum is x, and whether that is x itself."""
        here = self._in_place and self._geometry.plain
        return (x.reshape(col.shape) if here else col), here

    def _packed(self, maps: Array, packed: Array) -> Array:
        """maps[n, O, ...] as [O, n * P]: a copy in ``packed``, or the maps themselves where there is one image."""
        if self._in_place:
            return maps.reshape(packed.shape)
        self._pack(maps, packed)
        return packed

    def _chunk(self, n: int) -> tuple[Array, Array, Array]:
        """Scratch for n images: unrolled windows [rows, n * P], packed maps [outputs, n * P], one weight gradient."""
        width = n * self._geometry.positions
        col, packed, gradient = self.context.scratch.arrays(
            (self._work[0][0], width), (self._work[1][0], width), self._work[2]
        )
        return col, packed, gradient

    def _groups(self) -> Iterator[tuple[Array, slice, slice]]:
        """For each group: its weights as a matrix [outputs, rows], and its rows of packed maps and of windows."""
        weight = self.blobs[0].device_data.reshape(self._work[1][0], -1)
        g = self._param.group
        maps, rows = self._work[1][0] // g, self._work[0][0] // g
        for i in range(g):
            here = slice(i * maps, (i + 1) * maps)
            yield weight[here], here, slice(i * rows, (i + 1) * rows)

    def _starts(self, n: int) -> Iterator[slice]:
        for start in range(0, n, self._step):
            yield slice(start, min(start + self._step, n))

    def _pack(self, maps: Array, packed: Array) -> None:
        """maps[n, O, ...] to packed[O, n * P]."""
        n, channels = maps.shape[:2]
        packed.reshape(channels, n, -1)[...] = maps.reshape(n, channels, -1).swapaxes(0, 1)

    def _unpack(self, packed: Array, maps: Array, bias: Array | None) -> None:
        """packed[O, n * P] (+ bias[O]) to maps[n, O, ...]."""
        n, channels = maps.shape[:2]
        source, target = packed.reshape(channels, n, -1), maps.reshape(n, channels, -1)
        if self.context.compiled:
            kernels.unpack(source, self._none if bias is None else bias, target)
        elif bias is None:
            target[...] = source.swapaxes(0, 1)
        else:
            self.xp.add(source.swapaxes(0, 1), bias[:, None], out=target)

    def _add_sums(self, packed: Array, into: Array, first: bool) -> None:
        """The sum of each row of packed[O, ...] written to ``into`` by the first chunk and added by the others."""
        if self.context.compiled:
            kernels.row_sums(packed, into, not first)
        elif first:
            self.xp.sum(packed, axis=1, out=into)
        else:
            self.xp.sum(packed, axis=1, out=self._sums)
            into += self._sums

    def _add_weight_gradient(self, left: Array, right: Array, into: Array, first: bool, scratch: Array) -> None:
        """left @ right.T written to ``into`` by the first chunk and added by the others."""
        if first:
            self.xp.matmul(left, right.T, out=into)
        else:
            part = scratch.reshape(-1)[: into.size].reshape(into.shape)
            self.xp.matmul(left, right.T, out=part)
            into += part


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
