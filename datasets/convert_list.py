"""List files as input, as Caffe's convert_imageset takes them: a path, a space and a label on each line.

Everything that can be known without decoding an image is checked before anything is written, and told at once.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datasets.convert_files import ImageFiles, not_a_file, too_large
from datasets.convert_inputs import INT32, MAX_FILE_BYTES, ImageOptions, InputError, Problems, Remarks

_WHOLE = re.compile(r"[+-]?[0-9]+")
_SPACE = re.compile(r"[ \t]+")


def open_list(
    file: Path, root: Path | None, options: ImageOptions, *, pairs: bool = False, skip: bool = False,
    problems: Problems | None = None,
) -> ImageFiles:  # fmt: skip
    """A list file: each line is a path, a space and a whole number. Paths begin at ``root`` or the list's folder.

    Parameters
    ----------
    pairs: lines hold one or more numbers, with or without a fraction, as many in each line.
    skip: lines that cannot be used become items that cannot be converted, instead of an error.
    problems: collects what is wrong, in place of one whose words are those of a conversion.

    Raises :class:`InputError` that lists what is wrong, by line.
    """
    root = file.parent if root is None else root
    problems = problems or Problems(
        file, hint="correct the list, or --on-error skip leaves these lines out (exit code 1)"
    )
    remarks = Remarks()
    inputs: ImageFiles | None = None
    first = usual = 0
    from_here = False  # whether a path that is not there would be if it began in the working folder
    for number, line in _lines(file):
        if inputs is None:
            first, usual = number, _numbers(line)
            inputs = ImageFiles(root, options, _width(line, root) if pairs else 0)
        name = ""
        try:
            name, label, many = _many_labels(line, inputs.width) if pairs else _one_label(line)
            if not from_here and not os.path.lexists(root / name):
                from_here = os.path.exists(name)
            status = _status(root / name)
        except ValueError as error:
            ends = _numbers(line) if pairs else usual
            if ends not in (inputs.width, usual):  # words of the path may be numbers as well
                text = f"line {number} ends with {_counted(ends)}, line {first} with {inputs.width}: {_shown(line)}"
            else:
                text = f"line {number}: {error}"
            problems.add(text)
            if skip:
                inputs.add_bad(f"{file}, {text}", name)
                inputs.lines.append(number)
            continue
        if label < 0:
            remarks.add("negative labels (Caffe's losses take one only as ignore_label), at line", str(number))
        if os.path.isabs(name) and root != file.parent:
            remarks.add("paths that begin with / and so not at --root, at line", str(number))
        inputs.add(name, label, many, status)
        inputs.lines.append(number)
    if inputs is None:
        raise InputError(f"the list {file} is empty", expected="a path, a space and a whole number on each line")
    if not skip:
        problems.raise_any(hint="--root . (the paths begin here, not at the list)" if from_here else None)
    _note_repeats(inputs, remarks)
    inputs.notes = remarks.lines()
    return inputs


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Number and text of every line that is not blank. A mark of UTF-8 and carriage returns are no part of the text."""
    try:
        with open(file, "rb") as stream:
            if stream.read(2) in (b"\xff\xfe", b"\xfe\xff"):
                raise InputError(f"the list {file} is in UTF-16", hint=f"iconv -f UTF-16 -t UTF-8 {file} > list.txt")
        # Names are bytes to the file system: what is no UTF-8 goes through unchanged.
        with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as text:
            for number, line in enumerate(text, 1):
                if "\0" in line:
                    raise InputError(f"the list {file} is no text: line {number} holds a zero byte")
                if line.strip():
                    yield number, line.strip()
    except OSError as error:
        raise InputError(f"the list {file} cannot be read: {error.strerror}") from error


def _split(line: str) -> tuple[str, str]:
    name, gap, label = line.rpartition("\t" if "\t" in line else " ")
    if not gap or not name.strip():
        raise ValueError(f"no label after the path: {_shown(line)}")
    return name.strip(), label


def _one_label(line: str) -> tuple[str, int, list[float]]:
    name, label = _split(line)
    if _WHOLE.fullmatch(label):
        if not INT32.min <= int(label) <= INT32.max:
            raise ValueError(f"the label {label} does not fit into 32 bits")
        return name, int(label), []
    if _float(label) is not None:
        raise ValueError(
            f"the label {label} is not a whole number; Caffe would cut it off without a word "
            "(--label-db OUT2 keeps numbers with a fraction)"
        )
    if re.search(r"\.\w{2,4}$", label):
        raise ValueError(f"no label after the path: {_shown(line)}")
    raise ValueError(f"the label {_shown(label)} is not a whole number")


def _many_labels(line: str, width: int) -> tuple[str, int, list[float]]:
    parts = _SPACE.split(line)
    values = [_float(part) for part in parts[len(parts) - width :]]
    known = [value for value in values if value is not None]
    if len(parts) <= width or len(known) < width:
        raise ValueError(f"not {width} numbers after the path, as in the first line: {_shown(line)}")
    name = line
    for part in reversed(parts[len(parts) - width :]):
        name = name.removesuffix(part).rstrip(" \t")
    return name, 0, known


def _width(line: str, root: Path) -> int:
    """How many numbers end the line: as many as leave the path of a file, or else all of them."""
    parts = _SPACE.split(line)
    most = 0
    name = line
    while most < len(parts) - 1 and _float(parts[-1 - most]) is not None:
        name = name.removesuffix(parts[-1 - most]).rstrip(" \t")
        most += 1
        if (root / name).is_file():
            return most
    if not most:
        raise InputError(
            "the first line of the list ends with no number",
            expected="a path and one or more numbers",
            found=_shown(line),
        )
    return most


def _numbers(line: str) -> int:
    """How many numbers end the line, after a path of one word or more."""
    parts = _SPACE.split(line)[1:]
    return next((index for index, part in enumerate(reversed(parts)) if _float(part) is None), len(parts))


def _counted(numbers: int) -> str:
    return f"{numbers or 'no'} number{'' if numbers == 1 else 's'}"


def _float(text: str) -> float | None:
    """A finite number that float32 can hold, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) <= float(np.finfo(np.float32).max) else None


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 100 else text[:100] + "…")


def _status(path: Path) -> os.stat_result:
    """Raises ValueError, with the reason, for what is no readable file of a reasonable size."""
    try:
        status = path.stat()
    except OSError as error:
        if re.search(r"[ \t][+-]?[0-9.]+$", str(path)):
            raise ValueError(
                f"{path}: {error.strerror}; if the line ends with several labels: --label-db OUT2"
            ) from None
        raise ValueError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is {not_a_file(status)}")
    if status.st_size == 0:
        raise ValueError(f"{path} is empty")
    if status.st_size > MAX_FILE_BYTES:
        raise ValueError(too_large(path))
    return status


def _note_repeats(inputs: ImageFiles, remarks: Remarks) -> None:
    """Lines that name a path again: found by hashes, as a set of all names would take much memory."""
    hashes: NDArray[np.int64] = np.fromiter((hash(inputs.names[index]) for index in range(len(inputs))), np.int64)
    order = np.argsort(hashes, kind="stable")
    for place in np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]]):
        first, again = int(order[place]), int(order[place + 1])
        if inputs.bad.keys() & {first, again} or inputs.names[first] != inputs.names[again]:
            continue
        if inputs.labels[first] == inputs.labels[again]:
            remarks.add("paths that were there before, at line", f"{inputs.lines[again]} (as {inputs.lines[first]})")
        else:
            remarks.add(
                "paths that were there before with another label, at line",
                f"{inputs.lines[again]} (as {inputs.lines[first]})",
            )
