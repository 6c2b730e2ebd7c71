"""Processes under a memory limit of the kernel's: a control group of their own, inside that of the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limited:
    """A control group with a limit; ``version`` 1 or 2."""

    folder: Path
    version: int

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Python with these arguments, in the group from before its start."""
        enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs")]
        return subprocess.run([*enter, sys.executable, *arguments], capture_output=True, text=True, **options)

    def killed(self) -> int:
        """Processes that the kernel has killed for memory."""
        text = (self.folder / ("memory.oom_control" if self.version == 1 else "memory.events")).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

    def peak(self) -> int:
        """The most bytes that the group ever had, page cache included."""
        return int((self.folder / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")).read_text())


@contextmanager
def memory_limit(nbytes: int) -> Iterator[Limited]:
    """A group with this limit and no swap; the test is skipped where none can be made."""
    for version, around in _places():
        folder = around / f"stallscope-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
            if version == 2:
                names = ("memory.max", "memory.swap.max")
            (folder / names[0]).write_text(str(nbytes))
            with suppress(OSError):  # without swap there may be no such file
                (folder / names[1]).write_text(str(nbytes if version == 1 else 0))
            yield Limited(folder, version)
        finally:
            folder.rmdir()
        return
    pytest.skip("no control group with a memory limit can be made here (not root, or no writable /sys/fs/cgroup)")


def _places() -> Iterator[tuple[int, Path]]:
    """Groups of this process under which one with a memory limit may be made. Nothing about them is changed."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if names == "memory":
                yield 1, _ROOT / "memory" / path.lstrip("/")
            elif not names:
                own = _ROOT / path.lstrip("/")
                # A group of version 2 that holds processes has no children with limits, but its neighbours may have.
                for around in (own, own.parent):
                    with suppress(OSError):
                        if "memory" in (around / "cgroup.subtree_control").read_text().split():
                            yield 2, around
