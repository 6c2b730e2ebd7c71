"""What a solver makes of gradients: clip, divide, decay, then the update of its type, all in place and in float32.

Caffe's order and formulas. With g the gradient, r = rate · lr_mult, m = momentum, w the weights, and u the update that
is subtracted from w (and left in the gradient, as Caffe does):

    SGD       h = m·h + r·g                          u = h
    Nesterov  h' = m·h + r·g                         u = (1 + m)·h' − m·h         (Nesterov 1983; Sutskever et al. 2013)
    AdaGrad   h = h + g²                             u = r·g / (√h + δ)            (Duchi et al. 2011)
    RMSProp   h = d·h + (1 − d)·g²                   u = r·g / (√h + δ)            (Tieleman and Hinton 2012)
    AdaDelta  h = m·h + (1 − m)·g²                   u = r·g·√((δ + s) / (δ + h)), then
              s = m·s + (1 − m)·(u/r)²               (Zeiler 2012)
    Adam      a = m·a + (1 − m)·g,  v = m₂·v + (1 − m₂)·g²
              u = r·√(1 − m₂^t) / (1 − m^t) · a / (√v + δ),  t = update number from 1   (Kingma and Ba 2015)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler.errors import StallscopeError

TYPES = ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")
_WITHOUT_MOMENTUM = ("AdaGrad", "RMSProp")
_BY_OLD_ENUM = ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")


@dataclass(frozen=True)
class Rule:
    """The numbers of a SolverParameter that decide the update; ``clip`` < 0 means gradients are not clipped."""

    type: str
    momentum: float
    momentum2: float
    rms_decay: float
    delta: float
    weight_decay: float
    regularization: str
    clip: float
    iter_size: int

    @property
    def histories(self) -> int:
        """Arrays of the size of a parameter that are kept between updates."""
        return 2 if self.type in ("AdaDelta", "Adam") else 1

    @classmethod
    def from_proto(cls, solver: Any) -> Rule:
        """Read a ``caffe.SolverParameter``; raises StallscopeError for what no solver can follow."""
        kind = solver.type
        if solver.HasField("solver_type"):  # before solvers had names
            if solver.HasField("type"):
                raise StallscopeError("the solver gives both type and solver_type", hint="keep type")
            kind = _BY_OLD_ENUM[solver.solver_type]
        if kind not in TYPES:
            raise StallscopeError(f"unknown solver type {kind!r}", expected=" | ".join(TYPES), found=kind)
        if kind in _WITHOUT_MOMENTUM and solver.momentum != 0:
            raise StallscopeError(
                f"solver type {kind} takes no momentum", expected="momentum: 0, or none", found=solver.momentum
            )
        if solver.regularization_type not in ("L1", "L2"):
            raise StallscopeError(
                "unknown regularization_type in the solver", expected="L1 | L2", found=solver.regularization_type
            )
        for name in ("momentum", "momentum2") if kind in ("Adam", "AdaDelta") else ():
            if not 0 <= getattr(solver, name) < 1:
                raise StallscopeError(
                    f"solver type {kind}: {name} is out of range", expected="0 <= .. < 1", found=getattr(solver, name)
                )
        if solver.iter_size < 1:
            raise StallscopeError("iter_size must be at least 1", expected=">= 1", found=solver.iter_size)
        return cls(
            type=kind,
            momentum=float(solver.momentum),
            momentum2=float(solver.momentum2),
            rms_decay=float(solver.rms_decay),
            delta=float(solver.delta),
            weight_decay=float(solver.weight_decay),
            regularization=solver.regularization_type,
            clip=float(solver.clip_gradients),
            iter_size=int(solver.iter_size),
        )


class Updater:
    """Holds the histories of the parameters and applies updates; after construction it allocates nothing.

    ``params``: the net's learnable parameters (``blob``, ``lr_mult``, ``decay_mult``). ``history`` has one array for
    each parameter, then for AdaDelta and Adam a second one for each, in the order in which Caffe stores them.
    """

    def __init__(self, rule: Rule, params: Sequence[Any], xp: Any = np) -> None:
        self.rule = rule
        self.params = list(params)
        self.xp = xp
        shapes = [tuple(param.blob.shape) for param in self.params]
        self.history = [xp.zeros(shape, np.float32) for _ in range(rule.histories) for shape in shapes]
        largest = max((math.prod(shape) for shape in shapes), default=0)
        flat = [xp.empty(largest, np.float32) for _ in range(2)]
        self._scratch = [tuple(buffer[: math.prod(shape)].reshape(shape) for buffer in flat) for shape in shapes]

    def clear_gradients(self) -> None:
        """Set every gradient to zero: layers add to them."""
        for param in self.params:
            param.blob.clear_diff()

    def apply(self, rate: float, iteration: int) -> None:
        """Turn the summed gradients into updates of update number ``iteration`` (from 0) and subtract them."""
        if self.rule.clip >= 0:
            self._clip()
        for index, param in enumerate(self.params):
            weights, gradient = param.blob.device_data, param.blob.device_diff
            if self.rule.iter_size > 1:
                gradient *= 1.0 / self.rule.iter_size
            self._decay(index, param, weights, gradient)
            self._update(index, gradient, rate * param.lr_mult, iteration)
            self.xp.subtract(weights, gradient, out=weights)

    def _clip(self) -> None:
        squares = 0.0
        for param, (scratch, _) in zip(self.params, self._scratch, strict=True):
            gradient = param.blob.device_diff
            self.xp.multiply(gradient, gradient, out=scratch)
            squares += float(scratch.sum(dtype=np.float64))
        norm = math.sqrt(squares)
        if norm > self.rule.clip:
            for param in self.params:
                gradient = param.blob.device_diff
                gradient *= self.rule.clip / norm

    def _decay(self, index: int, param: Any, weights: Any, gradient: Any) -> None:
        decay = self.rule.weight_decay * param.decay_mult
        if not decay:
            return
        scratch = self._scratch[index][0]
        if self.rule.regularization == "L1":
            self.xp.sign(weights, out=scratch)
            scratch *= decay
        else:
            self.xp.multiply(weights, decay, out=scratch)
        gradient += scratch

    def _update(self, index: int, g: Any, rate: float, iteration: int) -> None:
        xp, rule = self.xp, self.rule
        h = self.history[index]
        a, b = self._scratch[index]
        m = rule.momentum
        if rule.type == "SGD":
            h *= m
            xp.multiply(g, rate, out=g)
            h += g
            g[...] = h
        elif rule.type == "Nesterov":
            xp.multiply(h, m, out=a)  # m·h, needed in both formulas
            xp.multiply(g, rate, out=g)
            xp.add(a, g, out=h)
            xp.multiply(h, 1.0 + m, out=g)
            g -= a
        elif rule.type in ("AdaGrad", "RMSProp"):
            xp.multiply(g, g, out=a)
            if rule.type == "RMSProp":
                h *= rule.rms_decay
                a *= 1.0 - rule.rms_decay
            h += a
            xp.sqrt(h, out=a)
            a += rule.delta
            g /= a
            g *= rate
        elif rule.type == "AdaDelta":
            s = self.history[len(self.params) + index]
            _moving_mean_of_squares(xp, h, g, m, a)
            xp.add(s, rule.delta, out=a)
            xp.add(h, rule.delta, out=b)
            a /= b
            xp.sqrt(a, out=a)
            g *= a
            _moving_mean_of_squares(xp, s, g, m, a)
            g *= rate
        else:  # Adam
            v = self.history[len(self.params) + index]
            _moving_mean_of_squares(xp, v, g, rule.momentum2, a)
            h *= m
            xp.multiply(g, 1.0 - m, out=a)
            h += a
            xp.sqrt(v, out=a)
            a += rule.delta
            xp.divide(h, a, out=g)
            t = iteration + 1
            g *= rate * (math.sqrt(1.0 - rule.momentum2**t) / (1.0 - m**t))


def _moving_mean_of_squares(xp: Any, mean: Any, values: Any, keep: float, scratch: Any) -> None:
    """mean = keep·mean + (1 − keep)·values², in place."""
    mean *= keep
    xp.multiply(values, values, out=scratch)
    scratch *= 1.0 - keep
    mean += scratch
