"""Inputs that can only be read from front to back: archives and columns.

To shuffle them, an index is made first: where each sample lies, or, where its place cannot be addressed (compressed
archives, Parquet), a copy of its bytes in a file of the conversion's temporary folder. In source order they are
converted as they come, and nothing is copied.
"""

from __future__ import annotations

import glob
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from datasets.convert_inputs import (
    Converted,
    ImageOptions,
    InputError,
    Inputs,
    Job,
    Problems,
    fingerprint_of,
    image_datum,
)
from datasets.order import Order
from datasets.writer import check_free

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
ALONE = -2
_COPIED = -1
_MOST_FILES = 1_000_000
_ENTRY = np.dtype(
    [
        ("text", "<u8"), ("texts", "<u4"), ("suffix", "<u4"), ("file", "<i4"), ("offset", "<u8"), ("size", "<u8"),
        ("label", "<i4"), ("bad", "?"),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One image file with its label; or, with ``problem``, the reason why there is none.

    stored: its bytes; None where they lie uncompressed in file number ``file``, from ``offset``, ``size`` bytes, or
        where they are the file ``where`` (``file`` is then ``ALONE``).
    """

    where: str
    suffix: str = ""
    label: int = 0
    stored: bytes | None = None
    file: int = _COPIED
    offset: int = 0
    size: int = 0
    problem: str | None = None


class SampleStream(ABC):
    """Samples in the order of their source.

    Attributes
    ----------
    count: number of samples, None where it takes reading everything.
    """

    count: int | None = None
    classes: list[str] | None = None

    def __init__(self, files: list[Path], options: ImageOptions) -> None:
        self.files = files
        self.options = options
        self.notes: list[str] = []
        self.left_out: list[str] = []

    @abstractmethod
    def samples(self) -> Iterator[Sample]:
        """All samples; each call begins anew, and empties ``left_out`` first."""

    def fingerprint(self) -> str:
        return fingerprint_of(self.files)

    def convert(self, sample: Sample) -> Converted:
        """Raises :class:`StallscopeError` if the sample cannot be read."""
        if sample.problem is not None:
            raise InputError(sample.problem)
        stored = sample.stored
        if stored is None:
            path = Path(sample.where) if sample.file == ALONE else self.files[sample.file]
            stored = read_at(path, sample.offset, sample.size)
        return image_datum(stored, sample.label, sample.where, self.options)


class Unshuffled(Inputs):
    """A stream in its own order, converted as it comes."""

    def __init__(self, stream: SampleStream) -> None:
        super().__init__()
        self.stream = stream
        self.options = stream.options
        self.classes = stream.classes
        self.notes = stream.notes
        self.left_out = stream.left_out

    def __len__(self) -> int:
        """0 where the number is not known yet."""
        return self.stream.count or 0

    def convert(self, index: int) -> Converted:
        raise TypeError("a stream is read from front to back")

    def fingerprint(self) -> str:
        return self.stream.fingerprint()

    def jobs(self, order: Order, start: int) -> Iterator[Job]:
        for place, sample in enumerate(self.stream.samples()):
            if place >= start:
                yield Job(place, sample.suffix, partial(self.stream.convert, sample))


class Indexed(Inputs):
    """A stream that can be addressed by position, thanks to files in ``folder`` (see the module's text)."""

    def __init__(self, stream: SampleStream, folder: Path) -> None:
        super().__init__()
        self.stream = stream
        self.options = stream.options
        self.classes = stream.classes
        self.notes = stream.notes
        self._data = folder / "data"
        self._entries = np.memmap(folder / "index", _ENTRY, "r")
        self._texts = open(folder / "texts", "rb")  # noqa: SIM115 - open as long as the object
        left_out = folder / "left_out"
        self.left_out = left_out.read_text(encoding="utf-8", errors="surrogateescape").splitlines()

    def __len__(self) -> int:
        return len(self._entries)

    def fingerprint(self) -> str:
        return self.stream.fingerprint()

    def close(self) -> None:
        self._texts.close()

    def _text(self, index: int) -> tuple[str, str]:
        """Suffix of the key, and the sample's name for errors (or the error)."""
        entry = self._entries[index]
        text = os.pread(self._texts.fileno(), int(entry["texts"]), int(entry["text"]))
        split = int(entry["suffix"])
        return text[:split].decode("utf-8", "surrogateescape"), text[split:].decode("utf-8", "surrogateescape")

    def suffix(self, index: int) -> str:
        return self._text(index)[0]

    def convert(self, index: int) -> Converted:
        entry = self._entries[index]
        where = self._text(index)[1]
        if entry["bad"]:
            raise InputError(where)
        file = int(entry["file"])
        path = self._data if file == _COPIED else Path(where) if file == ALONE else self.stream.files[file]
        stored = read_at(path, int(entry["offset"]), int(entry["size"]))
        return image_datum(stored, int(entry["label"]), where, self.stream.options)


def index(stream: SampleStream, folder: Path, *, skip: bool, progress: Callable[[int], object]) -> Indexed:
    """Make the index of a stream in ``folder``, or take the one that an interrupted conversion has completed.

    skip: samples with a problem are left to be skipped later; otherwise :class:`InputError` lists them.
    """
    if not (folder / "index").exists():
        folder.mkdir(parents=True, exist_ok=True)
        more = f" and {len(stream.files) - 1} more files" if stream.files[1:] else ""
        problems = Problems(f"{stream.files[0]}{more}", hint="--on-error skip leaves them out (exit code 1)")
        with open(folder / "data", "wb") as data, open(folder / "texts", "wb") as texts:
            with open(folder / "index.part", "wb") as entries:
                for number, sample in enumerate(stream.samples()):
                    if sample.problem is not None:
                        problems.add(sample.problem, sample.where)
                    _append(sample, data, texts, entries, folder)
                    if number % 100 == 99:
                        progress(number + 1)
            for file in (data, texts):
                file.flush()
                os.fsync(file.fileno())
        left_out = "".join(line.replace("\n", " ") + "\n" for line in stream.left_out)
        (folder / "left_out").write_text(left_out, encoding="utf-8", errors="surrogateescape")
        if not skip:
            problems.raise_any()
        if not (folder / "index.part").stat().st_size:
            raise InputError(f"there are no samples in {stream.files[0]}", found=stream.left_out[:1] or None)
        os.replace(folder / "index.part", folder / "index")
    return Indexed(stream, folder)


def _append(sample: Sample, data: BinaryIO, texts: BinaryIO, entries: BinaryIO, folder: Path) -> None:
    suffix = sample.suffix.encode("utf-8", "surrogateescape")
    where = (sample.problem or sample.where).encode("utf-8", "surrogateescape")
    file, offset, size = sample.file, sample.offset, sample.size
    if sample.stored is not None:
        file = _COPIED
        offset, size = data.tell(), len(sample.stored)
        if offset >> 24 != (offset + size) >> 24:  # now and then
            check_free(folder, size, "the copy of the samples that shuffling needs (--shuffle off needs none)")
        data.write(sample.stored)
    entry = (
        texts.tell(), len(suffix) + len(where), len(suffix), file, offset, size, sample.label,
        sample.problem is not None,
    )  # fmt: skip
    texts.write(suffix + where)
    entries.write(np.array([entry], _ENTRY).tobytes())


def read_at(path: Path, offset: int, size: int) -> bytes:
    """Raises :class:`InputError` if the bytes are not there."""
    try:
        with open(path, "rb", buffering=0) as file:
            stored = os.pread(file.fileno(), size, offset)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if len(stored) != size:
        raise InputError(f"{path} was cut while it was read", expected=f"{offset + size} bytes")
    return stored


def expand(sources: Sequence[str], endings: tuple[str, ...]) -> list[Path]:
    """The files that paths, folders, globs and brace patterns (``{000..015}``, ``{a,b}``) stand for, in order.

    Raises :class:`InputError` that lists what does not exist.
    """
    files: list[Path] = []
    missing: list[str] = []
    for source in sources:
        for name in [source] if os.path.exists(source) else _braces(source):
            path = Path(name)
            if path.is_dir():
                found = sorted(entry for entry in path.iterdir() if entry.name.lower().endswith(endings))
            elif path.exists():
                found = [path]
            else:
                found = [Path(entry) for entry in sorted(glob.glob(name))]
            files += found
            if not found:
                missing.append(f"in the folder {name}" if path.is_dir() else f"at {name}")
    if missing:
        raise InputError(
            f"{len(missing)} of the source's files do not exist" if files else "the source does not exist or is empty",
            expected=f"files or folders of files that end in {' or '.join(endings)}",
            found="nothing " + ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else ""),
        )
    unique = list(dict.fromkeys(files))
    if len(unique) < len(files):
        raise InputError("a file of the source is named more than once", found=len(files) - len(unique))
    return unique


def _braces(pattern: str) -> list[str]:
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    numbers = _RANGE.fullmatch(match[1])
    if numbers:
        first, last = int(numbers[1]), int(numbers[2])
        if abs(last - first) >= _MOST_FILES:
            raise InputError(f"{pattern} stands for too many files", expected=f"at most {_MOST_FILES}")
        width = max(len(numbers[1]), len(numbers[2])) if "0" in (numbers[1][0], numbers[2][0]) else 0
        parts = [f"{number:0{width}d}" for number in range(first, last + 1)]
    else:
        parts = match[1].split(",")
    rest = _braces(pattern[match.end() :])
    return [pattern[: match.start()] + part + end for part in parts for end in rest]
