"""LMDB environments of this process: one per path, opened without a lock file, checked before any page is touched."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass

import lmdb

from datasets.errors import DatasetTruncated, NotADataset, SourceError

_MAX_NAMED = 64
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
class _Shared:
    """The one environment of a path in this process: LMDB allows no second."""

    env: lmdb.Environment
    users: int


_environments: dict[str, _Shared] = {}
_lock = threading.Lock()


def _forget_inherited() -> None:
    """In a forked child: close what the parent had open, so that the child can open environments of its own."""
    global _lock
    _lock = threading.Lock()
    for shared in _environments.values():
        shared.env.close()
    _environments.clear()


os.register_at_fork(after_in_child=_forget_inherited)


def data_file(path: str) -> str:
    """The file that holds the pages of the LMDB at ``path``, a folder or a file."""
    return os.path.join(path, "data.mdb") if os.path.isdir(path) else path


def acquire(path: str, name: str) -> lmdb.Environment:
    """The environment of ``path``, opened if this process has not done so yet. Give it back with :func:`release`."""
    key = os.path.realpath(path)
    with _lock:
        shared = _environments.get(key)
        if shared is None:
            _check_header(data_file(path), name)
            try:
                env = lmdb.open(
                    key,
                    subdir=os.path.isdir(key),
                    readonly=True,
                    lock=False,
                    create=False,
                    max_dbs=_MAX_NAMED,
                )
            except (lmdb.Error, MemoryError) as error:
                raise SourceError(
                    f"{name} cannot be opened",
                    found=str(error) or type(error).__name__,
                    hint="another part of this process holds it open with py-lmdb: open it through datasets.open_source"
                    if "already open" in str(error)
                    else "its map does not fit under this process's limit of addresses (ulimit -v)"
                    if isinstance(error, (MemoryError, lmdb.MemoryError))
                    else None,
                ) from error
            shared = _environments[key] = _Shared(env, 0)
        shared.users += 1
        return shared.env


def release(path: str, env: lmdb.Environment) -> None:
    """Give an environment back; the last user closes it."""
    key = os.path.realpath(path)
    with _lock:
        shared = _environments.get(key)
        if shared is None or shared.env is not env:
            return
        shared.users -= 1
        if shared.users == 0:
            del _environments[key]
            env.close()


def _check_header(file: str, name: str) -> None:
    """Refuse by plain reads what LMDB would map and then die on, or would report without saying what it found."""
    try:
        size = os.path.getsize(file)
        with open(file, "rb") as opened:
            head = opened.read(44)
    except OSError as error:
        raise SourceError(
            f"{name} cannot be read: {error.strerror}",
            found=error.filename,
            hint="check the mode of the file and of the folders above it",
        ) from error
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


def needed_bytes(env: lmdb.Environment, path: str, db: str | None, name: str) -> int:
    """Bytes the file must have. LMDB never compares, and a page beyond the end of the file kills the process."""
    file = data_file(path)
    page = env.stat()["psize"]
    need = (env.info()["last_pgno"] + 1) * page
    have = os.path.getsize(file)
    if have >= need:
        return need
    # Pages at the end may have been given back before they were ever written: legal, if a walk meets none of them.
    if have % page == 0 and _walk_in_child(path, db):
        return have
    raise DatasetTruncated(
        f"{name} is cut off: {file} is shorter than its own page count",
        expected=f"{need} bytes",
        found=f"{have} bytes",
        hint="an interrupted copy, most likely: copy it again from where it was made",
    )


def _walk_in_child(path: str, db: str | None) -> bool:
    """Whether a process of its own can read every record."""
    command = [sys.executable, "-c", _WALK, path, str(os.path.isdir(path)), db or ""]
    try:
        return subprocess.run(command, capture_output=True, timeout=_WALK_TIMEOUT_S, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False
