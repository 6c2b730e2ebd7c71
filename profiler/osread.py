"""What the operating system says about a thread, a process, a file and the machine, without root.

Every reading returns its value or :class:`Missing` with the reason; none raises and none invents a zero. Kernels
differ (no schedstat, no PSI, cgroup v1 or v2, containers hiding files), so each reason is worth showing.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_WINDOW = 1 << 30  # bytes of a file mapped at a time
_LOWEST_BIT = bytes(byte & 1 for byte in range(256))
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge number


@dataclass(frozen=True)
class Missing:
    """No reading, and why. False in a boolean context."""

    reason: str

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True)
class Sched:
    """Scheduler account of a thread: time on a CPU and time runnable but waiting for one, in ns since its start."""

    cpu_ns: int
    runq_ns: int


@dataclass(frozen=True)
class Usage:
    """``getrusage`` of the calling thread: blocks read from storage (512 B units), page faults (the major ones had to
    wait for storage) and how often it gave its CPU up to wait, so far."""

    inblock: int
    major_faults: int
    minor_faults: int
    waits: int


@dataclass(frozen=True)
class Pressure:
    """Pressure stall information of one resource: microseconds in which some or all tasks were held up."""

    some_us: int
    full_us: int


@dataclass(frozen=True)
class Throttling:
    """CPU limit of the control group: how often and for how long (ns) it held its tasks back."""

    periods: int
    throttled: int
    throttled_ns: int


@dataclass(frozen=True)
class CgroupMemory:
    """Memory of the control group in bytes; ``limit`` is None where there is none.

    ``cache``: page cache in ``used``, which the kernel gives up when memory is asked for; None: not told.
    """

    used: int
    limit: int | None
    cache: int | None = None


@dataclass(frozen=True)
class Smaps:
    """Memory of a process in bytes: resident, and its proportional share of pages it shares with others."""

    rss: int
    pss: int


@dataclass(frozen=True)
class Resident:
    """Resident memory of a process in bytes, by what lies behind it.

    ``anonymous``: its own (heap, stacks); ``file``: pages of mapped files, which are page cache; ``shared``: shared
    memory and memfds, such as the ring.
    """

    anonymous: int
    file: int
    shared: int


class SchedFile:
    """The scheduler account of one thread, kept open so that a reading is one system call.

    Parameters
    ----------
    tid: the thread, by default the calling one. The file stays readable from other threads of the process.
    """

    def __init__(self, tid: int | None = None) -> None:
        path = f"/proc/self/task/{threading.get_native_id() if tid is None else tid}/schedstat"
        self.missing: Missing | None = None
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.sched_of(os.pread(self._fd, 96, 0))
        except (OSError, ValueError, IndexError) as error:
            self.missing = Missing(f"no scheduler statistics ({path}: {error})")
            self.close()

    def raw(self) -> bytes:
        """The file's text, b"" when there is no reading. Equal texts mean that nothing was waited for in between."""
        if self._fd < 0:
            return b""
        try:
            return os.pread(self._fd, 96, 0)
        except OSError:  # the thread has ended
            return b""

    def read(self) -> Sched | Missing:
        text = self.raw()
        if text:
            return self.sched_of(text)
        return Missing("the thread has ended") if self.missing is None else self.missing

    @staticmethod
    def sched_of(text: bytes) -> Sched:
        fields = text.split()
        return Sched(int(fields[0]), int(fields[1]))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


def thread_sched() -> Sched | Missing:
    """The calling thread's scheduler account."""
    file = SchedFile()
    reading = file.read()
    file.close()
    return reading


def thread_usage() -> Usage | Missing:
    """Storage reads and page faults of the calling thread."""
    try:
        usage = resource.getrusage(resource.RUSAGE_THREAD)
    except (AttributeError, OSError, ValueError) as error:
        return Missing(f"no per-thread getrusage ({error})")
    return Usage(usage.ru_inblock, usage.ru_majflt, usage.ru_minflt, usage.ru_nvcsw)


def thread_account() -> dict[str, int]:
    """What the calling thread has used so far, by the names that events have for it; what cannot be read is absent."""
    account = {"cpu_ns": time.thread_time_ns()}
    sched, usage = thread_sched(), thread_usage()
    if isinstance(sched, Sched):
        account["runq_ns"] = sched.runq_ns
    if isinstance(usage, Usage):
        account |= {"inblock": usage.inblock, "major_faults": usage.major_faults, "waits": usage.waits}
    return account


def pressure(resource_name: str) -> Pressure | Missing:
    """PSI of "cpu", "io" or "memory" for the whole machine."""
    text = _read(Path("/proc/pressure") / resource_name)
    if isinstance(text, Missing):
        return text
    totals = {}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        for field in rest.split():
            name, _, value = field.partition("=")
            if name == "total" and value.isdigit():
                totals[kind] = int(value)
    if "some" not in totals:
        return Missing(f"/proc/pressure/{resource_name} has an unknown form")
    return Pressure(totals["some"], totals.get("full", 0))


def cgroup_throttling() -> Throttling | Missing:
    """How often the process's control group was held back by its CPU limit (cgroup v2 or v1)."""
    for folder, unit_ns, field in ((_cgroup(""), 1000, "throttled_usec"), (_cgroup("cpu"), 1, "throttled_time")):
        text = _read(folder / "cpu.stat")
        if isinstance(text, str):
            stat = dict(line.split()[:2] for line in text.splitlines() if len(line.split()) >= 2)
            if field in stat and "nr_periods" in stat:
                periods, throttled = int(stat["nr_periods"]), int(stat.get("nr_throttled", 0))
                return Throttling(periods, throttled, int(stat[field]) * unit_ns)
    return Missing("no cpu.stat with throttling in the process's control group")


class MemoryGroup:
    """The control group (v2 or v1) that bounds the memory of a process: the calling one, or ``pid``, while it lives.

    It can be asked after the process has ended.
    """

    def __init__(self, pid: int | None = None) -> None:
        whose = () if pid is None else (pid,)
        self.folders = (_cgroup("", *whose), _cgroup("memory", *whose))

    def memory(self) -> CgroupMemory | Missing:
        """Memory used and allowed, limits of groups around it left out."""
        for folder, names in zip(self.folders, _MEMORY_FILES, strict=True):
            used, limit = _read(folder / names[0]), _read(folder / names[1])
            if isinstance(used, str) and used.strip().isdigit():
                bound = int(limit) if isinstance(limit, str) and limit.strip().isdigit() else None
                cache = _cache(folder, names[2])
                return CgroupMemory(int(used), None if bound is None or bound >= _UNLIMITED else bound, cache)
        return Missing("no memory figures in the process's control group")

    def room(self) -> int | None:
        """Bytes that it, and those around it, leave; page cache counts as free. None where nothing bounds them."""
        rooms = []
        for folder, (used_name, limit_name, prefix) in zip(self.folders, _MEMORY_FILES, strict=True):
            for group in _and_around(folder):
                used, limit = _read(group / used_name), _read(group / limit_name)
                if isinstance(used, str) and isinstance(limit, str) and limit.strip().isdigit():
                    rooms.append(int(limit) - int(used) + (_cache(group, prefix) or 0))
        return min(rooms, default=None)

    def oom_kills(self) -> int | Missing:
        """Processes in it that the kernel has killed for memory so far; of the machine where no group counts them."""
        for path in (
            self.folders[0] / "memory.events", self.folders[1] / "memory.oom_control", Path("/proc/vmstat"),
        ):  # fmt: skip
            text = _read(path)
            if isinstance(text, str):
                fields = dict(line.split() for line in text.splitlines())
                if "oom_kill" in fields:
                    return int(fields["oom_kill"])
        return Missing("no count of processes killed for memory in the process's control group")


_MEMORY_FILES = (
    ("memory.current", "memory.max", ""),
    ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_"),
)
"""Of v2 and v1: bytes used, the limit, and what stands before the names in memory.stat that count the whole group."""


def _cache(group: Path, prefix: str) -> int | None:
    """Page cache of a control group, also what was read more than once; None: not told."""
    text = _read(group / "memory.stat")
    fields = dict(line.split() for line in text.splitlines()) if isinstance(text, str) else {}
    found = [fields.get(f"{prefix}{state}_file") for state in ("inactive", "active")]
    return None if found == [None, None] else sum(int(size or 0) for size in found)


def cgroup_memory() -> CgroupMemory | Missing:
    """Memory used and allowed in the process's control group (cgroup v2 or v1)."""
    return MemoryGroup().memory()


def available_memory() -> int:
    """Bytes that can be taken now: of the machine, or of a control group (or one around it) where that is less."""
    import psutil

    room, bound = int(psutil.virtual_memory().available), MemoryGroup().room()
    return max(0, room if bound is None else min(room, bound))


def cgroup_cpus() -> float | Missing | None:
    """CPUs the control group, or one around it, may use at once (quota / period), None where unlimited."""
    limits: list[float | None] = []
    for folder in _and_around(_cgroup("")):
        text = _read(folder / "cpu.max")
        if isinstance(text, str):
            quota, _, period = text.strip().partition(" ")
            limits.append(None if quota == "max" else int(quota) / int(period or 100_000))
    for folder in _and_around(_cgroup("cpu")):
        quota_text, period_text = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if isinstance(quota_text, str) and isinstance(period_text, str):
            limits.append(None if int(quota_text) < 0 else int(quota_text) / int(period_text))
    if not limits:
        return Missing("no CPU limit files in the process's control group")
    return min((limit for limit in limits if limit is not None), default=None)


def usable_cpus() -> int:
    """CPUs that this process can keep busy: those it may run on, or whole ones of its control group's limit if fewer.

    What is started beyond that is held back by the kernel for the rest of each period of the limit (100 ms).
    """
    may = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = cgroup_cpus()
    return max(1, min(may, int(limit))) if isinstance(limit, float) else may


def smaps(pid: int | None = None) -> Smaps | Missing:
    """Resident and proportional memory of a process (the calling one by default), from ``smaps_rollup``."""
    path = Path("/proc") / ("self" if pid is None else str(pid)) / "smaps_rollup"
    text = _read(path)
    if isinstance(text, Missing):
        return text
    sizes = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in ("Rss", "Pss"):
            sizes[name] = int(rest.split()[0]) * 1024
    if len(sizes) != 2:
        return Missing(f"{path} holds no Rss and Pss")
    return Smaps(sizes["Rss"], sizes["Pss"])


def resident(pid: int | None = None) -> Resident | Missing:
    """Resident memory of a process (the calling one by default) by kind. Walks no pages, so it costs little."""
    path = Path("/proc") / ("self" if pid is None else str(pid)) / "status"
    text = _read(path)
    if isinstance(text, Missing):
        return text
    sizes = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in ("RssAnon", "RssFile", "RssShmem"):
            sizes[name] = int(rest.split()[0]) * 1024
    if len(sizes) != 3:
        return Missing(f"{path} does not split resident memory by kind")
    return Resident(sizes["RssAnon"], sizes["RssFile"], sizes["RssShmem"])


def counts_io_delay() -> Missing | None:
    """None where the kernel counts how long each task is blocked on storage (delay accounting)."""
    text = _read(Path("/proc/sys/kernel/task_delayacct"))
    if isinstance(text, Missing):
        return Missing(f"whether delay accounting is on is not known ({text.reason})")
    return None if text.strip() == "1" else Missing("delay accounting is off (sysctl kernel.task_delayacct)")


def resident_bytes(path: str | os.PathLike[str]) -> int | Missing:
    """Bytes of a file that lie in the page cache, in whole pages. Reads nothing of the file, and moves no page."""
    untold = _mincore_tells()
    if untold is not None:
        return untold
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            # The kernel tells those who could find out by other means, and calls everything resident to the rest.
            if os.geteuid() not in (0, status.st_uid) and not os.access(path, os.W_OK):
                return Missing("the system tells page residency only to the file's owner and to those who may write it")
            pages = 0
            for offset in range(0, status.st_size, _WINDOW):
                pages += _resident_pages(min(_WINDOW, status.st_size - offset), file.fileno(), offset)
            return min(pages * mmap.PAGESIZE, status.st_size)
    except (OSError, ValueError) as error:
        return Missing(f"{path}: {getattr(error, 'strerror', None) or error}")


@functools.cache
def _mincore_tells() -> Missing | None:
    """None where ``mincore`` works: memory that was never touched must not be called resident."""
    try:
        if _resident_pages(64 * mmap.PAGESIZE, -1, 0):
            return Missing("this system's mincore calls untouched memory resident")
    except (OSError, AttributeError, ValueError) as error:
        return Missing(f"no mincore ({error})")
    return None


def _resident_pages(nbytes: int, fd: int, offset: int) -> int:
    """How many of the pages of a stretch of a file (or of fresh memory, with fd -1) are in memory."""
    library = ctypes.CDLL(None, use_errno=True)
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    address = library.mmap(None, nbytes, mmap.PROT_READ, flags, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        told = (ctypes.c_ubyte * (-(-nbytes // mmap.PAGESIZE)))()
        if library.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), told):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return bytes(told).translate(_LOWEST_BIT).count(1)
    finally:
        library.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def boot_id() -> str:
    """Identity of this boot of this kernel: monotonic clocks of processes with the same one can be compared."""
    text = _read(Path("/proc/sys/kernel/random/boot_id"))
    # Without the file, the host name has to do: good enough to keep the lanes of different machines apart.
    return text.strip() if isinstance(text, str) else f"host-{socket.gethostname()}"


def clock_pair() -> tuple[int, int]:
    """(monotonic_ns, wall_ns) read together: the tightest of five attempts."""
    best: tuple[int, int, int] | None = None
    for _ in range(5):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = (after - before, (before + after) // 2, wall)
    assert best is not None
    return best[1], best[2]


def _cgroup(controller: str, pid: int | None = None) -> Path:
    """Folder of a process's control group: of a v1 controller, or of v2 with an empty name."""
    root = Path("/sys/fs/cgroup")
    text = _read(Path("/proc") / ("self" if pid is None else str(pid)) / "cgroup")
    for line in text.splitlines() if isinstance(text, str) else ():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            base = root / controller if controller else root
            # In a container the path is often that of the host, while the mount shows the group itself as the root.
            return base / path.lstrip("/") if (base / path.lstrip("/")).is_dir() else base
    return root / controller


def _and_around(group: Path) -> Iterator[Path]:
    """A control group and those that it lies in: the limits of all of them hold."""
    while group.is_relative_to("/sys/fs/cgroup"):
        yield group
        group = group.parent


def _read(path: Path) -> str | Missing:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        return Missing(f"{path}: {getattr(error, 'strerror', None) or error}")
