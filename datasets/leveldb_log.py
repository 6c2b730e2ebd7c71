"""LevelDB's log format, in which its write-ahead logs and its manifests are written. See ``doc/log_format.md`` there.

Here: the records of such a file with their checksums, which tables and logs a manifest says are live, and what a
write-ahead log holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from datasets.crc32c import crc32c, masked
from datasets.errors import DatasetCorrupt, NotADataset

_BLOCK = 32768
_HEADER = 7
_TAG = 8  # sequence number and type behind each key of a user
_COMPARATOR = b"leveldb.BytewiseComparator"


class Table(NamedTuple):
    """What a manifest says of a table: its number, level, size in bytes, and its first and last key."""

    number: int
    level: int
    nbytes: int
    first: bytes
    last: bytes


@dataclass(slots=True)
class TableList:
    """What a MANIFEST says: the live tables by number, and which logs are still to be replayed."""

    tables: dict[int, Table] = field(default_factory=dict)
    log: int = 0
    previous_log: int = 0
    said: set[int] = field(default_factory=set)


_NEXT_FILE, _LAST_SEQUENCE, _LOG = 3, 4, 2
_NEEDED = {_LOG: "log number", _NEXT_FILE: "next file number", _LAST_SEQUENCE: "last sequence number"}


def live_files(content: bytes, manifest: str, name: str, strict: bool = True) -> TableList:
    """Parse the content of a MANIFEST file. Unless ``strict``, checksums and missing fields are nothing to stop at.

    Raises
    ------
    DatasetCorrupt: it cannot be understood. NotADataset: it belongs to something other than LevelDB.
    """
    found = TableList()
    try:
        for record in log_records(content, strict):
            _apply(record.payload, found, name)
        missing = [what for field_, what in _NEEDED.items() if field_ not in found.said]
        if missing and strict:
            raise ValueError(f"it has no {' and no '.join(missing)}")
    except (IndexError, ValueError) as error:
        raise DatasetCorrupt(
            f"{name}: {manifest} is damaged", found=str(error), hint="copy the data set again"
        ) from error
    return found


def log_fragments(content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Place, kind (1 whole, 2 first, 3 middle, 4 last) and payload of the fragments in LevelDB's log format.

    A torn fragment at the end is left out, as LevelDB does. Raises ValueError for what is none.
    """
    position = 0
    while position + _HEADER <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        size = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        start, position = position, position + _HEADER + size
        if kind == 0 and size == 0:  # the rest of a preallocated block
            position += _BLOCK - position % _BLOCK
            continue
        if position > len(content):
            break
        if kind not in (1, 2, 3, 4):
            raise ValueError(f"record type {kind} at byte {start + _HEADER - 1}")
        yield start, kind, content[start + _HEADER : position]


def cut_end(content: bytes) -> int | None:
    """Where a log that ends inside a record breaks off, or None. LevelDB leaves such an end out without a word."""
    end, unfinished = 0, False
    for start, kind, payload in log_fragments(content):
        end, unfinished = start + _HEADER + len(payload), kind in (2, 3)
    return end if unfinished or content[end:].strip(b"\0") else None


def fragment_sound(content: bytes, start: int, size: int) -> bool:
    """Whether the fragment at ``start``, with a payload of ``size`` bytes, has the checksum that was written."""
    stored = int.from_bytes(content[start : start + 4], "little")
    return masked(crc32c(np.frombuffer(content, np.uint8, size + 1, start + 6))) == stored


class LogRecord(NamedTuple):
    """A record of a file in LevelDB's log format, and the (start, size) of its parts in the file."""

    payload: bytes
    parts: list[tuple[int, int]]

    def extents(self, start: int, end: int) -> list[tuple[int, int]]:
        """Where bytes start to end of the payload lie in the file: (start, size) of each part."""
        ends = list(accumulate(size for _, size in self.parts))
        found = []
        for place in range(bisect_right(ends, start), len(ends)):
            before = ends[place] - self.parts[place][1]
            if before >= end:
                break
            low, high = max(start, before), min(end, ends[place])
            if low < high:
                found.append((self.parts[place][0] + low - before, high - low))
        return found


def log_records(content: bytes, verify: bool = True) -> Iterator[LogRecord]:
    """The records of a file in LevelDB's log format. A torn last record is left out, as LevelDB does.

    Raises ValueError for damage, and for wrong checksums unless they are not to be verified.
    """
    parts: list[tuple[int, int]] = []
    for start, kind, payload in log_fragments(content):
        if verify and not fragment_sound(content, start, len(payload)):
            raise ValueError(f"checksum mismatch at byte {start}")
        if (kind in (1, 2)) == bool(parts):
            raise ValueError(f"a record without its {'end' if parts else 'beginning'} at byte {start}")
        parts.append((start + _HEADER, len(payload)))
        if kind in (1, 4):
            yield LogRecord(b"".join(content[start : start + size] for start, size in parts), parts)
            parts = []


class Write(NamedTuple):
    """What a write-ahead log says of a key: the newest value's place in the log; None where it was deleted."""

    sequence: int
    extents: list[tuple[int, int]] | None


def writes(content: bytes) -> Iterator[tuple[bytes, Write]]:
    """What a write-ahead log holds, in the order of writing. Raises ValueError or IndexError for damage."""
    for record in log_records(content):
        batch = record.payload
        if len(batch) < 12:
            raise ValueError(f"a batch of {len(batch)} bytes")
        sequence, count = int.from_bytes(batch[:8], "little"), int.from_bytes(batch[8:12], "little")
        position, seen = 12, 0
        while position < len(batch):
            kind = batch[position]
            size, position = varint(batch, position + 1)
            key = batch[position : position + size]
            position += size
            extents = None
            if kind == 1:
                size, position = varint(batch, position)
                extents = record.extents(position, position + size)
                position += size
            elif kind != 0:
                raise ValueError(f"an unknown kind of write, {kind}")
            if position > len(batch):
                raise ValueError("a write runs beyond its batch")
            yield key, Write(sequence + seen, extents)
            seen += 1
        if seen != count:
            raise ValueError(f"a batch of {seen} writes that should have {count}")


def varint(stored: bytes, position: int) -> tuple[int, int]:
    """The number at ``position`` and the position behind it. IndexError where the bytes end."""
    value = shift = 0
    while True:
        byte = stored[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position


def _apply(edit: bytes, state: TableList, name: str) -> None:
    """Apply one version edit: a sequence of tagged fields."""
    position = 0

    def number() -> int:
        nonlocal position
        value, position = varint(edit, position)
        return value

    def text() -> bytes:
        nonlocal position
        size = number()
        if position + size > len(edit):
            raise ValueError("a key runs beyond its record")
        position += size
        return edit[position - size : position]

    while position < len(edit):
        tag = number()
        state.said.add(tag)
        if tag == 1:
            comparator = text()
            if comparator != _COMPARATOR:
                raise NotADataset(
                    f"{name} orders its keys in a way of its own",
                    expected=_COMPARATOR.decode(),
                    found=comparator.decode("utf-8", "replace"),
                )
        elif tag == _LOG:
            state.log = number()
        elif tag == 9:
            state.previous_log = number()
        elif tag in (_NEXT_FILE, _LAST_SEQUENCE):
            number()
        elif tag == 5:  # compaction pointer: level, key
            number()
            text()
        elif tag == 6:  # a table leaves its level
            number()
            state.tables.pop(number(), None)
        elif tag == 7:  # a table enters a level
            level, table = number(), number()
            state.tables[table] = Table(table, level, number(), text()[:-_TAG], text()[:-_TAG])
        else:
            raise NotADataset(
                f"{name} is not a LevelDB: its manifest uses fields that LevelDB does not have",
                found=f"field {tag}",
                hint="RocksDB has the same file names; it is not supported",
            )
