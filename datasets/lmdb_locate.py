"""Where records lie in the file of an LMDB: position in key order to offset and length, remembered once found.

A record takes 16 bytes, filled in page by page as its neighbours are asked for, and never more than 40 MiB in all: of
a database with more records than fit, those met last are remembered. (So the memory is bounded also where keys are
padded numbers and there is no index.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from datasets import lmdb_walk
from datasets.key_index import DenseKeys, KeyIndex
from datasets.lmdb_file import BIGDATA, HEADER, LmdbFile, Meta, Tree
from datasets.lmdb_pages import Leaf

MOST_CELLS = 1 << 21
"""Records whose places are remembered: 2 Mi, in 32 MiB and 8 MiB to tell which they are."""
_LARGEST = (1 << 63) - 1
_FAR = 1 << 44  # no page lies so far out: its first byte still fits into 63 bits


class Located(NamedTuple):
    """Places of records in the data file: int64, bytes from its start, one of each for each record."""

    offsets: np.ndarray
    lengths: np.ndarray
    key_offsets: np.ndarray
    key_lengths: np.ndarray


class Unlocated(Exception):
    """A record cannot be located. place: in the list asked for. status: of :mod:`datasets.lmdb_walk`. page: where."""

    def __init__(self, place: int, status: int, page: int) -> None:
        super().__init__(place, status, page)
        self.place, self.status, self.page = place, status, page


class Locator:
    """Finds records of one tree, which nobody may have written to since ``meta`` was read.

    A cell is two uint64: offset of the key (48 bits) and its length (16), length of the value (32) and its first
    overflow page (32), 0 where it follows its key. (0, 0): not known. With fewer cells than records, cell
    i mod cells holds the record that ``tags`` says: i // cells.
    """

    def __init__(self, file: LmdbFile, meta: Meta, tree: Tree, index: KeyIndex) -> None:
        self._file = file
        self._index = index
        self._page_size = meta.page_size
        records = tree.entries
        root = tree.root if tree.root < _FAR else 0  # an empty tree has none
        # Numbers of more digits than int64 holds are not told from neighbours: then no page may be taken over whole.
        width, start = (index.width, index.first) if isinstance(index, DenseKeys) else (0, 0)
        last_page = min(meta.last_page, _FAR)
        start = min(start, _LARGEST - records)
        self._sizes = np.array([meta.page_size, last_page, root, records, width, start], np.int64)
        count = records if records <= MOST_CELLS else min(MOST_CELLS, records * 4 // 5)
        self._cells = np.zeros((count, 2), np.uint64)  # zeros are no memory until they are written to
        self._tags = np.zeros(count if count < records else 0, np.uint32)
        self._pages: np.ndarray | None = None
        self._held: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the places may take."""
        return self._cells.nbytes + self._tags.nbytes

    def note(self, cells: np.ndarray) -> None:
        """Take over the places of all records, as :func:`cells_of` makes them, in key order."""
        if len(cells) == 2 * len(self._cells) and not len(self._tags):
            self._cells = cells.reshape(-1, 2)

    def known(self, index: int) -> tuple[int, int, int, int] | None:
        """The place of one record in the order of :class:`Located`, if it is remembered: for lists of a few."""
        slot = index
        if len(self._tags):
            slot = index % len(self._cells)
            if self._tags.item(slot) != index // len(self._cells):
                return None
        first, rest = self._cells.item(slot, 0), self._cells.item(slot, 1)
        if not first:
            return None
        key_offset, key_length, overflow = first & (1 << 48) - 1, first >> 48, rest >> 32
        offset = overflow * self._page_size + HEADER if overflow else key_offset + key_length
        return offset, rest & 0xFFFFFFFF, key_offset, key_length

    def locate(self, indices: np.ndarray) -> Located:
        """The places of the records ``indices`` (int64, each of them one that exists). Raises :class:`Unlocated`."""
        slots = indices if not len(self._tags) else indices % len(self._cells)
        cells = self._cells[slots]
        places, rest = cells[:, 0].view(np.int64), cells[:, 1].view(np.int64)
        known = places != 0
        if len(self._tags):
            known &= self._tags[slots] == indices // len(self._cells)
        key_offsets, key_lengths = places & (1 << 48) - 1, (places >> 48) & 0xFFFF
        overflow = (rest >> 32) & 0xFFFFFFFF
        offsets = np.where(overflow != 0, overflow * self._page_size + HEADER, key_offsets + key_lengths)
        located = Located(offsets, rest & 0xFFFFFFFF, key_offsets, key_lengths)
        if not known.all():
            (missing,) = np.nonzero(~known)
            for part, found in zip(located, self._walk(indices, missing).T, strict=True):
                part[missing] = found
        return located

    def _walk(self, indices: np.ndarray, missing: np.ndarray) -> np.ndarray:
        if self._pages is None or self._held is None:
            self._pages = np.empty((lmdb_walk.SLOTS, self._page_size), np.uint8)
            self._held = np.full(lmdb_walk.SLOTS, -1, np.int64)
        wanted = indices[missing]
        anchors = [self._index.anchor(index) for index in wanted.tolist()]
        keys = np.frombuffer(b"".join([key for key, _ in anchors]), np.uint8)
        ends = np.cumsum([len(key) for key, _ in anchors], dtype=np.int64)
        steps = np.array([step for _, step in anchors], np.int64)
        out, failed = np.empty((len(wanted), 4), np.int64), np.empty(2, np.int64)
        done = lmdb_walk.walk(
            self._file.fd, self._sizes, wanted, keys, ends, steps,
            self._pages, self._held, self._cells, self._tags, out, failed,
        )  # fmt: skip
        if done < len(wanted):
            raise Unlocated(int(missing[done]), int(failed[0]), int(failed[1]))
        return out


def cells_of(leaf: Leaf, meta: Meta) -> Iterator[int]:
    """Two numbers a record of a page: what :class:`Locator` keeps; zeros where a place cannot be right."""
    page, base = leaf.page, leaf.number * meta.page_size
    for place in leaf.places:
        size = int.from_bytes(page[place : place + 4], "little")
        key_size = page[place + 6] | page[place + 7] << 8
        start = place + 8 + key_size
        overflow = 0
        if page[place + 4] & BIGDATA:
            overflow = int.from_bytes(page[start : start + 8], "little")
            pages = -(-(HEADER + size) // meta.page_size)
            sound = 2 <= overflow <= min(meta.last_page + 1 - pages, lmdb_walk.MOST_PAGE - 1)
        else:
            sound = start + size <= len(page)
        if sound and base < lmdb_walk.MOST_OFFSET:
            yield base + place + 8 | key_size << 48
            yield size | overflow << 32
        else:
            yield 0
            yield 0
