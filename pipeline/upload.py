"""What ``ray job submit --working-dir FOLDER`` would upload: ``python -m pipeline.upload [FOLDER] [--write]``.

Ray puts the whole folder into the memory of the cluster's head, and says nothing of what is large in it. A job needs
code: data sets and weights are named by their paths and read where they lie.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from profiler import cli
from profiler.errors import StallscopeError, UsageError

PATTERNS = (
    ".git/", "*.mdb", "*_lmdb/", "*_leveldb/", "*.ldb", "*.sst", "*.caffemodel", "*.caffemodel.h5", "*.solverstate",
    "*.solverstate.h5",
)  # fmt: skip
"""Lines of a .rayignore: databases, weights, states, and git's own folder. Not the package ``datasets``."""


@dataclass(frozen=True)
class Survey:
    """``files``: (bytes, path below the folder), the largest first; ``data``: those of them that no job needs sent;
    ``most_bytes``: what Ray takes."""

    files: tuple[tuple[int, str], ...]
    data: tuple[str, ...]
    most_bytes: int

    @property
    def nbytes(self) -> int:
        return sum(size for size, _ in self.files)

    @property
    def fine(self) -> bool:
        return not self.data and self.nbytes < self.most_bytes


def survey(folder: Path) -> Survey:
    """What Ray would upload, by Ray's own rules (.gitignore, .rayignore, its defaults). Reads no file.

    Raises :class:`UsageError` for what is no folder, :class:`StallscopeError` where this Ray has other rules.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="name the one that --working-dir gets")
    try:
        from ray._private import ray_constants
        from ray._private.runtime_env import packaging

        excludes = [packaging._get_excludes(folder, ray_constants.get_runtime_env_default_excludes())]
        travel, most = packaging._dir_travel, int(packaging.GCS_STORAGE_MAX_SIZE)
    except (ImportError, AttributeError) as error:
        raise StallscopeError(
            "this version of Ray does not tell what it would upload", found=error, hint="ray 2.60 does"
        ) from error
    found: list[tuple[int, str]] = []

    def take(path: Path) -> None:
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            found.append((status.st_size, str(path.relative_to(folder))))

    travel(folder, excludes, take, include_gitignore=True)
    found.sort(key=lambda entry: (-entry[0], entry[1]))
    return Survey(tuple(found), tuple(name for _, name in found if _is_data(name)), most)


def _is_data(name: str) -> bool:
    *folders, file = name.split("/")
    for pattern in PATTERNS:
        whole = pattern.rstrip("/")
        if any(fnmatch(folder, whole) for folder in folders) or (whole == pattern and fnmatch(file, pattern)):
            return True
    return False


def write(folder: Path) -> list[str]:
    """Add the patterns that ``FOLDER/.rayignore`` lacks; returns them."""
    path = folder / ".rayignore"
    text = path.read_text() if path.exists() else ""
    missing = [pattern for pattern in PATTERNS if pattern not in text.splitlines()]
    if missing:
        path.write_text(text + ("\n" if text and not text.endswith("\n") else "") + "\n".join(missing) + "\n")
    return missing


def main(argv: Sequence[str] | None = None) -> int:
    """Show what Ray would upload with a folder, the five largest files of it, and what no job needs sent."""
    parser = cli.Parser(prog="python -m pipeline.upload", description=main.__doc__)
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default=Path(), type=Path, help="default: this folder")
    parser.add_argument(
        "--write", action="store_true", help="write FOLDER/.rayignore: no databases, no weights, no .git"
    )
    arguments: argparse.Namespace = parser.parse_args(argv)
    folder = arguments.folder.resolve()
    if arguments.write and folder.is_dir() and (added := write(folder)):
        sys.stdout.write(f"{folder}/.rayignore: {', '.join(added)}\n")
    found = survey(folder)
    sys.stdout.write(f"{folder}: {len(found.files):,} files, {found.nbytes / 2**20:,.1f} MiB\n")
    for size, name in found.files[:5]:
        sys.stdout.write(f"  {size / 2**20:10,.1f} MiB  {name}\n")
    if found.data:
        listed = ", ".join(found.data[:5]) + (", ..." if len(found.data) > 5 else "")
        sys.stdout.write(f"Not to be sent, since jobs read it by its path: {listed}. --write keeps it out.\n")
    if found.nbytes >= found.most_bytes:
        sys.stdout.write(
            f"Ray takes {found.most_bytes / 2**20:,.0f} MiB: name what is too large in {folder}/.rayignore.\n"
        )
    return cli.EXIT_OK if found.fine else cli.EXIT_NOT_FINE


if __name__ == "__main__":
    cli.run(main)
