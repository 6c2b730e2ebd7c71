"""A net: Caffe prototxt in, forward and backward passes out, with the feel of pycaffe."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu import arena
from gpu.backend import Backend, select_backend
from gpu.cudnn import open_cudnn
from gpu.data_layers import DataLayer, data_layers_of
from gpu.fields import build_layers
from gpu.layers.base import Array, Context, Layer, Scratch
from gpu.layers.source import MemoryData
from gpu.layout import Layout
from gpu.memory import MemoryPlan, shortage
from gpu.parameters import make_params, share
from gpu.passes import Passes
from gpu.precision import Cast, Precision
from gpu.precision import check as check_precision
from gpu.prototxt import filter_net, load_net
from gpu.wiring import reshape, wire
from profiler.errors import StallscopeError, UsageError
from profiler.osread import available_memory

if TYPE_CHECKING:
    from gpu.caffemodel import CopyReport


_COMPILED = ("numpy", "emulated")
"""Backends whose arrays the numba kernels can work on."""


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
    reuse: let blobs share memory whose lifetimes do not overlap. Outputs, inputs, losses and parameters keep theirs;
        reading another blob after its memory was given away raises BlobReused. The numbers are the same, bit for bit.
    beside: host memory that the caller is going to take, in bytes by what for: the net must fit beside it.
    poison: for tests: fill memory with NaN as soon as its lifetime ends.
    precision: ``fp16`` stores blobs and their gradients in float16 (:mod:`gpu.precision`); layers compute in float32.
    keep_fp32: with fp16, names of layers whose outputs, their gradients, and parameters stay in float32.

    Attributes
    ----------
    blobs: Blob by name. params: list of Blob by layer name. layers: the layers, in order. learnable: list of Param.
    inputs, outputs: blob names. data_layers: what the data layers ask of the feed.
    iteration: counter of dropout masks; every forward pass in TRAIN takes one, and a solver may set it.
    precision: what is stored in float16, None with fp32. loss_scale: factor of all losses' gradients.

    Blobs, gradients and work spaces lie in one block, see :meth:`memory_plan`. Without ``reuse`` blobs keep what was
    written last; where layers work in place, ``diff`` may be the gradient before the last of them. Inputs of another
    size reshape the net, as in Caffe (:meth:`reshape`).
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
        reuse: bool = False,
        poison: bool = False,
        beside: Mapping[str, int] | None = None,
        precision: str = "fp32",
        keep_fp32: Collection[str] = (),
    ) -> None:
        message = load_net(prototxt)
        filtered = filter_net(message, phase, tuple(stages), level)
        self.name: str = message.name
        self.phase = phase
        self.backend = select_backend("numpy" if backend is None else backend)
        self.xp = self.backend.xp
        asked = {name: tuple(int(size) for size in shape) for name, shape in (input_shapes or {}).items()}
        self._seed = seed or 0
        context = Context(
            phase=phase,
            xp=self.xp,
            compiled=self.backend.name in _COMPILED,
            seed=self._seed,
            scratch=Scratch(self.xp),
            input_shapes=asked,
            cudnn=open_cudnn(self.backend),
        )
        self._iteration = 0
        self._asked = asked
        self._common = context
        self._contexts: dict[str, Context] = {}
        layers = iter(build_layers(filtered, context))

        def build(spec: Any) -> Layer:
            # Work space of its own, so that it can lie wherever there is room while this layer runs.
            layer = next(layers)
            layer.context = self._contexts[spec.name] = replace(context, scratch=Scratch(self.xp))
            return layer

        check_precision(precision, keep_fp32, [layer.name for layer in message.layer])
        self._graph = wire(filtered, build)
        self.precision = Precision(self.xp, self._graph, keep_fp32) if precision == "fp16" else None
        self.loss_scale = 1.0
        self.inputs, self.outputs = self._graph.inputs, self._graph.outputs
        unknown = sorted(set(asked) - set(self.inputs))
        if unknown:
            raise UsageError("input_shapes names blobs that are no inputs", expected=self.inputs, found=unknown)
        self.layers = [node.layer for node in self._graph.nodes]
        self.data_layers: list[DataLayer] = data_layers_of(filtered)
        self._backward_from_start = phase == "TRAIN" or bool(message.force_backward)
        self._layout = Layout(self.xp, reuse=reuse, poison=poison)
        self._passes = Passes(
            self._graph, self.xp, self._layout, self._contexts, self.precision, self._backward_from_start
        )
        self.blobs = {name: self._passes.homes[value.home] for name, value in self._graph.latest.items()}
        self._beside = dict(beside or {})
        self._check_room()
        self._beside = {}  # taken by now, when the net is reshaped
        try:
            arena.with_room(self.xp, self._allocate)
        except MemoryError as error:
            raise self._no_memory(" ".join(str(error).split()) or "an allocation that failed") from error
        if weights is not None:
            self.copy_from(weights)

    def memory_plan(self) -> MemoryPlan:
        """Where each blob, gradient and work space lies in the block, and when it is in use; ``table()`` prints."""
        return self._layout.plan

    def reshape(self, **shapes: Sequence[int]) -> None:
        """Give inputs other shapes (labels of data layers follow their images) and lay all blobs out anew.

        Parameters stay; blobs start at 0. The block grows where it has to and never shrinks. Raises LayerError naming
        the layer that cannot follow, UsageError for a blob that is no input; the net is then as it was.
        """
        unknown = sorted(set(shapes) - set(self.inputs))
        if unknown:
            raise UsageError("reshape names blobs that are no inputs", expected=self.inputs, found=unknown)
        before = dict(self._asked)
        held = {name: self._graph.latest[name].shape for name in self.inputs}
        self._asked.update({name: tuple(int(size) for size in shape) for name, shape in shapes.items()})
        try:
            self._work_out_shapes()
            if held == {name: self._graph.latest[name].shape for name in self.inputs} and not self._graph.following:
                self._passes.place_work()
                return
            self._check_room()
            self._passes.lay_out()
        except (StallscopeError, MemoryError) as error:
            refused = self._no_memory(" ".join(str(error).split())) if isinstance(error, MemoryError) else error
            self._asked.clear()
            self._asked.update(before)
            self._work_out_shapes()
            self._passes.lay_out()
            raise refused from (error if refused is not error else None)

    def _work_out_shapes(self) -> None:
        for context in self._contexts.values():
            context.scratch.clear()
        reshape(self._graph)

    def _needed_bytes(self) -> int:
        """Bytes of the block and the parameters: the least that the net takes."""
        learned = [wanted.shape for layer in self.layers for wanted in layer.param_shapes]
        count = sum(math.prod(shape) for shape in learned) * (2 if self._backward_from_start else 1)
        return 4 * count + self._layout.prepare(self._passes.wanted()).total

    def _check_room(self) -> None:
        if self.backend.name not in _COMPILED:
            return
        needed, others = self._needed_bytes(), sum(self._beside.values())
        if needed + others <= available_memory() + self._layout.nbytes:
            return
        arena.blocks(self.xp).release()
        if needed + others > (room := available_memory() + self._layout.nbytes):
            # The system does not refuse it: it starts to end processes once the memory is written to.
            told = "".join(f"; {what} takes {nbytes / 2**30:,.2f} GiB" for what, nbytes in self._beside.items())
            raise self._no_memory(f"{room / 2**30:,.2f} GiB available{told}", room - others)

    def _no_memory(self, found: str, room: int | None = None) -> StallscopeError:
        inputs = {name: self._graph.latest[name].shape for name in self.inputs}
        plan = self._layout.prepare(self._passes.wanted())
        what = f"no memory for net {self.name!r} in phase {self.phase}"
        return shortage(what, inputs, plan, self._needed_bytes(), arena.blocks(self.xp).usage(), found, room)

    def _allocate(self) -> None:
        for layer in self.layers:
            layer.blobs.clear()
        self.learnable = make_params(self.layers, self.xp, self._seed)
        self.params = {layer.name: layer.blobs for layer in self.layers if layer.blobs}
        self._passes.lay_out()

    @property
    def iteration(self) -> int:
        """Number of the next forward pass, as the random masks count it."""
        return self._iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._iteration = value
        for context in (self._common, *self._contexts.values()):
            context.iteration = value

    @property
    def loss(self) -> float:
        """The weighted sum of all losses of the last forward pass."""
        return float(sum(weight * float(blob.device_data.sum()) for blob, weight in self._passes.losses))

    def forward(self, **inputs: Any) -> dict[str, np.ndarray]:
        """Set the given inputs, run all layers, and return copies of the outputs (float32, by blob name)."""
        self.forward_only(**inputs)
        return {name: self._copy(self.blobs[name].device_data) for name in self.outputs}

    def _copy(self, array: Array) -> np.ndarray:
        return self.backend.to_numpy(array).astype(np.float32)

    def forward_only(self, **inputs: Any) -> None:
        """:meth:`forward` without copying the outputs, for loops that look at some of them, or at ``loss``."""
        if inputs:
            self.set_inputs(inputs)
        layout, poisons = self._layout, self._layout.poisons
        layout.begin(backward=False)
        try:
            for time, (layer, bottoms, tops) in enumerate(self._passes.forward):
                layer.forward(bottoms, tops)
                if poisons:
                    layout.done(time)
        except MemoryError as error:
            raise self._short_in(layer, "forward", error) from error
        layout.end()
        if self.phase == "TRAIN":
            self.iteration += 1

    def set_input_arrays(self, data: Any, labels: Any = None, *, layer: str | None = None) -> None:
        """Give a MemoryData layer all its images and labels; each forward pass takes the next batch of them.

        ``data``: float32 (n, channels, height, width), n a multiple of the batch; None: its tops are inputs again.
        ``layer``: its name, where the net has several. Raises UsageError where it has none, LayerError for arrays that
        do not fit. As in pycaffe.
        """
        found = {each.name: each for each in self.layers if isinstance(each, MemoryData)}
        if layer is None and len(found) == 1:
            (layer,) = found
        if layer not in found:
            raise UsageError(
                "set_input_arrays needs the name of a MemoryData layer" if found else "the net has no MemoryData layer",
                expected=", ".join(found) or "a MemoryData layer",
                found=layer,
                hint=None if found else "write its inputs: forward(data=..., label=...)",
            )
        found[layer].reset(data, labels)

    def set_inputs(self, values: Mapping[str, Any]) -> None:
        """Copy arrays of the host or the device into inputs, by name; the net is reshaped where their sizes ask for it.

        Raises UsageError for a name that is no input and for an array that does not fit.
        """
        other = {}
        for name, value in values.items():
            if name not in self.inputs:
                raise UsageError(f"net has no input {name!r}", expected=self.inputs, found=name)
            source = self._graph.latest[name].producer.layer
            if isinstance(source, MemoryData) and source.given:
                raise UsageError(
                    f"input {name!r} comes from the arrays that layer {source.name!r} was given",
                    hint="set_input_arrays(None) makes it an input again",
                )
            shape = np.shape(value) if not hasattr(value, "shape") else tuple(value.shape)
            if shape != self.blobs[name].shape and len(shape) == len(self.blobs[name].shape):
                other[name] = shape
        if other:
            self.reshape(**other)
        for name, value in values.items():
            self._set(name, value)

    def _short_in(self, layer: Layer | Cast, pass_: str, error: MemoryError) -> StallscopeError:
        released = arena.blocks(self.xp).release()
        short = self._no_memory(" ".join(str(error).split()) or "an allocation that failed")
        return StallscopeError(
            f"layer {layer.name!r} ({layer.type}): no memory in {pass_}; {short.what}",
            expected=short.expected,
            found=f"{short.found}; {released:,} free bytes were given back since",
            hint=short.hint,
        )

    def backward(self, **top_diffs: Any) -> dict[str, np.ndarray]:
        """Run all layers backward after a forward pass; returns copies of the inputs' gradients, where there are any.

        Losses start from their weight times ``loss_scale``, other outputs from the gradient given here or left in their
        blob. Gradients of parameters are *added* to ``params[layer][i].diff`` (see :meth:`clear_param_diffs`), as in
        Caffe.
        """
        self.backward_only(**top_diffs)
        gradients = {}
        for name in self.inputs:
            value = self._graph.latest[name]
            if value.gradient:
                gradients[name] = self._copy(self.blobs[name].device_diff)
        return gradients

    def backward_only(self, **top_diffs: Any) -> None:
        """:meth:`backward` without copying the inputs' gradients."""
        if self._layout.reuse and not self._backward_from_start:
            raise UsageError(
                f"a net in phase {self.phase} that reuses memory has no backward pass",
                hint="Net(..., reuse=False), or force_backward: true in the prototxt",
            )
        passes = self._passes
        steps = passes.backward()
        if not steps:
            raise UsageError(
                "this net has no backward pass",
                found="no loss" if self.learnable else "no loss and nothing to learn",
                hint="a layer with a loss makes it a net to train (a deploy net has none); force_backward: true in the "
                "prototxt gives every blob a gradient",
            )
        layout, poisons = self._layout, self._layout.poisons and self._backward_from_start
        if self._backward_from_start:
            layout.begin(backward=True)
        for diff, weight in passes.loss_diffs:
            diff[...] = weight * self.loss_scale
        for diff in passes.zero_diffs:
            diff[...] = 0
        for name, diff in top_diffs.items():
            if name not in self.outputs:
                raise UsageError(f"net has no output {name!r}", expected=self.outputs, found=name)
            self._set(name, diff, gradient=True)
        try:
            for step in steps:
                layer, param_diffs = step.layer, step.param_diffs
                later = []
                for i, blob, space in step.params:
                    # What is first after a clear is written in place: adding it to zeros would take three passes.
                    param_diffs[i] = blob.first_diff()
                    if param_diffs[i] is None:
                        param_diffs[i] = space
                        later.append((blob.device_diff, space))
                layer.backward(step.bottoms, step.tops, step.top_diffs, step.bottom_diffs, param_diffs)
                for total, part in step.sums:
                    total += part
                for total, part in later:
                    total += part
                if poisons:
                    layout.done(step.time)
        except MemoryError as error:
            raise self._short_in(layer, "backward", error) from error
        layout.end()

    def clear_param_diffs(self) -> None:
        """Set the gradients of all parameters to 0: when they are looked at, or written for the first time."""
        for param in self.learnable:
            param.blob.clear_diff()

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
        self.learnable = share(self, other, self.learnable)
        if self._passes.steps is not None:
            self._passes.plan_backward()

    def _set(self, name: str, value: Any, gradient: bool = False) -> None:
        blob = self.blobs[name]
        try:
            if gradient:
                blob.diff = value
            elif self.precision is None or not self.precision.store(self._graph.latest[name], value, blob):
                blob.data = value
        except StallscopeError as error:
            raise UsageError(
                f"an array does not fit blob {name!r}", expected=error.expected, found=error.found
            ) from error
