"""Datum, Caffe's record: one image or feature vector with its label, as protobuf wire format.

The parser walks the wire format itself, so the image bytes are a view of the record and are not copied. It accepts what
protobuf accepts (unknown fields are skipped, the last of repeated scalar fields counts, ``float_data`` packed or not)
and tells an absent label from label 0, which protobuf's plain attribute access does not.

    channels = 1, height = 2, width = 3 (int32), data = 4 (bytes), label = 5 (int32), float_data = 6 (repeated float),
    encoded = 7 (bool)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from profiler.errors import StallscopeError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Buffer = bytes | bytearray | memoryview

_VARINT, _FIXED64, _BYTES, _GROUP, _GROUP_END, _FIXED32 = range(6)
_WIRE_NAMES = ("varint", "64-bit", "length-delimited", "group", "end of group", "32-bit")
_FLOAT_TAG = 6 << 3 | _FIXED32
_FLOAT_MARK = bytes((_FLOAT_TAG,))
_FLOAT_BYTES = 5  # of one float outside a packed field: its tag and 4 bytes
_MAX_GROUP_DEPTH = 100  # protobuf's own limit on nesting


class DatumError(StallscopeError):
    """A record is not a Datum, or its content contradicts itself."""


class DatumSizeMismatch(DatumError):
    """The bytes or floats of a record are not channels x height x width many."""


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """One record. ``data`` may be a view of the buffer that was parsed.

    Attributes
    ----------
    channels, height, width: as stored; 0 where the record does not say (encoded images usually do not).
    data: raw uint8 pixels in C, H, W order, or the bytes of an image file; empty where absent.
    label: int32 as stored, or None where the field is absent.
    float_data: float32[n], or None where the field is absent.
    encoded: whether the record says that ``data`` is an image file.
    """

    channels: int = 0
    height: int = 0
    width: int = 0
    data: bytes | memoryview = b""
    label: int | None = None
    float_data: NDArray[np.float32] | None = None
    encoded: bool = False

    @property
    def finite(self) -> bool:
        """False where ``float_data`` holds NaN or an infinity: one such value spoils every sum it enters."""
        return self.float_data is None or bool(np.isfinite(self.float_data).all())


def parse(value: Buffer, where: object = "a record") -> Datum:
    """Read a Datum from its wire format without copying the image bytes.

    Parameters
    ----------
    value: the stored bytes of one record.
    where: names data set, key and record in errors; turned into text only when there is one.

    Raises
    ------
    DatumError: the bytes are not a well-formed message. Never anything else, whatever the bytes are.
    """
    view = memoryview(value)
    if view.itemsize != 1 or view.ndim != 1 or not view.contiguous:
        view = memoryview(bytes(view))
    end = len(view)
    position = 0
    dimensions = [0, 0, 0]
    data: memoryview | bytes = b""
    label: int | None = None
    encoded = False
    floats = bytearray()
    while position < end:
        start = position
        tag, position = _varint(view, position, end, where)
        number, wire = tag >> 3, tag & 7
        if number == 0 or tag >> 32:
            raise _malformed(where, start, f"a field tag with a number from 1 to {2**29 - 1}", f"tag {tag}")
        if wire == _VARINT:
            raw, position = _varint(view, position, end, where)
            if number <= 3:
                dimensions[number - 1] = _int32(raw)
            elif number == 5:
                label = _int32(raw)
            elif number == 7:
                encoded = raw != 0
        elif wire == _BYTES:
            size, position = _varint(view, position, end, where)
            if size > end - position:
                raise _malformed(
                    where, start, f"{size} bytes of field {number}", f"{end - position} bytes left in the record"
                )
            if number == 4:
                data = view[position : position + size]
            elif number == 6:
                if size % 4:
                    raise _malformed(where, start, "a multiple of 4 bytes of float_data", f"{size} bytes")
                floats += view[position : position + size]
            position += size
        elif wire == _FIXED32:
            if end - position < 4:
                raise _malformed(
                    where, start, f"4 bytes of field {number}", f"{end - position} bytes left in the record"
                )
            if number == 6 and position == start + 1 and view[position + 4 : position + 5] == _FLOAT_MARK:
                position = _take_floats(view, start, end, floats)
                continue
            if number == 6:
                floats += view[position : position + 4]
            position += 4
        else:
            position = _skip(view, position, end, number, wire, where, start)
    # The copy in ``floats`` is aligned; inside a record, four-byte alignment is chance.
    float_data = np.frombuffer(floats, "<f4").astype(np.float32, copy=False) if floats else None
    return Datum(dimensions[0], dimensions[1], dimensions[2], data, label, float_data, encoded)


def serialize(
    *,
    channels: int | None = None,
    height: int | None = None,
    width: int | None = None,
    data: Buffer | None = None,
    label: int | None = None,
    float_data: ArrayLike | None = None,
    encoded: bool | None = None,
    packed: bool = False,
) -> bytes:
    """The wire format of a Datum, byte for byte what Caffe's own tools write for the same fields.

    A field that is None is left out. ``float_data`` is written unpacked, as the ``.proto`` of Caffe declares it, unless
    ``packed``, which is shorter and faster, and which every reader takes.

    Raises
    ------
    DatumError: an integer does not fit into int32, or is not an integer.
    """
    out = bytearray()
    head = b""
    payload: bytes | memoryview = b""
    for number, name, number_value in ((1, "channels", channels), (2, "height", height), (3, "width", width)):
        if number_value is not None:
            out.append(number << 3 | _VARINT)
            _put_varint(out, _checked(name, number_value))
    if data is not None:
        payload = data if isinstance(data, bytes) else memoryview(data).cast("B")
        out.append(4 << 3 | _BYTES)
        _put_varint(out, len(payload))
        head, out = bytes(out), bytearray()
    if label is not None:
        out.append(5 << 3 | _VARINT)
        _put_varint(out, _checked("label", label))
    if float_data is not None:
        numbers = np.ascontiguousarray(float_data, "<f4").reshape(-1)
        if packed:
            out.append(6 << 3 | _BYTES)
            _put_varint(out, numbers.nbytes)
            out += numbers.data.cast("B")
        else:
            fields = np.empty((len(numbers), _FLOAT_BYTES), np.uint8)
            fields[:, 0] = _FLOAT_TAG
            fields[:, 1:] = numbers.view(np.uint8).reshape(-1, 4)
            out += fields.tobytes()
    if encoded is not None:
        out += bytes((7 << 3 | _VARINT, bool(encoded)))
    return b"".join((head, payload, out))  # what may be large is copied once


def three_sides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, height and width that stand for an array of any rank, whose values they keep in their order."""
    first, second, *rest = (*shape, 1, 1)
    return first, second, math.prod(rest)


def _take_floats(view: memoryview, start: int, end: int, floats: bytearray) -> int:
    """Take the float fields that lie one after the other from ``start`` on; returns the position after them.

    Caffe writes thousands of them in a row. Looked at in growing blocks, so that each byte is seen a few times at most.
    """
    most = (end - start) // _FLOAT_BYTES
    count, block = 0, 16
    while count < most:
        size = min(block, most - count)
        fields = np.frombuffer(view, np.uint8, size * _FLOAT_BYTES, start + count * _FLOAT_BYTES)
        fields = fields.reshape(size, _FLOAT_BYTES)
        alike = fields[:, 0] == _FLOAT_TAG
        found = size if alike.all() else int(alike.argmin())
        floats += fields[:found, 1:].tobytes()
        count += found
        if found < size:
            break
        block *= 4
    return start + count * _FLOAT_BYTES


def _varint(view: memoryview, position: int, end: int, where: object) -> tuple[int, int]:
    """The number at ``position`` (64 bits) and the position after it."""
    if position < end and view[position] < 0x80:
        return view[position], position + 1
    result = 0
    for index in range(10):
        if position + index >= end:
            raise _malformed(where, position, "the rest of a number", "the end of the record")
        byte = view[position + index]
        result |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return result & 0xFFFF_FFFF_FFFF_FFFF, position + index + 1
    raise _malformed(where, position, "a number of at most 10 bytes", "a longer one")


def _skip(view: memoryview, position: int, end: int, number: int, wire: int, where: object, start: int) -> int:
    """The position after an unknown field that is not a varint, bytes or 32-bit one at the top level."""
    open_groups: list[int] = []
    while True:
        if wire == _VARINT:
            _, position = _varint(view, position, end, where)
        elif wire in (_FIXED64, _FIXED32, _BYTES):
            size = 8 if wire == _FIXED64 else 4
            if wire == _BYTES:
                size, position = _varint(view, position, end, where)
            if size > end - position:
                raise _malformed(
                    where, start, f"{size} bytes of field {number}", f"{end - position} bytes left in the record"
                )
            position += size
        elif wire == _GROUP:
            open_groups.append(number)
            if len(open_groups) > _MAX_GROUP_DEPTH:
                raise _malformed(where, start, f"groups nested at most {_MAX_GROUP_DEPTH} deep", "deeper ones")
        elif wire == _GROUP_END:
            if not open_groups or open_groups.pop() != number:
                raise _malformed(where, start, "the start of a group before its end", f"the end of group {number}")
        else:
            raise _malformed(where, start, f"one of the wire types {', '.join(_WIRE_NAMES)}", f"wire type {wire}")
        if not open_groups:
            return position
        start = position
        if position >= end:
            raise _malformed(where, position, f"the end of group {open_groups[-1]}", "the end of the record")
        tag, position = _varint(view, position, end, where)
        number, wire = tag >> 3, tag & 7
        if number == 0 or tag >> 32:
            raise _malformed(where, start, f"a field tag with a number from 1 to {2**29 - 1}", f"tag {tag}")


def _int32(raw: int) -> int:
    low = raw & 0xFFFF_FFFF
    return low - 0x1_0000_0000 if low & 0x8000_0000 else low


def _put_varint(out: bytearray, number: int) -> None:
    # A negative int32 is written as the 64-bit two's complement: ten bytes.
    number &= 0xFFFF_FFFF_FFFF_FFFF
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _checked(name: str, number: int) -> int:
    try:
        whole = number.__index__()
    except AttributeError:
        raise DatumError(
            f"the field '{name}' of a Datum holds integers",
            expected="an integer",
            found=f"{number!r} ({type(number).__name__})",
            hint="numbers with a fraction go into float_data" if name == "label" else None,
        ) from None
    if not -(2**31) <= whole < 2**31:
        raise DatumError(f"the field '{name}' of a Datum is an int32", expected="-2147483648..2147483647", found=whole)
    return whole


def _malformed(where: object, byte: int, expected: str, found: str) -> DatumError:
    return DatumError(
        f"{where}: not a Datum, malformed at byte {byte}",
        expected=expected,
        found=found,
        hint="the record is damaged, or the database holds something other than Caffe's Datum messages",
    )
