"""Rows of HDF5 files read as records: what Caffe's HDF5Data layer does, without loading a file as a whole."""

from __future__ import annotations

import contextlib
import math
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datasets import datum
from datasets.errors import (
    DatasetChanged,
    DatasetCorrupt,
    DatasetTruncated,
    NotADataset,
    SourceClosed,
    SourceError,
    SourceMissing,
)  # fmt: skip
from datasets.paired import PairedRecord
from datasets.sniff import HDF5_MAGIC
from datasets.source import EVERY_TOP, Record, Source
from profiler.errors import UsageError

TOPS = ("data", "label")
_OPEN_FILES = 16
_READ_AT_ONCE = 32 << 20  # bytes of one data set


class Hdf5Source(Source):
    """Rows of one HDF5 file, or of those that a list names (a path on each line), one file after the other.

    Row ``i`` of the data sets ``tops`` makes record ``i``: a Datum whose float_data are the first data set's values;
    those of the others, one after another, are its labels, as from a second source. With one data set the label is 0.
    Only rows that are asked for are read. Files are opened without a lock, at most 16 at a time.

    Parameters
    ----------
    path: an HDF5 file, or the list. tops: names of the data sets; ``EVERY_TOP`` takes all that have numbers and as many
        rows as the first, in the first file, and notes the others.
    root: where the paths of the list begin; None: in the working folder, or where nothing lies there, at the list.

    Attributes
    ----------
    blobs: shape of a row of each data set, which is that of a sample in the net.

    Raises
    ------
    SourceMissing, NotADataset, SourceError: a file is not there, no HDF5, or damaged. UsageError: data sets that are
    not there, hold no numbers, or do not belong together; all that is wrong is told at once.
    """

    backend = "hdf5"

    def __init__(self, path: str, tops: Sequence[str] = TOPS, root: str | None = None) -> None:
        self.path = os.path.abspath(path)
        self.tops = tuple(tops) or TOPS
        self.files = _files(Path(self.path), root)
        self._stamps = [_stamp(file) for file in self.files]
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._pid = os.getpid()
        self._closed = False
        self._notes: list[str] = []
        try:
            if self.tops == EVERY_TOP:
                self.tops, self._notes = _every_top(self._handle(0))
            self._look()
        except BaseException:
            self.close()
            raise

    @property
    def notes(self) -> list[str]:
        return self._notes

    def __len__(self) -> int:
        return self._ends[-1]

    def key(self, index: int) -> bytes:
        return b"%010d" % self._check_index(index)

    def read(self, index: int) -> Record:
        return self.read_many([index])[0]

    def read_many(self, indices: Iterable[int]) -> list[Record]:
        wanted = [self._check_index(index) for index in indices]
        rows: dict[int, list[NDArray[np.float32]]] = {}
        for number, first, last in self._runs(sorted(set(wanted))):
            start = self._ends[number - 1] if number else 0
            parts = [self._slice(number, top, first - start, last - start) for top in self.tops]
            self._check_unchanged(number)
            rows.update((first + i, [part[i] for part in parts]) for i in range(last - first))
        return [self._record(index, rows[index]) for index in wanted]

    def identity(self) -> dict[str, Any]:
        return {
            "path": self.path, "backend": self.backend, "db": None, "records": len(self), "tops": list(self.tops),
            "files": [list(stamp) for stamp in self._stamps],
        }  # fmt: skip

    def close(self) -> None:
        self._closed = True
        self._drop()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict(), "_closed": False}

    # -- rows --------------------------------------------------------------------------------------------------------

    def _record(self, index: int, row: list[NDArray[np.float32]]) -> Record:
        first = row[0]
        channels, height, width = datum.three_sides(first.shape)
        key, where = self.key(index), self._where(index)
        value = datum.serialize(
            channels=channels, height=height, width=width, float_data=first, packed=True,
            label=0 if len(row) == 1 else None,
        )  # fmt: skip
        if len(row) == 1:
            return Record(index, key, value, where)
        labels = np.concatenate([part.reshape(-1) for part in row[1:]])
        text = datum.serialize(channels=len(labels), height=1, width=1, float_data=labels, packed=True)
        return PairedRecord(index, key, value, where, text, f"the data set {' and '.join(self.tops[1:])}")

    def _where(self, index: int) -> str:
        number = bisect_right(self._ends, index)
        row = index - (self._ends[number - 1] if number else 0)
        return f"{self.name}, row {row} of {self.files[number]}"

    def _runs(self, ordered: list[int]) -> Iterator[tuple[int, int, int]]:
        """(file, first, end) of records that follow each other, in pieces that are not too large to be read at once."""
        most = max(1, _READ_AT_ONCE // (4 * max(math.prod(shape) for shape in self.blobs)))
        at = 0
        while at < len(ordered):
            first, number = ordered[at], bisect_right(self._ends, ordered[at])
            last = min(first + most, self._ends[number])
            end = at + 1
            while end < len(ordered) and ordered[end] == ordered[end - 1] + 1 and ordered[end] < last:
                end += 1
            yield number, first, ordered[end - 1] + 1
            at = end

    def _slice(self, number: int, top: str, first: int, last: int) -> NDArray[np.float32]:
        file = self._handle(number)
        try:
            values = file[top][first:last]
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            self._check_unchanged(number)  # a file that was cut is no bad record, which a job may skip
            raise DatasetCorrupt(
                f"rows {first} to {last - 1} of the data set {top!r} in {self.files[number]} cannot be read",
                found=_first_line(error),
                hint="the file is cut or damaged, or a filter it was compressed with is missing: h5dump reads it?",
            ) from error
        # A number that float32 cannot hold becomes infinity, and the record one that cannot be used.
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(values, np.float32)

    # -- files -------------------------------------------------------------------------------------------------------

    def _handle(self, number: int) -> Any:
        if self._closed:
            raise SourceClosed(f"{self.name} was closed")
        if self._pid != os.getpid():  # forked: the handles are the parent's
            self._open, self._pid = OrderedDict(), os.getpid()
        if number not in self._open:
            if _stamp(self.files[number]) != self._stamps[number]:
                raise self._changed(number)
            while len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[number] = _open(self.files[number])
        self._open.move_to_end(number)
        return self._open[number]

    def _check_unchanged(self, number: int) -> None:
        """After each read: beyond the end of a file that was cut, the library gives zeros and no error."""
        status = os.fstat(self._open[number].id.get_vfd_handle())
        size, time_ns = self._stamps[number]
        if status.st_size < size:
            raise DatasetTruncated(
                f"{self.files[number]} became shorter while it was being read",
                expected=f"{size:,} bytes",
                found=f"{status.st_size:,} bytes",
                hint="was it copied over or cut? start again with the whole file",
            )
        if (status.st_size, status.st_mtime_ns) != (size, time_ns):
            raise self._changed(number)

    def _changed(self, number: int) -> DatasetChanged:
        return DatasetChanged(
            f"{self.files[number]} was written to while it was in use", hint="let the writer finish, then start again"
        )

    def _drop(self) -> None:
        with contextlib.ExitStack() as stack:
            for file in self._open.values():
                if self._pid == os.getpid():
                    stack.callback(file.close)
        self._open = OrderedDict()

    def _look(self) -> None:
        """Settle rows and shapes, and refuse what does not belong together."""
        problems: list[str] = []
        lengths: list[int] = []
        shapes: dict[str, tuple[tuple[int, ...], Path]] = {}
        for number, file in enumerate(self.files):
            found = _describe(self._handle(number), self.tops, file, problems)
            for top, shape in found.items():
                before, where = shapes.setdefault(top, (shape[1:], file))
                if before != shape[1:]:
                    problems.append(f"rows of {top!r}: {_text(before)} in {where}, {_text(shape[1:])} in {file}")
            rows = {top: shape[0] for top, shape in found.items()}
            if len(set(rows.values())) > 1:
                told = ", ".join(f"{top} {count:,}" for top, count in rows.items())
                problems.append(f"{file}: the data sets have different numbers of rows: {told}")
            lengths.append(min(rows.values(), default=0))
        if problems:
            shown = "\n  ".join(problems[:20])
            raise UsageError(
                f"{self.name} cannot be used\n  {shown}"
                + (f"\n  and {len(problems) - 20} more" if problems[20:] else ""),
                expected="in each file a data set of numbers for each top, all with the same number of rows",
                hint="data.<phase>.tops (or the tops of the layer) are the names of the data sets",
            )
        self._ends = list(accumulate(lengths))
        self.blobs = tuple(shapes[top][0] for top in self.tops)


def _every_top(file: Any) -> tuple[tuple[str, ...], list[str]]:
    """Names of the data sets whose rows belong together, Caffe's usual names first, and a note of the others."""
    names = sorted(file, key=lambda name: (TOPS.index(name) if name in TOPS else len(TOPS), name))
    taken: list[str] = []
    left: list[str] = []
    for name in names:
        item = file.get(name)
        kind = getattr(getattr(item, "dtype", None), "kind", None)
        if kind is None or kind not in "fiu" or not item.shape or not all(item.shape[1:]):
            left.append(f"{name} (no rows of numbers)")
        elif taken and item.shape[0] != file[taken[0]].shape[0]:
            left.append(f"{name} ({item.shape[0]:,} rows, {taken[0]} has {file[taken[0]].shape[0]:,})")
        else:
            taken.append(name)
    return tuple(taken) or TOPS, [f"data sets left alone: {', '.join(left)}"] if left else []


def _describe(file: Any, tops: Sequence[str], path: Path, problems: list[str]) -> dict[str, tuple[int, ...]]:
    """Shape of each data set; what cannot be used is added to ``problems``."""
    found = {}
    for top in tops:
        item = file.get(top)
        kind = getattr(getattr(item, "dtype", None), "kind", None)
        if item is None:
            names = ", ".join(map(repr, list(file)[:8])) or "nothing"
            problems.append(f"{path}: there is no data set {top!r}; it holds {names}")
        elif kind is None:
            problems.append(f"{path}: {top!r} is a group and no data set")
        elif kind not in "fiu":
            problems.append(f"{path}: {top!r} holds {item.dtype}, not numbers")
        elif not item.shape:
            problems.append(f"{path}: {top!r} is one value and has no rows")
        elif not all(item.shape[1:]):
            problems.append(f"{path}: the rows of {top!r} are empty: {_text(item.shape)}")
        else:
            found[top] = tuple(int(size) for size in item.shape)
    return found


def _files(path: Path, root: str | None) -> list[Path]:
    try:
        with open(path, "rb") as stream:
            if stream.read(len(HDF5_MAGIC)) == HDF5_MAGIC:
                return [path]
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise SourceMissing(f"there is no file {path}", expected="an HDF5 file, or a list of them") from None
    except (OSError, UnicodeDecodeError) as error:
        raise NotADataset(
            f"{path} cannot be read as a list of HDF5 files", expected="a path on each line", found=_first_line(error)
        ) from error
    files, missing = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        file = place_of(line.strip(), path, root)
        if not file.is_file():
            missing.append(f"line {number}: {file}")
        files.append(file)
    if missing:
        raise SourceMissing(
            f"the list {path} names {len(missing)} file(s) that are not there",
            found="; ".join(missing[:10]) + (f" and {len(missing) - 10} more" if missing[10:] else ""),
            hint="data.<phase>.root is the folder where the paths of a list begin",
        )
    if not files:
        raise NotADataset(f"the list {path} is empty", expected="the path of an HDF5 file on each line")
    return files


def place_of(name: str, path: Path, root: str | None) -> Path:
    """The file that a line of a list means: from ``root``; without one, from the working folder or else the list's."""
    if root is not None:
        return Path(root).absolute() / name
    here = Path(name).absolute()
    return here if here.exists() else path.absolute().parent / name


def _open(file: Path) -> Any:
    import h5py

    try:
        return h5py.File(file, "r", locking=False)
    except OSError as error:
        with open(file, "rb") as stream:
            magic = stream.read(len(HDF5_MAGIC))
        if magic != HDF5_MAGIC:
            raise NotADataset(f"{file} is no HDF5 file", found=f"bytes {magic.hex(' ')}") from error
        raise SourceError(
            f"the HDF5 file {file} cannot be opened",
            found=_first_line(error),
            hint="it is cut or damaged, or its writer has not closed it",
        ) from error


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one value"
