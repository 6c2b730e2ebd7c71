"""Caffe's ``debug_info``: mean absolute values of what each layer writes, a line each, in displayed steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gpu.layers.base import Array, Layer
from gpu.net import Net
from gpu.probe import watching
from profiler import recorder

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Line:
    """One line. ``pass_``: Forward, Backward or Update. ``what``: top blob, bottom blob, param blob or param.

    ``data``, ``diff``: mean absolute values, None where the line has none. Gradients are those without a loss scale.
    """

    pass_: str
    layer: str
    what: str
    name: str
    data: float | None = None
    diff: float | None = None

    def __str__(self) -> str:
        values = [
            f"{kind}: {value:g}" for kind, value in (("data", self.data), ("diff", self.diff)) if value is not None
        ]
        return f"    [{self.pass_}] Layer {self.layer}, {self.what} {self.name} {'; '.join(values)}"


class DebugInfo:
    """Lines of one net, of one step at a time: logged at level INFO, and noted as ``debug_info`` at the step's end.

    ``lines``: those of the last step that was watched. ``norms``: L1 and L2 norms of all parameters' values and of
    their gradients, after each backward pass. Watching changes no bits, and takes memory and time.
    """

    def __init__(self, net: Net) -> None:
        self._net = net
        self.lines: list[Line] = []
        self.norms: list[dict[str, float]] = []

    @contextmanager
    def step(self, number: int) -> Iterator[DebugInfo]:
        """Watch the passes within the block, which are those of this step."""
        self.lines, self.norms = [], []
        with watching(self._net, self._see):
            yield self
        rows = [asdict(line) for line in self.lines]
        recorder.current().note("debug_info", step=number, lines=rows, norms=self.norms)

    def after_backward(self) -> None:
        """The norms of all parameters."""
        arrays = [(param.blob.device_data, param.blob.device_diff) for param in self._net.learnable]
        sums = {
            f"{norm}_{kind}": sum(self._sum(pair[i], norm) for pair in arrays)
            for i, kind in enumerate(("data", "diff"))
            for norm in ("l1", "l2")
        }
        scale = self._net.loss_scale
        found = {
            "l1_data": sums["l1_data"], "l1_diff": sums["l1_diff"] / scale,
            "l2_data": math.sqrt(sums["l2_data"]), "l2_diff": math.sqrt(sums["l2_diff"]) / scale,
        }  # fmt: skip
        self.norms.append(found)
        _log.info(
            "    [Backward] All net params (data, diff): L1 norm = (%g, %g); L2 norm = (%g, %g)",
            *(found[name] for name in ("l1_data", "l1_diff", "l2_data", "l2_diff")),
        )

    @contextmanager
    def update(self) -> Iterator[None]:
        """Around an update: values before it, and what it subtracts, which it leaves in the gradients."""
        before = [self._mean(param.blob.device_data) for param in self._net.learnable]
        yield
        for param, data in zip(self._net.learnable, before, strict=True):
            layer, _, index = param.name.rpartition(".")
            spec = next(each.spec for each in self._net.layers if each.name == layer).param
            given = spec[int(index)].name if int(index) < len(spec) else ""
            self._add("Update", layer, "param", given or index, data, self._mean(param.blob.device_diff))

    def _see(self, layer: Layer, what: str, arrays: Sequence[Array | None]) -> None:
        spec, scale = layer.spec, self._net.loss_scale
        if what == "top":
            for name, array in zip(spec.top, arrays, strict=True):
                self._add("Forward", layer.name, "top blob", name, self._mean(array))
            for i, blob in enumerate(layer.blobs):
                name = spec.param[i].name if i < len(spec.param) else ""
                self._add("Forward", layer.name, "param blob", name or str(i), self._mean(blob.device_data))
        elif what in ("bottom", "parameter"):
            names = spec.bottom if what == "bottom" else map(str, range(len(arrays)))
            kind = "bottom blob" if what == "bottom" else "param blob"
            for name, array in zip(names, arrays, strict=True):
                if array is not None:
                    self._add("Backward", layer.name, kind, name, None, self._mean(array) / scale)

    def _add(self, *fields: Any) -> None:
        self.lines.append(Line(*fields))
        _log.info("%s", self.lines[-1])

    def _mean(self, array: Array) -> float:
        return self._sum(array, "l1") / array.size if array.size else math.nan

    def _sum(self, array: Array, norm: str) -> float:
        terms = self._net.xp.abs(array) if norm == "l1" else self._net.xp.square(array, dtype=np.float64)
        return float(terms.sum(dtype=np.float64))
