"""The blocks of a LevelDB's tables: checksum, codec, entries. The format: ``doc/table_format.md`` of LevelDB.

A block is stored as its content, compressed or not, the number of the codec, and a masked CRC-32C of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from datasets.crc32c import crc32c, masked
from datasets.leveldb_log import varint

FOOTER = 48
MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
TRAILER = 5
"""Bytes behind a block: its codec and its checksum."""
TAG = 8
"""Bytes behind each key of a user: sequence number and kind."""
PLAIN, SNAPPY, ZSTD = 0, 1, 2
MOST = 1 << 30
"""Bytes of a block that are believed: more is damage."""


class Handle(NamedTuple):
    """Where a block lies in its file, in bytes, without what stands behind it."""

    start: int
    size: int


class Entry(NamedTuple):
    """A record of a block: its internal key, and where in the block its value lies."""

    key: bytes
    start: int
    end: int


class BlockDamaged(ValueError):
    """A block is not what was written. ``str`` says what is wrong with it."""


class CodecUnknown(ValueError):
    """A block whose checksum is right is compressed with something that cannot be undone here."""


def handle(stored: bytes, position: int = 0) -> tuple[Handle, int]:
    """The handle at a position, and the position behind it. IndexError where the bytes end."""
    start, position = varint(stored, position)
    size, position = varint(stored, position)
    return Handle(start, size), position


def footer(stored: bytes) -> Handle:
    """Of the last 48 bytes of a table: where its index lies. Raises :class:`BlockDamaged`."""
    if len(stored) < FOOTER or stored[-8:] != MAGIC:
        raise BlockDamaged("has not the mark of a table at its end: cut, or overwritten")
    try:
        _, position = handle(stored)
        return handle(stored, position)[0]
    except IndexError as error:
        raise BlockDamaged("has a damaged footer") from error


def sound(stored: bytes | memoryview) -> bool:
    """Whether a block with what stands behind it has the checksum that was written."""
    size = len(stored) - 4
    return size > 0 and masked(crc32c(np.frombuffer(stored, np.uint8, size))) == int.from_bytes(stored[size:], "little")


def content(stored: bytes | memoryview) -> bytes:
    """What was written into a block, given with what stands behind it; its checksum is taken to be right.

    Raises :class:`BlockDamaged`, or :class:`CodecUnknown`.
    """
    kind, inside = stored[-TRAILER], memoryview(stored)[:-TRAILER]
    if kind == PLAIN:
        return bytes(inside)
    if kind not in (SNAPPY, ZSTD):
        raise CodecUnknown(f"compression type {kind}")
    import pyarrow as pa

    name = "snappy" if kind == SNAPPY else "zstd"
    if not has_codec(name):
        raise CodecUnknown(f"{name.capitalize()}, which this build of pyarrow lacks")
    try:
        if kind == SNAPPY:
            length, _ = varint(bytes(inside[:10]), 0)
            if length > MOST:
                raise ValueError(f"a block of {length} bytes")
            return bytes(pa.Codec("snappy").decompress(pa.py_buffer(inside), length, asbytes=True))
        with pa.input_stream(pa.py_buffer(inside), compression="zstd") as stream:
            return bytes(stream.read(MOST))
    except (ValueError, IndexError, OSError, pa.ArrowException) as error:
        raise BlockDamaged(f"corrupted compressed block: {error}") from error


def has_codec(name: str) -> bool:
    """Whether this build of pyarrow has a codec."""
    import pyarrow as pa

    return bool(pa.Codec.is_available(name))


def entries(block: bytes, start: int = 0) -> Iterator[Entry]:
    """The records of a block, from the restart point ``start`` on: a key shares its beginning with the one before.

    Raises :class:`BlockDamaged`.
    """
    end = _restarts(block)[0]
    position, key = start, b""
    try:
        while position < end:
            shared, position = varint(block, position)
            fresh, position = varint(block, position)
            size, position = varint(block, position)
            if shared > len(key) or position + fresh + size > end:
                raise BlockDamaged("an entry runs beyond its block")
            key = key[:shared] + block[position : position + fresh]
            position += fresh + size
            yield Entry(key, position - size, position)
    except IndexError as error:
        raise BlockDamaged("an entry runs beyond its block") from error


def seek(block: bytes, key: bytes) -> Entry | None:
    """The newest record of a user's key in a block. Raises :class:`BlockDamaged`."""
    end, count = _restarts(block)
    low, high = 0, count - 1  # the last restart point whose key is smaller: newer versions of a key come first
    while low < high:
        middle = (low + high + 1) // 2
        first = next(entries(block, _number(block, end + 4 * middle)), None)
        if first is None:
            raise BlockDamaged("a restart point lies beyond its block")
        if first.key[:-TAG] < key:
            low = middle
        else:
            high = middle - 1
    for entry in entries(block, _number(block, end + 4 * low) if count else 0):
        found = entry.key[:-TAG]
        if found == key:
            return entry
        if found > key:
            return None
    return None


def _restarts(block: bytes) -> tuple[int, int]:
    """Where the entries of a block end and the restart points begin, and how many there are."""
    if len(block) < 4:
        raise BlockDamaged("a block of less than 4 bytes")
    count = _number(block, len(block) - 4)
    end = len(block) - 4 - 4 * count
    if end < 0:
        raise BlockDamaged(f"{count} restart points in a block of {len(block)} bytes")
    return end, count


def _number(block: bytes, position: int) -> int:
    return int.from_bytes(block[position : position + 4], "little")
