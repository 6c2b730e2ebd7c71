"""The short way of a batch: from the file of an LMDB into the slot in one compiled call, without Python for a record.

It is the same function of (spec, step) as the general way of :mod:`pipeline.maker`, bit for bit, for records that hold
raw pixels and a label. Where a batch has any other, or something is wrong with one, the general way makes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from datasets.errors import DatasetCorrupt
from pipeline import philox
from pipeline.spec import FeedSpec
from pipeline.transforms import NO_MEAN, Transform
from profiler.events import Stage
from profiler.recorder import Recorder

if TYPE_CHECKING:
    from datasets.lmdb_source import LmdbSource
    from datasets.order import Items
    from datasets.source import Source
    from pipeline.maker import Layout, Probe, Slot

_GIVE_UP = 3
"""Batches in a row that could not be made this way, after which it is no longer tried."""
_ALIGN = 64
_NO_WORDS = np.empty((0, 4), np.uint64)


class Native:
    """Makes the batches of one feed in a compiled call each, as long as its records allow it."""

    def __init__(self, spec: FeedSpec, probed: Probe, transform: Transform, source: LmdbSource) -> None:
        self._spec, self._transform, self._source = spec, transform, source
        self._records = probed.records
        channels, height, width = probed.record_shape
        any_size = bool(spec.transform.crop) and transform.mean.shape[1:] == (1, 1)
        self._shape = np.array([channels, 0, 0] if any_size else [channels, height, width], np.int64)
        self._random = bool(spec.transform.crop) and spec.phase == "TRAIN"
        self._scratch = np.empty(0, np.uint8)
        self._missed = 0

    @staticmethod
    def of(spec: FeedSpec, probed: Probe, transform: Transform, source: Source) -> Native | None:
        """For this feed, or None where its batches need Python for each record."""
        from datasets.lmdb_source import LmdbSource

        layout, asked = probed.layout, spec.transform
        if type(source) is not LmdbSource or layout.label_width or layout.room:
            return None
        if asked.python is not None or asked.resize is not None:
            return None
        return Native(spec, probed, transform, source)

    def make(self, items: Items, slot: Slot, recorder: Recorder, tags: dict[str, int]) -> NDArray[np.uint64] | None:
        """Write data and labels of a batch into its slot; None where it has to be made in the general way.

        Returns the hashes of the stored bytes: uint64[B], or [0] without fingerprints.

        Raises what reading a changed or shortened database raises.
        """
        if self._missed >= _GIVE_UP:
            return None
        spec, source, count = self._spec, self._source, len(items)
        raw = np.empty(count if spec.fingerprints != "off" else 0, np.uint64)
        times = np.zeros(3, np.int64)
        words = _NO_WORDS
        with recorder.span(Stage.READ, items=count, **tags) as span:
            try:
                source.check()
                located = source.locate(items.records)
                if spec.transform.mirror or self._random:
                    words = philox.block_1(
                        spec.seed, spec.phase_number, philox.CROP_AND_MIRROR, items.epochs, items.records
                    )
                done = self._call(source.file.fd, located.offsets, located.lengths, words, slot, raw, times)
                source.check()  # before that, nobody can have given away what was read
            except DatasetCorrupt:
                done = 0
            if done < count:
                span.drop()
                self._missed += 1
                return None
            span.nbytes = int(located.lengths.sum())
            span.divide((Stage.DECODE, int(times[1])), (Stage.AUGMENT, int(times[2])))
        self._missed = 0
        return raw

    def warm_up(self, layout: Layout) -> None:
        """Compile or load the call, and the look-up."""
        self._source.locate(np.zeros(1, np.int64))
        nothing, slot = np.empty(0, np.int64), layout.views(np.empty(layout.nbytes, np.uint8))
        self._call(-1, nothing, nothing, _NO_WORDS, slot, np.empty(0, np.uint64), np.empty(3, np.int64))

    def _call(
        self, fd: int, offsets: np.ndarray, lengths: np.ndarray, words: np.ndarray, slot: Slot, raw: np.ndarray,
        times: np.ndarray,
    ) -> int:  # fmt: skip
        from pipeline.native_kernels import make  # numba loads here, at the first batch

        size = int(lengths.max()) if len(lengths) else 0
        if len(self._scratch) <= size:
            whole = np.empty(size + size // 2 + 2 * _ALIGN, np.uint8)
            self._scratch = whole[-whole.ctypes.data % _ALIGN :]
        transform, mirror = self._transform, self._spec.transform.mirror
        mean = transform.mean if slot.data.dtype == np.float32 else NO_MEAN
        taken: int = make(
            fd, offsets, lengths, self._scratch, self._shape, words, mirror, self._random, mean,
            transform.scale, slot.data, slot.labels, raw, times,
        )  # fmt: skip
        return taken
