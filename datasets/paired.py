"""Two sources with the same keys read as one: images here, their labels there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datasets import datum
from datasets.errors import PairMismatch
from datasets.source import Record, Source, show_key


@dataclass(frozen=True, slots=True)
class PairedRecord(Record):
    """A record with the stored bytes of the record under the same key in a second source."""

    label_value: bytes = field(default=b"", repr=False)
    label_source: str = ""


def label_numbers(record: Record) -> NDArray[np.float32] | None:
    """The numbers that a second source holds for a record; None for a record that has none from there.

    Raises :class:`datasets.datum.DatumError` where they cannot be understood.
    """
    if not isinstance(record, PairedRecord):
        return None
    parsed = datum.parse(record.label_value, f"{record.label_source} of {record}")
    if parsed.float_data is None:
        return np.array([parsed.label], np.float32) if parsed.label is not None else None
    return parsed.float_data


class PairedSource(Source):
    """``source`` and ``labels`` under one index. Owns both: closing it closes them.

    Raises :class:`PairMismatch` when it is made, for lengths or end keys that differ, and at a read, for a key that
    differs: it names the first key that only one of the two has.
    """

    def __init__(self, source: Source, labels: Source) -> None:
        self.source, self.labels = source, labels
        self.path, self.db = source.path, source.db
        # A LevelDB among the two decides: it wants one owner on a node.
        self.backend = "leveldb" if "leveldb" in (source.backend, labels.backend) else source.backend
        ends = (0, len(source) - 1) if len(source) else ()
        if len(source) != len(labels) or any(source.key(index) != labels.key(index) for index in ends):
            raise self._first_difference()

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def notes(self) -> list[str]:
        return [*self.source.notes, *self.labels.notes]

    def __len__(self) -> int:
        return len(self.source)

    def key(self, index: int) -> bytes:
        return self.source.key(index)

    def read(self, index: int) -> PairedRecord:
        return self.read_many([index])[0]

    def read_many(self, indices: Iterable[int]) -> list[PairedRecord]:  # type: ignore[override]  # a list of subtypes
        indices = list(indices)
        pairs = zip(self.source.read_many(indices), self.labels.read_many(indices), strict=True)
        return [self._pair(record, label) for record, label in pairs]

    def identity(self) -> dict[str, Any]:
        return {**self.source.identity(), "labels": self.labels.identity()}

    def close(self) -> None:
        with contextlib.closing(self.source):
            self.labels.close()

    def _pair(self, record: Record, label: Record) -> PairedRecord:
        if record.key != label.key:
            raise self._mismatch(record.index, record.key, label.key)
        return PairedRecord(record.index, record.key, record.value, record.source, label.value, label.source)

    def _first_difference(self) -> PairMismatch:
        for index, (mine, other) in enumerate(zip_longest(_keys(self.source), _keys(self.labels))):
            if mine != other:
                return self._mismatch(index, mine, other)
        raise AssertionError("the keys are the same")

    def _mismatch(self, index: int, mine: bytes | None, other: bytes | None) -> PairMismatch:
        shown = ["no such record" if key is None else f"key {show_key(key)}" for key in (mine, other)]
        return PairMismatch(
            f"{self.source.name} and its labels {self.labels.name} do not belong together: they differ at record "
            f"{index}",
            expected=f"{shown[0]} ({len(self.source)} records)",
            found=f"{shown[1]} ({len(self.labels)} records)",
            hint="both need the same keys: convert them from one list",
        )


def _keys(source: Source) -> Iterator[bytes]:
    return (source.key(index) for index in range(len(source)))
