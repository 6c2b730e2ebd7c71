"""LevelDB's log format, in which its write-ahead logs and its manifests are written: parsed to know what is there.

Only what a careful reader needs: which tables and logs are live, the key range of each table, and whether a log ends in
the middle of a record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from datasets.errors import DatasetCorrupt, NotADataset

_BLOCK = 32768
_HEADER = 7
_TAG = 8  # sequence number and type behind each key of a user
_COMPARATOR = b"leveldb.BytewiseComparator"


@dataclass(slots=True)
class TableList:
    """What a MANIFEST says: the live tables, and which logs are still to be replayed.

    Attributes
    ----------
    tables: number to size in bytes. ranges: number to first and last key.
    """

    tables: dict[int, int] = field(default_factory=dict)
    ranges: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    log: int = 0
    previous_log: int = 0


def live_files(folder: Path, manifest: str, name: str) -> TableList:
    """Read a MANIFEST file.

    Raises
    ------
    DatasetCorrupt: it cannot be understood. NotADataset: it belongs to something other than LevelDB.
    """
    found = TableList()
    try:
        for edit in _log_records((folder / manifest).read_bytes()):
            _apply(edit, found, name)
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


def _log_records(content: bytes) -> list[bytes]:
    """The records of a file in LevelDB's log format. A torn last record is left out, as LevelDB does."""
    records: list[bytes] = []
    parts: list[bytes] = []
    for _, kind, payload in log_fragments(content):
        if kind in (1, 2):
            parts.clear()
        parts.append(payload)
        if kind in (1, 4):
            records.append(b"".join(parts))
    return records


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
        if tag == 1:
            comparator = text()
            if comparator != _COMPARATOR:
                raise NotADataset(
                    f"{name} orders its keys in a way of its own",
                    expected=_COMPARATOR.decode(),
                    found=comparator.decode("utf-8", "replace"),
                )
        elif tag == 2:
            state.log = number()
        elif tag == 9:
            state.previous_log = number()
        elif tag in (3, 4):  # next file number, last sequence
            number()
        elif tag == 5:  # compaction pointer: level, key
            number()
            text()
        elif tag == 6:  # a table leaves its level
            number()
            state.tables.pop(number(), None)
        elif tag == 7:  # a table enters a level
            number()
            table = number()
            state.tables[table] = number()
            state.ranges[table] = (text()[:-_TAG], text()[:-_TAG])
        else:
            raise NotADataset(
                f"{name} is not a LevelDB: its manifest uses fields that LevelDB does not have",
                found=f"field {tag}",
                hint="RocksDB has the same file names; it is not supported",
            )
