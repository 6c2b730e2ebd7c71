"""The loss scale of training in float16: losses' gradients are multiplied, parameters' gradients divided by it.

It lifts gradients that float16 would round to 0 (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2).
Dynamic: doubled after 2000 good steps in a row, halved by a step whose gradients are not finite. Such a step is
skipped: parameters, history and BatchNorm's statistics are as before it, its gradients become 0, and it counts as an
iteration, so that the learning rate and the data go on. Where the loss itself is not finite no scale can help, and
the scale stays.
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
PATIENCE = 40
"""Steps in a row that may be skipped: as many as lead from the start to the least scale, and some."""


@dataclass
class LossScale:
    """``scale``: in force now. ``good``: good steps since it last changed. ``skipped``: steps skipped in all, and
    ``in_a_row``."""

    scale: float
    dynamic: bool
    good: int = 0
    skipped: int = 0
    in_a_row: int = 0

    @classmethod
    def of(cls, setting: str | float) -> LossScale:
        """From ``dynamic`` or a number. Raises UsageError."""
        if setting == "dynamic":
            return cls(START, True)
        if isinstance(setting, bool) or not isinstance(setting, (int, float)) or not LEAST <= setting <= MOST:
            raise UsageError(
                "loss_scale is out of range", expected=f"dynamic, or a number from 2^-16 to {MOST:,.0f}", found=setting
            )
        return cls(float(setting), False)

    def good_step(self) -> bool:
        """Count a step that was applied; whether the scale grew."""
        self.in_a_row = 0
        self.good += 1
        if not self.dynamic or self.good < GROW_AFTER or self.scale >= MOST:
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

    def __init__(self, net: Any, updater: Any, setting: str | float) -> None:
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
        self._seen = self.precision.counts()
        self._told: set[str] = set()

    def begin(self) -> None:
        """Before the forward passes of a step."""
        for blob, before in self._statistics:
            before[...] = blob.device_data
        self.net.loss_scale = self.loss_scale.scale

    def end(self, step: int, loss: float) -> bool:
        """After the backward passes: unscale the gradients, or take the step back. Whether to update.

        Raises StallscopeError where steps are skipped without end.
        """
        gradients = [param.blob.device_diff for param in self._updater.params]
        finite_loss = math.isfinite(loss)
        offender = self._look(step)
        scale = self.loss_scale.scale
        if finite_loss and all(half.all_finite(gradient) for gradient in gradients):
            for gradient in gradients:
                gradient *= 1.0 / scale
            if self.loss_scale.good_step():
                self._changed(step, scale, f"{GROW_AFTER} good steps in a row", None)
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
        counts = self.precision.counts()
        new, self._seen = counts - self._seen, counts
        first: Tensor | None = None
        for kind, column in (("overflow", half.OVERFLOW), ("underflow", half.FLUSHED)):
            rows = np.flatnonzero(new[:, column])
            if not len(rows):
                continue
            row = int(rows[0])
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
