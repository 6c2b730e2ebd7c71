"""Records that are announced to the system before they are read, as long as they are not in memory.

A thread that reads record after record has one request at the disk at a time, and a disk that could serve many waits
for the next. So of a shuffled LMDB the records of the batch to be made, and of the one after it, are announced
(``POSIX_FADV_WILLNEED``) before the first of them is read; the kernel's own read-ahead gains nothing there
(``benchmarks/readahead.py``). For what is in memory already that would be a call a record in vain, so it is done only
while reading takes blocks from storage, which the system counts for each thread: one call a batch asks it.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from datasets.order import Items, Stream
from pipeline.spec import FeedSpec
from profiler.errors import StallscopeError

if TYPE_CHECKING:
    from datasets.lmdb_source import LmdbSource
    from datasets.source import Source

_THREAD = getattr(resource, "RUSAGE_THREAD", None)  # Linux
_BLOCK = 512  # bytes of a block as ru_inblock counts them
_FEW = 16
"""Announcing goes on while one in so many bytes of a batch comes from storage: a single record that is missing is read
no faster for being announced."""


class ReadAhead:
    """For one thread that makes batches of a feed."""

    def __init__(self, spec: FeedSpec, source: LmdbSource, stream: Stream) -> None:
        assert _THREAD is not None
        self._thread: int = _THREAD
        self._spec, self._source, self._stream = spec, source, stream
        self._blocks = -1
        self._nbytes = 0  # of the batch that was announced last
        self._turn: tuple[int, Items] | None = None
        self._announced = -1  # the last step whose records were announced

    @staticmethod
    def of(spec: FeedSpec, source: Source, stream: Stream) -> ReadAhead | None:
        """For this feed, or None where the kernel reads ahead, where the job says so, or the source knows no places."""
        from datasets.lmdb_source import LmdbSource

        if type(source) is not LmdbSource or spec.reads_ahead or spec.readahead is not None or _THREAD is None:
            return None
        return ReadAhead(spec, source, stream)

    def turn(self, step: int, items: Items) -> None:
        """``step`` is to be made of these: :meth:`announce` may speak of it, once."""
        self._turn = (step, items)

    def announce(self) -> None:
        """Announce what the step and the one after it read, if the batches before showed that it is worth while."""
        if self._turn is None:
            return
        (step, items), self._turn = self._turn, None
        blocks = resource.getrusage(self._thread).ru_inblock
        cold = self._blocks < 0 or (blocks - self._blocks) * _BLOCK * _FEW > self._nbytes
        self._blocks = blocks
        if not cold:
            return
        if self._announced != step:
            self._announce(items)
        after, stop = step + 1, self._spec.stop_step
        if self._nbytes and (stop is None or after < stop):
            self._announce(self._stream.at(self._spec.place(after)))
            self._announced = after

    def _announce(self, items: Items) -> None:
        try:
            self._nbytes = self._source.announce(items.records)
        except StallscopeError:
            self._nbytes = 0  # whoever reads them says what is wrong
