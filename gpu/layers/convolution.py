"""Convolution and deconvolution as matrix products over unrolled windows (im2col), a few images at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpu.layers import kernels
from gpu.layers.base import Array, Layer, ParamShape, Shape, register

_COLUMN_BYTES = {True: 1 << 20, False: 1 << 28}
"""Largest unrolled chunk: what a core's cache holds for compiled kernels, far more where launches cost time."""


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

    def _numbers(self) -> tuple[int, ...]:
        return (*self.kernel, *self.stride, *self.pad, *self.dilation)

    def _slices(self) -> Iterator[tuple[Shape, tuple[slice, ...], tuple[slice, ...]]]:
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

    def unroll(self, x: Array, col: Array, compiled: bool) -> None:
        """x[n, channels, *size] to col[rows, n * positions]."""
        view = col.reshape(self.channels, *self.kernel, x.shape[0], *self.out)
        if compiled and len(self.size) == 2:
            kernels.im2col(x, view, *self._numbers())
            return
        whole = (slice(None),)
        if any(self.pad):
            view[...] = 0
        for offset, image, out in self._slices():
            view[whole + offset + whole + out] = x[whole * 2 + image].swapaxes(0, 1)

    def fold(self, col: Array, x: Array, compiled: bool) -> None:
        """The transpose of unroll: col[rows, n * positions] added up into x[n, channels, *size]."""
        view = col.reshape(self.channels, *self.kernel, x.shape[0], *self.out)
        if compiled and len(self.size) == 2:
            kernels.col2im(view, x, *self._numbers())
            return
        whole = (slice(None),)
        x[...] = 0
        for offset, image, out in self._slices():
            # One slice after the other: every position is added to in the same order each time, without atomics.
            x[whole * 2 + image] += view[whole + offset + whole + out].swapaxes(0, 1)


class _Windowed(Layer):
    """What convolution and its transpose share: settings, shapes and the walk over chunks of the batch."""

    n_bottoms = (1, math.inf)
    n_tops = (1, math.inf)
    _param: Any
    _geometry: Geometry

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

    def _plan(self, n: int, geometry: Geometry, weight: Shape, outputs: int) -> None:
        """Parameters, chunk size and scratch once the geometry is known; ``outputs``: channels on the packed side."""
        p = self._param
        self._geometry = geometry
        self.param_shapes = [ParamShape(weight, p.weight_filler)]
        if p.bias_term:
            self.param_shapes.append(ParamShape((p.num_output,), p.bias_filler))
        per_image = 4 * geometry.rows * geometry.positions
        limit = max(1, _COLUMN_BYTES[self.context.compiled] // per_image)
        chunks = -(-n // limit)
        self._step = -(-n // chunks) if n else 1
        width = self._step * geometry.positions
        self._work = ((geometry.rows, width), (outputs, width), weight)
        self.context.scratch.reserve(*self._work)

    def allocate(self) -> None:
        self._none = self.xp.zeros(0, "float32")

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

    def _add_weight_gradient(self, left: Array, right: Array, into: Array, first: bool, scratch: Array) -> None:
        """left @ right.T written to ``into`` by the first chunk and added by the others."""
        if first:
            self.xp.matmul(left, right.T, out=into)
        else:
            part = scratch.reshape(-1)[: into.size].reshape(into.shape)
            self.xp.matmul(left, right.T, out=part)
            into += part


@register("Convolution")
class Convolution(_Windowed):
    """y = W * x + b over windows; groups, stride, pad, dilation, any number of spatial axes (Caffe Convolution)."""

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        kernel, stride, pad, dilation = self._settings(bottoms)
        n, channels, *size = bottoms[0]
        out = []
        for length, k, s, p, d in zip(size, kernel, stride, pad, dilation, strict=True):
            extent = d * (k - 1) + 1
            if length + 2 * p < extent:
                raise self.error("the kernel exceeds the padded input", expected=f">= {extent}", found=length + 2 * p)
            out.append((length + 2 * p - extent) // s + 1)
        outputs = self._param.num_output
        geometry = Geometry(channels, tuple(size), kernel, stride, pad, dilation, tuple(out))
        self._plan(n, geometry, (outputs, channels // self._param.group, *kernel), outputs)
        return [(n, outputs, *out)] * len(bottoms)

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        matmul, compiled = self.xp.matmul, self.context.compiled
        bias = self.blobs[1].device_data if len(self.blobs) > 1 else None
        for x, y in zip(bottoms, tops, strict=True):
            for part in self._starts(x.shape[0]):
                col, packed, _ = self._chunk(part.stop - part.start)
                self._geometry.unroll(x[part], col, compiled)
                for weight, maps, rows in self._groups():
                    matmul(weight, col[rows], out=packed[maps])
                self._unpack(packed, y[part], bias)

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        matmul, compiled = self.xp.matmul, self.context.compiled
        dw = param_diffs[0]
        db = param_diffs[1] if len(param_diffs) > 1 else None
        first = True
        for x, dy, dx in zip(bottoms, top_diffs, bottom_diffs, strict=True):
            for part in self._starts(x.shape[0]):
                col, packed, scratch = self._chunk(part.stop - part.start)
                self._pack(dy[part], packed)
                if db is not None:
                    total = packed.sum(axis=1)
                    db[...] = total if first else db + total
                if dw is not None:
                    self._geometry.unroll(x[part], col, compiled)
                    gradient = dw.reshape(self._work[1][0], -1)
                    for _, maps, rows in self._groups():
                        self._add_weight_gradient(packed[maps], col[rows], gradient[maps], first, scratch)
                if dx is not None:
                    for weight, maps, rows in self._groups():
                        matmul(weight.T, packed[maps], out=col[rows])
                    self._geometry.fold(col, dx[part], compiled)
                first = False


@register("Deconvolution")
class Deconvolution(_Windowed):
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
                self._pack(x[part], packed)
                for weight, maps, rows in self._groups():
                    self.xp.matmul(weight.T, packed[maps], out=col[rows])
                self._geometry.fold(col, y[part], self.context.compiled)
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
                    maps_of = dy[part]
                    total = maps_of.reshape(*maps_of.shape[:2], -1).sum(axis=2).sum(axis=0)
                    db[...] = total if first else db + total
                self._geometry.unroll(dy[part], col, self.context.compiled)
                if dw is not None:
                    self._pack(x[part], packed)
                    gradient = dw.reshape(self._work[1][0], -1)
                    for _, maps, rows in self._groups():
                        self._add_weight_gradient(packed[maps], col[rows], gradient[maps], first, scratch)
                if dx is not None:
                    for weight, maps, rows in self._groups():
                        self.xp.matmul(weight, col[rows], out=packed[maps])
                    self._unpack(packed, dx[part], None)
                first = False
