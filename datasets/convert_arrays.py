"""Arrays as input: the IDX files of MNIST and NumPy's .npz files.

Files are mapped, so their size does not matter; what is compressed is unpacked into a temporary file without a name.
"""

from __future__ import annotations

import gzip
import itertools
import math
import os
import tempfile
import zipfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from datasets.convert_inputs import Converted, InputError, Inputs, fingerprint_of, int32
from datasets.datum import serialize
from profiler.errors import UsageError

_IDX_HEADER = 4 + 4 * 255
_LOCAL_HEADER = 30  # bytes of a member's header in a ZIP file, before its name
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class Arrays(Inputs):
    """uint8[N, C, H, W] and int labels[N]."""

    parallel = False

    def __init__(self, files: list[Path], images: NDArray[np.uint8], labels: NDArray[Any]) -> None:
        super().__init__()
        self.files = files
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def fingerprint(self) -> str:
        return fingerprint_of(self.files)

    def expected_bytes(self) -> int | None:
        return self.images.nbytes

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
    _check_there(images)
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
    return Arrays([images, labels], pixels, _checked_labels(read_idx(labels), len(pixels), str(labels)))


def read_idx(path: Path) -> NDArray[Any]:
    """The array in an IDX file: two zero bytes, type, number of dimensions, their sizes (big-endian), the items."""
    try:
        with ExitStack() as stack:
            file: IO[bytes] = stack.enter_context(open(path, "rb"))
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            stream = stack.enter_context(gzip.GzipFile(fileobj=file)) if packed else file
            head = stream.read(_IDX_HEADER)
            start, shape, kind = _idx_header(path, head)
            need = start + math.prod(shape) * kind.itemsize
            if packed:
                blocks = itertools.chain([head], _blocks(stream, need + 1 - len(head)))
                file = _unpacked(blocks, stack)
            size = os.fstat(file.fileno()).st_size
            if size != need:
                found = f"{size} bytes" if size < need or not packed else "more"
                raise InputError(f"{path} is cut or damaged", expected=f"{need} bytes for {shape}", found=found)
            return np.memmap(file, kind, "r", start, shape) if size > start else np.empty(shape, kind)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _idx_header(path: Path, head: bytes) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    """Where the items begin, and shape and type of the array."""
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES:
        raise InputError(f"{path} is not an IDX file", expected="bytes 00 00, a type and a rank", found=head[:4].hex())
    start = 4 + 4 * head[3]
    if len(head) < start:
        raise InputError(f"{path} is cut or damaged", expected=f"{start} bytes of header", found=len(head))
    shape = tuple(np.frombuffer(head[4:start], ">u4").tolist())
    return start, shape, np.dtype(_IDX_TYPES[head[2]])


def _blocks(stream: IO[bytes] | gzip.GzipFile, most: int) -> Iterator[bytes]:
    """The next ``most`` bytes, or those that there are."""
    while most > 0 and (block := stream.read(min(most, 1 << 20))):
        yield block
        most -= len(block)


def _unpacked(blocks: Iterable[bytes], stack: ExitStack) -> IO[bytes]:
    """A temporary file without a name that holds the blocks. ``stack`` closes it; what is mapped from it stays."""
    file: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed by the stack
    for block in blocks:
        file.write(block)
    file.flush()
    return file


def _check_there(file: Path) -> None:
    if not file.is_file():
        raise InputError(f"there is no file {file}", found="a folder" if file.is_dir() else "nothing there")


def open_npz(file: Path, layout: str | None, channel_order: str) -> Arrays:
    """Arrays ``images`` (uint8[N, H, W], [N, C, H, W] or [N, H, W, C]) and ``labels`` (int[N]) of a .npz file.

    layout: ``nchw`` or ``nhwc``; needed where the shape leaves it open. channel_order: ``rgb`` is turned into ``bgr``.
    """
    _check_there(file)
    try:
        if not zipfile.is_zipfile(file):
            raise InputError(f"{file} is not a .npz file, or it is cut", hint="numpy.savez writes such files")
        with np.load(file, allow_pickle=False) as archive:
            missing = {"images", "labels"} - set(archive.files)
            if missing:
                raise InputError(
                    f"{file} has no array '{sorted(missing)[0]}'",
                    expected="arrays 'images' and 'labels'",
                    found=", ".join(archive.files),
                )
            images = _mapped(file, "images.npy")
            if images is None:
                images = archive["images"]
            labels = archive["labels"]
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
    return Arrays([file], images, _checked_labels(labels, len(images), f"{file}: 'labels'"))


def _mapped(path: Path, member: str) -> NDArray[Any] | None:
    """A member of a .npz file, mapped and not held in memory; None where NumPy's own reader says what is wrong.

    Raises :class:`zipfile.BadZipFile` if its bytes are not those of its checksum.
    """
    with ExitStack() as stack:
        archive = stack.enter_context(zipfile.ZipFile(path))
        about = archive.getinfo(member)
        file: IO[bytes] = stack.enter_context(open(path, "rb"))
        with archive.open(about) as stream:
            blocks = _blocks(stream, about.file_size + 1)  # zipfile compares the checksum at the end
            if about.compress_type == zipfile.ZIP_STORED:
                deque(blocks, maxlen=0)
                file.seek(about.header_offset)
                head = file.read(_LOCAL_HEADER)
                start = file.tell() + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            else:
                file, start = _unpacked(blocks, stack), 0
        file.seek(start)
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            return None
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_columns, kind = read(file)
        nbytes = math.prod(shape) * kind.itemsize
        if kind.hasobject or not nbytes or file.tell() + nbytes != start + about.file_size:
            return None
        return np.memmap(file, kind, "r", file.tell(), shape, "F" if by_columns else "C")


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
        int32(extreme, name)
    return labels
