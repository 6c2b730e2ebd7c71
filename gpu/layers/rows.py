"""Layers that pick whole rows (positions along the first axis): by number, by a table, or by a selector."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu.cuda import layers as cuda
from gpu.layers import row_kernels
from gpu.layers.base import Array, Layer, ParamShape, Shape, count_up, register
from gpu.threads import spread


def take_rows(xp: Any, table: Array, index: Array, out: Array) -> None:
    """``out[i] = table[index[i]]`` without a copy on the way; every index is known to be in range."""
    if xp is np:
        np.take(table, index, axis=0, out=out, mode="clip")  # the default mode buffers the output
    else:
        xp.take(table, index, axis=0, out=out)


class _Picks:
    """Row numbers that arrive as float32, and the sum of what came back for each row.

    The sum is a stable sort and a segmented scan of log2(picks) passes: gathers only, so it has the same bits at every
    run, where a scatter with atomics has not. On a device one kernel adds up each row's picks in their order. Compiled
    loops do what the scan does, in work space that was planned.
    """

    def __init__(self, layer: Layer, bottom: int, count: int, rows: int, width: int) -> None:
        self._layer, self._bottom = weakref.proxy(layer), bottom
        self._count, self._rows, self._shape = count, rows, (count, width)
        self._compiled = layer.context.compiled
        layer.context.scratch.reserve(*[self._shape] * (1 if self._compiled else 2))

    def allocate(self) -> None:
        keep = self._layer.keep
        self.index = keep("index", (self._count,), np.int64)
        if self._compiled:
            self._order = keep("order", (self._count,), np.int64)
            self._start = keep("start", (self._rows + 1,), np.int64)
        else:
            self._numbers = count_up(self._layer.xp, self._rows + 1)

    def read(self, values: Array) -> Array:
        """The numbers as int64[count]. Raises LayerError for one that names no row."""
        xp, flat = self._layer.xp, values.reshape(-1)
        if self._compiled:
            bad = row_kernels.read_rows(flat, self._rows, self.index)
        else:
            good = (flat >= 0) & (flat < self._rows) & (flat == xp.floor(flat))  # written so that NaN is not good
            bad = -1 if bool(good.all()) else int((~good).argmax())
        if bad >= 0:
            raise self._layer.error(
                f"value {bad} of blob {self._layer.spec.bottom[self._bottom]!r} names no row",
                expected=f"a whole number from 0 to {self._rows - 1}",
                found=float(flat[bad]),
            )
        if not self._compiled:
            self.index[...] = flat
        return self.index

    def add_up(self, picked: Array, into: Array) -> None:
        """``into[r]`` = sum of ``picked[i]`` where ``index[i] == r``, in a fixed order; 0 where there is none."""
        xp = self._layer.xp
        own = self._layer.context.own
        if self._compiled:
            most = row_kernels.sort_picks(self.index, self._order, self._start)
            (sums,) = self._layer.context.scratch.arrays(self._shape)
            sorted_ = (self._order, self._start, most)
            spread(row_kernels.sum_picks, self._rows, picked.size, picked, *sorted_, sums, into, self._shape[1])
            return
        order = xp.argsort(self.index, kind="stable")
        rows = self.index[order]
        if own is not None:
            cuda.sum_picks(own, picked, order, xp.searchsorted(rows, self._numbers), into)
            return
        sums, spare = self._layer.context.scratch.arrays(self._shape, self._shape)
        take_rows(xp, picked, order, sums)
        shift = 1
        while shift < self._count:
            other = rows[shift:] != rows[:-shift]
            if bool(other.all()):
                break  # no row was picked more than ``shift`` times
            part = spare[: self._count - shift]
            part[...] = sums[shift:]
            part[other] = 0
            sums[:-shift] += part
            shift *= 2
        # The first of a row's picks holds its sum now.
        first = xp.minimum(xp.searchsorted(rows, self._numbers[:-1]), self._count - 1)
        take_rows(xp, sums, first, into)
        into[rows[first] != self._numbers[:-1]] = 0


@register("BatchReindex")
class BatchReindex(Layer):
    """y[i] = x[index[i]]: rows dropped, repeated or reordered (Caffe BatchReindex); the index has no gradient."""

    n_bottoms = (2, 2)

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape, index = bottoms
        if len(index) != 1:
            raise self.error("the index must have one axis", expected="(picks,)", found=index)
        if not shape:
            raise self.error("needs an input with at least one axis", found=shape)
        self._width = math.prod(shape[1:])
        self._picks = _Picks(self, 1, index[0], shape[0], self._width)
        return [(index[0], *shape[1:])]

    def allocate(self) -> None:
        self._picks.allocate()

    def reads_bottom(self) -> bool:
        return False

    def allows_gradient(self, index: int) -> bool:
        return index == 0

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        take_rows(self.xp, bottoms[0], self._picks.read(bottoms[1]), tops[0])

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        if bottom_diffs[0] is not None:
            self._picks.add_up(top_diffs[0].reshape(-1, self._width), bottom_diffs[0].reshape(-1, self._width))


@register("Embed")
class Embed(Layer):
    """Row x of a learned table of ``input_dim`` rows and ``num_output`` columns, plus a bias (Caffe Embed)."""

    def setup(self) -> None:
        p = self._param = self.spec.embed_param
        for field in ("num_output", "input_dim"):
            if not getattr(p, field):
                raise self.error(f"{field} is missing or 0", expected=">= 1")

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        p = self._param
        self.param_shapes = [ParamShape((p.input_dim, p.num_output), p.weight_filler)]
        if p.bias_term:
            self.param_shapes.append(ParamShape((p.num_output,), p.bias_filler))
        self._picks = _Picks(self, 0, math.prod(bottoms[0]), p.input_dim, p.num_output)
        return [(*bottoms[0], p.num_output)]

    def allocate(self) -> None:
        self._picks.allocate()

    def reads_bottom(self) -> bool:
        return False

    def allows_gradient(self, index: int) -> bool:
        return False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        y = tops[0].reshape(-1, self._param.num_output)
        take_rows(self.xp, self.blobs[0].device_data, self._picks.read(bottoms[0]), y)
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
        dy = top_diffs[0].reshape(-1, self._param.num_output)
        if param_diffs[0] is not None:
            self._picks.add_up(dy, param_diffs[0])
        if len(param_diffs) > 1 and param_diffs[1] is not None:
            self.xp.sum(dy, axis=0, out=param_diffs[1])


@register("Filter")
class Filter(Layer):
    """The rows of every input but the last for which the last one (the selector) is not 0, in order (Caffe Filter).

    How many rows that is depends on the values: ``shapes`` says the most, ``choose`` how many there are in this pass.
    Rows that were not chosen get a gradient of 0. It may be none at all, where Caffe's backward pass divides by zero.
    """

    n_bottoms = (2, math.inf)
    n_tops = (1, math.inf)
    varies = True
    takes_empty = True

    def setup(self) -> None:
        if len(self.spec.bottom) != len(self.spec.top) + 1:
            raise self.error(
                "needs one top for each bottom but the selector",
                expected=len(self.spec.bottom) - 1,
                found=len(self.spec.top),
            )

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        *data, selector = bottoms
        if not selector or any(size != 1 for size in selector[1:]):
            raise self.error("the selector must have one value for each row", expected="(rows,)", found=selector)
        for name, shape in zip(self.spec.bottom, data, strict=False):
            if shape[:1] != selector[:1]:
                raise self.error(f"{name!r} has other rows than the selector", expected=selector, found=shape)
        self._rows = selector[0]
        return data

    def allocate(self) -> None:
        if self.context.compiled:
            self.keep("chosen", (self._rows,), np.int64)  # at first for the most; choose takes it from there

    def choose(self, bottoms: Sequence[Array]) -> list[Shape]:
        if self.context.compiled:
            selector = bottoms[-1].reshape(-1)
            numbers = self.keep("chosen", selector.shape, np.int64)
            self._chosen = numbers[: row_kernels.choose_rows(selector, numbers)]
        else:
            self._chosen = self.xp.flatnonzero(bottoms[-1])
        return [(len(self._chosen), *x.shape[1:]) for x in bottoms[:-1]]

    def reads_bottom(self) -> bool:
        return False

    def allows_gradient(self, index: int) -> bool:
        return index < len(self.spec.top)

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        self.choose(bottoms)
        for x, y in zip(bottoms, tops, strict=False):
            if len(self._chosen):
                take_rows(self.xp, x, self._chosen, y)

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        for dy, dx in zip(top_diffs, bottom_diffs, strict=False):
            if dx is not None and self.context.compiled:
                width = math.prod(dx.shape[1:])
                row_kernels.spread_rows(self._chosen, dy.reshape(-1, width), dx.reshape(-1, width))
            elif dx is not None:
                dx[...] = 0
                dx[self._chosen] = dy  # no row is chosen twice
