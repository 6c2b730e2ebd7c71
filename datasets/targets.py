"""Where a command may write: never into a data set, whatever else it is told."""

from __future__ import annotations

import os
from pathlib import Path

from profiler.errors import UsageError

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


def check_file(target: Path, force: bool, source: str) -> None:
    """Raise :class:`UsageError` unless a file made from the data set ``source`` may be written at ``target``."""
    check_parent(target)
    check_apart(target, source)
    if target.is_dir():
        raise UsageError(f"{target} is a folder", expected="the name of a file")
    if target.exists() and not force:
        raise UsageError(f"{target} exists already", hint="--force replaces it, or name another target")
