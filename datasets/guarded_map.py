"""A file mapped for reading that may be cut while it is read: what is lost reads as zeros, and is told afterwards.

Reading through a map takes a third of the time of a call for each small record. But where a mapped file is cut, or its
disk fails, the system answers with SIGBUS, which ends a process. So this process gets a handler of that signal: for an
address in one of these maps it puts a page of zeros there and counts a fault; whoever reads compares the count
(:attr:`GuardedMap.sound`) before using what was read. Any other SIGBUS goes to the handler that was there before.

The handler is machine code, made by LLVM from the text below: Python's own handlers run after the instruction that
failed, which never ends here.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import signal
import sys
import threading
import weakref
from typing import NamedTuple

import numpy as np

from profiler.jit import assembled

MOST_BYTES = 1 << 36
"""Of a file to be mapped: page tables take a 512th of what is read of it, in each process."""
MOST_MAPS = 64
"""At a time, of a process."""
_CODE = f"""
@stallscope_bus_ranges = global [{2 * MOST_MAPS} x i64] zeroinitializer
@stallscope_bus_faults = global i64 0
@stallscope_bus_before = global [256 x i8] zeroinitializer
declare ptr @mmap(ptr, i64, i32, i32, i32, i64)
declare i32 @sigaction(i32, ptr, ptr)
declare i32 @raise(i32)
define void @stallscope_bus_handler(i32 %signal, ptr %info, ptr %context) {{
  %code.at = getelementptr i8, ptr %info, i64 8
  %code = load i32, ptr %code.at
  %sent = icmp sle i32 %code, 0
  br i1 %sent, label %others, label %fault
fault:
  %address.at = getelementptr i8, ptr %info, i64 16
  %address = load i64, ptr %address.at
  br label %look
look:
  %i = phi i64 [ 0, %fault ], [ %next, %step ]
  %begin.at = getelementptr i64, ptr @stallscope_bus_ranges, i64 %i
  %begin = load i64, ptr %begin.at
  %j = add i64 %i, 1
  %end.at = getelementptr i64, ptr @stallscope_bus_ranges, i64 %j
  %end = load i64, ptr %end.at
  %behind = icmp uge i64 %address, %begin
  %before.end = icmp ult i64 %address, %end
  %inside = and i1 %behind, %before.end
  br i1 %inside, label %mend, label %step
step:
  %next = add i64 %i, 2
  %over = icmp eq i64 %next, {2 * MOST_MAPS}
  br i1 %over, label %others, label %look
mend:
  %number = and i64 %address, {-mmap.PAGESIZE}
  %page = inttoptr i64 %number to ptr
  %flags = or i32 {mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}, 16
  %got = call ptr @mmap(ptr %page, i64 {mmap.PAGESIZE}, i32 {mmap.PROT_READ}, i32 %flags, i32 -1, i64 0)
  %same = icmp eq ptr %got, %page
  br i1 %same, label %count, label %others
count:
  %old = atomicrmw add ptr @stallscope_bus_faults, i64 1 seq_cst
  ret void
others:
  %back = call i32 @sigaction(i32 %signal, ptr @stallscope_bus_before, ptr null)
  %again = call i32 @raise(i32 %signal)
  ret void
}}
"""


class _Action(ctypes.Structure):
    """``struct sigaction`` of glibc and musl on 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Guard(NamedTuple):
    handler: int
    before: int
    ranges: ctypes.Array[ctypes.c_uint64]
    faults: ctypes.c_uint64


_SIGINFO, _ONSTACK = 4, 0x0800_0000
_changing = threading.Lock()


@functools.cache
def _guard() -> _Guard:
    address = assembled(_CODE)
    return _Guard(
        address("stallscope_bus_handler"),
        address("stallscope_bus_before"),
        (ctypes.c_uint64 * (2 * MOST_MAPS)).from_address(address("stallscope_bus_ranges")),
        ctypes.c_uint64.from_address(address("stallscope_bus_faults")),
    )


@functools.cache
def _sigaction() -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    found = ctypes.CDLL(None, use_errno=True).sigaction
    found.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    return found


def _keep_handler() -> bool:
    """Make sure that our handler is the one in place: others may have put theirs there since. False: it cannot be."""
    guard, call, now = _guard(), _sigaction(), _Action()
    if call(signal.SIGBUS, None, ctypes.addressof(now)) != 0:
        return False
    if now.handler == guard.handler:
        return True
    ours = _Action(handler=guard.handler, flags=_SIGINFO | _ONSTACK)
    with _changing:
        ctypes.memmove(guard.before, ctypes.addressof(now), ctypes.sizeof(now))
        return bool(call(signal.SIGBUS, ctypes.addressof(ours), None) == 0)


class GuardedMap:
    """The first ``nbytes`` of an open file, in memory at :attr:`address`. Make it with :meth:`of`."""

    def __init__(self, mapped: mmap.mmap, place: int) -> None:
        self._mapped, self._place = mapped, place
        content = np.frombuffer(mapped, np.uint8)
        self.address, self.nbytes = int(content.ctypes.data), len(content)
        guard = _guard()
        self._seen = guard.faults.value
        # The end last, and taken away first: the handler may look at any moment.
        guard.ranges[2 * place] = self.address
        guard.ranges[2 * place + 1] = self.address + self.nbytes
        self._close = weakref.finalize(self, _unguard, place, [content, mapped])

    @staticmethod
    def of(fd: int, nbytes: int) -> GuardedMap | None:
        """Map a file; None where that cannot be done safely, or is not worth while."""
        if not 0 < nbytes <= MOST_BYTES or not sys.platform.startswith("linux") or sys.maxsize < 1 << 62:
            return None
        try:
            if not _keep_handler():
                return None
            with _changing:
                place = next((at for at in range(MOST_MAPS) if not _guard().ranges[2 * at]), None)
                if place is None:
                    return None
                return GuardedMap(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), place)
        except (OSError, ValueError, RuntimeError, AttributeError):  # of the map, of LLVM, of the C library
            return None

    def guarded(self) -> bool:
        """Whether it may be read now. Asks the system whether the handler is still in place, and puts it back."""
        return self.sound and _keep_handler()

    @property
    def sound(self) -> bool:
        """Whether all that was ever read from maps since this one was made came from their files."""
        return _guard().faults.value == self._seen

    def close(self) -> None:
        """Unmap it. Idempotent. Nobody may be reading."""
        self._close()


def _unguard(place: int, held: list[object]) -> None:
    mapped = held[1]
    assert isinstance(mapped, mmap.mmap)
    held.clear()  # the array, which would keep the map
    guard = _guard()
    guard.ranges[2 * place + 1] = 0
    guard.ranges[2 * place] = 0
    mapped.close()
