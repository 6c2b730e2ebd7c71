"""From a Datum to an image array: raw pixels, float features, JPEG and other image files.

Images come out as C, H, W with the channels in the order B, G, R, whatever decoded them (:mod:`datasets.image_file`).
An orientation noted in EXIF is not applied.

    mode of the file          color=None        color="color"                 color="gray"
    gray (L)                  1 channel         gray three times              as it is
    RGB                       B, G, R           B, G, R                       JPEG: the decoder's luma; else see gray()
    1, P, PA, LA, RGBA,       refused           bits to 0/255, palette        the color result through gray();
    CMYK, YCbCr                                 looked up, alpha dropped,     LA: its gray channel
                                                naive CMYK to RGB
    16-bit, I, F, others      refused always: how to bring them to 8 bits is not ours to guess

docs/images.md says it mode by mode.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from datasets import image_file
from datasets.datum import Datum, DatumError, DatumSizeMismatch
from datasets.errors import DatasetWarning
from datasets.image_file import CERTAIN, Color, Extent, ImageDecodeError, ImageModeError, gray, kind_of
from profiler.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Color", "ImageDecodeError", "ImageModeError", "Probe", "gray", "probe", "to_image"]

_warned_unflagged = False


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


def to_image(
    datum: Datum, where: object = "a record", color: Color | None = None, *, max_pixels: int | None = None
) -> NDArray[Any]:
    """The array a record holds.

    Parameters
    ----------
    datum: a parsed record.
    where: names data set, key and record in errors; turned into text only when there is one.
    color: ``color`` for three channels, ``gray`` for one, None for those the record has. Raw records are not
        converted: they must have the right number already.
    max_pixels: larger image files (width x height) are refused; None: ``image_file.MAX_PIXELS``.

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
    return image_file.read(datum.data, where, color, kind, max_pixels)


def from_file(stored: bytes, where: object, color: Color | None) -> NDArray[np.uint8]:
    """The pixels of an image file as :func:`to_image` gives them, but maybe a view uint8[C, H, W] of uint8[H, W, C]."""
    return image_file.view(stored, where, color, _classify(Datum(data=stored, encoded=True), where), None)


def part(
    datum: Datum, where: object, color: Color | None, choose: image_file.Choose, *,
    extent: Extent = "full", size: int = 1, max_pixels: int | None = None,
) -> image_file.Part:  # fmt: skip
    """A part of the image a record holds, not yet brought to size: see :class:`datasets.image_file.Part`.

    Parameters
    ----------
    choose: called with the image's height and width; says which part.
    extent: of an image file, decode all and look whether it is sound (``full``), no more than the part needs
        (``region``, same pixels), or that in 1/2, 1/4 or 1/8 of its pixels each way as long as ``size`` are left
        (``scaled``).

    Raises what :func:`to_image` raises for the same reasons.
    """
    kind = _classify(datum, where)
    if kind in ("raw", "float"):
        return image_file.part_of(to_image(datum, where, color, max_pixels=max_pixels), choose)
    return image_file.part(datum.data, where, color, kind, max_pixels, choose, extent, size)


def probe(datum: Datum, where: object = "a record", *, max_pixels: int | None = None) -> Probe:
    """What a record holds, without decoding it. Raises what :func:`to_image` raises for the same reasons."""
    kind = _classify(datum, where, quiet=True)
    if kind in ("raw", "float"):
        return Probe(kind, "", datum.channels, datum.height, datum.width)
    mode, channels, height, width = image_file.header(datum.data, where, kind, max_pixels)
    return Probe(kind, mode, channels, height, width, datum.encoded)


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
        kind = kind_of(datum.data)
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
    kind = kind_of(datum.data)
    if kind in CERTAIN and sizes == (0, 0, 0):
        if not quiet:
            _warn_unflagged(where, kind)
        return kind
    hint = None
    if kind in CERTAIN:
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
