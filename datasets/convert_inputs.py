"""What a database can be made from: image folders, list files, IDX files and NumPy archives.

Each kind is a list of items, addressed by position, that become one Datum each. Opening checks everything that can be
checked without decoding an image: labels, counts, shapes.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from datasets.datum import Datum, serialize
from profiler.errors import StallscopeError, UsageError

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_JPEG_QUALITY = 95  # OpenCV's default, so Caffe's
_LABEL = re.compile(r"[+-]?\d+")
_INT32 = np.iinfo(np.int32)
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class InputError(StallscopeError):
    """The source of a conversion is not what it should be."""


@dataclass(frozen=True, slots=True)
class Converted:
    """One item, ready to be stored. ``shape`` is (channels, height, width) of the decoded image."""

    value: bytes
    shape: tuple[int, int, int]
    label: int
    encoded: bool


@dataclass(frozen=True)
class ImageOptions:
    """How image files are stored: colour as three channels in the order B, G, R; ``gray`` as one.

    size: (height, width) to resize to, or None. encoded: keep image files, unchanged where nothing has to be changed.
    """

    size: tuple[int, int] | None = None
    gray: bool = False
    encoded: bool = False


class Inputs(ABC):
    """Items to convert. ``classes`` names the labels 0, 1, … where the source has names."""

    classes: list[str] | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def convert(self, index: int) -> Converted:
        """Item ``index`` as a Datum. Raises :class:`StallscopeError` if it cannot be read."""

    def suffix(self, index: int) -> str:
        """What follows the number in the key."""
        return ""

    @abstractmethod
    def where(self, index: int) -> str:
        """Names the item in errors."""


class ImageFiles(Inputs):
    """Image files under ``root``, each with a label."""

    def __init__(self, root: Path, entries: list[tuple[str, int]], options: ImageOptions) -> None:
        self.root = root
        self.entries = entries
        self.options = options

    def __len__(self) -> int:
        return len(self.entries)

    def suffix(self, index: int) -> str:
        return "_" + self.entries[index][0]

    def where(self, index: int) -> str:
        return str(self.root / self.entries[index][0])

    def convert(self, index: int) -> Converted:
        name, label = self.entries[index]
        path = self.root / name
        try:
            stored = path.read_bytes()
        except OSError as error:
            raise InputError(f"the image {path} cannot be read: {error.strerror}") from error
        return image_datum(stored, label, str(path), self.options)


def image_datum(stored: bytes, label: int, where: str, options: ImageOptions) -> Converted:
    """Turn the bytes of an image file into a Datum, as Caffe's convert_imageset does.

    The image is decoded even if its bytes are stored unchanged: a broken file is found now and not hours into training.
    """
    from datasets import decode
    from datasets.resize import resize

    as_stored = Datum(data=stored, encoded=True)
    if options.encoded and options.size is None and not options.gray:
        try:
            image = decode.to_image(as_stored, where)
        except decode.ImageModeError as error:
            raise InputError(
                error.what,
                expected=error.expected,
                found=error.found,
                hint="without --encoded, or with --gray, colour modes with palette or alpha are converted",
            ) from error
        return Converted(serialize(data=stored, label=label, encoded=True), _shape(image), label, True)
    image = decode.to_image(as_stored, where, color="gray" if options.gray else "color")
    if options.size is not None:
        image = resize(image, *options.size)
    if options.encoded:
        value = serialize(data=_encode(image, stored), label=label, encoded=True)
    else:
        channels, height, width = _shape(image)
        value = serialize(
            channels=channels, height=height, width=width, data=image.tobytes(), label=label, encoded=False
        )
    return Converted(value, _shape(image), label, options.encoded)


def _shape(image: NDArray[Any]) -> tuple[int, int, int]:
    channels, height, width = image.shape
    return channels, height, width


def _encode(image: NDArray[Any], original: bytes) -> bytes:
    """The image as a file: JPEG if the original was one, else PNG, which loses nothing."""
    from PIL import Image

    buffer = io.BytesIO()
    picture = Image.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image[::-1].transpose(1, 2, 0)))
    if original.startswith(b"\xff\xd8"):
        picture.save(buffer, "JPEG", quality=_JPEG_QUALITY)
    else:
        picture.save(buffer, "PNG")
    return buffer.getvalue()


def open_images(folder: Path, options: ImageOptions) -> ImageFiles:
    """A folder with one folder of images a class; labels number the classes in the order of their names."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}", hint="a folder with one folder of images for each class")
    found: list[str] = []
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=_unreadable):
        if os.path.realpath(place) in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(os.path.realpath(place))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        relative = Path(place).relative_to(folder)
        found += [
            str(relative / name)
            for name in sorted(names)
            if Path(name).suffix.lower() in IMAGE_SUFFIXES and not name.startswith(".")
        ]
    loose = [name for name in found if os.sep not in name]
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
    inputs = ImageFiles(folder, [(name, number[name.split(os.sep, 1)[0]]) for name in found], options)
    inputs.classes = classes
    return inputs


def _unreadable(error: OSError) -> None:
    raise InputError(f"the folder {error.filename} cannot be read: {error.strerror}") from error


def open_list(file: Path, root: Path | None, options: ImageOptions) -> ImageFiles:
    """A list file: each line is a path, a space and a whole number. Paths begin at ``root`` or the list's folder."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"the list {file} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise InputError(f"the list {file} cannot be read: {error.strerror}") from error
    entries: list[tuple[str, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        name, _, label = line.strip().rpartition(" ") if "\t" not in line else line.strip().rpartition("\t")
        if not name.strip() or not _LABEL.fullmatch(label):
            raise InputError(
                f"{file}:{number}: the label is missing or not a whole number",
                expected="a path, a space and a whole number",
                found=repr(line),
                hint="numbers with a fraction cannot be labels of a Datum; Caffe would cut 2.7 to 2 without a word",
            )
        entries.append((name.strip(), _int32(int(label), f"{file}:{number}")))
    if not entries:
        raise InputError(f"the list {file} is empty")
    return ImageFiles(file.parent if root is None else root, entries, options)


def _int32(label: int, where: str) -> int:
    if not _INT32.min <= label <= _INT32.max:
        raise InputError(f"{where}: the label does not fit into 32 bits", found=label)
    return label


class Arrays(Inputs):
    """uint8[N, C, H, W] and int labels[N]."""

    def __init__(self, name: str, images: NDArray[np.uint8], labels: NDArray[Any]) -> None:
        self.name = name
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def where(self, index: int) -> str:
        return f"item {index} of {self.name}"

    def convert(self, index: int) -> Converted:
        image = self.images[index]
        channels, height, width = image.shape
        label = int(self.labels[index])
        # The fields convert_mnist_data writes, so the same files give the same bytes.
        value = serialize(channels=channels, height=height, width=width, data=image.tobytes(), label=label)
        return Converted(value, (channels, height, width), label, False)


def open_idx(images: Path, labels: Path | None) -> Arrays:
    """The IDX files of MNIST and its kin, compressed by gzip or not.

    The labels' file is found by MNIST's naming (``…-images-idx3-ubyte`` and ``…-labels-idx1-ubyte``) if not given.
    """
    if labels is None:
        labels = images.with_name(images.name.replace("images", "labels").replace("idx3", "idx1"))
        if labels == images or not labels.is_file():
            raise InputError(f"no file of labels for {images}", found=f"nothing at {labels}", hint="--labels FILE")
    pixels = read_idx(images)
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4):
        raise InputError(
            f"{images} does not hold images",
            expected="unsigned bytes in 3 dimensions (N, H, W) or 4 (N, C, H, W)",
            found=f"{pixels.dtype} in {pixels.ndim} dimensions",
        )
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    return Arrays(str(images), pixels, _checked_labels(read_idx(labels), len(pixels), str(labels)))


def read_idx(path: Path) -> NDArray[Any]:
    """The array in an IDX file: two zero bytes, type, number of dimensions, their sizes (big-endian), the items."""
    try:
        stored = path.read_bytes()
        if stored.startswith(b"\x1f\x8b"):
            stored = gzip.decompress(stored)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if len(stored) < 4 or stored[:2] != b"\0\0" or stored[2] not in _IDX_TYPES:
        raise InputError(
            f"{path} is not an IDX file", expected="bytes 00 00, a type and a rank", found=stored[:4].hex()
        )
    start = 4 + 4 * stored[3]
    shape = tuple(np.frombuffer(stored[4:start], ">u4").tolist())
    kind = np.dtype(_IDX_TYPES[stored[2]])
    need = start + int(np.prod(shape, dtype=object)) * kind.itemsize
    if len(shape) != stored[3] or len(stored) != need:
        raise InputError(f"{path} is cut or damaged", expected=f"{need} bytes for {shape}", found=len(stored))
    return np.frombuffer(stored, kind, offset=start).reshape(shape)


def open_npz(file: Path, layout: str | None, channel_order: str) -> Arrays:
    """Arrays ``images`` (uint8[N, H, W], [N, C, H, W] or [N, H, W, C]) and ``labels`` (int[N]) of a .npz file.

    layout: ``nchw`` or ``nhwc``; needed where the shape leaves it open. channel_order: ``rgb`` is turned into ``bgr``.
    """
    try:
        with np.load(file, allow_pickle=False) as archive:
            missing = {"images", "labels"} - set(archive.files)
            if missing:
                raise InputError(
                    f"{file} has no array '{sorted(missing)[0]}'",
                    expected="arrays 'images' and 'labels'",
                    found=", ".join(archive.files),
                )
            images, labels = archive["images"], archive["labels"]
    except (OSError, ValueError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{file} is not a readable .npz file: {error}") from error
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape[1:]:
        raise InputError(
            f"{file}: 'images' is not a stack of images",
            expected="uint8[N, H, W], uint8[N, C, H, W] or uint8[N, H, W, C]",
            found=f"{images.dtype}{list(images.shape)}",
        )
    if images.ndim == 3:
        images = images[:, None]
    else:
        layout = layout or _guessed_layout(images.shape, str(file))
        images = images.transpose(0, 3, 1, 2) if layout == "nhwc" else images
    if channel_order == "rgb":
        if images.shape[1] != 3:
            raise UsageError("--channel-order rgb needs images of three channels", found=images.shape[1])
        images = images[:, ::-1]
    return Arrays(str(file), images, _checked_labels(labels, len(images), f"{file}: 'labels'"))


def _guessed_layout(shape: tuple[int, ...], name: str) -> str:
    first, last = shape[1] in (1, 3, 4), shape[3] in (1, 3, 4)
    if first == last:
        raise UsageError(
            f"{name}: the shape of 'images' does not say where its channels are",
            found=list(shape),
            hint="--layout nchw or --layout nhwc",
        )
    return "nchw" if first else "nhwc"


def _checked_labels(labels: NDArray[Any], count: int, name: str) -> NDArray[Any]:
    if labels.shape != (count,):
        raise InputError(f"{name}: not one label for each image", expected=[count], found=list(labels.shape))
    if count == 0:
        raise InputError(f"{name}: there are no images")
    if labels.dtype.kind not in "iu":
        raise InputError(
            f"{name}: labels must be whole numbers",
            expected="an integer type",
            found=str(labels.dtype),
            hint="convert them on purpose: labels.astype(numpy.int32)",
        )
    for extreme in (int(labels.min()), int(labels.max())):
        _int32(extreme, name)
    return labels
