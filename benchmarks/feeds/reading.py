"""What the peers that bring no reader of Caffe's records read with: LMDB views, NumPy, simplejpeg and OpenCV.

As fast as a careful user would have it: one long transaction, records as views of the map, a walk over the wire format
instead of a parser that copies, chance drawn for a whole batch at once, samples written into the batch in place.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.feeds.cases import MEAN, Case

_OPENING = threading.Lock()  # the library refuses to open a database twice in a process
_MEAN = np.array(MEAN, np.float32).reshape(3, 1, 1)


class Records:
    """The records of a Datum LMDB. Opens at the first use in each process; pickles without its handles."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.path = case, str(folder / "lmdb")
        self._transaction: Any = None

    def __len__(self) -> int:
        return self.case.data.records

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_transaction": None, "_environment": None}

    def value(self, number: int) -> memoryview:
        if self._transaction is None:
            with _OPENING:
                self._open()
        return self._transaction.get(b"%08d" % number)

    def _open(self) -> None:
        import lmdb

        if self._transaction is None:
            self._environment = lmdb.open(self.path, readonly=True, lock=False, readahead=False)
            self._transaction = self._environment.begin(buffers=True)

    def close(self) -> None:
        """Let go of the database. Views of its records end with it."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.abort()
            self._environment.close()

    def sample(self, number: int) -> tuple[memoryview, int]:
        """The pixels or the image file, a view of the map, and the label."""
        return walk(self.value(number))


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := view[at]) > 127:
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
    return value | byte << shift, at + 1


def walk(view: memoryview) -> tuple[memoryview, int]:
    """``data`` and ``label`` of a serialized Datum."""
    at, data, label = 0, view[:0], -1
    while at < len(view):
        tag = view[at]
        number, at = _varint(view, at + 1)
        if tag == 0x22:
            data, at = view[at : at + number], at + number
        elif tag == 0x28:
            label = number
    return data, label


def draw(case: Case, rng: np.random.Generator, count: int) -> tuple[Any, ...]:
    """Chance for ``count`` samples: mirror, and where the crop lies, or which part of the picture is resized to it."""
    mirror = (rng.random(count) < 0.5).tolist()
    if not case.data.encoded:
        rows = rng.integers(0, case.data.height - case.crop + 1, count).tolist()
        columns = rng.integers(0, case.data.width - case.crop + 1, count).tolist()
        return mirror, rows, columns
    sides = np.sqrt(rng.uniform(0.08, 1, count) * case.data.height * case.data.width)
    stretch = np.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3), count) / 2)
    heights = np.minimum(sides / stretch, case.data.height).astype(int)
    widths = np.minimum(sides * stretch, case.data.width).astype(int)
    rows = (rng.random(count) * (case.data.height - heights + 1)).astype(int)
    columns = (rng.random(count) * (case.data.width - widths + 1)).astype(int)
    return mirror, rows.tolist(), columns.tolist(), heights.tolist(), widths.tolist()


def part(case: Case, stored: Any, chance: tuple[Any, ...], place: int) -> NDArray[np.uint8]:
    """uint8[3, crop, crop], usually a view, of one record's pixels or image file."""
    mirror, row, column = (values[place] for values in chance[:3])
    if case.data.encoded:
        import cv2
        import simplejpeg

        height, width = chance[3][place], chance[4][place]
        picture = simplejpeg.decode_jpeg(stored, "BGR")[row : row + height, column : column + width]
        picture = cv2.resize(picture, (case.crop, case.crop), interpolation=cv2.INTER_LINEAR).transpose(2, 0, 1)
    else:
        size = (3, case.data.height, case.data.width)
        picture = np.frombuffer(stored, np.uint8).reshape(size)[:, row : row + case.crop, column : column + case.crop]
    return picture[:, :, ::-1] if mirror else picture


def put(case: Case, picture: NDArray[np.uint8], out: NDArray[Any]) -> None:
    if case.dtype == "float32":
        np.subtract(picture, _MEAN, out=out)
    else:
        out[...] = picture


def fill(records: Records, numbers: Any, rng: np.random.Generator, samples: Any, labels: Any) -> None:
    """A whole batch, written in place."""
    case = records.case
    chance = draw(case, rng, len(numbers))
    for place, number in enumerate(numbers):
        stored, labels[place] = records.sample(number)
        put(case, part(case, stored, chance, place), samples[place])


def one(case: Case, stored: Any, rng: np.random.Generator) -> NDArray[Any]:
    """One sample, an array of its own: for libraries that collate."""
    out = np.empty((3, case.crop, case.crop), case.dtype)
    put(case, part(case, stored, draw(case, rng, 1), 0), out)
    return out


def empty(case: Case) -> tuple[NDArray[Any], NDArray[np.int32]]:
    return np.empty(case.shape, case.dtype), np.empty(case.batch, np.int32)


def shuffled(case: Case, seed: int = 1) -> Iterator[list[int]]:
    """Numbers of records, a batch at a time, in another random order in each epoch; without end."""
    rng, left = np.random.default_rng(seed), np.empty(0, np.int64)
    while True:
        while len(left) < case.batch:
            left = np.concatenate([left, rng.permutation(case.data.records)])
        yield left[: case.batch].tolist()
        left = left[case.batch :]
