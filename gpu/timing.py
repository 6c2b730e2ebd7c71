"""How long each layer takes, and whether it gives the same bits each time: the measurements of :mod:`gpu.time`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu.layers.base import Layer
from gpu.net import Net
from gpu.probe import still
from profiler.hashing import ordered_parts

Around = Callable[[Layer, str, Callable[[], None], Callable[[], list[Any]]], None]
"""Called as (layer, "forward" or "backward", run, results): must call run; results are the arrays it wrote."""


@dataclass
class LayerTimes:
    """Milliseconds of each pass, in order; and, of each repeat, a hash of what it wrote."""

    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    forward_hashes: list[int] = field(default_factory=list)
    backward_hashes: list[int] = field(default_factory=list)


@dataclass
class Measured:
    """``layers`` by name, in order. ``first``: the first layer whose bits differ between repeats, and in which pass.
    ``not_finite``: the first layer whose results hold NaN or infinity, the pass, and how many of how many values."""

    layers: dict[str, LayerTimes]
    first: tuple[str, str] | None
    not_finite: tuple[str, str, int, int] | None = None


def measure(net: Net, inputs: Mapping[str, np.ndarray], iterations: int) -> Measured:
    """``iterations`` timed passes after one to warm up, then as many that are hashed, each from the same state.

    On a device each layer is waited for, so its time is its own; what overlaps in a training step does not show.
    """
    found = {layer.name: LayerTimes() for layer in net.layers}
    not_finite: list[tuple[str, str, int, int]] = []
    wait = _waiter(net)

    def timed(layer: Layer, which: str, run: Callable[[], None], _: Callable[[], list[Any]]) -> None:
        wait()
        begin = time.perf_counter_ns()
        run()
        wait()
        times = found[layer.name]
        spent = (time.perf_counter_ns() - begin) / 1e6
        (times.forward_ms if which == "forward" else times.backward_ms).append(spent)

    def hashed(layer: Layer, which: str, run: Callable[[], None], results: Callable[[], list[Any]]) -> None:
        run()
        arrays = [np.ascontiguousarray(net.backend.to_numpy(array)) for array in results()]
        value = ordered_parts(arrays)
        wrong, of = _count(arrays)
        if wrong and not not_finite:
            not_finite.append((layer.name, which, wrong, of))
        times = found[layer.name]
        (times.forward_hashes if which == "forward" else times.backward_hashes).append(value)

    with np.errstate(all="ignore"):  # what is not finite is told by layer
        one_pass(net, inputs)
        with around_layers(net, timed):
            for _ in range(iterations):
                one_pass(net, inputs)
        with around_layers(net, hashed):
            for _ in range(iterations):
                one_pass(net, inputs)
    return Measured(found, _first_difference(net, found), next(iter(not_finite), None))


def one_pass(net: Net, inputs: Mapping[str, np.ndarray]) -> None:
    """Forward, and backward where there is one, from the state the net was made in; it is left in that state."""
    net.iteration = 0
    with still(net.layers):
        net.forward_only(**inputs)
        if has_backward(net):
            net.clear_param_diffs()
            net.backward_only()
    net.iteration = 0


def has_backward(net: Net) -> bool:
    """Whether a pass through this net goes back: in TRAIN, where there is a loss and something to learn."""
    return net.phase == "TRAIN" and any(node.backward for node in net._graph.nodes)


def _count(arrays: Sequence[np.ndarray]) -> tuple[int, int]:
    """Values that are NaN or infinite, and all values."""
    return sum(int(array.size - np.isfinite(array).sum()) for array in arrays), sum(array.size for array in arrays)


@contextmanager
def around_layers(net: Net, around: Around) -> Iterator[None]:
    """While it is open, every pass of every layer goes through ``around``."""

    def wrap(layer: Layer) -> None:
        forward, backward = layer.forward, layer.backward

        def outer_forward(bottoms: Sequence[Any], tops: Sequence[Any]) -> None:
            around(layer, "forward", lambda: forward(bottoms, tops), lambda: list(tops))

        def outer_backward(bottoms: Any, tops: Any, top_diffs: Any, bottom_diffs: Any, param_diffs: Any) -> None:
            def results() -> list[Any]:
                return [array for array in (*bottom_diffs, *param_diffs) if array is not None]

            run = lambda: backward(bottoms, tops, top_diffs, bottom_diffs, param_diffs)  # noqa: E731
            around(layer, "backward", run, results)

        layer.forward, layer.backward = outer_forward, outer_backward  # type: ignore[method-assign]

    for layer in net.layers:
        wrap(layer)
    try:
        yield
    finally:
        for layer in net.layers:
            del layer.forward, layer.backward


def _waiter(net: Net) -> Callable[[], None]:
    if net.backend.name != "cupy":
        return lambda: None
    return lambda: net.xp.cuda.get_current_stream().synchronize()


def _first_difference(net: Net, found: Mapping[str, LayerTimes]) -> tuple[str, str] | None:
    names = [layer.name for layer in net.layers]
    for which, order in (("forward", names), ("backward", names[::-1])):
        for name in order:
            times = found[name]
            hashes = times.forward_hashes if which == "forward" else times.backward_hashes
            if len(set(hashes)) > 1:
                return name, which
    return None
