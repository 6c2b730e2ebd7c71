"""From a list of layers to a graph of values: who reads what, what has a gradient, which blobs may share memory.

A blob name stands for a row of values: each layer that works in place makes a new one. That keeps the arithmetic of an
in-place net equal to that of the same net written out of place; memory is shared only where nobody can notice.
"""

from __future__ import annotations

import difflib
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu.layers.base import REGISTRY, Layer, Shape
from gpu.layers.source import Source
from gpu.prototxt import FilteredNet, PrototxtError


class Value:
    """What one top of one layer holds.

    Nodes hold values and not the other way round: in a circle a net that nobody has any more would keep its layers,
    and their parameters, until Python's collector comes by.
    """

    def __init__(self, name: str, shape: Shape, producer: Node, loss_weight: float = 0.0) -> None:
        self.name, self.shape, self.loss_weight = name, shape, loss_weight
        self.gradient = False
        self._producer = weakref.ref(producer)
        self._consumers: list[weakref.ref[Node]] = []
        self._home: Value | None = None

    @property
    def producer(self) -> Node:
        """The layer that writes it."""
        return _alive(self._producer)

    @property
    def consumers(self) -> list[Node]:
        """The layers that read it, in their order; a layer that reads it twice is there twice."""
        return [_alive(node) for node in self._consumers]

    def add_consumer(self, node: Node) -> None:
        """Enter a layer that reads it."""
        self._consumers.append(weakref.ref(node))

    @property
    def home(self) -> Value:
        """The value whose memory it lives in, itself unless it was written in place."""
        return self._home or self

    @home.setter
    def home(self, value: Value) -> None:
        self._home = None if value is self else value


def _alive(node: weakref.ref[Node]) -> Node:
    found = node()
    assert found is not None  # whoever asks has the graph, which has them all
    return found


@dataclass(eq=False)
class Node:
    """One layer in the graph.

    ``propagate``: which bottoms get a gradient from it. ``adds``: of those, which are added to what later layers have
    already written. ``param_gradients``: which parameters get one. ``backward``: whether it takes part in backward.
    """

    layer: Layer
    bottoms: list[Value]
    tops: list[Value] = field(default_factory=list)
    in_place: list[bool] = field(default_factory=list)
    propagate: list[bool] = field(default_factory=list)
    adds: list[bool] = field(default_factory=list)
    param_gradients: list[bool] = field(default_factory=list)
    backward: bool = False


@dataclass(frozen=True)
class Graph:
    """``latest``: the value each blob name stands for in the end (for inputs: in the beginning)."""

    nodes: list[Node]
    latest: dict[str, Value]
    inputs: list[str]
    outputs: list[str]
    zeroed: list[Value]
    """Values with a gradient that no layer contributes to."""
    following: set[Node]
    """Layers with sizes that depend on values: those that ``vary`` and all that hang on them."""


def wire(filtered: FilteredNet, build: Callable[[Any], Layer]) -> Graph:
    """Build the layers in order, connect them, and plan the backward pass.

    Raises PrototxtError for blobs that do not exist or are written twice, and whatever the layers raise.
    """
    nodes: list[Node] = []
    latest: dict[str, Value] = {}
    names: set[str] = set()
    for spec in filtered.net.layer:
        if spec.name in names:
            raise PrototxtError(f"two layers are named {spec.name!r} in phase {filtered.phase}")
        names.add(spec.name)
        bottoms = []
        for name in spec.bottom:
            if name not in latest:
                raise _unknown(name, spec, filtered, latest)
            bottoms.append(latest[name])
        cls = REGISTRY[spec.type]
        if cls.loss and not spec.top:
            spec.top.append(spec.name)  # old texts leave the top of a loss out
        check_count(spec, "bottom", len(spec.bottom), cls.n_bottoms)
        check_count(spec, "top", len(spec.top), cls.n_tops)
        layer = build(spec)
        node = Node(layer, bottoms)
        for bottom in bottoms:
            bottom.add_consumer(node)
        _add_tops(node, layer.shapes([bottom.shape for bottom in bottoms]), latest)
        nodes.append(node)
    force = filtered.net.force_backward
    _find_gradients(nodes, force)
    zeroed = _plan_sums(nodes)
    for node in nodes:
        _share(node)
    inputs = [top.name for node in nodes if _is_input(node) for top in node.tops]
    outputs = [
        name for name, value in latest.items() if not value.consumers and not isinstance(value.producer.layer, Source)
    ]
    faces = dict(latest)
    for node in nodes:
        if isinstance(node.layer, Source):
            # What the caller writes is never overwritten, so its name keeps standing for it.
            faces.update({top.name: top for top in node.tops})
    return Graph(nodes, faces, inputs, outputs, zeroed, _following(nodes))


def reshape(graph: Graph) -> None:
    """Work all shapes out anew, from those that the input layers give now. Parameters must keep theirs.

    Raises what the layers raise, and LayerError naming the layer whose parameters or in-place output would not fit;
    the graph is then partly changed, and another call with the old inputs puts it right.
    """
    for node in graph.nodes:
        _reshape(node)


def follow(node: Node, chosen: Sequence[Shape] | None) -> None:
    """Shape one layer for what its inputs are in this pass; they may have no rows. Raises as :func:`reshape` does.

    ``chosen``: the shapes that a layer that ``varies`` gives its tops in this pass.
    """
    _reshape(node, may_be_empty=True)
    for top, shape in zip(node.tops, chosen or (), strict=False):
        top.shape = shape


def idle(node: Node) -> bool:
    """Whether a layer has no rows to work on: a layer before it chose none."""
    if node.layer.takes_empty:
        return False
    return any(0 in bottom.shape for bottom in node.bottoms) or any(0 in top.shape for top in node.tops)


def _following(nodes: Sequence[Node]) -> set[Node]:
    found: set[Node] = set()
    for node in nodes:
        if node.layer.varies or any(bottom.producer in found for bottom in node.bottoms):
            found.add(node)
    return found


def _reshape(node: Node, may_be_empty: bool = False) -> None:
    layer = node.layer
    before = [wanted.shape for wanted in layer.param_shapes]
    shapes = layer.shapes([bottom.shape for bottom in node.bottoms])
    after = [wanted.shape for wanted in layer.param_shapes]
    if before != after:
        raise layer.error(
            "its parameters cannot follow the size of its input",
            expected=f"parameters {before}",
            found=f"{after} for inputs {[bottom.shape for bottom in node.bottoms]}",
            hint="a layer before it must give one size: global_pooling, SPP, or a crop of the images",
        )
    for i, (top, shape) in enumerate(zip(node.tops, shapes, strict=True)):
        _check_top(node, i, top.name, shape, may_be_empty)
        top.shape = shape


def _is_input(node: Node) -> bool:
    return isinstance(node.layer, Source) and node.layer.type != "DummyData"


def check_count(spec: Any, what: str, count: int, allowed: tuple[int, float]) -> None:
    low, high = allowed
    if not low <= count <= high:
        text = str(low) if low == high else f"{low} or more" if math.isinf(high) else f"{low} to {int(high)}"
        raise PrototxtError(
            f"layer {spec.name!r} ({spec.type}) has a wrong number of {what}s", expected=text, found=count
        )


def _unknown(name: str, spec: Any, filtered: FilteredNet, latest: dict[str, Value]) -> PrototxtError:
    makers = [(layer, reason) for layer, tops, reason in filtered.excluded if name in tops]
    reader = f"layer {spec.name!r} ({spec.type}) reads it"
    if makers:
        layer, reason = makers[0]
        return PrototxtError(
            f"blob {name!r} is produced by layer {layer!r}, which is excluded in {filtered.phase} because {reason}",
            found=reader,
            hint="give both layers the same rules, or pass the stage",
        )
    later = [layer.name for layer in filtered.net.layer if name in layer.top]
    if later:
        return PrototxtError(
            f"blob {name!r} is read before it is produced", found=f"{reader}; layer {later[0]!r} comes later"
        )
    near = difflib.get_close_matches(name, latest, n=1)
    return PrototxtError(
        f"no layer produces blob {name!r}", found=reader, hint=f"did you mean {near[0]!r}?" if near else None
    )


def _add_tops(node: Node, shapes: list[Shape], latest: dict[str, Value]) -> None:
    spec, layer = node.layer.spec, node.layer
    weights = list(spec.loss_weight)
    if weights and len(weights) != len(spec.top):
        raise layer.error("loss_weight must be given once per top", expected=len(spec.top), found=len(weights))
    for i, (name, shape) in enumerate(zip(spec.top, shapes, strict=True)):
        in_place = _check_top(node, i, name, shape)
        if not in_place and name in latest:
            raise PrototxtError(
                f"blob {name!r} is produced twice",
                found=f"layers {latest[name].producer.layer.name!r} and {spec.name!r}",
            )
        weight = weights[i] if weights else float(layer.loss and i == 0)
        if weight and not layer.differentiable:
            raise layer.error(f"loss_weight on {name!r}: this type has no gradient", found=weight)
        latest[name] = Value(name, shape, node, weight)
        node.tops.append(latest[name])
        node.in_place.append(in_place)


def _check_top(node: Node, i: int, name: str, shape: Shape, may_be_empty: bool = False) -> bool:
    """Whether top ``i`` is written over its input; LayerError where it is empty, or may not be."""
    spec, layer = node.layer.spec, node.layer
    if any(size < (0 if may_be_empty else 1) for size in shape):
        raise layer.error(f"top {name!r} would be empty", found=shape)
    in_place = i < len(spec.bottom) and spec.bottom[i] == name
    if in_place and (not layer.in_place or shape != node.bottoms[i].shape):
        raise layer.error(
            f"cannot write its output over its input {name!r}",
            expected=f"another top than its bottom, of shape {shape}",
            found=f"bottom and top are both {name!r}, bottom shape {node.bottoms[i].shape}",
        )
    return in_place


def _find_gradients(nodes: list[Node], force: bool) -> None:
    """Which layers take part in backward, and which blobs get a gradient (Caffe's rules for both)."""
    under_loss: set[Value] = set()
    useful: set[Node] = set()
    for node in reversed(nodes):
        layer, given = node.layer, list(node.layer.spec.propagate_down)
        if given and len(given) != len(node.bottoms):
            raise layer.error("propagate_down must be given once per bottom", expected=len(node.bottoms), found=given)
        if layer.differentiable and (force or any(top.loss_weight or top in under_loss for top in node.tops)):
            useful.add(node)
            open_to = given or [True] * len(node.bottoms)
            under_loss.update(
                bottom for i, bottom in enumerate(node.bottoms) if open_to[i] and layer.allows_gradient(i)
            )
    for node in nodes:
        layer, spec = node.layer, node.layer.spec
        wanted = list(spec.propagate_down) or [bottom.gradient for bottom in node.bottoms]
        wanted = [want and layer.allows_gradient(i) for i, want in enumerate(wanted)]
        count = len(layer.param_shapes)
        if len(spec.param) > count:
            raise layer.error(
                f"has {len(spec.param)} param entries", expected=f"at most {count}", found=len(spec.param)
            )
        node.param_gradients = [
            layer.learned and (force or i >= len(spec.param) or spec.param[i].lr_mult != 0) for i in range(count)
        ]
        source = isinstance(layer, Source)
        node.backward = not source and node in useful and (any(wanted) or any(node.param_gradients))
        node.propagate = [want and node.backward for want in wanted]
        for bottom, propagates in zip(node.bottoms, node.propagate, strict=True):
            bottom.gradient = bottom.gradient or propagates
        for top in node.tops:
            top.gradient = node.backward or (source and force)


def _plan_sums(nodes: list[Node]) -> list[Value]:
    """A value read by several layers gets the sum of their gradients: the first in backward writes, the others add."""
    written = {top for node in nodes for top in node.tops if top.loss_weight}
    for node in reversed(nodes):
        node.adds = []
        for bottom, propagates in zip(node.bottoms, node.propagate, strict=True):
            node.adds.append(propagates and bottom in written)
            if propagates:
                written.add(bottom)
    tops = [top for node in nodes for top in node.tops]
    return [top for top in tops if top.gradient and top.consumers and top not in written]


def _share(node: Node) -> None:
    """Let a value written in place live where its input lives, if nobody needs the input afterwards."""
    for bottom, top, in_place in zip(node.bottoms, node.tops, node.in_place, strict=False):
        producer = bottom.producer
        if (
            in_place
            and len(bottom.consumers) == 1
            and not bottom.loss_weight
            and not isinstance(producer.layer, Source)
            and not (producer.backward and producer.layer.reads_top())
            and not (node.backward and node.layer.reads_bottom())
        ):
            top.home = bottom.home
