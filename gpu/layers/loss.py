"""Softmax, losses and accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu.layers.base import Array, Layer, LayerError, Shape, register

_FULL, _VALID, _BATCH_SIZE, _NONE = range(4)
_TINY = np.float32(np.finfo(np.float32).tiny)


class LabelOutOfRange(LayerError):
    """A label that names no class. ``value``, ``classes``, ``position`` (of the first bad one, in the label blob)."""

    value: float
    classes: int
    position: tuple[int, ...]


class _Labels:
    """Scores along one axis, one label for every other position; checks and picks."""

    def __init__(self, layer: Layer, scores: Shape, labels: Shape, axis: int, ignore: int | None) -> None:
        axis = layer.axis(axis, len(scores))
        self._layer, self._ignore, self._label_shape = layer, ignore, labels
        self.outer, self.classes, self.inner = math.prod(scores[:axis]), scores[axis], math.prod(scores[axis + 1 :])
        self.view = (self.outer, self.classes, self.inner)
        if math.prod(labels) != self.outer * self.inner:
            raise layer.error(
                "labels do not fit the scores",
                expected=f"{self.outer * self.inner} labels for scores {scores} along axis {axis}",
                found=f"{math.prod(labels)} (shape {labels})",
            )

    def read(self, labels: Array) -> tuple[Array, Array | None]:
        """Labels as int64[outer, 1, inner] (0 where ignored), and which count (None: all). Raises LabelOutOfRange."""
        xp = self._layer.xp
        flat = labels.reshape(self.outer, 1, self.inner)
        valid = None if self._ignore is None else flat != self._ignore
        bad = ~((flat >= 0) & (flat < self.classes) & (flat == xp.floor(flat)))  # written so that NaN is bad
        if valid is not None:
            bad &= valid
        if bool(bad.any()):
            self._refuse(flat, int(bad.reshape(-1).argmax()))
        return (flat if valid is None else xp.where(valid, flat, np.float32(0))).astype(np.int64), valid

    def _refuse(self, flat: Array, first: int) -> None:
        value = float(flat.reshape(-1)[first])
        shown = int(value) if value.is_integer() else value
        position = tuple(int(i) for i in np.unravel_index(first, self._label_shape))
        ignored = "" if self._ignore is None else f", or ignore_label {self._ignore}"
        error = LabelOutOfRange(
            f"layer {self._layer.name!r} ({self._layer.type}): label {shown} at position {position} of blob "
            f"{self._layer.spec.bottom[1]!r} is not a class",
            expected=f"a whole number from 0 to {self.classes - 1} ({self.classes} classes){ignored}",
            found=shown,
            hint="is the last layer's num_output the number of classes, and do labels start at 0?",
        )
        error.value, error.classes, error.position = value, self.classes, position
        raise error


def _softmax(xp: Any, x: Array, y: Array) -> None:
    """Softmax along axis 1 of x[outer, classes, inner], shifted by the maximum; y may be x."""
    xp.subtract(x, x.max(axis=1, keepdims=True), out=y)
    xp.exp(y, out=y)
    y /= y.sum(axis=1, keepdims=True)


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

    def reads_bottom(self) -> bool:
        return False

    def reads_top(self) -> bool:
        return True

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        _softmax(self.xp, bottoms[0].reshape(self._view), tops[0].reshape(self._view))

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
        self.xp.subtract(dy, product.sum(axis=1, keepdims=True), out=dx)
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
        p = self.spec.loss_param
        self._ignore = p.ignore_label if p.HasField("ignore_label") else None
        self._mode = p.normalization
        if not p.HasField("normalization") and p.HasField("normalize"):
            self._mode = _VALID if p.normalize else _BATCH_SIZE

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self._labels = _Labels(self, bottoms[0], bottoms[1], self.spec.softmax_param.axis, self._ignore)
        return [(), bottoms[0]][: len(self.spec.top)]

    def allocate(self) -> None:
        self._prob = self.xp.zeros(self._labels.view, np.float32)
        self._known: tuple[Array, Array | None] = (None, None)

    def reads_bottom(self) -> bool:
        return False

    def allows_gradient(self, index: int) -> bool:
        return index == 0

    def _normaliser(self, valid: Array | None) -> float:
        labels = self._labels
        if self._mode == _VALID:
            count = labels.outer * labels.inner if valid is None else int(valid.sum())
        else:
            count = {_FULL: labels.outer * labels.inner, _BATCH_SIZE: labels.outer, _NONE: 1}[self._mode]
        return max(1.0, float(count))

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        xp = self.xp
        _softmax(xp, bottoms[0].reshape(self._labels.view), self._prob)
        index, valid = self._known = self._labels.read(bottoms[1])
        chosen = xp.take_along_axis(self._prob, index, axis=1)
        losses = -xp.log(xp.maximum(chosen, _TINY))
        if valid is not None:
            losses = xp.where(valid, losses, np.float32(0))
        tops[0][...] = losses.sum() / np.float32(self._normaliser(valid))
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
        index, valid = self._known
        dx = bottom_diffs[0].reshape(self._labels.view)
        one_hot = self.xp.arange(self._labels.classes)[None, :, None] == index
        self.xp.subtract(self._prob, one_hot, out=dx)
        if valid is not None:
            dx *= valid
        dx *= top_diffs[0] / np.float32(self._normaliser(valid))


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
        return [()]

    def allocate(self) -> None:
        self._difference = self.xp.zeros(self._shape, np.float32)

    def reads_bottom(self) -> bool:
        return False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        self.xp.subtract(bottoms[0], bottoms[1].reshape(self._shape), out=self._difference)
        square = self._difference * self._difference
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
        p = self.spec.accuracy_param
        self._top_k = p.top_k
        self._ignore = p.ignore_label if p.HasField("ignore_label") else None

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self._labels = _Labels(self, bottoms[0], bottoms[1], self.spec.accuracy_param.axis, self._ignore)
        if not 1 <= self._top_k <= self._labels.classes:
            raise self.error(
                "top_k is out of range", expected=f"1 to {self._labels.classes} classes", found=self._top_k
            )
        return [(), (self._labels.classes,)][: len(self.spec.top)]

    def reads_bottom(self) -> bool:
        return False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        xp = self.xp
        scores = bottoms[0].reshape(self._labels.view)
        index, valid = self._labels.read(bottoms[1])
        own = xp.take_along_axis(scores, index, axis=1)
        # Its own score is among those that are not below it, so exactly one at rank 1.
        right = (~(scores < own)).sum(axis=1, keepdims=True) <= self._top_k
        counted = xp.ones_like(right) if valid is None else valid
        right &= counted
        total = int(counted.sum())
        tops[0][...] = np.float32(int(right.sum()) / total if total else 0)
        if len(tops) > 1:
            classes = self._labels.classes
            hits = xp.bincount(index[right], minlength=classes)
            seen = xp.bincount(index[counted], minlength=classes)
            tops[1][...] = hits / xp.maximum(seen, 1)
