"""The executor: nets and solvers with Caffe's semantics, and the device they run on (see docs/design.md).

    from gpu import Net, Solver, open_device, select_backend

Importing this package loads neither cupy nor numba: each name below is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu.backend import Backend, blas_threads, select_backend
    from gpu.blob import Blob
    from gpu.device import Device, Upload, open_device
    from gpu.net import Net
    from gpu.python_layer import PythonDataLayer, PythonLayer, register_layer
    from gpu.solver import Solver

_HOME = {
    "Backend": "gpu.backend",
    "Blob": "gpu.blob",
    "Device": "gpu.device",
    "Net": "gpu.net",
    "PythonDataLayer": "gpu.python_layer",
    "PythonLayer": "gpu.python_layer",
    "Solver": "gpu.solver",
    "Upload": "gpu.device",
    "blas_threads": "gpu.backend",
    "open_device": "gpu.device",
    "register_layer": "gpu.python_layer",
    "select_backend": "gpu.backend",
}

__all__ = [
    "Backend",
    "Blob",
    "Device",
    "Net",
    "PythonDataLayer",
    "PythonLayer",
    "Solver",
    "Upload",
    "blas_threads",
    "open_device",
    "register_layer",
    "select_backend",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # found directly the next time
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
