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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from datasets import datum as datums
from datasets import decode
from datasets.order import Order, Stream
from pipeline import philox
from pipeline.spec import Color, FeedSpec
from pipeline.transforms import Shape, Transform, TransformError
from profiler import hashing
from profiler.events import Flag, Stage
from profiler.recorder import NULL, Recorder

if TYPE_CHECKING:
    from datasets.source import Record, Source

_ALIGN = 64
_INT32 = range(-(2**31), 2**31)


class LabelError(TransformError):
    """A record has no label, or one that cannot stand in the batch."""


@dataclass(frozen=True)
class Layout:
    """Where things lie in a slot.

    data float32[batch, C, h, w], labels int32[batch] or float32[batch, label_width], ids and epochs int64[batch]; each
    part begins at a multiple of 64 bytes.
    """

    batch: int
    sample_shape: Shape
    label_width: int  # 0: one int32 a sample

    @property
    def nbytes(self) -> int:
        return self._parts()[-1][2]

    def _parts(self) -> list[tuple[tuple[int, ...], type, int]]:
        """(shape, dtype, end) of each part."""
        labels: tuple[tuple[int, ...], type] = (
            ((self.batch, self.label_width), np.float32) if self.label_width else ((self.batch,), np.int32)
        )
        parts: list[tuple[tuple[int, ...], type, int]] = []
        end = 0
        whole = (self.batch, *self.sample_shape)
        for shape, kind in ((whole, np.float32), labels, ((self.batch,), np.int64), ((self.batch,), np.int64)):
            end += -(-int(np.prod(shape)) * np.dtype(kind).itemsize // _ALIGN) * _ALIGN
            parts.append((shape, kind, end))
        return parts

    def views(self, payload: np.ndarray) -> Slot:
        """Arrays over the bytes of a slot, uint8[>= nbytes]."""
        arrays: list[np.ndarray] = []
        start = 0
        for shape, kind, end in self._parts():
            used = int(np.prod(shape)) * np.dtype(kind).itemsize
            arrays.append(payload[start : start + used].view(kind).reshape(shape))
            start = end
        return Slot(*arrays)


@dataclass(frozen=True, eq=False)
class Slot:
    """The arrays of one slot, for a full batch; a short batch fills the first rows."""

    data: NDArray[np.float32]
    labels: np.ndarray
    ids: NDArray[np.int64]
    epochs: NDArray[np.int64]


@dataclass(frozen=True)
class Probe:
    """What the first record says about all batches.

    Attributes
    ----------
    records: length of the data set.
    record_shape: (C, H, W) of record 0 as decoded (after a user's function).
    sample_shape: (C, h, w) of a sample in the blob.
    layout: of the slots.
    """

    records: int
    backend: str
    record_shape: Shape
    sample_shape: Shape
    layout: Layout


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
    record = source.read(0)
    image, label = _decode(record, spec.transform.color)
    image, label = transform.apply_function(image, label, 0, 0, record)
    shape = (int(image.shape[0]), int(image.shape[1]), int(image.shape[2]))
    sample_shape = transform.fit(shape, record)
    width = len(label) if isinstance(label, np.ndarray) else 0
    _check_label(label, width, record)
    return Probe(len(source), source.backend, shape, sample_shape, Layout(spec.batch, sample_shape, width))


class BatchMaker:
    """Makes batches of one feed. Holds nothing that changes between steps."""

    def __init__(self, spec: FeedSpec, probed: Probe, reader: Reader, recorder: Recorder = NULL) -> None:
        self.spec, self.probe, self.reader, self.recorder = spec, probed, reader, recorder
        self.stream = stream_of(spec, probed.records)
        self.transform = Transform(spec.transform, spec.seed, spec.phase_number)
        self.transform.fit(probed.record_shape, f"record 0 of {spec.source}")

    def warm_up(self) -> None:
        """Compile or load what the first batch would otherwise wait for: that time belongs to the start."""
        shape, one = self.probe.record_shape, np.zeros(1, np.int64)
        draws = philox.draw(0, 0, one, one, (one, one), mirror=True, random_crop=False)
        self.transform.fill([np.zeros(shape, np.uint8)], draws, np.empty((1, *self.probe.sample_shape), np.float32))
        if self.spec.fingerprints != "off":
            scratch = np.zeros((2, self.probe.layout.nbytes // 2), np.uint8)
            hashing.ordered(scratch)
            hashing.multiset(scratch.view(np.int64)[:, :1])
            record_hashes([bytes(9)])

    def make(self, step: int, slot: Slot, *, index: int = -1, flags: int = 0) -> Made:
        """Make the batch of ``step`` into ``slot``; ``index`` and ``flags`` are only recorded.

        Raises :class:`StallscopeError` naming data set, key and record for anything wrong with a record.
        """
        spec, recorder, transform = self.spec, self.recorder, self.transform
        items = self.stream.at(step % spec.cycle if spec.cycle else step)
        count, epoch = len(items), int(items.epochs[0])
        if spec.phase == "TEST":
            flags |= Flag.TEST_PHASE
        tags = {"step": step, "epoch": epoch, "slot": index, "flags": flags}
        records = self.reader.read(items.records, recorder, **tags)

        images: list[np.ndarray] = []
        labels: list[Any] = []
        with recorder.span(Stage.DECODE, items=count, **tags) as span:
            for record in records:
                image, label = _decode(record, spec.transform.color)
                if transform.function is None:
                    transform.check(image.shape, record)
                images.append(image)
                labels.append(label)
            span.nbytes = sum(image.nbytes for image in images)

        data = slot.data[:count]
        with recorder.span(Stage.AUGMENT, items=count, nbytes=data.nbytes, **tags):
            if transform.function is not None:
                for i, record in enumerate(records):
                    image, labels[i] = transform.apply_function(
                        images[i], labels[i], int(items.epochs[i]), record.index, record
                    )
                    transform.check(image.shape, record)
                    images[i] = image
            _, height, width = transform.sample_shape
            spare = (
                np.fromiter((image.shape[1] - height for image in images), np.int64, count),
                np.fromiter((image.shape[2] - width for image in images), np.int64, count),
            )
            draws = philox.draw(
                spec.seed, spec.phase_number, items.epochs, items.records, spare,
                mirror=spec.transform.mirror, random_crop=bool(spec.transform.crop) and spec.phase == "TRAIN",
            )  # fmt: skip
            transform.fill(images, draws, data)

        with recorder.span(Stage.COLLATE, items=count, nbytes=data.nbytes, **tags):
            label_width = self.probe.layout.label_width
            for label, record in zip(labels, records, strict=True):
                _check_label(label, label_width, record)
            slot.labels[:count] = labels
            slot.ids[:count] = items.records
            slot.epochs[:count] = items.epochs
            hashes = self._hashes(records, slot, count) if spec.fingerprints != "off" else {}
        return Made(step, epoch, count, hashes)

    @staticmethod
    def _hashes(records: Sequence[Record], slot: Slot, count: int) -> dict[str, int]:
        # One pass over the stored bytes serves both hashes: see the definitions in profiler.hashing.
        each = record_hashes([record.value for record in records])
        ids = slot.ids[:count]
        return {
            "ids": hashing.ordered(ids),
            "ids_set": hashing.multiset(ids),
            "raw": hashing.ordered(each),
            "raw_set": int(each.sum(dtype=np.uint64)),
            "fill": fill_hash(slot.data[:count], slot.labels[:count]),
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


def _decode(record: Record, color: Color) -> tuple[np.ndarray, Any]:
    """Image [C, H, W] and label of a record: an int, or float32[K] where the record has float_data beside its data."""
    datum = datums.parse(record.value, record)
    image = decode.to_image(datum, record, color=color)
    if len(datum.data) and datum.float_data is not None:
        return image, datum.float_data
    if datum.label is None:
        raise LabelError(
            f"{record} has no label",
            expected="the field label (or float_data beside data)",
            found="neither; that is not the same as label 0",
            hint="the record was cut short or was written without a label: python -m datasets.verify",
        )
    return image, datum.label


def _check_label(label: Any, width: int, where: object) -> None:
    """Raise :class:`LabelError` unless the label is an int32 (width 0) or a vector of ``width`` numbers."""
    if isinstance(label, np.ndarray) and label.ndim == 1 and label.dtype == np.float32:
        found = len(label)
    elif isinstance(label, (int, np.integer)) and int(label) in _INT32:
        found = 0
    else:
        raise LabelError(
            f"the label of {where} cannot be used", expected="an int32, or a float32 vector", found=repr(label)[:80]
        )
    if found != width:
        names = ["one int32" if size == 0 else f"{size} float32" for size in (width, found)]
        raise LabelError(
            f"the label of {where} is of another kind than that of record 0", expected=names[0], found=names[1]
        )
