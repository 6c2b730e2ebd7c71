"""Two backends against float64, layer by layer: the arithmetic of :mod:`gpu.crosscheck`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gpu.backend import Backend
from gpu.error_bounds import (
    UNIT,
    Distance,
    Lengths,
    bound,
    distance,
    largest,
    lengths,
    representable,
    shift,
    smooth,
)
from gpu.isolated import Double, Outcome, Work, perturbed, run, run_double
from gpu.layers.base import Layer, Shape
from gpu.layers.source import Source
from gpu.net import Net
from gpu.probe import bare_graph, still, watching
from gpu.prototxt import FilteredNet
from gpu.wiring import Node, Value

ROUNDING, BEYOND, BUG = "rounding", "beyond", "bug"
MODES = ("isolated", "in net", "cumulative")
_ORDER = (ROUNDING, BEYOND, BUG)


@dataclass(frozen=True)
class Tensor:
    """One result of one layer on one side against float64. ``bound``: L2.

    ``mode``: isolated (fed with the same arrays on all sides), in net (what it did in the whole net, held to float64 of
    what the layers before it wrote there) or cumulative (the whole net against the whole net in float64). ``verdict``:
    bug, of the first two; beyond, of the last: further off than rounding takes it unless some choice fell otherwise.
    """

    side: str
    mode: str
    name: str
    distance: Distance
    bound: float
    verdict: str
    finite: bool = True
    """Whether float32 can hold all that float64 computed."""

    @property
    def share(self) -> float:
        """Distance as a share of the bound."""
        return self.distance.l2 / self.bound if self.bound else (math.inf if self.distance.l2 else 0.0)


@dataclass
class Checked:
    """A layer with all its results. ``terms``: of its sums. ``problem``: what kept it from running on a side."""

    layer: str
    type: str
    terms: Lengths
    tensors: list[Tensor] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)

    def verdict(self, mode: str, side: str | None = None) -> str:
        """The worst of its results."""
        if any(side in (None, where) for where in self.problems):
            return BUG
        of_mode = (t.verdict for t in self.tensors if t.mode == mode and side in (None, t.side))
        return max(of_mode, key=_ORDER.index, default=ROUNDING)


@np.errstate(divide="ignore", over="ignore", invalid="ignore")
def check_layers(
    filtered: FilteredNet,
    nets: Mapping[str, Net],
    inputs: Mapping[str, np.ndarray],
    shapes: Mapping[str, Shape],
    seed: int,
) -> list[Checked]:
    """Compare the nets, one for each side, with float64: layers one by one and all together.

    Parameters
    ----------
    filtered, shapes, seed: what the nets were made from. nets: with equal parameters. inputs: by blob name.
    """
    first = next(iter(nets.values()))
    params = {name: [blob.data for blob in blobs] for name, blobs in first.params.items()}
    for net in nets.values():
        _settle(net, inputs)
    diffs = _output_diffs(first, seed)

    def double(rounded: bool) -> list[tuple[Node, Work]]:
        return list(Double(bare_graph(filtered, shapes, seed), params).works(dict(inputs), diffs, rounded=rounded))

    exact = double(rounded=False)
    works = double(rounded=True)
    _hold_choices(nets, (exact, works))
    rng = np.random.default_rng(seed)
    checked: list[Checked] = []
    shifts: list[dict[str, float]] = []  # of a whole net no second set of arrays is kept
    for i, (node, work) in enumerate(works):
        into = Checked(node.layer.name, node.layer.type, lengths(node))
        wanted = run_double(node, work)
        shifts.append(_shifts(node, work, wanted, rng))
        for side, net in nets.items():
            _isolated(side, net, net.layers[i], work, wanted, shifts[i], into)
        checked.append(into)
    for side, net in nets.items():
        if any(side in each.problems for each in checked):
            continue  # a net with such a layer has no whole pass
        seen = _whole_pass(net, inputs, diffs)
        _in_net(side, seen, inputs, diffs, works, shifts, checked)
        _cumulative(side, seen, works, exact, checked)
    return checked


def _settle(net: Net, inputs: Mapping[str, np.ndarray]) -> None:
    """Where sizes depend on values: one pass, so that the net has those of this batch."""
    if any(layer.varies for layer in net.layers):
        with still(net.layers):
            net.forward_only(**inputs)
        net.iteration = 0


def _hold_choices(nets: Mapping[str, Net], doubles: Sequence[Sequence[tuple[Node, Work]]]) -> None:
    """Layers that choose rows have to choose equally many everywhere, or there is nothing to compare behind them."""
    for side, net in nets.items():
        for works in doubles:
            for own, (_, work) in zip(net._graph.nodes, works, strict=True):
                found, wanted = [top.shape for top in own.tops], [array.shape for array in work.tops]
                if own.layer.varies and found != wanted:
                    raise own.layer.error(
                        f"chose other rows on {side} than in float64: nothing behind it can be compared",
                        expected=wanted,
                        found=found,
                        hint="its selector lies within rounding of 0 somewhere: another --seed",
                    )


def _output_diffs(net: Net, seed: int) -> dict[str, np.ndarray]:
    """Gradients to start from at outputs without a loss, as a caller would give them."""
    rng = np.random.default_rng([seed, 1])
    found = {}
    for name in net.outputs:
        value = net._graph.latest[name]
        if not value.loss_weight and value.gradient:
            found[name] = rng.standard_normal(value.shape).astype(np.float32)
    return found


def _shifts(node: Node, work: Work, wanted: Outcome, rng: np.random.Generator) -> dict[str, float]:
    """How far each result of a layer moves when its inputs do by one rounding; empty where that tells nothing."""
    if isinstance(node.layer, Source) or not smooth(node):
        return {}
    moved = perturbed(node, work, UNIT, rng)
    pairs = ((wanted.forward, moved.forward), (wanted.backward, moved.backward))
    return {
        name: shift(there[name], array)
        for here, there in pairs
        for name, array in here.items()
        if name in there and there[name].shape == array.shape
    }


def _isolated(
    side: str, net: Net, layer: Layer, work: Work, wanted: Outcome, shifts: Mapping[str, float], into: Checked
) -> None:
    if isinstance(layer, Source):
        return
    try:
        found = run(layer, work, _to_device(net.backend), net.backend.to_numpy)
    except Exception as error:  # a backend that fails in one layer is what this tool is for
        into.problems[side] = f"{type(error).__name__}: {error}"
        return
    _hold(side, "isolated", into, found, wanted, shifts)


def _hold(side: str, mode: str, into: Checked, found: Outcome, wanted: Outcome, shifts: Mapping[str, float]) -> None:
    """Compare what was found with what is wanted."""
    have = {**found.forward, **found.backward}
    for name, want in {**wanted.forward, **wanted.backward}.items():
        if name not in have:
            continue
        allowed = bound(want, shifts.get(name, 0.0), into.terms.of(name))
        held = representable(want, have[name])
        apart = distance(have[name], held)
        verdict = ROUNDING if apart.l2 <= allowed else BUG
        into.tensors.append(Tensor(side, mode, name, apart, allowed, verdict, bool(np.isfinite(held).all())))


def _in_net(
    side: str,
    seen: Mapping[str, Outcome],
    inputs: Mapping[str, np.ndarray],
    diffs: Mapping[str, np.ndarray],
    works: Sequence[tuple[Node, Work]],
    shifts: Sequence[Mapping[str, float]],
    checked: Sequence[Checked],
) -> None:
    """Hold each layer of the whole pass to float64 of what the layers before it wrote, as they wrote it.

    What is damaged in between (memory shared by mistake, a value written over too early) shows at the layer reading it.
    """
    values: dict[Value, np.ndarray] = {}
    for node, _ in works:
        for i, top in enumerate(node.tops):
            given = inputs.get(top.name) if isinstance(node.layer, Source) else None
            wrote = seen[node.layer.name].forward[f"top {i}"]
            values[top] = wrote if given is None else np.asarray(given, np.float64)
    gradients = {top: Double.seed(top, dict(diffs)) for node, _ in works for top in node.tops}
    for node, work in reversed(works):
        for i, bottom in enumerate(node.bottoms):
            part = seen[node.layer.name].backward.get(f"bottom {i} gradient")
            if part is not None and work.wants[i]:
                gradients[bottom] = gradients[bottom] + part
    for (node, work), by, into in zip(works, shifts, checked, strict=True):
        if isinstance(node.layer, Source):
            continue
        there = replace(
            work,
            bottoms=[values[bottom] for bottom in node.bottoms],
            tops=[values[top] for top in node.tops],
            top_diffs=[gradients[top] for top in node.tops],
        )
        _hold(side, "in net", into, seen[node.layer.name], run_double(node, there), by)


def _cumulative(
    side: str,
    seen: Mapping[str, Outcome],
    works: Sequence[tuple[Node, Work]],
    exact: Sequence[tuple[Node, Work]],
    checked: Sequence[Checked],
) -> None:
    """Compare what one whole pass left with the exact pass; bounds come from the pass that rounds between layers."""
    everything = largest([each.terms for each in checked])
    for i, ((node, rounded), (_, pure), into) in enumerate(zip(works, exact, checked, strict=True)):
        if isinstance(node.layer, Source) or node.layer.name not in seen:
            continue
        so_far = max((max(each.terms.forward, 1) for each in checked[: i + 1]), default=1)
        found = seen[node.layer.name]
        for part, kind, terms, pures, rounds in (
            ("forward", "top {}", so_far, pure.tops, rounded.tops),
            ("backward", "top {} gradient", everything, pure.top_diffs if pure.backward else [], rounded.top_diffs),
            ("backward", "parameter {} gradient", everything, pure.param_diffs, rounded.param_diffs),
        ):
            for j, (want, other) in enumerate(zip(pures, rounds, strict=False)):
                got = getattr(found, part).get(kind.format(j))
                if got is None or want is None or other is None:
                    continue
                apart = distance(got, representable(want, got))
                allowed = bound(want, shift(other, want), terms)
                verdict = ROUNDING if apart.l2 <= allowed else BEYOND
                into.tensors.append(Tensor(side, "cumulative", kind.format(j), apart, allowed, verdict))


def _whole_pass(net: Net, inputs: Mapping[str, np.ndarray], diffs: Mapping[str, np.ndarray]) -> dict[str, Outcome]:
    """One pass through the net as it is used, in place and in its planned memory; what layers wrote and were given."""
    seen: dict[str, Outcome] = {}
    with still(net.layers), watching(net, lambda layer, part, arrays: _keep(net, seen, layer, part, arrays)):
        net.forward_only(**inputs)
        if any(node.backward for node in net._graph.nodes):
            net.clear_param_diffs()
            net.backward_only(**diffs)
    net.iteration = 0
    return seen


def _keep(net: Net, seen: dict[str, Outcome], layer: Layer, part: str, arrays: Sequence[Any]) -> None:
    outcome = seen.setdefault(layer.name, Outcome())
    for i, array in enumerate(arrays):
        if array is None:
            continue
        whole = np.array(net.backend.to_numpy(array), np.float64)
        if part == "top":
            outcome.forward[f"top {i}"] = whole
        else:
            outcome.backward[f"{part.split()[0]} {i} gradient"] = whole


def _to_device(backend: Backend) -> Callable[[np.ndarray], Any]:
    xp = backend.xp
    return lambda values: xp.array(values, np.float32)


def overall(checked: Sequence[Checked]) -> str:
    """The worst verdict of all."""
    verdicts = [each.verdict(mode) for each in checked for mode in MODES]
    return max(verdicts, key=_ORDER.index, default=ROUNDING)
