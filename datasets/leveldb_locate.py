"""Where records lie in the files of a LevelDB, for those who read many at once: remembered once found."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from datasets.key_index import DenseKeys, KeyIndex
from datasets.leveldb_reader import Place, Snapshot

MOST = 40 << 16
"""Records of a database whose blocks are remembered: 2.5 Mi, 16 bytes each. Of one with more none are."""


class Pieces(NamedTuple):
    """See :func:`pipeline.native_kernels.make_from_tables`: int64, the last one bool."""

    order: np.ndarray
    pieces: np.ndarray
    fds: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    blocks: np.ndarray


class Located(NamedTuple):
    """Keys of records, and where what holds them lies."""

    keys: list[bytes]
    arrays: Pieces


class Locator:
    """Finds records of a snapshot by their positions in key order."""

    def __init__(self, snapshot: Snapshot, index: KeyIndex) -> None:
        self._snapshot, self._index = snapshot, index
        self._numbers = {file: number for number, file in enumerate(snapshot.listing.tables)}
        self._files = list(self._numbers)
        count = index.records if index.records <= MOST else 0
        self._starts = np.zeros(count, np.int64)  # zeros are no memory until they are written to
        self._sizes = np.zeros(count, np.int32)  # 0: not known
        self._tables = np.zeros(count, np.int32)

    def locate(self, indices: np.ndarray) -> Located | None:
        """The records of these positions, int64[B]; None where one cannot be told without reading."""
        keys = self._keys(indices)
        if keys is None:
            return None
        found = self._remembered(indices, keys)
        if found is None:
            places = [self._snapshot.place(key) for key in keys]
            if None in places:
                return None
            files = {place.file for place in places if place is not None}
            found = _listed([place for place in places if place is not None])
        else:
            files = {self._files[number] for number in np.unique(self._tables[indices])}
        if len(files) > self._snapshot.held:
            return None  # some have been closed again to make room for others
        return Located(keys, found)

    def _keys(self, indices: np.ndarray) -> list[bytes] | None:
        if isinstance(self._index, DenseKeys):
            return self._index.keys(indices.tolist())
        keys = []
        for index in indices.tolist():
            key, steps = self._index.anchor(index)
            if steps:
                return None
            keys.append(key)
        return keys

    def _remembered(self, indices: np.ndarray, keys: list[bytes]) -> Pieces | None:
        """Records that all lie in blocks of tables; None where some do not, or nothing is remembered."""
        if not len(self._sizes):
            return None
        for place in np.flatnonzero(self._sizes[indices] == 0).tolist():
            found = self._snapshot.place(keys[place])
            if found is None or found.block is None:
                return None
            index = indices[place]
            self._starts[index], self._sizes[index] = found.block
            self._tables[index] = self._numbers[found.file]
        starts, sizes = self._starts[indices], self._sizes[indices].astype(np.int64)
        tables = self._tables[indices]
        used, which = np.unique(tables, return_inverse=True)
        fds = np.array([self._snapshot.descriptor(self._files[number]) for number in used], np.int64)[which]
        count = len(indices)
        return Pieces(
            np.lexsort((starts, tables)), np.arange(count + 1), fds, starts, sizes, np.ones(count, np.bool_)
        )  # fmt: skip


def _listed(places: list[Place]) -> Pieces:
    pieces, fds, starts, sizes = [0], [], [], []
    for place in places:
        for start, size in place.extents if place.block is None else [place.block]:
            fds.append(place.fd)
            starts.append(start)
            sizes.append(size)
        pieces.append(len(fds))
    order = sorted(range(len(places)), key=lambda i: (fds[pieces[i]], starts[pieces[i]]))
    blocks = np.array([place.block is not None for place in places], np.bool_)
    parts = [np.array(part, np.int64) for part in (order, pieces, fds, starts, sizes)]
    return Pieces(*parts, blocks)  # type: ignore[call-arg]
