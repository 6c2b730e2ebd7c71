"""Small files that ask for much: decoding any of them takes far more memory, or time, than its bytes suggest."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image

from tests.fuzz.seeds import file, picture

SIDE = 10_000
PIXELS = SIDE * SIDE


def bombs() -> dict[str, bytes]:
    """Files by name. All are whole files that their decoders would decode."""
    flat = Image.new("L", (SIDE, SIDE))
    return {
        "png": file(flat, compress_level=1),
        "png-bits": file(Image.new("1", (SIDE, SIDE)), compress_level=1),
        "jpeg": file(flat, "JPEG", quality=1),
        "jpeg-scans": scans(2000),
        "gif": file(flat, "GIF"),
        "gif-frame": gif_frame(),
        "tiff-deflate": file(flat, "TIFF", compression="tiff_adobe_deflate"),
        "tiff-tile": tiff_tile(),
        "bmp": bmp_runs(),
        "webp": webp(16_383),
        "webp-canvas": webp_canvas(),
        "png-text": png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(PIXELS), 9)),
        "png-profile": png_chunk(b"iCCP", b"profile\0\0" + zlib.compress(bytes(PIXELS), 9)),
    }


def webp(side: int) -> bytes:
    """One colour, lossless: the picture has no bits per pixel, so its size can be set at will."""
    small = file(Image.new("RGB", (8, 8), (1, 2, 3)), "WEBP", lossless=True, method=0)
    bits = int.from_bytes(small[21:25], "little") & ~0xFFF_FFFF
    return small[:21] + (bits | side - 1 | side - 1 << 14).to_bytes(4, "little") + small[25:]


def webp_canvas() -> bytes:
    """An animation whose canvas is far larger than its frames."""
    frames = bytearray(file(picture(), "WEBP", save_all=True, append_images=[picture(), picture("L").convert("RGB")]))
    assert frames[12:16] == b"VP8X"
    frames[24:30] = (16_383).to_bytes(3, "little") * 2
    return bytes(frames)


def gif_frame() -> bytes:
    """A screen of 1 x 1, and on it a frame of 65535 x 65535."""
    small = bytearray(file(Image.new("P", (1, 1)), "GIF"))
    small[6:10] = struct.pack("<HH", 1, 1)
    place = small.index(b"\x2c", 13)
    small[place + 5 : place + 9] = struct.pack("<HH", 65535, 65535)
    return bytes(small)


def scans(count: int) -> bytes:
    """A progressive JPEG with its last scan written again and again."""
    data = file(picture(size=(64, 64)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + data[-2:]


def tiff_tile() -> bytes:
    """A TIFF of 16 x 16 whose one tile has 65520 x 16384 pixels, deflated."""
    tile = zlib.compress(bytes(1 << 20), 9)
    entries = [
        (256, 4, 1, 16), (257, 4, 1, 16), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (277, 3, 1, 1),
        (322, 4, 1, 65520), (323, 4, 1, 16384), (324, 4, 1, 8 + 2 + 10 * 12 + 4), (325, 4, 1, len(tile)),
    ]  # fmt: skip
    table = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + table + bytes(4) + tile


def bmp_runs() -> bytes:
    """A BMP in run-length coding: nothing but 'end of bitmap', which fills the rest with black."""
    head = struct.pack("<IiiHHIIiiII", 40, SIDE, SIDE, 1, 8, 1, 2, 2835, 2835, 256, 0)
    body = bytes(1024) + b"\0\1"
    return b"BM" + struct.pack("<IHHI", 14 + len(head) + len(body), 0, 0, 14 + len(head) + 1024) + head + body


def png_chunk(name: bytes, content: bytes) -> bytes:
    """A small PNG with one more chunk before its pixels."""
    stream = io.BytesIO()
    picture("L").save(stream, "PNG")
    small = stream.getvalue()
    chunk = struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return small[:33] + chunk + small[33:]
