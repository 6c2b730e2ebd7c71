"""A private view of a LevelDB folder, so that reading one neither locks nor changes it.

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
import re
import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from datasets.errors import DatasetCorrupt, DatasetTruncated, DatasetWarning, NotADataset, SourceError

_PREFIX = "stallscope-leveldb-"
_BLOCK = 32768
_HEADER = 7
_COMPARATOR = b"leveldb.BytewiseComparator"
_STALE_AFTER_S = 60.0
_ATTEMPTS = 3


@dataclass(slots=True)
class TableList:
    """What a MANIFEST says: the live tables (number to size in bytes) and which logs are still to be replayed."""

    tables: dict[int, int] = field(default_factory=dict)
    log: int = 0
    previous_log: int = 0


class PrivateView:
    """A temporary folder that LevelDB may open, lock and rewrite. Goes at :meth:`remove`, at exit, or by a later one.

    Attributes
    ----------
    path: the temporary folder.
    files: names and sizes of the tables and logs that were taken over.

    Tables that are missing or cut are refused, or, where there is a list of ``problems``, put there.
    """

    def __init__(self, folder: str, name: str, problems: list[SourceError] | None = None) -> None:
        _sweep()
        warn_of_writer(folder, name)
        for attempt in range(_ATTEMPTS):
            self.path = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
            self._remover = weakref.finalize(self, _remove, self.path, os.getpid())
            try:
                self.files = _fill(Path(folder), Path(self.path), name, problems)
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


def live_files(folder: Path, manifest: str, name: str) -> TableList:
    """Read a MANIFEST file.

    Raises
    ------
    DatasetCorrupt: it cannot be understood. NotADataset: it belongs to something other than LevelDB.
    """
    found = TableList()
    try:
        for edit in _log_records((folder / manifest).read_bytes()):
            _apply(edit, found, name)
    except (IndexError, ValueError) as error:
        raise DatasetCorrupt(
            f"{name}: {manifest} is damaged", found=str(error), hint="copy the data set again"
        ) from error
    return found


def _fill(folder: Path, view: Path, name: str, problems: list[SourceError] | None) -> dict[str, int]:
    """Populate a view; returns names and sizes of tables and logs."""

    def complain(error: SourceError) -> None:
        if problems is None:
            raise error
        problems.append(error)

    manifest = (folder / "CURRENT").read_bytes().decode("ascii", "replace").strip()
    if not re.fullmatch(r"MANIFEST-\d+", manifest):
        raise DatasetCorrupt(f"{name}: CURRENT names no manifest", expected="MANIFEST-<number>", found=repr(manifest))
    if not (folder / manifest).exists():
        raise DatasetCorrupt(
            f"{name}: CURRENT names {manifest}, which is missing",
            hint="an interrupted copy, most likely: copy it again, or run plyvel.repair_db on a copy",
        )
    (view / "CURRENT").write_text(manifest + "\n", encoding="ascii")
    # Copied before it is read: a live writer may append to the original in between.
    shutil.copyfile(folder / manifest, view / manifest)
    state = live_files(view, manifest, name)
    files: dict[str, int] = {}
    for number, size in sorted(state.tables.items()):
        table = next((f for ending in (".ldb", ".sst") if (f := folder / f"{number:06d}{ending}").exists()), None)
        if table is None:
            complain(
                DatasetCorrupt(
                    f"{name}: table {number:06d}.ldb, which its manifest names, is missing",
                    hint="an interrupted copy, most likely: copy it again",
                )
            )
            continue
        have = table.stat().st_size
        if have != size:
            complain(
                DatasetTruncated(
                    f"{name}: the table {table.name} has not the size its manifest gives",
                    expected=f"{size} bytes",
                    found=f"{have} bytes",
                    hint="an interrupted copy, most likely: copy it again",
                )
            )
        _link(table, view / table.name)
        files[table.name] = have
    for log in sorted(folder.glob("*.log")):
        if log.stem.isdigit() and (int(log.stem) >= state.log or int(log.stem) == state.previous_log):
            shutil.copyfile(log, view / log.name)
            files[log.name] = (view / log.name).stat().st_size
    return files


def _link(table: Path, place: Path) -> None:
    """Hard link, else symbolic link (another file system, somebody else's file), else copy."""
    for make in (os.link, os.symlink):
        try:
            make(table.resolve(), place)
            return
        except OSError:
            continue
    shutil.copyfile(table, place)


def log_fragments(content: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Place, kind (1 whole, 2 first, 3 middle, 4 last) and payload of the fragments in LevelDB's log format.

    A torn fragment at the end is left out, as LevelDB does. Raises ValueError for what is none.
    """
    position = 0
    while position + _HEADER <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        size = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        start, position = position, position + _HEADER + size
        if kind == 0 and size == 0:  # the rest of a preallocated block
            position += _BLOCK - position % _BLOCK
            continue
        if position > len(content):
            break
        if kind not in (1, 2, 3, 4):
            raise ValueError(f"record type {kind} at byte {start + _HEADER - 1}")
        yield start, kind, content[start + _HEADER : position]


def _log_records(content: bytes) -> list[bytes]:
    """The records of a file in LevelDB's log format. A torn last record is left out, as LevelDB does."""
    records: list[bytes] = []
    parts: list[bytes] = []
    for _, kind, payload in log_fragments(content):
        if kind in (1, 2):
            parts.clear()
        parts.append(payload)
        if kind in (1, 4):
            records.append(b"".join(parts))
    return records


def varint(stored: bytes, position: int) -> tuple[int, int]:
    """The number at ``position`` and the position behind it. IndexError where the bytes end."""
    value = shift = 0
    while True:
        byte = stored[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position


def _apply(edit: bytes, state: TableList, name: str) -> None:
    """Apply one version edit: a sequence of tagged fields."""
    position = 0

    def number() -> int:
        nonlocal position
        value, position = varint(edit, position)
        return value

    def text() -> bytes:
        nonlocal position
        size = number()
        if position + size > len(edit):
            raise ValueError("a key runs beyond its record")
        position += size
        return edit[position - size : position]

    while position < len(edit):
        tag = number()
        if tag == 1:
            comparator = text()
            if comparator != _COMPARATOR:
                raise NotADataset(
                    f"{name} orders its keys in a way of its own",
                    expected=_COMPARATOR.decode(),
                    found=comparator.decode("utf-8", "replace"),
                )
        elif tag == 2:
            state.log = number()
        elif tag == 9:
            state.previous_log = number()
        elif tag in (3, 4):  # next file number, last sequence
            number()
        elif tag == 5:  # compaction pointer: level, key
            number()
            text()
        elif tag == 6:  # a table leaves its level
            number()
            state.tables.pop(number(), None)
        elif tag == 7:  # a table enters a level
            number()
            table = number()
            state.tables[table] = number()
            text()
            text()
        else:
            raise NotADataset(
                f"{name} is not a LevelDB: its manifest uses fields that LevelDB does not have",
                found=f"field {tag}",
                hint="RocksDB has the same file names; it is not supported",
            )


def warn_of_writer(folder: str, name: str) -> None:
    """Warn when another process holds the lock of a LevelDB: it may be writing, and this view is a moment of it."""
    try:
        status = os.stat(os.path.join(folder, "LOCK"))
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return  # no lock file, or no such list on this system: nobody to name
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in locks.splitlines():
        words = line.split()
        if place in words and "->" not in words:
            holder = words[words.index(place) - 1]
            warnings.warn(
                f"{name} is held open by process {holder}: reading what it had written so far",
                DatasetWarning,
                stacklevel=2,
            )
            return


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
