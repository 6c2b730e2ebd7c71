"""WebDataset archives as input: files of one name, an image and its label, one after the other in .tar or .tar.gz.

Members are read where they lie; nothing is ever unpacked under a name that an archive chose.
"""

from __future__ import annotations

import gzip
import json
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from datasets.convert_inputs import IMAGE_SUFFIXES, INT32, MAX_FILE_BYTES, ImageOptions
from datasets.convert_stream import Sample, SampleStream, expand
from profiler.errors import StallscopeError

_ENDINGS = (".tar", ".tar.gz", ".tgz")
_LABEL_BYTES = 1 << 20
_WHOLE = re.compile(r"[+-]?[0-9]+")
_LISTED = 100_000
_LONGEST_LABEL = 100
"""Characters of a label in a .cls file: leading zeros are some people's habit, more than this is no label."""
_TOGETHER = "the files of one sample must follow one another"


class Archives(SampleStream):
    """Samples of .tar and .tar.gz files.

    Parameters
    ----------
    label_key: the key of the label in a sample's .json file; used where there is no .cls file.
    image: ending of the image where samples have several, without the first dot.
    """

    def __init__(self, files: list[Path], options: ImageOptions, label_key: str, image: str | None) -> None:
        super().__init__(files, options)
        self.label_key = label_key
        self.image = image

    def samples(self) -> Iterator[Sample]:
        self.left_out.clear()
        for number, path in enumerate(self.files):
            group: _Group | None = None
            whole = True  # whether the last member of the group could be read
            try:
                for archive, member, packed in _members(path):
                    reason = _unsafe(member)
                    if reason is not None:
                        if reason and len(self.left_out) < _LISTED:
                            self.left_out.append(f"{path}: {member.name!a} was ignored: {reason}")
                        continue
                    base, ending = _split(member.name)
                    if group is not None and group.base != base:
                        yield from group.sample(self)
                        group = None
                    if group is None:
                        group = _Group(base, path, number)
                    whole = False
                    group.add(archive, member, ending, packed, self)
                    whole = True
            except StallscopeError as error:
                yield Sample(str(path), problem=error.what)
            except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
                if group is None:
                    last = "at its beginning"
                elif whole and group.complete:
                    yield from group.sample(self)
                    last = f"after the sample {group.base}"
                else:
                    last = f"in or after the sample {group.base}, which is left out"
                yield Sample(str(path), problem=f"{path} is damaged or cut {last}: {error}")
            else:
                if group is not None:
                    yield from group.sample(self)


class _Group:
    """The members of one sample, as they come."""

    def __init__(self, base: str, path: Path, number: int) -> None:
        self.base = base
        self.path = path
        self.number = number
        self.images: list[tuple[str, tarfile.TarInfo, bytes | None]] = []
        self.cls: bytes | None = None
        self.json: bytes | None = None
        self.problem: str | None = None

    @property
    def where(self) -> str:
        return f"{self.path}: {self.base}"

    @property
    def complete(self) -> bool:
        """Whether there are an image, all of it, and a label: what is damaged after them does not touch the sample."""
        size = self.path.stat().st_size
        there = all(data is not None or info.offset_data + info.size <= size for _, info, data in self.images)
        return bool(self.images) and there and (self.cls is not None or self.json is not None)

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo, ending: str, packed: bool, to: Archives) -> None:
        kind = "." + ending.rpartition(".")[2]
        if ending == to.image or (to.image is None and kind in IMAGE_SUFFIXES):
            if member.size > MAX_FILE_BYTES:
                self.problem = f"{self.where}.{ending} is larger than {MAX_FILE_BYTES >> 20} MiB: that is no image"
            elif any(ending == other for other, _, _ in self.images):
                self.problem = f"{self.where}.{ending} is there twice"
            else:
                self.images.append((ending, member, _content(archive, member) if packed else None))
        elif ending in ("cls", "json"):
            if member.size > _LABEL_BYTES:
                self.problem = f"{self.where}.{ending} is larger than 1 MiB: that is no label"
            else:
                setattr(self, ending, _content(archive, member))

    def sample(self, to: Archives) -> Iterator[Sample]:
        try:
            if self.problem:
                raise ValueError(self.problem)
            if not self.images:
                ending = f" .{to.image}" if to.image else ""
                raise ValueError(f"{self.where} has no image{ending} next to it ({_TOGETHER})")
            if len(self.images) > 1:
                endings = ", ".join(ending for ending, _, _ in self.images)
                raise ValueError(f"{self.where} has several images ({endings}): choose with --image ENDING")
            label = self._label(to.label_key)
        except ValueError as error:
            yield Sample(self.where, problem=str(error))
            return
        ending, member, stored = self.images[0]
        yield Sample(
            f"{self.where}.{ending}",
            f"_{self.base}.{ending}",
            label,
            stored,
            self.number,
            member.offset_data,
            member.size,
        )

    def _label(self, key: str) -> int:
        found: Any = None
        if self.cls is not None:
            text = self.cls.decode("ascii", "replace").strip()
            if not _WHOLE.fullmatch(text):
                raise ValueError(f"{self.where}.cls holds no whole number: {text[:40]!a}")
            if len(text) > _LONGEST_LABEL:
                raise ValueError(f"{self.where}.cls holds a number of {len(text)} characters: that is no label")
            found = int(text)
        elif self.json is not None:
            try:
                found = json.loads(self.json)
            except (ValueError, RecursionError):
                raise ValueError(f"{self.where}.json is no JSON") from None
            if isinstance(found, dict):
                if key not in found:
                    keys = ", ".join(list(found)[:8])
                    raise ValueError(f"{self.where}.json has no key '{key}' (--label-key), but: {keys}")
                found = found[key]
            if not isinstance(found, int) or isinstance(found, bool):
                raise ValueError(f"{self.where}.json: the label is not a whole number: {ascii(found)[:40]}")
        else:
            raise ValueError(f"{self.where} has no label: neither .cls nor .json next to it ({_TOGETHER})")
        if not INT32.min <= found <= INT32.max:
            raise ValueError(f"{self.where}: the label does not fit into 32 bits")
        return int(found)


class _Member(tarfile.TarInfo):
    """Tells an archive's end mark from damage: tarfile ends without a word at both."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> _Member:  # the base's name for it
        try:
            return super().fromtarfile(tarfile)
        except EndOfArchive:
            tarfile.stallscope_ended = True  # type: ignore[attr-defined]
            raise


EndOfArchive: type[Exception] = tarfile.EOFHeaderError  # type: ignore[attr-defined]


class _Bounded:
    """A file that refuses to read a great deal at once: headers of an archive may claim any size."""

    def __init__(self, file: BinaryIO | gzip.GzipFile) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_FILE_BYTES:
            raise tarfile.ReadError(f"a header asks for {size} bytes at once")
        return self._file.read(size)


def _members(path: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, bool]]:
    """The members of an archive, and whether it is compressed. Raises an exception where it ends without its mark."""
    with open(path, "rb") as plain:
        packed = plain.read(2) == b"\x1f\x8b"
        plain.seek(0)
        file: Any = _Bounded(gzip.GzipFile(fileobj=plain) if packed else plain)
        with tarfile.open(fileobj=file, mode="r:", tarinfo=_Member) as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # or it would remember all of them
                yield archive, member, packed
            if not getattr(archive, "stallscope_ended", False):
                raise tarfile.ReadError("the next header is damaged, or the archive's end mark is missing")


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    stored = file.read() if file is not None else b""
    if len(stored) != member.size:
        raise tarfile.ReadError(f"{member.name} is cut")
    return stored


def _unsafe(member: tarfile.TarInfo) -> str | None:
    """Why a member is ignored; None for a plain file with a harmless name, and "" for what needs no word."""
    if member.isdir():
        return ""
    if member.issym() or member.islnk():
        return "a link"
    if not member.isreg() or member.issparse():
        return "not a plain file"
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        return "its path leads out of the archive"
    if "\0" in member.name:
        return "its name holds a zero byte"
    return None


def _split(name: str) -> tuple[str, str]:
    """Name of the sample and ending: WebDataset cuts at the first dot of the file's own name."""
    folder, slash, file = name.removeprefix("./").rpartition("/")
    base, _, ending = file.partition(".")
    return folder + slash + base, ending.lower()


def open_tar(sources: Sequence[str], options: ImageOptions, label_key: str, image: str | None) -> Archives:
    """One or several archives. ``sources``: see :func:`datasets.convert_stream.expand`."""
    files = expand(sources, _ENDINGS)
    return Archives(files, options, label_key, image.lower().lstrip(".") if image else None)
