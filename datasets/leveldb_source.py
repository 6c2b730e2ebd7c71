"""Records in a LevelDB, read through a private view: the data set's folder is neither locked nor changed.

Every copy of a source opens a view of its own. A node should have one: its owner reads for everybody else.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import key_cache, key_index
from datasets.checksum_cost import ChecksumCost
from datasets.errors import (
    DatasetChanged,
    DatasetCorrupt,
    DatasetTruncated,
    DatasetWarning,
    SourceClosed,
    SourceError,
)
from datasets.leveldb_library import codec_missing, error_text, import_plyvel, open_files_limit, refuse_without_codec
from datasets.leveldb_log import cut_end
from datasets.leveldb_view import PrivateView
from datasets.source import Record, Source, show_key

_SCAN_LIMIT = 1 << 18
"""Beyond so many records a dense-looking index is not proved by a scan: that would read the whole database."""
_KEEP_FROM = 8 << 20
"""From so many bytes on, the index of keys that are no dense numbers is kept on disk (:mod:`datasets.key_cache`)."""
_PACKED = 32
"""Keys in a compressed block of the index. Every key is kept where that takes no more than 16 bytes a record: stepping
over neighbours, as in an LMDB, would decompress blocks of records that nobody wants."""
_TABLES_AT_ONCE = 64

_abandoned: list[Any] = []
"""Handles inherited through fork. Closing one would wait for a thread that exists in the parent only."""


class LevelDbSource(Source):
    """A LevelDB addressed by position in key order. Checksums are verified with every read.

    Parameters
    ----------
    path: folder that holds ``CURRENT``.

    What is read is the moment at which it was opened: a writer that comes later is warned of, and changes nothing here.
    A table that is cut in place while it is mapped is noticed before every call, or over several calls where there are
    more than 64 tables; a cut between that look and a read of its missing part kills the process (SIGBUS).
    """

    backend = "leveldb"

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._closed = False
        self._index: key_index.KeyIndex | None = None
        self._records = -1
        self._files: dict[str, int] | None = None
        self._db: Any = None
        self._view: PrivateView | None = None
        self._pid = -1
        self._seen: list[tuple[int, int, int] | None] = []
        self._turn = 0
        self._cost = ChecksumCost(self.name)

    def __len__(self) -> int:
        if self._records < 0:
            self._live()
        return self._records

    def key(self, index: int) -> bytes:
        self._live()
        index = self._check_index(index)
        assert self._index is not None
        key, steps = self._index.anchor(index)
        return self._step(key, steps, index)[0] if steps else key

    def read(self, index: int) -> Record:
        return self.read_many([index])[0]

    def read_many(self, indices: Iterable[int]) -> list[Record]:
        self._live()
        self._look_at_files()
        name = self.name
        return [Record(index, *self._at(index), name) for index in map(self._check_index, indices)]

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
        self._release()

    def __del__(self) -> None:
        if getattr(self, "_db", None) is not None:
            self._release()

    def __getstate__(self) -> dict[str, Any]:
        # A list of keys stays behind: the copy finds it kept on disk, or makes it.
        index = self._index if isinstance(self._index, key_index.DenseKeys) else None
        return {"path": self.path, "_index": index, "_files": self._files, "_records": self._records}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]
        self.__dict__.update(state)

    # ------------------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        db, view, pid = self._db, self._view, self._pid
        self._db = self._view = None
        self._pid = -1
        if db is None:
            return
        if pid != os.getpid():
            _abandoned.append((db, view))
            return
        db.close()
        if view is not None:
            view.remove()

    def _live(self) -> Any:
        if self._closed:
            raise SourceClosed(f"{self.name} was closed", hint="open it again with datasets.open_source")
        if self._pid != os.getpid():
            self._release()
            self._open()
        return self._db

    def _open(self) -> None:
        plyvel = import_plyvel(self.name)
        view = PrivateView(self.path, self.name)
        db = None
        try:
            if self._files is not None and view.files != self._files:
                raise DatasetChanged(
                    f"{self.name} was written to while it was in use",
                    expected=f"the files {self._files}",
                    found=str(view.files),
                    hint="let the writer finish, then start again",
                )
            for log in (name for name in view.files if name.endswith(".log")):
                self._refuse_cut(Path(view.path, log))
            refuse_without_codec(self.name, [Path(view.path, table) for table in view.ranges])
            db = plyvel.DB(view.path, create_if_missing=False, paranoid_checks=True, max_open_files=open_files_limit())
            if self._index is None:
                self._index = self._make_index(db, view)
        except BaseException as error:
            failure = self._corrupt("cannot be opened", error, db, view) if isinstance(error, plyvel.Error) else None
            if db is not None:
                db.close()
            view.remove()
            if failure is not None:
                raise failure from error
            raise
        self._files, self._records = view.files, self._index.records
        self._db, self._view, self._pid = db, view, os.getpid()
        self._seen = self._state()

    def _refuse_cut(self, log: Path) -> None:
        try:
            end = cut_end(log.read_bytes())
        except ValueError:
            return  # LevelDB says so when it replays the log
        if end is not None:
            # LevelDB itself goes on without the rest, and without a word: half of the records can be gone.
            raise DatasetTruncated(
                f"{self.name}: the write-ahead log {log.name} was cut by a copy or a kill, records are missing",
                expected="a log that ends with a whole record",
                found=f"the end of the file inside the record that follows byte {end}",
                hint="copy it again; python -m datasets.verify DB --salvage OUT keeps what is there",
            )

    def _make_index(self, db: Any, view: PrivateView) -> key_index.KeyIndex:
        ends: list[bytes] = []
        for reverse in (False, True):
            with db.iterator(include_value=False, reverse=reverse, verify_checksums=True, fill_cache=False) as keys:
                ends.append(next(keys, b""))
        first, last = ends
        if first.isdigit() and last.isdigit():
            dense = key_index.dense_by_ends(first, last, int(last) - int(first) + 1)
            if dense is not None and dense.records > _SCAN_LIMIT:
                return dense

        def scan() -> key_index.KeyIndex:
            with db.iterator(include_value=False, verify_checksums=True, fill_cache=False) as keys:
                return key_index.build(keys, packed=_PACKED)

        if sum(view.files.values()) < _KEEP_FROM:
            return scan()
        place = os.path.realpath(self.path)
        files = {
            name: [size, status.st_ino, status.st_mtime_ns]
            for name, size in view.files.items()
            if (status := os.stat(os.path.join(self.path, name)))
        }
        return key_cache.kept(f"leveldb {place}", {"path": place, "files": files}, scan)

    def _at(self, index: int) -> tuple[bytes, bytes]:
        """Key and value of a record that exists."""
        import plyvel

        assert self._index is not None
        key, steps = self._index.anchor(index)
        sampled = self._cost.due()
        try:
            if steps:
                key, value = self._step(key, steps, index, fill_cache=not sampled)
            else:
                value = self._db.get(key, verify_checksums=True, fill_cache=not sampled)
            if sampled:
                self._cost.sample(self._db, key)
        except plyvel.Error as error:
            raise self._unreadable(index, key, error) from error
        if value is None:
            raise DatasetCorrupt(
                f"{self.name}: key {show_key(key)} of record {index} is missing",
                expected=f"{len(self)} records from key {show_key(self._index.anchor(0)[0])} on",
                hint="records were lost when it was written or copied: convert or copy it again",
            )
        return key, value

    def _step(self, key: bytes, steps: int, index: int, fill_cache: bool = True) -> tuple[bytes, bytes]:
        """Key and value of the record ``steps`` behind ``key``."""
        import plyvel

        try:
            with self._db.iterator(start=key, verify_checksums=True, fill_cache=fill_cache) as records:
                found = next(islice(records, steps, None), None)
        except plyvel.Error as error:
            raise self._unreadable(index, key, error) from error
        if found is None:
            raise DatasetCorrupt(f"{self.name} ends before record {index}", expected=f"{self._records} records")
        return found

    # What happens to the original meanwhile -----------------------------------------------------------------------

    def _state(self) -> list[tuple[int, int, int] | None]:
        """What a writer changes: CURRENT when it opens, the logs with every record, the manifest with every table."""
        assert self._view is not None
        logs = [name for name in self._view.files if name.endswith(".log")]
        return [_stat(os.path.join(self.path, name)) for name in ("CURRENT", self._view.manifest, *logs)]

    def _look_at_files(self) -> None:
        assert self._view is not None
        if self._seen and self._state() != self._seen:
            self._seen = []  # say it once
            warnings.warn(
                f"{self.name} has been opened or written by another process since it was opened here: what is read is "
                "what it held then",
                DatasetWarning,
                stacklevel=4,
            )
        tables = list(self._view.ranges)
        for table in islice(tables, self._turn, self._turn + _TABLES_AT_ONCE):
            # In the view: the very files that are mapped. LevelDB removes some of them there when it compacts.
            found = _stat(os.path.join(self._view.path, table))
            if found is not None and found[1] < self._view.files[table]:
                raise DatasetTruncated(
                    f"{self.name}: the table {table} became shorter while it was being read",
                    expected=f"{self._view.files[table]} bytes",
                    found=f"{found[1]} bytes",
                    hint="something copies over the files: read a finished copy",
                )
        self._turn = self._turn + _TABLES_AT_ONCE if self._turn + _TABLES_AT_ONCE < len(tables) else 0

    # Errors -------------------------------------------------------------------------------------------------------

    def _unreadable(self, index: int, key: bytes, error: Exception) -> SourceError:
        return self._damage(
            f"cannot be read at record {index} (key {show_key(key)})",
            error,
            self._view,
            lambda low, high: low <= key <= high,
        )

    def _corrupt(self, what: str, error: Exception, db: Any, view: PrivateView) -> SourceError:
        """The error for a database whose keys cannot be scanned: with the last of them that can be read."""
        last = b""
        if db is not None:
            try:
                with db.iterator(include_value=False, verify_checksums=True, fill_cache=False) as keys:
                    for key in keys:
                        last = key
            except type(error):
                what += f" beyond the key {show_key(last)}" if last else " at its first key"
        return self._damage(what, error, view, lambda low, high: high >= last)

    def _damage(self, what: str, error: Exception, view: PrivateView | None, holds: Any) -> SourceError:
        """What to raise for an error of LevelDB. ``holds(first, last)`` tells which tables to look into."""
        text = error_text(error)
        if view is not None:
            text = text.replace(view.path, self.path)
        missing = codec_missing(self.name, text)
        if missing is not None:
            return missing
        for table, _ in sorted((view.ranges if view is not None else {}).items(), key=lambda item: item[1]):
            if not holds(*view.ranges[table]):  # type: ignore[union-attr]
                continue
            from datasets.leveldb_tables import bad_blocks  # compiles a kernel: only when there is damage

            bad = bad_blocks(Path(self.path, table))
            if bad:
                text = f"{bad[0].reason} in {bad[0].place}"
                break
        return DatasetCorrupt(
            f"{self.name} {what}",
            expected="an intact LevelDB",
            found=text,
            hint="copy it again from where it was made; "
            f"python -m datasets.verify {self.path} lists what is damaged and saves what is sound",
        )


def _stat(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
