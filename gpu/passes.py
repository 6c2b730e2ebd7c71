"""What a net's passes are planned as: each layer with the arrays that it works on, and when sizes change in a pass."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu.blob import Blob
from gpu.layers.base import Array, Context, Layer, Scratch, Shape
from gpu.layout import Layout
from gpu.lifetimes import Lifetimes, lifetimes
from gpu.precision import Precision
from gpu.step import Pass, Step
from gpu.wiring import Graph, Node, Value, follow, idle


class Passes:
    """The plan of a net's forward and backward passes over the blobs that it makes.

    ``backward``: whether gradients have their place in the block; otherwise they are made at the first backward pass.
    ``homes``: the blob of each value that has memory of its own. ``losses``: blobs with their weights.

    A layer that ``varies`` gives its tops other sizes in each pass, as far as values say. Memory is planned for the
    largest; it and what hangs on it are shaped anew, each when its turn comes, where sizes are others than before.
    """

    def __init__(
        self,
        graph: Graph,
        xp: Any,
        layout: Layout,
        contexts: Mapping[str, Context],
        precision: Precision | None,
        backward: bool,
    ) -> None:
        self._graph, self._xp, self._layout, self._contexts = graph, xp, layout, contexts
        self._precision, self.planned_backward = precision, backward
        self._changed: set[Node] = set()
        self.tops: list[Value] = [top for node in graph.nodes for top in node.tops]
        self.homes = {top.home: Blob((), xp, ()) for top in self.tops}
        self.losses = [(self.homes[top.home], top.loss_weight) for top in self.tops if top.loss_weight]
        self.forward: list[Pass] = []
        self.steps: list[Step] | None = None

    def wanted(self) -> Lifetimes:
        """What the net asks of memory, with the shapes of now."""
        work = {name: context.scratch.count for name, context in self._contexts.items()}
        return lifetimes(self._graph, self.planned_backward, work, self._precision)

    def lay_out(self) -> None:
        """Give every array its place in the block, and make the lists of what forward and backward will do."""
        self.forward, self.steps = [], None
        for home, blob in self.homes.items():
            blob.place(home.shape, None, None, None)  # the old block is free before a new one is taken
        for context in self._contexts.values():
            context.scratch.place(None)
        wanted = self._lifetimes = self.wanted()
        self._layout.take(wanted)
        for home in self.homes:
            self._place(home, self._layout.guard(home.name, wanted.data[home], wanted.diff.get(home)))
        self.place_work()
        for node in self._graph.nodes:
            node.layer.allocate()
        if self._precision is not None:
            self._precision.place({key: self._layout.array(index, (-1,)) for key, index in wanted.casts.items()})
        self.forward = [self._first_pass(node) for node in self._graph.nodes]
        self._changed.clear()
        if self.planned_backward:
            self.plan_backward()

    def place_work(self) -> None:
        """Give each layer's work space its place in the block; again after shapes were worked out."""
        for node, index in self._lifetimes.work.items():
            scratch = self._contexts[node.layer.name].scratch
            scratch.place(self._layout.array(index, (scratch.count,)))

    def _place(self, home: Value, guard: Any) -> None:
        data, diff = self._lifetimes.data[home], self._lifetimes.diff.get(home)
        gradient = None if diff is None else self._layout.array(diff, home.shape)
        self.homes[home].place(home.shape, self._layout.array(data, home.shape), gradient, guard)

    def _first_pass(self, node: Node) -> Pass:
        if node in self._graph.following:
            return Following(self, node), self.data(node.bottoms), self.data(node.tops)
        return self.plan(node)

    def plan(self, node: Node) -> Pass:
        """What forward does for a layer with the shapes of now."""
        bottoms, tops = self.data(node.bottoms), self.data(node.tops)
        if idle(node):
            return Idle(node.layer), bottoms, tops
        if self._precision is not None:
            return self._precision.forward(node, bottoms, tops)
        return node.layer, bottoms, tops

    def follow(self, node: Node, chosen: Sequence[Shape] | None) -> Pass:
        """Shape a layer for what its inputs are in this pass; returns what forward does for it."""
        follow(node, chosen)
        for top in node.tops:
            self._place(top.home, self.homes[top.home].guard)
        if not idle(node):
            node.layer.allocate()
        self._changed.add(node)
        return self.plan(node)

    def data(self, values: Sequence[Value]) -> list[Array]:
        """The arrays of these values, as they are stored."""
        return [self.homes[value.home]._data for value in values]

    def backward(self) -> list[Step]:
        """What backward does, after this forward pass."""
        if self.steps is None or self._changed:
            self.plan_backward(set(self._changed) if self.steps is not None else None)
        return self.steps or []

    def plan_backward(self, only: set[Node] | None = None) -> None:
        """Make the list of what backward will do, and gradients and work space where the net's plan had none.

        ``only``: layers whose arrays are others than before.
        """
        nodes = [node for node in reversed(self._graph.nodes) if node.backward]
        if only is None or not self.planned_backward:
            self._adding, self._sums = Scratch(self._xp), Scratch(self._xp)
        if not self.planned_backward:
            for node in nodes:
                self._adding.reserve(*_added(node))
                self._sums.reserve(*[blob.shape for blob in node.layer.blobs])
            only = None
        start = len(self._graph.nodes) + 1
        before = self.steps if only is not None else None
        self.steps = [
            self._step(start + i, node) if before is None or node in (only or ()) else before[i]
            for i, node in enumerate(nodes)
        ]
        self.loss_diffs = [(_diff(blob), weight) for blob, weight in self.losses]
        self.zero_diffs = [_diff(self.homes[value.home]) for value in self._graph.zeroed]
        self._changed.clear()

    def _step(self, time: int, node: Node) -> Step:
        shapes = [blob.shape for blob in node.layer.blobs]
        if self.planned_backward:
            wanted, array = self._lifetimes, self._layout.array
            parts = iter([array(i, shape) for i, shape in zip(wanted.adding[node], _added(node), strict=True)])
            spaces = [array(i, shape) for i, shape in zip(wanted.sums[node], shapes, strict=True)]
        else:
            parts, spaces = iter(self._adding.arrays(*_added(node))), self._sums.arrays(*shapes)
        bottom_diffs: list[Array | None] = []
        sums = []
        for bottom, propagates, adds in zip(node.bottoms, node.propagate, node.adds, strict=True):
            diff = _diff(self.homes[bottom.home]) if propagates else None
            if adds:
                part = next(parts)
                sums.append((diff, part))
                diff = part
            bottom_diffs.append(diff)
        given = list(zip(node.layer.blobs, spaces, node.param_gradients, strict=True))
        step = Step(
            time,
            node.layer,
            self.data(node.bottoms),
            self.data(node.tops),
            [_diff(self.homes[top.home]) for top in node.tops],
            bottom_diffs,
            sums,
            [space if wants else None for _, space, wants in given],
            [(i, blob, space) for i, (blob, space, wants) in enumerate(given) if wants],
        )
        if idle(node):
            step.layer = Idle(node.layer)
        elif self._precision is not None:
            self._precision.backward(node, step)
        return step


class Following:
    """A layer with sizes that depend on values: stands where it does in the plan of forward."""

    def __init__(self, passes: Passes, node: Node) -> None:
        self._passes, self._node, self._layer = weakref.proxy(passes), node, node.layer  # who holds this one
        self.name, self.type = node.layer.name, node.layer.type
        self._plan: Pass = passes.plan(node)
        self._fitted: Any = self._sizes(self._chosen_before())

    def _chosen_before(self) -> list[Shape] | None:
        return [top.shape for top in self._node.tops] if self._layer.varies else None

    def _sizes(self, chosen: list[Shape] | None) -> Any:
        return [bottom.shape for bottom in self._node.bottoms], chosen

    def forward(self, *_: Any) -> None:
        """The arrays are those of the largest sizes: not used."""
        chosen = self._layer.choose(self._passes.data(self._node.bottoms)) if self._layer.varies else None
        sizes = self._sizes(chosen)
        if sizes != self._fitted:
            self._fitted = None  # until it is: shaping may fail
            self._plan = self._passes.follow(self._node, chosen)
            self._fitted = sizes
        run, bottoms, tops = self._plan
        run.forward(bottoms, tops)


@dataclass
class Idle:
    """Stands where a layer without rows does: what it would write is 0."""

    layer: Layer

    def __post_init__(self) -> None:
        self.name, self.type = self.layer.name, self.layer.type

    def forward(self, bottoms: list[Array], tops: list[Array]) -> None:
        for top in tops:
            top[...] = 0

    def backward(self, bottoms: Any, tops: Any, top_diffs: Any, bottom_diffs: Any, param_diffs: Any) -> None:
        for diff in (*bottom_diffs, *param_diffs):
            if diff is not None:
                diff[...] = 0


def _added(node: Node) -> list[Shape]:
    """Shapes of the gradients that a layer adds to those of later ones."""
    return [bottom.shape for bottom, adds in zip(node.bottoms, node.adds, strict=True) if adds]


def _diff(blob: Blob) -> Array:
    """The gradient's array, whosever numbers it holds."""
    return blob.device_diff if blob._diff is None else blob._diff
