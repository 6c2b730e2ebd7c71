"""Which layers need more than 16 bits: float16 storage (:mod:`gpu.precision`) in one layer at a time against float32.

The document (``precision`` of :mod:`gpu.crosscheck`)::

    loss, loss_scale, tolerance
    layers     [{layer, type, loss, gradient, overflow, lost, sensitive}]: relative change of the loss and of all
               parameters' gradient (L2) with this layer alone in float16; values that became infinite, or 0.
               Worst first
    all_fp16   {loss, gradient}, every layer in float16
    with_keep  {loss, gradient}, all but those of keep_fp32
    keep_fp32  [layer], the proposal for the configuration key device.keep_fp32
    enough     whether with_keep is within the tolerance

null stands for a change that is no number: the loss or the gradient became infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu.net import Net
from gpu.probe import still
from gpu.timing import has_backward
from profiler.errors import StallscopeError

if TYPE_CHECKING:
    from rich.console import Console

_LARGEST = 65504.0
_HEADROOM = 8.0
"""Factor between the largest gradient and float16's largest value that the loss scale leaves."""
_MOST_SCALE = 2.0**24


def sensitivity(
    build: Callable[[str, Collection[str]], Net], inputs: Mapping[str, np.ndarray], tolerance: float
) -> dict[str, Any]:
    """Try the layers one by one.

    Parameters
    ----------
    build: makes the net for (precision, keep_fp32), always with the same weights. tolerance: relative change of the
        gradient (of the loss, in a net without one) from which on a layer counts as sensitive.

    Raises StallscopeError where float32 gives no finite numbers to compare with.
    """
    net = build("fp32", ())
    layers = [(layer.name, layer.type) for layer in net.layers]
    names = [name for name, _ in layers]
    scale = 1.0
    truth = _results(net, inputs, scale)
    if not math.isfinite(_size(truth)):
        raise StallscopeError(
            "in float32 already the loss or a gradient is not finite: nothing can be compared with it",
            expected="finite numbers",
            found=f"loss {truth[0]:g}",
            hint="gpu.crosscheck without --precision names the first layer with NaN or infinity; other weights",
        )
    scale = _loss_scale(net)
    rows: list[dict[str, Any]] = []
    for name, kind in layers:
        half = build("fp16", [other for other in names if other != name])
        change = _change(_results(half, inputs, scale), truth)
        rows.append({"layer": name, "type": kind, **change, **_counts(half)})
    rows.sort(key=lambda row: -_damage(row))
    for row in rows:
        row["sensitive"] = _damage(row) > tolerance
    keep = [str(row["layer"]) for row in rows if row["sensitive"]]

    def tried(kept: Sequence[str]) -> dict[str, float]:
        return _change(_results(build("fp16", kept), inputs, scale), truth)

    everything, with_keep = tried([]), tried(keep)
    # Small damage of many layers can add up: the next worst are kept as well until it is enough, or all are.
    for row in rows:
        if _damage(with_keep) <= tolerance:
            break
        if row["layer"] not in keep:
            keep.append(str(row["layer"]))
            with_keep = tried(keep)
    return {
        "loss": truth[0],
        "loss_scale": scale,
        "tolerance": tolerance,
        "layers": rows,
        "all_fp16": everything,
        "with_keep": with_keep,
        "keep_fp32": [name for name in names if name in keep],
        "enough": _damage(with_keep) <= tolerance,
    }


def _results(net: Net, inputs: Mapping[str, np.ndarray], scale: float) -> tuple[float, list[np.ndarray]]:
    """Loss (or the outputs' sum of squares, where there is none) and the gradients of all parameters, unscaled."""
    with still(net.layers), np.errstate(over="ignore", invalid="ignore"):
        net.iteration = 0
        outputs = net.forward(**inputs)
        loss = float(net.loss)
        if not loss:
            loss = float(sum(np.square(np.asarray(array, np.float64)).sum() for array in outputs.values()))
        gradients = []
        if net.learnable and has_backward(net):
            net.loss_scale = scale
            net.clear_param_diffs()
            net.backward_only()
            gradients = [np.asarray(param.blob.diff, np.float64) / scale for param in net.learnable]
        net.iteration = 0
    return loss, gradients


def _loss_scale(net: Net) -> float:
    """The power of two that brings the largest gradient of any blob near, not too near, float16's largest value."""
    largest = 0.0
    if net.phase == "TRAIN":
        for node in net._graph.nodes:
            for top in node.tops:
                if top.gradient:
                    largest = max(largest, float(np.abs(net.blobs[top.name].diff).max(initial=0)))
    if not largest or not math.isfinite(largest):
        return 1.0
    return min(_MOST_SCALE, 2.0 ** math.floor(math.log2(_LARGEST / _HEADROOM / largest)))


def _change(found: tuple[float, list[np.ndarray]], truth: tuple[float, list[np.ndarray]]) -> dict[str, float]:
    loss = abs(found[0] - truth[0]) / abs(truth[0]) if truth[0] else abs(found[0])
    apart = math.sqrt(sum(float(np.square(a - b).sum()) for a, b in zip(found[1], truth[1], strict=True)))
    whole = math.sqrt(sum(float(np.square(b).sum()) for b in truth[1]))
    return {"loss": loss, "gradient": apart / whole if whole else apart}


def _size(results: tuple[float, list[np.ndarray]]) -> float:
    """Loss and gradients as one number, which is not finite where any of theirs is not."""
    return abs(results[0]) + sum(float(np.abs(array).sum()) for array in results[1])


def _damage(change: Mapping[str, Any]) -> float:
    """The larger of the two changes; infinite where either is no number."""
    both = float(change["loss"]), float(change["gradient"])
    return max(both) if all(math.isfinite(value) for value in both) else math.inf


def _counts(net: Net) -> dict[str, int]:
    """Values that did not fit float16 in the last pass."""
    overflow = lost = 0
    if net.precision is not None:
        for row in net.precision.counts():
            overflow, lost = overflow + int(row[0]), lost + int(row[1])
    return {"overflow": overflow, "lost": lost}


def render(document: Mapping[str, Any], console: Console) -> None:
    """Show the layers by damage, and the line for the configuration."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="float16 storage in one layer at a time", title_justify="left", box=None, pad_edge=False)
    for name in ("layer", "type", "gradient", "loss", "overflow", "lost", ""):
        table.add_column(name, justify="left" if name in ("layer", "type", "") else "right", overflow="fold")
    for row in document["layers"]:
        keep = "[yellow]keep in fp32[/yellow]" if row["layer"] in document["keep_fp32"] else ""
        cells = (_text(row["gradient"]), _text(row["loss"]), f"{row['overflow']:,}", f"{row['lost']:,}")
        table.add_row(escape(row["layer"]), escape(row["type"]), *cells, keep)
    console.print(table)
    for title, key in (("all in fp16", "all_fp16"), ("with the proposal", "with_keep")):
        change = document[key]
        console.print(f"{title}: gradient {_text(change['gradient'])}, loss {_text(change['loss'])}", highlight=False)
    console.print(f"loss scale {document['loss_scale']:g}", highlight=False)
    line = f"device: {{precision: fp16, keep_fp32: [{', '.join(document['keep_fp32'])}]}}"
    console.print(line, highlight=False, markup=False)


def _text(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "infinite"
