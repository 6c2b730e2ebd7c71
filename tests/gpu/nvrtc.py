"""NVRTC through ctypes: CUDA C++ to PTX, which needs neither a GPU nor a driver."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path


class CompileError(Exception):
    """What the compiler said."""


def _candidates() -> Iterator[str]:
    """Of the wheels (nvidia/cu13/lib, nvidia/cuda_nvrtc/lib), of the system, of a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    for folder in list(spec.submodule_search_locations or []) if spec else []:
        yield from (str(path) for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")))
    found = ctypes.util.find_library("nvrtc")
    if found:
        yield found
    yield from (str(path) for path in sorted(Path("/usr/local").glob("cuda*/lib64/libnvrtc.so")))


@functools.cache
def load() -> ctypes.CDLL | None:
    """The first library that loads; None where there is none."""
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def version() -> str:
    library, major, minor = load(), ctypes.c_int(), ctypes.c_int()
    assert library is not None
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


@functools.cache
def architectures() -> tuple[int, ...]:
    """The compute capabilities this NVRTC compiles for, e.g. 75, 80, 90."""
    library, count = load(), ctypes.c_int()
    assert library is not None
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    values = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(values)
    return tuple(values)


def to_ptx(text: str, name: str, options: Sequence[str]) -> str:
    """PTX of a source. Raises CompileError with the compiler's log."""
    library, program, size = load(), ctypes.c_void_p(), ctypes.c_size_t()
    assert library is not None
    status = library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    if status:
        raise CompileError(f"nvrtcCreateProgram: status {status}")
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), given)
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        if status:
            raise CompileError(log.value.decode())
        library.nvrtcGetPTXSize(program, ctypes.byref(size))
        ptx = ctypes.create_string_buffer(size.value)
        library.nvrtcGetPTX(program, ptx)
        return ptx.value.decode()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
