"""Records in an LMDB, read only, addressed by place in key order: plain reads of the file, no map and no lock file."""

from __future__ import annotations

import operator
import os
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from os import pread, preadv
from typing import Any, NoReturn

import numpy as np

from datasets import key_cache, key_index, lmdb_slot, lmdb_walk
from datasets.errors import (
    DatasetChanged,
    DatasetCorrupt,
    DatasetTruncated,
    SourceClosed,
)
from datasets.lmdb_file import LmdbFile, Meta, Tree, check_order, data_file
from datasets.lmdb_locate import FEW, MOST_CELLS, Located, Locator, Unlocated, cells_of
from datasets.lmdb_pages import Leaf, Pages, needs_no_more
from datasets.lmdb_tree import chosen, corrupt
from datasets.raw import Lost
from datasets.source import Record, Source, describe_record, show_key
from datasets.writers import warn_of_writer

_STRIDE = 8
"""Every 8th key is kept: a look-up steps over at most 7 neighbours, which lie on the same or the next leaf page."""
_SCAN_LIMIT = 1 << 18
"""Up to so many records a dense-looking index is proved by a scan of the keys."""
_KEEP_FROM = 1 << 16
"""From so many records on, the index of other keys is kept on disk (see :mod:`datasets.key_cache`)."""
_CHECK_EVERY, _CHECK_EVERY_LISTED = 32, 256
"""Records read between two looks at the file's size and its last transaction: where they are asked for one by one, and
where they are given in a list."""
_AT_ONCE = 1 << 20
_KEY_PAGES = 1024
"""Pages with keys that are kept."""
_SMALL = 1 << 18
"""Room for the records of a list that lie on leaf pages, which are read where they are found: 1 KiB for each."""
_TOGETHER, _NEAR = 1 << 19, 1 << 12
"""Records that lie within so many bytes, and fill half of them (less one page), are read in one go."""


class LmdbSource(Source):
    """An LMDB addressed by position in key order.

    Parameters
    ----------
    path: folder that holds ``data.mdb``, or an LMDB in a single file.
    db: named sub-database; None is the main one.
    readahead: whether the system reads ahead of what is asked for. On is right for reading in order, off for shuffled
        reading: it would read pages that nobody wants.
    lock: take a reader slot in ``lock.mdb`` (which is made where there is none), so that no writer gives away the pages
        that are read: one slot for each process and database (:mod:`datasets.lmdb_slot`).
    tolerant: damage that going through the keys meets is no reason to refuse the database, where first and last key say
        that they are padded numbers: then only the records that lie there cannot be read.

    Nothing here maps the file. One that is cut while it is read gives a short read, and so :class:`DatasetTruncated`,
    whatever the moment; its size is compared as well before every call and every 256 records. A commit by a writer is
    noticed before and after every call and every 256 records, so nothing that it may have overwritten is ever handed
    out. A copy in a forked process goes on reading: a descriptor and numbers are all that it needs.
    """

    backend = "lmdb"

    def __init__(
        self, path: str, db: str | None = None, readahead: bool = True, lock: bool = False, tolerant: bool = False
    ) -> None:
        self.path = os.path.abspath(path)
        self.db = db
        self.readahead = readahead
        self.lock = lock
        self.tolerant = tolerant
        self._closed = False
        self._index: key_index.KeyIndex | None = None
        self._records = -1
        self._version: tuple[int, int] | None = None  # last transaction, bytes the database needs
        self._drop()

    def __len__(self) -> int:
        if self._records < 0:
            self._live()
        return self._records

    def key(self, index: int) -> bytes:
        self._live()
        index = self._check_index(index)
        assert self._index is not None
        key, steps = self._index.anchor(index)
        if not steps:
            return key
        (_, _, starts, sizes), _, _ = self._places([index])
        return self._key_at(starts[0], sizes[0], index)

    def read(self, index: int) -> Record:
        return self.read_many([index])[0]

    def read_many(self, indices: Iterable[int]) -> list[Record]:
        self._live()
        records: list[Record] = []
        # What is asked for one by one may take its time: the longer the list, the rarer the look.
        every = _CHECK_EVERY if isinstance(indices, Iterator) else _CHECK_EVERY_LISTED
        remaining = iter(indices.tolist() if isinstance(indices, np.ndarray) else indices)
        while part := list(map(int, islice(remaining, every))):
            if records:
                self._check()
            if min(part) < 0 or max(part) >= self._records:
                for index in part:
                    self._check_index(index)
            self._read_part(part, records)
        self._check_transaction()
        return records

    def check(self) -> None:
        """Raise if the database was written to or cut since it was opened: what was read before is sound otherwise."""
        self._live()

    def locate(self, indices: np.ndarray) -> Located:
        """Where records lie in the file (:attr:`file`): offsets and lengths of values and of keys, int64.

        Parameters
        ----------
        indices: int64, positions of records that exist; one may come several times.

        What lies there is the record's as long as no writer has committed: compare before and after reading. At most 16
        bytes a record are kept of it, and at most 40 MiB: of more records none (:mod:`datasets.lmdb_locate`).
        """
        if self._locator is None:
            self._live()
        assert self._locator is not None
        try:
            return self._locator.locate(indices)
        except Unlocated as failure:
            self._not_located(int(indices[failure.place]), failure)

    def announce(self, indices: np.ndarray) -> int:
        """Have the system bring records into memory, and do not wait for it. Returns their bytes.

        Those of small records, which lie on the pages that say where they are, are in memory then: they count as 0.
        """
        self._live()
        assert self._file is not None
        starts, sizes, *_ = self._places(indices.tolist())[0]
        return self._file.announce(starts, sizes)

    @property
    def file(self) -> LmdbFile:
        """The data file, opened in this process."""
        self._live()
        assert self._file is not None
        return self._file

    @property
    def max_readers(self) -> int | None:
        """Slots of the lock table as they are, whatever was asked for; None without locking."""
        if not self.lock:
            return None
        self._live()
        assert self._slot is not None
        return self._slot.max_readers

    def identity(self) -> dict[str, Any]:
        self._live()
        assert self._version is not None
        return {
            "path": self.path,
            "backend": self.backend,
            "db": self.db,
            "records": self._records,
            "last_txnid": self._version[0],
            "nbytes": self._version[1],
        }

    def close(self) -> None:
        self._closed = True
        file, slot = self._file, self._slot
        self._drop()
        if file is not None:
            file.close()
        if slot is not None and slot.opened_in == os.getpid():
            lmdb_slot.release(slot)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        keep = ("path", "db", "readahead", "lock", "tolerant", "_records", "_version")
        # A list of keys stays behind: the copy finds it kept on disk, or makes it.
        index = self._index if isinstance(self._index, key_index.DenseKeys) else None
        return {name: getattr(self, name) for name in keep} | {"_index": index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._closed = False
        self._drop()

    # ------------------------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        self._file: LmdbFile | None = None
        self._meta: Meta | None = None
        self._locator: Locator | None = None
        self._slot: lmdb_slot.ReaderSlot | None = None
        self._buffer: memoryview | None = None
        self._small: np.ndarray | None = None
        self._key_pages: dict[int, bytes] = {}

    def _live(self) -> None:
        """Make sure that it is open, and that nobody has written to it or cut it since."""
        if self._closed:
            raise SourceClosed(f"{self.name} was closed", hint="open it again with datasets.open_source")
        if self._slot is not None and self._slot.opened_in != os.getpid():
            assert self._file is not None  # forked: this process takes a slot of its own, and looks at the same file
            self._file.close()
            self._drop()
        if self._file is None:
            self._open()
        else:
            self._check()

    def _check(self) -> None:
        self._check_size()
        self._check_transaction()
        if self._slot is not None:
            self._slot.check()

    def _check_transaction(self) -> None:
        """Raise :class:`DatasetChanged` if a writer has committed since this was opened.

        Pages of our transaction are overwritten by the second commit after it at the earliest, so what was read before
        a check that passes is sound.
        """
        assert self._file is not None
        assert self._version is not None
        assert self._meta is not None
        last = self._file.transaction(self._meta.page_size)
        if last is None:
            raise self._truncated(self._file.size)
        if last != self._version[0]:
            raise self._changed(f"transaction {last}")

    def _check_size(self) -> None:
        assert self._file is not None
        assert self._version is not None
        have = self._file.size  # of the file that is open: one that is replaced stays whole as long as we hold it
        if have < self._version[1]:
            raise self._truncated(have)

    def _open(self) -> None:
        file = LmdbFile(self.path, self.name)
        slot = None
        try:
            file.check_header()
            file.read_ahead(self.readahead)
            slot, meta = lmdb_slot.hold(file) if self.lock else (None, file.meta())
            pages = Pages(file, meta)
            tree = chosen(pages, self.db, self.path, self.name)
            check_order(tree, self.name)
            version = (meta.transaction, self._needed(file, meta, tree))
            if self._version is not None and version[0] != self._version[0]:
                raise self._changed(f"transaction {version[0]}")
            cells: array[int] = array("Q")
            index = self._index or self._make_index(file, meta, tree, cells)
            locator = Locator(file, meta, tree, index)
            if cells:
                locator.note(np.frombuffer(cells, np.uint64))
            self._version, before = version, self._version
            self._file, self._meta = file, meta
            try:
                self._check()  # a commit while the keys were gone through
            except BaseException:
                self._version = before
                raise
        except BaseException:
            self._drop()
            file.close()
            if slot is not None:
                lmdb_slot.release(slot)
            raise
        self._records, self._index, self._locator, self._slot = tree.entries, index, locator, slot
        warn_of_writer(self.path, file.path, self.name)

    def _needed(self, file: LmdbFile, meta: Meta, tree: Tree) -> int:
        """Bytes the file must have."""
        need, have = meta.nbytes, file.size
        if have >= need:
            return need
        # Pages at the end may have been given back before they were ever written: legal, if the tree needs none.
        if have % meta.page_size == 0 and needs_no_more(Pages(file, meta), tree):
            return have
        raise DatasetTruncated(
            f"{self.name} is cut off: {file.path} is shorter than its own page count",
            expected=f"{need} bytes",
            found=f"{have} bytes",
            hint="an interrupted copy, most likely: copy it again from where it was made",
        )

    def _make_index(self, file: LmdbFile, meta: Meta, tree: Tree, cells: array[int]) -> key_index.KeyIndex:
        """The index of the keys. ``cells`` gets the places of all records, where they are few and gone through."""
        if tree.entries > _SCAN_LIMIT:
            dense = self._dense(file, meta, tree)
            if dense is not None:
                return dense
        try:
            return self._gone_through(file, meta, tree, cells)
        except DatasetCorrupt:
            dense = self._dense(file, meta, tree) if self.tolerant else None
            if dense is None:
                raise
            del cells[:]
            return dense

    def _gone_through(self, file: LmdbFile, meta: Meta, tree: Tree, cells: array[int]) -> key_index.KeyIndex:
        note = tree.entries <= min(_SCAN_LIMIT, MOST_CELLS)

        def scan() -> key_index.KeyIndex:
            return key_index.build(self._keys(Pages(file, meta), tree, cells if note else None), _STRIDE)

        if tree.entries < _KEEP_FROM:
            return scan()
        status = os.fstat(file.fd)
        state = {
            "path": os.path.realpath(data_file(self.path)),
            "db": self.db,
            "records": tree.entries,
            "transaction": meta.transaction,
            "size": status.st_size,
            "inode": status.st_ino,
            "mtime_ns": status.st_mtime_ns,
        }
        return key_cache.kept(f"lmdb {state['path']} {self.db}", state, scan)

    def _dense(self, file: LmdbFile, meta: Meta, tree: Tree) -> key_index.DenseKeys | None:
        """The index of padded numbers, where first and last key allow it."""
        ends = Pages(file, meta).ends(tree)
        if isinstance(ends, Lost):
            raise self._corrupt("cannot be read", f"{ends.place} {ends.reason}")
        return key_index.dense_by_ends(*ends, tree.entries)

    def _keys(self, pages: Pages, tree: Tree, cells: array[int] | None) -> Iterator[bytes]:
        """All keys, in order. Refuses damaged pages: what comes behind them cannot be found."""
        last: Leaf | None = None
        records = 0
        for leaf in pages.leaves(tree):
            if isinstance(leaf, Lost):
                after = "" if last is None else f", the last with the key {show_key(last.key(-1))}"
                raise DatasetCorrupt(
                    f"{self.name} is damaged: {leaf.place} {leaf.reason}",
                    expected=f"{tree.entries} records",
                    found=f"{records} records before the damage{after}",
                    hint=f"copy it again from where it was made; python -m datasets.verify {self.path} lists what is "
                    "damaged, and with --salvage OUT saves what is sound",
                )
            if cells is not None:
                cells.extend(cells_of(leaf, pages.meta))
            yield from leaf.keys()
            records += len(leaf.places)
            if leaf.places:
                last = leaf
        if pages.cut:
            raise self._truncated(pages.file.size)
        if records != tree.entries:
            raise self._corrupt("is damaged", f"{records} records, where it counts {tree.entries}")

    def _read_part(self, part: list[int], records: list[Record]) -> None:
        """Append the records of ``part``."""
        index_of, name, file = self._index, self.name, self._file
        assert index_of is not None
        assert file is not None
        places, content, at = self._places(part, read=True)
        starts, sizes, key_starts, key_sizes = places
        dense = isinstance(index_of, key_index.DenseKeys)
        keys = index_of.keys(part) if isinstance(index_of, key_index.DenseKeys) else []
        if at and min(at) >= 0:  # all of them are small, and have been read
            if not dense:
                keys = [content[start - size : start] for start, size in zip(at, key_sizes, strict=True)]
            values = [content[start : start + size] for start, size in zip(at, sizes, strict=True)]
            records += map(Record, part, keys, values, repeat(name))
            return
        first, end = min(starts), max(map(operator.add, starts, sizes))
        if not dense:  # a key may lie on either side of its value
            first, end = min(first, min(key_starts)), max(end, max(map(operator.add, key_starts, key_sizes)))
        block = self._block(first, end, sum(sizes)) if len(part) > 1 else None
        if block is not None:
            starts = [start - first for start in starts]
            if not dense:
                keys = [
                    bytes(block[start - first : start - first + size])
                    for start, size in zip(key_starts, key_sizes, strict=True)
                ]
            for index, key, start, size in zip(part, keys, starts, sizes, strict=True):
                records.append(Record(index, key, bytes(block[start : start + size]), name))
            return
        if not dense:
            keys = list(map(self._key_at, key_starts, key_sizes, part))
        fd = file.fd
        for index, key, start, size in zip(part, keys, starts, sizes, strict=True):
            value = pread(fd, size, start) if size < _AT_ONCE else b""
            if len(value) != size:
                value = self._bytes(start, size, index, key)
            records.append(Record(index, key, value, name))

    def _places(self, part: list[int], read: bool = False) -> tuple[tuple[list[int], ...], bytes, list[int]]:
        """As :meth:`locate`, in lists; of many records also the bytes of small ones, and where each value begins."""
        locator = self._locator
        assert locator is not None
        if (plain := locator.plain(part)) is not None:
            return plain, b"", []
        indices = np.array(part, np.int64)
        if not read or len(part) <= FEW:
            return tuple(places.tolist() for places in self.locate(indices)), b"", []
        if self._small is None:
            self._small = np.empty(_SMALL, np.uint8)
        try:
            located, at = locator.read(indices, self._small)
        except Unlocated as failure:
            self._not_located(part[failure.place], failure)
        used = max(0, int((at + located.lengths).max()) if at.min() >= 0 else 0)
        return tuple(places.tolist() for places in located), self._small[:used].tobytes(), at.tolist()

    def _block(self, first: int, end: int, wanted: int) -> memoryview | None:
        """All bytes from ``first`` on, where that is little more than what is wanted of them; else None."""
        assert self._file is not None
        if end - first > min(_TOGETHER, 2 * wanted + _NEAR):
            return None
        if self._buffer is None:
            self._buffer = memoryview(bytearray(_TOGETHER))
        block = self._buffer[: end - first]
        return block if preadv(self._file.fd, [block], first) == end - first else None  # what is missing tells itself

    def _key_at(self, start: int, size: int, index: int) -> bytes:
        """The key of a record, from its page: neighbours are asked for soon."""
        assert self._meta is not None
        number, inside = divmod(start, self._meta.page_size)
        page = self._key_pages.get(number)
        if page is None:
            if len(self._key_pages) >= _KEY_PAGES:
                self._key_pages.clear()
            page = self._bytes(start - inside, self._meta.page_size, index, None)
            self._key_pages[number] = page
        return page[inside : inside + size]

    def _bytes(self, start: int, size: int, index: int, key: bytes | None) -> bytes:
        """Bytes of the file that belong to a record."""
        assert self._file is not None
        found = self._file.read(start, size)
        if len(found) < size:
            raise self._truncated(self._file.size, index, key)
        return found

    def _not_located(self, index: int, failure: Unlocated) -> NoReturn:
        assert self._index is not None
        assert self._file is not None
        key, steps = self._index.anchor(index)
        if failure.status == lmdb_walk.CUT:
            raise self._truncated(self._file.size, index, None if steps else key)
        self._check_size()
        self._check_transaction()  # a writer may be the reason
        if failure.status == lmdb_walk.MISSING and isinstance(self._index, key_index.DenseKeys):
            raise DatasetCorrupt(
                f"{self.name}: the keys look like the numbers {show_key(self._index.anchor(0)[0])} and up, "
                f"but {show_key(key)} is missing",
                hint="copy the records to a new database under keys without gaps",
            )
        what = {
            lmdb_walk.MISSING: f"no record with the key {show_key(key)}",
            lmdb_walk.FAILED: f"page {failure.page} cannot be read: a failing disk, most likely",
            lmdb_walk.ENDED: f"no more records after page {failure.page}",
        }.get(failure.status, f"page {failure.page} is damaged")
        raise self._corrupt(f"cannot be read at record {index} of {self._records}", what)

    def _truncated(self, have: int, index: int | None = None, key: bytes | None = None) -> DatasetTruncated:
        """The error for a file that is shorter than it was; ``index``: the record that could not be read."""
        need = self._version[1] if self._version else self._meta.nbytes if self._meta else None
        record = ""
        if index is not None:
            record = f", at {describe_record('it', index, key)}" if key is not None else f", at record {index}"
        return DatasetTruncated(
            f"{self.name} became shorter while it was being read{record}",
            expected=None if need is None else f"{need} bytes",
            found=f"{have} bytes",
            hint="something writes to or copies over the file: read a finished copy",
        )

    def _changed(self, found: str) -> DatasetChanged:
        assert self._version is not None
        return DatasetChanged(
            f"{self.name} was written to while it was in use",
            expected=f"transaction {self._version[0]}",
            found=found,
            hint="let the writer finish, then start again",
        )

    def _corrupt(self, what: str, found: str) -> DatasetCorrupt:
        return corrupt(self.path, self.name, what, found)
