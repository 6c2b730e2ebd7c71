"""What verifying the checksums of a LevelDB costs, measured while it is read and told to the report."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Any

from profiler import recorder

EVERY = 64
"""One record in so many is read twice more: without verifying and with it."""
_TOLD_FROM = 8  # samples
_KEPT = 256


class ChecksumCost:
    """Samples of reads of one LevelDB. A sample reads a record without the block cache, once to have its pages in
    memory, then without and with verification: the difference is the cost, 0 for blocks that LevelDB has cached.

    Parameters
    ----------
    name: the data set, for the note ``checksums`` to the process's recorder, after 8 samples and each time they have
        doubled: medians, in ns of CPU time, since what else happened to run is no cost of reading.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.samples = 0
        self._plain_ns: deque[int] = deque(maxlen=_KEPT)
        self._verified_ns: deque[int] = deque(maxlen=_KEPT)
        self._reads = -1
        self._told = _TOLD_FROM

    def due(self) -> bool:
        """Count a read; True where it is to be sampled: the first one and every 64th from there."""
        self._reads += 1
        return self._reads % EVERY == 0

    def sample(self, db: Any, key: bytes) -> None:
        """Read ``key``, which has just been read without being kept in the cache, twice more."""
        turns = (False, True) if self.samples % 2 else (True, False)  # the first of two may find the colder caches
        for verify in turns:
            began = time.thread_time_ns()
            db.get(key, verify_checksums=verify, fill_cache=False)
            (self._verified_ns if verify else self._plain_ns).append(time.thread_time_ns() - began)
        self.samples += 1
        if self.samples >= self._told:
            self._told *= 2
            recorder.current().note(
                "checksums", data_set=self.name, samples=self.samples, plain_ns=int(median(self._plain_ns)),
                verified_ns=int(median(self._verified_ns)),
            )  # fmt: skip
