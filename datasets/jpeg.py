"""Baseline JPEG files, decoded as far as they are needed, with the bits of libjpeg-turbo.

Of what a photograph costs to decode, three fifths are its Huffman codes and the rest its pixels. The codes are
looked up here several bits at a time and with their numbers; pixels are made only of the blocks that are wanted. All
arithmetic after the codes is that of libjpeg-turbo's accurate inverse DCT, smooth upsampling and colours.

This is no second decoder for all files: whatever is not plain (progressive, CMYK, restart markers, odd sampling), not
sound, or beyond the range where 16-bit steps of libjpeg-turbo cannot overflow, gives None, and is libjpeg-turbo's to
decode or to refuse. (ITU-T T.81; libjpeg-turbo's jdhuff.c, jidctint.c, jdsample.c, jdcolor.c.)
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Box = tuple[int, int, int, int]
"""Top, left, height and width of a part of a picture, in pixels."""

PADDING = 512
"""Bytes after the coded data that a block may look at before it is found to have run over."""
_SOI, _EOI = b"\xff\xd8", 0xD9
_LONGEST = 65_500
_NOTHING = np.zeros((0, 0), np.uint8)
_local = threading.local()
_loaded = threading.Event()
_loading = threading.Lock()


@dataclass(frozen=True, slots=True)
class Header:
    """What the segments before the coded data say of a file that :func:`decode` may know.

    Attributes
    ----------
    height, width: in pixels. components: 1 (gray) or 3 (luma and two of chroma).
    across, down: blocks of luma in an MCU; 8 of its pixels are 8 / across of chroma.
    quantisers: number of the table of each component. used: numbers of the DC and AC table of each, as in ``tables``.
    tables: payload of each quantiser (0..3) and Huffman code (DC 4..7, AC 8..11), as it lies in the file.
    start: where the coded data begins.
    """

    height: int
    width: int
    components: int
    across: int
    down: int
    quantisers: tuple[int, ...]
    used: tuple[tuple[int, int], ...]
    tables: dict[int, bytes]
    start: int


_KEPT = 4
_recent: tuple[tuple[bytes, Header], ...] = ()
"""Headers that were read last, and the bytes they were read from; never changed, only replaced."""


def header(data: bytes | memoryview) -> Header | None:
    """The header of a plain baseline JPEG file; None for any other, and for what is cut or contradicts itself."""
    global _recent
    if data[:2] != _SOI:
        return None
    for start, known in _recent:  # files of one size by one program begin alike
        if bytes(data[: len(start)]) == start:
            return known
    try:
        found = _segments(data)
    except IndexError:
        return None
    if found is not None:
        _recent = ((bytes(data[: found.start]), found), *_recent[: _KEPT - 1])
    return found


def _segments(data: bytes | memoryview) -> Header | None:
    tables: dict[int, bytes] = {}
    frame, jfif, adobe, at = b"", False, False, 2
    while data[at] == 0xFF:
        kind = data[at + 1]
        size = (data[at + 2] << 8) | data[at + 3]
        payload = bytes(data[at + 4 : at + 2 + size])
        if size < 2 or len(payload) != size - 2:
            return None
        at += 2 + size
        if kind == 0xDA:
            return _plain(at, payload, frame, tables, jfif, adobe)
        if kind in (0xC0, 0xC1) and not frame:
            frame = payload
        elif kind == 0xC4:
            if not _split(payload, tables, huffman=True):
                return None
        elif kind == 0xDB:
            if not _split(payload, tables, huffman=False):
                return None
        elif kind == 0xE0:
            if len(payload) >= 14 and payload[:5] == b"JFIF\0":
                jfif = True
                if payload[5] != 1:  # a version that is warned about
                    return None
        elif kind == 0xEE:
            adobe = True
        elif kind == 0xDD:
            if payload != b"\0\0":  # restart markers
                return None
        elif not (0xE0 <= kind <= 0xEF or kind == 0xFE):
            return None
    return None


def _split(payload: bytes, tables: dict[int, bytes], huffman: bool) -> bool:
    """Take the tables of one segment. Returns whether they fill it."""
    at = 0
    while at < len(payload):
        kind, number = payload[at] >> 4, payload[at] & 15
        if kind > 1 or number > 3:
            return False
        if huffman:
            total = sum(payload[at + 1 : at + 17])
            end, name = at + 17 + total, 4 + 4 * kind + number
            if total > 256:
                return False
        else:
            end, name = at + 1 + 64 * (kind + 1), number
        tables[name] = payload[at + 1 : end]
        at = end
    return at == len(payload)


def _plain(start: int, scan: bytes, frame: bytes, tables: dict[int, bytes], jfif: bool, adobe: bool) -> Header | None:
    """The header, where one scan holds all components, in a colour space that is beyond doubt."""
    if len(frame) < 6 or frame[0] != 8:
        return None
    height, width, count = (frame[1] << 8) | frame[2], (frame[3] << 8) | frame[4], frame[5]
    if not (0 < height <= _LONGEST and 0 < width <= _LONGEST and count in (1, 3)) or len(frame) != 6 + 3 * count:
        return None
    if len(scan) != 4 + 2 * count or scan[0] != count or scan[-3:] != b"\0\x3f\0":
        return None
    parts = [frame[6 + 3 * c : 9 + 3 * c] for c in range(count)]
    names = bytes(part[0] for part in parts)
    if scan[1 : 1 + 2 * count : 2] != names or len(set(names)) != count:
        return None
    across, down = parts[0][1] >> 4, parts[0][1] & 15
    if (across, down) not in ((1, 1), (2, 1), (2, 2)) or any(part[1] != 0x11 for part in parts[1:]):
        return None
    if (across == 2 and (count == 1 or width <= 4)) or max(part[2] for part in parts) > 3:
        return None  # a gray file's blocks lie otherwise; chroma that narrow is not smoothed
    if count == 3 and not jfif and (adobe or names != b"\x01\x02\x03"):
        return None
    used = tuple((4 + (number >> 4), 8 + (number & 15)) for number in scan[2 : 2 + 2 * count : 2])
    quantisers = tuple(part[2] for part in parts)
    if not all(dc in tables and ac in tables and dc < 8 and ac < 12 for dc, ac in used):
        return None
    if not all(number in tables for number in quantisers):
        return None
    return Header(height, width, count, across, down, quantisers, used, tables, start)


class _Workspace:
    """What a thread keeps from file to file: memory that is there already, and the tables that files share."""

    def __init__(self) -> None:
        from datasets import jpeg_kernels

        self.kernels = jpeg_kernels
        self.head: Header | None = None  # whose tables are ready
        self.made: list[bytes | None] = [None] * 12
        self.quantisers = np.zeros((4, 64), np.int32)
        self.entries = np.zeros((8, 1 << jpeg_kernels.LOOK), np.int32)
        self.strides = np.zeros_like(self.entries)
        self.symbols = np.zeros((8, 256), np.uint8)
        self.limits, self.offsets = (np.zeros((8, 17), np.int64) for _ in range(2))
        self.coefficients = np.zeros(64, np.int32)
        self.plain = np.zeros(0, np.uint8)
        self.samples = np.zeros(0, np.uint8)
        self.pixels = np.zeros(0, np.uint32)
        self.chosen = np.zeros((3, 3), np.int64)
        self.used = self.chosen  # quantiser, DC table and AC table of each component of that file
        self.lines = np.zeros((4, 0), np.int32)

    def take(self, head: Header) -> bool:
        """Make the tables of a file ready. Returns whether they are sound."""
        if head is self.head:
            return True
        self.head = None
        for number in {*head.quantisers, *(each for pair in head.used for each in pair)}:
            payload = head.tables[number]
            if self.made[number] == payload:
                continue
            self.made[number] = None
            if number < 4:
                self.quantisers[number] = np.frombuffer(payload, np.uint8 if len(payload) == 64 else ">u2")
            else:
                place = number - 4
                counts, symbols = np.zeros(17, np.uint8), self.symbols[place]
                counts[1:] = np.frombuffer(payload, np.uint8, 16)
                symbols[:] = 0
                symbols[: len(payload) - 16] = np.frombuffer(payload, np.uint8)[16:]
                made = self.kernels.table(
                    place >> 2, counts, symbols, self.entries[place], self.strides[place], self.limits[place],
                    self.offsets[place],
                )  # fmt: skip
                if not made:
                    return False
            self.made[number] = payload
        self.head, self.used = head, self.chosen[: head.components]
        self.used[:, 0] = head.quantisers
        self.used[:, 1:] = head.used
        self.used[:, 1:] -= 4
        return True

    def packed(self, height: int, width: int) -> NDArray[np.uint32]:
        """Memory for so many pixels."""
        if len(self.pixels) < height * width:
            self.pixels = np.zeros(height * width + height * width // 4, np.uint32)
        return self.pixels[: height * width].reshape(height, width)

    def planes(self, rows: int, columns: int, across: int, down: int, chroma: bool) -> tuple[Any, Any, Any]:
        """Memory for so many MCUs: uint8[h, w] each."""
        size = 64 * rows * columns
        need = size * (across * down + (2 if chroma else 0))
        if len(self.samples) < need:
            self.samples = np.zeros(need + need // 4, np.uint8)
        luma, rest = self.samples[: size * across * down], self.samples[size * across * down :]
        first = luma.reshape(8 * rows * down, 8 * columns * across)
        if not chroma:
            return first, _NOTHING, _NOTHING
        shape = (8 * rows, 8 * columns)
        return first, rest[:size].reshape(shape), rest[size : 2 * size].reshape(shape)


def ready() -> bool:
    """Whether the kernels are loaded: that takes seconds where they have to be compiled, so nobody is made to wait."""
    return _loaded.is_set()


def prepare() -> None:
    """Load the kernels, or compile them. Returns when they are ready."""
    with _loading:
        if not _loaded.is_set():
            import simplejpeg

            small = simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8), colorspace="BGR", colorsubsampling="420")
            head = header(small)
            assert head is not None
            decode(small, head, 3)
            _loaded.set()


def decode(
    data: bytes | memoryview, head: Header, channels: int, box: Box | None = None, *, whole: bool = True
) -> Pixels | None:
    """The pixels of a file, or of a part of it: uint8[h, w, 4] in B, G, R, nothing; for one channel luma and nothing.

    Parameters
    ----------
    head: :func:`header` of these bytes.
    box: the part; None for all of it.
    whole: read all coded data and see that it is sound. Without it what lies below the part is not looked at.

    The result lies in memory that the thread's next call uses again. Returns None where libjpeg-turbo has to decide:
    see the module.
    """
    work: _Workspace | None = getattr(_local, "work", None)
    if work is None:
        work = _local.work = _Workspace()
    if not work.take(head):
        return None
    kernels, across, down = work.kernels, head.across, head.down
    top, left, height, width = box if box is not None else (0, 0, head.height, head.width)
    if min(top, left, height - 1, width - 1) < 0 or top + height > head.height or left + width > head.width:
        raise ValueError(f"the part {box} does not lie in a picture of {head.width} x {head.height}")
    columns, rows = -(-head.width // (8 * across)), -(-head.height // (8 * down))
    chroma = head.components == 3 and channels == 3
    # One more sample of chroma each way, for what lies between two.
    more_rows, more_columns = (2 if chroma and side == 2 else 0 for side in (down, across))
    first_row, last_row = max(0, top - more_rows) // (8 * down), (top + height + more_rows - 1) // (8 * down) + 1
    first, last = max(0, left - more_columns) // (8 * across), (left + width + more_columns - 1) // (8 * across) + 1
    window = (first_row, min(rows, last_row), first, min(columns, last))
    if len(work.plain) < len(data) + PADDING:
        work.plain = np.zeros(len(data) + len(data) // 2 + PADDING, np.uint8)
    address = np.uint64(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
    size, marker = kernels.unstuff(address, len(data), head.start, work.plain)
    if whole and marker != _EOI:
        return None
    planes = work.planes(window[1] - window[0], window[3] - window[2], across, down, chroma)
    bits = kernels.scan(
        (across, down, across * down + 2 if head.components == 3 else 1, columns, rows if whole else window[1]),
        work.used, window, 3 if chroma else 1, work.quantisers, work.entries, work.strides, work.limits,
        work.offsets, work.symbols, work.plain, size, work.coefficients, planes,
    )  # fmt: skip
    if bits < 0 or bits > 8 * size or (whole and -(-bits // 8) != size):
        return None
    pixels = work.packed(height, width)
    if work.lines.shape[1] < width + 8:
        work.lines = np.zeros((4, width + width // 2 + 8), np.int32)
    kernels.colours(
        (across, down), (-(-head.height // down), -(-head.width // across)), (8 * down * first_row, 8 * across * first),
        (top, left), planes, work.lines[:2], work.lines[2:], 0 if chroma else 0x010101 if channels == 3 else 1, pixels,
    )  # fmt: skip
    return pixels.view(np.uint8).reshape(height, width, 4)
