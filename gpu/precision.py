"""float16 storage: which arrays of a net are kept in it, and the casts round each layer, which itself stays in float32.

A layer's inputs are cast to float32 work space, its ordinary code runs, and what it wrote is rounded to nearest even
into float16. So arithmetic and sums inside a layer are float32 everywhere (Micikevicius et al., "Mixed Precision
Training", 2018). Parameters and their gradients are float32; the layer sees parameters rounded to float16.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu import half
from gpu.arena import view
from gpu.blob import Blob
from gpu.layers.base import Array, Layer, Shape
from gpu.layers.python import Python
from gpu.layers.source import Source
from gpu.memory import aligned
from gpu.step import Pass, Step
from gpu.wiring import Graph, Node, Value
from profiler.errors import UsageError

NAMES = ("fp32", "fp16")
KINDS = ("weights", "outputs", "gradients")


@dataclass(frozen=True)
class Tensor:
    """What counts belong to. ``kind``: weights, outputs or gradients; ``name``: conv1.0, conv1 or conv1.diff."""

    layer: str
    kind: str
    name: str

    @property
    def phase(self) -> str:
        """The pass in which it is rounded."""
        return "backward" if self.kind == "gradients" else "forward"


@dataclass(frozen=True)
class Loss:
    """What rounding did to one tensor, in values: ``overflow`` finite ones became infinite, ``flushed`` of the
    ``nonzero`` became 0, ``subnormal`` lost some of their digits."""

    tensor: Tensor
    overflow: int
    flushed: int
    subnormal: int
    nonzero: int


def check(precision: str, keep_fp32: Collection[str], layers: Collection[str]) -> None:
    """Raise UsageError for a precision that does not exist, and for layers to be kept that no phase has."""
    if precision not in NAMES:
        raise UsageError(f"unknown precision {precision!r}", expected=" | ".join(NAMES), found=precision)
    unknown = sorted(set(keep_fp32) - set(layers))
    if unknown:
        there = ", ".join(dict.fromkeys(layers))  # both phases may have one of a name
        raise UsageError("keep_fp32 names layers that the net lacks", expected=there, found=", ".join(unknown))


def exact_values(graph: Graph) -> set[Value]:
    """Values that must not be rounded: labels, indices and targets, and what they are made from.

    Those a layer reads without there being a gradient (``allows_gradient``), and those that a loss or a layer without
    backward reads and that no parameter had a part in; up to the inputs, through layers without parameters.
    """
    learned: set[Value] = set()
    for node in graph.nodes:
        if node.layer.param_shapes or any(bottom in learned for bottom in node.bottoms):
            learned.update(node.tops)
    exact: set[Value] = set()
    for node in reversed(graph.nodes):
        layer = node.layer
        if layer.type == "Silence":
            continue
        judges = layer.loss or not layer.differentiable
        passes_on = layer.differentiable and not layer.param_shapes and any(top in exact for top in node.tops)
        for i, bottom in enumerate(node.bottoms):
            if passes_on or not layer.allows_gradient(i) or (judges and bottom not in learned):
                exact.add(bottom)
    return exact


def _always_single(layer: Layer) -> bool:
    """Losses and probabilities; classes and shares; sources that write now and then; outputs that vary in size."""
    filled_by_itself = isinstance(layer, Source) and layer.type in ("DummyData", "MemoryData")
    return layer.loss or not layer.differentiable or layer.varies or layer.type == "Softmax" or filled_by_itself


def _only_reads(layer: Layer) -> bool:
    """Whether its passes leave the parameters alone: statistics and a Python class may write theirs."""
    return layer.learned and not isinstance(layer, Python)


Rooms = dict[tuple[Any, str], Array]
"""Float32 arrays by whose they are and which: (home, data or diff), or (node, index of a parameter)."""


class Precision:
    """The float16 side of one net: what is stored how, the casts, and the counts of what they lost.

    ``keep_fp32``: layers whose outputs, gradients of these, and parameters stay in float32. Values that live in one
    place (in-place layers) are kept together.
    """

    def __init__(self, xp: Any, graph: Graph, keep_fp32: Collection[str]) -> None:
        self._xp = xp
        self.keep_fp32 = tuple(keep_fp32)
        self._spaces: Mapping[tuple[Node, bool], Array] = {}
        exact = exact_values(graph)
        tops = [top for node in graph.nodes for top in node.tops]
        single = {
            top.home
            for top in tops
            if top in exact or top.loss_weight or top.producer.layer.name in keep_fp32
            or _always_single(top.producer.layer)
        }  # fmt: skip
        self._homes = {top.home for top in tops} - single
        self._rounded = {
            node: bool(node.layer.param_shapes) and node.layer.name not in keep_fp32 and _only_reads(node.layer)
            for node in graph.nodes
        }
        self._rows: dict[tuple[Any, str], int] = {}
        self.tensors: list[Tensor] = []
        """In the order in which a step rounds them."""
        for node in graph.nodes:
            name = node.layer.name
            for i in range(len(node.layer.param_shapes) if self._rounded[node] else 0):
                self._row((node, str(i)), Tensor(name, "weights", f"{name}.{i}"))
            for top in node.tops:
                if self.is_half(top):
                    self._row((top, "outputs"), Tensor(name, "outputs", top.name))
        for node in reversed(graph.nodes):
            for bottom in reversed(node.bottoms):
                if self.is_half(bottom) and (bottom, "gradients") not in self._rows:
                    key, maker = (bottom, "gradients"), bottom.producer.layer.name
                    self._row(key, Tensor(maker, "gradients", f"{bottom.name}.diff"))
        self._counts = xp.zeros((len(self.tensors) + 1, half.COLUMNS), np.int64)  # the last is for what was counted
        self._each = [self._counts[i] for i in range(len(self._counts))]

    def _row(self, key: tuple[Any, str], tensor: Tensor) -> None:
        self._rows[key] = len(self.tensors)
        self.tensors.append(tensor)

    # -- what the memory plan asks -----------------------------------------------------------------------------------

    def is_half(self, value: Value) -> bool:
        """Whether a value and its gradient are stored in float16."""
        return value.home in self._homes

    def cast_bytes(self, node: Node, backward: bool) -> int:
        """Bytes of float32 work space that the casts of a layer need in one pass."""
        return sum(aligned(4 * math.prod(shape)) for shape in self._cast_shapes(node, backward).values())

    def _cast_shapes(self, node: Node, backward: bool) -> dict[tuple[Any, str], Shape]:
        shapes: dict[tuple[Any, str], Shape] = {}
        layer = node.layer
        if not _casts(node):
            return shapes
        if not backward:
            read = [*node.bottoms, *node.tops]
        else:
            read = [*(node.bottoms if layer.reads_bottom() else ()), *(node.tops if layer.reads_top() else ())]
            down = [bottom for bottom, propagates in zip(node.bottoms, node.propagate, strict=True) if propagates]
            shapes |= {(value.home, "diff"): value.home.shape for value in (*node.tops, *down) if self.is_half(value)}
        shapes |= {(value.home, "data"): value.home.shape for value in read if self.is_half(value)}
        if self._rounded[node]:
            shapes |= {(node, str(i)): wanted.shape for i, wanted in enumerate(layer.param_shapes)}
        return shapes

    # -- casts -------------------------------------------------------------------------------------------------------

    def store(self, value: Value, given: Any, blob: Blob) -> bool:
        """Round what a caller gives for an input into its blob; False where it is none of float16 and that shape."""
        if not self.is_half(value) or np.shape(given) != blob.shape:
            return False
        given = self._xp.ascontiguousarray(self._xp.asarray(given, np.float32))
        half.encode(given, blob.device_data, self._count(value, "outputs"))
        return True

    def _count(self, owner: Any, kind: str) -> Array:
        return self._each[self._rows[owner, kind]]

    def _rooms(self, node: Node, backward: bool) -> Rooms:
        """Float32 arrays for what is cast, in the place that the net's plan has for them or, without one, new."""
        made: Rooms = {}
        start = 0
        space = self._spaces.get((node, backward))
        if space is None:
            space = self._xp.empty(self.cast_bytes(node, backward) // 4, np.float32)
        for key, shape in self._cast_shapes(node, backward).items():
            made[key] = view(space.view(np.uint8), start, shape)
            start += aligned(4 * math.prod(shape))
        return made

    def place(self, spaces: Mapping[tuple[Node, bool], Array]) -> None:
        """Flat float32 work space for the casts, by (layer, whether backward)."""
        self._spaces = spaces

    def forward(self, node: Node, bottoms: list[Array], tops: list[Array]) -> Pass:
        """What the net's plan of forward has for a layer, with casts."""
        rooms = self._rooms(node, False)
        if not rooms:
            return node.layer, bottoms, tops
        run = Cast(node.layer, self._params(node, rooms, counted=True))
        for value, array in zip(node.bottoms, bottoms, strict=True):
            if (room := rooms.get((value.home, "data"))) is not None:
                run.load(array, room)
        for value, array in zip(node.tops, tops, strict=True):
            if (value.home, "data") in rooms:
                run.after.append((rooms[value.home, "data"], array, self._count(value, "outputs")))
        single = [
            [rooms.get((value.home, "data"), array) for value, array in zip(values, arrays, strict=True)]
            for values, arrays in ((node.bottoms, bottoms), (node.tops, tops))
        ]
        return run, single[0], single[1]

    def _params(self, node: Node, rooms: Rooms, *, counted: bool) -> list[tuple[int, Array, Array]]:
        count = len(node.layer.param_shapes) if self._rounded[node] else 0
        return [
            (i, rooms[node, str(i)], self._count(node, str(i)) if counted else self._each[-1]) for i in range(count)
        ]

    def backward(self, node: Node, step: Step) -> None:
        """Change a step of the net's plan of backward so that it casts."""
        rooms = self._rooms(node, True)
        if not rooms:
            return
        run = Cast(node.layer, self._params(node, rooms, counted=False))
        for values, arrays in ((node.bottoms, step.bottoms), (node.tops, step.tops)):
            for i, value in enumerate(values):
                if (room := rooms.get((value.home, "data"))) is not None:
                    run.load(arrays[i], room)
                    arrays[i] = room
        for i, top in enumerate(node.tops):
            if (room := rooms.get((top.home, "diff"))) is not None:
                run.load(step.top_diffs[i], room)
                step.top_diffs[i] = room
        written = set()
        sums, own = iter(step.sums), []
        for i, (bottom, adds) in enumerate(zip(node.bottoms, node.adds, strict=True)):
            pair = next(sums) if adds else None
            target = pair[0] if pair is not None else step.bottom_diffs[i]
            room = rooms.get((bottom.home, "diff")) if target is not None else None
            if room is None:
                own += [pair] if pair is not None else []
                continue
            if pair is None:
                step.bottom_diffs[i] = room
            else:
                # Added in float32 and rounded once: to what this layer wrote itself, or to what others have stored.
                run.sums.append((None if bottom in written else target, room, pair[1]))
            if bottom not in written:
                run.after.append((room, target, self._count(bottom, "gradients")))
            written.add(bottom)
        step.sums[:] = own
        step.layer = run

    # -- what was lost -----------------------------------------------------------------------------------------------

    def counts(self, into: np.ndarray | None = None) -> np.ndarray:
        """Counts since the net was made, int64 [tensors, 4] by ``tensors``; ``into`` this array, or a new one."""
        counts = self._counts if isinstance(self._counts, np.ndarray) else self._xp.asnumpy(self._counts)
        found = np.empty((len(self.tensors), half.COLUMNS), np.int64) if into is None else into
        found[...] = counts[: len(self.tensors)]
        return found

    def losses(self) -> Iterator[Loss]:
        """The counts of every tensor since the net was made."""
        for tensor, row in zip(self.tensors, self.counts(), strict=True):
            yield Loss(tensor, *map(int, row))


def _casts(node: Node) -> bool:
    """An input's layer does nothing: its values are rounded as they are given."""
    return not isinstance(node.layer, Source)


class Cast:
    """A layer with the casts round one of its passes: stands where the layer does in the plan."""

    def __init__(self, layer: Layer, params: list[tuple[int, Array, Array]]) -> None:
        self.layer = layer
        self.name, self.type = layer.name, layer.type
        self._params = params
        self._loads: list[tuple[Array, Array]] = []
        self.sums: list[tuple[Array | None, Array, Array]] = []
        self.after: list[tuple[Array, Array, Array]] = []

    def load(self, stored: Array, room: Array) -> None:
        """Cast this to float32 before the pass (once, where two blobs live in one place)."""
        if all(known is not room for _, known in self._loads):
            self._loads.append((stored, room))

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        self._run(self.layer.forward, bottoms, tops)

    def backward(self, *arrays: Any) -> None:
        self._run(self.layer.backward, *arrays)

    def _run(self, method: Any, *arrays: Any) -> None:
        for stored, room in self._loads:
            half.decode(stored, room)
        blobs = self.layer.blobs
        masters = [blobs[i].device_data for i, _, _ in self._params]
        try:
            for master, (i, room, counts) in zip(masters, self._params, strict=True):
                half.rounded(master, room, counts)
                blobs[i].lend(room)
            method(*arrays)
        finally:
            for master, (i, _, _) in zip(masters, self._params, strict=True):
                blobs[i].lend(master)
        for stored, room, part in self.sums:
            if stored is not None:
                half.decode(stored, room)
            room += part
        for room, stored, counts in self.after:
            half.encode(room, stored, counts)
