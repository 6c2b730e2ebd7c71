"""Image files named in a list, read as records without a database: what Caffe's ImageData layer does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from datasets import datum
from datasets.convert_files import ImageFiles, stamp, too_large
from datasets.convert_inputs import MAX_FILE_BYTES, ImageOptions, InputError, Problems
from datasets.convert_list import open_list
from datasets.errors import DatasetChanged, DatasetCorrupt, SourceClosed, SourceError
from datasets.source import Record, Source

_HINT = "correct the list, or data.on_bad_record: skip puts other records in the place of such lines"


class ImageListSource(Source):
    """The lines of a list, a path and a whole number each, in their order; values are Datum records with the file.

    Parameters
    ----------
    path: of the list. root: where its paths begin; None: at the list's folder.
    tolerant: a line that cannot be used is a record that cannot be read, and no reason to refuse the list.

    The list is read, and every file's size and time of change looked at, when the source is made and when a pickled
    copy is first used; nothing else is held open. Keys are those that a conversion of the list would give.
    Raises :class:`SourceError` that tells everything wrong with the list, by line.
    """

    backend = "list"

    def __init__(self, path: str, root: str | None = None, *, tolerant: bool = False) -> None:
        self.path = os.path.abspath(path)
        self.root = None if root is None else os.path.abspath(root)
        self.tolerant = tolerant
        self._closed = False
        self._files: ImageFiles | None = None
        self._opened()

    @property
    def notes(self) -> list[str]:
        """What a person should know about the list, though it can be used: repeated paths, negative labels."""
        return self._opened().notes

    def __len__(self) -> int:
        return len(self._opened())

    def key(self, index: int) -> bytes:
        index = self._check_index(index)
        return f"{index:08d}{self._opened().suffix(index)}".encode("utf-8", "surrogateescape")

    def read(self, index: int) -> Record:
        key, files = self.key(index), self._opened()
        where = f"{self.name}, line {files.lines[index]}"
        if index in files.bad:
            raise DatasetCorrupt(f"record {index} of {self.name} cannot be read: {files.bad[index]}", hint=_HINT)
        file = files.root / files.names[index]
        try:
            with open(file, "rb") as stream:
                status = os.fstat(stream.fileno())
                if stamp(status) != files.stamps[index]:
                    raise DatasetChanged(
                        f"{where}: {file} was written to while the list was in use",
                        expected="files that stay as they are during a job",
                        hint="let the writer finish, then start again",
                    )
                if status.st_size > MAX_FILE_BYTES:
                    raise DatasetCorrupt(f"{where}: {too_large(file)}")
                stored = stream.read()
        except OSError as error:
            raise DatasetCorrupt(f"{where}: {file} cannot be read: {error.strerror}") from error
        return Record(index, key, datum.serialize(data=stored, label=files.labels[index], encoded=True), where)

    def identity(self) -> dict[str, Any]:
        return {
            "path": self.path, "backend": self.backend, "db": None, "records": len(self),
            "files": self._opened().fingerprint(),
        }  # fmt: skip

    def close(self) -> None:
        self._files, self._closed = None, True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": None, "_closed": False}

    def _opened(self) -> ImageFiles:
        if self._closed:
            raise SourceClosed(f"{self.name} was closed")
        if self._files is None:
            self._files = self._read_list()
        return self._files

    def _read_list(self) -> ImageFiles:
        problems = _Problems(self.path, hint=_HINT)
        problems.outcome = "a job cannot begin"
        root = None if self.root is None else Path(self.root)
        try:
            return open_list(Path(self.path), root, ImageOptions(), skip=self.tolerant, problems=problems)
        except InputError as error:
            raise SourceError(
                error.what,
                expected=error.expected,
                found=error.found,
                hint=(error.hint or "").replace("--root", "root"),
            ) from error


class _Problems(Problems):
    def add(self, text: str, where: str = "") -> None:
        super().add(text.replace("--label-db", "python -m datasets.convert list with --label-db"), where)
