"""A blob: one named array and the gradient that belongs to it, on whichever device the net lives."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from gpu import arena
from profiler.errors import StallscopeError

Guard = Callable[[str], None]


class BlobReused(StallscopeError):
    """The memory of a blob holds another one's numbers by now."""


class Blob:
    """Values and gradient of one shape.

    ``data`` and ``diff`` are NumPy arrays, float32 unless the net stores them in float16 (its ``precision``). On a host
    backend they are the live arrays, so writing into them works as in pycaffe; on a device they are read-only copies,
    and assigning (``blob.data = x``) sends a new value. ``device_data`` and ``device_diff`` are the live arrays of the
    backend, for code that computes.

    The gradient is made when it is first asked for; a net asks at construction where it will need it. In a net that
    reuses memory all four raise :class:`BlobReused` where they would show another blob's numbers.
    """

    __slots__ = ("__weakref__", "_cleared", "_data", "_diff", "_guard", "lazy", "own_bytes", "shape", "xp")

    def __init__(self, shape: tuple[int, ...], xp: ModuleType = np, data: Any = None, diff: Any = None) -> None:
        self.shape = shape
        self.xp = xp
        self._guard: Guard | None = None
        self._cleared = False
        self.lazy = True
        """Whether :meth:`clear_diff` may wait; not where two blobs show one gradient."""
        self.own_bytes = 0
        """Bytes that this blob allocated itself, rather than a net for it."""
        self._data = None
        self._data = self._zeros() if data is None else data
        self._diff = diff
        arena.count_blob(self)

    def place(self, shape: tuple[int, ...], data: Any, diff: Any, guard: Guard | None) -> None:
        """Give the blob other memory and another shape. ``guard`` is called with "data" or "diff" before either is
        shown."""
        self.shape, self._data, self._diff, self._guard = shape, data, diff, guard
        self.own_bytes = 0

    @property
    def guard(self) -> Guard | None:
        """What is called before the blob shows its arrays."""
        return self._guard

    def lend(self, data: Any) -> None:
        """Show other values, of the same shape, until the next call; for the length of a layer's pass."""
        self._data = data

    @property
    def device_data(self) -> Any:
        """The live values: an array of the backend."""
        if self._guard is not None:
            self._guard("data")
        return self._data

    @property
    def device_diff(self) -> Any:
        """The live gradient: an array of the backend, zero until something was written."""
        if self._diff is None:
            self._diff = self._zeros()
        elif self._guard is not None:
            self._guard("diff")
        if self._cleared:
            self._diff.fill(0)
            self._cleared = False
        return self._diff

    def clear_diff(self) -> None:
        """Set the gradient to 0: when it is looked at, or by :meth:`first_diff` not at all."""
        if self.lazy and self._diff is not None:
            self._cleared = True
        else:
            self.device_diff.fill(0)

    def first_diff(self) -> Any:
        """The gradient's array where it was cleared and not looked at since, for one who writes all of it; or None."""
        if not self._cleared:
            return None
        self._cleared = False
        return self._diff

    @property
    def data(self) -> np.ndarray:
        """Values, ``shape``."""
        return self._host(self.device_data)

    @data.setter
    def data(self, value: Any) -> None:
        self._assign(self.device_data, value)

    @property
    def diff(self) -> np.ndarray:
        """Gradient of the loss with respect to ``data``, ``shape``."""
        return self._host(self.device_diff)

    @diff.setter
    def diff(self, value: Any) -> None:
        self._assign(self.device_diff, value)

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def _zeros(self) -> Any:
        made = self.xp.zeros(self.shape, np.float32 if self._data is None else self._data.dtype)
        self.own_bytes += made.nbytes
        return made

    def _host(self, array: Any) -> np.ndarray:
        if isinstance(array, np.ndarray):
            return array
        copy: np.ndarray = self.xp.asnumpy(array)
        copy.flags.writeable = False  # a write would be lost without a word
        return copy

    def _assign(self, target: Any, value: Any) -> None:
        value = value if hasattr(value, "shape") else np.asarray(value, np.float32)
        if tuple(value.shape) != self.shape:
            raise StallscopeError("an array does not fit its blob", expected=self.shape, found=tuple(value.shape))
        if isinstance(target, np.ndarray):
            with np.errstate(over="ignore"):
                np.copyto(target, value, casting="unsafe")
        else:
            target[...] = self.xp.asarray(value, np.float32)

    def __repr__(self) -> str:
        return f"Blob(shape={self.shape})"
