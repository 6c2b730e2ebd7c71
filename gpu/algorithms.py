"""The ways in which a convolution can be computed here, each tried: speed, work space, and whether its bits repeat.

All give the same numbers to rounding; the layer chooses by shapes, never by timing, so a run's bits do not depend on
what was fast on some day.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpu.cudnn import Cudnn, OnePlan
from gpu.layers import registry
from gpu.layers.base import Layer, Scratch
from gpu.layers.windowed import Windowed
from gpu.net import Net
from gpu.wiring import Node
from profiler.hashing import ordered_parts


@dataclass(frozen=True)
class Tried:
    """One way: milliseconds (medians), bytes of work space, whether all repeats had the same bits, and whether it is
    what the layer does by itself. ``relative``: L2 distance of its results from those of the layer's own way."""

    layer: str
    algorithm: str
    forward_ms: float
    backward_ms: float | None
    workspace: int
    identical: bool
    chosen: bool
    relative: float


@dataclass(frozen=True)
class _Way:
    name: str
    compiled: bool
    images: int | None = None
    """Images in a chunk; None: the layer's own number."""
    depthwise: bool | None = None
    cudnn: Any = "not tried"
    notes: str = ""


def try_algorithms(net: Net, repeats: int, seed: int) -> Iterator[Tried]:
    """Each way of each convolution of a net, with random values and gradients of the layer's shapes."""
    registry()
    for node in net._graph.nodes:
        if isinstance(node.layer, Windowed):
            yield from _of_layer(net, node, repeats, seed)


def _of_layer(net: Net, node: Node, repeats: int, seed: int) -> Iterator[Tried]:
    own = node.layer
    rng = np.random.default_rng(seed)
    bottoms = [net.xp.asarray(rng.standard_normal(b.shape, np.float32)) for b in node.bottoms]
    diffs = [net.xp.asarray(rng.standard_normal(t.shape, np.float32)) for t in node.tops]
    truth: list[np.ndarray] | None = None
    seen = set()
    for way in _ways(own, node.bottoms[0].shape[0]):
        layer = _built(own, way, [b.shape for b in node.bottoms])
        if describe(layer) in seen:
            continue
        seen.add(describe(layer))
        layer.blobs[:] = own.blobs
        forward, backward, results, identical = _run(net, node, layer, bottoms, diffs, repeats)
        truth = results if truth is None else truth
        yield Tried(
            own.name,
            describe(layer) + (f" ({way.notes})" if way.notes else ""),
            forward,
            backward,
            4 * layer.context.scratch.count,
            identical,
            way.name == "own",
            _relative(results, truth),
        )


def _ways(layer: Layer, images: int) -> list[_Way]:
    """The layer's own way first; then those that the backend has, some of which may be the same again."""
    compiled = layer.context.compiled
    ways = [_Way("own", compiled, cudnn=layer.context.cudnn)]
    if getattr(layer, "_depthwise", False):
        ways.append(_Way("products", compiled, depthwise=False))
    if compiled:
        ways += [_Way("one", True, 1, False), _Way("all", True, images, False), _Way("plain", False, None)]
    else:
        ways += [_Way("unrolled", False), _Way("one", False, 1, False), _Way("all", False, images, False)]
    return ways + _plans(layer)


def _plans(layer: Any) -> list[_Way]:
    """Each plan of cuDNN's for each pass, those that are not allowed too; the other passes unroll."""
    opened, library = layer.context.cudnn, getattr(layer, "library", None)
    if library is None or not isinstance(opened, Cudnn):
        return []
    ways = []
    for direction in library.served:
        for index, plan in enumerate(opened.candidates(direction, library.shape)):
            if not plan.problem:
                only = OnePlan(opened.frontend, opened.cupy, opened.deterministic, direction=direction, index=index)
                ways.append(_Way(plan.name, False, cudnn=only, notes=", ".join(plan.notes)))
    return ways


def _built(own: Layer, way: _Way, shapes: Sequence[tuple[int, ...]]) -> Layer:
    """A layer of the same message that works in the given way."""
    context = replace(own.context, compiled=way.compiled, scratch=Scratch(own.xp), cudnn=way.cudnn)
    layer: Any = type(own)(own.spec, context)
    if way.images is not None:
        layer._images = lambda *_: way.images
    layer.shapes(shapes)
    if way.depthwise is not None and hasattr(layer, "_depthwise"):
        layer._depthwise = way.depthwise
    layer.allocate()
    made: Layer = layer
    return made


def describe(layer: Any) -> str:
    """The way in which a convolution works, in words."""
    place = "" if layer.context.compiled else ", portable"
    library = getattr(layer, "library", None)
    if library is not None and library.served:
        return "; ".join(f"{direction} {library.algorithms[direction]}" for direction in library.served)
    if getattr(layer, "_depthwise", False):
        return "direct sums, a channel each" + place
    chunk = "1 image" if layer._step == 1 else f"{layer._step} images"
    if layer._geometry.plain and layer._in_place:
        return "1x1: product without unrolling, 1 image" + place
    return f"im2col + product, {chunk}{place}"


def _run(
    net: Net, node: Node, layer: Layer, bottoms: list[Any], diffs: list[Any], repeats: int
) -> tuple[float, float | None, list[np.ndarray], bool]:
    xp = net.xp
    tops = [xp.zeros(t.shape, np.float32) for t in node.tops]
    back = node.backward
    into = [
        xp.zeros(b.shape, np.float32) if wants else None for b, wants in zip(node.bottoms, node.propagate, strict=True)
    ]
    params = [
        xp.zeros(blob.shape, np.float32) if wants else None
        for blob, wants in zip(layer.blobs, node.param_gradients, strict=True)
    ]

    def timed(run: Callable[[], None]) -> float:
        _wait(net)
        begin = time.perf_counter_ns()
        run()
        _wait(net)
        return (time.perf_counter_ns() - begin) / 1e6

    forwards, backwards, hashes = [], [], set()
    written: list[np.ndarray] = []
    for _ in range(repeats + 1):  # the first one warms up
        forwards.append(timed(lambda: layer.forward(bottoms, tops)))
        if back:
            backwards.append(timed(lambda: layer.backward(bottoms, tops, diffs, into, params)))
        results = [*tops, *(array for array in (*into, *params) if array is not None)] if back else tops
        written = [np.array(net.backend.to_numpy(array)) for array in results]
        hashes.add(ordered_parts(written))
    backward = float(np.median(backwards[1:])) if back else None
    return float(np.median(forwards[1:])), backward, written, len(hashes) == 1


def _wait(net: Net) -> None:
    if net.backend.name == "cupy":
        net.xp.cuda.get_current_stream().synchronize()


def _relative(found: list[np.ndarray], truth: list[np.ndarray]) -> float:
    apart = math.sqrt(sum(float(np.square(a.astype(np.float64) - b).sum()) for a, b in zip(found, truth, strict=True)))
    whole = math.sqrt(sum(float(np.square(b.astype(np.float64)).sum()) for b in truth))
    return apart / whole if whole else apart
