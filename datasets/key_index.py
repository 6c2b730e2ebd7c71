"""Positions to keys: records are addressed by their place in the byte order of the keys, databases by the key."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class KeyList:
    """Every ``stride``-th key, one after the other in one buffer. ``ends[j]`` is where the j-th of them ends."""

    stride: int
    records: int
    buffer: bytes
    ends: array[int]

    def anchor(self, index: int) -> tuple[bytes, int]:
        """A stored key at or before record ``index``, and how many records lie between."""
        place, steps = divmod(index, self.stride)
        return self.buffer[self.ends[place - 1] if place else 0 : self.ends[place]], steps


KeyIndex = DenseKeys | KeyList


def dense_by_ends(first: bytes, last: bytes, records: int) -> DenseKeys | None:
    """The dense index that the first and the last key allow. What lies between them is not known from this."""
    if not (first.isdigit() and last.isdigit() and len(first) == len(last)):
        return None
    if int(last) - int(first) != records - 1:
        return None
    return DenseKeys(len(first), int(first), records)


def build(keys: Iterable[bytes], stride: int = 1) -> KeyIndex:
    """Index all keys of a database, given in order. Dense ones cost nothing, others ``key + 8`` bytes per stride."""
    buffer = bytearray()
    ends = array("Q")
    width = first = -1
    dense = True
    records = 0
    for key in keys:
        if records == 0:
            dense = key.isdigit()
            width, first = (len(key), int(key)) if dense else (0, 0)
        elif dense:
            dense = key == b"%0*d" % (width, first + records)
        if records % stride == 0:
            buffer += key
            ends.append(len(buffer))
        records += 1
    if dense and records:
        return DenseKeys(width, first, records)
    return KeyList(stride, records, bytes(buffer), ends)
