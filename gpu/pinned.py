"""Page-locking (pinning) of host memory that somebody else allocated: the ring's slots.

Only from pinned memory does a copy to the device run beside the CPU. CUDA's rules for registering are strict and its
complaints late (a failed call may surface in the next, unrelated one), so this module keeps them itself: page-aligned,
not empty, writable, once per process and range, no overlap, unregistered before the memory is unmapped. Whatever cannot
be pinned is used as it is: slower, never wrong, and said once in a warning.
"""

from __future__ import annotations

import mmap
import os
import warnings
from bisect import bisect_right, insort
from collections.abc import Callable
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE


class PinningWarning(RuntimeWarning):
    """Host memory that could not be page-locked, or not be released again. A job notes it in its run folder."""


class PinnedRanges:
    """The set of disjoint address ranges this process has registered with CUDA.

    ``register(address, nbytes, flags)`` and ``unregister(address)`` are cupy's ``runtime.hostRegister`` and
    ``runtime.hostUnregister``, or stand-ins; ``clear_error`` swallows the error state a failed call leaves behind.
    """

    def __init__(
        self,
        register: Callable[[int, int, int], object],
        unregister: Callable[[int], object],
        clear_error: Callable[[], object] | None = None,
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._clear_error = clear_error
        self._pid = os.getpid()
        self._starts: list[int] = []
        self._held: dict[int, tuple[int, int]] = {}  # start -> (end, how many asked for it)

    @property
    def nbytes(self) -> int:
        """Bytes pinned now."""
        return sum(end - start for start, (end, _) in self._held.items())

    def register(self, memory: Any) -> bool:
        """Pin a writable buffer. True if it is pinned now, False (and a PinningWarning with the reason) if not.

        Asking again for a range, or for a part of one, counts: it is unpinned when every asker has unregistered it.
        """
        self._forget_after_fork()
        array = np.frombuffer(memory, dtype=np.uint8) if not isinstance(memory, np.ndarray) else memory
        address, nbytes = array.ctypes.data, array.nbytes
        if nbytes == 0:
            return self._pageable("it is empty")
        if not array.flags.writeable:
            return self._pageable("it is read-only")
        if not array.flags.c_contiguous:
            return self._pageable("it is not contiguous")
        if address % PAGE:
            return self._pageable(f"it is not page-aligned (address {address:#x})")
        end = address + -(-nbytes // PAGE) * PAGE  # memory is mapped in whole pages
        owner = self._range_at(address)
        if owner is not None and self._held[owner][0] >= address + nbytes:
            held_end, count = self._held[owner]
            self._held[owner] = (held_end, count + 1)
            return True
        following = self._starts[bisect_right(self._starts, address) :][:1]
        if owner is not None or (following and following[0] < end):
            return self._pageable("it overlaps a range that is registered already")
        try:
            self._register(address, end - address, 0)
        except Exception as error:  # CUDARuntimeError, which cannot be named without cupy
            if self._clear_error is not None:
                self._clear_error()
            return self._pageable(f"CUDA refused: {error}")
        insort(self._starts, address)
        self._held[address] = (end, 1)
        return True

    def covers(self, array: np.ndarray) -> bool:
        """Whether all of the array's memory is pinned."""
        self._forget_after_fork()
        start = self._range_at(array.ctypes.data)
        return start is not None and self._held[start][0] >= array.ctypes.data + array.nbytes

    def unregister(self, memory: Any) -> None:
        """Give one registration back; call it before the memory is unmapped. Unknown buffers are ignored."""
        self._forget_after_fork()
        array = np.frombuffer(memory, dtype=np.uint8) if not isinstance(memory, np.ndarray) else memory
        start = self._range_at(array.ctypes.data)
        if start is None:
            return
        end, count = self._held[start]
        if count > 1:
            self._held[start] = (end, count - 1)
        else:
            self._drop(start)

    def close(self) -> None:
        """Unpin everything. May be called twice."""
        self._forget_after_fork()
        for start in list(self._starts):
            self._drop(start)

    def _drop(self, start: int) -> None:
        self._starts.remove(start)
        del self._held[start]
        try:
            self._unregister(start)
        except Exception as error:  # as above
            if self._clear_error is not None:
                self._clear_error()
            warnings.warn(f"host memory at {start:#x} could not be unpinned: {error}", PinningWarning, stacklevel=3)

    def _range_at(self, address: int) -> int | None:
        """Start of the registered range that ``address`` lies in."""
        index = bisect_right(self._starts, address) - 1
        if index < 0 or self._held[self._starts[index]][0] <= address:
            return None
        return self._starts[index]

    def _forget_after_fork(self) -> None:
        # A CUDA context, and with it every registration, does not survive fork(): the child starts from nothing.
        if self._pid != os.getpid():
            self._pid, self._starts, self._held = os.getpid(), [], {}

    @staticmethod
    def _pageable(why: str) -> bool:
        warnings.warn(
            f"host memory stays pageable, copies to the device will not overlap: {why}", PinningWarning, stacklevel=3
        )
        return False


_process_ranges: PinnedRanges | None = None


def process_ranges(cupy: Any) -> PinnedRanges:
    """The one set of this process: several devices and rings share it, because CUDA counts per process."""
    global _process_ranges
    if _process_ranges is None:
        runtime = cupy.cuda.runtime
        # cupy resets CUDA's error state itself before it raises; a version that exports the call is asked to again.
        clear = getattr(runtime, "getLastError", None)
        _process_ranges = PinnedRanges(runtime.hostRegister, runtime.hostUnregister, clear)
    return _process_ranges
