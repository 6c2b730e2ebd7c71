"""Who is writing to a database now: told by its lock file and /proc, without taking or leaving a lock.

An LMDB's lock file is read, never locked or mapped, and not even read where this process has it open through py-lmdb:
closing any descriptor of a file gives up all locks that a process has on it.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from pathlib import Path

from datasets.errors import DatasetWarning

_MAGIC = 0xBEEFC0DE
_WRITER_MUTEX = 64  # byte of the lock file: the second cache line holds the writer's mutex
_TID_MASK = 0x3FFFFFFF  # of the mutex' first word; the two bits above say 'others wait' and 'its owner died'
_OWNER_DIED = 0x40000000


def lock_file(path: str) -> str:
    """Where LMDB keeps the lock table of the database at ``path``, a folder or a file."""
    return os.path.join(path, "lock.mdb") if os.path.isdir(path) else path + "-lock"


def lmdb_writer(path: str, data_file: str) -> str | None:
    """Names a live process that writes, or holds the database open for writing; None where none can be seen.

    A lock file without a live process behind it, and readers that use locks, are nobody.
    """
    lock = lock_file(path)
    try:
        status = os.stat(lock)
    except OSError:
        return None
    writing = None if _is_open_here(status) else _in_transaction(lock)
    if writing is not None:
        return f"process {writing} is in the middle of a write"
    for pid in lock_holders(status):
        if _has_open_for_writing(pid, data_file):
            return f"process {pid} holds it open for writing"
    return None


def warn_of_writer(path: str, data_file: str, name: str) -> None:
    """A :class:`DatasetWarning` where a live process writes to the LMDB ``name``, or may do so at any time."""
    writer = lmdb_writer(os.path.realpath(path), os.path.realpath(data_file))
    if writer is not None:
        warnings.warn(
            f"{name}: {writer}. What was committed so far is read; the next commit ends this run, since it may "
            "overwrite records that are being read",
            DatasetWarning,
            stacklevel=2,
        )


def lock_holders(status: os.stat_result) -> list[int]:
    """Processes, by /proc/locks, that hold a POSIX lock on the file with this ``stat``."""
    try:
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return []  # no such list on this system: nobody to name
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    found: dict[int, None] = {}
    for line in locks.splitlines():
        words = line.split()
        if place in words and "->" not in words:  # '->' marks those that wait
            found[int(words[words.index(place) - 1])] = None
    return [pid for pid in found if pid > 0]


def _is_open_here(status: os.stat_result) -> bool:
    """Whether this process has the file with this ``stat`` open."""
    try:
        for number in os.listdir("/proc/self/fd"):
            try:
                if os.path.samestat(os.stat(f"/proc/self/fd/{number}"), status):
                    return True
            except OSError:
                continue  # closed meanwhile
    except OSError:
        return True  # not known: nothing is risked
    return False


def _in_transaction(lock: str) -> int | None:
    """The process that owns the writer's mutex, which glibc shows as the number of the owner's thread."""
    if platform.machine() != "x86_64" or sys.platform != "linux" or "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return None  # the mutex lies or looks otherwise
    try:
        with open(lock, "rb") as file:
            head = file.read(_WRITER_MUTEX + 4)
    except OSError:
        return None
    if len(head) < _WRITER_MUTEX + 4 or int.from_bytes(head[:4], "little") != _MAGIC:
        return None
    word = int.from_bytes(head[_WRITER_MUTEX:], "little")
    thread = word & _TID_MASK
    if not thread or word & _OWNER_DIED:
        return None
    try:
        lines = Path(f"/proc/{thread}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None  # it is gone, and left its lock behind
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    if fields.get("State", "").startswith(("Z", "X")):
        return None
    return int(fields["Tgid"])


def _has_open_for_writing(pid: int, data_file: str) -> bool:
    """Whether a process has the file open for writing; False where /proc does not show us (somebody else's process)."""
    try:
        wanted = os.stat(data_file)
        for number in os.listdir(f"/proc/{pid}/fd"):
            try:
                if not os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), wanted):
                    continue
                info = Path(f"/proc/{pid}/fdinfo/{number}").read_text(encoding="ascii")
            except OSError:
                continue  # closed meanwhile
            flags = next(line.split()[1] for line in info.splitlines() if line.startswith("flags:"))
            if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                return True
    except OSError:
        return False
    return False
