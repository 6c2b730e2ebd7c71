"""Learning rate as a pure function of the iteration (Caffe's ``lr_policy``).

With i the number of updates done: fixed b · step b·g^(i // s) · exp b·g^i · inv b·(1 + g·i)^−p ·
multistep b·g^(stepvalues ≤ i) · poly b·(1 − i/max_iter)^p · sigmoid b/(1 + e^(−g·(i − s))).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler.errors import StallscopeError

POLICIES = ("fixed", "step", "exp", "inv", "multistep", "poly", "sigmoid")
_NEEDS = {
    "step": ("gamma", "stepsize"),
    "exp": ("gamma",),
    "inv": ("gamma", "power"),
    "multistep": ("gamma", "stepvalue"),
    "poly": ("power", "max_iter"),
    "sigmoid": ("gamma", "stepsize"),
}


@dataclass(frozen=True)
class LrPolicy:
    """The values of a SolverParameter that set the rate; numbers are Caffe's float32 ones, held as Python floats."""

    policy: str
    base_lr: float
    gamma: float = 0.0
    power: float = 0.0
    stepsize: int = 0
    stepvalues: tuple[int, ...] = ()
    max_iter: int = 0

    @classmethod
    def from_proto(cls, solver: Any) -> LrPolicy:
        """Read a ``caffe.SolverParameter``; raises StallscopeError for an unknown or incomplete policy."""
        policy = solver.lr_policy or "fixed"
        if policy not in POLICIES:
            raise StallscopeError(
                f"unknown lr_policy {policy!r} in the solver", expected=" | ".join(POLICIES), found=policy
            )
        for field in _NEEDS.get(policy, ()):
            given = len(solver.stepvalue) > 0 if field == "stepvalue" else solver.HasField(field)
            if not given:
                raise StallscopeError(
                    f"lr_policy {policy!r} needs {field!r}",
                    expected=", ".join(_NEEDS[policy]),
                    found=f"no {field} in the solver",
                )
        if policy == "step" and solver.stepsize < 1:
            raise StallscopeError("stepsize must be at least 1", expected=">= 1", found=solver.stepsize)
        if policy == "poly" and solver.max_iter < 1:
            raise StallscopeError("lr_policy 'poly' needs max_iter of at least 1", found=solver.max_iter)
        steps = tuple(int(value) for value in solver.stepvalue)
        if list(steps) != sorted(steps):
            raise StallscopeError("stepvalue must not decrease", expected=sorted(steps), found=list(steps))
        return cls(
            policy=policy,
            base_lr=float(solver.base_lr),
            gamma=float(solver.gamma),
            power=float(solver.power),
            stepsize=int(solver.stepsize),
            stepvalues=steps,
            max_iter=int(solver.max_iter),
        )

    def rate(self, iteration: int) -> float:
        """The rate of update number ``iteration`` (from 0), rounded to float32 as Caffe holds it."""
        i, base, gamma = iteration, self.base_lr, self.gamma
        match self.policy:
            case "step" | "multistep":
                value = base * gamma ** self.current_step(i)
            case "exp":
                value = base * gamma**i
            case "inv":
                value = base * (1.0 + gamma * i) ** -self.power
            case "poly":
                # Past max_iter the base would turn negative and the power complex; the rate has reached 0 there.
                value = base * max(0.0, 1.0 - i / self.max_iter) ** self.power
            case "sigmoid":
                value = base / (1.0 + math.exp(min(700.0, -gamma * (i - self.stepsize))))
            case _:
                value = base
        return float(np.float32(value))

    def current_step(self, iteration: int) -> int:
        """How many steps down have been made: what Caffe stores as ``current_step`` in a solver state."""
        if self.policy == "step":
            return iteration // self.stepsize
        if self.policy == "multistep":
            return bisect_right(self.stepvalues, iteration)
        return 0
