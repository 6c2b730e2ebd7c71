"""Convolutions by cuDNN, through ``nvidia-cudnn-frontend``, where it is installed: plans are chosen by rule.

cuDNN offers several plans for one convolution. The one that is used is the first in the order of its heuristics (mode
A, then the fallbacks) that can be built, fits the workspace and carries no barred note. Nothing is ever timed, so the
same card and library take the same plan at every run. Barred always: plans that convert their inputs to fewer bits or
sum in fewer, and tensor cores, which for float32 means TF32. With ``deterministic``: plans that are not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gpu.backend import Backend
from profiler.errors import StallscopeError

Array = Any
Pass = Literal["forward", "data", "weights"]
PASSES: tuple[Pass, ...] = ("forward", "data", "weights")
IM2COL = "im2col + GEMM"
BARRED = ("DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "TENSOR_CORE")
NONDETERMINISTIC = "NONDETERMINISTIC"
WORKSPACE = 1 << 30
"""Bytes of work space that a plan may want at the most."""


class NoPlanError(StallscopeError):
    """cuDNN has no plan for a convolution that the rules allow."""


@dataclass(frozen=True)
class ConvolutionShape:
    """x[n, C, *size], w[O, C / groups, *kernel], y[n, O, *out]; stride, pad and dilation for each spatial axis."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]


@dataclass(frozen=True)
class Candidate:
    """One plan as ``gpu.time --algorithms`` lists it.

    ``workspace``: bytes, -1 where the plan cannot be built. ``notes``: those of its numerical notes that matter here.
    ``allowed``: by the rules. ``chosen``: this is the one in use. ``problem``: why it cannot be built.
    """

    direction: Pass
    name: str
    workspace: int
    notes: tuple[str, ...]
    allowed: bool
    chosen: bool
    problem: str = ""

    @property
    def deterministic(self) -> bool:
        return NONDETERMINISTIC not in self.notes


@dataclass
class Convolution:
    """A built plan. ``name`` identifies it across runs of one version of cuDNN; ``workspace`` is in bytes."""

    name: str
    workspace: int
    index: int
    _graph: Any
    _tensors: tuple[Any, Any, Any]
    _before: Callable[[], Any]

    def run(self, first: Array, second: Array, result: Array, workspace: Array) -> None:
        """forward: (x, w, y); data: (dy, w, dx); weights: (x, dy, dw). Float32, C-contiguous, on the current stream."""
        handle = self._before()
        arrays = dict(zip(self._tensors, (first, second, result), strict=True))
        self._graph.execute_plan_at_index(arrays, workspace, self.index, handle)


@dataclass
class _Described:
    graph: Any
    tensors: tuple[Any, Any, Any]


@dataclass
class Cudnn:
    """cuDNN on the current device. ``frontend``: the module ``cudnn``."""

    frontend: Any
    cupy: Any
    deterministic: bool = True
    limit: int = WORKSPACE
    _handle: Any = None
    _stream: Any = None
    _found: dict[tuple[Pass, ConvolutionShape], Convolution | NoPlanError] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return f"{self.frontend.backend_version()} (frontend {self.frontend.__version__})"

    @property
    def barred(self) -> tuple[str, ...]:
        """Numerical notes that no plan in use carries."""
        return (*BARRED, NONDETERMINISTIC) if self.deterministic else BARRED

    def convolution(self, direction: Pass, shape: ConvolutionShape) -> Convolution:
        """The plan for a convolution, built; the same object for the same question.

        Raises NoPlanError where cuDNN has none, or none that is allowed.
        """
        key = direction, shape
        if key not in self._found:
            try:
                self._found[key] = self._choose(direction, shape)
            except NoPlanError as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, NoPlanError):
            raise found
        return found

    def candidates(self, direction: Pass, shape: ConvolutionShape) -> list[Candidate]:
        """All plans in cuDNN's order with their notes. Slow: each plan is built, some of them several times."""
        plain = self._planned(direction, shape, ())
        # A frontend names the notes of a filter, not those of a plan: whatever a filter takes away has that note.
        without = {note: self._planned(direction, shape, (note,)) for note in (*BARRED, NONDETERMINISTIC)}
        chosen = self._found.get((direction, shape))
        out = []
        for index in range(plain.graph.get_execution_plan_count()):
            name = plain.graph.get_plan_name_at_index(index)
            workspace, problem = self._build(plain.graph, index)
            notes: tuple[str, ...] = ()
            if not problem:
                notes = tuple(note for note, other in without.items() if self._build(other.graph, index)[1])
            allowed = not problem and not set(notes) & set(self.barred) and workspace <= self.limit
            here = isinstance(chosen, Convolution) and chosen.name == name
            out.append(Candidate(direction, name, workspace, notes, allowed, here, problem))
        return out

    def _choose(self, direction: Pass, shape: ConvolutionShape) -> Convolution:
        described = self._planned(direction, shape, self.barred)
        graph, problems = described.graph, []
        for index in range(graph.get_execution_plan_count()):
            workspace, problem = self._build(graph, index)
            if not problem and workspace > self.limit:
                problem = f"wants {workspace} bytes of work space"
            if not problem:
                name = graph.get_plan_name_at_index(index)
                return Convolution(name, workspace, index, graph, described.tensors, self._on_current_stream)
            problems.append(problem)
        raise NoPlanError(
            "cuDNN has no plan that is allowed",
            expected=f"none of the notes {', '.join(self.barred)}; at most {self.limit} bytes of work space",
            found=f"{len(problems)} plans, the last one: {problems[-1]}" if problems else "no plans",
        )

    def _planned(self, direction: Pass, shape: ConvolutionShape, notes: Sequence[str]) -> _Described:
        """The graph of one convolution with its list of plans, those with ``notes`` taken out."""
        frontend = self.frontend
        try:
            described = self._describe(direction, shape)
            graph = described.graph
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([frontend.heur_mode.A, frontend.heur_mode.FALLBACK])
            graph.deselect_numeric_notes([getattr(frontend.numerical_note, note) for note in notes])
        except Exception as error:  # cudnnGraphNotSupportedError, RuntimeError, whatever the binding raises
            raise NoPlanError(f"cuDNN cannot do this convolution: {_line(error)}") from error
        return described

    def _describe(self, direction: Pass, shape: ConvolutionShape) -> _Described:
        frontend, number = self.frontend, self.frontend.data_type.FLOAT
        graph = frontend.pygraph(
            name=f"convolution {direction}",
            io_data_type=number,
            intermediate_data_type=number,
            compute_data_type=number,
            handle=self._on_current_stream(),
        )

        def tensor(name: str, dims: tuple[int, ...]) -> Any:
            return graph.tensor(name=name, dim=list(dims), stride=_strides(dims), data_type=number)

        how = {
            "padding": list(shape.pad),
            "stride": list(shape.stride),
            "dilation": list(shape.dilation),
            "compute_data_type": number,
        }
        if direction == "forward":
            first, second, dims = tensor("x", shape.x), tensor("w", shape.w), shape.y
            result = graph.conv_fprop(image=first, weight=second, **how)
        elif direction == "data":
            first, second, dims = tensor("dy", shape.y), tensor("w", shape.w), shape.x
            result = graph.conv_dgrad(loss=first, filter=second, **how)
        else:
            first, second, dims = tensor("x", shape.x), tensor("dy", shape.y), shape.w
            result = graph.conv_wgrad(image=first, loss=second, **how)
        result.set_output(True).set_dim(list(dims)).set_stride(_strides(dims)).set_data_type(number)
        return _Described(graph, (first, second, result))

    @staticmethod
    def _build(graph: Any, index: int) -> tuple[int, str]:
        """(bytes of work space, "") of a plan, or (-1, why not); one that was taken out cannot be built."""
        try:
            graph.build_plan_at_index(index)
            return int(graph.get_workspace_size_plan_at_index(index)), ""
        except Exception as error:  # as above
            return -1, _line(error)

    def _on_current_stream(self) -> Any:
        stream = self.cupy.cuda.get_current_stream().ptr
        if self._handle is None:
            self._handle = self.frontend.create_handle()
        if stream != self._stream:
            self.frontend.set_stream(handle=self._handle, stream=stream)
            self._stream = stream
        return self._handle


@dataclass
class OnePlan(Cudnn):
    """Does one pass by the plan at ``index`` of cuDNN's order, whatever its notes, and the other passes not at all."""

    direction: Pass = "forward"
    index: int = 0

    def _choose(self, direction: Pass, shape: ConvolutionShape) -> Convolution:
        if direction != self.direction:
            raise NoPlanError("another pass is tried")
        described = self._planned(direction, shape, ())
        workspace, problem = self._build(described.graph, self.index)
        if problem:
            raise NoPlanError(problem)
        name = described.graph.get_plan_name_at_index(self.index)
        return Convolution(name, workspace, self.index, described.graph, described.tensors, self._on_current_stream)


_opened: dict[bool, Cudnn | str] = {}


def open_cudnn(backend: Backend) -> Cudnn | str:
    """cuDNN for a backend, or in one line why convolutions are matrix products instead."""
    if backend.name != "cupy":
        return f"backend {backend.name}"
    if backend.cudnn == "off":
        return "device.cudnn: off"
    if backend.deterministic not in _opened:
        _opened[backend.deterministic] = _open(backend)
    return _opened[backend.deterministic]


def _open(backend: Backend) -> Cudnn | str:
    try:
        opened = Cudnn(importlib.import_module("cudnn"), backend.xp, backend.deterministic)
        opened._on_current_stream()
    except ModuleNotFoundError as error:
        if error.name == "cudnn":
            return "nvidia-cudnn-frontend is not installed"
        return f"nvidia-cudnn-frontend cannot be imported: {_line(error)}"
    except Exception as error:  # a missing libcudnn raises whatever the binding likes
        return f"cuDNN cannot be used: {_line(error)}"
    return opened


def algorithms(net: Any) -> dict[str, Mapping[str, str]]:
    """For each layer that has a choice: what does each of its passes, and why where it is not cuDNN."""
    return {layer.name: dict(layer.algorithms) for layer in net.layers if getattr(layer, "algorithms", None)}


def candidates(net: Any) -> dict[str, list[Candidate]]:
    """Every plan that cuDNN has for the passes of each convolution of a net, in its order; empty without cuDNN."""
    out: dict[str, list[Candidate]] = {}
    for layer in net.layers:
        library = getattr(layer, "library", None)
        if library is None or not isinstance(layer.context.cudnn, Cudnn):
            continue
        rows = out[layer.name] = []
        for direction in PASSES:
            try:
                rows += layer.context.cudnn.candidates(direction, library.shape)
            except NoPlanError:  # the layer's ``algorithms`` say why
                continue
    return out


def _strides(dims: tuple[int, ...]) -> list[int]:
    out = [1]
    for size in reversed(dims[1:]):
        out.insert(0, out[0] * size)
    return out


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
