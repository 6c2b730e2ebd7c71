"""Files that are appended to or replaced, never left half-changed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def create(folder: Path, stem: str, suffix: str) -> tuple[int, Path]:
    """Create ``folder/stem+suffix`` (or ``stem.2+suffix``, ... if taken) for appending: (file descriptor, path)."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    number = 1
    while True:
        path = folder / (f"{stem}{suffix}" if number == 1 else f"{stem}.{number}{suffix}")
        try:
            return os.open(path, flags, 0o644), path
        except FileExistsError:  # an earlier part of a resumed run had the same process number
            number += 1


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes; a short write (disk nearly full) is tried again and then raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def replace(path: Path, data: bytes) -> None:
    """Give a file new contents in one step: it holds the old ones or the new ones, whatever happens."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Ask the disk to hold what was written to a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
