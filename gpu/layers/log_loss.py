"""Losses of logarithms of probabilities, beyond the softmax loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gpu.caffemodel import contents, expect, read_blob
from gpu.layers.activation import sigmoid
from gpu.layers.base import Array, Layer, Shape, as_flags, register
from gpu.layers.labels import BATCH_SIZE, VALID, Labels, ignored_label, mode, normaliser
from gpu.layers.loss import softmax

_LEAST = np.float32(1e-20)
"""Smaller probabilities count as this one, as in Caffe."""


@register("SigmoidCrossEntropyLoss")
class SigmoidCrossEntropyLoss(Layer):
    """Sum of -t log(s) - (1 - t) log(1 - s) with s = sigmoid(x), for targets t from 0 to 1, then divided.

    ``normalization``: BATCH_SIZE (default) divides by the images, VALID by the targets that count (at least 1), FULL by
    all values, NONE by 1. ``ignore_label`` is compared with the target cut to a whole number, as in Caffe.
    """

    n_bottoms = (2, 2)
    loss = True

    def setup(self) -> None:
        p = self.spec.loss_param
        self._mode, self._ignore = mode(p, BATCH_SIZE), ignored_label(p)

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        a, b = bottoms
        if not a or a[:1] != b[:1] or math.prod(a) != math.prod(b):
            raise self.error("inputs must have as many images and values", expected=a, found=b)
        self._shape = a
        self.context.scratch.reserve(a, a, a)
        return [()]

    def allocate(self) -> None:
        self._divisor = np.float32(1)

    def allows_gradient(self, index: int) -> bool:
        return index == 0

    def _clear_ignored(self, values: Array, targets: Array) -> int | None:
        """Set values of ignored targets to 0, with the last two rooms; returns how many count, None for all."""
        if self._ignore is None:
            return None
        _, whole, room = self.context.scratch.arrays(*[self._shape] * 3)
        ignored = as_flags(room)
        self.xp.trunc(targets, out=whole)
        self.xp.equal(whole, np.float32(self._ignore), out=ignored)
        self.xp.copyto(values, 0.0, where=ignored)
        return int(values.size) - int(self.xp.count_nonzero(ignored))

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        xp, loss = self.xp, tops[0]
        x, t = bottoms[0], bottoms[1].reshape(self._shape)
        terms, part, _ = self.context.scratch.arrays(*[self._shape] * 3)
        xp.abs(x, out=terms)  # max(x, 0) - x t + log(1 + exp(-|x|)), which cannot overflow
        xp.negative(terms, out=terms)
        xp.exp(terms, out=terms)
        xp.log1p(terms, out=terms)
        xp.maximum(x, np.float32(0), out=part)
        terms += part
        xp.multiply(x, t, out=part)
        terms -= part
        counted = self._clear_ignored(terms, t)
        self._divisor = normaliser(self._mode, self._shape[0], math.prod(self._shape[1:]), counted)
        xp.sum(terms, out=loss)
        loss /= self._divisor

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
        t = bottoms[1].reshape(self._shape)
        room, _, _ = self.context.scratch.arrays(*[self._shape] * 3)
        sigmoid(self.xp, bottoms[0], dx, room)
        dx -= t
        self._clear_ignored(dx, t)
        dx *= top_diffs[0] / self._divisor


@register("MultinomialLogisticLoss")
class MultinomialLogisticLoss(Layer):
    """Mean over images of -log(p[label]), for probabilities p; all axes after the first are classes."""

    n_bottoms = (2, 2)
    loss = True

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape = bottoms[0]
        if not shape:
            raise self.error("needs probabilities of (images, classes)", found=shape)
        self._labels = Labels(self, (shape[0], math.prod(shape[1:])), bottoms[1], 1)
        self.context.scratch.reserve(self._labels.view, self._labels.view)
        return [()]

    def allocate(self) -> None:
        self._labels.allocate()
        self._chosen = self.keep("chosen", self._labels.row)

    def allows_gradient(self, index: int) -> bool:
        return index == 0

    def _own(self) -> tuple[Array, Array]:
        """Which probabilities the labels name, and room for as many values."""
        room, spare = self.context.scratch.arrays(self._labels.view, self._labels.view)
        return self._labels.one_hot(as_flags(room)), spare

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        xp, labels, chosen, loss = self.xp, self._labels, self._chosen, tops[0]
        labels.read(bottoms[1])
        labels.pick(bottoms[0].reshape(labels.view), *self._own(), out=chosen)
        xp.maximum(chosen, _LEAST, out=chosen)
        xp.log(chosen, out=chosen)
        xp.sum(chosen, out=loss)
        loss /= np.float32(-labels.outer)

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
        p, dx = bottoms[0].reshape(self._labels.view), bottom_diffs[0].reshape(self._labels.view)
        own, slope = self._own()
        self.xp.maximum(p, _LEAST, out=slope)
        self.xp.divide(top_diffs[0] / np.float32(-self._labels.outer), slope, out=slope)
        dx[...] = 0
        self.xp.copyto(dx, slope, where=own)


@register("InfogainLoss")
class InfogainLoss(Layer):
    """Sum over k of -H[label, k] log(softmax(x)[k]), then divided; the probabilities are the optional second top.

    H, classes x classes, is the third bottom or the blob in the file ``source`` (binaryproto; a relative path starts at
    the working directory). ``normalization``: VALID (default) divides by the labels that count (at least 1), FULL by
    all, BATCH_SIZE by the images, NONE by 1. The gradient does not see the bound on small probabilities, as in Caffe.
    """

    n_bottoms = (2, 3)
    n_tops = (1, 2)
    loss = True

    def setup(self) -> None:
        p = self.spec.loss_param
        if p.HasField("normalize"):
            raise self.error("normalize is not a setting of this type", hint="use normalization")
        self._mode = mode(p, VALID)
        self._given = len(self.spec.bottom) > 2
        source = self.spec.infogain_loss_param.source
        if not self._given and not source:
            raise self.error(
                "needs its matrix", expected="infogain_loss_param.source, or a third bottom", found="neither"
            )
        self._table: Array = None if self._given else self._load(source)

    def _load(self, source: str) -> Array:
        data = contents(source)
        expect(source, "blob", data)
        return read_blob(data, source).array

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        axis, ignore = self.spec.infogain_loss_param.axis, ignored_label(self.spec.loss_param)
        labels = self._labels = Labels(self, bottoms[0], bottoms[1], axis, ignore)
        shape = bottoms[2] if self._given else self._table.shape
        if math.prod(shape) != labels.classes**2:
            raise self.error(
                "the matrix does not fit the scores",
                expected=f"{labels.classes} x {labels.classes} values",
                found=shape,
            )
        self.context.scratch.reserve(labels.view, labels.view)
        return [(), bottoms[0]][: len(self.spec.top)]

    def allocate(self) -> None:
        xp, labels = self.xp, self._labels
        labels.allocate()
        self._prob = self.keep("prob", labels.view)
        self._row = self.keep("row", labels.row)
        self._divisor = np.float32(1)
        if not self._given:
            self._table = xp.asarray(self._table, np.float32)

    def allows_gradient(self, index: int) -> bool:
        return index == 0

    def reads_bottom(self) -> bool:
        return self._given

    def _weights(self, bottoms: Sequence[Array]) -> tuple[Array, Array]:
        """H[label, :] along the classes, 0 where ignored, and room for as many values."""
        classes = self._labels.classes
        table = (bottoms[2] if self._given else self._table).reshape(classes, classes)
        own, weights = self.context.scratch.arrays(self._labels.view, self._labels.view)
        self._labels.one_hot(own)
        return self.xp.matmul(table.T, own, out=weights), own

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        xp, labels, loss = self.xp, self._labels, tops[0]
        softmax(xp, bottoms[0].reshape(labels.view), self._prob, self._row)
        labels.read(bottoms[1])
        weights, logs = self._weights(bottoms)
        xp.maximum(self._prob, _LEAST, out=logs)
        xp.log(logs, out=logs)
        logs *= weights
        labels.clear_ignored(logs)
        self._divisor = normaliser(self._mode, labels.outer, labels.inner, labels.count())
        xp.sum(logs, out=loss)
        loss /= -self._divisor
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
        weights, _ = self._weights(bottoms)
        self.xp.sum(weights, axis=1, keepdims=True, out=self._row)
        self.xp.multiply(self._prob, self._row, out=dx)
        dx -= weights
        self._labels.clear_ignored(dx)
        dx *= top_diffs[0] / self._divisor
