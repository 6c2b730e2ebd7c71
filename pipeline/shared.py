"""What the kernel gives to a ring: memory without a name, a lock that dies with its holder, pipes that only wake."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable
from types import TracebackType

from profiler.errors import StallscopeError
from profiler.osread import available_memory

PATIENCE_S = 5.0
"""The ring's lock is held for microseconds; a holder that keeps it for so long is stopped or hung."""


class RingError(StallscopeError):
    """A rule of the ring was broken, or the ring cannot be made."""


def allocate(name: str, nbytes: int, what: str, *, address_space: int = 0) -> int:
    """A memfd with ``nbytes`` of pages reserved, so that nobody dies of SIGBUS later, and as long as
    ``address_space``: what lies behind those bytes may be mapped, and must be reserved before it is touched.

    Raises :class:`RingError` naming ``what`` and the memory needed where there is not enough.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        reserve(fd, 0, nbytes, what)
        os.ftruncate(fd, max(nbytes, address_space))
    except BaseException:
        os.close(fd)
        raise
    return fd


def reserve(fd: int, begin: int, end: int, what: str) -> None:
    """Reserve the pages of a memfd between two offsets. Raises as :func:`allocate` does."""
    nbytes = end - begin
    if nbytes <= 0:
        return
    # The kernel does not refuse a memfd that is too large: it starts to kill processes. So look first.
    room = available_memory()
    if nbytes > room:
        raise _no_room(what, nbytes, f"{room / 2**20:,.1f} MiB available")
    try:
        os.posix_fallocate(fd, begin, nbytes)
    except OSError as error:
        raise _no_room(what, nbytes, error.strerror or str(error)) from error


def _no_room(what: str, nbytes: int, found: str) -> RingError:
    return RingError(
        f"no memory for {what}",
        expected=f"{nbytes / 2**20:,.1f} MiB free",
        found=found,
        hint="a smaller feed.depth or batch, or more memory for this container",
    )


class RecordLock:
    """An exclusive ``fcntl`` lock on a shared file; a context manager. The kernel releases it when its holder dies.

    Parameters
    ----------
    fd: the file. The process must not close any other descriptor of it while it holds the lock (POSIX would drop it).
    patient: wait for ever. The other kind asks what to do after :data:`PATIENCE_S`: it must never wait endlessly for
        a process that was stopped while it held the lock.
    """

    def __init__(self, fd: int, *, patient: bool) -> None:
        self._fd, self._patient = fd, patient
        self._threads = threading.Lock()  # record locks belong to a process and do not keep its threads apart
        self.on_kept: Callable[[int], None] | None = None
        """Called with the pid of a process that keeps the lock; must end that process. None: it is an error."""

    def __enter__(self) -> None:
        self._threads.acquire()
        try:
            if self._patient:
                fcntl.lockf(self._fd, fcntl.LOCK_EX, 1)
            else:
                self._acquire_or_ask()
        except BaseException:
            self._threads.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)
        self._threads.release()

    def holder(self) -> int:
        """Pid of another process that holds the lock at this moment, 0 for none."""
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))
        return 0 if kind == fcntl.F_UNLCK else pid

    def _acquire_or_ask(self) -> None:
        deadline = 0.0
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
                return
            except BlockingIOError:
                deadline = deadline or time.monotonic() + PATIENCE_S
                if time.monotonic() < deadline:
                    time.sleep(20e-6)
                    continue
            holder = self.holder()
            if holder and self.on_kept is None:
                raise RingError(f"process {holder} has kept the lock of the ring for {PATIENCE_S:g} s")
            if holder and self.on_kept is not None:
                self.on_kept(holder)
            deadline = time.monotonic() + PATIENCE_S


def wake_pipe() -> int:
    """A pipe as one descriptor, for reading and writing: it never reports a hang-up. Non-blocking."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    both = os.open(f"/proc/self/fd/{read}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    os.close(read)
    os.close(write)
    return both


def wake(fd: int) -> bool:
    """Wake whoever sleeps on the pipe; False when it is full: whoever waits is awake already."""
    try:
        os.write(fd, b"\0")
    except BlockingIOError:
        return False
    return True


def drain(fd: int) -> None:
    """Forget the wake-ups so far."""
    try:  # noqa: SIM105 - suppress() costs more than the call
        os.read(fd, 65_536)
    except BlockingIOError:
        pass
