"""Records in an LMDB, read only: no lock file, one long-lived read transaction, addressed by place in key order."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import lmdb

from datasets import key_cache, key_index, lmdb_env
from datasets.errors import DatasetChanged, DatasetCorrupt, DatasetTruncated, NotADataset, SourceClosed
from datasets.source import Record, Source, show_key

_STRIDE = 8
"""Every 8th key is kept: a look-up steps over at most 7 neighbours, which lie on the same or the next leaf page."""
_SCAN_LIMIT = 1 << 18
"""Up to so many records a dense-looking index is proved by a scan of the keys (well under a second)."""
_KEEP_FROM = 1 << 16
"""From so many records on, the index of other keys is kept on disk (see :mod:`datasets.key_cache`)."""
_CHECK_EVERY = 32
"""Records read between two looks at the file's size and its last transaction."""


class LmdbSource(Source):
    """An LMDB addressed by position in key order. Values are copied out: no view into the map leaves this class.

    Parameters
    ----------
    path: folder that holds ``data.mdb``, or an LMDB in a single file.
    db: named sub-database; None is the main one.
    readahead: whether the system reads ahead of a page that is missing from memory. On is right for reading in order,
        off for shuffled reading: it would read pages that nobody wants. All sources of one path in a process share the
        choice of the first.

    A file that shrinks while it is read is noticed before every call and every 32 records. What remains: a cut within
    the microseconds between that look and the reading of a page beyond the new end, which kills the process (SIGBUS).
    A commit by a writer is noticed before and after every call and every 32 records, so nothing that it may have
    overwritten is ever handed out.
    """

    backend = "lmdb"

    def __init__(self, path: str, db: str | None = None, readahead: bool = True) -> None:
        self.path = os.path.abspath(path)
        self.db = db
        self.readahead = readahead
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
        return self._at(index)[0] if steps else key

    def read(self, index: int) -> Record:
        return self.read_many([index])[0]

    def read_many(self, indices: Iterable[int]) -> list[Record]:
        self._live()
        name = self.name
        records = []
        for number, index in enumerate(map(self._check_index, indices)):
            if number and number % _CHECK_EVERY == 0:
                self._check_transaction()
                self._check_size()
            records.append(Record(index, *self._at(index), name))
        self._check_transaction()
        return records

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
        opened, pid = self._opened, self._pid
        self._drop()
        if opened is not None and pid == os.getpid():
            lmdb_env.release(self.path, opened)

    def __del__(self) -> None:
        if getattr(self, "_opened", None) is not None:
            self.close()

    def __getstate__(self) -> dict[str, Any]:
        keep = ("path", "db", "readahead", "_records", "_version")
        # A list of keys stays behind: the copy finds it kept on disk, or makes it.
        index = self._index if isinstance(self._index, key_index.DenseKeys) else None
        return {name: getattr(self, name) for name in keep} | {"_index": index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._closed = False
        self._drop()

    # ------------------------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        self._opened: lmdb_env.Opened | None = None
        self._handle: Any = None
        self._txn: Any = None
        self._cursor: Any = None
        self._position = -2  # record at which the cursor stands
        self._pid = -1

    def _live(self) -> None:
        """Make sure that this process has it open and that nobody has written to it or cut it since."""
        if self._closed:
            raise SourceClosed(f"{self.name} was closed", hint="open it again with datasets.open_source")
        if self._pid != os.getpid():
            # First use, unpickled, or forked: handles of another process must not be used, not even to close them.
            self._drop()
            self._open()
            return
        self._check_transaction()
        self._check_size()

    def _check_transaction(self) -> None:
        """Raise :class:`DatasetChanged` if a writer has committed since this was opened.

        Pages of our transaction are overwritten by the second commit after it at the earliest, so what was read before
        a check that passes is sound.
        """
        assert self._opened is not None
        assert self._version is not None
        last = self._opened.env.info()["last_txnid"]
        if last != self._version[0]:
            raise self._changed(f"transaction {last}")

    def _check_size(self) -> None:
        assert self._opened is not None
        assert self._version is not None
        have = self._opened.size  # of the file that is mapped: one that is replaced stays whole as long as we hold it
        if have < self._version[1]:
            raise DatasetTruncated(
                f"{self.name} became shorter while it was being read",
                expected=f"{self._version[1]} bytes",
                found=f"{have} bytes",
                hint="something writes to or copies over the file: read a finished copy",
            )

    def _open(self) -> None:
        opened = lmdb_env.acquire(self.path, self.name, self.readahead)
        try:
            needed = lmdb_env.needed_bytes(opened, self.path, self.db, self.name)
            handle = self._open_db(opened.env)
            txn = opened.env.begin(db=handle, buffers=False)
            if handle.flags(txn)["dupsort"]:
                raise NotADataset(f"{self.name} holds several values per key", expected="one record per key")
            version = (txn.id(), needed)
            if self._version is not None and version[0] != self._version[0]:
                raise self._changed(f"transaction {version[0]}")
            records = txn.stat(handle)["entries"]
            cursor = txn.cursor()
            if self.db is None:
                self._refuse_names(opened.env, cursor)
            if self._index is None:
                self._index = self._make_index(opened, version[0], cursor, records)
        except lmdb.Error as error:
            lmdb_env.release(self.path, opened)
            raise self._corrupt("cannot be read", error) from error
        except BaseException:
            lmdb_env.release(self.path, opened)
            raise
        self._version, self._records = version, records
        self._opened, self._txn, self._cursor, self._pid = opened, txn, cursor, os.getpid()
        self._handle, self._position = handle, -2

    def _renew(self) -> None:
        """Begin again after an error: LMDB refuses everything else in a transaction that met damage."""
        assert self._opened is not None
        self._txn.abort()
        self._txn = self._opened.env.begin(db=self._handle, buffers=False)
        self._cursor = self._txn.cursor()

    def _refuse_names(self, env: lmdb.Environment, cursor: Any) -> None:
        """Raise :class:`NotADataset` where the main database holds nothing but the names of others."""
        names = lmdb_env.named(env, cursor)
        if names:
            raise NotADataset(
                f"{self.path} holds named databases and no records of its own",
                expected="records in the main database, or the name of another",
                found=_listed(names),
                hint=f"name one: --db {names[0].decode('utf-8', 'backslashreplace')} on the command line, "
                "data.<phase>.db in a job, db= in open_source",
            )

    def _open_db(self, env: lmdb.Environment) -> Any:
        if self.db is None:
            return env.open_db(None, create=False)
        try:
            return env.open_db(self.db.encode(), create=False)
        except (lmdb.NotFoundError, lmdb.IncompatibleError) as error:
            with env.begin() as txn:
                names = lmdb_env.named(env, txn.cursor(), only=False)
            raise NotADataset(
                f"{self.path} holds no database named '{self.db}'",
                expected="one of: " + _listed(names) if names else "no name: it has none but the main database",
                found=f"db '{self.db}'",
            ) from error

    def _make_index(self, opened: lmdb_env.Opened, transaction: int, cursor: Any, records: int) -> key_index.KeyIndex:
        if records > _SCAN_LIMIT and cursor.first():
            first = cursor.key()
            cursor.last()
            dense = key_index.dense_by_ends(first, cursor.key(), records)
            if dense is not None:
                return dense

        def scan() -> key_index.KeyIndex:
            self._check_pages(transaction)
            cursor.first()
            return key_index.build(cursor.iternext(keys=True, values=False), _STRIDE)

        if records < _KEEP_FROM:
            return scan()
        status = os.fstat(opened.fd)
        state = {
            "path": os.path.realpath(lmdb_env.data_file(self.path)),
            "db": self.db,
            "records": records,
            "transaction": transaction,
            "size": status.st_size,
            "inode": status.st_ino,
            "mtime_ns": status.st_mtime_ns,
        }
        return key_cache.kept(f"lmdb {state['path']} {self.db}", state, scan)

    def _check_pages(self, transaction: int) -> None:
        """Refuse damaged pages by plain reads: LMDB's cursor ends the process where a page is no leaf."""
        from datasets.lmdb_pages import LmdbReader

        reader = LmdbReader(self.path, self.db)
        damage = reader.first_damage() if reader.transaction == transaction else None
        if damage is None:
            return
        lost, records = damage
        after = "" if lost.after is None else f", the last with the key {show_key(lost.after)}"
        raise DatasetCorrupt(
            f"{self.name} is damaged: {lost.place} {lost.reason}",
            expected=f"{reader.expected} records",
            found=f"{records} records before the damage{after}",
            hint=f"copy it again from where it was made; python -m datasets.verify {self.path} lists what is damaged, "
            "and with --salvage OUT saves what is sound",
        )

    def _at(self, index: int) -> tuple[bytes, bytes]:
        """Key and value of a record that exists."""
        assert self._index is not None
        try:
            if isinstance(self._index, key_index.DenseKeys):
                key, _ = self._index.anchor(index)
                value = self._txn.get(key)
                if value is None:
                    self._check_transaction()  # a writer may be the reason
                    raise DatasetCorrupt(
                        f"{self.name}: the keys look like the numbers {show_key(self._index.anchor(0)[0])} and up, "
                        f"but {show_key(key)} is missing",
                        hint="copy the records to a new database under keys without gaps",
                    )
                return key, value
            cursor = self._cursor
            if index == self._position + 1:
                found = cursor.next()
            else:
                key, steps = self._index.anchor(index)
                found = cursor.set_key(key)
                while found and steps:
                    found = cursor.next()
                    steps -= 1
            self._position = index if found else -2
            if not found:
                self._check_transaction()
                raise DatasetCorrupt(
                    f"{self.name} ends before record {index}", expected=f"{self._records} records by its own count"
                )
            return cursor.key(), cursor.value()
        except lmdb.Error as error:
            self._position = -2
            self._check_transaction()
            self._renew()
            raise self._corrupt(f"cannot be read at record {index} of {self._records}", error) from error

    def _changed(self, found: str) -> DatasetChanged:
        assert self._version is not None
        return DatasetChanged(
            f"{self.name} was written to while it was in use",
            expected=f"transaction {self._version[0]}",
            found=found,
            hint="let the writer finish, then start again",
        )

    def _corrupt(self, what: str, error: Exception) -> DatasetCorrupt:
        return DatasetCorrupt(
            f"{self.name} {what}",
            expected="an intact LMDB",
            found=str(error),
            hint="copy it again from where it was made, and compare checksums; "
            f"python -m datasets.verify {self.path} lists what is damaged and saves what is sound",
        )


def _listed(names: list[bytes]) -> str:
    return ", ".join(show_key(name) for name in names[:16]) + (" …" if len(names) > 16 else "")
