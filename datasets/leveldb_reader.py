"""A LevelDB as it is at one moment, for reading: no lock, no map, nothing written anywhere.

Tables never change once they are written, so any number of processes may read them by plain reads; LevelDB's own
library allows one process, maps the tables, and rewrites what it opens. Of several versions of a key the newest is
read, as LevelDB does it: the log, the tables of level 0 from the newest on, then the levels, whose tables do not
overlap.
"""

from __future__ import annotations

import errno
import heapq
import os
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from datasets import leveldb_log
from datasets.checksum_cost import ChecksumCost
from datasets.errors import DatasetCorrupt, DatasetTruncated, SourceError
from datasets.leveldb_block import Handle
from datasets.leveldb_files import Listing, listing
from datasets.leveldb_library import open_files_limit
from datasets.leveldb_log import Write, cut_end
from datasets.leveldb_table import Cut, Table, Version

_ATTEMPTS = 3
_BLOCKS_KEPT = 8
_BLOCK_KEPT_MOST = 1 << 20


class Place(NamedTuple):
    """Where a value lies: pieces of a log, (start, size) each, or the block of a table that holds the key."""

    file: str
    fd: int
    block: Handle | None
    extents: list[tuple[int, int]]


class Vanished(Exception):
    """A table is gone that was not open: a writer has compacted it away."""


class Snapshot:
    """The records of a LevelDB as it is when this is made.

    Parameters
    ----------
    path: its folder. name: of the data set, for errors.

    Raises :class:`~datasets.errors.DatasetTruncated` for a cut table or log, :class:`~datasets.errors.DatasetCorrupt`
    for damage, :class:`~datasets.errors.SourceError` for a folder that keeps changing or may not be read.
    :class:`Cut`, :class:`Damaged` and :class:`Vanished` come from the methods: the caller knows the record.

    Attributes
    ----------
    listing: what the folder held. files: names and sizes of tables and logs.
    last_key: the last one that :meth:`keys` gave; empty before the first.
    """

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name
        self.cost = ChecksumCost(name)
        self.last_key = b""
        self._logs: dict[str, int] = {}
        self._written: dict[bytes, tuple[int, Write]] = {}  # descriptor of the log, and what was written last
        self._tables: OrderedDict[str, Table] = OrderedDict()
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._most = open_files_limit()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the descriptors back. Idempotent."""
        for table in self._tables.values():
            table.close()
        for fd in self._logs.values():
            os.close(fd)
        self._tables.clear()
        self._logs.clear()
        self._blocks.clear()

    def get(self, key: bytes) -> bytes | None:
        """The value of a key, every checksum verified; None where there is none."""
        if key in self._written:
            fd, write = self._written[key]
            return None if write.extents is None else self._logged(fd, write.extents)
        for file in self._candidates(key):
            table = self._table(file)
            place = table.place(key)
            if place is None:
                continue
            found = table.find(self._block(table, place), place, key)
            if found is not None:
                version, value = found
                return None if version.deleted else value
        return None

    def place(self, key: bytes) -> Place | None:
        """Where the value of a key lies; None where a look at the key alone does not tell. The block of a table may
        hold the key no more than any other."""
        if key in self._written:
            fd, write = self._written[key]
            return None if write.extents is None else Place("", fd, None, write.extents)
        candidates = self._candidates(key)
        file = next(candidates, None)
        if file is None or next(candidates, None) is not None:
            return None
        table = self._table(file)
        block = table.place(key)
        return None if block is None else Place(file, table.fd, block, [])

    def descriptor(self, file: str) -> int:
        """The descriptor of a table, opened if it has to be."""
        return self._table(file).fd

    @property
    def held(self) -> int:
        """How many tables may be open at once: the last that :meth:`place` named are."""
        return self._most

    def keys(self, start: bytes = b"") -> Iterator[bytes]:
        """All keys from ``start`` on, in order. Reads every block on the way."""
        streams = [self._logged_versions(start)] if self._written else []
        streams += [self._level(files, start) for files in self._sorted]
        merged = heapq.merge(*streams, key=_newest_first) if len(streams) > 1 else streams[0] if streams else iter(())
        before: bytes | None = None
        self.last_key = b""
        for version in merged:
            if version.key != before:
                before = version.key
                if not version.deleted:
                    self.last_key = before
                    yield before

    def ends(self) -> tuple[bytes, bytes] | None:
        """The first and the last key; None where there are none, or where only going through all keys would tell."""
        last = max([said.last for said in self.listing.tables.values()] + sorted(self._written)[-1:], default=b"")
        if self.get(last) is None:
            return None
        return next(self.keys()), last

    # ------------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                self.listing: Listing = listing(Path(self.path), self.name)
                for log in self.listing.logs:
                    self._logs[log] = os.open(os.path.join(self.path, log), os.O_RDONLY | os.O_CLOEXEC)
                self._sort()
                for file in self.listing.tables if len(self.listing.tables) <= self._most // 2 else ():
                    self._table(file)  # held from here on, whatever a writer removes
                break
            except (FileNotFoundError, Vanished) as error:  # a live writer replaced it between listing and opening
                self.close()
                if attempt == _ATTEMPTS - 1:
                    raise SourceError(
                        f"{self.name} keeps changing while it is read", found=f"{error} vanished"
                    ) from error
            except PermissionError as error:
                raise SourceError(
                    f"no permission to read {error.filename}", hint="check the modes of the data set's files"
                ) from error
        self.files = {file: said.nbytes for file, said in self.listing.tables.items()}
        for log, fd in self._logs.items():
            self._replay(log, fd)

    def _sort(self) -> None:
        """Groups of files that do not overlap, in the order in which they are asked: each table of level 0 by itself,
        the newest first, then the levels."""
        by_level: dict[int, list[str]] = {}
        said = self.listing.tables
        for file in sorted(said, key=lambda file: (said[file].first, said[file].last)):
            by_level.setdefault(said[file].level, []).append(file)
        newest = sorted(by_level.pop(0, []), key=lambda file: -said[file].number)
        self._sorted = [[file] for file in newest] + [files for _, files in sorted(by_level.items())]
        self._lasts = [[said[file].last for file in files] for files in self._sorted]

    def _candidates(self, key: bytes) -> Iterator[str]:
        said = self.listing.tables
        for files, lasts in zip(self._sorted, self._lasts, strict=True):
            number = bisect_left(lasts, key)  # where two meet in one key, the newer version is in the first
            if number < len(files) and said[files[number]].first <= key:
                yield files[number]

    def _table(self, file: str) -> Table:
        table = self._tables.get(file)
        if table is None:
            while len(self._tables) >= self._most:
                self._tables.popitem(last=False)[1].close()
            try:
                table = Table(os.path.join(self.path, file), self.listing.tables[file].nbytes)
            except FileNotFoundError as error:
                raise Vanished(file) from error
            except OSError as error:
                if error.errno != errno.EMFILE or len(self._tables) < 2:
                    raise
                self._most = len(self._tables) // 2  # others in this process have files open, too
                return self._table(file)
            self._tables[file] = table
        elif len(self.listing.tables) > self._most:
            self._tables.move_to_end(file)
        return table

    def _block(self, table: Table, place: Handle) -> bytes:
        which = (table.file, place.start)
        block = self._blocks.get(which)
        if block is not None:
            self._blocks.move_to_end(which)
            return block
        block = self._measured(table, place) if self.cost.due() else table.block(place)
        if len(block) <= _BLOCK_KEPT_MOST:
            self._blocks[which] = block
            if len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return block

    def _measured(self, table: Table, place: Handle) -> bytes:
        began = time.thread_time_ns()
        stored = table.stored(place)
        read = time.thread_time_ns()
        table.verify(stored, place)
        verified = time.thread_time_ns()
        block = table.opened(stored, place)
        whole = time.thread_time_ns() - began
        self.cost.sample(whole - (verified - read), whole)
        return block

    def _level(self, files: list[str], start: bytes) -> Iterator[Version]:
        for file in files:
            if self.listing.tables[file].last >= start:
                yield from self._table(file).versions(start)

    # The logs -----------------------------------------------------------------------------------------------------

    def _replay(self, log: str, fd: int) -> None:
        with open(fd, "rb", closefd=False) as file:
            content = file.read()
        self.files[log] = len(content)
        try:
            end = cut_end(content)
            if end is None:
                for key, write in leveldb_log.writes(content):
                    self._written[key] = (fd, write)
        except (ValueError, IndexError) as error:
            raise DatasetCorrupt(
                f"{self.name}: the write-ahead log {log} is damaged",
                expected="an intact LevelDB",
                found=str(error),
                hint="copy it again; python -m datasets.verify DB --salvage OUT keeps what is there",
            ) from error
        if end is not None:
            # LevelDB itself goes on without the rest, and without a word: half of the records can be gone.
            raise DatasetTruncated(
                f"{self.name}: the write-ahead log {log} was cut by a copy or a kill, records are missing",
                expected="a log that ends with a whole record",
                found=f"the end of the file inside the record that follows byte {end}",
                hint="copy it again; python -m datasets.verify DB --salvage OUT keeps what is there",
            )

    def _logged(self, fd: int, extents: list[tuple[int, int]]) -> bytes:
        """A value in a log, whose checksums were verified when this was made."""
        parts = [os.pread(fd, size, start) for start, size in extents]
        if any(len(part) < size for part, (_, size) in zip(parts, extents, strict=True)):
            log = next(log for log, descriptor in self._logs.items() if descriptor == fd)
            raise Cut(log, os.fstat(fd).st_size)
        return b"".join(parts)

    def _logged_versions(self, start: bytes) -> Iterator[Version]:
        for key in sorted(self._written):
            if key >= start:
                write = self._written[key][1]
                yield Version(key, write.sequence, write.extents is None)


def _newest_first(version: Version) -> tuple[bytes, int]:
    return version.key, -version.sequence
