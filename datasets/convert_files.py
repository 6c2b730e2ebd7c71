"""Image files as input, and the folder with one folder for each class. Lists of files: ``convert_list``."""

from __future__ import annotations

import hashlib
import math
import os
import stat
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from datasets.convert_inputs import (
    IMAGE_SUFFIXES,
    MAX_FILE_BYTES,
    Converted,
    ImageOptions,
    InputError,
    Inputs,
    Names,
    Remarks,
    image_datum,
)


class ImageFiles(Inputs):
    """Image files under ``root``, each with a label or with ``width`` labels."""

    options: ImageOptions

    def __init__(self, root: Path, options: ImageOptions, width: int = 0) -> None:
        super().__init__()
        self.root = root
        self.options = options
        self.pairs = width > 0
        self.names = Names()
        self.width = width
        self.labels = array("i")
        self._many = array("f")
        self.bad: dict[int, str] = {}
        self.lines = array("Q")  # where in a list each item stands
        self.stamps = array("Q")
        self._hash = hashlib.sha256()

    def __len__(self) -> int:
        return len(self.names)

    def add(self, name: str, label: int, many: list[float], status: os.stat_result | None) -> None:
        self.names.append(name)
        self.labels.append(label)
        self._many.extend(many)
        told = (status.st_size, status.st_mtime_ns) if status else ()
        self._hash.update(repr((name, label, many, told)).encode())
        self.stamps.append(stamp(status))

    def add_bad(self, text: str, name: str = "") -> None:
        """An item that cannot be converted, for the reason in ``text``; it keeps its place, and a name if known."""
        self.bad[len(self)] = text
        self.add(name, 0, [0.0] * self.width, None)

    def suffix(self, index: int) -> str:
        return "_" + self.names[index]

    def convert(self, index: int) -> Converted:
        if index in self.bad:
            raise InputError(self.bad[index])
        path = self.root / self.names[index]
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for ever
                raise InputError(f"{path} is {not_a_file(status)}")
            if status.st_size > MAX_FILE_BYTES:
                raise InputError(too_large(path))
            stored = path.read_bytes()
        except OSError as error:
            raise InputError(f"the image {path} cannot be read: {error.strerror}") from error
        if self.pairs:
            many = np.array(self._many[index * self.width : (index + 1) * self.width], np.float32)
            return image_datum(stored, None, str(path), self.options, many)
        return image_datum(stored, self.labels[index], str(path), self.options)

    def fingerprint(self) -> str:
        return self._hash.hexdigest()

    def expected_bytes(self) -> int | None:
        if self.options.size is None or self.options.encoded:
            return None
        return len(self) * math.prod(self.options.size) * (1 if self.options.gray else 3)


def stamp(status: os.stat_result | None) -> int:
    """64 bits of a file's size and time of change, 0 for a file that nobody looked at."""
    return hash((status.st_size, status.st_mtime_ns)) % 2**64 if status else 0


def not_a_file(status: os.stat_result) -> str:
    """What is said of something that is no plain file."""
    return "a folder" if stat.S_ISDIR(status.st_mode) else "no plain file"


def too_large(path: Path) -> str:
    """What is said of a file that is larger than an image file can be."""
    return f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB: that is no image file"


# ------------------------------------------------------------------------------------------------------------- folders


def open_images(folder: Path, options: ImageOptions) -> ImageFiles:
    """A folder with one folder of images a class; labels number the classes in the order of their names."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}", hint="a folder with one folder of images for each class")
    remarks = Remarks()
    loose: list[str] = []
    found = []
    for name in _walk(folder, remarks):
        if Path(name).suffix.lower() not in IMAGE_SUFFIXES:
            remarks.add("files left alone, as their names do not end like those of images", name)
        elif os.sep not in name:
            loose.append(name)
        else:
            found.append(name)
    if loose:
        raise InputError(
            f"{folder} holds images that lie in no class folder, so they have no label",
            found=", ".join(loose[:3]) + (f" and {len(loose) - 3} more" if len(loose) > 3 else ""),
            hint="move them into a folder for each class, or write a list file and use 'list'",
        )
    if not found:
        raise InputError(f"no images under {folder}", expected="files that end in " + ", ".join(sorted(IMAGE_SUFFIXES)))
    classes = sorted({name.split(os.sep, 1)[0] for name in found})
    number = {name: label for label, name in enumerate(classes)}
    inputs = ImageFiles(folder, options)
    for name in found:
        try:
            status = os.stat(folder / name)
        except OSError:
            status = None  # a link to nothing: told when its turn comes, so that it can be skipped
        inputs.add(name, number[name.split(os.sep, 1)[0]], [], status)
    inputs.classes = classes
    for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."):
        if name not in number:
            remarks.add("folders without an image, so no label stands for them", name)
    inputs.notes = remarks.lines()
    if len(classes) == 1:
        inputs.notes.append(f"all images have the label 0: {folder} holds one class folder, {classes[0]}")
    return inputs


def _walk(folder: Path, remarks: Remarks) -> Iterator[str]:
    """All files under ``folder`` but hidden ones, relative to it, in the order of their names."""
    first: dict[str, Path] = {}
    above: dict[str, frozenset[str]] = {}
    for place, folders, names in os.walk(folder, followlinks=True, onerror=_unreadable):
        real, relative = os.path.realpath(place), Path(place).relative_to(folder)
        ways = above.pop(place, frozenset())
        if real in ways:
            remarks.add("links that lead back to a folder above them, not followed", str(relative))
            folders.clear()
            continue
        before = first.setdefault(real, relative)
        if before != relative:
            remarks.add("folders that are there again by a link, so their images are, too", f"{relative} (as {before})")
        hidden = [name for name in (*folders, *names) if name.startswith(".")]
        for name in sorted(hidden):
            if name in folders or Path(name).suffix.lower() in IMAGE_SUFFIXES:
                remarks.add("hidden files and folders, left alone", str(relative / name))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        above.update((os.path.join(place, name), ways | {real}) for name in folders)
        yield from (str(relative / name) for name in sorted(names) if not name.startswith("."))


def _unreadable(error: OSError) -> None:
    raise InputError(f"the folder {error.filename} cannot be read: {error.strerror}") from error
