"""Layers that move values about without changing them, and the elementwise joins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from gpu.layers.base import Array, Layer, Shape, as_flags, register

_PROD, _SUM = 0, 1


class _Reshaped(Layer):
    """Same values, other shape."""

    def reads_bottom(self) -> bool:
        return False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        tops[0][...] = bottoms[0].reshape(tops[0].shape)

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        if bottom_diffs[0] is not None:
            bottom_diffs[0][...] = top_diffs[0].reshape(bottom_diffs[0].shape)


@register("Flatten")
class Flatten(_Reshaped):
    """Axes ``axis`` to ``end_axis`` become one."""

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape, p = bottoms[0], self.spec.flatten_param
        first, last = self.axis(p.axis, len(shape)), self.axis(p.end_axis, len(shape), "end_axis")
        if last < first:
            raise self.error("end_axis lies before axis", found=f"axis {first}, end_axis {last}")
        return [(*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])]


@register("Reshape")
class Reshape(_Reshaped):
    """Axes from ``axis`` on (``num_axes`` of them) take the given shape; 0 keeps a size, -1 works one out."""

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape, p = bottoms[0], self.spec.reshape_param
        rank = len(shape)
        first = p.axis if p.axis >= 0 else rank + 1 + p.axis
        last = rank if p.num_axes == -1 else first + p.num_axes
        if not 0 <= first <= rank or not first <= last <= rank:
            raise self.error("axis or num_axes is out of range", found=f"axis {p.axis}, num_axes {p.num_axes}")
        wanted = list(p.shape.dim)
        if any(size < -1 for size in wanted) or wanted.count(-1) > 1:
            raise self.error("shape may hold -1 once, and nothing below", found=wanted)
        for i, size in enumerate(wanted):
            if size == 0:
                if first + i >= rank:
                    raise self.error("a 0 in shape copies an axis that the input lacks", found=wanted)
                wanted[i] = shape[first + i]
        out = [*shape[:first], *wanted, *shape[last:]]
        if -1 in out:
            # What is copied counts on neither side, so that there is an answer where it has no rows.
            copied = {i for i, size in enumerate(p.shape.dim) if size == 0 and first + i < last}
            count = math.prod(size for i, size in enumerate(shape[first:last]) if i not in copied)
            rest = math.prod(size for i, size in enumerate(wanted) if size != -1 and i not in copied)
            if rest == 0 or count % rest:
                raise self.error("-1 has no whole answer", expected=f"a divisor of {count}", found=rest)
            out[out.index(-1)] = count // rest
        if math.prod(out) != math.prod(shape):
            raise self.error(
                "the number of values changes", expected=math.prod(shape), found=f"{out}: {math.prod(out)}"
            )
        return [tuple(out)]


@register("Split")
class Split(Layer):
    """Every top is a copy of the bottom; gradients are summed in the order of the tops."""

    n_tops = (1, math.inf)

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        return [bottoms[0]] * len(self.spec.top)

    def reads_bottom(self) -> bool:
        return False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        for top in tops:
            top[...] = bottoms[0]

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
        dx[...] = top_diffs[0]
        for dy in top_diffs[1:]:
            dx += dy


def _cuts(sizes: Sequence[int]) -> list[slice]:
    """One slice per size, end to end."""
    edges = [0, *itertools.accumulate(sizes)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


@register("Concat")
class Concat(Layer):
    """Bottoms end to end along ``axis``."""

    n_bottoms = (1, math.inf)
    takes_empty = True

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        p, first = self.spec.concat_param, bottoms[0]
        if p.HasField("concat_dim") and p.HasField("axis"):
            raise self.error("concat_dim and axis exclude each other")
        axis = self.axis(p.concat_dim if p.HasField("concat_dim") else p.axis, len(first))
        for shape in bottoms:
            if len(shape) != len(first) or any(
                a != b for i, (a, b) in enumerate(zip(shape, first, strict=True)) if i != axis
            ):
                raise self.error(f"inputs differ outside axis {axis}", expected=first, found=shape)
        sizes = [shape[axis] for shape in bottoms]
        whole = [slice(None)] * axis
        self._parts = [(*whole, cut) for cut in _cuts(sizes)]
        return [(*first[:axis], sum(sizes), *first[axis + 1 :])]

    def reads_bottom(self) -> bool:
        return False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        for x, part in zip(bottoms, self._parts, strict=True):
            tops[0][part] = x

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        for dx, part in zip(bottom_diffs, self._parts, strict=True):
            if dx is not None:
                dx[...] = top_diffs[0][part]


@register("Slice")
class Slice(Layer):
    """The bottom cut along ``axis``: at the ``slice_point`` s, or into equal parts."""

    n_tops = (1, math.inf)

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        p, shape, count = self.spec.slice_param, bottoms[0], len(self.spec.top)
        axis = self.axis(p.slice_dim if p.HasField("slice_dim") else p.axis, len(shape))
        size = shape[axis]
        if p.slice_point:
            edges = [0, *p.slice_point, size]
            sizes = [b - a for a, b in itertools.pairwise(edges)]
            if len(sizes) != count or min(sizes) < 1:
                raise self.error(
                    "slice points do not fit",
                    expected=f"{count - 1} rising values below {size}",
                    found=list(p.slice_point),
                )
        elif size % count:
            raise self.error(f"axis {axis} does not divide into {count} parts", found=size)
        else:
            sizes = [size // count] * count
        whole = [slice(None)] * axis
        self._parts = [(*whole, cut) for cut in _cuts(sizes)]
        return [(*shape[:axis], part, *shape[axis + 1 :]) for part in sizes]

    def reads_bottom(self) -> bool:
        return False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        for y, part in zip(tops, self._parts, strict=True):
            y[...] = bottoms[0][part]

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        if bottom_diffs[0] is not None:
            for dy, part in zip(top_diffs, self._parts, strict=True):
                bottom_diffs[0][part] = dy


@register("Eltwise")
class Eltwise(Layer):
    """Sum (with coefficients), product or maximum of several inputs, in the order of the bottoms.

    Of equal maxima the later one of the first two takes the gradient, after that the earlier one (as in Caffe).
    """

    n_bottoms = (2, math.inf)

    def setup(self) -> None:
        p = self.spec.eltwise_param
        self._operation = p.operation
        if p.coeff and (len(p.coeff) != len(self.spec.bottom) or p.operation != _SUM):
            raise self.error("coeff goes with SUM, one for each bottom", found=list(p.coeff))
        self._coefficients = [np.float32(c) for c in p.coeff] or [np.float32(1)] * len(self.spec.bottom)

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        if any(shape != bottoms[0] for shape in bottoms):
            raise self.error("inputs must have one shape", expected=bottoms[0], found=list(bottoms))
        self._shape = bottoms[0]
        self.context.scratch.reserve(self._shape)
        return [bottoms[0]]

    def _flags(self) -> Array:
        (room,) = self.context.scratch.arrays(self._shape)
        return as_flags(room)

    def allocate(self) -> None:
        if self._operation not in (_PROD, _SUM):
            self._winner = self.keep("winner", self._shape, np.int32)

    def reads_bottom(self) -> bool:
        return self._operation == _PROD

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        xp, y = self.xp, tops[0]
        if self._operation == _PROD:
            xp.multiply(bottoms[0], bottoms[1], out=y)
            for x in bottoms[2:]:
                y *= x
        elif self._operation == _SUM:
            (part,) = self.context.scratch.arrays(self._shape)
            xp.multiply(bottoms[0], self._coefficients[0], out=y)
            for x, coefficient in zip(bottoms[1:], self._coefficients[1:], strict=True):
                xp.multiply(x, coefficient, out=part)
                y += part
        else:
            flags = self._flags()
            xp.less_equal(bottoms[0], bottoms[1], out=flags)
            self._winner[...] = flags
            if len(bottoms) == 2:
                xp.maximum(bottoms[0], bottoms[1], out=y)
                return
            y[...] = bottoms[0]
            xp.copyto(y, bottoms[1], where=flags)
            for i, x in enumerate(bottoms[2:], 2):
                xp.greater(x, y, out=flags)
                xp.copyto(self._winner, np.int32(i), where=flags)
                xp.maximum(x, y, out=y)

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        dy = top_diffs[0]
        for i, dx in enumerate(bottom_diffs):
            if dx is None:
                continue
            if self._operation == _SUM:
                self.xp.multiply(dy, self._coefficients[i], out=dx)
            elif self._operation == _PROD:
                # The product of the others, never top / bottom: that is right where an input is 0, too.
                dx[...] = dy
                for j, x in enumerate(bottoms):
                    if j != i:
                        dx *= x
            else:
                flags = self._flags()
                self.xp.equal(self._winner, i, out=flags)
                self.xp.multiply(dy, flags, out=dx)


@register("Silence")
class Silence(Layer):
    """Takes blobs that nobody reads, so that they are no outputs."""

    n_bottoms = (1, math.inf)
    n_tops = (0, 0)
    differentiable = False

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        return []

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        """Nothing to do."""
