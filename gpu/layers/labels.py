"""What losses share: labels that are checked and turned into masks, and what a loss is divided by.

Nothing here makes an array after ``allocate``: work space comes from the layer's scratch.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np

from gpu.layers.base import Array, Layer, LayerError, Shape, count_up

FULL, VALID, BATCH_SIZE, NONE = range(4)
"""``LossParameter.NormalizationMode``."""

_HINT = "is the last layer's num_output the number of classes, and do labels start at 0?"


class LabelOutOfRange(LayerError):
    """A label that names no class. ``value``, ``classes``, ``position`` (of the first bad one, in the label blob)."""

    value: float
    classes: int
    position: tuple[int, ...]


class Labels:
    """Scores along one axis, one label for every other position; checks and picks.

    ``view``: the scores as [outer, classes, inner]; labels are [outer, 1, inner]. ``bottom``: which blob holds them.
    """

    def __init__(
        self,
        layer: Layer,
        scores: Shape,
        labels: Shape,
        axis: int,
        ignore: int | None = None,
        *,
        bottom: int = 1,
        hint: str = _HINT,
    ) -> None:
        axis = layer.axis(axis, len(scores))
        self._layer, self._ignore, self._label_shape = weakref.proxy(layer), ignore, labels
        self._bottom, self._hint = bottom, hint
        self.outer, self.classes, self.inner = math.prod(scores[:axis]), scores[axis], math.prod(scores[axis + 1 :])
        self.view = (self.outer, self.classes, self.inner)
        self.row = (self.outer, 1, self.inner)
        if math.prod(labels) != self.outer * self.inner:
            raise layer.error(
                "labels do not fit the scores",
                expected=f"{self.outer * self.inner} labels for scores {scores} along axis {axis}",
                found=f"{math.prod(labels)} (shape {labels})",
            )

    def allocate(self) -> None:
        """Make the arrays that hold what ``read`` finds."""
        xp, keep = self._layer.xp, self._layer.keep
        self.index = keep("index", self.row, np.int64)
        self.valid: Array | None = None if self._ignore is None else keep("valid", self.row, bool)
        if self.valid is not None:
            self.valid.fill(True)
        self._ignored = None if self._ignore is None else keep("ignored", self.row, bool)
        self._bad, self._other = (keep(name, self.row, bool) for name in ("bad", "other"))
        self._whole = keep("whole", self.row)
        self._numbers = count_up(xp, self.classes).reshape(1, -1, 1)

    def read(self, labels: Array) -> None:
        """Set ``index``, int64[outer, 1, inner], 0 where ignored, and ``valid``. Raises LabelOutOfRange."""
        xp, bad, other = self._layer.xp, self._bad, self._other
        flat = labels.reshape(self.row)
        xp.floor(flat, out=self._whole)
        xp.not_equal(flat, self._whole, out=bad)  # true for NaN
        for compare, bound in ((xp.less, 0), (xp.greater_equal, self.classes)):
            compare(flat, bound, out=other)
            bad |= other
        if self.valid is not None:
            xp.not_equal(flat, self._ignore, out=self.valid)
            xp.logical_not(self.valid, out=self._ignored)
            bad &= self.valid
        if bool(bad.any()):
            self._refuse(flat, int(bad.reshape(-1).argmax()))
        if self.valid is not None:
            self.clear_ignored(self._whole)
        self.index[...] = self._whole

    def clear_ignored(self, values: Array) -> None:
        """Set to 0 what belongs to ignored labels, in an array that [outer, 1, inner] spreads to."""
        if self._ignored is not None:
            self._layer.xp.copyto(values, 0.0, where=self._ignored)

    def count(self) -> int | None:
        """How many labels count; None: all."""
        return None if self.valid is None else int(self._layer.xp.count_nonzero(self.valid))

    def one_hot(self, out: Array) -> Array:
        """Which scores the labels name, as 1 and 0 in ``out`` [outer, classes, inner], bool or float32; returns it."""
        self._layer.xp.equal(self._numbers, self.index, out=out)
        if self.valid is not None:
            out *= self.valid
        return out

    def pick(self, values: Array, own: Array, spare: Array, out: Array) -> Array:
        """The values that ``own`` (a bool one_hot) marks, exactly, 0 for ignored labels; returns ``out``."""
        xp = self._layer.xp
        spare[...] = 0
        xp.copyto(spare, values, where=own)
        return xp.sum(spare, axis=1, keepdims=True, out=out)

    def _refuse(self, flat: Array, first: int) -> None:
        value = float(flat.reshape(-1)[first])
        shown = int(value) if value.is_integer() else value
        position = tuple(int(i) for i in np.unravel_index(first, self._label_shape))
        ignored = "" if self._ignore is None else f", or ignore_label {self._ignore}"
        error = LabelOutOfRange(
            f"layer {self._layer.name!r} ({self._layer.type}): label {shown} at position {position} of blob "
            f"{self._layer.spec.bottom[self._bottom]!r} is not a class",
            expected=f"a whole number from 0 to {self.classes - 1} ({self.classes} classes){ignored}",
            found=shown,
            hint=self._hint,
        )
        error.value, error.classes, error.position = value, self.classes, position
        raise error


def ignored_label(loss_param: Any) -> int | None:
    """``ignore_label`` where it was given."""
    return loss_param.ignore_label if loss_param.HasField("ignore_label") else None


def mode(loss_param: Any, default: int) -> int:
    """``normalization``, else what the older ``normalize`` stands for, else ``default``."""
    if not loss_param.HasField("normalization") and loss_param.HasField("normalize"):
        return VALID if loss_param.normalize else BATCH_SIZE
    return loss_param.normalization if loss_param.HasField("normalization") else default


def normaliser(mode: int, outer: int, inner: int, valid: int | None) -> np.float32:
    """What a summed loss is divided by, at least 1. ``valid``: how many of outer · inner terms count (None: all)."""
    count = {
        FULL: outer * inner,
        VALID: outer * inner if valid is None else valid,
        BATCH_SIZE: outer,
        NONE: 1,
    }[mode]
    return np.float32(max(1, count))
