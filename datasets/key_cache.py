"""Key indexes kept on disk, so that the keys of a large database are scanned once and not by every process.

One file a database lies in ``keys`` of the cache folder (``$STALLSCOPE_CACHE``, else ``stallscope`` in
``$XDG_CACHE_HOME`` or ``~/.cache``). It is mapped, so all processes of a machine share its memory. It carries what it
was made from (path, size, last transaction, …): a file made from anything else is not used. It appears whole or not at
all, and while one process scans, the others wait for its result.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets.errors import DatasetWarning
from datasets.key_index import DenseKeys, KeyIndex, KeyList
from profiler.jit import cache_root

_MAGIC = b"STALLSCOPE KEYS1"
_HEAD = 32  # magic, CRC-32 of all that follows the head, length of the description, 8 bytes of zeros
_PATIENCE_S = 600.0
_POLL_S = 0.05
_MOST_DENSE = 64
_dense: dict[Path, DenseKeys] = {}
"""Keys that turned out to be dense numbers are three numbers: no file, but no second scan in this process either."""


def kept(place: str, what: dict[str, Any], build: Callable[[], KeyIndex]) -> KeyIndex:
    """The index of a database: the kept one, else what ``build`` makes, which is then kept.

    Parameters
    ----------
    place: names the database; an index kept under the same name for an earlier state of it is replaced.
    what: the state the index belongs to, plain JSON values.
    build: scans the keys. What it raises comes through.

    A cache folder that cannot be written costs a :class:`DatasetWarning` and a scan in each process, nothing else.
    """
    what = json.loads(json.dumps({"byteorder": sys.byteorder, **what}))  # as it comes back from the file
    name, state = (hashlib.sha256(text.encode()).hexdigest()[:24] for text in (place, json.dumps(what, sort_keys=True)))
    file = cache_root() / "keys" / f"{name}-{state}.keys"
    if (found := _dense.get(file) or _load(file, what)) is not None:
        return found
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = _lock(file.with_suffix(".part"))
    except OSError as error:
        _not_kept(file, error)
        return build()
    renamed = False
    try:
        if (found := _load(file, what)) is not None:  # made by another process while this one waited
            return found
        index = build()
        if isinstance(index, DenseKeys):
            while len(_dense) >= _MOST_DENSE:
                _dense.pop(next(iter(_dense)), None)
            _dense[file] = index
        if not isinstance(index, KeyList) or part < 0:
            return index
        try:
            _save(part, file, what, index)
            renamed = True
        except OSError as error:
            _not_kept(file, error)
            return index
        for old in file.parent.glob(f"{name}-*.keys"):
            if old != file:
                with contextlib.suppress(OSError):  # somebody else's to remove; it only takes up room
                    old.unlink()
        return _load(file, what) or index
    finally:
        if part >= 0:
            if not renamed:  # empty or torn, and ours while we hold its lock, which goes with the descriptor
                with contextlib.suppress(OSError):
                    file.with_suffix(".part").unlink()
            os.close(part)


def _lock(part: Path) -> int:
    """A descriptor of the file that only this process may write now, or -1 where another one keeps it for too long."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(part) and os.path.samestat(os.fstat(descriptor), os.stat(part)):
                return descriptor
        except BlockingIOError:
            time.sleep(_POLL_S)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    return -1


def _save(descriptor: int, file: Path, what: dict[str, Any], index: KeyList) -> None:
    sizes = {"stride": index.stride, "packed": index.packed, "records": index.records, "blocks": len(index.ends)}
    about = json.dumps({"what": what, **sizes}, sort_keys=True).encode()
    about += b" " * (-len(about) % 8)  # what follows is read as uint64
    parts = (about, memoryview(index.ends).cast("B"), index.blocks)
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    os.ftruncate(descriptor, 0)
    with open(descriptor, "wb", closefd=False) as out:
        out.write(_MAGIC + crc.to_bytes(4, "little") + len(about).to_bytes(4, "little") + bytes(8))
        for part in parts:
            out.write(part)
        out.flush()
        os.fsync(descriptor)
    os.replace(file.with_suffix(".part"), file)


def _load(file: Path, what: dict[str, Any]) -> KeyList | None:
    """The kept index, or None where there is none, or one that is damaged or was made from something else."""
    try:
        with open(file, "rb") as opened:
            head = opened.read(_HEAD)
            crc = 0
            while chunk := opened.read(1 << 20):  # read, not mapped: pages seen here are not counted as this process's
                crc = zlib.crc32(chunk, crc)
            if len(head) < _HEAD or head[:16] != _MAGIC or crc != int.from_bytes(head[16:20], "little"):
                return None
            content = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError:
        return None
    start = _HEAD + int.from_bytes(head[20:24], "little")
    about = json.loads(bytes(content[_HEAD:start]))
    if about["what"] != what:
        return None
    end = start + 8 * about["blocks"]
    ends = content[start:end].cast("Q")
    return KeyList(about["stride"], about["packed"], about["records"], content[end:], ends)


def _not_kept(file: Path, error: OSError) -> None:
    warnings.warn(
        f"the index of the keys cannot be kept in {file.parent} ({error.strerror}): every process scans them itself; "
        "name another folder in STALLSCOPE_CACHE",
        DatasetWarning,
        stacklevel=4,
    )
