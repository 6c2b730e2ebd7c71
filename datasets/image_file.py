"""Image files in records: what kind they are, how large they say they are, and their pixels.

The bytes are not trusted. What a file's header says decides before anything is decoded, so a small file cannot ask for
much memory or time, and whatever a decoder raises becomes an :class:`ImageDecodeError`. JPEG is decoded by
libjpeg-turbo (simplejpeg) with the accurate DCT and smooth upsampling, everything else by Pillow.
"""

from __future__ import annotations

import contextlib
import io
import re
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from datasets import jpeg
from datasets.datum import DatumError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Color = Literal["color", "gray"]
Extent = Literal["full", "region", "scaled"]
Choose = Callable[[int, int], jpeg.Box]
"""From an image's height and width to a part of it: top, left, height and width."""

MAX_PIXELS = 89_478_485
"""Larger images are refused before they are decoded, unless told otherwise. Pillow's own limit for a suspected
decompression bomb."""
MAX_SCANS = 500
"""More scans than this in a progressive JPEG are refused: each costs a pass over the picture, whatever its bytes."""

_FORMATS = ("PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM", "JPEG")
_MAGIC = (
    (b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"BM", "bmp"), (b"GIF8", "gif"),
    (b"II*\x00", "tiff"), (b"MM\x00*", "tiff"), (b"P5", "ppm"), (b"P6", "ppm"),
)  # fmt: skip
CERTAIN = ("jpeg", "png", "gif", "tiff", "webp")
"""Kinds whose mark is long enough to believe it where a record's flag does not say that it is an image file."""
_TILE_WIDTH, _TILE_LENGTH = 322, 323  # TIFF tags
_TOO_LARGE = (
    "nothing was decoded. If the image is what it says, shrink it with another program, or raise data.max_pixels of "
    "the job that reads it (--max-pixels of inspect)"
)
_lifting = threading.Lock()
NATIVE = ("L", "RGB")
CONVERTIBLE = ("1", "P", "PA", "LA", "RGBA", "CMYK", "YCbCr")


class ImageDecodeError(DatumError):
    """The image file in a record is damaged, of an unknown kind, or too large."""


class ImageModeError(DatumError):
    """The channels of an image are not what was asked for, and no conversion is agreed on."""


@dataclass(frozen=True, slots=True)
class Part:
    """Pixels that a part of an image is made of.

    Attributes
    ----------
    pixels: uint8 (float32 of raw records that hold floats) [C, h, w], a view; or, if ``packed``, uint8[h, w, 4] in B,
        G, R, nothing, in memory that the thread's next call uses again.
    span: where the part begins in ``pixels`` and its length, down then across: fractions where it was scaled.
    """

    pixels: NDArray[Any]
    span: tuple[float, float, float, float]
    channels: int
    packed: bool = False


def read(
    data: bytes | memoryview, where: object, color: Color | None, kind: str, max_pixels: int | None
) -> NDArray[np.uint8]:
    """The pixels of an image file of a known kind, uint8[C, H, W] in B, G, R; see :func:`datasets.decode.to_image`."""
    return np.ascontiguousarray(view(data, where, color, kind, max_pixels))


def view(
    data: bytes | memoryview, where: object, color: Color | None, kind: str, max_pixels: int | None
) -> NDArray[np.uint8]:
    """As :func:`read`, but the array may be a view of what the decoder made, with the channels of a pixel together."""
    most = _most(max_pixels)
    if kind == "jpeg":
        return _jpeg(data, where, color, most)
    return _pillow(data, where, color, kind, most)


def part_of(image: NDArray[Any], choose: Choose) -> Part:
    """The part of a whole image [C, H, W]."""
    top, left, height, width = choose(image.shape[1], image.shape[2])
    pixels = image[:, top : top + height, left : left + width]
    return Part(pixels, (0.0, float(height), 0.0, float(width)), len(image))


def part(
    data: bytes | memoryview, where: object, color: Color | None, kind: str, max_pixels: int | None, choose: Choose,
    extent: Extent, size: int,
) -> Part:  # fmt: skip
    """A part of an image file of a known kind: see :func:`datasets.decode.part`."""
    most = _most(max_pixels)
    known = jpeg.header(data) if kind == "jpeg" else None
    if known is not None:
        _check_scans(data[: known.start], where)  # in what follows, a mark like that is not for the fast decoder
        _check_pixels(where, known.height, known.width, most)
        channels = 3 if color == "color" or (color is None and known.components == 3) else 1
        box = choose(known.height, known.width)
        factor = _factor(box, size) if extent == "scaled" else 1
        if factor > 1:
            _check_scans(data, where)
            return _scaled(data, where, channels, (known.height, known.width), box, factor)
        if jpeg.ready():
            pixels = jpeg.decode(data, known, channels, box, whole=extent == "full")
            if pixels is not None:
                return Part(pixels, (0.0, float(box[2]), 0.0, float(box[3])), channels, packed=True)
    return part_of(view(data, where, color, kind, max_pixels), choose)


def _factor(box: jpeg.Box, size: int) -> int:
    return next((factor for factor in (8, 4, 2) if min(box[2:]) >= factor * size), 1)


def _scaled(
    data: bytes | memoryview, where: object, channels: int, size: tuple[int, int], box: jpeg.Box, factor: int
) -> Part:
    """A part of a JPEG from its inverse DCTs of 8 / factor pixels."""
    import simplejpeg

    try:
        image = simplejpeg.decode_jpeg(
            data, colorspace="GRAY" if channels == 1 else "BGR", fastdct=False, fastupsample=False, strict=True,
            min_height=-(-size[0] // factor), min_width=-(-size[1] // factor), min_factor=factor,
        )  # fmt: skip
    except ValueError as error:
        raise _damaged(where, "jpeg", error, data) from error
    top, left, height, width = (side / factor for side in box)
    rows, columns = slice(int(top), -int(-(top + height) // 1)), slice(int(left), -int(-(left + width) // 1))
    return Part(_planes(image)[:, rows, columns], (top % 1, height, left % 1, width), channels)


def header(data: bytes | memoryview, where: object, kind: str, max_pixels: int | None) -> tuple[str, int, int, int]:
    """Mode, channels, height and width that the header of an image file tells."""
    most = _most(max_pixels)
    if kind == "jpeg":
        _check_scans(data, where)
        told = _jpeg_header(data)
        if told is not None:
            height, width, mode = told
            _check_pixels(where, height, width, most)
            return mode, {"L": 1, "CMYK": 4}.get(mode, 3), height, width
    with _opened(data, where, kind, most) as image:
        return _mode(image), len(image.getbands()), image.height, image.width


def kind_of(data: bytes | memoryview) -> str:
    """The kind of image file that bytes begin like, by their first 12; ``unknown`` for none."""
    head = bytes(data[:12])
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    return "webp" if head[:4] == b"RIFF" and head[8:] == b"WEBP" else "unknown"


def gray(bgr: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8[H, W] from uint8[H, W, 3] in B, G, R: (9797 R + 19234 G + 3737 B) >> 15, as libpng does (and so Caffe)."""
    blue, green, red = (bgr[..., channel].astype(np.uint32) for channel in range(3))
    return ((9797 * red + 19234 * green + 3737 * blue) >> 15).astype(np.uint8)


# ----------------------------------------------------------------------------------------------------------------------


def _jpeg_header(data: bytes | memoryview) -> tuple[int, int, str] | None:
    """Height, width and mode, or None where the fast decoder does not know this JPEG (odd subsampling, damage)."""
    import simplejpeg

    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return height, width, {"Gray": "L", "CMYK": "CMYK", "YCCK": "CMYK"}.get(space, "RGB")


def _jpeg(data: bytes | memoryview, where: object, color: Color | None, most: int) -> NDArray[np.uint8]:
    import simplejpeg

    _check_scans(data, where)
    header = _jpeg_header(data)
    if header is None or header[2] == "CMYK":
        return _pillow(data, where, color, "jpeg", most)
    height, width, mode = header
    _check_pixels(where, height, width, most)
    plain = color == "gray" or (color is None and mode == "L")
    try:
        # strict: a cut file is an error and not half a picture under gray.
        image = simplejpeg.decode_jpeg(
            data, colorspace="GRAY" if plain else "BGR", fastdct=False, fastupsample=False, strict=True
        )
    except ValueError as error:
        raise _damaged(where, "jpeg", error, data) from error
    return _planes(image)


def _pillow(data: bytes | memoryview, where: object, color: Color | None, kind: str, most: int) -> NDArray[np.uint8]:
    with _opened(data, where, kind, most) as image:
        mode = _mode(image)
        _check_mode(mode, where, color, kind)
        try:
            image.load()
            image.info.pop("transparency", None)  # dropped like an alpha channel; Pillow would warn
            if mode == "L" or (mode == "LA" and color == "gray"):
                plane = np.asarray(image.getchannel("L") if mode == "LA" else image)
                return _planes(np.repeat(plane[..., None], 3, axis=2) if color == "color" else plane[..., None])
            rgb = np.asarray(image if mode == "RGB" else image.convert("RGB"))
        except Exception as error:
            # Pillow's decoders raise nearly anything (OSError, SyntaxError, struct.error, …) on damaged files.
            raise _damaged(where, kind, error, data) from error
    bgr = rgb[..., ::-1]
    return _planes(gray(bgr)[..., None] if color == "gray" else bgr)


def _opened(data: bytes | memoryview, where: object, kind: str, most: int) -> Any:
    """A Pillow image whose header was read, and whose size is acceptable."""
    from PIL import Image

    if kind == "webp":
        # The decoder allocates the whole canvas when the file is opened.
        _check_pixels(where, *_webp_size(bytes(data[12:30])), most)
    try:
        with _limit_of_pillow(most):
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageDecodeError(
            f"{where}: the image is too large",
            expected=f"at most {most:,} pixels",
            found=f"{int(''.join(re.findall(r'size .([0-9]+) pixels', str(error))) or 0):,}",
            hint=_TOO_LARGE,
        ) from error
    except Exception as error:
        raise _damaged(where, kind, error, data) from error
    _check_pixels(where, image.height, image.width, most)
    tags = getattr(image, "tag_v2", {})
    height, width = (tags.get(tag, 0) for tag in (_TILE_LENGTH, _TILE_WIDTH))
    if isinstance(height, int) and isinstance(width, int):
        # A tile of a TIFF may be larger than the image, and is decoded whole.
        _check_pixels(where, height, width, most)
    if kind == "png" and len(data) > 24 and data[24] == 16 and not image.mode.startswith("I"):
        # Pillow cuts 16-bit colour down to 8 bits without a word.
        image.info["stallscope_bits"] = 16
    return image


def _webp_size(head: bytes) -> tuple[int, int]:
    """Height and width in the first chunk of a WebP file, given from byte 12 on; 0 and 0 where it is cut or unknown."""
    if head[:4] == b"VP8X" and len(head) >= 18:
        return int.from_bytes(head[15:18], "little") + 1, int.from_bytes(head[12:15], "little") + 1
    if head[:4] == b"VP8L" and len(head) >= 13:
        bits = int.from_bytes(head[9:13], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if head[:4] == b"VP8 " and len(head) >= 18:
        return int.from_bytes(head[16:18], "little") & 0x3FFF, int.from_bytes(head[14:16], "little") & 0x3FFF
    return 0, 0


def _mode(image: Any) -> str:
    return f"{image.mode};16" if "stallscope_bits" in image.info else image.mode


def _most(max_pixels: int | None) -> int:
    return MAX_PIXELS if max_pixels is None else max_pixels


@contextlib.contextmanager
def _limit_of_pillow(most: int) -> Iterator[None]:
    """Lift Pillow's own limit, which is one for the whole process, where larger images are asked for: ours holds."""
    from PIL import Image

    if most <= MAX_PIXELS:
        yield
        return
    with _lifting:
        before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


def _check_pixels(where: object, height: int, width: int, most: int) -> None:
    if height * width > most:
        raise ImageDecodeError(
            f"{where}: the image is too large",
            expected=f"at most {most:,} pixels",
            found=f"{width} x {height} = {height * width:,}",
            hint=_TOO_LARGE,
        )


def _check_scans(data: bytes | memoryview, where: object) -> None:
    scans = bytes(data).count(b"\xff\xda")
    if scans > MAX_SCANS:
        raise ImageDecodeError(
            f"{where}: the JPEG file has too many scans",
            expected=f"at most {MAX_SCANS}",
            found=f"{scans} start-of-scan marks in {len(data)} bytes",
            hint="no encoder writes such files; they are made to keep a decoder busy",
        )


def _check_mode(mode: str, where: object, color: Color | None, kind: str) -> None:
    if mode in NATIVE or (color is not None and mode in CONVERTIBLE):
        return
    if mode in CONVERTIBLE:
        raise ImageModeError(
            f"{where}: a {kind.upper()} file of mode {mode} has no plain gray or BGR channels",
            expected="mode L (gray) or RGB",
            found=f"mode {mode}",
            hint="set force_color (or force_gray) to have it converted",
        )
    raise ImageModeError(
        f"{where}: a {kind.upper()} file of mode {mode} is not an 8-bit image",
        expected=f"one of the modes {', '.join(NATIVE + CONVERTIBLE)}",
        found=f"mode {mode}",
        hint="no flag helps here: convert the image files to 8 bits first",
    )


def _planes(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A view uint8[C, H, W] of uint8[H, W, C]."""
    return image.transpose(2, 0, 1)


def _damaged(where: object, kind: str, error: Exception, data: bytes | memoryview) -> ImageDecodeError:
    text = str(error).split(" <_io.")[0] if not isinstance(error, struct.error) else "its header is cut"
    return ImageDecodeError(
        f"{where}: the {kind.upper()} file cannot be decoded",
        found=f"{text or type(error).__name__} ({len(data)} bytes)",
        hint="the image is cut or damaged: replace it at its source and convert again",
    )
