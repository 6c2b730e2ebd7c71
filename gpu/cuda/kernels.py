"""The kernels in ``gpu/cuda/*.cu``: their sources, their arguments, and how cupy compiles and launches them.

The sources also compile as plain C++ (see ``common.cuh``), which is how their arithmetic is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from profiler.errors import StallscopeError

Array = Any
FOLDER = Path(__file__).parent
OPTIONS = ("--std=c++14", "--fmad=false")
"""For NVRTC: products and sums are rounded one by one, as on the host."""
THREADS = 256
_MOST_BLOCKS = 1 << 16  # loops stride over the grid, so more would only cost launches
_MOST_VALUES = 2**31 - 1

_ARRAYS = {"H": "float16", "F": "float32", "D": "float64", "I": "int32", "L": "int64", "W": "uint32", "Q": "uint64"}
_SCALARS: dict[str, type[np.generic]] = {"i": np.int32, "l": np.int64, "q": np.uint64, "f": np.float32}


@dataclass(frozen=True)
class Kernel:
    """``file``: without its ending. ``arguments``: one letter each, ``_ARRAYS`` or ``_SCALARS``; c is the count."""

    file: str
    arguments: str


KERNELS: Mapping[str, Kernel] = {
    "im2col": Kernel("windows", "FFc" + "i" * 14),
    "col2im": Kernel("windows", "FFc" + "i" * 14),
    "max_pool": Kernel("pooling", "FFIc" + "i" * 10),
    "max_pool_back": Kernel("pooling", "FIFc" + "i" * 10),
    "ave_pool": Kernel("pooling", "FFc" + "i" * 10),
    "ave_pool_back": Kernel("pooling", "FFc" + "i" * 10),
    "depthwise": Kernel("depthwise", "FFFiFc" + "i" * 14),
    "depthwise_back": Kernel("depthwise", "FFFc" + "i" * 14),
    "depthwise_columns": Kernel("depthwise", "FFFc" + "i" * 15),
    "sum_rows": Kernel("depthwise", "FFci"),
    "lrn_forward": Kernel("lrn", "FFFciiifff"),
    "lrn_backward": Kernel("lrn", "FFFFFciiiff"),
    "dropout_mask": Kernel("dropout", "Fciqfqqqqq"),
    "sum_picks": Kernel("rows", "FLLFci"),
    "fingerprint": Kernel("fingerprint", "WQQWDLcill"),
    "half_encode": Kernel("half", "WHLcl"),
    "half_round": Kernel("half", "WFLcl"),
    "finish_rows": Kernel("fingerprint", "QQciq"),
}


def source(file: str) -> str:
    """The whole text of one kernel file, ``common.cuh`` first."""
    return "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in ("common.cuh", f"{file}.cu"))


def checked(name: str, count: int, arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments of a launch as their kernel takes them, scalars with their types.

    Raises StallscopeError for arrays of another type, arrays that are not C-contiguous, and more than 2**31 - 1
    values, since a kernel would read them wrongly without a word.
    """
    letters, given = KERNELS[name].arguments, list(arguments)
    out: list[Any] = []
    if not 0 <= count <= _MOST_VALUES:
        raise StallscopeError(
            f"kernel {name}: too many values for one launch", expected=f"<= {_MOST_VALUES}", found=count
        )
    if len(given) != len(letters) - 1:
        raise StallscopeError(f"kernel {name}: wrong number of arguments", expected=len(letters) - 1, found=len(given))
    for letter in letters:
        if letter == "c":
            out.append(np.int32(count))
            continue
        value = given.pop(0)
        if letter in _ARRAYS:
            if value.dtype != _ARRAYS[letter] or not value.flags.c_contiguous:
                raise StallscopeError(
                    f"kernel {name} was given an array it cannot read",
                    expected=f"{_ARRAYS[letter]}, C-contiguous",
                    found=f"{value.dtype}, shape {value.shape}, strides {value.strides}",
                )
            if value.size > _MOST_VALUES and letter != "W":
                raise StallscopeError(f"kernel {name}: an array is too large", expected=_MOST_VALUES, found=value.size)
            out.append(value)
        else:
            out.append(_SCALARS[letter](value))
    return out


class Launcher(Protocol):
    """What runs a kernel: cupy on a device, a build for the host in tests."""

    def launch(self, name: str, count: int, *arguments: Any) -> None:
        """Run kernel ``name`` over ``count`` values (passed in the place of its ``count`` argument)."""


class CupyLauncher:
    """Compiles a file with NVRTC when one of its kernels is first used; launches on cupy's current stream."""

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy = cupy
        self._functions: dict[str, Any] = {}

    def launch(self, name: str, count: int, *arguments: Any) -> None:
        values = checked(name, count, arguments)
        if count:
            blocks = min(-(-count // THREADS), _MOST_BLOCKS)
            self._function(name)((blocks,), (THREADS,), tuple(values))

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            file = KERNELS[name].file
            module = self._cupy.RawModule(code=source(file), options=OPTIONS, backend="nvrtc")
            for other, kernel in KERNELS.items():
                if kernel.file == file:
                    self._functions[other] = module.get_function(other)
        return self._functions[name]


_launchers: dict[str, Launcher] = {}


def own_kernels(xp: ModuleType) -> Launcher | None:
    """The kernels for arrays of ``xp``; None for NumPy, whose arrays no device can read."""
    if xp.__name__ != "cupy":
        return None
    if xp.__name__ not in _launchers:
        _launchers[xp.__name__] = CupyLauncher(xp)
    return _launchers[xp.__name__]


@dataclass(frozen=True)
class Windows:
    """Windows over the last two axes, as the kernels take them."""

    size: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...] = (1, 1)

    @cached_property
    def pooled(self) -> tuple[int, ...]:
        return (*self.size, *self.out, *self.kernel, *self.stride, *self.pad)

    @cached_property
    def dilated(self) -> tuple[int, ...]:
        return (*self.pooled, *self.dilation)
