"""A net of one phase as rules see it: who makes and who reads each value, without shapes and without arrays.

A blob name stands for a row of values, as in :mod:`gpu.wiring`; but nothing here raises, since nets with mistakes are
what there is to look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gpu.layers import registry
from gpu.layers.base import Layer
from gpu.layers.source import Source
from gpu.prototxt import FilteredNet

METRICS = ("Accuracy", "ArgMax")
SAME_CHANNELS = (
    *("AbsVal", "BNLL", "BatchNorm", "Bias", "Clip", "Dropout", "ELU", "Exp", "LRN", "Log", "MVN", "PReLU", "Pooling"),
    *("Power", "ReLU", "Scale", "Sigmoid", "Softmax", "Split", "Swish", "TanH"),
)
"""Types whose (first) top has as many channels as their bottom."""


@dataclass(eq=False)
class Value:
    """One top of one layer, until the next layer that writes over it. ``index``: its place among the tops."""

    name: str
    producer: Node
    index: int
    readers: list[Node] = field(default_factory=list)

    @property
    def written_over(self) -> Node | None:
        """The layer that works on it in place."""
        return next((node for node in self.readers if node.in_place(self)), None)


@dataclass(eq=False)
class Node:
    """A layer. ``bottoms``: None where nothing makes the blob. ``layer``: made from it, or None where that failed."""

    spec: Any
    cls: type[Layer] | None
    bottoms: list[Value | None] = field(default_factory=list)
    tops: list[Value] = field(default_factory=list)
    layer: Layer | None = None

    @property
    def name(self) -> str:
        return str(self.spec.name)

    @property
    def type(self) -> str:
        return str(self.spec.type)

    @property
    def is_source(self) -> bool:
        return self.cls is not None and issubclass(self.cls, Source)

    def in_place(self, value: Value) -> bool:
        """Whether it writes its top over this bottom."""
        pairs = zip(self.bottoms, self.spec.bottom, self.spec.top, strict=False)
        return any(bottom is value and name == top for bottom, name, top in pairs)

    def learns(self, index: int) -> bool:
        """Whether parameter ``index`` is trained (``lr_mult`` is 1 where the text is silent)."""
        if self.cls is not None and not self.cls.learned:
            return False
        return index >= len(self.spec.param) or self.spec.param[index].lr_mult != 0

    def loss_weight(self, index: int) -> float:
        """Weight of top ``index`` in the loss."""
        given = list(self.spec.loss_weight)
        if index < len(given):
            return float(given[index])
        return float(self.cls is not None and self.cls.loss and index == 0 and not given)


@dataclass
class View:
    """``missing``: (layer, blob) read and not made; ``twice``: (layer, blob) made again and not in place."""

    filtered: FilteredNet
    nodes: list[Node]
    missing: list[tuple[Node, str]]
    twice: list[tuple[Node, str]]

    @property
    def phase(self) -> str:
        return self.filtered.phase

    @property
    def values(self) -> Iterator[Value]:
        return (top for node in self.nodes for top in node.tops)

    @property
    def is_fed(self) -> bool:
        """Whether there is a layer that brings data in."""
        return any(node.is_source for node in self.nodes)

    def of_type(self, *types: str) -> Iterator[Node]:
        """The layers of these types."""
        return (node for node in self.nodes if node.type in types)

    def under_loss(self) -> set[Value]:
        """Values that a gradient reaches."""
        found: set[Value] = set()
        for node in reversed(self.nodes):
            if node.cls is None or not node.cls.differentiable:
                continue
            if any(node.loss_weight(top.index) or top in found for top in node.tops):
                open_to = list(node.spec.propagate_down) or [True] * len(node.bottoms)
                for i, (bottom, is_open) in enumerate(zip(node.bottoms, open_to, strict=False)):
                    if bottom is not None and is_open and not (node.cls.loss and i > 0 and _is_label(node.type)):
                        found.add(bottom)
        return found

    def upstream(self, node: Node) -> Iterator[Node]:
        """The layers that a layer's values come from, nearest first, itself not included."""
        seen: set[Node] = set()
        row = [node]
        while row:
            for bottom in row.pop(0).bottoms:
                if bottom is not None and bottom.producer not in seen:
                    seen.add(bottom.producer)
                    row.append(bottom.producer)
                    yield bottom.producer

    def classifier(self, node: Node) -> tuple[Node, int] | None:
        """The layer that decides how many scores the first bottom of ``node`` holds, and how many these are."""
        value = node.bottoms[0] if node.bottoms else None
        while value is not None:
            maker = value.producer
            if maker.type == "InnerProduct":
                return maker, int(maker.spec.inner_product_param.num_output)
            if maker.type in ("Convolution", "Deconvolution"):
                return maker, int(maker.spec.convolution_param.num_output)
            if maker.type not in (*SAME_CHANNELS, "Flatten"):
                return None
            value = maker.bottoms[0] if maker.bottoms else None
        return None


def _is_label(kind: str) -> bool:
    return kind not in ("EuclideanLoss", "ContrastiveLoss")


def view(filtered: FilteredNet) -> View:
    """Connect the layers of one phase by name."""
    known = registry()
    found = View(filtered, [], [], [])
    latest: dict[str, Value] = {}
    for spec in filtered.net.layer:
        node = Node(spec, known.get(spec.type))
        for name in spec.bottom:
            value = latest.get(name)
            node.bottoms.append(value)
            if value is None:
                found.missing.append((node, name))
            else:
                value.readers.append(node)
        tops = list(spec.top) or ([spec.name] if node.cls is not None and node.cls.loss else [])
        for i, name in enumerate(tops):
            if name in latest and not (i < len(spec.bottom) and spec.bottom[i] == name):
                found.twice.append((node, name))
            latest[name] = Value(name, node, i)
            node.tops.append(latest[name])
        found.nodes.append(node)
    return found
