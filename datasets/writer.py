"""Writing the records of a database, LMDB or LevelDB."""

from __future__ import annotations

import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from profiler.errors import StallscopeError

COMMIT_RECORDS = 1000
COMMIT_BYTES = 64 << 20
COMMIT_SECONDS = 5.0
"""A transaction ends after so many records, bytes or seconds, whichever comes first."""
FIRST_MAP_SIZE = 64 << 20
"""Bytes an LMDB's map begins with. It doubles when full: a map is address space, and a huge one may be refused."""

RESERVE_BYTES = 16 << 20
"""What a writer leaves free on the disk."""


class DiskFull(StallscopeError):
    """There is no room for what is about to be written."""


def check_free(folder: Path, nbytes: int, what: str) -> None:
    """Raise :class:`DiskFull` unless ``nbytes`` more fit on the disk of ``folder``, and some room stays."""
    free = shutil.disk_usage(folder).free
    if free < nbytes + RESERVE_BYTES:
        raise DiskFull(
            f"the disk of {folder.parent} has no room for {what}",
            expected=f"{_mib(nbytes + RESERVE_BYTES)} free",
            found=f"{_mib(free)} free",
            hint="free some space, or name a target on another disk",
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


class Writer(ABC):
    """Takes records in ascending order of their keys. Each transaction is on the disk when it has ended.

    A writer that is opened where another was killed goes on after what that one has committed.

    Attributes
    ----------
    behind: transactions that fill up while records are put are written by another thread, one after the other:
        whoever puts waits only when the next one is full before the last one has ended. What such a transaction raises
        is raised by the call after it.
    committed: records in transactions that are known to have ended.
    """

    def __init__(self, folder: Path) -> None:
        self.behind = False
        self.committed = 0
        self._flying: _Flying | None = None
        self._folder = folder
        self._pending: list[tuple[bytes, bytes]] = []
        self._pending_bytes = 0
        self._failed = False
        self._last_commit = time.monotonic()

    def put(self, key: bytes, value: bytes) -> None:
        self._pending.append((key, value))
        self._pending_bytes += len(key) + len(value)
        if (
            len(self._pending) >= COMMIT_RECORDS
            or self._pending_bytes >= COMMIT_BYTES
            or time.monotonic() - self._last_commit >= COMMIT_SECONDS
        ):
            if self.behind:
                self._hand_over()
            else:
                self.commit()

    def commit(self) -> None:
        """Write what is pending in one transaction. Raises :class:`DiskFull` before anything of it is written."""
        self._await()
        if self._pending:
            try:
                self._write_if_room(self._pending, self._pending_bytes)
            except StallscopeError:
                self._failed = True
                raise
            self._note_committed()
        self._last_commit = time.monotonic()

    def _write_if_room(self, records: list[tuple[bytes, bytes]], nbytes: int) -> None:
        # Pages are not filled to the last byte: twice the bytes is more than enough.
        check_free(self._folder, 2 * nbytes, "the next records")
        self._write(records)

    def _hand_over(self) -> None:
        """Let a thread write what is pending, when the one before has ended."""
        self._await()
        flying = _Flying(self._pending, self._pending_bytes, self._write_if_room)
        # No call between these two: Ctrl-C, which comes at calls, finds the records in one place or in the other.
        self._flying = flying
        self._pending, self._pending_bytes = [], 0
        flying.start()
        self._last_commit = time.monotonic()

    def _await(self) -> None:
        """Wait for the transaction under way, if any. Raises what it raised."""
        flying = self._flying
        if flying is None:
            return
        if flying.ident is None:
            flying.start()  # Ctrl-C came before it
        flying.join()
        self._flying = None
        if flying.error is not None:
            self._failed = True
            raise flying.error
        self.committed += flying.count

    def keep(self) -> None:
        """Commit what is pending when something else than this writer failed or was interrupted.

        Does nothing after a failed write: it would fail again. An interruption may have come when a transaction had
        ended but was not counted yet; all of its records are there then, so the last one tells.
        """
        self._await()
        if self._failed or not self._pending:
            return
        if self._has(self._pending[-1][0]):
            self._note_committed()
        else:
            self.commit()

    def _note_committed(self) -> None:
        self.committed += len(self._pending)
        self._pending = []
        self._pending_bytes = 0

    def close(self) -> None:
        """Commit, make durable and close."""
        self.commit()
        self._finish()

    @abstractmethod
    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """What is committed, in the order of the keys."""

    @abstractmethod
    def _has(self, key: bytes) -> bool:
        """Whether a record with that key is committed."""

    @abstractmethod
    def _write(self, records: list[tuple[bytes, bytes]]) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...

    def abandon(self) -> None:
        """Give the handles back without finishing. Idempotent, also after ``close``."""
        if self._flying is not None and self._flying.ident is not None:
            self._flying.join()  # its handles may not go before it ends
        self._release()

    @abstractmethod
    def _release(self) -> None: ...


class _Flying(threading.Thread):
    """A transaction that is being written by a thread of its own."""

    def __init__(
        self, records: list[tuple[bytes, bytes]], nbytes: int, write: Callable[[list[tuple[bytes, bytes]], int], None]
    ) -> None:
        super().__init__(name="commit")
        self.count = len(records)
        self.error: BaseException | None = None
        self._todo = (write, records, nbytes)

    def run(self) -> None:
        write, records, nbytes = self._todo
        try:
            write(records, nbytes)
        except BaseException as error:
            self.error = error  # raised where the next call waits for this one


class LmdbWriter(Writer):
    """Raises :class:`StallscopeError` if the map cannot grow or the disk is full."""

    def __init__(self, folder: Path, map_size: int = FIRST_MAP_SIZE) -> None:
        super().__init__(folder)
        import lmdb

        self._lmdb = lmdb
        self.doublings = 0
        try:
            # No lock file: nobody else knows the temporary folder.
            self._env: Any = lmdb.open(str(folder), map_size=map_size, lock=False)
        except lmdb.Error as error:
            raise StallscopeError(f"the LMDB in {folder} cannot be opened: {error}") from error
        self._data = folder / "data.mdb"
        # Larger than asked for where an earlier writer had grown it.
        self._map_size = max(map_size, self._env.info()["map_size"])

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        try:
            with self._env.begin() as transaction:
                yield from transaction.cursor()
        except self._lmdb.Error as error:
            raise StallscopeError(f"the LMDB in {self._folder} cannot be read: {error}") from error

    def _has(self, key: bytes) -> bool:
        try:
            with self._env.begin() as transaction:
                return transaction.get(key) is not None
        except self._lmdb.Error as error:
            raise StallscopeError(f"the LMDB in {self._folder} cannot be read: {error}") from error

    def _write(self, records: list[tuple[bytes, bytes]]) -> None:
        # A transaction for which the map is too small is written twice. Records take at most twice their bytes.
        need = self._data.stat().st_size + 2 * sum(len(key) + len(value) for key, value in records)
        while self._map_size < need:
            self._grow()
        while True:
            try:
                with self._env.begin(write=True) as transaction:
                    for key, value in records:
                        if not transaction.put(key, value, overwrite=False, append=True):
                            raise StallscopeError(f"the key {key!r} is already in the database")
                return
            except self._lmdb.MapFullError:
                self._grow()  # the whole transaction is lost, so it is written again
            except self._lmdb.Error as error:
                raise StallscopeError(f"writing the LMDB failed: {error}", hint="is the disk full?") from error

    def _grow(self) -> None:
        self._map_size *= 2
        self.doublings += 1
        try:
            self._env.set_mapsize(self._map_size)
        except self._lmdb.Error as error:
            raise StallscopeError(
                f"the LMDB's map cannot grow to {self._map_size >> 20} MiB: {error}",
                hint="raise the limit on address space (ulimit -v), or write a LevelDB",
            ) from error

    def _finish(self) -> None:
        try:
            self._env.sync(True)
        except self._lmdb.Error as error:
            raise StallscopeError(f"writing the LMDB failed: {error}", hint="is the disk full?") from error
        self._env.close()

    def _release(self) -> None:
        self._env.close()


class LevelDbWriter(Writer):
    """Compacts before it closes: LevelDB would leave the last records in its log, where a cut goes unnoticed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            import plyvel
        except ImportError as error:
            raise StallscopeError(
                "writing a LevelDB needs the package 'plyvel', which is not installed",
                hint="pip install plyvel (it has wheels for Python 3.11 and 3.12), or --backend lmdb",
            ) from error
        self._plyvel = plyvel
        try:
            self._db: Any = plyvel.DB(str(folder), create_if_missing=True)
        except (plyvel.Error, OSError) as error:
            raise StallscopeError(f"the LevelDB in {folder} cannot be opened: {_plain(error)}") from error

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        try:
            with self._db.iterator(verify_checksums=True, fill_cache=False) as iterator:
                yield from iterator
        except self._plyvel.Error as error:
            raise StallscopeError(f"the LevelDB in {self._folder} cannot be read: {_plain(error)}") from error

    def _has(self, key: bytes) -> bool:
        try:
            return self._db.get(key) is not None
        except self._plyvel.Error as error:
            raise StallscopeError(f"the LevelDB in {self._folder} cannot be read: {_plain(error)}") from error

    def _write(self, records: list[tuple[bytes, bytes]]) -> None:
        try:
            with self._db.write_batch(sync=True) as batch:
                for key, value in records:
                    batch.put(key, value)
        except self._plyvel.Error as error:
            raise StallscopeError(f"writing the LevelDB failed: {_plain(error)}", hint="is the disk full?") from error

    def _finish(self) -> None:
        try:
            self._db.compact_range()
        except self._plyvel.Error as error:
            raise StallscopeError(
                f"compacting the LevelDB failed: {_plain(error)}", hint="is the disk full?"
            ) from error
        self._db.close()

    def _release(self) -> None:
        self._db.close()


def _plain(error: Exception) -> str:
    """plyvel's messages are bytes."""
    text = error.args[0] if error.args else ""
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)


WRITERS: dict[str, type[LmdbWriter] | type[LevelDbWriter]] = {"lmdb": LmdbWriter, "leveldb": LevelDbWriter}
