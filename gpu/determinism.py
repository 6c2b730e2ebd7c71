"""What keeps bits the same on a CUDA device, set before its libraries are loaded, and refused where it is too late.

* cuBLAS sums in the same order only with a fixed workspace, read from CUBLAS_WORKSPACE_CONFIG when a handle is made,
  and with one stream at a time (cuBLAS documentation, "Results reproducibility").
* TF32 rounds the inputs of a product to 10 bits; whether it is used depends on the card.
* cuTENSOR may choose algorithms by time; CUB's reductions give the same bits at every run on one device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler.errors import StallscopeError


@dataclass(frozen=True)
class Variable:
    """An environment variable: what it is set to, what else may stand there, and what goes wrong otherwise."""

    value: str
    allowed: tuple[str, ...]
    why: str


VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": Variable(
        ":4096:8", (":4096:8", ":16:8"), "cuBLAS may sum the same product in another order at every run"
    ),
    "NVIDIA_TF32_OVERRIDE": Variable("0", ("0",), "NVIDIA's libraries would round the inputs of products to 10 bits"),
    "CUPY_TF32": Variable("0", ("0",), "cupy would round the inputs of products to 10 bits"),
    "CUPY_ACCELERATORS": Variable("cub", ("cub", ""), "an accelerator could choose algorithms by their time"),
}


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables; call before cupy is imported. May be called again.

    Raises StallscopeError where one is set to something else, or where cupy was imported without the first of them:
    a cuBLAS handle that exists already has its workspace.
    """
    for name, variable in VARIABLES.items():
        found = environment.get(name)
        if found is not None and found not in variable.allowed:
            raise StallscopeError(
                f"deterministic: true cannot be kept: {name} is set to {found!r}, and {variable.why}",
                expected=" or ".join(repr(value) for value in variable.allowed),
                found=found,
                hint=f"unset {name}, or set device.deterministic: false",
            )
    if "cupy" in sys.modules and "CUBLAS_WORKSPACE_CONFIG" not in environment:
        raise StallscopeError(
            "deterministic: true cannot be kept: cupy was imported before the workspace of cuBLAS was fixed",
            expected="CUBLAS_WORKSPACE_CONFIG set before cupy is imported",
            found="not set",
            hint="export CUBLAS_WORKSPACE_CONFIG=:4096:8, or import cupy later, or set device.deterministic: false",
        )
    for name, variable in VARIABLES.items():
        environment.setdefault(name, variable.value)


def verify(cupy: Any) -> None:
    """Look at what the imported cupy really does.

    Raises StallscopeError where somebody switched it to reduced precision or to cuTENSOR in this process.
    """
    core = cupy._core
    kinds = core._routines_linalg
    reduced = {getattr(kinds, f"COMPUTE_TYPE_{name}"): name for name in ("TF32", "BF16", "FP16")}
    kind = core.get_compute_type(np.dtype(np.float32))
    if kind in reduced:
        raise StallscopeError(
            "deterministic: true cannot be kept: cupy multiplies float32 in reduced precision",
            expected="float32",
            found=reduced[kind],
            hint="leave cupy's set_compute_type alone, or set device.deterministic: false",
        )
    accelerators = {*core.get_reduction_accelerators(), *core.get_routine_accelerators()}
    if core._accelerator.ACCELERATOR_CUTENSOR in accelerators:
        raise StallscopeError(
            "deterministic: true cannot be kept: cupy uses cuTENSOR, which may choose by time",
            expected="CUPY_ACCELERATORS=cub",
            found="cutensor",
            hint="leave cupy's accelerators alone, or set device.deterministic: false",
        )


class OneStream:
    """Holds compute to the stream it began on: cuBLAS keeps its promises for one stream at a time."""

    def __init__(self) -> None:
        self._first: int | None = None

    def check(self, stream: Any) -> None:
        """Raises StallscopeError where this is another stream than at the first call."""
        if self._first is None:
            self._first = int(stream.ptr)
        elif int(stream.ptr) != self._first:
            raise StallscopeError(
                "deterministic: true cannot be kept: compute moved to another stream",
                expected=f"stream {self._first:#x}, where it began",
                found=f"{int(stream.ptr):#x}",
                hint="enter no cupy stream of your own around compute, or set device.deterministic: false",
            )
