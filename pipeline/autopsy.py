"""What is known about a worker that has died: how it ended, what that stands for, and what memory it had.

A process that is gone can be asked nothing, so its memory and that of its control group are read while it lives. Ray
calls every one of these deaths "possibly out of memory".
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from profiler import osread
from profiler.osread import CgroupMemory, MemoryGroup, Resident

LOOK_S = 0.5
_EXPLAINS_S = 30.0
"""A kill for memory that no lost worker has accounted for by then was another process's."""

_OUT_OF_MEMORY = "killed by the kernel: out of memory"
_MEANINGS = {
    "SIGBUS": "a mapped file shrank or is truncated",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "a crash in native code",
    "SIGILL": "a crash in native code",
}
_HINTS = {
    "mapped file": "let whatever copies or writes the database finish, then python -m datasets.verify",
    "out of memory": "fewer feed.workers, a smaller feed.depth or data.train.batch, or more memory for this container",
    "native code": "run with --feed.engine inline under python -X faulthandler",
    "killed by someone": "what ends processes here: a person, a scheduler's limit, ray stop? "
    "The system's log (dmesg, journalctl) may know",
}


class Kills:
    """The kernel's kills for want of memory in one control group. Each of them accounts for one death.

    So a worker that somebody killed is not blamed on memory because another one ran out of it before.
    """

    def __init__(self, group: MemoryGroup) -> None:
        self._group = group
        self._seen = group.oom_kills()
        self._unclaimed: deque[float] = deque()
        self.memory = group.memory()

    @property
    def count(self) -> int | None:
        """Kills so far, None where the system does not tell."""
        return self._seen if isinstance(self._seen, int) else None

    def look(self) -> None:
        """Take note of the memory in use, and of kills."""
        self.memory = self._group.memory()
        self._count()

    def _count(self) -> None:
        now, count = time.monotonic(), self._group.oom_kills()
        if isinstance(count, int) and isinstance(self._seen, int):
            self._unclaimed.extend([now] * (count - self._seen))
        self._seen = count
        while self._unclaimed and self._unclaimed[0] < now - _EXPLAINS_S:
            self._unclaimed.popleft()

    def claim(self) -> bool | None:
        """Whether a kill accounts for a death just now; None where the system does not tell."""
        self._count()
        if self.count is None:
            return None
        return bool(self._unclaimed) and self._unclaimed.popleft() > 0


class KillsByGroup:
    """Those of all control groups that the processes of a crew are in, and of the coordinator's own."""

    def __init__(self) -> None:
        self._own = MemoryGroup()
        self._known = {self._own.folders: Kills(self._own)}

    def vitals(self, pid: int | None) -> Vitals:
        """Of a living process; None: of one that nobody has seen alive, in the coordinator's group most likely."""
        group = self._own if pid is None else MemoryGroup(pid)
        if group.folders not in self._known:
            self._known[group.folders] = Kills(group)
        return Vitals(pid, self._known[group.folders])


class Vitals:
    """One worker process, as long as it lives."""

    def __init__(self, pid: int | None, kills: Kills) -> None:
        self._pid, self._kills = pid, kills
        self._looked_s = 0.0
        self._memory: Resident | None = None

    def look(self) -> None:
        """Read the memory of process and group, at most every :data:`LOOK_S`."""
        now = time.monotonic()
        if self._pid is None or now - self._looked_s < LOOK_S:
            return
        found = osread.resident(self._pid)
        if isinstance(found, Resident):  # one that has just died has none any more
            self._looked_s, self._memory = now, found
            self._kills.look()

    def figures(self) -> dict[str, Any]:
        """MiB that process and group had when they were last seen alive, for a note; what is not known is absent."""
        figures: dict[str, Any] = {}
        if (found := self._memory) is not None:
            figures["rss_mib"] = (found.anonymous + found.file + found.shared) >> 20
            figures["own_mib"] = found.anonymous >> 20
            figures["seen_s_before"] = round(time.monotonic() - self._looked_s, 1)
        if isinstance(group := self._kills.memory, CgroupMemory):
            for name, nbytes in (("used", group.used), ("cache", group.cache), ("limit", group.limit)):
                if nbytes is not None:
                    figures[f"group_{name}_mib"] = nbytes >> 20
        if self._kills.count is not None:
            figures["oom_kills"] = self._kills.count
        return figures

    def meaning(self, status: str, how: str) -> str | None:
        """What an exit status most likely stands for; None where it says nothing. To be asked once."""
        if "SIGKILL" not in status and status != "unknown":
            return next((text for name, text in _MEANINGS.items() if name in status), None)
        if how != "died":
            return None  # it was killed here
        for_memory = self._kills.claim()
        if for_memory:
            return _OUT_OF_MEMORY
        if status != "SIGKILL":
            return None
        if for_memory is None:
            return "killed by someone, or by the kernel for memory"
        return "killed by someone: the kernel has killed nothing here for memory"


def hint(meaning_or_status: str) -> str:
    """What to do about a worker that was lost in this way."""
    inline = "run with --feed.engine inline to see the failure in this process"
    return next((text for name, text in _HINTS.items() if name in meaning_or_status), inline)
