"""Records in a LevelDB, read without its library: the data set's folder is neither locked nor changed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np

from datasets import key_cache, key_index
from datasets.errors import (
    CodecMissing,
    DatasetChanged,
    DatasetCorrupt,
    DatasetTruncated,
    DatasetWarning,
    SourceClosed,
    SourceError,
)
from datasets.leveldb_locate import Located, Locator
from datasets.leveldb_reader import Snapshot, Vanished
from datasets.leveldb_table import Cut, Damaged
from datasets.leveldb_view import warn_of_writer
from datasets.source import Record, Source, show_key

_SCAN_LIMIT = 1 << 18
"""Beyond so many records a dense-looking index is not proved by a scan: that would read the whole database."""
_KEEP_FROM = 8 << 20
"""From so many bytes on, the index of keys that are no dense numbers is kept on disk (:mod:`datasets.key_cache`)."""
_PACKED = 32
"""Keys in a compressed block of the index. Every key is kept where that takes no more than 16 bytes a record: stepping
over neighbours, as in an LMDB, would decompress blocks of records that nobody wants."""
_READ_ERRORS = (Cut, Damaged, Vanished)


class LevelDbSource(Source):
    """A LevelDB addressed by position in key order. Checksums are verified with every read of a table.

    Parameters
    ----------
    path: folder that holds ``CURRENT``.

    What is read is the moment at which it was opened: a writer that comes later is warned of, and changes nothing here
    (of more than some hundred tables not all are held open: one that is compacted away then is
    :class:`~datasets.errors.DatasetChanged`). Any number of processes may read at once. Nothing is mapped: a table
    that is cut gives a short read, and so :class:`~datasets.errors.DatasetTruncated`, whatever the moment.
    A copy in a forked process goes on reading with the same descriptors.
    """

    backend = "leveldb"

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._closed = False
        self._index: key_index.KeyIndex | None = None
        self._records = -1
        self._files: dict[str, int] | None = None
        self._snapshot: Snapshot | None = None
        self._locator: Locator | None = None
        self._seen: list[tuple[int, int, int] | None] = []

    def __len__(self) -> int:
        if self._records < 0:
            self._live()
        return self._records

    def key(self, index: int) -> bytes:
        snapshot = self._live()
        return self._key(snapshot, self._check_index(index))

    def read(self, index: int) -> Record:
        return self.read_many([index])[0]

    def read_many(self, indices: Iterable[int]) -> list[Record]:
        snapshot = self._live()
        self._look_at_files()
        wanted = [self._check_index(index) for index in indices]
        records: dict[int, Record] = {}
        for index in sorted(wanted):  # neighbours lie in one block, which is then opened once
            if index not in records:
                records[index] = Record(index, *self._at(snapshot, index), self.name)
        return [records[index] for index in wanted]

    def check(self) -> None:
        """Warn, once, where a writer has been at work since this was opened."""
        self._live()
        self._look_at_files()

    def locate(self, indices: np.ndarray) -> Located | None:
        """Where the blocks of tables, or the pieces of a log, lie that hold records, int64[B].

        None where that is not known of each of them without reading: then :meth:`read_many` is the way.
        """
        snapshot = self._live()
        if self._locator is None:
            assert self._index is not None
            self._locator = Locator(snapshot, self._index)
        try:
            return self._locator.locate(indices)
        except _READ_ERRORS:
            return None

    def tell_cost(self, records: int, reading_ns: int, verifying_ns: int) -> None:
        """Count what reading so many records took, verifying included, for the report."""
        if self._snapshot is not None and verifying_ns:
            self._snapshot.cost.sample((reading_ns - verifying_ns) // records, reading_ns // records)

    def identity(self) -> dict[str, Any]:
        self._live()
        return {
            "path": self.path,
            "backend": self.backend,
            "db": None,
            "records": len(self),
            "files": dict(self._files or {}),
        }

    def close(self) -> None:
        self._closed = True
        snapshot, self._snapshot, self._locator = self._snapshot, None, None
        if snapshot is not None:
            snapshot.close()

    def __del__(self) -> None:
        if getattr(self, "_snapshot", None) is not None:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        # A list of keys stays behind: the copy finds it kept on disk, or makes it.
        index = self._index if isinstance(self._index, key_index.DenseKeys) else None
        return {"path": self.path, "_index": index, "_files": self._files, "_records": self._records}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]
        self.__dict__.update(state)

    # ------------------------------------------------------------------------------------------------------------

    def _live(self) -> Snapshot:
        if self._closed:
            raise SourceClosed(f"{self.name} was closed", hint="open it again with datasets.open_source")
        if self._snapshot is None:
            self._open()
            assert self._snapshot is not None
        return self._snapshot

    def _open(self) -> None:
        warn_of_writer(self.path, self.name)
        try:
            snapshot = Snapshot(self.path, self.name)
        except _READ_ERRORS as error:
            raise self._unreadable("cannot be opened", error) from error
        try:
            if self._files is not None and snapshot.files != self._files:
                raise DatasetChanged(
                    f"{self.name} was written to while it was in use",
                    expected=f"the files {self._files}",
                    found=str(snapshot.files),
                    hint="let the writer finish, then start again",
                )
            if self._index is None:
                self._index = self._make_index(snapshot)
        except BaseException:
            snapshot.close()
            raise
        self._files, self._records, self._snapshot = snapshot.files, self._index.records, snapshot
        self._seen = self._state(snapshot)

    def _make_index(self, snapshot: Snapshot) -> key_index.KeyIndex:
        dense = self._dense(snapshot)
        if dense is not None and dense.records > _SCAN_LIMIT:
            return dense

        def scan() -> key_index.KeyIndex:
            try:
                return key_index.build(snapshot.keys(), packed=_PACKED)
            except _READ_ERRORS as error:
                last = snapshot.last_key
                where = f" beyond the key {show_key(last)}" if last else " at its first key"
                raise self._unreadable(f"cannot be opened{where}", error) from error

        if sum(snapshot.files.values()) < _KEEP_FROM:
            return scan()
        place = os.path.realpath(self.path)
        files = {
            name: [size, status.st_ino, status.st_mtime_ns]
            for name, size in snapshot.files.items()
            if (status := os.stat(os.path.join(self.path, name)))
        }
        return key_cache.kept(f"leveldb {place}", {"path": place, "files": files}, scan)

    @staticmethod
    def _dense(snapshot: Snapshot) -> key_index.DenseKeys | None:
        """The index that the first and the last key allow."""
        try:
            ends = snapshot.ends()
        except _READ_ERRORS:
            return None  # going through all keys tells where
        if ends is None or not (ends[0].isdigit() and ends[1].isdigit()):
            return None
        return key_index.dense_by_ends(*ends, int(ends[1]) - int(ends[0]) + 1)

    def _anchor(self, index: int) -> tuple[bytes, int]:
        assert self._index is not None
        return self._index.anchor(index)

    def _key(self, snapshot: Snapshot, index: int) -> bytes:
        key, steps = self._anchor(index)
        if not steps:
            return key
        try:
            found = next(islice(snapshot.keys(key), steps, None), None)
        except _READ_ERRORS as error:
            raise self._unreadable(f"cannot be read at record {index} (after key {show_key(key)})", error) from error
        if found is None:
            raise DatasetCorrupt(f"{self.name} ends before record {index}", expected=f"{self._records} records")
        return found

    def _at(self, snapshot: Snapshot, index: int) -> tuple[bytes, bytes]:
        """Key and value of a record that exists."""
        key = self._key(snapshot, index)
        try:
            value = snapshot.get(key)
        except _READ_ERRORS as error:
            raise self._unreadable(f"cannot be read at record {index} (key {show_key(key)})", error) from error
        if value is None:
            raise DatasetCorrupt(
                f"{self.name}: key {show_key(key)} of record {index} is missing",
                expected=f"{len(self)} records from key {show_key(self._anchor(0)[0])} on",
                hint="records were lost when it was written or copied: convert or copy it again",
            )
        return key, value

    # What happens to the original meanwhile -----------------------------------------------------------------------

    def _state(self, snapshot: Snapshot) -> list[tuple[int, int, int] | None]:
        """What a writer changes: CURRENT when it opens, the logs with every record, the manifest with every table."""
        names = ("CURRENT", snapshot.listing.manifest, *snapshot.listing.logs)
        return [_stat(os.path.join(self.path, name)) for name in names]

    def _look_at_files(self) -> None:
        assert self._snapshot is not None
        if self._seen and self._state(self._snapshot) != self._seen:
            self._seen = []  # say it once
            warnings.warn(
                f"{self.name} has been opened or written by another process since it was opened here: what is read is "
                "what it held then",
                DatasetWarning,
                stacklevel=4,
            )

    def _unreadable(self, what: str, error: Exception) -> SourceError:
        """What to raise for an error of the reader."""
        if isinstance(error, Vanished):
            return DatasetChanged(
                f"{self.name} {what}: a writer has removed the table {error}",
                hint="let the writer finish, then start again",
            )
        if isinstance(error, Cut):
            return DatasetTruncated(
                f"{self.name} {what}: {error.file} became shorter while it was being read",
                found=f"{error.found} bytes",
                hint="something copies over the files: read a finished copy",
            )
        assert isinstance(error, Damaged)
        place = f"{error.file}, byte {error.start}"
        if error.unknown_codec:
            return CodecMissing(
                f"{self.name} {what}: it is sound, but its blocks cannot be decompressed",
                expected="blocks that are plain or compressed with Snappy or Zstandard",
                found=f"{error.reason} in {place}, where the checksum is right",
                hint="convert it to LMDB on a machine that can read it",
            )
        return DatasetCorrupt(
            f"{self.name} {what}",
            expected="an intact LevelDB",
            found=f"{error.reason} in {place}",
            hint="copy it again from where it was made; "
            f"python -m datasets.verify {self.path} lists what is damaged and saves what is sound",
        )


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
