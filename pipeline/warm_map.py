"""When records of a file are read through a map: while they are in memory already.

A map spares the call and the copy for each record. What has to come from storage, though, a map brings in page by page,
each a fault; a call brings a record whole. So a batch whose reads took nothing from storage is followed by one through
the map, and one that took something by calls.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

import numpy as np

from datasets.guarded_map import GuardedMap
from datasets.lmdb_file import LmdbFile

_THREAD = getattr(resource, "RUSAGE_THREAD", None)  # Linux
NO_MAP = np.uint64(0), 0
"""Address and bytes of a file that is read by calls."""


class WarmMap:
    """For one thread that reads one file."""

    def __init__(self) -> None:
        self._file: LmdbFile | None = None
        self._map: GuardedMap | None = None
        self._warm = False
        self.sound = True
        """Whether what the last batch read was what the file held; False where the file is cut or its disk fails."""

    @contextlib.contextmanager
    def of(self, file: LmdbFile) -> Iterator[tuple[np.uint64, int]]:
        """Where the file lies in memory, and how many bytes of it, for the reads of a batch; 0 bytes: not at all."""
        self.sound = True
        if _THREAD is None:
            yield NO_MAP
            return
        if file is not self._file:  # the first one, or the source opened it anew, in a forked process for one
            self._drop()
            self._file = file
        mapped = self._map if self._warm and self._map is not None and self._map.guarded() else None
        before = resource.getrusage(_THREAD)
        yield NO_MAP if mapped is None else (np.uint64(mapped.address), mapped.nbytes)
        after = resource.getrusage(_THREAD)
        if mapped is not None and not mapped.sound:
            self.sound = False
            mapped.close()  # the file is read by calls from now on: they say what is wrong
            return
        warm = before.ru_inblock == after.ru_inblock and before.ru_majflt == after.ru_majflt
        if warm and self._map is None:
            self._map = GuardedMap.of(file.fd, file.size)
        self._warm = warm and self._map is not None

    def _drop(self) -> None:
        if self._map is not None:
            self._map.close()
        self._map, self._warm = None, False
