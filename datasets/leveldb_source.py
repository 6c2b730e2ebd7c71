"""Records in a LevelDB, read through a private view: the data set's folder is neither locked nor changed.

Every copy of a source opens a view of its own. A node should have one: its owner reads for everybody else.
"""

from __future__ import annotations

import os
import resource
from typing import Any

from datasets import key_index
from datasets.errors import DatasetChanged, DatasetCorrupt, SourceClosed, SourceError
from datasets.leveldb_view import PrivateView
from datasets.source import Record, Source, show_key

_SCAN_LIMIT = 1 << 18
"""Beyond so many records a dense-looking index is not proved by a scan: that would read the whole database."""
_FILES_MOST = 1000
_FILES_RESERVE = 128

_abandoned: list[Any] = []
"""Handles inherited through fork. Closing one would wait for a thread that exists in the parent only."""


class LevelDbSource(Source):
    """A LevelDB addressed by position in key order. Checksums are verified with every read.

    Parameters
    ----------
    path: folder that holds ``CURRENT``.
    """

    backend = "leveldb"

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._closed = False
        self._index: key_index.KeyIndex | None = None
        self._files: dict[str, int] | None = None
        self._db: Any = None
        self._view: PrivateView | None = None
        self._pid = -1

    def __len__(self) -> int:
        if self._index is None:
            self._live()
        assert self._index is not None
        return self._index.records

    def key(self, index: int) -> bytes:
        index = self._check_index(index)
        assert self._index is not None
        return self._index.anchor(index)[0]

    def read(self, index: int) -> Record:
        db = self._live()
        key = self.key(index)
        import plyvel

        try:
            value = db.get(key, verify_checksums=True)
        except plyvel.Error as error:
            raise self._corrupt(f"cannot be read at record {index} (key {show_key(key)})", error) from error
        if value is None:
            raise DatasetCorrupt(
                f"{self.name}: key {show_key(key)} of record {index} is missing",
                expected=f"{len(self)} records from key {show_key(self.key(0))} on",
                hint="records were lost when it was written or copied: convert or copy it again",
            )
        return Record(int(index), key, value, self.name)

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
        return {"path": self.path, "_index": self._index, "_files": self._files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]
        self._index, self._files = state["_index"], state["_files"]

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
            db = plyvel.DB(view.path, create_if_missing=False, paranoid_checks=True, max_open_files=open_files_limit())
            if self._index is None:
                self._index = _make_index(db)
        except BaseException as error:
            if db is not None:
                db.close()
            view.remove()
            if isinstance(error, plyvel.Error):
                raise self._corrupt("cannot be opened", error) from error
            raise
        self._files = view.files
        self._db, self._view, self._pid = db, view, os.getpid()

    def _corrupt(self, what: str, error: Exception) -> DatasetCorrupt:
        text = error_text(error)
        if self._view is not None:
            text = text.replace(self._view.path, self.path)
        hint = "copy it again from where it was made; plyvel.repair_db on a copy saves what can be read"
        if "corrupted compressed block" in text:
            hint = "the checksum is right: this build of plyvel cannot decompress it (Snappy or zstd missing)"
        return DatasetCorrupt(f"{self.name} {what}", expected="an intact LevelDB", found=text, hint=hint)


def _make_index(db: Any) -> key_index.KeyIndex:
    ends: list[bytes] = []
    for reverse in (False, True):
        with db.iterator(include_value=False, reverse=reverse, verify_checksums=True, fill_cache=False) as keys:
            ends.append(next(keys, b""))
    first, last = ends
    if first.isdigit() and last.isdigit():
        dense = key_index.dense_by_ends(first, last, int(last) - int(first) + 1)
        if dense is not None and dense.records > _SCAN_LIMIT:
            return dense
    with db.iterator(include_value=False, verify_checksums=True, fill_cache=False) as keys:
        return key_index.build(keys)


def error_text(error: Exception) -> str:
    """plyvel's messages are bytes."""
    text = error.args[0] if error.args else ""
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)


def open_files_limit() -> int:
    """How many tables LevelDB may keep open under this process's limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _FILES_MOST
    return max(16, min(_FILES_MOST, soft - _FILES_RESERVE))


def import_plyvel(name: str) -> Any:
    """The module, or a :class:`SourceError` that says how to get it."""
    try:
        import plyvel
    except ImportError as error:
        raise SourceError(
            f"reading {name} needs the package 'plyvel', which is not installed",
            found=str(error),
            hint="pip install 'plyvel>=1.5.1' (it has wheels for Python 3.11 and 3.12), or convert the data to LMDB",
        ) from error
    return plyvel
