"""What must hold for any bytes, as one function: the fuzzer calls it, the tests replay the corpus through it."""

from __future__ import annotations

import re
import warnings

import numpy as np
from google.protobuf.message import DecodeError

from datasets import caffe_pb2, datum, decode, image_file, jpeg
from datasets.datum import Datum, DatumError

MAX_PIXELS = 1 << 18
WHERE = "record 0 (key '0') of the fuzzer"


def one_input(data: bytes) -> None:
    """Take ``data`` for a record, and for an image file in a record.

    Raises AssertionError where it is read wrongly, and whatever else escapes; a DatumError is a right answer.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parsed = as_record(data)
        if parsed is not None:
            as_image(parsed)
        as_image(Datum(data=data, encoded=True))


def as_record(data: bytes) -> Datum | None:
    """Parse, and compare with protobuf: both read the same, or both refuse."""
    try:
        told = caffe_pb2.Datum.FromString(data)
    except DecodeError:
        told = None
    try:
        parsed = datum.parse(data, WHERE)
    except DatumError as error:
        # Inside an unknown group, protobuf's Python reader lets a field number 0 pass; its C++ reader does not.
        if told is not None and not re.search(r"found: +tag [0-7]\b", str(error)):
            raise AssertionError("protobuf reads what we refuse") from error
        check_error(error)
        return None
    assert told is not None, "protobuf refuses what we read"
    assert (parsed.channels, parsed.height, parsed.width) == (told.channels, told.height, told.width)
    assert bytes(parsed.data) == told.data
    assert parsed.label == (told.label if told.HasField("label") else None)
    assert parsed.encoded == told.encoded
    floats = np.zeros(0, np.float32) if parsed.float_data is None else parsed.float_data
    # As integers: NaN is a number like others here. protobuf holds floats as they were stored.
    stored = np.array(told.float_data, np.float32)
    assert floats.dtype == np.float32
    np.testing.assert_array_equal(np.nan_to_num(floats), np.nan_to_num(stored))
    return parsed


def as_image(record: Datum) -> None:
    """Decode in every way that can be asked for; what the header tells and what comes out agree."""
    try:
        seen = decode.probe(record, WHERE, max_pixels=MAX_PIXELS)
    except DatumError as error:
        check_error(error)
        seen = None
    for color, channels in ((None, None), ("color", 3), ("gray", 1)):
        try:
            image = decode.to_image(record, WHERE, color, max_pixels=MAX_PIXELS)
        except DatumError as error:
            check_error(error)
            image = None
        if bytes(record.data[:2]) == b"\xff\xd8":
            as_parts(record, color, image)
        if image is None:
            continue
        assert seen is not None, "decoded, though the header was refused"
        assert image.ndim == 3
        assert image.dtype == (np.float32 if seen.encoding == "float" else np.uint8)
        assert image.shape == (channels or seen.channels, seen.height, seen.width)
        assert seen.encoding in ("raw", "float") or image[0].size <= MAX_PIXELS


def as_parts(record: Datum, color: image_file.Color | None, image: np.ndarray | None) -> None:
    """A part is that of the image, and refused where the image is; a part alone may miss damage below it."""
    jpeg.prepare()
    boxes: list[jpeg.Box] = []

    def choose(height: int, width: int) -> jpeg.Box:
        boxes.append((height // 3, width // 3, (height + 1) // 2, (width + 1) // 2))
        return boxes[-1]

    for extent in ("full", "region"):
        try:
            part = decode.part(record, WHERE, color, choose, extent=extent, max_pixels=MAX_PIXELS)  # type: ignore[arg-type]
        except DatumError as error:
            check_error(error)
            assert image is None, "refused in part, and decoded whole"
            continue
        if image is None:
            assert extent == "region", "decoded in part, and refused whole"
            continue
        top, left, height, width = boxes[-1]
        pixels = part.pixels[..., : part.channels].transpose(2, 0, 1) if part.packed else part.pixels
        assert pixels.tobytes() == image[:, top : top + height, left : left + width].tobytes()


def check_error(error: DatumError) -> None:
    """An error names the record, and is short whatever the record holds."""
    text = str(error)
    assert WHERE in text
    assert len(text) < 2000
