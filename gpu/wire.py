"""Protocol buffer messages field by field, without building objects for the numbers in them.

The protobuf library turns every element of a repeated float field into a Python float: a model of 60 million weights
would take seconds and gigabytes. A caffemodel is a few small messages round long packed arrays, and the arrays are read
here as views of the file. Everything else about the messages stays with the library (:mod:`datasets.caffe_pb2`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from profiler.errors import StallscopeError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class WireError(StallscopeError):
    """Bytes that are not a protocol buffer message, or end before it does."""


def fields(data: memoryview, offset: int = 0) -> Iterator[tuple[int, int, int | memoryview]]:
    """Yield (field number, wire type, value) of one message: an int for varints, a view of the bytes for the rest.

    ``offset`` is where ``data`` begins in its file, for the error. Raises WireError for damaged or truncated bytes.
    """
    position, end = 0, len(data)
    while position < end:
        key, position = _varint(data, position, offset)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise WireError(f"not a protocol buffer message: field number 0 at byte {offset + position}")
        if kind == VARINT:
            value, position = _varint(data, position, offset)
            yield number, kind, value
            continue
        if kind == BYTES:
            size, position = _varint(data, position, offset)
        elif kind == FIXED64:
            size = 8
        elif kind == FIXED32:
            size = 4
        else:
            raise WireError(f"not a protocol buffer message: wire type {kind} at byte {offset + position}")
        if position + size > end:
            raise WireError(
                f"the message ends at byte {offset + end}, in the middle of field {number}",
                expected=f"{size} bytes from byte {offset + position} on",
                found=f"{end - position} bytes",
                hint="the file is damaged or its copy was interrupted",
            )
        yield number, kind, data[position : position + size]
        position += size


def _varint(data: memoryview, position: int, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data):
            raise WireError(
                f"the message ends at byte {offset + len(data)}, in the middle of a number",
                hint="the file is damaged or its copy was interrupted",
            )
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise WireError(
                f"not a protocol buffer message: a number of more than 10 bytes at byte {offset + position}"
            )


def varints(data: memoryview) -> list[int]:
    """The elements of a packed varint field."""
    values, position = [], 0
    while position < len(data):
        value, position = _varint(data, position, 0)
        values.append(value)
    return values


def varint(value: int) -> bytes:
    """Encode a non-negative int."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def header(number: int, size: int) -> bytes:
    """What stands before the ``size`` bytes of a field with text, bytes, a packed array or a message in it."""
    return varint(number << 3 | BYTES) + varint(size)


def blob_pieces(array: np.ndarray, diff: np.ndarray | None = None) -> list[bytes | memoryview]:
    """The pieces of a ``BlobProto`` (``data`` and ``diff`` packed float32, ``shape``); the numbers are not copied."""
    dims = b"".join(varint(size) for size in array.shape)
    shape = header(1, len(dims)) + dims if dims else b""
    pieces: list[bytes | memoryview] = []
    for number, numbers in ((5, array), (6, diff)):
        if numbers is not None and numbers.size:
            floats = np.ascontiguousarray(numbers, dtype="<f4")
            pieces += [header(number, floats.nbytes), floats.reshape(-1).view(np.uint8).data]
    pieces += [header(7, len(shape)), shape]
    return pieces


def message_pieces(number: int, pieces: list[bytes | memoryview]) -> list[bytes | memoryview]:
    """The pieces as a field ``number`` of an outer message."""
    return [header(number, sum(len(piece) for piece in pieces)), *pieces]
