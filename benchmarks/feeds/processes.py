"""CPU time and memory of a process with all that it started; Ray's own processes are counted apart."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_RAYS_FILES = "/site-packages/ray/"
_IDLE = "ray::IDLE"
_RAYS_NAMES = (_IDLE, *(f"ray::{name}" for name in ("DashboardAgent", "RuntimeEnvAgent", "SPILL", "RESTORE")))


@dataclass(frozen=True)
class Usage:
    """Seconds of CPU by process, and bytes: proportional set, its anonymous and shared part, and Ray's own set."""

    cpu_s: dict[int, float] = field(default_factory=dict)
    pss: int = 0
    anon_shmem: int = 0
    ray_pss: int = 0
    processes: int = 0
    ray_workers: frozenset[int] = frozenset()

    def cpu_since(self, before: Usage) -> float:
        """Seconds that the processes took since. One that has ended counts with its parent, which has waited for it;
        a worker of Ray's that has ended is lost, since its parent is Ray."""
        lost = before.ray_workers - self.cpu_s.keys()
        return sum(self.cpu_s.values()) - sum(value for pid, value in before.cpu_s.items() if pid not in lost)


def tree(root: int) -> dict[int, str]:
    """Process ids of ``root`` and everything below it, with their command lines."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            parents[int(entry)] = int(text.rpartition(")")[2].split()[1])
    found, added = {root}, True
    while added:
        new = {pid for pid, parent in parents.items() if parent in found} - found
        found |= new
        added = bool(new)
    return {pid: _command(pid) for pid in found}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def is_rays_own(command: str) -> bool:
    """Daemons, agents, and workers that nobody uses; actors and tasks are not."""
    return command.startswith(_RAYS_NAMES) or (not command.startswith("ray::") and _RAYS_FILES in command)


def usage(root: int, memory: bool = True) -> Usage:
    """What the processes have used so far; ``memory`` walks their page tables, which takes milliseconds."""
    cpu, workers, pss, own, rays, count = {}, set(), 0, 0, 0, 0
    for pid, command in tree(root).items():
        is_rays = pid != root and is_rays_own(command)
        # Between two tasks a worker is idle: its time counts all the same, and what is truly idle takes none.
        is_worker = command.startswith("ray::") and not (is_rays and not command.startswith(_IDLE))
        try:
            if is_worker:
                workers.add(pid)
            if is_worker or not is_rays:
                text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
                cpu[pid] = sum(map(int, text.rpartition(")")[2].split()[11:15])) / _TICK
            count += not is_rays
            if memory:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
                sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in rollup.splitlines()[1:]}
                if is_rays:
                    rays += sizes["Pss"]
                else:
                    pss += sizes["Pss"]
                    own += sizes["Pss_Anon"] + sizes["Pss_Shmem"]
        except (OSError, ValueError, KeyError):
            continue
    return Usage(cpu, pss, own, rays, count, frozenset(workers))
