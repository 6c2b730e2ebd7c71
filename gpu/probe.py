"""What tools that try a net out share: the net from a command line, inputs made up for it, its state held still.

Inputs are drawn from a seed, keyed by blob name, so the same command gets the same batch on every machine.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpu.fields import FieldWarning, build_layers
from gpu.fillers import name_key
from gpu.layers.base import Context, Layer, Scratch, Shape
from gpu.layers.source import Source
from gpu.net import Net
from gpu.prototxt import FilteredNet, PrototxtError, filter_net, load_net
from gpu.wiring import Graph, Node, wire
from profiler.errors import UsageError

_KEYED_BY = 0x70726F62
"""Second half of the keys of inputs, so that they are no parameter's values."""


def add_arguments(parser: argparse.ArgumentParser, phase: str) -> None:
    """The arguments that say which net, with which inputs."""
    parser.add_argument("net", metavar="NET.prototxt")
    parser.add_argument("--phase", choices=("TRAIN", "TEST"), default=phase)
    parser.add_argument("--stage", action="append", default=[], help="stage of the net's state; may be given again")
    parser.add_argument("--weights", metavar="W", help="a .caffemodel (default: the fillers' values)")
    parser.add_argument("--batch", type=int, metavar="N", help="images in a batch, in place of what the text says")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="BLOB=N,C,H,W",
        help="shape of an input; needed where the text does not give it; may be given again",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, inputs and dropout masks (default 0)")


def shapes_from(arguments: argparse.Namespace) -> dict[str, Shape]:
    """Input shapes that a command line asks for. Raises UsageError."""
    if arguments.batch is not None and arguments.batch < 1:
        raise UsageError("--batch is out of range", expected="1 or more", found=arguments.batch)
    shapes: dict[str, Shape] = {}
    for text in arguments.shape:
        name, equals, sizes = text.partition("=")
        try:
            shape = tuple(int(size) for size in sizes.replace("x", ",").split(","))
        except ValueError:
            shape = ()
        if not equals or not name or not shape or min(shape) < 1:
            raise UsageError(f"--shape {text!r} is no shape", expected="BLOB=N,C,H,W with sizes of 1 or more")
        shapes[name] = shape
    return given_shapes(load_filtered(arguments), shapes, arguments.batch)


def load_filtered(arguments: argparse.Namespace) -> FilteredNet:
    """The layers of the phase that a command line asks for."""
    return filter_net(load_net(arguments.net), arguments.phase, tuple(arguments.stage))


def given_shapes(filtered: FilteredNet, shapes: Mapping[str, Shape], batch: int | None) -> dict[str, Shape]:
    """``shapes``, and those that the text tells, with ``batch`` in place of the text's. Raises PrototxtError."""
    found = dict(shapes)
    unknown = []
    for layer in filtered.net.layer:
        if layer.bottom or not layer.top or layer.top[0] in shapes:
            continue
        texts = [tuple(shape.dim) for shape in layer.input_param.shape] if layer.type == "Input" else []
        for i, name in enumerate(layer.top):
            text = texts[min(i, len(texts) - 1)] if texts else ()
            if batch is not None and text:
                found[name] = (batch, *text[1:])
        if layer.type in ("Data", "ImageData"):
            image = _image_shape(layer, batch)
            if image is None:
                unknown.append(str(layer.top[0]))
            else:
                found[layer.top[0]] = image
        elif layer.type == "HDF5Data":
            unknown += [name for name in layer.top if name not in shapes]
    if unknown:
        raise PrototxtError(
            f"the text does not say how large {', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'}",
            hint=" ".join(f"--shape {name}=N,C,H,W" for name in unknown),
        )
    return found


def _image_shape(layer: Any, batch: int | None) -> Shape | None:
    """What a data layer's text tells: batch, channels by its flags or means, sides by its crop."""
    transform = layer.transform_param
    message = layer.data_param if layer.type == "Data" else layer.image_data_param
    count = batch or message.batch_size
    height = width = transform.crop_size
    if layer.type == "ImageData":
        channels = 3 if message.is_color else 1
        height, width = height or message.new_height, width or message.new_width
    else:
        channels = 3 if transform.force_color else 1 if transform.force_gray else len(transform.mean_value)
        channels = 0 if channels == 1 and len(transform.mean_value) == 1 and not transform.force_gray else channels
    return (count, channels, height, width) if min(count, channels, height, width) > 0 else None


def quiet_net(prototxt: str, phase: str, weights: str | None = None, *arguments: Any, **options: Any) -> Net:
    """A net, without warnings about fields that have no effect: gpu.lint tells them.

    A BatchNorm whose statistics come from nowhere gets mean 0 and variance 1, so that its net can run in TEST.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FieldWarning)
        net = Net(prototxt, phase, weights, *arguments, **options)
    if phase == "TEST" and weights is None:
        for layer in net.layers:
            if layer.type == "BatchNorm":
                _, variance, weight = layer.blobs
                variance.data, weight.data = np.ones(variance.shape), np.ones(weight.shape)
    return net


def bare_graph(filtered: FilteredNet, shapes: Mapping[str, Shape], seed: int, compiled: bool = False) -> Graph:
    """The layers and their wiring, with NumPy and without arrays."""
    context = Context(filtered.phase, np, compiled, seed, Scratch(np), input_shapes=dict(shapes))
    # Building a layer completes its message (a loss's top), which the caller's net should not see twice.
    filtered = copy.deepcopy(filtered)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FieldWarning)
        layers = iter(build_layers(filtered, context))
    return wire(filtered, lambda spec: next(layers))


def random_inputs(graph: Graph, seed: int) -> dict[str, np.ndarray]:
    """An array for every input: whole numbers in range for labels and indices, values near N(0, 1) for the rest."""
    made = {}
    for name in graph.inputs:
        value = graph.latest[name]
        key = np.array([seed % 2**64, name_key(f"{name}/{_KEYED_BY}")], np.uint64)
        rng = np.random.Generator(np.random.Philox(key=key))
        limit = _limit(name, value.consumers)
        if limit is None:
            made[name] = rng.standard_normal(value.shape, np.float32)
        else:
            made[name] = rng.integers(0, limit, value.shape).astype(np.float32)
    return made


def _limit(name: str, readers: Sequence[Node]) -> int | None:
    """Number of whole values that an input can take, or None where any number will do."""
    limits = []
    for node in readers:
        if node.layer.type == "Filter":  # what it passes on is what its readers take
            for bottom, top in zip(node.bottoms, node.tops, strict=False):
                if bottom.name == name and (limit := _limit(top.name, top.consumers)) is not None:
                    limits.append(limit)
        for i, bottom in enumerate(node.bottoms):
            if bottom.name == name and bottom in node.bottoms and not node.layer.allows_gradient(i):
                limit = _classes(node, i)
                if limit is not None:
                    limits.append(limit)
    return min(limits, default=None)


def _classes(node: Node, index: int) -> int | None:
    kind, spec, first = node.layer.type, node.layer.spec, node.bottoms[0].shape
    if kind in ("Silence", "Crop", "Reduction") or (kind == "InfogainLoss" and index == 2):
        return None
    if kind in ("ArgMax", "Accuracy") and index == 0:
        return None
    if kind == "Embed":
        return int(spec.embed_param.input_dim)
    if kind == "BatchReindex":
        return int(first[0])
    if kind in ("SoftmaxWithLoss", "Accuracy", "HingeLoss", "MultinomialLogisticLoss", "InfogainLoss"):
        axis = {"Accuracy": spec.accuracy_param.axis, "InfogainLoss": spec.infogain_loss_param.axis}
        chosen = axis.get(kind, spec.softmax_param.axis) if kind != "HingeLoss" else 1
        return int(first[chosen]) if len(first) > 1 else 2
    if not node.layer.differentiable:
        return None
    return 2  # marks of a sequence, choices, targets


def sources(graph: Graph) -> Iterator[Node]:
    """The layers that bring values in."""
    return (node for node in graph.nodes if isinstance(node.layer, Source))


@contextmanager
def still(layers: Sequence[Layer]) -> Iterator[None]:
    """Statistics that a pass changes are put back afterwards, and recurrent layers begin anew."""
    held = [(blob, blob.device_data.copy()) for layer in layers if not layer.learned for blob in layer.blobs]
    for layer in layers:
        reset = getattr(layer, "reset", None)
        if callable(reset):
            reset()
    try:
        yield
    finally:
        for blob, values in held:
            blob.device_data[...] = values


class watching:
    """While it is open, ``see(layer, what, arrays)`` is called: "top" after each layer's forward pass, "top gradient"
    before its backward pass, "bottom" and "parameter" (their gradients, None where there is none) after that."""

    def __init__(self, net: Net, see: Callable[[Layer, str, Sequence[Any]], None]) -> None:
        self._layers, self._see = net.layers, see

    def __enter__(self) -> None:
        for layer in self._layers:
            self._wrap(layer)

    def _wrap(self, layer: Layer) -> None:
        forward, backward, see = layer.forward, layer.backward, self._see

        def watched(bottoms: Sequence[Any], tops: Sequence[Any]) -> None:
            forward(bottoms, tops)
            see(layer, "top", tops)

        def watched_back(bottoms: Any, tops: Any, top_diffs: Any, bottom_diffs: Any, param_diffs: Any) -> None:
            see(layer, "top gradient", top_diffs)
            backward(bottoms, tops, top_diffs, bottom_diffs, param_diffs)
            see(layer, "bottom", bottom_diffs)
            see(layer, "parameter", param_diffs)

        layer.forward, layer.backward = watched, watched_back  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            del layer.forward, layer.backward


def versions() -> dict[str, str]:
    """What the numbers depend on besides the net: libraries, BLAS and its threads, the processor, the GPU."""
    import platform
    from importlib import metadata

    from gpu.backend import blas_pools, cupy_distributions

    found = {"python": platform.python_version(), "machine": platform.machine(), "processor": _processor()}
    for package in ("numpy", "numba", "scipy"):
        found[package] = metadata.version(package)
    for pool in blas_pools():
        # The first is NumPy's; what else is there computes nothing here.
        found.setdefault(f"blas {pool.name}", f"{pool.version}, {pool.threads} threads")
    for text in cupy_distributions():
        name, _, version = text.partition(" ")
        found[name] = version
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else "unknown"
