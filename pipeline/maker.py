"""Makes one batch: a pure function of (spec, step) whose result lies in a slot. Every engine uses this alone.

Stages, in the order of the work, each recorded as one span per batch:

========  ==============================================================================================
READ      look the records up and copy their stored bytes out of the database
DECODE    Datum → image uint8[C, H, W] (JPEG and PNG decoding included), shapes checked
FUNCTION  the user's own function (``transform.python``), on each image before AUGMENT or on the batch after it
AUGMENT   the draws of chance, and the one pass that crops, mirrors, subtracts the mean, scales and writes
          into the slot; with a function per batch, mean and scale come in a second one
COLLATE   labels, ids and epochs into the slot, and the hashes of the batch
========  ==============================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from datasets import order, resize
from datasets.errors import DatasetCorrupt
from datasets.order import Items, Order, Stream
from pipeline import bad_records, philox, sizes
from pipeline.bad_records import Found
from pipeline.functions import numbers
from pipeline.jpeg_crop import JpegCrop
from pipeline.layout import Layout, Probe, Slot
from pipeline.native import Native
from pipeline.probing import TRY, probe
from pipeline.readahead import ReadAhead
from pipeline.resized_crop import ResizedCrop
from pipeline.samples import RECORD_ERRORS, LabelError, check_label, decoded, label_alone
from pipeline.spec import FeedSpec
from pipeline.transforms import Transform, TransformError
from profiler import hashing
from profiler.errors import StallscopeError
from profiler.events import Flag, Stage
from profiler.recorder import NULL, Recorder

if TYPE_CHECKING:
    from datasets.source import Record, Source

__all__ = [
    "BatchMaker", "LabelError", "Layout", "LocalReader", "Made", "Probe", "Reader", "Slot", "fill_hash", "probe",
    "record_hashes", "stream_of",
]  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A finished batch; hashes are there unless fingerprints are off: ids, ids_set, raw, raw_set, fill."""

    step: int
    epoch: int
    items: int
    hashes: dict[str, int]


class Reader(Protocol):
    """Where records come from: a source of this process, or an owner process."""

    def read(self, indices: NDArray[np.int64], recorder: Recorder, **tags: int) -> list[Record]:
        """The records in that order, recorded as READ (and TRANSFER) spans with these tags."""
        ...


class LocalReader:
    """Reads a source that this process has opened."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.ahead: ReadAhead | None = None

    def read(self, indices: NDArray[np.int64], recorder: Recorder, **tags: int) -> list[Record]:
        if self.source.backend == "python":
            tags["flags"] = tags.get("flags", 0) | Flag.OWN_CODE
        with recorder.span(Stage.READ, items=len(indices), **tags) as span:
            if self.ahead is not None:
                self.ahead.announce()
            records = self.source.read_many(indices)
            span.nbytes = sum(len(record.value) for record in records)
        return records


def stream_of(spec: FeedSpec, records: int) -> Stream:
    """The stream of a feed over a data set of this length."""
    return Stream(Order(records, seed=spec.seed, shuffle=spec.shuffle), spec.batch, spec.tail)


class BatchMaker:
    """Makes batches of one feed. Holds nothing between steps but memory to work in: one for each thread."""

    def __init__(self, spec: FeedSpec, probed: Probe, reader: Reader, recorder: Recorder = NULL) -> None:
        self.spec, self.probe, self.reader, self.recorder = spec, probed, reader, recorder
        self.stream = stream_of(spec, probed.records)
        self.transform = Transform(spec.transform, spec.seed, spec.phase_number)
        self.transform.fit(probed.record_shape, probed.first)
        self._stops = spec.on_bad_record == "stop"
        self.begin: Callable[[Any], None] = lambda record: None  # told of each record outside compiled calls
        self._fitted = sizes.Fitted(spec, probed.layout.room) if probed.layout.room else None
        self._resized = ResizedCrop.of(spec, self.transform)
        self._jpeg = JpegCrop.of(spec, probed, self.transform)
        self._native = None
        if isinstance(reader, LocalReader) and self._resized is None:
            self._native = Native.of(spec, probed, self.transform, reader.source)
        self._ahead: ReadAhead | None = None
        if isinstance(reader, LocalReader):
            reader.ahead = self._ahead = ReadAhead.of(spec, reader.source, self.stream)
            if self._native is not None:
                self._native.ahead = self._ahead
        self._given: Slot | None = None  # what a function per batch is given
        if probed.given is not None:
            self._given = probed.given.views(np.empty(probed.given.nbytes, np.uint8))

    def warm_up(self) -> None:
        """Compile or load what the first batch would otherwise wait for: that time belongs to the start."""
        order.warm_up()
        if self.spec.transform.resize is not None:
            resize.prepare()
        one = np.empty((1, *self.probe.sample_shape), self.probe.made.pixels)
        if self._resized is not None:
            self._resized.warm_up(self.probe.made.pixels)
        else:
            nothing = np.zeros(1, np.int64)
            draws = philox.draw(0, 0, nothing, nothing, (nothing, nothing), mirror=True, random_crop=False)
            self.transform.fill([np.zeros(self.probe.record_shape, np.uint8)], draws, one)
        if self._jpeg is not None:
            self._jpeg.warm_up(one[0])
        if self._native is not None:
            self._native.warm_up(self.probe.made)
        if self._given is not None:
            self.transform.finish(one, np.empty(one.shape, self.probe.layout.pixels))
        if self.spec.fingerprints != "off":
            scratch = np.zeros((2, self.probe.layout.nbytes // 2), np.uint8)
            hashing.ordered(scratch)
            hashing.multiset(scratch.view(np.int64)[:, :1])
            record_hashes([bytes(9)])

    def make(self, step: int, slot: Slot, *, index: int = -1, flags: int = 0) -> Made:
        """Make the batch of ``step`` into ``slot``; ``index`` and ``flags`` are only recorded.

        Raises :class:`StallscopeError` naming data set, key and record for anything wrong with a record.
        """
        spec, recorder = self.spec, self.recorder
        items = self.stream.at(spec.place(step))
        count, epoch = len(items), int(items.epochs[0])
        if spec.phase == "TEST":
            flags |= Flag.TEST_PHASE
        tags = {"step": step, "epoch": epoch, "slot": index, "flags": flags}
        if self._ahead is not None:
            self._ahead.turn(step, items)
        made = slot if self._given is None else self._before_function(self._given, slot)
        raw = self._native.make(items, made, recorder, tags) if self._native is not None else None
        ids: NDArray[np.int64] = items.records
        records: list[Record] = []
        labels: list[Any] = []
        blank: Collection[int] = ()
        if raw is None:
            ids, records, labels, blank = self._make_generally(items, made, tags)
        elif slot.bad_count is not None:
            slot.bad_count[0] = 0
        if made is not slot:
            if raw is None:
                self._collate(labels, records, made)
            self._call_on_batch(made, slot, ids, step, blank, tags)
        with recorder.span(Stage.COLLATE, items=count, nbytes=slot.samples(count).nbytes, **tags):
            if raw is None and made is slot:
                self._collate(labels, records, slot)
            slot.ids[:count] = ids
            slot.epochs[:count] = items.epochs
            hashes: dict[str, int] = {}
            if spec.fingerprints != "off":
                hashes = self._hashes(
                    record_hashes([one.value for one in records]) if raw is None else raw, slot, count
                )
        return Made(step, epoch, count, hashes)

    def _collate(self, labels: list[Any], records: list[Record], slot: Slot) -> None:
        for label, record in zip(labels, records, strict=True):
            check_label(label, self.probe.made.label_width, record)
        slot.labels[: len(labels)] = labels

    @staticmethod
    def _before_function(given: Slot, slot: Slot) -> Slot:
        """Where samples are made for a function per batch: pixels lie in the feed's slot where that takes them."""
        given = replace(given, bad=slot.bad, bad_count=slot.bad_count)
        return replace(given, data=slot.data) if slot.data.dtype == given.data.dtype == np.uint8 else given

    def _call_on_batch(
        self, made: Slot, slot: Slot, ids: NDArray[np.int64], step: int, blank: Collection[int], tags: dict[str, int]
    ) -> None:
        """The user's function on a batch that was made, and what it returns into the slot of the feed."""
        function, count, place = self.transform.batch_function, len(ids), self.spec.place(step)
        assert function is not None
        own = {**tags, "flags": tags["flags"] | Flag.OWN_CODE}
        with self.recorder.span(Stage.FUNCTION, items=count, nbytes=made.data[:count].nbytes, **own):
            samples, labels = function.on_batch(
                made.data[:count], made.labels[:count], tags["epoch"], place,
                lambda: f"the batch of step {step}, epoch {tags['epoch']}: {numbers(ids)} of {self.spec.source}", ids,
            )  # fmt: skip
        width = labels.shape[1] if labels.ndim == 2 else 0
        if width != self.probe.layout.label_width:
            kinds = [
                f"float32, {size} a sample" if size else "integers" for size in (self.probe.layout.label_width, width)
            ]
            raise TransformError(
                f"the transform function {function.name} returned labels of another kind for the batch of step {step} "
                "than for the first record alone",
                expected=kinds[0],
                found=kinds[1],
            )
        with self.recorder.span(Stage.AUGMENT, items=count, nbytes=slot.data[:count].nbytes, **tags):
            self.transform.finish(samples, slot.data[:count])
            slot.labels[:count] = labels
            for i in blank:
                slot.data[i] = 0

    def _make_generally(
        self, items: Items, slot: Slot, tags: dict[str, int]
    ) -> tuple[NDArray[np.int64], list[Record], list[Any], Collection[int]]:
        """The data of any records into the slot; returns the numbers of those that were used, they and their labels,
        and at which places are samples of zeros."""
        spec, recorder, transform, count = self.spec, self.recorder, self.transform, len(items)
        records: list[Any] = self._read(items.records, tags)
        images: list[np.ndarray | None] = []  # None: the sample lies in the slot
        labels: list[Any] = []
        failed: dict[int, StallscopeError] = {}
        data = slot.samples(count) if self._fitted is None else slot.data  # else its shape is not known yet
        epochs = items.epochs.tolist()
        sample = self._sample
        with recorder.span(Stage.DECODE, items=count, **tags) as span:
            for i, record in enumerate(records):
                try:
                    image, label = sample(record, epochs[i], data[i])
                except RECORD_ERRORS as error:
                    if self._stops:
                        error.hint = error.hint or TRY
                        raise
                    failed[len(images)] = error
                    images.append(None)
                    labels.append(None)
                else:
                    images.append(image)
                    labels.append(label)
            span.nbytes = sum(data[i].nbytes if image is None else image.nbytes for i, image in enumerate(images))
        ids = items.records
        if not self._stops:
            assert slot.bad is not None
            assert slot.bad_count is not None
            found = Found(slot.bad, slot.bad_count)
            if failed:
                ids = ids.copy()
                self._mend(items, failed, found, records, images, labels, ids, data, tags)
        blank = failed if spec.on_bad_record == "zero" else ()

        if self._fitted is not None:
            assert slot.shape is not None
            assert images[0] is not None
            transform = self._fitted.to(images[0].shape, records[0])
            slot.shape[:] = transform.sample_shape
            data = slot.samples(count)
        if transform.function is not None:
            own = {**tags, "flags": tags["flags"] | Flag.OWN_CODE}
            with recorder.span(Stage.FUNCTION, items=count, **own) as span:
                for i, record in enumerate(records):
                    image = images[i]
                    if i in blank or image is None:
                        continue
                    span.nbytes += image.nbytes
                    self.begin(record)
                    image, labels[i] = transform.function.on_image(image, labels[i], epochs[i], record.index, record)
                    transform.check(image.shape, record)
                    images[i] = image
        with recorder.span(Stage.AUGMENT, items=count, nbytes=data.nbytes, **tags):
            self._augment(transform, images, records, items.epochs, ids, data)
            for i in blank:
                data[i] = 0
        return ids, records, labels, blank

    def _augment(
        self, transform: Transform, images: list[np.ndarray | None], records: list[Any], epochs: NDArray[np.int64],
        ids: NDArray[np.int64], data: np.ndarray,
    ) -> None:  # fmt: skip
        """Samples of all images that are not in the slot yet."""
        left = [i for i, image in enumerate(images) if image is not None]
        rest = [image for image in images if image is not None]
        if not left:
            return
        if self._resized is not None:
            for i, image in zip(left, rest, strict=True):
                self._resized.put(image, records[i], int(epochs[i]), data[i])
            return
        if data.dtype == np.uint8:
            for i, image in zip(left, rest, strict=True):
                transform.check_pixels(image, records[i])
        if len(left) == len(images):
            transform.fill(rest, transform.draws(rest, epochs, ids), data)
            return
        for i, image in zip(left, rest, strict=True):
            one = slice(i, i + 1)
            transform.fill([image], transform.draws([image], epochs[one], ids[one]), data[one])

    def _sample(self, record: Any, epoch: int, out: np.ndarray) -> tuple[np.ndarray | None, Any]:
        """Image and label of what :meth:`_read` gave, checked as far as the record itself is to blame.

        Instead of the image None, where the sample was made in ``out``: with a resized crop, and of a JPEG file.
        """
        if isinstance(record, StallscopeError):
            raise record
        self.begin(record)
        transform = self.spec.transform
        label = None
        if self._resized is not None and self.transform.function is None:
            label = self._resized.sample(record, epoch, out)
        elif self._jpeg is not None:
            label = self._jpeg.sample(record, epoch, out)
        if label is not None:
            if not self._stops:
                check_label(label, self.probe.made.label_width, record)
            return None, label
        image, label = decoded(record, transform.color, self.spec.max_pixels, transform.resize)
        if self._fitted is not None:
            self._fitted.to(image.shape, record)
        elif self.transform.function is None:
            self.transform.check(image.shape, record)
        if self.transform.function is None and not self._stops:
            check_label(label, self.probe.made.label_width, record)
        return image, label

    def _read(self, indices: NDArray[np.int64], tags: dict[str, int]) -> list[Any]:
        """Records; unless bad ones stop the job, an error stands where the database cannot give one out."""
        try:
            return list(self.reader.read(indices, self.recorder, **tags))
        except DatasetCorrupt:
            if self._stops:
                raise
        with self.recorder.span(Stage.READ, items=len(indices), **tags):
            return [self._read_one(index) for index in indices]

    def _read_one(self, index: np.int64) -> Record | DatasetCorrupt:
        try:
            return self.reader.read(np.array([index]), NULL)[0]
        except DatasetCorrupt as error:
            return error

    def _mend(
        self, items: Items, failed: dict[int, StallscopeError], found: Found, records: list[Any],
        images: list[np.ndarray | None],
        labels: list[Any], ids: NDArray[np.int64], data: np.ndarray, tags: dict[str, int],
    ) -> None:  # fmt: skip
        """Put stand-ins or blanks where samples could not be made, and write down which and why.

        A stand-in depends on (seed, epoch, place, attempt) and on the records alone, never on other batches.
        """
        for i, error in failed.items():
            self._write_down(found, i, items, ids[i], records[i], error)
        if self.spec.on_bad_record == "zero":
            for i, error in failed.items():
                images[i] = np.zeros(self.probe.record_shape, np.uint8)
                labels[i] = self._label(records[i], error)
            return
        left = sorted(failed)
        for attempt in range(bad_records.ATTEMPTS):
            chosen = self.stream.order.replacements(items.epochs[left], items.places[left], attempt)
            again: list[int] = []
            for i, index, record in zip(left, chosen, self._read(chosen, tags), strict=True):
                try:
                    images[i], labels[i] = self._sample(record, int(items.epochs[i]), data[i])
                except RECORD_ERRORS as error:
                    self._write_down(found, i, items, index, record, error)
                    failed[i] = error
                    again.append(i)
                else:
                    records[i], ids[i] = record, index
                    found.settle(i, int(index))
            left = again
            if not left:
                return
        raise bad_records.TooManyBadRecords(
            f"{bad_records.ATTEMPTS} stand-ins were tried for record {items.records[left[0]]} of {self.spec.source}, "
            "and none can be used",
            expected="nearly all records sound",
            found=failed[left[0]].what,
            hint="is this the right data set, and do its images have the size and mode of record 0?",
        )

    def _label(self, record: Any, error: StallscopeError) -> Any:
        """The label of a record whose image is blanked. Raises ``error`` where it has none that can be read."""
        try:
            label = label_alone(record) if not isinstance(record, StallscopeError) else None
            check_label(label, self.probe.made.label_width, record)
        except RECORD_ERRORS:
            error.hint = "on_bad_record: zero keeps labels, and this one cannot be read; try on_bad_record: skip"
            raise error from None
        return label

    def _write_down(
        self, found: Found, i: int, items: Items, index: np.int64, record: Any, error: StallscopeError
    ) -> None:  # fmt: skip
        key = b"" if isinstance(record, StallscopeError) else record.key
        if not key and isinstance(self.reader, LocalReader):
            # An index may know the key of a record that cannot be read; an owner's is in another process.
            with contextlib.suppress(StallscopeError, IndexError):
                key = self.reader.source.key(int(index))
        found.add(i, int(items.epochs[i]), int(index), key, error)

    @staticmethod
    def _hashes(each: NDArray[np.uint64], slot: Slot, count: int) -> dict[str, int]:
        # One pass over the stored bytes serves both hashes: see the definitions in profiler.hashing.
        ids = slot.ids[:count]
        return {
            "ids": hashing.ordered(ids),
            "ids_set": hashing.multiset(ids),
            "raw": hashing.ordered(each),
            "raw_set": int(each.sum(dtype=np.uint64)),
            "fill": fill_hash(slot.samples(count), slot.labels[:count]),
        }


def record_hashes(values: Sequence[bytes]) -> NDArray[np.uint64]:
    """``hashing.ordered`` of each value, uint64[n], in one compiled call."""
    from pipeline.kernels import hash_records  # numba loads here, at the first batch

    buffers = [hashing.as_bytes(value) for value in values]
    addresses = np.fromiter((buffer.__array_interface__["data"][0] for buffer in buffers), np.uint64, len(buffers))
    if (addresses & np.uint64(7)).any():  # never for bytes objects
        return np.array([hashing.ordered(buffer) for buffer in buffers], np.uint64)
    hashes = np.empty(len(buffers), np.uint64)
    hash_records(addresses, np.fromiter(map(len, buffers), np.uint64, len(buffers)), hashes)
    return hashes


def fill_hash(data: np.ndarray, labels: np.ndarray) -> int:
    """The hash ``fill`` (and ``device``, of the same arrays after the copy) of a batch: data, then labels."""
    return hashing.ordered_parts([data, labels])
