"""LMDB environments of this process: one per path, opened without a lock file, checked before any page is touched."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import warnings
from dataclasses import dataclass

import lmdb

from datasets.errors import DatasetTruncated, DatasetWarning, NotADataset, SourceError
from datasets.writers import lmdb_writer

MAX_NAMED = 64
"""Named databases of one environment that can be open at once."""
_ATTEMPTS = 3
_NAMED_BYTES = 48
_WALK_TIMEOUT_S = 600.0

# Reads the last byte of every value, so that a page beyond the end of the file kills the child and not the caller.
_WALK = """
import resource, sys
import lmdb
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
path, subdir, name = sys.argv[1], sys.argv[2] == "True", sys.argv[3].encode() or None
with lmdb.open(path, subdir=subdir, readonly=True, lock=False, create=False, max_dbs=64) as env:
    db = env.open_db(name, create=False)
    with env.begin(db=db, buffers=True) as txn:
        for _, value in txn.cursor():
            bytes(value[-1:])
"""


@dataclass
class Opened:
    """The one environment of a path in this process: LMDB allows no second.

    Attributes
    ----------
    env: opened read-only and without a lock file.
    fd: a descriptor of the very file that is mapped, whatever happens to its name.
    users: how many sources have it.
    """

    env: lmdb.Environment
    fd: int
    users: int = 0

    @property
    def size(self) -> int:
        """Bytes of the mapped file now."""
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        self.env.close()
        os.close(self.fd)


_environments: dict[str, Opened] = {}
_lock = threading.Lock()


def _forget_inherited() -> None:
    """In a forked child: close what the parent had open, so that the child can open environments of its own."""
    global _lock
    _lock = threading.Lock()
    for opened in _environments.values():
        opened.close()
    _environments.clear()


os.register_at_fork(after_in_child=_forget_inherited)


def data_file(path: str) -> str:
    """The file that holds the pages of the LMDB at ``path``, a folder or a file."""
    return os.path.join(path, "data.mdb") if os.path.isdir(path) else path


def acquire(path: str, name: str, readahead: bool = True) -> Opened:
    """The environment of ``path``, opened if this process has not done so yet. Give it back with :func:`release`.

    ``readahead`` is that of whoever opens it first: it belongs to the map, and there is one map.
    """
    key = os.path.realpath(path)
    with _lock:
        opened = _environments.get(key)
        if opened is None:
            opened = _environments[key] = _open(key, name, readahead)
            writer = lmdb_writer(key, data_file(key))
            if writer is not None:
                warnings.warn(
                    f"{name}: {writer}. What was committed so far is read; the next commit ends this run, since it may "
                    "overwrite records that are being read",
                    DatasetWarning,
                    stacklevel=2,
                )
        opened.users += 1
        return opened


def release(path: str, opened: Opened) -> None:
    """Give an environment back; the last user closes it."""
    key = os.path.realpath(path)
    with _lock:
        if _environments.get(key) is not opened:
            return
        opened.users -= 1
        if opened.users == 0:
            del _environments[key]
            opened.close()


def _open(path: str, name: str, readahead: bool) -> Opened:
    file = data_file(path)
    for _ in range(_ATTEMPTS):
        fd = _open_file(file, name)
        try:
            _check_header(fd, file, name)
            env = lmdb.open(
                path,
                subdir=os.path.isdir(path),
                readonly=True,
                lock=False,
                create=False,
                readahead=readahead,
                max_dbs=MAX_NAMED,
            )
        except (lmdb.Error, MemoryError) as error:
            os.close(fd)
            raise SourceError(
                f"{name} cannot be opened",
                found=str(error) or type(error).__name__,
                hint="another part of this process holds it open with py-lmdb: open it through datasets.open_source"
                if "already open" in str(error)
                else "its map does not fit under this process's limit of addresses (ulimit -v)"
                if isinstance(error, (MemoryError, lmdb.MemoryError))
                else None,
            ) from error
        except BaseException:
            os.close(fd)
            raise
        if os.path.exists(file) and os.path.samestat(os.fstat(fd), os.stat(file)):
            return Opened(env, fd)
        env.close()  # replaced between the two openings: what is mapped may be neither of the two
        os.close(fd)
    raise SourceError(f"{name} keeps being replaced while it is opened", hint="let the copy finish, then start again")


def _open_file(file: str, name: str) -> int:
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise NotADataset(f"{file} is not a regular file", hint="name the folder or file of an LMDB")
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceError(
            f"{name} cannot be read: {error.strerror}",
            found=error.filename,
            hint="check the mode of the file and of the folders above it",
        ) from error


def _check_header(fd: int, file: str, name: str) -> None:
    """Refuse by plain reads what LMDB would map and then die on, or would report without saying what it found."""
    size = os.fstat(fd).st_size
    try:
        head = os.pread(fd, 44, 0)
    except OSError as error:
        raise SourceError(f"{name} cannot be read: {error.strerror}", found=file) from error
    if len(head) >= 20 and head[16:20] != b"\xde\xc0\xef\xbe":
        raise NotADataset(f"{file} is not an LMDB", expected="the LMDB mark at byte 16", found=head[16:20].hex(" "))
    page = int.from_bytes(head[40:44], "little")
    if size < 2 * max(page, 256):
        raise DatasetTruncated(
            f"{file} is too short for an LMDB",
            expected=f"at least 2 pages of {page} bytes" if page else "at least 2 pages",
            found=f"{size} bytes",
            hint="an interrupted copy, most likely: copy it again",
        )


def needed_bytes(opened: Opened, path: str, db: str | None, name: str) -> int:
    """Bytes the file must have. LMDB never compares, and a page beyond the end of the file kills the process."""
    page = opened.env.stat()["psize"]
    need = (opened.env.info()["last_pgno"] + 1) * page
    have = opened.size
    if have >= need:
        return need
    # Pages at the end may have been given back before they were ever written: legal, if a walk meets none of them.
    if have % page == 0 and _walk_in_child(path, db):
        return have
    raise DatasetTruncated(
        f"{name} is cut off: {data_file(path)} is shorter than its own page count",
        expected=f"{need} bytes",
        found=f"{have} bytes",
        hint="an interrupted copy, most likely: copy it again from where it was made",
    )


def named(env: lmdb.Environment, cursor: lmdb.Cursor, only: bool = True) -> list[bytes]:
    """Names of the databases that the main one lists. Nothing if ``only``, and it holds anything else as well.

    LMDB keeps them as records of 48 bytes among the others; opening one is the only way to tell it from a record.
    """
    names: list[bytes] = []
    more = cursor.first()
    while more and len(names) < MAX_NAMED - 1:
        key = bytes(cursor.key())
        if len(cursor.value()) == _NAMED_BYTES and _is_named(env, key):
            names.append(key)
        elif only:
            return []
        more = cursor.next()
    return names


def _is_named(env: lmdb.Environment, key: bytes) -> bool:
    try:
        env.open_db(key, create=False)
    except (lmdb.IncompatibleError, lmdb.DbsFullError, lmdb.BadValsizeError):
        return False
    return True


def _walk_in_child(path: str, db: str | None) -> bool:
    """Whether a process of its own can read every record."""
    command = [sys.executable, "-c", _WALK, path, str(os.path.isdir(path)), db or ""]
    try:
        return subprocess.run(command, capture_output=True, timeout=_WALK_TIMEOUT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False
