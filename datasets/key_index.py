"""Positions to keys: records are addressed by their place in the byte order of the keys, databases by the key.

Keys that are consecutive numbers of one width need nothing. Of others, every ``stride``-th is kept, in at most 16 bytes
a record: where keys are long, they are compressed in blocks, or the stride grows.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np

MOST_BYTES = 16
"""Bytes a record that an index may take, once there are more than a few thousand records."""
_CHUNK = 4096
_MOST_STRIDE = 1 << 20


@dataclass(frozen=True, slots=True)
class DenseKeys:
    """Keys that are the numbers first, first + 1, … in decimal, padded with zeros to one width: nothing to keep."""

    width: int
    first: int
    records: int
    stride: int = 1

    def anchor(self, index: int) -> tuple[bytes, int]:
        """The key of record ``index``, and 0: see :meth:`KeyList.anchor`."""
        return b"%0*d" % (self.width, self.first + index), 0

    def keys(self, indices: Iterable[int]) -> list[bytes]:
        """The keys of records."""
        width, first = self.width, self.first
        return [b"%0*d" % (width, first + index) for index in indices]


@dataclass(frozen=True, slots=True, eq=False)
class KeyList:
    """Every ``stride``-th key, in blocks of ``packed`` keys one after the other in one buffer.

    Attributes
    ----------
    stride: records from one kept key to the next.
    packed: keys in a block. 1: a block is the key itself; more: see :func:`_pack`.
    records: of the whole database.
    blocks: the buffer, in memory or mapped from a file.
    ends: uint64, where each block ends.
    """

    stride: int
    packed: int
    records: int
    blocks: bytes | memoryview
    ends: array[int] | memoryview

    def anchor(self, index: int) -> tuple[bytes, int]:
        """A stored key at or before record ``index``, and how many records lie between."""
        place, steps = divmod(index, self.stride)
        number, inside = divmod(place, self.packed)
        block = bytes(self.blocks[self.ends[number - 1] if number else 0 : self.ends[number]])
        return (block if self.packed == 1 else _key_in(block, inside)), steps

    @property
    def nbytes(self) -> int:
        """Bytes that the index takes."""
        return len(self.blocks) + 8 * len(self.ends)


KeyIndex = DenseKeys | KeyList


def dense_by_ends(first: bytes, last: bytes, records: int) -> DenseKeys | None:
    """The dense index that the first and the last key allow. What lies between them is not known from this."""
    if not (first.isdigit() and last.isdigit() and len(first) == len(last)):
        return None
    if int(last) - int(first) != records - 1:
        return None
    return DenseKeys(len(first), int(first), records)


def build(keys: Iterable[bytes], stride: int = 1, packed: int = 1) -> KeyIndex:
    """Index all keys of a database, given in order. Dense ones cost nothing, others at most 16 bytes a record.

    ``stride`` is the smallest that is used: where looking over a few neighbours is cheap, a larger one saves memory.
    """
    remaining = iter(keys)
    building = _Building(stride, packed)
    while chunk := list(islice(remaining, _CHUNK)):
        building.add(chunk)
    return building.finish()


class _Building:
    """An index that grows by chunks of keys."""

    def __init__(self, stride: int, packed: int) -> None:
        self.stride, self.packed = stride, packed
        self.records = 0
        self.blocks = bytearray()
        self.ends = array("Q")
        self.waiting: list[bytes] = []  # kept keys that do not fill a block yet
        self.dense: DenseKeys | None = None

    def add(self, chunk: list[bytes]) -> None:
        if self.records == 0:
            self.dense = DenseKeys(len(chunk[0]), int(chunk[0]), 0) if chunk[0].isdigit() else None
        dense = self.dense
        if dense is not None and not _consecutive(chunk, dense.width, dense.first + self.records):
            self.dense = None
        self.waiting += chunk[-self.records % self.stride :: self.stride]
        self.records += len(chunk)
        self._flush(whole=False)
        while self.records >= _CHUNK and self._nbytes > MOST_BYTES * self.records and self.stride < _MOST_STRIDE:
            self._thin()

    def finish(self) -> KeyIndex:
        if self.dense is not None and self.records:
            return DenseKeys(self.dense.width, self.dense.first, self.records)
        self._flush(whole=True)
        return KeyList(self.stride, self.packed, self.records, bytes(self.blocks), self.ends)

    @property
    def _nbytes(self) -> int:
        return len(self.blocks) + 8 * len(self.ends)

    def _flush(self, whole: bool) -> None:
        done = len(self.waiting) if whole else len(self.waiting) // self.packed * self.packed
        for start in range(0, done, self.packed):
            block = self.waiting[start : start + self.packed]
            self.blocks += block[0] if self.packed == 1 else _pack(block)
            self.ends.append(len(self.blocks))
        del self.waiting[:done]

    def _thin(self) -> None:
        """Keep every second of the keys kept so far."""
        blocks, ends, waiting = bytes(self.blocks), self.ends, self.waiting
        self.stride *= 2
        self.blocks, self.ends, self.waiting = bytearray(), array("Q"), []
        start = place = 0
        for end in [*ends, -1]:
            block = blocks[start:end]
            keys = waiting if end < 0 else [block] if self.packed == 1 else _unpack(block)
            self.waiting += keys[place % 2 :: 2]
            self._flush(whole=False)
            start, place = end, place + len(keys)


def _consecutive(keys: Sequence[bytes], width: int, first: int) -> bool:
    """Whether keys are the numbers from ``first`` on, padded to ``width``."""
    if set(map(len, keys)) != {width} or first + len(keys) > 10**width:
        return False
    if width > 18:  # no int64
        return list(keys) == [b"%0*d" % (width, first + place) for place in range(len(keys))]
    numbers = np.arange(first, first + len(keys))[:, None]
    digits = numbers // 10 ** np.arange(width - 1, -1, -1) % 10
    return b"".join(keys) == (digits + ord("0")).astype(np.uint8).tobytes()


def _pack(keys: Sequence[bytes]) -> bytes:
    """Keys as one compressed block, their number and lengths first: neighbours in key order have much in common."""
    head = struct.pack(f"<{len(keys) + 1}I", len(keys), *map(len, keys))
    return zlib.compress(head + b"".join(keys), 6)


@lru_cache(maxsize=256)
def _lengths(block: bytes) -> tuple[bytes, tuple[int, ...]]:
    """Content of a block and the lengths of its keys."""
    content = zlib.decompress(block)
    return content, struct.unpack_from(f"<{int.from_bytes(content[:4], 'little')}I", content, 4)


def _key_in(block: bytes, inside: int) -> bytes:
    content, lengths = _lengths(block)
    start = 4 * (len(lengths) + 1) + sum(lengths[:inside])
    return content[start : start + lengths[inside]]


def _unpack(block: bytes) -> list[bytes]:
    return [_key_in(block, inside) for inside in range(len(_lengths(block)[1]))]
