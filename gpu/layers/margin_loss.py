"""Losses of margins: how far scores are on the wrong side, how far pairs are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gpu.layers.base import Array, Layer, Shape, as_flags, register
from gpu.layers.labels import Labels

_L1 = 1
_NEAR = np.float32(1e-4)
"""What Caffe adds to the distance it divides by."""


@register("HingeLoss")
class HingeLoss(Layer):
    """One-against-all hinge: mean over images of the sum of max(0, 1 - s x), or its square (``norm: L2``).

    s is 1 for the score that the label names and -1 for all others. All axes after the first are classes.
    """

    n_bottoms = (2, 2)
    loss = True

    def setup(self) -> None:
        self._l1 = self.spec.hinge_loss_param.norm == _L1

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        shape = bottoms[0]
        if not shape:
            raise self.error("needs scores of (images, classes)", found=shape)
        self._labels = Labels(self, (shape[0], math.prod(shape[1:])), bottoms[1], 1)
        self.context.scratch.reserve(self._labels.view, self._labels.view)
        return [()]

    def allocate(self) -> None:
        self._labels.allocate()
        self._margin = self.keep("margin", self._labels.view)

    def reads_bottom(self) -> bool:
        return False

    def allows_gradient(self, index: int) -> bool:
        return index == 0

    def _own(self) -> tuple[Array, Array]:
        """Which scores the labels name, and room for as many values."""
        room, spare = self.context.scratch.arrays(self._labels.view, self._labels.view)
        return self._labels.one_hot(as_flags(room)), spare

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        xp, margin, loss = self.xp, self._margin, tops[0]
        self._labels.read(bottoms[1])
        own, spare = self._own()
        margin[...] = bottoms[0].reshape(self._labels.view)
        xp.negative(margin, out=spare)
        xp.copyto(margin, spare, where=own)
        margin += np.float32(1)
        xp.maximum(margin, np.float32(0), out=margin)
        if self._l1:
            xp.sum(margin, out=loss)
        else:
            xp.multiply(margin, margin, out=spare)
            xp.sum(spare, out=loss)
        loss /= np.float32(self._labels.outer)

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
        xp, dx = self.xp, bottom_diffs[0].reshape(self._labels.view)
        own, spare = self._own()
        if self._l1:
            xp.sign(self._margin, out=dx)
        else:
            xp.multiply(self._margin, np.float32(2), out=dx)
        xp.negative(dx, out=spare)
        xp.copyto(dx, spare, where=own)
        dx *= top_diffs[0] / np.float32(self._labels.outer)


@register("ContrastiveLoss")
class ContrastiveLoss(Layer):
    """Hadsell et al. 2006: half the mean of d^2 over similar pairs (1), and of max(0, margin - d)^2 over others (0).

    d is the distance of the two vectors of a pair. ``legacy_version``: max(0, margin - d^2) for the others. Without it
    the gradient divides by d + 0.0001, as Caffe's does, so that it is bounded where d is 0.
    """

    n_bottoms = (3, 3)
    loss = True

    def setup(self) -> None:
        p = self.spec.contrastive_loss_param
        self._margin, self._legacy = np.float32(p.margin), p.legacy_version

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        a, b, pairs = bottoms
        if a != b or not a or math.prod(a[2:]) != 1:
            raise self.error("needs two inputs of one shape (pairs, channels)", expected=a, found=b)
        self._view = (a[0], math.prod(a[1:]))
        hint = "the third input says which pairs are similar: 1, and which are not: 0"
        self._labels = Labels(self, (a[0], 2), pairs, 1, bottom=2, hint=hint)
        self.context.scratch.reserve(self._view)
        return [()]

    def allocate(self) -> None:
        n = self._view[0]
        self._labels.allocate()
        self._difference = self.keep("difference", self._view)
        # d^2, max(0, margin - d or d^2), and d, then the terms of the loss, then the factors of the gradient.
        self._square, self._gap, self._term = (self.keep(name, (n, 1)) for name in ("square", "gap", "term"))
        self._similar = self.keep("similar", (n, 1), bool)

    def reads_bottom(self) -> bool:
        return False

    def allows_gradient(self, index: int) -> bool:
        return index < 2

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        xp, square, gap, term, loss = self.xp, self._square, self._gap, self._term, tops[0]
        self._labels.read(bottoms[2])
        xp.equal(self._labels.index[:, 0], 1, out=self._similar)
        xp.subtract(bottoms[0].reshape(self._view), bottoms[1].reshape(self._view), out=self._difference)
        (part,) = self.context.scratch.arrays(self._view)
        xp.multiply(self._difference, self._difference, out=part)
        xp.sum(part, axis=1, keepdims=True, out=square)
        if self._legacy:
            xp.subtract(self._margin, square, out=gap)
        else:
            xp.sqrt(square, out=term)
            xp.subtract(self._margin, term, out=gap)
        xp.maximum(gap, np.float32(0), out=gap)
        if self._legacy:
            term[...] = gap
        else:
            xp.multiply(gap, gap, out=term)
        xp.copyto(term, square, where=self._similar)
        xp.sum(term, out=loss)
        loss /= np.float32(2 * self._view[0])

    def backward(
        self,
        bottoms: Sequence[Array],
        tops: Sequence[Array],
        top_diffs: Sequence[Array],
        bottom_diffs: Sequence[Array | None],
        param_diffs: Sequence[Array | None],
    ) -> None:
        xp, factor = self.xp, self._term
        if self._legacy:
            xp.sign(self._gap, out=factor)
        else:
            xp.sqrt(self._square, out=factor)
            factor += _NEAR
            xp.divide(self._gap, factor, out=factor)
        xp.negative(factor, out=factor)
        xp.copyto(factor, 1.0, where=self._similar)
        factor *= top_diffs[0] / np.float32(self._view[0])
        for sign, dx in zip((1, -1), bottom_diffs[:2], strict=True):
            if dx is not None:
                out = dx.reshape(self._view)
                xp.multiply(self._difference, factor, out=out)
                if sign < 0:
                    xp.negative(out, out=out)
