"""One layer at a time: fed with given arrays, on any backend or in float64, with what comes out brought to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu.blob import Blob
from gpu.layers.base import Layer, Scratch, Shape
from gpu.probe import still
from gpu.wiring import Graph, Node, follow

Array = Any
ToDevice = Callable[[np.ndarray], Array]
ToHost = Callable[[Array], np.ndarray]


@dataclass
class Work:
    """What a layer is fed with: values of its bottoms and tops and gradients of its tops, on the host.

    ``wants``: which bottoms get a gradient; ``param_wants``: which parameters. ``shared``: bottoms that lie in the
    memory of the top of the same index. ``backward``: whether there is a backward pass. ``param_diffs``: what came out
    for the parameters when the net was run.
    """

    bottoms: list[np.ndarray]
    tops: list[np.ndarray]
    top_diffs: list[np.ndarray]
    wants: list[bool]
    param_wants: list[bool]
    shared: list[bool]
    backward: bool
    param_diffs: list[np.ndarray | None] = field(default_factory=list)


@dataclass
class Outcome:
    """What came out, by name ("top 0", "bottom 0 gradient", "parameter 0 gradient", "statistic 0"), on the host."""

    forward: dict[str, np.ndarray] = field(default_factory=dict)
    backward: dict[str, np.ndarray] = field(default_factory=dict)


def run(layer: Layer, work: Work, to_device: ToDevice, to_host: ToHost, *, given_tops: bool = True) -> Outcome:
    """Forward and backward of one layer; statistics are put back. Arrays are those ``to_device`` makes.

    ``given_tops``: backward sees ``work.tops``, not what forward has just written.
    """
    found = Outcome()
    with still([layer]):
        bottoms = [to_device(values) for values in work.bottoms]
        tops = [to_device(np.zeros_like(values)) for values in work.tops]
        for i, shared in enumerate(work.shared):
            if shared:
                tops[i] = bottoms[i]
        layer.forward(bottoms, tops)
        for i, top in enumerate(tops):
            found.forward[f"top {i}"] = _host(to_host, top)
        if not layer.learned:
            for i, blob in enumerate(layer.blobs):
                found.forward[f"statistic {i}"] = _host(to_host, blob.device_data)
        if not work.backward:
            return found
        if given_tops:
            for top, values in zip(tops, work.tops, strict=True):
                top[...] = to_device(values)
        top_diffs = [to_device(values) for values in work.top_diffs]
        diffs: list[Array | None] = [
            to_device(np.zeros_like(values)) if wanted else None
            for values, wanted in zip(work.bottoms, work.wants, strict=True)
        ]
        for i, shared in enumerate(work.shared):
            if shared and diffs[i] is not None:
                diffs[i] = top_diffs[i]
        params = [
            to_device(np.zeros(blob.shape)) if wanted else None
            for blob, wanted in zip(layer.blobs, work.param_wants, strict=True)
        ]
        layer.backward(bottoms, tops, top_diffs, diffs, params)
        for kind, arrays in (("bottom", diffs), ("parameter", params)):
            for i, array in enumerate(arrays):
                if array is not None:
                    found.backward[f"{kind} {i} gradient"] = _host(to_host, array)
    return found


def _host(to_host: ToHost, array: Array) -> np.ndarray:
    return np.array(to_host(array), np.float64)


def make_double(layer: Layer) -> None:
    """Let a layer built with NumPy (not compiled) work in float64: call it once shapes are known, before any pass.

    A layer takes its arrays from three places, its own members, ``keep`` and its work space; all three are changed.
    Constants stay what they are, numbers rounded to float32, so both precisions compute the same function.
    """
    layer.context.scratch = _DoubleScratch(layer.context.scratch)

    def keep(name: str, shape: Shape, dtype: Any = np.float32) -> np.ndarray:
        return np.zeros(shape, np.float64 if dtype == np.float32 else dtype)

    layer.keep = keep  # type: ignore[method-assign]
    layer.allocate()
    _widen(layer, set())


class _DoubleScratch(Scratch):
    """Work space of float64, as large as was asked for in another."""

    def __init__(self, asked: Scratch) -> None:
        super().__init__(np)
        self._asked = asked

    def arrays(self, *shapes: Shape) -> list[Array]:
        return [np.zeros(shape) for shape in shapes]


def _widen(owner: Any, seen: set[int]) -> None:
    """float32 arrays among the members of a layer, and of the helpers it holds, made float64."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    for name, value in list(vars(owner).items()):
        if name in ("spec", "context", "xp", "blobs", "keep"):
            continue
        wide = _wider(value, seen)
        if wide is not value:
            object.__setattr__(owner, name, wide)


def _wider(value: Any, seen: set[int]) -> Any:
    if isinstance(value, np.ndarray):
        return value.astype(np.float64) if value.dtype == np.float32 else value
    if isinstance(value, list):
        return [_wider(item, seen) for item in value]
    if isinstance(value, tuple) and any(isinstance(item, np.ndarray) for item in value):
        return tuple(_wider(item, seen) for item in value)
    if (type(value).__module__ or "").startswith("gpu.layers") and hasattr(value, "__dict__"):
        _widen(value, seen)
    return value


class Double:
    """A net of float64 layers, run one by one with an array for every value: no memory is shared, nothing is planned.

    ``graph``: as :func:`gpu.probe.bare_graph` makes it; its layers are used up. ``params``: values by layer name.
    """

    def __init__(self, graph: Graph, params: dict[str, list[np.ndarray]]) -> None:
        self.graph = graph
        blobs: dict[int, Blob] = {}
        for node in graph.nodes:
            make_double(node.layer)
            node.layer.blobs[:] = []
            for wanted, values in zip(node.layer.param_shapes, params.get(node.layer.name, []), strict=True):
                held = blobs.setdefault(id(values), Blob(values.shape, np, values.astype(np.float64)))
                whole = held if held.shape == wanted.shape else Blob(wanted.shape, np, held.data.reshape(wanted.shape))
                node.layer.blobs.append(whole)

    def works(
        self, inputs: dict[str, np.ndarray], diffs: dict[str, np.ndarray], *, rounded: bool
    ) -> Iterator[tuple[Node, Work]]:
        """Forward and backward through the net; yields each layer, in order, with what it is fed with.

        ``inputs``: by blob name. ``diffs``: gradients of outputs without a loss. ``rounded``: what one layer hands
        to the next is rounded to float32, so each is fed with arrays that a float32 layer can be given.
        """

        def store(array: np.ndarray) -> np.ndarray:
            return array.astype(np.float32).astype(np.float64) if rounded else array

        values: dict[Any, np.ndarray] = {}
        made = []
        with still([node.layer for node in self.graph.nodes]):
            for node in self.graph.nodes:
                bottoms = [values[bottom] for bottom in node.bottoms]
                if node in self.graph.following:
                    self._follow(node, bottoms)
                tops = [np.zeros(top.shape) for top in node.tops]
                for array, top in zip(tops, node.tops, strict=True):
                    if top.name in inputs and not node.bottoms:
                        array[...] = inputs[top.name]
                node.layer.forward(bottoms, tops)
                values.update((top, store(array)) for top, array in zip(node.tops, tops, strict=True))
            gradients = {top: self.seed(top, diffs) for node in self.graph.nodes for top in node.tops}
            for node in reversed(self.graph.nodes):
                bottoms, tops = [values[bottom] for bottom in node.bottoms], [values[top] for top in node.tops]
                top_diffs = [store(gradients[top]) for top in node.tops]
                shared = [i < len(node.tops) and node.tops[i].home is b.home for i, b in enumerate(node.bottoms)]
                work = Work(
                    bottoms, tops, top_diffs, list(node.propagate), list(node.param_gradients), shared, node.backward
                )
                made.append((node, work))
                if not node.backward:
                    continue
                wanted = [
                    np.zeros(b.shape) if wants else None for b, wants in zip(bottoms, node.propagate, strict=True)
                ]
                params = [
                    np.zeros(blob.shape) if wants else None
                    for blob, wants in zip(node.layer.blobs, node.param_gradients, strict=True)
                ]
                node.layer.backward(bottoms, tops, top_diffs, wanted, params)
                work.param_diffs = params
                for bottom, diff in zip(node.bottoms, wanted, strict=True):
                    if diff is not None:
                        gradients[bottom] = gradients[bottom] + store(diff)
        yield from reversed(made)

    def _follow(self, node: Node, bottoms: list[np.ndarray]) -> None:
        chosen = node.layer.choose(bottoms) if node.layer.varies else None
        if any(0 in shape for shape in chosen or ()):
            raise node.layer.error("chose no rows: there is nothing to compare behind it", hint="another --seed")
        follow(node, chosen)
        node.layer.allocate()
        _widen(node.layer, set())

    @staticmethod
    def seed(top: Any, diffs: dict[str, np.ndarray]) -> np.ndarray:
        """The gradient of a value before any layer adds to it: a loss's weight, or what was given for an output."""
        if not top.consumers and top.name in diffs:
            return diffs[top.name].astype(np.float64)
        return np.full(top.shape, float(np.float32(top.loss_weight)))


def run_double(node: Node, work: Work, *, given_tops: bool = True) -> Outcome:
    """:func:`run` for a layer of a :class:`Double`, out of place."""
    apart = Work(
        work.bottoms,
        work.tops,
        work.top_diffs,
        work.wants,
        work.param_wants,
        [False] * len(work.shared),
        work.backward,
    )
    return run(node.layer, apart, lambda a: np.array(a, np.float64), lambda a: a, given_tops=given_tops)


def perturbed(node: Node, work: Work, unit: float, rng: np.random.Generator) -> Outcome:
    """:func:`run_double` with every value that is no label moved by a random +-``unit`` of itself: what rounding of the
    inputs alone does to the outputs."""

    def moved(values: np.ndarray) -> np.ndarray:
        return values * (1 + unit * rng.choice((-1.0, 1.0), values.shape))

    layer = node.layer
    bottoms = [moved(b) if layer.allows_gradient(i) else b for i, b in enumerate(work.bottoms)]
    nudged = Work(
        bottoms, work.tops, [moved(d) for d in work.top_diffs], work.wants, work.param_wants, work.shared, work.backward
    )
    held: Sequence[tuple[Blob, np.ndarray]] = [(blob, blob.device_data.copy()) for blob in layer.blobs if layer.learned]
    for blob, values in held:
        blob.device_data[...] = moved(values)
    try:
        return run_double(node, nudged, given_tops=False)
    finally:
        for blob, values in held:
            blob.device_data[...] = values
