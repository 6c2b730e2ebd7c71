"""The loss scale of training in float16: losses' gradients are multiplied, parameters' gradients divided by it.

It lifts gradients that float16 would round to 0 (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2).
Dynamic: doubled after 2000 good steps in a row (``growth``), halved by a step whose gradients are not finite. Such a
step is skipped: parameters, history and BatchNorm's statistics are as before it, its gradients become 0, and it counts
as an iteration, so that the learning rate and the data go on. Where the loss itself is not finite no scale can help,
and the scale stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu import half
from gpu.layers.recurrent import Recurrent
from gpu.precision import Loss, Precision, Tensor
from profiler import recorder
from profiler.errors import StallscopeError, UsageError
from profiler.events import Stage

START = 65536.0
LEAST, MOST = 2.0**-16, 2.0**24
GROW_AFTER = 2000
PATIENCE = 48
"""Steps in a row that may be skipped: the 40 that lead from the most to the least scale, and some."""
_FIRST_TOTALS = 128
"""Steps after which the casts' totals are noted; again whenever there were twice as many."""


@dataclass
class LossScale:
    """``scale``: in force now. ``good``: good steps since it last changed. ``skipped``: steps skipped in all, and
    ``in_a_row``. ``growth``: good steps in a row after which a dynamic scale doubles."""

    scale: float
    dynamic: bool
    good: int = 0
    skipped: int = 0
    in_a_row: int = 0
    growth: int = GROW_AFTER

    @classmethod
    def of(cls, setting: str | float | LossScale, *, start: float = START, growth: int = GROW_AFTER) -> LossScale:
        """From ``dynamic``, with where it starts and when it doubles, or from a number. Raises UsageError."""
        if isinstance(setting, LossScale):
            return setting
        if growth < 1:
            raise UsageError("the growth of a loss scale is out of range", expected="1 or more steps", found=growth)
        number = start if setting == "dynamic" else setting
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not LEAST <= number <= MOST:
            raise UsageError(
                "loss_scale is out of range", expected=f"dynamic, or a number from 2^-16 to {MOST:,.0f}", found=number
            )
        return cls(float(number), setting == "dynamic", growth=growth)

    def good_step(self) -> bool:
        """Count a step that was applied; whether the scale grew."""
        self.in_a_row = 0
        self.good += 1
        if not self.dynamic or self.good < self.growth or self.scale >= MOST:
            return False
        self.scale, self.good = min(MOST, 2 * self.scale), 0
        return True

    def bad_step(self, finite_loss: bool) -> bool:
        """Count a step that was skipped; whether the scale shrank."""
        self.skipped += 1
        self.in_a_row += 1
        self.good = 0
        if not self.dynamic or not finite_loss or self.scale <= LEAST:
            return False
        self.scale = max(LEAST, self.scale / 2)
        return True

    def state(self) -> dict[str, Any]:
        """For the sidecar of a snapshot."""
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`; a static scale stays as it is set."""
        if self.dynamic:
            self.scale = float(state["scale"])
        self.good, self.skipped, self.in_a_row = (int(state[name]) for name in ("good", "skipped", "in_a_row"))


class Scaler:
    """Applies the loss scale to a solver's net and records what it does. After construction it allocates nothing.

    Records ``Stage.LOSS_SCALE`` and ``Stage.SKIPPED`` marks, and notes ``loss_scale``, ``skipped_step`` and, once for
    each kind of loss, ``precision_first``: the first tensor that had it.
    """

    def __init__(self, net: Any, updater: Any, setting: str | float | LossScale) -> None:
        self.net, self._updater = net, updater
        self.loss_scale = LossScale.of(setting)
        self.precision: Precision = net.precision
        # What a forward pass changes of the state that is kept: a skipped step takes it back.
        self._statistics = [
            (blob, updater.xp.empty(blob.shape, np.float32))
            for layer in net.layers
            if not layer.learned
            for blob in layer.blobs
        ]
        self._seen, self._now = self.precision.counts(), self.precision.counts()
        self._new = np.empty_like(self._seen)
        self._lost = np.empty(self._seen.shape[::-1], bool)
        self._told: set[str] = set()
        self._steps, self._totals_at = 0, _FIRST_TOTALS

    def begin(self) -> None:
        """Before the forward passes of a step."""
        for blob, before in self._statistics:
            before[...] = blob.device_data
        self.net.loss_scale = self.loss_scale.scale

    def end(self, step: int, loss: float) -> bool:
        """After the backward passes: unscale the gradients, or take the step back. Whether to update.

        Raises StallscopeError where steps are skipped without end.
        """
        self._steps += 1
        if self._steps == self._totals_at:  # a run that is killed before its first snapshot has said something
            self._totals_at *= 2
            self.note_losses()
        gradients = [param.blob.device_diff for param in self._updater.params]
        finite_loss = math.isfinite(loss)
        offender = self._look(step)
        scale = self.loss_scale.scale
        if finite_loss and all(half.all_finite(gradient) for gradient in gradients):
            for gradient in gradients:
                gradient *= 1.0 / scale
            if self.loss_scale.good_step():
                self._changed(step, scale, f"{self.loss_scale.growth} good steps in a row", None)
            return True
        for gradient in gradients:
            gradient.fill(0)
        for blob, before in self._statistics:
            blob.device_data[...] = before
        if not finite_loss:
            for layer in self.net.layers:
                if isinstance(layer, Recurrent):
                    layer.reset()  # a state that is not finite would stay so
        why = "gradients that are not finite" if finite_loss else "a loss that is not finite"
        shrank = self.loss_scale.bad_step(finite_loss)
        now = recorder.current()
        now.mark(Stage.SKIPPED, step=step)
        now.note("skipped_step", step=step, why=why, scale=scale, **_named(offender))
        if shrank:
            self._changed(step, scale, why, offender)
        if self.loss_scale.in_a_row >= PATIENCE:
            self.note_losses()
            raise self._endless(step, why, offender)
        return False

    def _changed(self, step: int, before: float, why: str, offender: Tensor | None) -> None:
        after, now = self.loss_scale.scale, recorder.current()
        # A mark holds whole numbers: the scale's exponent, which may be below 0, is stored from 2^-16 on.
        now.mark(Stage.LOSS_SCALE, step=step, items=round(math.log2(after / LEAST)))
        now.note("loss_scale", step=step, before=before, after=after, why=why, **_named(offender))

    def _look(self, step: int) -> Tensor | None:
        """The first tensor of this step that overflowed; notes the first ever of overflow and of underflow."""
        new, lost = self._new, self._lost
        np.subtract(self.precision.counts(self._now), self._seen, out=new)
        self._seen, self._now = self._now, self._seen
        np.not_equal(new.T, 0, out=lost)
        first: Tensor | None = None
        for kind, column in (("overflow", half.OVERFLOW), ("underflow", half.FLUSHED)):
            row = int(lost[column].argmax()) if lost.size else 0
            if not lost.size or not lost[column, row]:
                continue
            tensor = self.precision.tensors[row]
            first = tensor if kind == "overflow" else first
            if kind not in self._told:
                self._told.add(kind)
                values = {"values": int(new[row, column]), "nonzero": int(new[row, half.NONZERO])}
                recorder.current().note(
                    "precision_first", step=step, kind=kind, dynamic=self.loss_scale.dynamic, **_named(tensor), **values
                )
        return first

    def _endless(self, step: int, why: str, offender: Tensor | None) -> StallscopeError:
        lost = f", first in {offender.name} of layer {offender.layer!r} ({offender.phase})" if offender else ""
        keep = f"device.keep_fp32: [{offender.layer}]" if offender else "device.keep_fp32 for the last layers"
        other = "device.loss_scale: dynamic" if not self.loss_scale.dynamic else "a smaller base_lr"
        return StallscopeError(
            f"{PATIENCE} steps in a row were skipped in fp16, the last one step {step}: {why}",
            expected="finite losses and gradients",
            found=f"loss scale {self.loss_scale.scale:g}" + (f"; float16 overflowed{lost}" if offender else ""),
            hint=f"{keep}, {other}, or device.precision: fp32 to see whether fp32 diverges as well",
        )

    def note_losses(self) -> None:
        """Note what rounding did to each layer so far, a line a layer; the last such line of a layer counts."""
        now = recorder.current()
        for layer, kinds in losses_by_layer(self.precision).items():
            if any(loss[name] for loss in kinds.values() for name in ("overflow", "flushed", "subnormal")):
                now.note("precision", layer=layer, **kinds)


def losses_by_layer(precision: Precision) -> dict[str, dict[str, dict[str, int]]]:
    """Counts since the net was made, ``{layer: {weights | outputs | gradients: {overflow, flushed, ...}}}``."""
    made: dict[str, dict[str, dict[str, int]]] = {}
    for loss in precision.losses():
        kinds = made.setdefault(loss.tensor.layer, {})
        sums = kinds.setdefault(loss.tensor.kind, dict.fromkeys(_FIELDS, 0))
        for name in _FIELDS:
            sums[name] += getattr(loss, name)
    return made


_FIELDS = tuple(name for name in Loss.__dataclass_fields__ if name != "tensor")


def _named(tensor: Tensor | None) -> dict[str, str]:
    return {} if tensor is None else {"layer": tensor.layer, "tensor": tensor.name, "phase": tensor.phase}
