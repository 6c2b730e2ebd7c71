"""Max and average pooling with Caffe's rules for sizes and borders."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpu.cuda import layers as cuda
from gpu.cuda.kernels import Windows
from gpu.layers import pooling_kernels as kernels
from gpu.layers.base import Array, Layer, Shape, register
from gpu.threads import spread

_MAX, _AVE = 0, 1
_FLOOR = 1


@register("Pooling")
class Pooling(Layer):
    """Largest or mean value of each window (Caffe Pooling).

    Output sizes are rounded up (or down, ``round_mode``); with padding, the last window is dropped where it would start
    in the padding. The mean is over the window cut off at height + pad, padding included. Max pooling keeps where each
    maximum came from, and never compares values in backward; a second top receives these positions (y * width + x).
    Caffe lets a window of a stride larger than the kernel lie outside the input; here that is refused.
    """

    n_tops = (1, 2)

    def setup(self) -> None:
        p = self._param = self.spec.pooling_param
        if p.pool not in (_MAX, _AVE):
            raise self.error("pool method STOCHASTIC is not supported", expected="MAX or AVE")
        if len(self.spec.top) > 1 and p.pool != _MAX:
            raise self.error("a second top (the mask) exists with pool: MAX only")

    def _pair(self, field: str, default: int) -> tuple[int, int]:
        p = self._param
        base = field.removesuffix("_size")
        names = (f"{base}_h", f"{base}_w")
        given = [p.HasField(name) for name in names]
        if any(given):
            if p.HasField(field):
                raise self.error(f"{field} and {names[0]}/{names[1]} exclude each other")
            if not all(given) and field == "kernel_size":
                raise self.error("kernel_h and kernel_w must be given together")
            height, width = (getattr(p, name) if has else default for name, has in zip(names, given, strict=True))
            return height, width
        value = getattr(p, field) if p.HasField(field) else default
        return value, value

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape = bottoms[0]
        if len(shape) != 4:
            raise self.error("needs an input of (images, channels, height, width)", found=shape)
        p = self._param
        self._size = size = shape[2:]
        if p.global_pooling:
            if any(p.HasField(name) for name in ("kernel_size", "kernel_h", "kernel_w")):
                raise self.error("global_pooling and a kernel size exclude each other")
            self._kernel = size
        else:
            self._kernel = self._pair("kernel_size", 0)
        self._stride, self._pad = self._pair("stride", 1), self._pair("pad", 0)
        if min(self._kernel) < 1:
            raise self.error("kernel_size is missing or 0", expected=">= 1", found=self._kernel)
        if min(self._stride) < 1:
            raise self.error("stride must be at least 1", found=self._stride)
        if p.global_pooling and (self._pad != (0, 0) or self._stride != (1, 1)):
            raise self.error("global_pooling needs pad 0 and stride 1", found=f"pad {self._pad}, stride {self._stride}")
        if any(pad >= kernel for pad, kernel in zip(self._pad, self._kernel, strict=True)):
            raise self.error("pad must be smaller than the kernel", found=f"pad {self._pad}, kernel {self._kernel}")
        out = []
        for axis, length in enumerate(size):
            kernel, stride, pad = self._kernel[axis], self._stride[axis], self._pad[axis]
            span = length + 2 * pad - kernel
            if span < 0:
                raise self.error("the kernel exceeds the padded input", expected=f"<= {length + 2 * pad}", found=kernel)
            count = (span // stride if p.round_mode == _FLOOR else -(-span // stride)) + 1
            if any(self._pad) and (count - 1) * stride >= length + pad:
                count -= 1
            if (count - 1) * stride - pad >= length:
                raise self.error(
                    f"the last window of axis {axis + 2} lies outside the input",
                    expected="stride <= kernel, or a size that the windows fit",
                    found=f"input {length}, kernel {kernel}, stride {stride}, pad {pad}",
                    hint="round_mode: FLOOR leaves such a window out",
                )
            out.append(count)
        self._out = tuple(out)
        self._top = (*shape[:2], *out)
        return [self._top] * len(self.spec.top)

    def allocate(self) -> None:
        if self._param.pool == _MAX:
            self._index = self.keep("index", (self._top[0] * self._top[1], *self._out), np.int32)
        elif not self.context.compiled and self.context.own is None:
            self._area = self.xp.asarray(self._areas())

    def reads_bottom(self) -> bool:
        return False

    def _numbers(self) -> tuple[int, ...]:
        return (*self._kernel, *self._stride, *self._pad)

    @property
    def _windows(self) -> Windows:
        return Windows(self._size, self._out, self._kernel, self._stride, self._pad)

    def _areas(self) -> np.ndarray:
        """Divisor of each window, float32[OH, OW]."""
        lengths = []
        for axis, count in enumerate(self._out):
            start = np.arange(count) * self._stride[axis] - self._pad[axis]
            lengths.append(np.minimum(start + self._kernel[axis], self._size[axis] + self._pad[axis]) - start)
        return np.outer(*lengths).astype(np.float32)

    def _offsets(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...], Any]]:
        """For each kernel offset: its slice of the images, the outputs it serves, the positions it reads (flat)."""
        for offset in itertools.product(*(range(k) for k in self._kernel)):
            image, out, grid = [slice(None)], [slice(None)], []
            for k, length, stride, pad, count in zip(
                offset, self._size, self._stride, self._pad, self._out, strict=True
            ):
                shift = k - pad
                first = max(0, -(shift // stride))
                last = max(first, min(count, (length - shift + stride - 1) // stride))
                image.append(slice(first * stride + shift, last * stride + shift, stride))
                out.append(slice(first, last))
                grid.append(self.xp.arange(first, last, dtype=np.int32) * stride + shift)
            yield tuple(image), tuple(out), grid[0][:, None] * self._size[1] + grid[1]

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        x, y = bottoms[0].reshape(-1, *self._size), tops[0].reshape(-1, *self._out)
        own = self.context.own
        if self._param.pool == _MAX:
            if own is not None:
                cuda.max_pool(own, self._windows, x, y, self._index)
            elif self.context.compiled:
                spread(kernels.max_pool, x.shape[0], x.size, x, y, self._index, *self._numbers())
            else:
                self._max(x, y)
            if len(tops) > 1:
                tops[1][...] = self._index.reshape(self._top)
        elif own is not None:
            cuda.ave_pool(own, self._windows, x, y)
        elif self.context.compiled:
            spread(kernels.ave_pool, x.shape[0], x.size, x, y, *self._numbers())
        else:
            y[...] = 0
            for image, out, _ in self._offsets():
                y[out] += x[image]
            y /= self._area

    def _max(self, x: Array, y: Array) -> None:
        """Compare offset by offset: one plain elementwise pass each, the same on every device."""
        xp = self.xp
        y[...] = -np.inf
        self._index[...] = -1
        for image, out, where in self._offsets():
            value, best = x[image], y[out]
            better = (value > best) | ((value != value) & (best == best)) | (self._index[out] < 0)
            self._index[out] = xp.where(better, where, self._index[out])
            y[out] = xp.where(better, value, best)

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
        dy, dx = top_diffs[0].reshape(-1, *self._out), bottom_diffs[0].reshape(-1, *self._size)
        compiled, own, largest = self.context.compiled, self.context.own, self._param.pool == _MAX
        if own is not None and largest:
            cuda.max_pool_back(own, self._windows, dy, self._index, dx)
        elif own is not None:
            cuda.ave_pool_back(own, self._windows, dy, dx)
        elif compiled and largest:
            planes = dy.shape[0]
            arrays = (array.reshape(planes, -1) for array in (dy, self._index, dx))
            spread(kernels.max_pool_back, planes, dx.size, *arrays)
        elif compiled:
            spread(kernels.ave_pool_back, dx.shape[0], dx.size, dy, dx, *self._numbers())
        else:
            # A gather per offset in place of a scatter with atomics: the same bits at every run.
            dx[...] = 0
            share = dy if largest else dy / self._area
            for image, out, where in self._offsets():
                dx[image] += (
                    self.xp.where(self._index[out] == where, share[out], np.float32(0)) if largest else share[out]
                )
