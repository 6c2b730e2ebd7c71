"""A net: Caffe prototxt in, forward and backward passes out, with the feel of pycaffe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu.backend import Backend, select_backend
from gpu.blob import Blob
from gpu.fields import build_layers
from gpu.fillers import fill
from gpu.layers.base import Array, Context, Layer, LayerError, Scratch, Shape
from gpu.prototxt import DataLayer, data_layer, filter_net, load_net
from gpu.wiring import Graph, Node, wire
from profiler.errors import StallscopeError, UsageError
from profiler.osread import available_memory

if TYPE_CHECKING:
    from gpu.caffemodel import CopyReport


class ParamShapesError(LayerError):
    """A layer has parameters of other shapes in two nets that are to share them: their inputs differ."""


_COMPILED = ("numpy", "emulated")
"""Backends whose arrays the numba kernels can work on."""


@dataclass(frozen=True)
class Param:
    """One learnable array, once even where layers share it. ``name``: its owner, as ``layer.index``."""

    blob: Blob
    lr_mult: float
    decay_mult: float
    name: str


@dataclass
class _Step:
    """A layer with the arrays it works on in backward."""

    layer: Layer
    bottoms: list[Array]
    tops: list[Array]
    top_diffs: list[Array]
    bottom_diffs: list[Array | None]
    sums: list[tuple[Array, Array]]
    param_diffs: list[Array | None]
    param_sums: list[tuple[Array, Array]]


class Net:
    """The layers of one phase, built, allocated and filled.

    Parameters
    ----------
    prototxt: path or text, V1 or current format.
    phase: TRAIN or TEST.
    weights: a ``.caffemodel`` to copy from after initialisation.
    stages, level: what the layers' include and exclude rules are compared with.
    backend: a Backend or its name; NumPy where left out.
    input_shapes: shapes by blob name, for data layers (needed) and Input layers (instead of the text's). A label's
        shape may be left out: one per image.
    seed: of initial values and dropout masks; 0 where left out.

    Attributes
    ----------
    blobs: Blob by name. params: list of Blob by layer name. layers: the layers, in order. learnable: list of Param.
    inputs, outputs: blob names. data_layers: what ``Data`` layers ask of the feed.
    iteration: counter of dropout masks; every forward pass in TRAIN takes one, and a solver may set it.

    Blobs keep what was written last; where layers work in place, ``diff`` may be the gradient before the last of them.
    Raises PrototxtError, LayerError, FillerError, UsageError, all of them StallscopeError.
    """

    def __init__(
        self,
        prototxt: str | Path,
        phase: str = "TEST",
        weights: str | Path | None = None,
        stages: Sequence[str] = (),
        *,
        level: int = 0,
        backend: Backend | str | None = None,
        input_shapes: Mapping[str, Sequence[int]] | None = None,
        seed: int | None = None,
    ) -> None:
        message = load_net(prototxt)
        filtered = filter_net(message, phase, tuple(stages), level)
        self.name: str = message.name
        self.phase = phase
        self.backend = select_backend("numpy" if backend is None else backend)
        self.xp = self.backend.xp
        asked = {name: tuple(int(size) for size in shape) for name, shape in (input_shapes or {}).items()}
        self._context = Context(
            phase=phase,
            xp=self.xp,
            compiled=self.backend.name in _COMPILED,
            seed=seed or 0,
            scratch=Scratch(self.xp),
            input_shapes=asked,
        )
        layers = iter(build_layers(filtered, self._context))
        self._graph = wire(filtered, lambda spec: next(layers))
        self.inputs, self.outputs = self._graph.inputs, self._graph.outputs
        unknown = sorted(set(asked) - set(self.inputs))
        if unknown:
            raise UsageError("input_shapes names blobs that are no inputs", expected=self.inputs, found=unknown)
        self.layers = [node.layer for node in self._graph.nodes]
        self.data_layers: list[DataLayer] = [
            data_layer(layer.spec, phase) for layer in self.layers if layer.type == "Data"
        ]
        self._backward_from_start = phase == "TRAIN" or bool(message.force_backward)
        needed = self._needed_bytes()
        if self.backend.name in _COMPILED and needed > (room := available_memory()):
            # The system does not refuse it: it starts to end processes once the memory is written to.
            raise self._no_memory(needed, f"{room / 2**30:,.2f} GiB available")
        try:
            self._allocate()
        except MemoryError as error:
            raise self._no_memory(needed, " ".join(str(error).split()) or "an allocation that failed") from error
        if weights is not None:
            self.copy_from(weights)

    def _needed_bytes(self) -> int:
        """Bytes of blobs, parameters and shared work space: the least that the net takes."""
        homes = {top.home for top in _tops(self._graph)}
        learned = [wanted.shape for layer in self.layers for wanted in layer.param_shapes]
        counts = [math.prod(home.shape) for home in homes] + [math.prod(shape) for shape in learned]
        if self._backward_from_start:
            counts += [math.prod(home.shape) for home in homes if home.gradient]
            counts += [math.prod(shape) for shape in learned]
        return 4 * (sum(counts) + self._context.scratch.count)

    def _no_memory(self, needed: int, found: str) -> StallscopeError:
        sizes = ", ".join(f"{name} {'x'.join(map(str, self._graph.latest[name].shape))}" for name in self.inputs)
        return StallscopeError(
            f"no memory for net {self.name!r} in phase {self.phase}" + (f" with inputs {sizes}" if sizes else ""),
            expected=f"at least {needed / 2**30:,.2f} GiB",
            found=found,
            hint="a smaller batch",
        )

    def _allocate(self) -> None:
        self._homes = {node_top.home: Blob(node_top.shape, self.xp) for node_top in _tops(self._graph)}
        self.blobs = {name: self._homes[value.home] for name, value in self._graph.latest.items()}
        self.learnable = self._make_params()
        self.params = {layer.name: layer.blobs for layer in self.layers if layer.blobs}
        for layer in self.layers:
            layer.allocate()
        self._forward = [(node.layer, self._data(node.bottoms), self._data(node.tops)) for node in self._graph.nodes]
        self._losses = [(self._homes[top.home], top.loss_weight) for top in _tops(self._graph) if top.loss_weight]
        self._steps: list[_Step] | None = None
        if self._backward_from_start:
            self._plan_backward()

    @property
    def iteration(self) -> int:
        """Number of the next forward pass, as the random masks count it."""
        return self._context.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._context.iteration = value

    @property
    def loss(self) -> float:
        """The weighted sum of all losses of the last forward pass."""
        return float(sum(weight * float(blob.device_data.sum()) for blob, weight in self._losses))

    def forward(self, **inputs: Any) -> dict[str, np.ndarray]:
        """Set the given inputs, run all layers, and return copies of the outputs (float32, by blob name).

        Of an output whose size depends on values (Filter's) only what counts.
        """
        self.forward_only(**inputs)
        return {name: self._output(name) for name in self.outputs}

    def _output(self, name: str) -> np.ndarray:
        array, value = self.backend.to_numpy(self.blobs[name].device_data), self._graph.latest[name]
        live = value.producer.layer.live_shapes()
        return (array if live is None else array[: live[value.producer.tops.index(value)][0]]).copy()

    def forward_only(self, **inputs: Any) -> None:
        """:meth:`forward` without copying the outputs, for loops that look at some of them, or at ``loss``."""
        for name, value in inputs.items():
            if name not in self.inputs:
                raise UsageError(f"net has no input {name!r}", expected=self.inputs, found=name)
            self._set(name, value)
        for layer, bottoms, tops in self._forward:
            layer.forward(bottoms, tops)
        if self.phase == "TRAIN":
            self._context.iteration += 1

    def backward(self, **top_diffs: Any) -> dict[str, np.ndarray]:
        """Run all layers backward after a forward pass; returns copies of the inputs' gradients, where there are any.

        Losses start from their weight, other outputs from the gradient given here or left in their blob. Gradients of
        parameters are *added* to ``params[layer][i].diff`` (see :meth:`clear_param_diffs`), as in Caffe.
        """
        self.backward_only(**top_diffs)
        gradients = {}
        for name in self.inputs:
            value = self._graph.latest[name]
            if value.gradient:
                gradients[name] = self.backend.to_numpy(self.blobs[name].device_diff).copy()
        return gradients

    def backward_only(self, **top_diffs: Any) -> None:
        """:meth:`backward` without copying the inputs' gradients."""
        steps = self._steps if self._steps is not None else self._plan_backward()
        if not steps:
            raise UsageError(
                "this net has no backward pass",
                found="no loss and nothing to learn",
                hint="force_backward: true in the prototxt gives every blob a gradient",
            )
        for blob, weight in self._losses:
            blob.device_diff[...] = weight
        for value in self._graph.zeroed:
            self._homes[value.home].device_diff[...] = 0
        for name, diff in top_diffs.items():
            if name not in self.outputs:
                raise UsageError(f"net has no output {name!r}", expected=self.outputs, found=name)
            self._set(name, diff, gradient=True)
        for step in steps:
            step.layer.backward(step.bottoms, step.tops, step.top_diffs, step.bottom_diffs, step.param_diffs)
            for total, part in step.sums:
                total += part
            for total, part in step.param_sums:
                total += part

    def clear_param_diffs(self) -> None:
        """Set the gradients of all parameters to 0."""
        for param in self.learnable:
            param.blob.device_diff[...] = 0

    def copy_from(self, path: str | Path, *, reshape: bool = False) -> CopyReport:
        """Copy weights by layer name from a ``.caffemodel``; all or nothing (:func:`gpu.caffemodel.copy_weights`)."""
        from gpu.caffemodel import copy_weights

        return copy_weights(self, path, reshape=reshape)

    def save(self, path: str | Path, *, diff: bool = False) -> None:
        """Write the weights (HDF5 where the name ends in ``.h5``), with gradients where ``diff``; all or nothing."""
        from gpu.caffemodel import save

        save(self, path, diff=diff)

    def share_params(self, other: Net) -> None:
        """Use the parameters of ``other``, by layer name, in place of this net's own (one memory, no copies).

        Layers that ``other`` lacks keep theirs. Raises ParamShapesError where the shapes of two layers differ.
        """
        replaced: dict[int, Blob] = {}
        for layer in self.layers:
            theirs = other.params.get(layer.name, [])
            own, given = [blob.shape for blob in layer.blobs], [blob.shape for blob in theirs]
            if not theirs or not own:
                continue
            if own != given:
                raise ParamShapesError(
                    f"layer {layer.name!r} ({layer.type}): cannot share parameters of other shapes in "
                    f"{self.phase} and {other.phase}",
                    expected=f"{own}, as in {self.phase}",
                    found=f"{given} in {other.phase}",
                )
            replaced.update({id(mine): blob for mine, blob in zip(layer.blobs, theirs, strict=True)})
        for layer in self.layers:
            layer.blobs[:] = [replaced.get(id(blob), blob) for blob in layer.blobs]
        self.learnable = [replace(param, blob=replaced.get(id(param.blob), param.blob)) for param in self.learnable]
        if self._steps is not None:
            self._plan_backward()

    def _set(self, name: str, value: Any, gradient: bool = False) -> None:
        blob = self.blobs[name]
        try:
            if gradient:
                blob.diff = value
            else:
                blob.data = value
        except StallscopeError as error:
            raise UsageError(
                f"an array does not fit blob {name!r}", expected=error.expected, found=error.found
            ) from error

    def _data(self, values: Sequence[Any]) -> list[Array]:
        return [self._homes[value.home].device_data for value in values]

    def _make_params(self) -> list[Param]:
        """Give every layer its parameters, shared ones by name; returns each once."""
        owners: dict[str, int] = {}
        made: list[list[Any]] = []  # blob, lr_mult or None, decay_mult or None, name
        for node in self._graph.nodes:
            layer, specs = node.layer, node.layer.spec.param
            for i, wanted in enumerate(layer.param_shapes):
                spec = specs[i] if i < len(specs) else None
                lr = spec.lr_mult if spec is not None and spec.HasField("lr_mult") else None
                decay = spec.decay_mult if spec is not None and spec.HasField("decay_mult") else None
                if not layer.learned:
                    lr = decay = 0.0
                if spec is not None and spec.name in owners:
                    row = made[owners[spec.name]]
                    layer.blobs.append(_shared(layer, i, spec, wanted.shape, row[0], row[3]))
                    for column, value, field in ((1, lr, "lr_mult"), (2, decay, "decay_mult")):
                        if value is not None and row[column] not in (None, value):
                            raise layer.error(
                                f"shared parameter {spec.name!r} has two values of {field}",
                                expected=f"{row[column]}, as in {row[3]}",
                                found=value,
                            )
                        row[column] = value if row[column] is None else row[column]
                    continue
                blob = Blob(wanted.shape, self.xp)
                blob.data = fill(wanted.filler, wanted.shape, self._context.seed, f"{layer.name}/{i}")
                layer.blobs.append(blob)
                if spec is not None and spec.name:
                    owners[spec.name] = len(made)
                made.append([blob, lr, decay, f"{layer.name}.{i}"])
        return [
            Param(blob, 1.0 if lr is None else lr, 1.0 if decay is None else decay, name)
            for blob, lr, decay, name in made
        ]

    def _plan_backward(self) -> list[_Step]:
        """Make the gradients, the work space for sums, and the list of what backward will do."""
        adding, params = Scratch(self.xp), Scratch(self.xp)
        nodes = [node for node in reversed(self._graph.nodes) if node.backward]
        for node in nodes:
            adding.reserve(*[bottom.shape for bottom, adds in zip(node.bottoms, node.adds, strict=True) if adds])
            params.reserve(*[blob.shape for blob in node.layer.blobs])
        self._steps = [self._step(node, adding, params) for node in nodes]
        return self._steps

    def _step(self, node: Node, adding: Scratch, params: Scratch) -> _Step:
        parts = iter(adding.arrays(*[b.shape for b, adds in zip(node.bottoms, node.adds, strict=True) if adds]))
        bottom_diffs: list[Array | None] = []
        sums = []
        for bottom, propagates, adds in zip(node.bottoms, node.propagate, node.adds, strict=True):
            diff = self._homes[bottom.home].device_diff if propagates else None
            if adds:
                part = next(parts)
                sums.append((diff, part))
                diff = part
            bottom_diffs.append(diff)
        spaces = params.arrays(*[blob.shape for blob in node.layer.blobs])
        wanted = list(zip(node.layer.blobs, spaces, node.param_gradients, strict=True))
        return _Step(
            node.layer,
            self._data(node.bottoms),
            self._data(node.tops),
            [self._homes[top.home].device_diff for top in node.tops],
            bottom_diffs,
            sums,
            [space if wants else None for _, space, wants in wanted],
            [(blob.device_diff, space) for blob, space, wants in wanted if wants],
        )


def _tops(graph: Graph) -> list[Any]:
    return [top for node in graph.nodes for top in node.tops]


def _shared(layer: Layer, index: int, spec: Any, shape: Shape, blob: Blob, owner: str) -> Blob:
    """The blob of a shared parameter as its second layer sees it."""
    if blob.shape == shape:
        return blob
    permissive = spec.share_mode == 1
    if not permissive or blob.count != int(np.prod(shape)):
        raise layer.error(
            f"shared parameter {spec.name!r} (index {index}) does not have the shape of its owner",
            expected=f"{blob.shape}, as in {owner}" + (" (or as many values)" if permissive else ""),
            found=shape,
        )
    return Blob(shape, blob.xp, blob.device_data.reshape(shape), blob.device_diff.reshape(shape))
