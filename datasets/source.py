"""One way to read records, whatever stores them: ``open_source(path)`` finds out what lies there.

A source is addressed by position in the byte order of its keys: 0 .. len - 1. So '10' comes before '2': numbers need
padding to come in numeric order (``python -m datasets.inspect`` warns where they have none). It opens lazily in the
process that reads: pickling it drops every handle, and a copy in another process (spawned or forked) opens for itself.
Nothing here ever creates, locks or writes anything in a data set's folder, unless locking is asked for.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from datasets.errors import ManifestMismatch, WrongBackend
from datasets.patience import check_that_it_answers
from datasets.sniff import sniff
from profiler.errors import StallscopeError, UsageError

BACKENDS = ("lmdb", "leveldb", "list", "hdf5")
MEMORY_PREFIX = "memory:"
EVERY_TOP = ("*",)
"""In place of names: all data sets of an HDF5 file whose rows belong to those of its first one."""
_KINDS = {"lmdb": "LMDB ", "leveldb": "LevelDB ", "list": "list of images ", "hdf5": "set of HDF5 files "}


@dataclass(frozen=True, slots=True)
class Record:
    """One stored record. ``str(record)`` names it for an error: position, key, data set.

    Attributes
    ----------
    index: position in the byte order of the keys.
    key, value: the stored bytes, copied out of the database.
    source: what it was read from, as text.
    """

    index: int
    key: bytes
    value: bytes = field(repr=False)
    source: str = ""

    def __str__(self) -> str:
        return describe_record(self.source, self.index, self.key)


def describe_record(source: str, index: int, key: bytes) -> str:
    """The words by which every error of this package names a record."""
    return f"record {index} (key {show_key(key)}) of {source}"


def show_key(key: bytes) -> str:
    """A key as text in quotes; bytes that are no UTF-8 are escaped, long keys are cut."""
    text = key[:120].decode("utf-8", "backslashreplace")
    return repr(text) + ("…" if len(key) > 120 else "")


def show_text(text: str) -> str:
    """Text that came with a data set, harmless to a terminal or a page: what does not print as an escape.

    Control characters could move the cursor, and marks of direction (U+202E) turn round what stands beside them.
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class Source(ABC):
    """Records at rest. One thread at a time; any number of processes, each with its own copy.

    Attributes
    ----------
    path: absolute path of the database (folder or file), or the ``memory:`` specification.
    backend: ``lmdb``, ``leveldb``, ``list``, ``hdf5`` or ``memory``.
    db: name of the sub-database, LMDB only.
    blobs: shapes of what one record is in a net, where they are not a picture (C, H, W) and a label: of the sample,
        and of each blob that has a part of the label's numbers. tops: names of the data sets of HDF5 files, one a blob.
    """

    path: str
    backend: str
    db: str | None = None
    blobs: tuple[tuple[int, ...], ...] = ()
    tops: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """What a person should know about the data set as a whole, though it can be used."""
        return []

    @property
    def name(self) -> str:
        """Kind and path, as errors show them."""
        kind = _KINDS.get(self.backend, "")
        return f"{kind}{self.path}" + (f" (database '{self.db}')" if self.db is not None else "")

    @abstractmethod
    def __len__(self) -> int:
        """Number of records."""

    @abstractmethod
    def key(self, index: int) -> bytes:
        """The key of record ``index``; keys ascend in byte order."""

    @abstractmethod
    def read(self, index: int) -> Record:
        """Record ``index``, copied out of the database."""

    def read_many(self, indices: Iterable[int]) -> list[Record]:
        """The records of ``indices``, in that order; an index may come several times."""
        return [self.read(int(index)) for index in indices]

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """path, backend, records, and what changes when the content changes; plain JSON values."""

    @abstractmethod
    def close(self) -> None:
        """Give back every handle. Idempotent. A pickled copy of a closed source opens anew."""

    def describe(self, index: int) -> str:
        """Names record ``index`` for an error, with its key where the key can be read."""
        try:
            key = self.key(index)
        except (StallscopeError, IndexError):
            return f"record {index} of {self.name}"
        return describe_record(self.name, index, key)

    def _check_index(self, index: int) -> int:
        index = int(index)
        records = len(self)
        if not 0 <= index < records:
            raise IndexError(f"{self.name} has records 0..{records - 1}, not {index}")
        return index

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


def open_source(
    path: str | os.PathLike[str],
    *,
    backend: str | None = None,
    db: str | None = None,
    readahead: bool = True,
    lock: bool = False,
    root: str | None = None,
    tops: Sequence[str] = (),
    tolerant: bool = False,
) -> Source:
    """Open a data set of records for reading.

    Parameters
    ----------
    path: folder of an LMDB or LevelDB, an LMDB in a single file, the path of a ``data.mdb``, a list of image files
        (:mod:`datasets.image_list_source`), an HDF5 file or a list of them (:mod:`datasets.hdf5_source`), or a
        specification that begins with ``memory:`` (see :mod:`datasets.memory_source`).
    backend: ``lmdb``, ``leveldb``, ``list`` or ``hdf5``, in either case of letters. Left out, what lies there decides.
        Named and wrong, it is refused.
    db: a named sub-database; LMDB only.
    readahead: whether the system reads ahead in an LMDB: on for reading in order, off for shuffled reading. No effect
        on other kinds.
    lock: LMDB only: take a slot in its lock table (this writes to ``lock.mdb``), so that a writer keeps the pages that
        are read. Not needed where nobody writes. A commit ends the reading either way.
    root, tops: of lists and HDF5 files: where their paths begin, and the names of the data sets, or ``EVERY_TOP``.
    tolerant: lines of a list of images that cannot be used, and damaged pages of an LMDB whose keys are padded numbers,
        are records that cannot be read, no reason to refuse it.

    Raises
    ------
    EmptyPath, SourceMissing, EmptyFolder, NotADataset, CurrentMissing, WrongBackend: what lies at the path.
    DatasetTruncated, DatasetCorrupt: the database is there and damaged.
    LockRefused, ReadersFull: locking was asked for, and there is no lock table to write to, or no slot left.
    SourceError: it cannot be opened, or the file system does not answer within a minute.
    ManifestMismatch: a manifest beside the data set says something else.
    """
    place, found = locate(path, backend=backend, db=db)
    if lock and found != "lmdb":
        raise UsageError(f"{place} is no LMDB: only an LMDB has a lock table for readers", found="lock asked for")
    if found == "memory":
        from datasets.memory_source import open_memory

        return open_memory(place)
    if found == "list":
        from datasets.image_list_source import ImageListSource

        return ImageListSource(place, root, tolerant=tolerant)
    if found == "hdf5":
        from datasets.hdf5_source import Hdf5Source

        return Hdf5Source(place, tops, root)
    source: Source
    if found == "lmdb":
        from datasets.lmdb_source import LmdbSource

        source = LmdbSource(place, db=db, readahead=readahead, lock=lock, tolerant=tolerant)
    else:
        from datasets.leveldb_source import LevelDbSource

        source = LevelDbSource(place)
    try:
        _check_manifest(source)
    except BaseException:
        source.close()
        raise
    return source


def locate(path: str | os.PathLike[str], *, backend: str | None = None, db: str | None = None) -> tuple[str, str]:
    """Absolute path and kind (``lmdb``, ``leveldb``, ``memory``) of a data set, told without opening it.

    Parameters and refusals are those of :func:`open_source`, as far as they need no look into the database.
    """
    text = os.fspath(path)
    wanted = _checked_backend(backend)
    if text.startswith(MEMORY_PREFIX):
        if wanted or db is not None:
            raise UsageError(f"'{text}' lies in memory: it has neither a backend nor a named database")
        return text, "memory"
    if text.strip():
        check_that_it_answers(text)
    place, found = sniff(text, wanted)
    if wanted and wanted != found:
        raise WrongBackend(
            f"{place}: the folder holds {found.upper()}, the configuration says {wanted.upper()}",
            expected=f"backend {found.upper()}, or none: then what lies there decides",
            found=f"backend {wanted.upper()}",
            hint="leave the backend out (Caffe's own default is LEVELDB), or check the path",
        )
    if found != "lmdb" and db is not None:
        kind = _KINDS.get(found, "no database").strip()
        raise UsageError(f"{place} is a {kind}, which has no named databases", found=f"db '{db}'")
    return place, found


def _checked_backend(backend: str | None) -> str | None:
    if backend is None:
        return None
    if backend.lower() not in BACKENDS:
        raise UsageError("unknown database backend", expected=", ".join(BACKENDS), found=backend)
    return backend.lower()


def manifest_path(path: str | os.PathLike[str]) -> Path:
    """Where the manifest of a database lies: beside its folder or file, never inside it."""
    place = os.path.abspath(os.fspath(path))
    if os.path.basename(place) == "data.mdb":
        place = os.path.dirname(place)
    return Path(place + ".manifest.json")


def _told(about: dict[str, object]) -> str:
    return ", ".join(
        f"{value} {name}" if name == "records" else f"{name} {show_text(str(value))}" for name, value in about.items()
    )


def _check_manifest(source: Source) -> None:
    """Refuse a database that is not what its manifest says. Opens it, so damage shows now and not during a run."""
    from datasets.manifest import key_text, read_manifest

    records = len(source)
    manifest = read_manifest(source.path)
    if manifest is None or source.db is not None:  # a manifest speaks of the unnamed database
        return
    found: dict[str, object] = {"records": records}
    told: dict[str, object] = {"records": manifest.records}
    if records and manifest.records == records:
        found |= {"first key": key_text(source.key(0)), "last key": key_text(source.key(records - 1))}
        told |= {"first key": manifest.first_key, "last key": manifest.last_key}
    if found != told:
        raise ManifestMismatch(
            f"{source.name} does not hold what its manifest {manifest_path(source.path)} says",
            expected=_told(told),
            found=_told(found),
            hint="the conversion or a copy was interrupted (a cut write-ahead log loses records silently): convert or "
            "copy again, or remove the manifest to read what is there",
        )
