"""What verifying the checksums of a LevelDB costs, measured while it is read and told to the report."""

from __future__ import annotations

from collections import deque
from statistics import median

from profiler import recorder

EVERY = 64
"""One block in so many that are read is measured."""
_TOLD_FROM = 8  # samples
_KEPT = 256


class ChecksumCost:
    """Samples of reads of one LevelDB: what reading a block takes with and without verifying it.

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
        """Count a read; True where it is to be measured: the second one and every 64th from there, since the first
        loads what verifying needs."""
        self._reads += 1
        return self._reads % EVERY == 1

    def sample(self, plain_ns: int, verified_ns: int) -> None:
        """Count a sample, in ns of CPU time a block."""
        self._plain_ns.append(plain_ns)
        self._verified_ns.append(verified_ns)
        self.samples += 1
        if self.samples >= self._told:
            self._told *= 2
            recorder.current().note(
                "checksums", data_set=self.name, samples=self.samples, plain_ns=int(median(self._plain_ns)),
                verified_ns=int(median(self._verified_ns)),
            )  # fmt: skip
