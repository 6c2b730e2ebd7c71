"""Where the parts of a batch lie in a slot, and what the first record says about all batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.bad_records import ENTRY
from pipeline.transforms import Shape

_ALIGN = 64


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
    given: where samples lie that a function per batch is given, before mean and scale; None without one.
    jpeg: whether that record holds a JPEG file.
    blobs: shapes of one sample in the net, where they are not the above: see :class:`datasets.source.Source`.
    """

    records: int
    backend: str
    first: str
    record_shape: Shape
    sample_shape: Shape
    layout: Layout
    blobs: tuple[tuple[int, ...], ...] = ()
    given: Layout | None = None
    jpeg: bool = False

    @property
    def made(self) -> Layout:
        """Of the slots that samples are made in: those of the feed, or what a function per batch is given."""
        return self.given or self.layout
