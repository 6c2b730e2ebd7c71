"""The memory of the nets after every step: an Arrow stream in the run folder, which the report judges growth by."""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path

from gpu.arena import Usage
from profiler.osread import boot_id, clock_pair
from profiler.streams import MEMORY, StreamFile

_FLUSH_S = 0.5
_log = logging.getLogger(__name__)


class MemoryLog:
    """Appends a row a step to ``RUN/memory/trainer-PID.arrows``. A full disk ends no job: it is warned of once."""

    def __init__(self, folder: Path) -> None:
        monotonic_ns, wall_ns = clock_pair()
        identity = {
            "name": "trainer", "role": "trainer", "actor": "0", "pid": str(os.getpid()), "host": socket.gethostname(),
            "boot_id": boot_id(), "monotonic_ns": str(monotonic_ns), "wall_ns": str(wall_ns),
        }  # fmt: skip
        self._file = StreamFile(folder / "memory", f"trainer-{os.getpid()}", MEMORY, identity, lazy=True)
        self._rows: list[tuple[int, ...]] = []
        self._flushed = time.monotonic()
        self._failed = False

    def add(self, step: int, usage: Usage) -> None:
        """Note what is used after a step."""
        free = -1 if usage.largest_free is None else usage.largest_free
        self._rows.append((step, time.monotonic_ns(), usage.used, usage.reserved, free, usage.live_blobs))
        if time.monotonic() - self._flushed >= _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what is held back."""
        rows, self._rows = self._rows, []
        self._flushed = time.monotonic()
        if not rows or self._failed:
            return
        try:
            self._file.append_rows(rows)
        except OSError as error:
            self._failed = True
            _log.warning("what the steps use of memory cannot be written: %s", error.strerror or error)

    def close(self) -> None:
        """Write the rest and end the stream."""
        self.flush()
        try:
            self._file.close()
        except OSError as error:
            _log.warning("what the steps use of memory cannot be written: %s", error.strerror or error)
