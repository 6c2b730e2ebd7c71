"""Where a command may write: never into a data set, whatever else it is told."""

from __future__ import annotations

import os
import re
from pathlib import Path

from profiler.errors import UsageError

_DATABASE_FILES = re.compile(r"(data|lock)\.mdb|CURRENT|LOCK|LOG(\.old)?|MANIFEST-\d+|\d+\.(ldb|sst|log|dbtmp)")
_MARKS = ("data.mdb", "CURRENT")  # what makes a folder a database


def check_apart(out: str | os.PathLike[str], *sources: str | os.PathLike[str]) -> None:
    """Raise :class:`UsageError` if ``out`` is, lies in or holds one of ``sources``, or lies in a database folder."""
    target = Path(os.path.realpath(out))
    for given in sources:
        source = Path(os.path.realpath(given))
        if source == target or source in target.parents or target in source.parents:
            raise UsageError(
                f"{out} and the data set {given} are not apart: the source must stay as it is",
                hint="name another target",
            )
    if any((target.parent / mark).exists() for mark in _MARKS):
        raise UsageError(
            f"{out} lies in the folder of a database, into which nothing is written",
            found=", ".join(sorted(os.listdir(target.parent))[:5]),
            hint="name another target",
        )


def check_parent(out: Path) -> None:
    """Raise :class:`UsageError` unless there is a folder for ``out`` to be made in, which is no database."""
    if not out.parent.is_dir():
        raise UsageError(f"the folder {out.parent} does not exist", hint=f"mkdir -p {out.parent}")
    check_apart(out)


def check_target(out: Path, force: bool) -> None:
    """Raise :class:`UsageError` unless a database may be made at ``out``.

    ``force`` allows to replace a database, but never a folder that holds anything else.
    """
    check_parent(out)
    if out.is_dir() and not out.is_symlink():
        strangers = [name for name in sorted(os.listdir(out)) if not _DATABASE_FILES.fullmatch(name)]
        if strangers:
            raise UsageError(
                f"{out} is a folder with other files in it than those of a database; it stays as it is",
                found=", ".join(strangers[:5]),
                hint="name another target",
            )
        if force or not os.listdir(out):
            return
    elif not os.path.lexists(out):
        return
    else:
        raise UsageError(f"{out} exists and is not the folder of a database", hint="name another target")
    raise UsageError(f"{out} exists already", hint="--force replaces it, or name another target")


def check_file(target: Path, force: bool, source: str) -> None:
    """Raise :class:`UsageError` unless a file made from the data set ``source`` may be written at ``target``."""
    check_parent(target)
    check_apart(target, source)
    if target.is_dir():
        raise UsageError(f"{target} is a folder", expected="the name of a file")
    if target.exists() and not force:
        raise UsageError(f"{target} exists already", hint="--force replaces it, or name another target")
