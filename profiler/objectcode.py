"""Kernels without numba: object code that one process compiled, run by all that come later.

Numba takes a process a second and 50 MB before the first kernel runs, nearly all of it for what only compiling needs. A
kernel whose parameters are arrays and numbers needs none of it once it is compiled: its LLVM code, as numba optimised
it, is put into an object file together with an *entry*, a function that takes the arrays as they are, compares their
kinds with what was compiled, and calls (:mod:`profiler.objectcode_keep`). LLVM's own loader (``llvmlite.binding``)
links the file into a process.

What does not fit (other parameters or results, functions that only numba has) is left to numba, and so is every call
with arguments of another kind and every call that ends in an exception. The bits are those of the same machine code.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import logging
import os
import platform
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MISS = object()
"""What a call gives whose arguments are of another kind, or which has to end in an exception."""

MAGIC = b"stallscope object code 1\n"
ENDING = ".obj"
_log = logging.getLogger(__name__)
_loading = threading.Lock()

# What Python types numba takes for a number of this kind, and how it travels.
NUMBERS: dict[str, tuple[tuple[type, ...], Any, str, Callable[[Any], Any]]] = {
    "bool": ((bool, np.bool_), ctypes.c_int64, "i64", int),
    "int64": ((int, np.int64), ctypes.c_int64, "i64", int),
    "uint64": ((np.uint64,), ctypes.c_uint64, "i64", int),
    "float64": ((float, np.float64), ctypes.c_double, "double", float),
    "float32": ((np.float32,), ctypes.c_float, "float", float),
}
RESULTS: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float64": ctypes.c_double,
}
_OF_PROCESSOR = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
_NO_MATTER = ("NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER", "NUMBA_CACHE_DIR")  # for code; workers have the first set
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
_ARRAY = id(np.ndarray)

# Of PyArrayObject and PyArray_Descr, as numba's own unboxing reads them.
DATA, NDIM, SHAPE, STRIDES, DESCR, FLAGS, KIND, ORDER = 16, 24, 32, 40, 56, 64, 28, 26


class Native:
    """One compiled signature of a kernel. Calling it with a tuple of arguments gives its result, or :data:`MISS`.

    Parameters
    ----------
    address: of the entry. parameters: "array", the kind of a number, or a list of them for a tuple, for each.
    result: see :func:`keep`.
    """

    def __init__(self, address: int, parameters: Sequence[str | Sequence[str]], result: Sequence[str]) -> None:
        tuples = [-1 if isinstance(names, str) else len(names) for names in parameters]
        self._tuples = tuples if max(tuples, default=-1) >= 0 else None  # the length of each, -1 for what is none
        flat = [name for names in parameters for name in ([names] if isinstance(names, str) else names)]
        kinds = [ctypes.py_object if name == "array" else NUMBERS[name][1] for name in flat]
        # A call lets go of the interpreter's lock.
        self._call = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, *kinds, ctypes.c_void_p)(address)
        self._count = len(parameters)
        self._numbers = [
            (place, NUMBERS[name][0], NUMBERS[name][3]) for place, name in enumerate(flat) if name != "array"
        ]
        self._single = len(result) == 1
        self._result: Any = None
        if result:
            self._result = RESULTS[result[0]] * len(result)

    def __call__(self, args: tuple[Any, ...]) -> Any:
        if len(args) != self._count:
            return MISS
        given: list[Any] = []
        if self._tuples is None:
            given += args
        else:
            for value, size in zip(args, self._tuples, strict=True):
                if size < 0:
                    given.append(value)
                elif type(value) is tuple and len(value) == size:
                    given += value
                else:
                    return MISS
        for place, types, number in self._numbers:
            value = given[place]
            kind = type(value)
            if kind not in types:
                return MISS
            if kind is not int:
                given[place] = number(value)
            elif not _LOWEST <= value <= _HIGHEST:
                return MISS
        if self._result is None:
            return None if self._call(_ARRAY, *given, None) == 0 else MISS
        result = self._result()
        if self._call(_ARRAY, *given, ctypes.addressof(result)) != 0:
            return MISS
        return result[0] if self._single else tuple(result)


def usable() -> bool:
    """Whether arrays and numbers are laid out in this process as an entry reads them."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return False
    return _layout_as_known()


@functools.cache
def _layout_as_known() -> bool:
    if ctypes.sizeof(ctypes.c_void_p) != 8 or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return False
    array = np.zeros((3, 5), np.float32)[:, 1:]
    base = id(array)

    def word(at: int) -> int:
        return ctypes.c_int64.from_address(at).value

    shape, strides, descr = word(base + SHAPE), word(base + STRIDES), word(base + DESCR)
    return (
        word(base + 8) == id(np.ndarray)
        and word(base + DATA) == array.ctypes.data
        and ctypes.c_int32.from_address(base + NDIM).value == 2
        and (word(shape), word(shape + 8), word(strides), word(strides + 8)) == (3, 4, 20, 4)
        and descr == id(array.dtype)
        and ctypes.c_int32.from_address(base + FLAGS).value == array.flags.num
        and ctypes.c_int32.from_address(descr + KIND).value == array.dtype.num
        and ctypes.c_char.from_address(descr + ORDER).value == b"="
    )


@functools.cache
def environment() -> str:
    """What compiled code depends on beside its source: versions, the processor, and settings of numba's."""
    parts = [sys.implementation.cache_tag, platform.machine()]
    parts += [np.__version__, *map(_version_of, ("numba", "llvmlite"))]
    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        said = [platform.processor()]
    parts += [line for line in said if line.startswith(_OF_PROCESSOR)]
    parts += sorted(
        f"{name}={value}" for name, value in os.environ.items() if name.startswith("NUMBA_") and name not in _NO_MATTER
    )
    return "\n".join(parts)


def _version_of(package: str) -> str:
    """What tells one version of a package from another, without importing it; ``importlib.metadata`` takes 50 ms."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return "missing"
    try:
        return (Path(spec.origin).parent / "_version.py").read_text(encoding="utf-8")
    except OSError:
        from importlib import metadata

        return metadata.version(package)


def load(folder: Path, name: str) -> list[Native]:
    """What is kept of a kernel: one for each signature. A file that is damaged, or of another kind, is passed over."""
    found = []
    for path in _kept(folder).get(name, ()):
        try:
            found.append(_link(path.read_bytes()))
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            _log.info("%s is left to numba: %s", path, error)
    return found


def _kept(folder: Path) -> dict[str, list[Path]]:
    kept: dict[str, list[Path]] = {}
    for path in sorted(folder.glob(f"*{ENDING}")):
        kept.setdefault(path.name.split("-")[0], []).append(path)
    return kept


def _link(content: bytes) -> Native:
    magic, digest, rest = content[: len(MAGIC)], content[len(MAGIC) : len(MAGIC) + 32], content[len(MAGIC) + 32 :]
    if magic != MAGIC or hashlib.sha256(rest).digest() != digest:
        raise ValueError("it is damaged")
    head, _, code = rest.partition(b"\n")
    said = json.loads(head)
    from llvmlite import binding as ll

    with _loading:
        engine = _engine()
        engine.add_object_file(ll.ObjectFileRef.from_data(code))
        engine.finalize_object()
        address = engine.get_function_address(said["entry"])
    if not address:
        raise ValueError("it has no entry")
    return Native(address, said["parameters"], said["result"])


def assembled(text: str) -> Callable[[str], int]:
    """Compile LLVM's assembly; the result gives the address of a function or variable by its name.

    Raises RuntimeError for what LLVM does not take.
    """
    from llvmlite import binding as ll

    with _loading:
        engine = _engine()
        engine.add_module(ll.parse_assembly(text))
        engine.finalize_object()

    def address(name: str) -> int:
        return int(engine.get_function_address(name) or engine.get_global_value_address(name))

    return address


@functools.cache
def _engine() -> Any:
    """Never given back: code may run until the process ends."""
    from llvmlite import binding as ll

    ll.initialize_native_target()
    ll.initialize_native_asmprinter()
    machine = ll.Target.from_default_triple().create_target_machine()
    machine.set_asm_verbosity(False)
    return ll.create_mcjit_compiler(ll.parse_assembly(""), machine)
