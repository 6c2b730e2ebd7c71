"""What layers with windows share: their settings, and matrix products over unrolled windows, a few images at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from gpu.layers import kernels
from gpu.layers.base import Array, Layer, ParamShape, Shape
from gpu.layers.geometry import Geometry
from gpu.layers.library import LibraryConvolution

_COLUMN_BYTES = {True: 1 << 20, False: 1 << 28}
"""Largest unrolled chunk: what a core's cache holds for compiled kernels, far more where launches cost time."""
_COLUMN_BYTES_MOST = 1 << 23
"""The same where large weights have to pay: BLAS packs them once a product, so up to twice their size is unrolled."""
_IMAGE_BYTES, _IMAGE_POSITIONS = 1 << 18, 256
"""From this size on (unrolled bytes, windows) one image is enough for a product, unless the weights are larger."""


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
