"""Counts what NumPy allocates for arrays, through its hook for memory handlers (NEP 49), with the lines that asked."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

_SET_HANDLER = 304  # PyDataMem_SetHandler in NumPy's table of functions
_libc = ctypes.CDLL(None)
_libc.malloc.restype = _libc.calloc.restype = _libc.realloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.calloc.argtypes = [ctypes.c_size_t] * 2
_libc.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
_Malloc = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_Calloc = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
_Realloc = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_Free = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

counts: Counter[tuple[str, int]] = Counter()
"""How often each (place, bytes) was asked for since :func:`counted` began."""


def _note(size: int) -> None:
    frame: FrameType | None = sys._getframe(2)
    where = "?"
    while frame is not None:
        if "/gpu/" in frame.f_code.co_filename and "/tests/" not in frame.f_code.co_filename:
            where = f"{frame.f_code.co_filename.rsplit('/gpu/')[-1]}:{frame.f_lineno}"
            break
        frame = frame.f_back
    counts[where, size] += 1


def _malloc(_ctx: Any, size: int) -> Any:
    _note(size)
    return _libc.malloc(size or 1)


def _calloc(_ctx: Any, count: int, size: int) -> Any:
    _note(count * size)
    return _libc.calloc(count or 1, size or 1)


def _realloc(_ctx: Any, old: int, size: int) -> Any:
    _note(size)
    return _libc.realloc(old, size or 1)


def _free(_ctx: Any, old: int, _size: int) -> None:
    _libc.free(old)


class _Handler(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("ctx", ctypes.c_void_p),
        ("malloc", _Malloc),
        ("calloc", _Calloc),
        ("realloc", _Realloc),
        ("free", _Free),
    )


# Arrays made while it counts may outlive it, so the handler lives as long as the process.
_handler = _Handler(b"counting", 1, None, _Malloc(_malloc), _Calloc(_calloc), _Realloc(_realloc), _Free(_free))
_NAME = b"mem_handler"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_capsule = _new_capsule(ctypes.addressof(_handler), _NAME, None)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_table = ctypes.cast(_pointer(np._core._multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
_set = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(_table[_SET_HANDLER])


@contextmanager
def counted() -> Iterator[Counter[tuple[str, int]]]:
    """Count within the block, in this thread."""
    counts.clear()
    before = _set(_capsule)
    try:
        yield counts
    finally:
        _set(before)
