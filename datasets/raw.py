"""Everything a database still holds, damaged or not: what a check or a rescue reads, and nothing else should.

An ordinary :class:`datasets.source.Source` stops at the first damage, and an LMDB's own library may even take the
process with it, because it trusts what it maps. The readers here go on behind the damage and say what was lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from datasets.errors import DatasetCorrupt
from datasets.paired import label_numbers
from datasets.source import EVERY_TOP, Source, locate, open_source


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as it lies there. ``doubt`` says why its bytes may be another record's, although they were read.

    labels: the numbers that a second source holds for it, where there is one.
    stray: whether nothing leads to it any more, so that it may be of an older state of the database.
    """

    key: bytes
    value: bytes = field(repr=False)
    doubt: str = ""
    labels: NDArray[np.float32] | None = field(default=None, repr=False)
    stray: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """Something that cannot be read.

    Attributes
    ----------
    place: the page, block or file; "" where the key says all. reason: what is wrong with it.
    key: the record's key where one record is lost and its key is known, else None.
    after: key of the last record read before it, None where there is none.
    """

    place: str
    reason: str
    key: bytes | None = None
    after: bytes | None = None


class RawReader(ABC):
    """Reads a database once, from its first key to its last.

    Attributes
    ----------
    path, backend, db: as for a source.
    expected: records by the database's own count; None where it keeps none.
    notes: as for a source.
    """

    path: str
    backend: str
    db: str | None = None
    expected: int | None = None
    notes: Sequence[str] = ()

    @property
    def name(self) -> str:
        return Source.name.fget(self)  # type: ignore[attr-defined]

    @abstractmethod
    def scan(self) -> Iterator[Stored | Lost]:
        """All that can be read, keys ascending except where ``doubt`` says so, and what cannot.

        Raises
        ------
        DatasetChanged: a writer was at work meanwhile. DatasetCorrupt: nothing can be read at all.
        """


class SourceReader(RawReader):
    """What lies in memory or in files of its own: each record can be read or cannot."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.path, self.backend, self.expected = source.path, source.backend, len(source)
        self.notes = source.notes

    def scan(self) -> Iterator[Stored | Lost]:
        for index in range(len(self.source)):
            try:
                record = self.source.read(index)
            except DatasetCorrupt as error:
                # Whoever reports it names the record.
                reason = error.what.removeprefix(f"record {index} of {self.source.name} cannot be read: ")
                yield Lost("", reason, self.source.key(index))
            else:
                yield Stored(record.key, record.value, labels=label_numbers(record))


def open_raw(path: str, *, backend: str | None = None, db: str | None = None) -> RawReader:
    """The reader for what lies at ``path``; arguments and refusals of :func:`datasets.source.open_source`."""
    place, kind = locate(path, backend=backend, db=db)
    if kind == "lmdb":
        from datasets.lmdb_pages import LmdbReader

        return LmdbReader(place, db)
    if kind == "leveldb":
        from datasets.leveldb_raw import LevelDbReader

        return LevelDbReader(place)
    return SourceReader(open_source(place, backend=None if kind == "memory" else kind, tops=EVERY_TOP, tolerant=True))
