"""Softmax, losses and accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu.layers.base import Array, Layer, Shape, as_flags, register
from gpu.layers.labels import VALID, LabelOutOfRange, Labels, ignored_label, mode, normaliser

__all__ = ["Accuracy", "EuclideanLoss", "LabelOutOfRange", "Softmax", "SoftmaxWithLoss", "softmax"]

_TINY = np.float32(np.finfo(np.float32).tiny)


def softmax(xp: Any, x: Array, y: Array, row: Array) -> None:
    """Softmax along axis 1 of x[outer, classes, inner], shifted by the maximum; y may be x; row[outer, 1, inner]."""
    xp.subtract(x, xp.max(x, axis=1, keepdims=True, out=row), out=y)
    xp.exp(y, out=y)
    y /= xp.sum(y, axis=1, keepdims=True, out=row)


@register("Softmax")
class Softmax(Layer):
    """exp(x) over its sum along ``axis``."""

    in_place = True

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape = bottoms[0]
        axis = self.axis(self.spec.softmax_param.axis, len(shape))
        self._view = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
        self.context.scratch.reserve(self._view)
        return [shape]

    def allocate(self) -> None:
        self._row = self.keep("row", (self._view[0], 1, self._view[2]))

    def reads_bottom(self) -> bool:
        return False

    def reads_top(self) -> bool:
        return True

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        softmax(self.xp, bottoms[0].reshape(self._view), tops[0].reshape(self._view), self._row)

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
        y, dy = tops[0].reshape(self._view), top_diffs[0].reshape(self._view)
        (product,) = self.context.scratch.arrays(self._view)
        self.xp.multiply(y, dy, out=product)
        dx = bottom_diffs[0].reshape(self._view)
        self.xp.subtract(dy, self.xp.sum(product, axis=1, keepdims=True, out=self._row), out=dx)
        dx *= y


@register("SoftmaxWithLoss")
class SoftmaxWithLoss(Layer):
    """Mean of -log(softmax(x)[label]); the probabilities are the optional second top.

    ``normalization``: VALID divides by the labels that count (at least 1), FULL by all, BATCH_SIZE by the images, NONE
    by 1. Probabilities below the smallest normal float32 count as that, so a loss is at most 87.3365 per label.
    """

    n_bottoms = (2, 2)
    n_tops = (1, 2)
    loss = True

    def setup(self) -> None:
        self._mode = mode(self.spec.loss_param, VALID)

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        ignore = ignored_label(self.spec.loss_param)
        self._labels = Labels(self, bottoms[0], bottoms[1], self.spec.softmax_param.axis, ignore)
        self.context.scratch.reserve(self._labels.view, self._labels.view)
        return [(), bottoms[0]][: len(self.spec.top)]

    def allocate(self) -> None:
        self._labels.allocate()
        self._prob = self.keep("prob", self._labels.view)
        self._row = self.keep("row", self._labels.row)
        self._divisor = np.float32(1)

    def reads_bottom(self) -> bool:
        return False

    def allows_gradient(self, index: int) -> bool:
        return index == 0

    def _own(self) -> tuple[Array, Array]:
        """Which scores the labels name, and room for as many values."""
        room, spare = self.context.scratch.arrays(self._labels.view, self._labels.view)
        return self._labels.one_hot(as_flags(room)), spare

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        xp, labels, chosen, loss = self.xp, self._labels, self._row, tops[0]
        softmax(xp, bottoms[0].reshape(labels.view), self._prob, self._row)
        labels.read(bottoms[1])
        labels.pick(self._prob, *self._own(), out=chosen)
        xp.maximum(chosen, _TINY, out=chosen)
        xp.log(chosen, out=chosen)
        xp.negative(chosen, out=chosen)
        labels.clear_ignored(chosen)
        self._divisor = normaliser(self._mode, labels.outer, labels.inner, labels.count())
        xp.sum(chosen, out=loss)
        loss /= self._divisor
        if len(tops) > 1:
            tops[1][...] = self._prob.reshape(tops[1].shape)

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
        dx = bottom_diffs[0].reshape(self._labels.view)
        own, _ = self._own()
        self.xp.subtract(self._prob, own, out=dx)
        self._labels.clear_ignored(dx)
        dx *= top_diffs[0] / self._divisor


@register("EuclideanLoss")
class EuclideanLoss(Layer):
    """Sum of squared differences over twice the number of images."""

    n_bottoms = (2, 2)
    loss = True

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        a, b = bottoms
        if a[:1] != b[:1] or math.prod(a) != math.prod(b):
            raise self.error("inputs must have as many images and values", expected=a, found=b)
        self._shape = a
        self.context.scratch.reserve(a)
        return [()]

    def allocate(self) -> None:
        self._difference = self.keep("difference", self._shape)

    def reads_bottom(self) -> bool:
        return False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        self.xp.subtract(bottoms[0], bottoms[1].reshape(self._shape), out=self._difference)
        (square,) = self.context.scratch.arrays(self._shape)
        self.xp.multiply(self._difference, self._difference, out=square)
        tops[0][...] = square.sum() / np.float32(2 * self._shape[0])

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        factor = top_diffs[0] / np.float32(self._shape[0])
        for sign, dx in zip((1, -1), bottom_diffs, strict=True):
            if dx is not None:
                self.xp.multiply(self._difference.reshape(dx.shape), factor * np.float32(sign), out=dx)


@register("Accuracy")
class Accuracy(Layer):
    """Share of labels whose score is among the ``top_k`` best, ties counted as wrong; second top: share per class.

    A class without labels has a share of 0. A NaN among the scores makes the answer wrong (Caffe counts it as right).
    """

    n_bottoms = (2, 2)
    n_tops = (1, 2)
    differentiable = False

    def setup(self) -> None:
        self._top_k = self.spec.accuracy_param.top_k

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        p = self.spec.accuracy_param
        self._labels = Labels(self, bottoms[0], bottoms[1], p.axis, ignored_label(p))
        if not 1 <= self._top_k <= self._labels.classes:
            raise self.error(
                "top_k is out of range", expected=f"1 to {self._labels.classes} classes", found=self._top_k
            )
        view, row = self._labels.view, self._labels.row
        self.context.scratch.reserve(view, view, row, row)
        return [(), (self._labels.classes,)][: len(self.spec.top)]

    def allocate(self) -> None:
        self._labels.allocate()
        self._right = self.keep("right", self._labels.row, bool)
        # float64: a float32 cannot count beyond 2^24 labels.
        self._hits, self._seen = (self.keep(name, (self._labels.classes,), np.float64) for name in ("hits", "seen"))

    def reads_bottom(self) -> bool:
        return False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        xp = self.xp
        scores = bottoms[0].reshape(self._labels.view)
        self._labels.read(bottoms[1])
        labels, view, row = self._labels, self._labels.view, self._labels.row
        room, spare, own, rank = self.context.scratch.arrays(view, view, row, row)
        flags = as_flags(room)
        labels.pick(scores, labels.one_hot(flags), spare, out=own)
        # Its own score is among those that are not below it, so exactly one at rank 1.
        xp.less(scores, own, out=flags)
        xp.logical_not(flags, out=flags)
        xp.sum(flags, axis=1, keepdims=True, out=rank)
        right = self._right
        xp.less_equal(rank, self._top_k, out=right)
        if labels.valid is not None:
            right &= labels.valid
        count = labels.count()
        total = labels.outer * labels.inner if count is None else count
        tops[0][...] = np.float32(int(right.sum()) / total if total else 0)
        if len(tops) > 1:
            hits, seen = self._hits, self._seen
            one_hot = labels.one_hot(flags)
            xp.sum(one_hot, axis=(0, 2), out=seen)
            one_hot &= right
            xp.sum(one_hot, axis=(0, 2), out=hits)
            xp.maximum(seen, 1.0, out=seen)
            hits /= seen
            tops[1][...] = hits
