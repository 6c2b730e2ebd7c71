"""A process of this host that somebody else started: is it alive, end it for certain, how did it end.

Everything goes through a pidfd, which names one process for good: a number that the kernel has given to a newer
process can be neither watched nor killed by mistake.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time

from profiler.errors import StallscopeError

# linux/pidfd.h: struct pidfd_info, 64 bytes in its first version; the exit code is its last word (Linux 6.15).
_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3


class Process:
    """A handle on process ``pid``. A pid that no longer exists gives a handle on something dead."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._poll = select.poll()
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1
        else:
            self._poll.register(self._fd, select.POLLIN)

    def fileno(self) -> int:
        """File descriptor that becomes readable when the process ends; -1 when it was gone from the start."""
        return self._fd

    @property
    def alive(self) -> bool:
        """False once the process can run no further instruction (a zombie is not alive)."""
        return self._fd >= 0 and not self._poll.poll(0)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; True when it has come."""
        return self._fd < 0 or bool(self._poll.poll(max(0, timeout_s * 1e3)))

    def kill(self, timeout_s: float = 20.0) -> None:
        """SIGKILL, and return only when the process is gone.

        Raises :class:`StallscopeError` where the kernel cannot end it (it hangs in an I/O call that cannot be
        interrupted): its memory may then still be written to, so nobody may take over its work.
        """
        if self.alive:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        if not self.wait(timeout_s):
            raise StallscopeError(
                f"process {self.pid} does not end after SIGKILL",
                expected=f"gone within {timeout_s:g} s",
                found="still there: most likely blocked in a file system call",
                hint=f"cat /proc/{self.pid}/stack /proc/{self.pid}/wchan; look at the storage it reads from",
            )

    def exit_status(self, timeout_s: float = 0.5) -> str | None:
        """``SIGKILL``, ``exit status 1`` or, where the kernel does not say (before Linux 6.15), None.

        The kernel tells once the parent has collected the process, which is waited for up to ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while self._fd >= 0:
            info = bytearray(64)
            struct.pack_into("=Q", info, 0, _PIDFD_INFO_EXIT)
            try:
                fcntl.ioctl(self._fd, _PIDFD_GET_INFO, info)
                (mask,) = struct.unpack_from("=Q", info, 0)
            except OSError:  # an older kernel, or not collected yet
                mask = 0
            if mask & _PIDFD_INFO_EXIT:
                (status,) = struct.unpack_from("=i", info, 60)
                if os.WIFSIGNALED(status):
                    return signal.Signals(os.WTERMSIG(status)).name
                return f"exit status {os.waitstatus_to_exitcode(status)}"
            if time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        return None

    def close(self) -> None:
        """Give the descriptor back. Idempotent; the handle reads as dead from then on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._poll.unregister(fd)
            os.close(fd)
