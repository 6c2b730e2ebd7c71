"""Where a LevelDB is damaged: the checksums of its tables and logs, block by block.

LevelDB says ``block checksum mismatch`` and no more. What a person needs is the file, the place and the keys that are
gone, so after such an error the files are read once more here. The formats: ``doc/table_format.md`` and
``doc/log_format.md`` of LevelDB. A checksum is a masked CRC-32C of the block and its type byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datasets.leveldb_log import cut_end, log_fragments, varint
from profiler.jit import njit

_FOOTER = 48
_TRAILER = 5
_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_TAG = 8  # sequence number and type behind each key of a user
_CODECS = {1: "snappy", 2: "zstd"}
_MOST_BLOCK = 1 << 30


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A part of a file that fails its check.

    Attributes
    ----------
    place: file and byte. reason: what is wrong.
    upto: a key at or after the last one of the block; empty where it is not one block that is damaged.
    """

    place: str
    reason: str
    upto: bytes = b""


def bad_blocks(table: Path) -> list[BadBlock]:
    """The damaged blocks of a table (``.ldb`` or ``.sst``), in key order."""
    content = np.fromfile(table, np.uint8)
    try:
        if len(content) < _FOOTER or content[-8:].tobytes() != _MAGIC:
            return [BadBlock(table.name, "has not the mark of a table at its end: cut, or overwritten")]
        footer = content[-_FOOTER:].tobytes()
        _, position = _handle(footer, 0)
        index, _ = _handle(footer, position)
        if not _sound(content, *index):
            return [
                BadBlock(
                    f"{table.name}, byte {index[0]}", "checksum mismatch in the index: none of its keys can be found"
                )
            ]
        found = []
        for key, value in _entries(_block(content, *index)):
            (start, size), _ = _handle(value, 0)
            if not _sound(content, start, size):
                found.append(BadBlock(f"{table.name}, byte {start}", "block checksum mismatch", key[:-_TAG]))
        return found
    except (IndexError, ValueError, OSError) as error:
        return [BadBlock(table.name, f"cannot be understood: {error}")]


def bad_log(log: Path) -> list[BadBlock]:
    """What LevelDB leaves out of a write-ahead log without a word: a cut end, or records that fail their checksum."""
    content = log.read_bytes()
    whole = np.frombuffer(content, np.uint8)
    found: list[BadBlock] = []
    try:
        for start, _, payload in log_fragments(content):
            stored = int.from_bytes(content[start : start + 4], "little")
            if _masked(_crc32c(_TABLE, whole[start + 6 : start + 7 + len(payload)])) != stored:
                found.append(BadBlock(f"{log.name}, byte {start}", "checksum mismatch in the write-ahead log"))
        end = cut_end(content)
    except ValueError as error:
        return [*found, BadBlock(log.name, f"cannot be understood: {error}")]
    if end is not None:
        found.append(
            BadBlock(
                f"{log.name}, byte {end}",
                f"the write-ahead log of {len(content)} bytes ends inside a record: cut by a copy or a kill; "
                "what followed is lost",
            )
        )
    return found


@njit
def _crc32c(table: NDArray[np.uint32], data: NDArray[np.uint8]) -> int:  # pragma: no cover (compiled)
    crc = np.uint32(0xFFFFFFFF)
    for byte in data:
        crc = table[(crc ^ byte) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    return int(crc ^ np.uint32(0xFFFFFFFF))


def _make_table() -> NDArray[np.uint32]:
    crc = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = np.where(crc & 1, (crc >> 1) ^ np.uint32(0x82F63B78), crc >> 1).astype(np.uint32)
    return crc


_TABLE = _make_table()


def _masked(crc: int) -> int:
    crc = int(crc)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _sound(content: NDArray[np.uint8], start: int, size: int) -> bool:
    end = start + size + 1
    if end + 4 > len(content):
        return False
    stored = int.from_bytes(content[end : end + 4].tobytes(), "little")
    return _masked(_crc32c(_TABLE, content[start:end])) == stored


def _block(content: NDArray[np.uint8], start: int, size: int) -> bytes:
    """The content of a block whose checksum is right."""
    stored, kind = content[start : start + size].tobytes(), int(content[start + size])
    if kind == 0:
        return stored
    if kind not in _CODECS:
        raise ValueError(f"compression type {kind}")
    import pyarrow as pa

    if kind == 1:
        length, _ = varint(stored, 0)
        if length > _MOST_BLOCK:
            raise ValueError(f"a block of {length} bytes")
        return pa.Codec("snappy").decompress(stored, length, asbytes=True)
    with pa.input_stream(pa.py_buffer(stored), compression="zstd") as stream:
        return stream.read(_MOST_BLOCK)


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block; a key shares its beginning with the one before."""
    end = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little")
    position = 0
    key = b""
    while position < end:
        shared, position = varint(block, position)
        fresh, position = varint(block, position)
        size, position = varint(block, position)
        key = key[:shared] + block[position : position + fresh]
        position += fresh
        yield key, block[position : position + size]
        position += size


def _handle(stored: bytes, position: int) -> tuple[tuple[int, int], int]:
    """(place and size of a block) and the position behind it."""
    start, position = varint(stored, position)
    size, position = varint(stored, position)
    return (start, size), position
