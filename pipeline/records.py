"""Which records made each step: an Arrow stream in the run folder, so that a run can be told apart sample by sample."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from profiler.osread import boot_id
from profiler.streams import StreamFile

SCHEMA = pa.schema([("step", pa.int64()), ("epoch", pa.int32()), ("ids", pa.list_(pa.int64()))])
"""One row per batch that the loop took: its step, the epoch of its first item, and its record numbers in order."""

_FLUSH_S = 0.5


class RecordLog:
    """Appends rows to ``RUN/records/ids-PID.arrows``; what is lost with a killed process is half a second at most."""

    def __init__(self, folder: Path) -> None:
        identity = {"pid": str(os.getpid()), "host": socket.gethostname(), "boot_id": boot_id()}
        self._file = StreamFile(folder / "records", f"ids-{os.getpid()}", SCHEMA, identity, lazy=True)
        self._rows: list[tuple[int, int, np.ndarray]] = []
        self._flushed = time.monotonic()

    def add(self, step: int, epoch: int, ids: np.ndarray) -> None:
        """Note the records of a step: ``ids`` int64[B], copied. Raises OSError when they cannot be written."""
        self._rows.append((step, epoch, ids.copy()))
        if time.monotonic() - self._flushed >= _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what is held back."""
        if self._rows:
            self._file.append_rows(self._rows)
            self._rows.clear()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Write the rest and end the stream."""
        self.flush()
        self._file.close()
