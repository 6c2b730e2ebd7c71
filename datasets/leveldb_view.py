"""A private view of a LevelDB folder, so that LevelDB's own library neither locks nor changes it.

For verify and salvage, where that library repairs what is damaged; reading needs none (:mod:`datasets.leveldb_reader`).

LevelDB has no reading mode: opening takes a lock, replays the log into new tables, rotates files and deletes what the
manifest does not name. The view is a temporary folder for all of that: small files are copied, and the tables the
manifest names are hard-linked (a symbolic link or a copy where that is impossible). Tables that the manifest does not
name stay out: LevelDB may reuse their numbers, and would then write through the link into the original.

LevelDB may compact what it opens. It does so inside the view, so the temporary folder needs room for that: the
size of the log, and at worst that of the data set.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import warnings
import weakref
from pathlib import Path

from datasets.errors import DatasetWarning, SourceError
from datasets.leveldb_files import listing
from datasets.writers import lock_holders

_PREFIX = "stallscope-leveldb-"
_STALE_AFTER_S = 60.0
_ATTEMPTS = 3


class PrivateView:
    """A temporary folder that LevelDB may open, lock and rewrite. Goes at :meth:`remove`, at exit, or by a later one.

    Attributes
    ----------
    path: the temporary folder.
    files: names and sizes of the tables and logs that were taken over.
    ranges: the first and the last key of each table.
    manifest: name of the manifest.

    Tables that are missing or cut are refused, or, where there is a list of ``problems``, put there.
    """

    def __init__(self, folder: str, name: str, problems: list[SourceError] | None = None) -> None:
        _sweep()
        warn_of_writer(folder, name)
        for attempt in range(_ATTEMPTS):
            self.path = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
            self._remover = weakref.finalize(self, _remove, self.path, os.getpid())
            try:
                self.files: dict[str, int] = {}
                self.ranges: dict[str, tuple[bytes, bytes]] = {}
                self._fill(Path(folder), Path(self.path), name, problems)
                return
            except FileNotFoundError as error:
                # A live writer replaced a file between listing and copying: look again.
                self.remove()
                if attempt == _ATTEMPTS - 1:
                    raise SourceError(
                        f"{name} keeps changing while it is read", found=f"{error.filename} vanished"
                    ) from error
            except PermissionError as error:
                self.remove()
                raise SourceError(
                    f"no permission to read {error.filename}", hint="check the modes of the data set's files"
                ) from error
            except BaseException:
                self.remove()
                raise

    def remove(self) -> None:
        """Remove the folder. Idempotent; does nothing in a forked child."""
        self._remover()

    def _fill(self, folder: Path, view: Path, name: str, problems: list[SourceError] | None) -> None:
        """Populate the view."""

        def complain(error: SourceError) -> None:
            if problems is None:
                raise error
            problems.append(error)

        found = listing(folder, name, complain)
        self.manifest = found.manifest
        (view / "CURRENT").write_text(found.manifest + "\n", encoding="ascii")
        (view / found.manifest).write_bytes(found.content)  # the original may have grown since: a live writer's
        for table, said in found.tables.items():
            _link(folder / table, view / table)
            self.files[table] = (view / table).stat().st_size
            self.ranges[table] = (said.first, said.last)
        for log in found.logs:
            shutil.copyfile(folder / log, view / log)
            self.files[log] = (view / log).stat().st_size


def _link(table: Path, place: Path) -> None:
    """Hard link, else symbolic link (another file system, somebody else's file), else copy."""
    for make in (os.link, os.symlink):
        try:
            make(table.resolve(), place)
            return
        except OSError:
            continue
    shutil.copyfile(table, place)


def warn_of_writer(folder: str, name: str) -> None:
    """Warn when somebody holds the lock of a LevelDB: they may be writing, and this view is a moment of it."""
    try:
        holders = lock_holders(os.stat(os.path.join(folder, "LOCK")))
    except OSError:
        return  # no lock file: nobody to name
    for holder in holders:
        who = f"this process ({holder})" if holder == os.getpid() else f"process {holder}"
        warnings.warn(
            f"{name} is held open by {who}: reading what had been written so far",
            DatasetWarning,
            stacklevel=2,
        )


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)


def _sweep() -> None:
    """Remove views whose process was killed before it could do so itself."""
    for view in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        try:
            status = view.lstat()
            owner = int(view.name[len(_PREFIX) :].split("-")[0])
            ours = status.st_uid == os.getuid() and not view.is_symlink()
            if ours and time.time() - status.st_mtime > _STALE_AFTER_S and not _may_live(owner, view):
                shutil.rmtree(view, ignore_errors=True)
        except (OSError, ValueError):
            continue  # gone meanwhile, or not one of ours


def _may_live(pid: int, view: Path) -> bool:
    if pid == os.getpid():
        return True  # trying our own lock would give it up
    try:
        # LevelDB holds this lock as long as a process, perhaps in another container that shares the folder, reads.
        with open(view / "LOCK", "r+b") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return os.path.exists(f"/proc/{pid}")
    except OSError:
        return True
    return False
