"""The CUDA sources built as C++ for the host: the same arithmetic as on a device, on NumPy arrays."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from gpu.cuda.kernels import KERNELS, checked, source

COMPILER = shutil.which("g++") or shutil.which("clang++")
FLAGS = ("-std=c++14", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unused-function")
_TYPES = {np.int32: ctypes.c_int32, np.int64: ctypes.c_int64, np.uint64: ctypes.c_uint64, np.float32: ctypes.c_float}


@functools.cache
def library(file: str) -> ctypes.CDLL:
    """One kernel file as a shared library. The functions stay loaded after their file is gone."""
    assert COMPILER is not None
    with tempfile.TemporaryDirectory() as folder:
        text, built = Path(folder, f"{file}.cpp"), Path(folder, f"{file}.so")
        text.write_text(source(file), encoding="utf-8")
        subprocess.run([COMPILER, *FLAGS, "-o", built, text], check=True, capture_output=True, text=True)
        return ctypes.CDLL(str(built))


class HostLauncher:
    """Runs each kernel once for every thread of a grid of ``blocks`` times ``threads``, one after the other."""

    def __init__(self, blocks: int = 1, threads: int = 1) -> None:
        self.blocks, self.threads = blocks, threads
        self.launched: list[str] = []

    def launch(self, name: str, count: int, *arguments: Any) -> None:
        self.launched.append(name)
        values = [
            ctypes.c_void_p(value.ctypes.data) if isinstance(value, np.ndarray) else _TYPES[type(value)](value.item())
            for value in checked(name, count, arguments)
        ]
        loaded = library(KERNELS[name].file)
        function = getattr(loaded, name)
        function.restype = None
        for block in range(self.blocks):
            for thread in range(self.threads):
                loaded.place_in_grid(thread, block, self.threads, self.blocks)
                function(*values)
