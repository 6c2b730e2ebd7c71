"""Where the windows of a convolution lie, and the copies between an image and its unrolled windows (im2col)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from gpu.cuda import layers as cuda
from gpu.cuda.kernels import Windows
from gpu.layers import kernels
from gpu.layers.base import Array, Context, Shape
from gpu.threads import spread


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
