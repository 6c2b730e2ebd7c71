"""``cudnn`` of nvidia-cudnn-frontend as far as gpu.cudnn uses it, computing with NumPy; its plans are given.

Names and parameters are the real ones: test_cudnn.py compares them with the wheel where that is installed.
"""

from __future__ import annotations

import itertools
import types
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class FakePlan:
    name: str
    workspace: int = 0
    notes: tuple[str, ...] = ()
    problem: str = ""


class Enum:
    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, name)


class Tensor:
    def __init__(self, dim: Any = None, stride: Any = None) -> None:
        self.dim, self.stride, self.output = dim, stride, False

    def set_output(self, value: bool) -> Tensor:
        self.output = value
        return self

    def set_dim(self, value: list[int]) -> Tensor:
        self.dim = value
        return self

    def set_stride(self, value: list[int]) -> Tensor:
        self.stride = value
        return self

    def set_data_type(self, value: Any) -> Tensor:
        assert value == "FLOAT"
        return self


class cudnnGraphNotSupportedError(RuntimeError):
    pass


def _windows(x: np.ndarray, w: tuple[int, ...], y: tuple[int, ...], how: dict[str, Any]) -> Any:
    """For each kernel offset: the offset, and the view of (padded) x that it reads."""
    for offset in itertools.product(*(range(k) for k in w[2:])):
        at = [o * d for o, d in zip(offset, how["dilation"], strict=True)]
        cut = tuple(slice(a, a + (count - 1) * s + 1, s) for a, count, s in zip(at, y[2:], how["stride"], strict=True))
        yield offset, x[(slice(None), slice(None), *cut)]


class Graph:
    """One convolution without groups."""

    def __init__(
        self,
        name: str = "",
        io_data_type: Any = None,
        intermediate_data_type: Any = None,
        compute_data_type: Any = None,
        handle: Any = None,
    ) -> None:
        assert {io_data_type, intermediate_data_type, compute_data_type} == {"FLOAT"}
        assert handle is not None
        self.plans: list[FakePlan] = []
        self.built: set[int] = set()
        self.barred: set[str] = set()

    def tensor(self, dim: Any, stride: Any = None, data_type: Any = None, name: str = "") -> Tensor:
        assert data_type == "FLOAT"
        return Tensor(dim, stride)

    def _operation(self, kind: str, first: Tensor, second: Tensor, **how: Any) -> Tensor:
        assert how.pop("compute_data_type") == "FLOAT"
        self.kind, self.inputs, self.how, self.result = kind, (first, second), how, Tensor()
        return self.result

    def conv_fprop(self, image: Tensor, weight: Tensor, **how: Any) -> Tensor:
        return self._operation("forward", image, weight, **how)

    def conv_dgrad(self, loss: Tensor, filter: Tensor, **how: Any) -> Tensor:
        return self._operation("data", loss, filter, **how)

    def conv_wgrad(self, image: Tensor, loss: Tensor, **how: Any) -> Tensor:
        return self._operation("weights", image, loss, **how)

    def validate(self) -> None:
        assert self.result.output
        for tensor in (*self.inputs, self.result):
            dense = list(np.empty(tensor.dim, np.int8).strides)
            assert tensor.stride == dense, (tensor.dim, tensor.stride)

    def build_operation_graph(self) -> None:
        pass

    def create_execution_plans(self, heuristics: list[Any]) -> None:
        assert heuristics == ["A", "FALLBACK"]
        self.plans = list(FakeCudnn.plans[self.kind])
        if not self.plans:
            raise cudnnGraphNotSupportedError("No valid engine configs returned from heuristics.")

    def deselect_numeric_notes(self, notes: list[Any]) -> Graph:
        assert self.plans or not notes, "a filter marks nothing before there are plans"
        self.barred |= set(notes)
        return self

    def get_execution_plan_count(self) -> int:
        return len(self.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        return self.plans[index].name

    def build_plan_at_index(self, index: int) -> Graph:
        plan = self.plans[index]
        if self.barred & set(plan.notes):
            raise RuntimeError("Deselecting execution plan")
        if plan.problem:
            raise RuntimeError(plan.problem)
        self.built.add(index)
        FakeCudnn.built.append(plan.name)
        return self

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        assert index in self.built
        return self.plans[index].workspace

    def execute_plan_at_index(
        self, tensor_dict: dict[Tensor, np.ndarray], workspace: Any = None, index: int = 0, handle: Any = None
    ) -> None:
        assert index in self.built
        assert workspace.nbytes >= self.plans[index].workspace
        assert handle is not None
        first, second = (tensor_dict[tensor] for tensor in self.inputs)
        result = tensor_dict[self.result]
        assert all(list(array.shape) == tensor.dim for tensor, array in tensor_dict.items())
        FakeCudnn.executed.append(self.plans[index].name)
        getattr(self, f"_{self.kind}")(first, second, result)

    def _padded(self, x: np.ndarray) -> np.ndarray:
        return np.pad(x, [(0, 0), (0, 0), *((p, p) for p in self.how["padding"])])

    def _forward(self, x: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
        y[...] = 0
        for offset, view in _windows(self._padded(x), w.shape, y.shape, self.how):
            y += np.einsum("nc...,oc->no...", view, w[(slice(None), slice(None), *offset)])

    def _data(self, dy: np.ndarray, w: np.ndarray, dx: np.ndarray) -> None:
        whole = self._padded(np.zeros_like(dx))
        for offset, view in _windows(whole, w.shape, dy.shape, self.how):
            view += np.einsum("no...,oc->nc...", dy, w[(slice(None), slice(None), *offset)])
        inner = tuple(slice(p, p + size) for p, size in zip(self.how["padding"], dx.shape[2:], strict=True))
        dx[...] = whole[(slice(None), slice(None), *inner)]

    def _weights(self, x: np.ndarray, dy: np.ndarray, dw: np.ndarray) -> None:
        n, o = dy.shape[:2]
        for offset, view in _windows(self._padded(x), dw.shape, dy.shape, self.how):
            part = np.einsum("nop,ncp->oc", dy.reshape(n, o, -1), view.reshape(n, view.shape[1], -1))
            dw[(slice(None), slice(None), *offset)] = part


class FakeCudnn(types.ModuleType):
    """The module. ``plans``: what its heuristics offer, by pass."""

    __version__ = "1.32.0"
    plans: dict[str, list[FakePlan]] = {}  # noqa: RUF012
    built: list[str] = []  # noqa: RUF012
    executed: list[str] = []  # noqa: RUF012
    data_type = Enum("FLOAT")
    heur_mode = Enum("A", "FALLBACK")
    numerical_note = Enum("NONDETERMINISTIC", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "TENSOR_CORE")
    pygraph = Graph
    cudnnGraphNotSupportedError = cudnnGraphNotSupportedError

    def __init__(self) -> None:
        super().__init__("cudnn")
        self.streams: list[int] = []

    def create_handle(self) -> Any:
        return object()

    def set_stream(self, handle: Any, stream: int) -> None:
        self.streams.append(stream)

    def backend_version(self) -> int:
        return 91400
