"""Makes one batch: a pure function of (spec, step) whose result lies in a slot. Every engine uses this alone.

Stages, in the order of the work, each recorded as one span per batch:

========  ==============================================================================================
READ      look the records up and copy their stored bytes out of the database
DECODE    Datum → image uint8[C, H, W] (JPEG and PNG decoding included), shapes checked
AUGMENT   the draws of chance, the user's function, and the one pass that crops, mirrors, subtracts the
          mean, scales and writes into the slot
COLLATE   labels, ids and epochs into the slot, and the hashes of the batch
========  ==============================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from datasets import order, resize
from datasets.errors import DatasetCorrupt
from datasets.order import Items, Order, Stream
from pipeline import bad_records, philox, sizes
from pipeline.bad_records import ENTRY, Found
from pipeline.native import Native
from pipeline.resized_crop import ResizedCrop
from pipeline.samples import RECORD_ERRORS, LabelError, check_label, decoded, label_alone
from pipeline.spec import FeedSpec
from pipeline.transforms import Shape, Transform, TransformError
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

_ALIGN = 64
_PROBED = 64  # records that are looked at for one that can be used
_TRY = "data.on_bad_record: skip or zero goes on without it; python -m datasets.verify lists all such records"


@dataclass(frozen=True)
class Layout:
    """Where things lie in a slot.

    data float32 (or uint8) [batch, C, h, w], labels int32[batch] or float32[batch, label_width], ids and epochs
    int64[batch], then rows about records that could not be used and their number; each part begins at a multiple of 64
    bytes. Where samples have sizes of their own (``room``), data is [room] and a last part says the shape in use.
    """

    batch: int
    sample_shape: Shape
    label_width: int  # 0: one int32 a sample
    bad_rows: int = 0  # see pipeline.bad_records
    room: int = 0  # see pipeline.sizes
    pixels: str = "float32"  # the type of data

    @property
    def nbytes(self) -> int:
        return self._parts()[-1][3]

    def _parts(self) -> list[tuple[str, tuple[int, ...], Any, int]]:
        """(name in the slot, shape, dtype, end) of each part."""
        wanted: list[tuple[str, tuple[int, ...], Any]] = [
            ("data", (self.room,) if self.room else (self.batch, *self.sample_shape), np.dtype(self.pixels)),
            ("labels", (self.batch, self.label_width), np.float32) if self.label_width
            else ("labels", (self.batch,), np.int32),
            ("ids", (self.batch,), np.int64),
            ("epochs", (self.batch,), np.int64),
        ]  # fmt: skip
        if self.bad_rows:
            wanted += [("bad", (self.bad_rows,), ENTRY), ("bad_count", (1,), np.int64)]
        if self.room:
            wanted.append(("shape", (3,), np.int64))
        parts: list[tuple[str, tuple[int, ...], Any, int]] = []
        end = 0
        for name, shape, kind in wanted:
            end += -(-int(np.prod(shape)) * np.dtype(kind).itemsize // _ALIGN) * _ALIGN
            parts.append((name, shape, kind, end))
        return parts

    def views(self, payload: np.ndarray) -> Slot:
        """Arrays over the bytes of a slot, uint8[>= nbytes]."""
        arrays: dict[str, np.ndarray] = {}
        start = 0
        for name, shape, kind, end in self._parts():
            used = int(np.prod(shape)) * np.dtype(kind).itemsize
            arrays[name] = payload[start : start + used].view(kind).reshape(shape)
            start = end
        return Slot(**arrays)


@dataclass(frozen=True, eq=False)
class Slot:
    """The arrays of one slot, for a full batch; a short batch fills the first rows."""

    data: np.ndarray
    labels: np.ndarray
    ids: NDArray[np.int64]
    epochs: NDArray[np.int64]
    bad: np.ndarray | None = None
    bad_count: NDArray[np.int64] | None = None
    shape: NDArray[np.int64] | None = None

    def samples(self, count: int) -> np.ndarray:
        """The batch's own part of ``data``, [count, C, h, w]."""
        if self.shape is None:
            return self.data[:count]
        channels, height, width = (int(size) for size in self.shape)
        return self.data[: channels * height * width].reshape(1, channels, height, width)


@dataclass(frozen=True)
class Probe:
    """What the first record says about all batches.

    Attributes
    ----------
    records: length of the data set.
    first: names that record: the first one that can be used.
    record_shape: (C, H, W) of it as decoded (after a user's function).
    sample_shape: (C, h, w) of a sample in the blob; of the first one where each has its own (``layout.room``).
    layout: of the slots.
    blobs: shapes of one sample in the net, where they are not the above: see :class:`datasets.source.Source`.
    """

    records: int
    backend: str
    first: str
    record_shape: Shape
    sample_shape: Shape
    layout: Layout
    blobs: tuple[tuple[int, ...], ...] = ()


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

    def read(self, indices: NDArray[np.int64], recorder: Recorder, **tags: int) -> list[Record]:
        if self.source.backend == "python":
            tags["flags"] = tags.get("flags", 0) | Flag.OWN_CODE
        with recorder.span(Stage.READ, items=len(indices), **tags) as span:
            records = self.source.read_many(indices)
            span.nbytes = sum(len(record.value) for record in records)
        return records


def stream_of(spec: FeedSpec, records: int) -> Stream:
    """The stream of a feed over a data set of this length."""
    return Stream(Order(records, seed=spec.seed, shuffle=spec.shuffle), spec.batch, spec.tail)


def probe(spec: FeedSpec, source: Source) -> Probe:
    """Look at record 0 and settle the shapes of every batch.

    Raises what reading, decoding and the transform raise for it; :class:`TransformError` for an empty data set.
    """
    if not len(source):
        raise TransformError(f"{source.name} holds no records", expected="at least one")
    transform = Transform(spec.transform, spec.seed, spec.phase_number)
    record, image, label = _first_usable(spec, source)
    image, label = transform.apply_function(image, label, 0, record.index, record)
    shape = (int(image.shape[0]), int(image.shape[1]), int(image.shape[2]))
    sample_shape = transform.fit(shape, record)
    width = len(label) if isinstance(label, np.ndarray) else 0
    check_label(label, width, record)
    rows = bad_records.capacity(spec.on_bad_record, spec.batch)
    layout = Layout(spec.batch, sample_shape, width, rows, sizes.room(spec, source, shape), spec.pixels)
    if spec.pixels == "uint8":
        transform.check_pixels(image, record)
    return Probe(len(source), source.backend, str(record), shape, sample_shape, layout, source.blobs)


def _first_usable(spec: FeedSpec, source: Source) -> tuple[Record, np.ndarray, Any]:
    """The first record with its image and label; bad ones before it are passed over where the job says so."""
    tried = 1 if spec.on_bad_record == "stop" else _PROBED
    first: StallscopeError | None = None
    for index in range(min(len(source), tried)):
        try:
            record = source.read(index)
            return record, *decoded(record, spec.transform.color, spec.max_pixels, spec.transform.resize)
        except RECORD_ERRORS as error:
            first = first or error
    assert first is not None
    first.hint = first.hint or _TRY
    raise first


class BatchMaker:
    """Makes batches of one feed. Holds nothing between steps but memory to work in: one for each thread."""

    def __init__(self, spec: FeedSpec, probed: Probe, reader: Reader, recorder: Recorder = NULL) -> None:
        self.spec, self.probe, self.reader, self.recorder = spec, probed, reader, recorder
        self.stream = stream_of(spec, probed.records)
        self.transform = Transform(spec.transform, spec.seed, spec.phase_number)
        self.transform.fit(probed.record_shape, probed.first)
        self._stops = spec.on_bad_record == "stop"
        self._fitted = sizes.Fitted(spec, probed.layout.room) if probed.layout.room else None
        self._resized = ResizedCrop.of(spec, self.transform)
        self._native = None
        if isinstance(reader, LocalReader) and self._resized is None:
            self._native = Native.of(spec, probed, self.transform, reader.source)

    def warm_up(self) -> None:
        """Compile or load what the first batch would otherwise wait for: that time belongs to the start."""
        order.warm_up()
        if self.spec.transform.resize is not None:
            resize.prepare()
        if self._resized is not None:
            self._resized.warm_up(self.probe.layout.pixels)
        else:
            shape, one = self.probe.record_shape, np.zeros(1, np.int64)
            draws = philox.draw(0, 0, one, one, (one, one), mirror=True, random_crop=False)
            self.transform.fill(
                [np.zeros(shape, np.uint8)], draws, np.empty((1, *self.probe.sample_shape), self.probe.layout.pixels)
            )
        if self._native is not None:
            self._native.warm_up(self.probe.layout)
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
        raw = self._native.make(items, slot, recorder, tags) if self._native is not None else None
        ids: NDArray[np.int64] = items.records
        records: list[Record] = []
        labels: list[Any] = []
        if raw is None:
            ids, records, labels = self._make_generally(items, slot, tags)
        elif slot.bad_count is not None:
            slot.bad_count[0] = 0
        with recorder.span(Stage.COLLATE, items=count, nbytes=slot.samples(count).nbytes, **tags):
            if raw is None:
                for label, record in zip(labels, records, strict=True):
                    check_label(label, self.probe.layout.label_width, record)
                slot.labels[:count] = labels
            slot.ids[:count] = ids
            slot.epochs[:count] = items.epochs
            hashes: dict[str, int] = {}
            if spec.fingerprints != "off":
                hashes = self._hashes(
                    record_hashes([one.value for one in records]) if raw is None else raw, slot, count
                )
        return Made(step, epoch, count, hashes)

    def _make_generally(
        self, items: Items, slot: Slot, tags: dict[str, int]
    ) -> tuple[NDArray[np.int64], list[Record], list[Any]]:
        """The data of any records into the slot; returns the numbers of those that were used, they and their labels."""
        spec, recorder, transform, count = self.spec, self.recorder, self.transform, len(items)
        records: list[Any] = self._read(items.records, tags)
        images: list[Any] = []
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
                        error.hint = error.hint or _TRY
                        raise
                    failed[len(images)] = error
                    images.append(None)
                    labels.append(None)
                else:
                    images.append(image)
                    labels.append(label)
            span.nbytes = sum(image.nbytes for image in images if image is not None)
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
            transform = self._fitted.to(images[0].shape, records[0])
            slot.shape[:] = transform.sample_shape
            data = slot.samples(count)
        with recorder.span(Stage.AUGMENT, items=count, nbytes=data.nbytes, **tags):
            if transform.function is not None:
                for i, record in enumerate(records):
                    if i in blank:
                        continue
                    image, labels[i] = transform.apply_function(
                        images[i], labels[i], int(items.epochs[i]), record.index, record
                    )
                    transform.check(image.shape, record)
                    images[i] = image
                    if self._resized is not None:
                        self._resized.put(image, record, epochs[i], data[i])
            if self._resized is not None:
                for i in blank:
                    data[i] = 0
                return ids, records, labels
            _, height, width = transform.sample_shape
            spare = (
                np.fromiter((image.shape[1] - height for image in images), np.int64, count),
                np.fromiter((image.shape[2] - width for image in images), np.int64, count),
            )
            draws = philox.draw(
                spec.seed, spec.phase_number, items.epochs, ids, spare,
                mirror=spec.transform.mirror, random_crop=bool(spec.transform.crop) and spec.phase == "TRAIN",
            )  # fmt: skip
            if spec.pixels == "uint8":
                for image, record in zip(images, records, strict=True):
                    transform.check_pixels(image, record)
            transform.fill(images, draws, data)
            for i in blank:
                data[i] = 0

        return ids, records, labels

    def _sample(self, record: Any, epoch: int, out: np.ndarray) -> tuple[np.ndarray, Any]:
        """Image and label of what :meth:`_read` gave, checked as far as the record itself is to blame.

        With a resized crop and no user function before it, the image is the sample: it is made in ``out``.
        """
        if isinstance(record, StallscopeError):
            raise record
        transform = self.spec.transform
        if self._resized is not None and self.transform.function is None:
            label = self._resized.sample(record, epoch, out)
            if not self._stops:
                check_label(label, self.probe.layout.label_width, record)
            return out, label
        image, label = decoded(record, transform.color, self.spec.max_pixels, transform.resize)
        if self._fitted is not None:
            self._fitted.to(image.shape, record)
        elif self.transform.function is None:
            self.transform.check(image.shape, record)
        if self.transform.function is None and not self._stops:
            check_label(label, self.probe.layout.label_width, record)
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
        self, items: Items, failed: dict[int, StallscopeError], found: Found, records: list[Any], images: list[Any],
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
            check_label(label, self.probe.layout.label_width, record)
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
