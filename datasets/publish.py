"""What is made under a temporary name, and takes its own only when it is complete."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from profiler.errors import UsageError


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside ``out`` that takes its name when the block ends without an exception.

    After an exception the temporary folder is removed and ``out`` is as before. After a SIGKILL the folder stays under
    its temporary, hidden name; the next conversion to the same target removes it.
    """
    sweep(out)
    temporary = part_of(out)
    try:
        temporary.mkdir()
    except OSError as error:
        raise UsageError(f"nothing can be written in {out.parent.absolute()}: {error.strerror}") from error
    try:
        yield temporary
        publish(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def part_of(out: Path) -> Path:
    """The temporary name of what this process makes, until it is complete."""
    return out.with_name(f".{out.name}.part-{_owner()}")


def publish(temporary: Path, out: Path) -> None:
    """Give a complete folder its name, in place of the database that may be there. Both are on the disk afterwards."""
    for folder in (temporary, *temporary.iterdir()):
        sync(folder)
    if not out.exists():
        os.rename(temporary, out)
    else:
        old = out.with_name(f".{out.name}.old-{_owner()}")
        os.rename(out, old)
        try:
            os.rename(temporary, out)
        except BaseException:
            os.rename(old, out)
            raise
        shutil.rmtree(old)
    sync(out.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _owner() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def sweep(out: Path) -> None:
    """Remove what conversions and exports to the same target left behind when they were killed on this host."""
    ours = re.compile(re.escape(f".{out.name}.") + r"(part|old)-" + re.escape(socket.gethostname()) + r"-(\d+)")
    for path in list(out.parent.iterdir()):
        match = ours.fullmatch(path.name)
        # What was moved aside is the only copy until the new database is in its place.
        if match and not Path(f"/proc/{match[2]}").exists() and (match[1] == "part" or out.exists()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:  # of an export to one file
                path.unlink(missing_ok=True)
