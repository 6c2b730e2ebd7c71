"""What every kind of input has in common: items that become one Datum each, and how an image file becomes one."""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from datasets.datum import serialize
from datasets.order import Order
from profiler.errors import StallscopeError

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
INT32 = np.iinfo(np.int32)
MAX_FILE_BYTES = 256 << 20
"""A larger image file, or member of an archive, is refused before it is read."""
_JPEG_QUALITY = 95  # OpenCV's default, so Caffe's
_LISTED = 20
_NOTED = 5


class InputError(StallscopeError):
    """The source of a conversion is not what it should be."""


@dataclass(frozen=True, slots=True)
class Converted:
    """One item, ready to be stored.

    shape: (channels, height, width) of the decoded image. label: None where ``labels`` takes its place: float32[K], to
    be stored in a database of their own.
    """

    value: bytes
    shape: tuple[int, int, int]
    label: int | None
    encoded: bool
    labels: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class ImageOptions:
    """How image files are stored: colour as three channels in the order B, G, R; ``gray`` as one.

    size: (height, width) to resize to, or None. encoded: keep image files, unchanged where nothing has to be changed.
    kind: the kind of those files; None leaves each as it is.
    """

    size: tuple[int, int] | None = None
    gray: bool = False
    encoded: bool = False
    kind: Literal["jpg", "png"] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One item: its place in the database, what follows the number in its key, and how to make it.

    ``make`` may be called from any thread, and raises :class:`StallscopeError` if the item cannot be read.
    """

    place: int
    suffix: str
    make: Callable[[], Converted]


class Inputs(ABC):
    """Items to convert, addressed by position.

    Attributes
    ----------
    classes: names of the labels 0, 1, … where the source has names.
    pairs: whether items carry several labels, which go into a second database.
    parallel: whether threads help: there is an image to decode.
    options: how image files are stored; None where there are none.
    notes: what a person should know about the source, though it can be stored.
    left_out: what of the source is not among the items, and why; as many as there are make the exit code 1.
    """

    classes: list[str] | None = None
    pairs = False
    parallel = True
    options: ImageOptions | None = None

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.left_out: list[str] = []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def convert(self, index: int) -> Converted:
        """Item ``index`` as a Datum. Raises :class:`StallscopeError` if it cannot be read."""

    def suffix(self, index: int) -> str:
        """What follows the number in the key."""
        return ""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the source does, as far as names, sizes and times of change tell."""

    def expected_bytes(self) -> int | None:
        """Size of all records, where it is known without reading them."""
        return None

    def jobs(self, order: Order, start: int) -> Iterator[Job]:
        """All items from place ``start`` on, a chunk at a time: no list of all of them in memory."""
        chunk = 65536
        for first in range(start, len(order), chunk):
            places = np.arange(first, min(first + chunk, len(order)))
            for place, index in zip(places.tolist(), order.records(0, places).tolist(), strict=True):
                yield Job(place, self.suffix(index), partial(self.convert, index))

    def close(self) -> None:
        """Give back what is open."""
        return


class Names:
    """Texts in one block of memory: what they are long and 8 bytes each, where a list of ``str`` takes 60 and more."""

    def __init__(self) -> None:
        self._block = bytearray()
        self._ends = array("Q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, name: str) -> None:
        self._block += name.encode("utf-8", "surrogateescape")
        self._ends.append(len(self._block))

    def __getitem__(self, index: int) -> str:
        return self._block[self._ends[index] : self._ends[index + 1]].decode("utf-8", "surrogateescape")


class Remarks:
    """Collects remarks of several kinds, the first few of each kind word for word and the others by number."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def add(self, kind: str, where: str) -> None:
        listed = self._kinds.setdefault(kind, [])
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if len(listed) < _NOTED:
            listed.append(where)

    def lines(self) -> list[str]:
        told = []
        for kind, listed in self._kinds.items():
            more = self._counts[kind] - len(listed)
            told.append(f"{kind}: {', '.join(listed)}" + (f" and {more} more" if more else ""))
        return told


@dataclass(slots=True)
class _Reason:
    """How often a reason was found; the first few problems, and where they are."""

    count: int = 0
    texts: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)


class Problems:
    """Everything wrong with a source, told at once.

    What is wrong for one reason at more than five places is told once, with their number and the first of them. The
    first 20 reasons are told word for word, the others by number.
    """

    outcome = "nothing was written"
    """What the first line says after the number of problems."""

    def __init__(self, source: object, hint: str | None = None) -> None:
        self.source = source
        self.hint = hint
        self.count = 0
        self._reasons: dict[str, _Reason] = {}

    def add(self, text: str, where: str = "") -> None:
        """Note a problem. ``where``: the place that ``text`` begins with; what is left of it is the reason."""
        self.count += 1
        where = where if text.startswith(where) else ""
        name = text[len(where) :]
        if name not in self._reasons and len(self._reasons) >= _LISTED:
            return
        reason = self._reasons.setdefault(name, _Reason())
        reason.count += 1
        if len(reason.texts) < _NOTED:
            reason.texts.append(text)
            reason.places.append(where)

    def _lines(self) -> Iterator[str]:
        told = 0
        for name, reason in self._reasons.items():
            if reason.count > _NOTED and reason.places[0]:
                told += reason.count
                yield f"  {reason.count} times: {name.lstrip(': ')}"
                yield f"    at {', '.join(reason.places)} and {reason.count - _NOTED} more"
            else:
                told += len(reason.texts)
                yield from (f"  {text}" for text in reason.texts)
        if told < self.count:
            yield f"  and {self.count - told} more"

    def raise_any(self, hint: str | None = None) -> None:
        """Raises :class:`InputError` if there are problems."""
        if not self.count:
            return
        lines = [f"{self.source}: {self.count} problem{'s' if self.count > 1 else ''}; {self.outcome}"]
        lines += self._lines()
        raise InputError("\n".join(lines), hint=hint or self.hint)


def fingerprint_of(files: Iterable[Path]) -> str:
    """Of names, sizes and times of change: enough to notice that a source is another one than before."""
    told = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(told).encode()).hexdigest()


def int32(label: int, where: str) -> int:
    """The label itself. Raises :class:`InputError` if a Datum cannot hold it."""
    if not INT32.min <= label <= INT32.max:
        raise InputError(
            f"{where}: the label does not fit into 32 bits", expected=f"{INT32.min} to {INT32.max}", found=label
        )
    return label


def image_datum(
    stored: bytes, label: int | None, where: str, options: ImageOptions, labels: NDArray[np.float32] | None = None
) -> Converted:
    """Turn the bytes of an image file into a Datum, as Caffe's convert_imageset does.

    The image is decoded even if its bytes are stored unchanged: a broken file is found now and not hours into training.
    """
    from datasets import decode
    from datasets.image_file import kind_of
    from datasets.resize import resize

    if kind_of(stored) == "unknown":
        raise InputError(
            f"{where}: the file is empty" if not stored else f"{where}: no image file",
            expected="JPEG, PNG, BMP, GIF, WebP, TIFF or PPM",
            found=f"{len(stored)} bytes" + (f", beginning {stored[:8].hex(' ')}" if stored else ""),
            hint="mend or remove it, or --on-error skip leaves it out (exit code 1)",
        )
    same_kind = options.kind is None or options.kind == _kind(stored)
    if options.encoded and options.size is None and not options.gray and same_kind:
        try:
            image = decode.from_file(stored, where, None)
        except decode.ImageModeError as error:
            raise InputError(
                error.what,
                expected=error.expected,
                found=error.found,
                hint="without --encoded, or with --gray, colour modes with palette or alpha are converted",
            ) from error
        return Converted(serialize(data=stored, label=label, encoded=True), _shape(image), label, True, labels)
    image = decode.from_file(stored, where, "gray" if options.gray else "color")
    if options.size is not None:
        image = resize(image, *options.size)
    if options.encoded:
        value = serialize(data=encode(image, options.kind or _kind(stored)), label=label, encoded=True)
    else:
        channels, height, width = _shape(image)
        value = serialize(
            channels=channels,
            height=height,
            width=width,
            data=np.ascontiguousarray(image).data,
            label=label,
            encoded=False,
        )
    return Converted(value, _shape(image), label, options.encoded, labels)


def _shape(image: NDArray[Any]) -> tuple[int, int, int]:
    channels, height, width = image.shape
    return channels, height, width


def _kind(stored: bytes) -> str:
    """``jpg`` for a JPEG, else ``png``: a changed image of any other kind is kept without loss."""
    return "jpg" if stored.startswith(b"\xff\xd8") else "png"


def encode(image: NDArray[Any], kind: str) -> bytes:
    """The bytes of a ``jpg`` or ``png`` file of uint8[C, H, W] (B, G, R, or gray)."""
    from PIL import Image

    buffer = io.BytesIO()
    picture = Image.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image[::-1].transpose(1, 2, 0)))
    if kind == "jpg":
        picture.save(buffer, "JPEG", quality=_JPEG_QUALITY)
    else:
        picture.save(buffer, "PNG")
    return buffer.getvalue()
