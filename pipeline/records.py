"""Which records made each step: an Arrow stream in the run folder, so that a run can be told apart sample by sample."""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from profiler.osread import boot_id
from profiler.recorder import NULL, Recorder
from profiler.streams import StreamFile

SCHEMA = pa.schema([("step", pa.int64()), ("epoch", pa.int32()), ("ids", pa.list_(pa.int64()))])
"""One row per batch that the loop took: its step, the epoch of its first item, and its record numbers in order."""

_FLUSH_S = 0.5
_KEPT = 4096
"""Steps that are held back while they cannot be written."""
_log = logging.getLogger(__name__)


class RecordLog:
    """Appends rows to ``RUN/records/ids-PID.arrows``; what is lost with a killed process is half a second at most.

    A full disk ends no job: the steps are tried again with later ones, and those that could not be kept are counted,
    warned of once and noted at the end.
    """

    def __init__(self, folder: Path, recorder: Recorder = NULL) -> None:
        self._recorder = recorder
        self._problem = ""
        self.lost = 0
        """Steps whose record numbers could not be kept."""
        identity = {"pid": str(os.getpid()), "host": socket.gethostname(), "boot_id": boot_id()}
        self._folder = folder
        self._file = StreamFile(folder / "records", f"ids-{os.getpid()}", SCHEMA, identity, lazy=True)
        self._rows: list[tuple[int, int, np.ndarray]] = []
        self._flushed = time.monotonic()

    def add(self, step: int, epoch: int, ids: np.ndarray) -> None:
        """Note the records of a step: ``ids`` int64[B], copied."""
        self._rows.append((step, epoch, ids.copy()))
        if time.monotonic() - self._flushed >= _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what is held back, as far as that can be done now."""
        try:
            if self._rows:
                self._file.append_rows(self._rows)
                self._rows.clear()
        except OSError as error:
            if not self._problem:
                why = error.strerror or error
                _log.warning("%s: the record numbers of the steps cannot be written now: %s", self._folder, why)
            self._problem = str(error.strerror or error)
            self._drop(len(self._rows) - _KEPT)
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Write the rest and end the stream."""
        self.flush()
        self._drop(len(self._rows))
        try:
            self._file.close()
        except OSError as error:  # of the end mark alone: the reader says that the stream was not closed
            self._problem = str(error.strerror or error)
        if self.lost:
            self._recorder.note("records_lost", steps=self.lost, reason=self._problem)

    def _drop(self, rows: int) -> None:
        if rows > 0:
            self.lost += rows
            del self._rows[:rows]
