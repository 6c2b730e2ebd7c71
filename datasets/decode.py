"""From a Datum to an image array: raw pixels, float features, JPEG and other image files.

Images come out as C, H, W with the channels in the order B, G, R, whatever decoded them. JPEG is decoded by
libjpeg-turbo (simplejpeg) with the accurate DCT and smooth upsampling, everything else by Pillow. An orientation noted
in EXIF is not applied.

    mode of the file          color=None        color="color"                 color="gray"
    gray (L)                  1 channel         gray three times              as it is
    RGB                       B, G, R           B, G, R                       JPEG: the decoder's luma; else see gray()
    1, P, PA, LA, RGBA,       refused           bits to 0/255, palette        the color result through gray();
    CMYK, YCbCr                                 looked up, alpha dropped,     LA: its gray channel
                                                naive CMYK to RGB
    16-bit, I, F, others      refused always: how to bring them to 8 bits is not ours to guess
"""

from __future__ import annotations

import io
import struct
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from datasets.datum import Datum, DatumError, DatumSizeMismatch
from datasets.errors import DatasetWarning
from profiler.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Color = Literal["color", "gray"]

MAX_PIXELS = 89_478_485
"""Larger images are refused before they are decoded. Pillow's own limit for a suspected decompression bomb."""

_FORMATS = ("PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM", "JPEG")
_MAGIC = (
    (b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"), (b"BM", "bmp"), (b"GIF8", "gif"),
    (b"II*\x00", "tiff"), (b"MM\x00*", "tiff"), (b"P5", "ppm"), (b"P6", "ppm"),
)  # fmt: skip
_CERTAIN = ("jpeg", "png", "gif", "tiff", "webp")
"""Kinds whose mark is long enough to believe it where a record's flag does not say that it is an image file."""
_NATIVE = ("L", "RGB")
_CONVERTIBLE = ("1", "P", "PA", "LA", "RGBA", "CMYK", "YCbCr")

_warned_unflagged = False


class ImageDecodeError(DatumError):
    """The image file in a record is damaged, of an unknown kind, or too large."""


class ImageModeError(DatumError):
    """The channels of an image are not what was asked for, and no conversion is agreed on."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a record holds, told from its header only.

    Attributes
    ----------
    encoding: ``raw``, ``float``, or the kind of the image file (``jpeg``, ``png``, …).
    mode: Pillow's name of the file's mode (``L``, ``RGB``, ``P``, …); empty for raw and float records.
    channels, height, width: as stored; for an image file those of the file.
    flagged: False for an image file in a record that does not say that it holds one.
    """

    encoding: str
    mode: str
    channels: int
    height: int
    width: int
    flagged: bool = True


def to_image(datum: Datum, where: object = "a record", color: Color | None = None) -> NDArray[Any]:
    """The array a record holds.

    Parameters
    ----------
    datum: a parsed record.
    where: names data set, key and record in errors; turned into text only when there is one.
    color: ``color`` for three channels, ``gray`` for one, None for those the record has. Raw records are not
        converted: they must have the right number already.

    Returns
    -------
    uint8[C, H, W] (B, G, R), or float32[C, H, W] where the record has float_data and no data. May be a read-only view
    of the record.

    Raises
    ------
    DatumSizeMismatch: the number of bytes or floats is not channels x height x width.
    ImageDecodeError, ImageModeError: see there. DatumError: the record holds nothing, or contradicts itself.
    """
    if color not in (None, "color", "gray"):
        raise UsageError("unknown colour conversion", expected="color, gray or none", found=color)
    kind = _classify(datum, where)
    if kind == "raw":
        pixels = np.frombuffer(datum.data, np.uint8).reshape(datum.channels, datum.height, datum.width)
        return _as_stored(pixels, where, color)
    if kind == "float":
        assert datum.float_data is not None
        return _as_stored(datum.float_data.reshape(datum.channels, datum.height, datum.width), where, color)
    if kind == "jpeg":
        return _jpeg(datum.data, where, color)
    return _pillow(datum.data, where, color, kind)


def probe(datum: Datum, where: object = "a record") -> Probe:
    """What a record holds, without decoding it. Raises what :func:`to_image` raises for the same reasons."""
    kind = _classify(datum, where, quiet=True)
    if kind in ("raw", "float"):
        return Probe(kind, "", datum.channels, datum.height, datum.width)
    if kind == "jpeg":
        header = _jpeg_header(datum.data)
        if header is not None:
            height, width, mode = header
            channels = {"L": 1, "CMYK": 4}.get(mode, 3)
            return Probe(kind, mode, channels, height, width, datum.encoded)
    with _opened(datum.data, where, kind) as image:
        return Probe(kind, _mode(image), len(image.getbands()), image.height, image.width, datum.encoded)


def gray(bgr: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8[H, W] from uint8[H, W, 3] in B, G, R: (9797 R + 19234 G + 3737 B) >> 15, as libpng does (and so Caffe)."""
    blue, green, red = (bgr[..., channel].astype(np.uint32) for channel in range(3))
    return ((9797 * red + 19234 * green + 3737 * blue) >> 15).astype(np.uint8)


# ----------------------------------------------------------------------------------------------------------------------


def _classify(datum: Datum, where: object, quiet: bool = False) -> str:
    """``raw``, ``float`` or the kind of image file; refuses records that contradict themselves."""
    sizes = (datum.channels, datum.height, datum.width)
    if min(sizes) < 0:
        raise DatumError(f"{where}: negative dimensions", expected="channels, height, width >= 0", found=sizes)
    need = sizes[0] * sizes[1] * sizes[2]
    have = len(datum.data)
    if datum.encoded:
        if not have:
            raise ImageDecodeError(f"{where}: says that it holds an image file, and holds no bytes")
        kind = _kind(datum.data)
        if kind == "unknown":
            raw = have == need
            raise ImageDecodeError(
                f"{where}: says that it holds an image file, but its bytes are not one",
                expected="JPEG, PNG, BMP, GIF, WebP, TIFF or PPM",
                found=f"{have} bytes"
                + (f", exactly the {'x'.join(map(str, sizes))} raw pixels its dimensions tell" if raw else "")
                + f", beginning {bytes(datum.data[:8]).hex(' ')}",
                hint="the flag 'encoded' is wrong: write the records again without it" if raw else None,
            )
        return kind
    if not have:
        if datum.float_data is None:
            raise DatumError(f"{where}: holds neither data nor float_data")
        if not need or len(datum.float_data) != need:
            raise _size_mismatch(where, sizes, f"{len(datum.float_data)} floats")
        return "float"
    if have == need:
        return "raw"
    kind = _kind(datum.data)
    if kind in _CERTAIN and sizes == (0, 0, 0):
        if not quiet:
            _warn_unflagged(where, kind)
        return kind
    hint = None
    if kind in _CERTAIN:
        hint = f"its bytes begin like a {kind.upper()} file, but the flag 'encoded' is missing: write it again with it"
    raise _size_mismatch(where, sizes, f"{have} bytes", hint)


def _size_mismatch(where: object, sizes: tuple[int, ...], found: str, hint: str | None = None) -> DatumSizeMismatch:
    need = sizes[0] * sizes[1] * sizes[2]
    unit = found.split()[-1]
    return DatumSizeMismatch(
        f"{where}: the {unit} do not fill the dimensions",
        expected=f"{need} {unit} for channels {sizes[0]} x height {sizes[1]} x width {sizes[2]}",
        found=found,
        hint=hint or "the record was cut, or written with the dimensions of another image",
    )


def _warn_unflagged(where: object, kind: str) -> None:
    global _warned_unflagged
    if not _warned_unflagged:
        _warned_unflagged = True
        warnings.warn(
            f"{where}: holds a {kind.upper()} file without the flag 'encoded'; such records are decoded all the same "
            "(said once)",
            DatasetWarning,
            stacklevel=4,
        )


def _kind(data: bytes | memoryview) -> str:
    head = bytes(data[:12])
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    return "webp" if head[:4] == b"RIFF" and head[8:] == b"WEBP" else "unknown"


def _as_stored(pixels: NDArray[Any], where: object, color: Color | None) -> NDArray[Any]:
    wanted = {"color": 3, "gray": 1}.get(color or "", len(pixels))
    if len(pixels) != wanted:
        raise ImageModeError(
            f"{where}: raw records are not converted, and this one has not the channels that force_{color} asks for",
            expected=f"{wanted} channels",
            found=f"{len(pixels)}",
            hint=f"leave force_{color} out, or convert the images again with the channels you want",
        )
    return pixels


def _jpeg_header(data: bytes | memoryview) -> tuple[int, int, str] | None:
    """Height, width and mode, or None where the fast decoder does not know this JPEG (odd subsampling, damage)."""
    import simplejpeg

    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return height, width, {"Gray": "L", "CMYK": "CMYK", "YCCK": "CMYK"}.get(space, "RGB")


def _jpeg(data: bytes | memoryview, where: object, color: Color | None) -> NDArray[np.uint8]:
    import simplejpeg

    header = _jpeg_header(data)
    if header is None or header[2] == "CMYK":
        return _pillow(data, where, color, "jpeg")
    height, width, mode = header
    _check_pixels(where, height, width)
    plain = color == "gray" or (color is None and mode == "L")
    try:
        # strict: a cut file is an error and not half a picture under gray.
        image = simplejpeg.decode_jpeg(
            data, colorspace="GRAY" if plain else "BGR", fastdct=False, fastupsample=False, strict=True
        )
    except ValueError as error:
        raise _damaged(where, "jpeg", error, data) from error
    return _planes(image)


def _pillow(data: bytes | memoryview, where: object, color: Color | None, kind: str) -> NDArray[np.uint8]:
    with _opened(data, where, kind) as image:
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


def _opened(data: bytes | memoryview, where: object, kind: str) -> Any:
    """A Pillow image whose header was read, and whose size is acceptable."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageDecodeError(
            f"{where}: the image is too large", expected=f"at most {MAX_PIXELS:,} pixels", found=str(error)
        ) from error
    except Exception as error:
        raise _damaged(where, kind, error, data) from error
    _check_pixels(where, image.height, image.width)
    if kind == "png" and len(data) > 24 and data[24] == 16 and not image.mode.startswith("I"):
        # Pillow cuts 16-bit colour down to 8 bits without a word.
        image.info["stallscope_bits"] = 16
    return image


def _mode(image: Any) -> str:
    return f"{image.mode};16" if "stallscope_bits" in image.info else image.mode


def _check_pixels(where: object, height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise ImageDecodeError(
            f"{where}: the image is too large",
            expected=f"at most {MAX_PIXELS:,} pixels",
            found=f"{width} x {height} = {height * width:,}",
        )


def _check_mode(mode: str, where: object, color: Color | None, kind: str) -> None:
    if mode in _NATIVE or (color is not None and mode in _CONVERTIBLE):
        return
    if mode in _CONVERTIBLE:
        raise ImageModeError(
            f"{where}: a {kind.upper()} file of mode {mode} has no plain gray or BGR channels",
            expected="mode L (gray) or RGB",
            found=f"mode {mode}",
            hint="set force_color (or force_gray) to have it converted",
        )
    raise ImageModeError(
        f"{where}: a {kind.upper()} file of mode {mode} is not an 8-bit image",
        expected=f"one of the modes {', '.join(_NATIVE + _CONVERTIBLE)}",
        found=f"mode {mode}",
        hint="no flag helps here: convert the image files to 8 bits first",
    )


def _planes(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8[C, H, W], contiguous, from uint8[H, W, C]."""
    return np.ascontiguousarray(image.transpose(2, 0, 1))


def _damaged(where: object, kind: str, error: Exception, data: bytes | memoryview) -> ImageDecodeError:
    text = str(error).split(" <_io.")[0] if not isinstance(error, struct.error) else "its header is cut"
    return ImageDecodeError(
        f"{where}: the {kind.upper()} file cannot be decoded",
        found=f"{text or type(error).__name__} ({len(data)} bytes)",
        hint="the image is cut or damaged: replace it at its source and convert again",
    )
