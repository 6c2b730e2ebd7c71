"""Simple functions of every value by itself: absolute value, limits, exponentials, logarithms, steps."""

from __future__ import annotations

import math

import numpy as np

from gpu.layers.activation import Activation
from gpu.layers.base import Array, Layer, as_flags, register

_LARGEST = float(np.finfo(np.float32).max)


@register("AbsVal")
class AbsVal(Activation):
    """y = |x|; the gradient at 0 is 0. Not in place, as in Caffe."""

    in_place = False

    def _value(self, x: Array, y: Array) -> None:
        self.xp.abs(x, out=y)

    def _gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        self.xp.sign(x, out=dx)
        dx *= dy


@register("Clip")
class Clip(Activation):
    """y = min(max(x, ``min``), ``max``); the gradient passes from min to max, both included.

    Caffe takes an absent clip_param for 0 and 0 and makes everything 0; here both are asked for.
    """

    rooms = 2

    def setup(self) -> None:
        p = self.spec.clip_param
        if not (p.HasField("min") and p.HasField("max")):
            raise self.error("clip_param needs min and max")
        if not p.min <= p.max:
            raise self.error("min is above max", expected="min <= max", found=f"min {p.min:g}, max {p.max:g}")
        self._low, self._high = np.float32(p.min), np.float32(p.max)

    def _value(self, x: Array, y: Array) -> None:
        self.xp.minimum(x, self._high, out=y)
        self.xp.maximum(y, self._low, out=y)

    def _gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        inside, other = (as_flags(room) for room in self._rooms())
        self.xp.greater_equal(x, self._low, out=inside)
        self.xp.less_equal(x, self._high, out=other)
        inside &= other
        self.xp.multiply(dy, inside, out=dx)


def _log_of_base(layer: Layer, base: float, one: bool) -> float:
    """log(base), where -1 stands for e; refuses a base that has none, and 1 unless ``one``."""
    if base == -1:
        return 1.0
    if not 0 < base < math.inf or (base == 1 and not one):
        above = "above 0" if one else "above 0 and not 1"
        raise layer.error("base is out of range", expected=f"{above}, or -1 for e", found=base)
    return math.log(base)


@register("Exp")
class Exp(Activation):
    """y = base ^ (shift + scale * x); base -1, the default, stands for e."""

    def setup(self) -> None:
        p = self.spec.exp_param
        log = _log_of_base(self, p.base, one=True)
        self._inner = np.float32(log * p.scale)
        try:
            outer = math.exp(log * p.shift)
        except OverflowError:
            outer = math.inf
        if not outer <= _LARGEST:
            raise self.error("base ^ shift is too large", expected="a float32", found=f"base {p.base}, shift {p.shift}")
        self._outer = np.float32(outer)

    def reads_bottom(self) -> bool:
        return False

    def reads_top(self) -> bool:
        return True

    def _value(self, x: Array, y: Array) -> None:
        self.xp.multiply(x, self._inner, out=y)
        self.xp.exp(y, out=y)
        if self._outer != 1:
            y *= self._outer

    def _gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        self.xp.multiply(dy, y, out=dx)
        if self._inner != 1:
            dx *= self._inner


@register("Log")
class Log(Activation):
    """y = log to ``base`` of (shift + scale * x); base -1, the default, stands for e.

    Written in place its gradient is right here, where Caffe takes the output for the input.
    """

    rooms = 1

    def setup(self) -> None:
        p = self.spec.log_param
        log = _log_of_base(self, p.base, one=False)
        self._scale, self._shift = np.float32(p.scale), np.float32(p.shift)
        self._outer, self._slope = np.float32(1 / log), np.float32(p.scale / log)

    def _value(self, x: Array, y: Array) -> None:
        self._argument(x, y)
        self.xp.log(y, out=y)
        if self._outer != 1:
            y *= self._outer

    def _argument(self, x: Array, out: Array) -> None:
        self.xp.multiply(x, self._scale, out=out)
        if self._shift != 0:
            out += self._shift

    def _gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        (part,) = self._rooms()
        self._argument(x, part)
        self.xp.divide(dy, part, out=dx)
        if self._slope != 1:
            dx *= self._slope


@register("Threshold")
class Threshold(Activation):
    """y = 1 where x > ``threshold``, else 0; without a gradient."""

    differentiable = False

    def setup(self) -> None:
        self._threshold = np.float32(self.spec.threshold_param.threshold)

    def reads_bottom(self) -> bool:
        return False

    def _value(self, x: Array, y: Array) -> None:
        self.xp.greater(x, self._threshold, out=y)
