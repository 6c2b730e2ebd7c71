"""Blocks of memory that nets lay their arrays out in: kept for the next net, given back when memory runs short."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from gpu.memory import ALIGNMENT, aligned

_T = TypeVar("_T")


@dataclass(frozen=True)
class Usage:
    """Memory of this process's nets now. Bytes; None where the library does not tell.

    ``used``: blocks that some array still points into, and parameters. ``reserved``: those, and blocks kept for the
    next net. ``largest_free``: the largest kept block. ``live_blobs``: blobs of all nets that there are: one for each
    array that layers pass on (once where they work in place) and each parameter (once where nets share it).
    """

    used: int
    reserved: int
    largest_free: int | None
    live_blobs: int


class Blocks:
    """The blocks of one library. A NumPy block is free when no array points into it any more, not when its net is gone:
    whoever kept ``net.blobs[..].data`` never sees another net's numbers in it. cupy's own pool does the same for its.

    Free blocks are kept until a larger one is wanted than any of them, so what is reserved never exceeds what was once
    in use, plus one block.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._host = xp is np
        self._blocks: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Any:
        """A zeroed flat uint8 array of at least one byte that starts at a multiple of the alignment. MemoryError."""
        size = max(ALIGNMENT, aligned(nbytes))
        if not self._host:
            return self._xp.zeros(size, np.uint8)
        with self._lock:
            best = None
            for index in self._free():
                room = self._blocks[index].size
                if room >= size + ALIGNMENT and (best is None or room < self._blocks[best].size):
                    best = index
            if best is None:
                self._drop()
                self._blocks.append(np.zeros(size + ALIGNMENT, np.uint8))
                best = len(self._blocks) - 1
                view = _start(self._blocks[best])[:size]
            else:
                view = _start(self._blocks[best])[:size]
                view[...] = 0
            return view

    def release(self) -> int:
        """Give the free blocks back to the system; returns their bytes."""
        if not self._host:
            pool = self._xp.get_default_memory_pool()
            before = int(pool.total_bytes())
            pool.free_all_blocks()
            return before - int(pool.total_bytes())
        with self._lock:
            return self._drop()

    def usage(self) -> Usage:
        """What is in use. A few microseconds, and one for each ten blobs."""
        blobs = list(_blobs)
        if not self._host:
            pool = self._xp.get_default_memory_pool()
            return Usage(int(pool.used_bytes()), int(pool.total_bytes()), None, len(blobs))
        own = sum(blob.own_bytes for blob in blobs)
        with self._lock:
            free = [self._blocks[index].size for index in self._free()]
            total = sum(block.size for block in self._blocks)
        return Usage(total - sum(free) + own, total + own, max(free, default=0), len(blobs))

    def _free(self) -> list[int]:
        # The list's own reference, and the argument of getrefcount. Views name the block itself as their base.
        return [index for index in range(len(self._blocks)) if sys.getrefcount(self._blocks[index]) <= 2]

    def _drop(self) -> int:
        free = set(self._free())
        gone = sum(self._blocks[index].size for index in free)
        self._blocks = [block for index, block in enumerate(self._blocks) if index not in free]
        return gone


_blobs: weakref.WeakSet[Any] = weakref.WeakSet()
_by_library: dict[str, Blocks] = {}


def blocks(xp: Any) -> Blocks:
    """The blocks of an array library in this process."""
    found = _by_library.get(xp.__name__)
    if found is None:
        found = _by_library[xp.__name__] = Blocks(xp)
    return found


def count_blob(blob: Any) -> None:
    """Count a blob while it lives."""
    _blobs.add(blob)


def with_room(xp: Any, make: Callable[[], _T]) -> _T:
    """``make()``; where it runs out of memory, once more after all free blocks were given back."""
    try:
        return make()
    except MemoryError:
        blocks(xp).release()
    return make()


def view(block: Any, offset: int, shape: Sequence[int], dtype: Any = np.float32) -> Any:
    """An array of ``shape`` in a block, ``offset`` bytes from its start."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return block[offset : offset + nbytes].view(dtype).reshape(tuple(shape))


def _start(block: np.ndarray) -> np.ndarray:
    """The block from its first multiple of the alignment on."""
    skip = -block.ctypes.data % ALIGNMENT
    return block[skip:]
