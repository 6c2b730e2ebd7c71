"""When each array of a net is in use: the graph's passes as one row of times, and what every layer declares to read.

Times 0 .. n-1 are the forward passes of the n layers, n is the start of backward (losses set their gradients), and from
n+1 on come the backward passes in their order. A buffer's bytes are its own from its first write to its last read;
inputs, outputs and losses keep theirs, because somebody outside reads or writes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu.layers.base import Shape
from gpu.layers.source import Source
from gpu.memory import Interval, Request
from gpu.wiring import Graph, Node, Value

if TYPE_CHECKING:
    from gpu.precision import Precision


@dataclass(frozen=True)
class Lifetimes:
    """``requests`` in a fixed order; the other fields say whose they are, by index into it."""

    requests: list[Request]
    times: list[str]
    data: dict[Value, int]
    diff: dict[Value, int]
    work: dict[Node, int]
    casts: dict[tuple[Node, bool], int]
    """Work space of a layer's casts, by (layer, whether backward)."""
    adding: dict[Node, list[int]]
    """One work space for each bottom whose gradient is added."""
    sums: dict[Node, list[int]]
    """One work space for each parameter of the layer."""


def lifetimes(graph: Graph, backward: bool, work: Mapping[str, int], precision: Precision | None = None) -> Lifetimes:
    """What a net asks for. ``backward``: with gradients. ``work``: float32 values of work space by layer name.

    ``precision``: what is stored in float16.
    """
    nodes = graph.nodes
    back = [node for node in reversed(nodes) if node.backward] if backward else []
    start = len(nodes)
    forward_at = {node: i for i, node in enumerate(nodes)}
    backward_at = {node: start + 1 + i for i, node in enumerate(back)}
    times = [f"forward {node.layer.name}" for node in nodes]
    times += ["backward"] * backward + [f"backward {node.layer.name}" for node in back]
    whole = ((0, max(0, len(times) - 1)),)
    made = Lifetimes([], times, {}, {}, {}, {}, {}, {})
    groups: dict[Value, list[Value]] = {}
    for node in nodes:
        for top in node.tops:
            groups.setdefault(top.home, []).append(top)
    kept = {graph.latest[name].home for name in graph.outputs}

    def ask(name: str, kind: str, shape: Shape, live: tuple[Interval, ...], pinned: bool = False, size: int = 4) -> int:
        made.requests.append(Request(name, kind, size * math.prod(shape), live, pinned, size))
        return len(made.requests) - 1

    def stored(home: Value) -> int:
        return 2 if precision is not None and precision.is_half(home) else 4

    names = _names(groups)
    for home, values in groups.items():
        pinned = home in kept or any(v.loss_weight or isinstance(v.producer.layer, Source) for v in values)
        uses = _data_uses(values, forward_at, backward_at)
        live = whole if pinned else ((min(uses), max(uses)),)
        made.data[home] = ask(names[home], "data", home.shape, live, pinned, stored(home))
    if backward:
        zeroed = {value.home for value in graph.zeroed}
        for home, values in groups.items():
            uses = _diff_uses(values, start, home in zeroed, backward_at)
            if not uses:
                continue
            # An output's gradient is the caller's to give, an input's is the caller's to read.
            pinned = home in kept or any(isinstance(v.producer.layer, Source) for v in values)
            live = whole if pinned else ((min(uses), max(uses)),)
            made.diff[home] = ask(names[home] + ".diff", "diff", home.shape, live, pinned, stored(home))
    for node in nodes:
        own = tuple((at[node], at[node]) for at in (forward_at, backward_at) if node in at)
        if count := work.get(node.layer.name, 0):
            made.work[node] = ask(f"{node.layer.name} work", "work", (count,), own)
        for at in (forward_at, backward_at):
            if precision is not None and node in at and (nbytes := precision.cast_bytes(node, at is backward_at)):
                now = ((at[node], at[node]),)
                made.casts[node, at is backward_at] = ask(f"{node.layer.name} cast", "cast", (nbytes // 4,), now)
    for node in back:
        now = ((backward_at[node], backward_at[node]),)
        made.adding[node] = [
            ask(f"{node.layer.name} to {bottom.name}.diff", "sum", bottom.shape, now)
            for bottom, adds in zip(node.bottoms, node.adds, strict=True)
            if adds
        ]
        made.sums[node] = [
            ask(f"{node.layer.name}.{i} sum", "sum", wanted.shape, now)
            for i, wanted in enumerate(node.layer.param_shapes)
        ]
    return made


def _names(groups: Mapping[Value, Sequence[Value]]) -> dict[Value, str]:
    """The blob's name for the memory it ends in; values that later ones of that name replaced name their layer too."""
    last = {value.name: home for home, values in groups.items() for value in values}
    return {
        home: home.name if last[home.name] is home else f"{home.name} of {home.producer.layer.name}" for home in groups
    }


def _data_uses(values: Sequence[Value], forward_at: Mapping[Node, int], backward_at: Mapping[Node, int]) -> list[int]:
    uses = []
    for value in values:
        uses.append(forward_at[value.producer])
        uses += [forward_at[node] for node in value.consumers]
        uses += [backward_at[node] for node in value.consumers if node in backward_at and node.layer.reads_bottom()]
        if value.producer in backward_at and value.producer.layer.reads_top():
            uses.append(backward_at[value.producer])
    return uses


def _diff_uses(values: Sequence[Value], start: int, zeroed: bool, backward_at: Mapping[Node, int]) -> list[int]:
    uses = [start] if zeroed or any(value.loss_weight for value in values) else []
    for value in values:
        for node in value.consumers:
            if any(b is value and p for b, p in zip(node.bottoms, node.propagate, strict=True)):
                uses.append(backward_at[node])
        if value.producer in backward_at:
            uses.append(backward_at[value.producer])
    return uses
