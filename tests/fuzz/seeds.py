"""Small valid records and image files to begin from: one of every kind, mode and layout that the reader knows."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from datasets import datum

SIZE = (9, 7)


def picture(mode: str = "RGB", size: tuple[int, int] = SIZE) -> Image.Image:
    """A small picture of the given mode."""
    rows, columns = np.mgrid[0 : size[1], 0 : size[0]]
    if mode in ("I;16", "I", "F"):
        return Image.fromarray((rows * 999).astype({"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]))
    rgb = np.stack([rows * 30 % 256, columns * 25 % 256, (rows + columns) * 11 % 256], axis=2).astype(np.uint8)
    image = Image.fromarray(rgb)
    if mode in ("P", "PA"):
        image = image.quantize(16)
    return image.convert(mode)


def file(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The bytes of an image file."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def images() -> dict[str, bytes]:
    """Image files by name."""
    rgb, gray = picture(), picture("L")
    kinds = {
        "jpeg": file(rgb, "JPEG"),
        "jpeg-progressive": file(rgb, "JPEG", progressive=True, subsampling=0),
        "jpeg-gray": file(gray, "JPEG"),
        "jpeg-cmyk": file(picture("CMYK"), "JPEG"),
        "png-16": file(picture("I;16")),
        "png-transparent": file(picture("P"), transparency=3),
        "png-text": file(rgb, icc_profile=b"profile" * 9, dpi=(72, 72)),
        "gif": file(picture("P"), "GIF"),
        "gif-frames": file(picture("P"), "GIF", save_all=True, append_images=[picture("P", (4, 4))]),
        "webp": file(rgb, "WEBP"),
        "webp-lossless": file(picture("RGBA"), "WEBP", lossless=True),
        "webp-frames": file(rgb, "WEBP", save_all=True, append_images=[gray.convert("RGB")]),
        "tiff-f": file(picture("F"), "TIFF"),
        "ppm": file(rgb, "PPM"),
        "pgm": file(gray, "PPM"),
        "pgm-16": b"P5 2 2 65535\n" + bytes(8),
        "bmp-gray": file(gray, "BMP"),
        "bmp-1": file(picture("1"), "BMP"),
        "bmp-p": file(picture("P"), "BMP"),
    }
    kinds |= {f"png-{mode.lower()}": file(picture(mode)) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")}
    for compression in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "group4", "jpeg"):
        mode = "1" if compression == "group4" else "RGB"
        kinds[f"tiff-{compression}"] = file(picture(mode), "TIFF", compression=compression)
    return kinds


def records() -> dict[str, bytes]:
    """Serialized Datums by name."""
    pixels = np.asarray(picture()).tobytes()
    group = b"\x4b\x08\x07\x53\x10\x01\x54\x4c"  # an unknown group with another inside
    made = {
        "empty": b"",
        "raw": datum.serialize(channels=3, height=7, width=9, data=pixels, label=3),
        "raw-gray": datum.serialize(channels=1, height=2, width=2, data=b"abcd", label=0),
        "short": datum.serialize(channels=3, height=4, width=5, data=bytes(10), label=1),
        "negative": datum.serialize(channels=-1, height=-1, width=4, data=b"abcd", label=-1),
        "float": datum.serialize(channels=20, height=1, width=1, float_data=np.arange(20), label=5),
        "float-packed": b"\x08\x02\x10\x01\x18\x01\x32\x08" + np.float32([1, 2]).tobytes(),
        "unknown": b"\x40\x96\x01\x42\x03abc\x41" + bytes(8) + b"\x45" + bytes(4) + group + b"\x28\x07",
        "both": datum.serialize(channels=1, height=1, width=2, data=b"ab", float_data=[1, 2], label=2),
        "flag-wrong": datum.serialize(channels=1, height=2, width=2, data=b"abcd", encoded=True),
    }
    for name in ("jpeg", "png-rgb", "gif"):
        made[f"encoded-{name}"] = datum.serialize(data=images()[name], label=1, encoded=True)
    made["unflagged"] = datum.serialize(channels=0, height=0, width=0, data=images()["png-l"], label=1)
    return made
