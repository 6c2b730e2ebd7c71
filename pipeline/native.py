"""The short way of a batch: from a database's files into the slot in one compiled call, with no Python for a record.

It is the same function of (spec, step) as the general way of :mod:`pipeline.maker`, bit for bit, for records that hold
raw pixels and a label. Where a batch has any other, or something is wrong with one, the general way makes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from datasets.errors import DatasetCorrupt
from pipeline import philox
from pipeline.readahead import ReadAhead
from pipeline.spec import FeedSpec
from pipeline.transforms import NO_MEAN, Transform
from pipeline.warm_map import NO_MAP, WarmMap
from profiler.events import Stage
from profiler.recorder import Recorder

if TYPE_CHECKING:
    from datasets.leveldb_source import LevelDbSource
    from datasets.lmdb_source import LmdbSource
    from datasets.order import Items
    from datasets.source import Source
    from pipeline.maker import Layout, Probe, Slot

_GIVE_UP = 3
"""Batches in a row that could not be made this way, after which it is no longer tried."""
_PAGE = 4096
_NO_WORDS = np.empty((0, 4), np.uint64)


class _Files(Protocol):
    """Records of one kind of database, for the compiled calls."""

    def make(self, records: NDArray[np.int64], *rest: Any) -> tuple[int, int]:
        """Look records up and make a batch of them: how many were taken, and their bytes. ``rest`` are the parameters
        from ``shape`` on of :func:`pipeline.native_kernels.make`."""


class Native:
    """Makes the batches of one feed in a compiled call each, as long as its records allow it."""

    def __init__(self, spec: FeedSpec, probed: Probe, transform: Transform, source: LmdbSource | LevelDbSource) -> None:
        self._spec, self._transform, self._source = spec, transform, source
        self._files: _Files = _Lmdb(source) if source.backend == "lmdb" else _LevelDb(source)  # type: ignore[arg-type]
        channels, height, width = probed.record_shape
        any_size = bool(spec.transform.crop) and transform.mean.shape[1:] == (1, 1)
        self._shape = np.array([channels, 0, 0] if any_size else [channels, height, width], np.int64)
        self._random = transform.random_crop
        self._missed = 0
        self.ahead: ReadAhead | None = None

    @staticmethod
    def of(spec: FeedSpec, probed: Probe, transform: Transform, source: Source) -> Native | None:
        """For this feed, or None where its batches need Python for each record."""
        layout, asked = probed.made, spec.transform
        if type(source).__name__ not in ("LmdbSource", "LevelDbSource") or layout.label_width or layout.room:
            return None
        if layout.pixels == "float32" and layout is not probed.layout:
            return None  # floats for a function per batch, before mean and scale
        if transform.function is not None or asked.resize is not None:
            return None
        return Native(spec, probed, transform, source)  # type: ignore[arg-type]

    def make(self, items: Items, slot: Slot, recorder: Recorder, tags: dict[str, int]) -> NDArray[np.uint64] | None:
        """Write data and labels of a batch into its slot; None where it has to be made in the general way.

        Returns the hashes of the stored bytes: uint64[B], or [0] without fingerprints.

        Raises what reading a changed or shortened database raises.
        """
        if self._missed >= _GIVE_UP:
            return None
        spec, count = self._spec, len(items)
        raw = np.empty(count if spec.fingerprints != "off" else 0, np.uint64)
        times = np.zeros(4, np.int64)
        words = _NO_WORDS
        with recorder.span(Stage.READ, items=count, **tags) as span:
            if spec.transform.mirror or self._random:
                words = philox.block_1(
                    spec.seed, spec.phase_number, philox.CROP_AND_MIRROR, items.epochs, items.records
                )
            if self.ahead is not None:
                self.ahead.announce()
            try:
                taken, nbytes = self._call(items.records, words, slot, raw, times)
                self._source.check()  # before that, nobody can have given away what was read
            except DatasetCorrupt:
                taken = 0
            if taken < count:
                span.drop()
                self._missed += 1
                return None
            span.nbytes = nbytes
            span.divide((Stage.DECODE, int(times[1])), (Stage.AUGMENT, int(times[2])))
        self._missed = 0
        return raw

    def warm_up(self, layout: Layout) -> None:
        """Compile or load the call, and the look-up."""
        slot = layout.views(np.empty(layout.nbytes, np.uint8))
        nothing = np.empty(0, np.int64)
        self._call(nothing, _NO_WORDS, slot, np.empty(0, np.uint64), np.empty(4, np.int64))

    def _call(
        self, records: NDArray[np.int64], words: np.ndarray, slot: Slot, raw: np.ndarray, times: np.ndarray
    ) -> tuple[int, int]:
        transform, mirror = self._transform, self._spec.transform.mirror
        mean = transform.mean if slot.data.dtype == np.float32 else NO_MEAN
        return self._files.make(
            records, self._shape, words, mirror, self._random, mean, transform.scale, slot.data, slot.labels, raw, times
        )


class _Lmdb:
    """See :class:`_Files`."""

    def __init__(self, source: LmdbSource) -> None:
        self._source = source
        self._scratch = _room(0)
        self._map = WarmMap()

    def make(self, records: NDArray[np.int64], *rest: Any) -> tuple[int, int]:
        from pipeline.native_kernels import make  # numba loads here, at the first batch

        located = self._source.locate(records if len(records) else np.zeros(1, np.int64))
        offsets, lengths = located.offsets[: len(records)], located.lengths[: len(records)]
        size = int(lengths.max(initial=0)) + _PAGE
        if len(self._scratch) < size:
            self._scratch = _room(size)
        if not len(records):  # to load the kernel
            return int(make(self._source.file.fd, *NO_MAP, offsets, lengths, self._scratch, *rest)), 0
        with self._map.of(self._source.file) as (base, mapped):
            taken = int(make(self._source.file.fd, base, mapped, offsets, lengths, self._scratch, *rest))
        return taken if self._map.sound else 0, int(lengths.sum())


class _LevelDb:
    """See :class:`_Files`."""

    def __init__(self, source: LevelDbSource) -> None:
        self._source = source
        self._rooms = [_room(0), _room(0), _room(0)]

    def make(self, records: NDArray[np.int64], *rest: Any) -> tuple[int, int]:
        from pipeline.native_kernels import make_from_tables

        self._source.check()
        located = self._source.locate(records)
        if located is None:
            return 0, 0
        keys = np.frombuffer(b"".join(located.keys), np.uint8)
        ends = np.cumsum([len(key) for key in located.keys], dtype=np.int64)
        need, times = np.ones(1, np.int64), rest[-1]
        taken = 0
        while need[0]:  # at most once for each of the rooms, at the first batches
            if need[0] > 1:
                self._rooms = [_room(int(need[0])) if len(room) < need[0] else room for room in self._rooms]
            need[0] = times[:] = 0
            taken = int(make_from_tables(*located.arrays, keys, ends, *self._rooms, need, *rest))
        if taken == len(records):
            self._source.tell_cost(taken, int(times[0]), int(times[3]))
        return taken, int(located.arrays.sizes.sum())


def _room(size: int) -> NDArray[np.uint8]:
    """At least so many bytes from the beginning of a page on, and half as many again."""
    whole = np.empty(size + size // 2 + 2 * _PAGE, np.uint8)
    return whole[-whole.ctypes.data % _PAGE :][: size + size // 2 + _PAGE]
