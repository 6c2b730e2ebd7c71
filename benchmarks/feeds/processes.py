"""CPU time and memory of a process with all that it started; Ray's own processes are counted apart."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_RAYS_FILES = "/site-packages/ray/"
_RAYS_NAMES = tuple(f"ray::{name}" for name in ("IDLE", "DashboardAgent", "RuntimeEnvAgent", "SPILL", "RESTORE"))


@dataclass(frozen=True)
class Usage:
    """Seconds of CPU by process, and bytes: proportional set, its anonymous and shared part, and Ray's own set."""

    cpu_s: dict[int, float] = field(default_factory=dict)
    pss: int = 0
    anon_shmem: int = 0
    ray_pss: int = 0
    processes: int = 0

    def cpu_since(self, before: Usage) -> float:
        """Seconds that the processes took since; those that have ended since then count with their parents."""
        return sum(self.cpu_s.values()) - sum(before.cpu_s.values())


def tree(root: int) -> dict[int, bool]:
    """Process ids of ``root`` and everything below it, with whether it is one of Ray's own."""
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
    return {pid: pid != root and _is_rays(pid) for pid in found}


def _is_rays(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return False
    return is_rays_own(command)


def is_rays_own(command: str) -> bool:
    """Daemons, agents, and workers that nobody uses; actors and tasks are not."""
    return command.startswith(_RAYS_NAMES) or (not command.startswith("ray::") and _RAYS_FILES in command)


def usage(root: int, memory: bool = True) -> Usage:
    """What the processes have used so far; ``memory`` walks their page tables, which takes milliseconds."""
    cpu, pss, own, rays, count = {}, 0, 0, 0, 0
    for pid, is_rays in tree(root).items():
        try:
            if not is_rays:
                text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
                cpu[pid] = sum(map(int, text.rpartition(")")[2].split()[11:15])) / _TICK
                count += 1
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
    return Usage(cpu, pss, own, rays, count)
