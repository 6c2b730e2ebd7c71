"""What has gone wrong with records for others: each test builds the database that showed it, and reads it."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from PIL import Image

from datasets import caffe_pb2, datum, decode, inspect, open_source
from datasets.datum import DatumError, DatumSizeMismatch
from datasets.decode import ImageDecodeError, ImageModeError
from datasets.errors import DatasetWarning
from pipeline.maker import BatchMaker, LabelError, LocalReader, probe
from pipeline.spec import FeedSpec, TransformSpec
from pipeline.transforms import TransformError
from profiler.errors import StallscopeError, UsageError
from tests.fuzz.seeds import file, picture

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "images.md"
TABLE = re.findall(
    r"^\| `(\S+)` \| .+? \| (\d|refused) \| (\d|refused).*? \| (\d|refused).*? \|$", DOCUMENT.read_text(), re.M
)
COLORS: tuple[decode.Color | None, ...] = (None, "color", "gray")
KINDS = {"PA": "TIFF", "CMYK": "TIFF", "YCbCr": "TIFF", "I": "TIFF", "F": "TIFF", "P": "GIF"}


def database(folder: Path, values: list[bytes], names: str = "%08d") -> str:
    with lmdb.open(str(folder), map_size=64 << 20) as env, env.begin(write=True) as txn:
        for index, value in enumerate(values):
            txn.put((names % index).encode(), value)
    return str(folder)


def raw(shape: tuple[int, int, int] = (3, 4, 5), label: int | None = 1, data: bytes | None = None) -> bytes:
    channels, height, width = shape
    pixels = bytes(range(256)) * (channels * height * width // 256 + 1)
    content = pixels[: channels * height * width] if data is None else data
    return datum.serialize(channels=channels, height=height, width=width, data=content, label=label)


def encoded(data: bytes, label: int = 1) -> bytes:
    return datum.serialize(data=data, label=label, encoded=True)


def image_of(path: str, index: int, color: decode.Color | None = None) -> np.ndarray:
    with open_source(path) as source:
        record = source.read(index)
        return decode.to_image(datum.parse(record.value, record), record, color)


def batch(path: str, size: int, step: int = 0, **transform: Any) -> tuple[np.ndarray, np.ndarray]:
    """Data and labels of one batch in key order, as the feed makes it."""
    spec = FeedSpec(path, size, shuffle="none", transform=TransformSpec(**transform))
    with open_source(path) as source:
        probed = probe(spec, source)
        slot = probed.layout.views(np.zeros(probed.layout.nbytes, np.uint8))
        BatchMaker(spec, probed, LocalReader(source)).make(step, slot)
        return slot.data.copy(), slot.labels.copy()


# C1: the flag 'encoded', the bytes and the dimensions -----------------------------------------------------------------


def test_c1_flag_bytes_and_dimensions_in_every_combination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_warned_unflagged", False)
    png, pixels = file(picture("L")), bytes(12)
    path = database(
        tmp_path / "db",
        [
            datum.serialize(data=png, encoded=True, label=0),
            datum.serialize(channels=1, height=3, width=4, data=pixels, label=0),
            datum.serialize(data=png, label=0),
            datum.serialize(channels=1, height=3, width=4, data=pixels, encoded=True, label=0),
        ],
    )
    assert image_of(path, 0).shape == (1, 7, 9)
    assert image_of(path, 1).shape == (1, 3, 4)
    with pytest.warns(DatasetWarning, match="record 2 .* without the flag 'encoded'"):
        assert image_of(path, 2).shape == (1, 7, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert image_of(path, 2).shape == (1, 7, 9)  # one warning is enough
    with pytest.raises(ImageDecodeError, match=r"record 3 \(key '00000003'\)(.|\n)*the flag 'encoded' is wrong"):
        image_of(path, 3)


# C2: modes ------------------------------------------------------------------------------------------------------------


def sixteen_bit_colour() -> bytes:
    import struct
    import zlib

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 9, 7, 16, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress((b"\0" + bytes(54)) * 7)) + chunk(b"IEND", b"")


def of_mode(mode: str) -> bytes:
    """The same picture as a file of this mode."""
    return sixteen_bit_colour() if mode == "RGB;16" else file(picture(mode), KINDS.get(mode, "PNG"))


def test_c2_the_table_in_the_document_names_every_mode() -> None:
    modes = [mode for mode, *_ in TABLE]
    assert len(modes) == len(set(modes)) == 13
    assert set(modes) >= {"L", "RGB", "1", "P", "PA", "LA", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F"}


@pytest.mark.parametrize(("mode", "told"), [(mode, told) for mode, *told in TABLE])
def test_c2_each_mode_becomes_what_the_document_says(tmp_path: Path, mode: str, told: list[str]) -> None:
    path = database(tmp_path / "db", [encoded(of_mode(mode))])
    for color, expected in zip(COLORS, told, strict=True):
        if expected == "refused":
            with pytest.raises(ImageModeError) as caught:
                image_of(path, 0, color)
            text = str(caught.value)
            assert "key '00000000'" in text
            assert f"mode {mode}" in text
            assert ("set force_color (or force_gray)" in text) is (told[1] != "refused")
            continue
        image = image_of(path, 0, color)
        assert (image.shape, image.dtype) == ((int(expected), 7, 9), np.uint8)
        plain = picture("P" if mode == "PA" else mode)  # the palette's colours, without the alpha
        rgb = np.asarray(plain.convert("RGB")).astype(np.int64)
        if mode in ("L", "1", "LA"):
            np.testing.assert_array_equal(image, np.stack([np.asarray(plain.convert("L"))] * int(expected)))
        elif expected == "3":
            np.testing.assert_array_equal(image, rgb[..., ::-1].transpose(2, 0, 1))
        else:
            np.testing.assert_array_equal(
                image[0], (9797 * rgb[..., 0] + 19234 * rgb[..., 1] + 3737 * rgb[..., 2]) >> 15
            )


def test_c2_one_odd_image_after_34_good_ones(tmp_path: Path) -> None:
    modes = [mode for mode, *_ in TABLE if mode != "RGB"]
    good = [encoded(file(picture("RGB", (64, 64)), "JPEG"))] * 34
    odd = [encoded(of_mode(mode)) for mode in modes]
    path = database(tmp_path / "db", good + odd)
    for step in range(2):
        assert batch(path, 17, step, crop=7)[0].shape == (17, 3, 7, 7)
    place = 34 + modes.index("P")
    with pytest.raises(ImageModeError, match=f"record {place} (.|\n)*mode P(.|\n)*force_color"):
        batch(path, 1, place, crop=7)
    with open_source(path) as source:
        document = inspect.examine(source)
    assert document["modes"] == {"RGB": 34, **dict.fromkeys(modes, 1)}
    assert any("not decoded without force_color" in text for text in document["warnings"])
    assert any("I;16" in text and "never decoded" in text for text in document["warnings"])


@pytest.mark.parametrize(("channels", "color"), [(1, "color"), (3, "gray"), (4, "color")])
def test_c2_a_flag_is_not_ignored_on_raw_records(tmp_path: Path, channels: int, color: decode.Color) -> None:
    path = database(tmp_path / "db", [raw((channels, 4, 5))])
    with pytest.raises(ImageModeError, match=f"force_{color}"):
        image_of(path, 0, color)


# C4: a mean that does not fit -----------------------------------------------------------------------------------------


def mean_file(folder: Path, *shape: int) -> str:
    blob = caffe_pb2.BlobProto(num=1, channels=shape[0], height=shape[1], width=shape[2])
    blob.data.extend([100.0] * int(np.prod(shape)))
    place = folder / "mean.binaryproto"
    place.write_bytes(blob.SerializeToString())
    return str(place)


def test_c4_a_mean_of_another_size_is_refused_and_not_resized(tmp_path: Path) -> None:
    path = database(tmp_path / "db", [raw((3, 227, 227))])
    with pytest.raises(TransformError) as caught:
        batch(path, 1, crop=200, mean_file=mean_file(tmp_path, 3, 256, 256))
    for part in ("3 x 256 x 256", "3 x 227 x 227", "crop 200", "record 0", "nothing is resized"):
        assert part in str(caught.value)
    data, _ = batch(path, 1, crop=200, mean_file=mean_file(tmp_path, 3, 227, 227))
    assert data.shape == (1, 3, 200, 200)


def test_c4_a_record_that_differs_later_is_compared_again(tmp_path: Path) -> None:
    path = database(tmp_path / "db", [raw((3, 8, 8)), raw((3, 8, 9))])
    with pytest.raises(TransformError, match=r"record 1 (.|\n)*3 x 8 x 9(.|\n)*mean 3 x 8 x 8"):
        batch(path, 2, crop=4, mean_file=mean_file(tmp_path, 3, 8, 8))


def test_c4_as_many_mean_values_as_channels(tmp_path: Path) -> None:
    path = database(tmp_path / "db", [raw((1, 4, 4))])
    with pytest.raises(TransformError, match=r"1 or 1 numbers(.|\n)*3: \[1\.0, 2\.0, 3\.0\]"):
        batch(path, 1, mean_value=(1.0, 2.0, 3.0))
    with pytest.raises(UsageError, match="exclude each other"):
        batch(path, 1, mean_value=(1.0,), mean_file=mean_file(tmp_path, 1, 4, 4))


def test_c4_a_mean_in_the_order_of_an_image_library_is_refused(tmp_path: Path) -> None:
    path = database(tmp_path / "db", [raw((3, 8, 8))])
    with pytest.raises(TransformError, match=r"shape 3 x 8 x 8(.|\n)*mean 8 x 8 x 3"):
        batch(path, 1, mean_file=mean_file(tmp_path, 8, 8, 3))


# C5: sizes ------------------------------------------------------------------------------------------------------------


def test_c5_bytes_and_dimensions_must_agree(tmp_path: Path) -> None:
    values = [raw((3, 4, 5), data=bytes(size)) for size in (60, 10, 61, 0)]
    path = database(tmp_path / "db", values)
    assert image_of(path, 0).shape == (3, 4, 5)
    for index, found in ((1, "10 bytes"), (2, "61 bytes")):
        assert caffe_pb2.Datum.FromString(values[index]).channels == 3  # protobuf alone has no complaint
        with pytest.raises(DatumSizeMismatch) as caught:
            image_of(path, index)
        for part in (f"key '0000000{index}'", "60 bytes", found):
            assert part in str(caught.value)
    with pytest.raises(DatumError, match="neither data nor float_data"):
        image_of(path, 3)


def test_c5_mixed_sizes_need_a_crop(tmp_path: Path) -> None:
    path = database(tmp_path / "db", [raw((3, 30, 30))] * 3 + [raw((3, 30, 24))], "%08d.jpg")
    with pytest.raises(TransformError) as caught:
        batch(path, 4)
    for part in ("'00000000.jpg'", "'00000003.jpg'", "3 x 30 x 30", "3 x 30 x 24", "crop"):
        assert part in str(caught.value)
    assert batch(path, 4, crop=20)[0].shape == (4, 3, 20, 20)
    with open_source(path) as source:
        document = inspect.examine(source)
    assert document["shapes"] == {"3x30x30": 3, "3x30x24": 1}
    assert any("2 different shapes" in text and "record 3 is 3x30x24" in text for text in document["warnings"])


def test_c5_data_wins_over_float_data(tmp_path: Path) -> None:
    value = datum.serialize(channels=1, height=1, width=2, data=b"ab", float_data=[1.5, 2.5], label=1)
    assert image_of(database(tmp_path / "db", [value]), 0).tolist() == [[[97, 98]]]


# C7, C8: labels -------------------------------------------------------------------------------------------------------


def test_c7_labels_are_read_as_stored_and_odd_ones_are_told_of(tmp_path: Path) -> None:
    stored = [-1, 10, 1456, 300, 2**31 - 1, -(2**31), 0, 9]
    path = database(tmp_path / "db", [raw(label=label) for label in stored])
    assert batch(path, 8)[1].tolist() == stored
    with open_source(path) as source:
        document = inspect.examine(source)
    assert (document["labels"]["min"], document["labels"]["max"]) == (-(2**31), 2**31 - 1)
    assert any("2 records with a negative label" in text for text in document["warnings"])


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ([*range(10)] * 3 + [1456], "labels go up to 1456, but only 11"),
        ([*range(1, 11)] * 3, "labels run from 1 to 10"),
        ([*range(10)] * 3, None),
        ([300, *range(300)], None),
        ([0, 1] * 20 + [255], "labels go up to 255"),
    ],
)
def test_c7_a_range_that_no_net_expects_is_warned_of(tmp_path: Path, labels: list[int], told: str | None) -> None:
    order = np.random.default_rng(3).permutation(len(labels))
    path = database(tmp_path / "db", [raw(label=labels[place]) for place in order])
    with open_source(path) as source:
        found = inspect.examine(source)["warnings"]
    assert (told is None and found == []) or any(told in text for text in found if told)


def test_c8_a_label_cut_off_is_absent_and_not_zero(tmp_path: Path) -> None:
    whole = raw(label=7)
    cut = whole[:-2]
    assert caffe_pb2.Datum.FromString(cut).label == 0  # what reading without care makes of it
    path = database(tmp_path / "db", [whole, raw(label=0), cut])
    assert batch(path, 2)[1].tolist() == [7, 0]
    with pytest.raises(LabelError, match=r"record 2 (.|\n)*has no label(.|\n)*not the same as label 0"):
        batch(path, 3)
    with open_source(path) as source:
        document = inspect.examine(source)
    assert document["labels"]["absent"] == 1
    assert document["labels"]["counts"] == {"0": 1, "7": 1}
    assert any("1 record without a label" in text for text in document["warnings"])


@pytest.mark.parametrize("label", [2.5, 2.0, "3", 2**31, None])
def test_c8_only_int32_goes_into_a_label(label: Any) -> None:
    if label is None:
        assert datum.parse(raw(label=None)).label is None
        return
    with pytest.raises(DatumError):
        raw(label=label)


def test_c8_labels_with_a_fraction_or_several_lie_in_float_data(tmp_path: Path) -> None:
    rows = np.float32([[2.7272, -1.5], [0.0, 300.25]])
    values = [datum.serialize(channels=1, height=1, width=2, data=b"ab", float_data=row) for row in rows]
    path = database(tmp_path / "db", values)
    _, labels = batch(path, 2)
    assert labels.dtype == np.float32
    np.testing.assert_array_equal(labels, rows)
    with open_source(path) as source:
        document = inspect.examine(source)
    assert (document["labels"]["vectors"], document["labels"]["absent"]) == (2, 0)
    assert document["warnings"] == []


# C11: the order of channels -------------------------------------------------------------------------------------------


def test_c11_red_is_channel_2_however_it_is_stored(tmp_path: Path) -> None:
    red = Image.new("RGB", (16, 16), (255, 0, 0))
    files = {kind: file(red, kind, lossless=True) for kind in ("PNG", "BMP", "TIFF", "PPM", "WEBP")}
    files["JPEG"] = file(red, "JPEG", quality=100, subsampling=0)
    jpeg = decode.to_image(datum.Datum(data=files["JPEG"], encoded=True))
    bgr = np.ascontiguousarray(np.asarray(red)[..., ::-1].transpose(2, 0, 1))
    values = [encoded(data) for data in files.values()]
    values += [raw((3, 16, 16), data=pixels.tobytes()) for pixels in (bgr, jpeg)]
    path = database(tmp_path / "db", values)
    data, _ = batch(path, len(values))
    means = data.mean(axis=(2, 3))
    np.testing.assert_allclose(means, np.tile([0, 0, 255], (len(values), 1)), atol=1.01)  # JPEG rounds
    np.testing.assert_array_equal(data[list(files).index("JPEG")], data[-1])
    np.testing.assert_array_equal(data[list(files).index("PNG")], data[-2])
    with open_source(path) as source:
        np.testing.assert_allclose(inspect.examine(source)["channel_mean"], [0, 0, 255], atol=1.01)


# C15: images that are damaged, or none --------------------------------------------------------------------------------


def test_c15_half_a_jpeg_is_an_error_and_not_half_a_picture(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8))
    whole = file(noise, "JPEG")
    path = database(tmp_path / "db", [encoded(whole), encoded(whole[: len(whole) // 2])], "%08d_photo.jpg")
    assert image_of(path, 0).shape == (3, 64, 64)
    for color in COLORS:
        with pytest.raises(ImageDecodeError, match=r"record 1 \(key '00000001_photo.jpg'\)(.|\n)*cut or damaged"):
            image_of(path, 1, color)
    with pytest.raises(StallscopeError, match=r"00000001_photo\.jpg"):
        batch(path, 2)


def test_c15_the_content_decides_and_not_the_name(tmp_path: Path) -> None:
    text = b"<html>404 Not Found</html>"
    values = [encoded(file(picture())), encoded(text), encoded(b"")]
    path = database(tmp_path / "db", values, "%08d_photo.jpg")
    np.testing.assert_array_equal(image_of(path, 0), np.asarray(picture())[..., ::-1].transpose(2, 0, 1))
    with pytest.raises(ImageDecodeError, match=r"record 1 (.|\n)*its bytes are not one(.|\n)*3c 68 74 6d"):
        image_of(path, 1)
    with pytest.raises(ImageDecodeError, match=r"record 2 .*holds no bytes"):
        image_of(path, 2)
    with open_source(path) as source:
        document = inspect.examine(source)
    assert document["encodings"] == {"png": 1}
    assert [entry["index"] for entry in document["bad"]] == [1, 2]
