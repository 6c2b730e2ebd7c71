"""Where records lie in the file of an LMDB: position in key order to offset and length, remembered once found.

A record takes 16 bytes, filled in page by page as its neighbours are asked for. Of a database with more records than
fit into 40 MiB nothing is remembered but the branch pages: each look-up reads the leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from datasets import lmdb_walk
from datasets.key_index import DenseKeys, KeyIndex
from datasets.lmdb_file import BIGDATA, HEADER, LmdbFile, Meta, Tree
from datasets.lmdb_pages import WORTH_ARRAYS, Leaf, Pages

MOST_CELLS = 40 << 16
"""Records of a database whose places are remembered: 2.5 Mi, in 40 MiB."""
PLAIN = 512
"""Records that are looked up without the compiled code, as long as nothing has loaded it: a second saved for whoever
asks for a few."""
FEW = 8
"""Up to so many records are located one by one: arrays would cost more."""
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
    overflow page (32), 0 where it follows its key. (0, 0): not known.
    """

    def __init__(self, file: LmdbFile, meta: Meta, tree: Tree, index: KeyIndex) -> None:
        self._file, self._meta, self._tree, self._index = file, meta, tree, index
        root = tree.root if tree.root < _FAR else 0  # an empty tree has none
        if isinstance(index, DenseKeys):
            self._keys, self._ends = _frozen(index.anchor(0)[0], np.uint8), _frozen(b"", np.uint64)
        else:
            assert index.packed == 1, "the keys of an LMDB are not packed in blocks"
            self._keys, self._ends = _frozen(index.blocks, np.uint8), _frozen(index.ends, np.uint64)
        stride = 0 if isinstance(index, DenseKeys) else index.stride
        self._sizes = np.array([meta.page_size, min(meta.last_page, _FAR), root, tree.entries, stride], np.int64)
        # Zeros are no memory until they are written to.
        self._cells = np.zeros((tree.entries if tree.entries <= MOST_CELLS else 0, 2), np.uint64)
        self._plain_left = PLAIN
        self._pages: np.ndarray | None = None
        self._held: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the places may take."""
        return self._cells.nbytes

    def note(self, cells: np.ndarray) -> None:
        """Take over the places of all records, as :func:`cells_of` makes them, in key order."""
        if len(cells) == 2 * len(self._cells):
            self._cells = cells.reshape(-1, 2)

    def plain(self, indices: list[int]) -> tuple[list[int], ...] | None:
        """The places of records, in lists, without the compiled code; None where that is the faster way.

        What is wrong with a record that cannot be found, :meth:`locate` tells.
        """
        left = 0 if lmdb_walk.find.loaded else self._plain_left
        if len(indices) > FEW and not left:
            return None
        known = self._cells[indices].tolist() if len(self._cells) else [(0, 0)] * len(indices)
        found = [self._place(*cell) for cell in known]
        missing = found.count(None)
        if missing:
            self._plain_left = max(0, left - missing)
            if missing > left:
                return None
            found = [place or self._find(index) for place, index in zip(found, indices, strict=True)]
            if None in found:
                return None
        return tuple(map(list, zip(*found, strict=True)))

    def locate(self, indices: np.ndarray) -> Located:
        """The places of the records ``indices`` (int64, each of them one that exists). Raises :class:`Unlocated`."""
        return self._call(indices, _NOTHING, _NO_STARTS)

    def read(self, indices: np.ndarray, data: np.ndarray) -> tuple[Located, np.ndarray]:
        """As :meth:`locate`, and the records that lie on leaf pages are read into ``data`` (uint8), as far as they fit.

        The second result says where in it their values begin, each with its key right before it: int64, -1 for those
        that are not there.
        """
        starts = np.empty(len(indices), np.int64)
        return self._call(indices, data, starts), starts

    def _call(self, indices: np.ndarray, data: np.ndarray, starts: np.ndarray) -> Located:
        if self._pages is None or self._held is None:
            page_size = self._meta.page_size
            rows = max(lmdb_walk.BRANCH_BYTES // page_size, lmdb_walk.WAYS)
            self._pages = np.empty((rows + 1, page_size), np.uint8)  # no memory either until pages are read into it
            self._held = np.full(rows + 1, -1, np.int64)
        places, failed = np.empty((4, len(indices)), np.int64), np.empty(2, np.int64)
        done = lmdb_walk.find(
            self._file.fd, self._sizes, indices, self._keys, self._ends, self._pages, self._held, self._cells,
            places, failed, data, starts,
        )  # fmt: skip
        if done < len(indices):
            raise Unlocated(done, int(failed[0]), int(failed[1]))
        return Located(*places)

    def _find(self, index: int) -> tuple[int, int, int, int] | None:
        """The place of one record, by the pages as :mod:`datasets.lmdb_pages` reads them."""
        key, steps = self._index.anchor(index)
        leaf = Pages(self._file, self._meta).find(self._tree, key, steps)
        return None if leaf is None else self._place(*cells_of(leaf, self._meta))

    def _place(self, first: int, rest: int) -> tuple[int, int, int, int] | None:
        if not first:
            return None
        key_offset, key_length, overflow = first & (1 << 48) - 1, first >> 48, rest >> 32
        offset = overflow * self._meta.page_size + HEADER if overflow else key_offset + key_length
        return offset, rest & 0xFFFFFFFF, key_offset, key_length


def cells_of(leaf: Leaf, meta: Meta) -> Sequence[int]:
    """Two numbers a record of a page: what :class:`Locator` keeps; zeros where a place cannot be right."""
    if len(leaf.places) >= WORTH_ARRAYS:
        return _cells_of_many(leaf, meta).tolist()
    page, base = leaf.page, leaf.number * meta.page_size
    cells: list[int] = []
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
        sound = sound and base < lmdb_walk.MOST_OFFSET
        cells += (base + place + 8 | key_size << 48, size | overflow << 32) if sound else (0, 0)
    return cells


def _cells_of_many(leaf: Leaf, meta: Meta) -> np.ndarray:
    """:func:`cells_of` by whole arrays: half of the time that opening a database of few large records takes."""
    page, base = np.frombuffer(leaf.page + bytes(8), np.uint8), leaf.number * meta.page_size
    places = np.array(leaf.places, np.int64)
    heads = page[places[:, None] + np.arange(8)]
    sizes, key_sizes = heads.view("<u4")[:, 0].astype(np.int64), heads.view("<u2")[:, 3].astype(np.int64)
    starts = places + 8 + key_sizes
    elsewhere = (heads[:, 4] & BIGDATA) != 0
    numbers = page[starts[:, None] + np.arange(8)].view("<u8")[:, 0]
    last = min(meta.last_page, 1 << 62)  # a page that says more than any offset can hold
    most = np.maximum(last + 1 + (-(HEADER + sizes) // meta.page_size), 0)
    there = (numbers >= 2) & (numbers <= np.minimum(most, lmdb_walk.MOST_PAGE - 1).astype(np.uint64))
    sound = np.where(elsewhere, there, starts + sizes <= len(leaf.page)) & (base < lmdb_walk.MOST_OFFSET)
    cells = np.zeros((len(places), 2), np.uint64)
    cells[:, 0] = (base + places + 8) | key_sizes << 48
    cells[:, 1] = sizes.astype(np.uint64) | np.where(elsewhere, numbers, 0) << np.uint64(32)
    cells[~sound] = 0
    return cells.reshape(-1)


def _frozen(content: object, kind: type[np.generic]) -> np.ndarray:
    """A view that cannot be written to: numba compiles once more for one that can."""
    view = np.frombuffer(content, kind)  # type: ignore[call-overload]  # whatever has a buffer
    view.flags.writeable = False
    return view


_NOTHING, _NO_STARTS = np.empty(0, np.uint8), np.empty(0, np.int64)
