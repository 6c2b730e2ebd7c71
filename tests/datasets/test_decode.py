import contextlib
import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from datasets import datum, decode, open_source
from datasets.datum import Datum, DatumError, DatumSizeMismatch
from datasets.decode import ImageDecodeError, ImageModeError
from datasets.errors import DatasetWarning
from profiler.errors import UsageError
from tests.datasets import golden
from tests.fuzz.seeds import file, picture

WHERE = "record 3 (key '00000003') of LMDB /x"


def encoded(data):
    return Datum(data=data, encoded=True)


# golden ---------------------------------------------------------------------------------------------------------------


def test_image_files_become_the_pixels_caffe_stores():
    """The raw database was made by Caffe from the files of the encoded one, in colour: JPEG and PNG, bit for bit."""
    with open_source(golden.DB / "crops24_encoded_native_lmdb") as source:
        kinds = set()
        for index, expected in golden.records("crops24_raw_native_lmdb").items():
            record = source.read(index)
            image = decode.to_image(datum.parse(record.value), record, color="color")
            assert image.shape == (expected["channels"], expected["height"], expected["width"])
            assert golden.md5(image.tobytes()) == expected["md5_data"]
            kinds.add(decode.probe(datum.parse(record.value)).encoding)
        assert kinds == {"jpeg", "png"}


def test_gray_files_keep_their_one_channel():
    with open_source(golden.DB / "crops24_encoded_native_lmdb") as source:
        gray = datum.parse(source.read(7).value)
    one = decode.to_image(gray)
    assert one.shape == (1, 157, 137)
    np.testing.assert_array_equal(decode.to_image(gray, color="color"), np.repeat(one, 3, axis=0))
    np.testing.assert_array_equal(decode.to_image(gray, color="gray"), one)


def test_gray_jpeg_records():
    with open_source(golden.DB / "crops24_gray_jpg_72_leveldb") as source:
        for record in source.read_many(range(24)):
            parsed = datum.parse(record.value)
            image = decode.to_image(parsed, record)
            assert image.shape == (1, 72, 72)
            np.testing.assert_array_equal(image[0], np.asarray(Image.open(io.BytesIO(parsed.data))))
            np.testing.assert_array_equal(decode.to_image(parsed, record, color="color"), np.repeat(image, 3, axis=0))


def test_raw_records_are_the_stored_bytes():
    with open_source(golden.DB / "crops96_raw_40x48_lmdb") as source:
        for index, expected in golden.records("crops96_raw_40x48_lmdb").items():
            image = decode.to_image(datum.parse(source.read(index).value), color="color")
            assert (image.shape, image.dtype) == ((3, 40, 48), np.uint8)
            assert golden.md5(image.tobytes()) == expected["md5_data"]


def test_float_records_are_what_caffe_fed():
    stored = np.load(golden.DB / "float_data_test.npz")
    fed = np.concatenate([stored["data0"], stored["data1"]])
    with open_source(golden.DB / "lenet_ip2_float_lmdb") as source:
        images = [decode.to_image(datum.parse(record.value), record) for record in source.read_many(range(len(fed)))]
    assert images[0].dtype == np.float32
    # That net subtracts 0.5 and multiplies by 2, each rounded to float32.
    np.testing.assert_array_equal((np.stack(images) - np.float32(0.5)) * np.float32(2), fed)


# channels -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "WEBP", "TIFF", "PPM"])
def test_red_is_the_last_channel(kind):
    options = {"lossless": True} if kind == "WEBP" else {"quality": 100} if kind == "JPEG" else {}
    data = file(Image.new("RGB", (16, 16), (255, 0, 0)), kind, **options)
    image = decode.to_image(encoded(data))
    np.testing.assert_allclose(image[:, 5, 5].astype(int), (0, 0, 255), atol=2)
    assert image.flags.c_contiguous
    assert image.dtype == np.uint8


def test_png_to_gray_is_the_weighted_sum():
    rgb = np.asarray(picture()).astype(int)
    expected = (9797 * rgb[..., 0] + 19234 * rgb[..., 1] + 3737 * rgb[..., 2]) >> 15
    np.testing.assert_array_equal(decode.to_image(encoded(file(picture())), color="gray")[0], expected)


def test_jpeg_to_gray_is_the_decoders_luma():
    data = file(picture(size=(32, 32)), "JPEG", quality=95)
    luma = Image.open(io.BytesIO(data))
    luma.draft("L", luma.size)
    np.testing.assert_array_equal(decode.to_image(encoded(data), color="gray")[0], np.asarray(luma))


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_is_decoded_accurately(subsampling, progressive):
    noise = np.random.default_rng(1).integers(0, 256, (33, 47, 3), np.uint8)
    data = file(Image.fromarray(noise), "JPEG", quality=70, subsampling=subsampling, progressive=progressive)
    expected = np.asarray(Image.open(io.BytesIO(data)))[..., ::-1].transpose(2, 0, 1)
    np.testing.assert_array_equal(decode.to_image(encoded(data)), expected)


KINDS = {
    "L": "PNG", "RGB": "PNG", "1": "PNG", "P": "PNG", "LA": "PNG", "RGBA": "PNG", "CMYK": "JPEG", "YCbCr": "TIFF",
    "I;16": "PNG", "I": "TIFF", "F": "TIFF",
}  # fmt: skip


@pytest.mark.parametrize("mode", ["1", "P", "LA", "RGBA", "CMYK", "YCbCr"])
def test_modes_that_need_a_flag(mode):
    record = encoded(file(picture(mode), KINDS[mode]))
    with pytest.raises(ImageModeError, match="force_color") as caught:
        decode.to_image(record, WHERE)
    assert WHERE in str(caught.value)
    assert f"mode {mode}" in str(caught.value)
    colour = decode.to_image(record, WHERE, color="color")
    gray = decode.to_image(record, WHERE, color="gray")
    assert (colour.shape, gray.shape) == ((3, 7, 9), (1, 7, 9))
    assert colour.dtype == gray.dtype == np.uint8
    if mode in ("1", "LA"):
        plain = np.asarray(picture(mode).convert("L"))
        np.testing.assert_array_equal(gray[0], plain)
        np.testing.assert_array_equal(colour, np.stack([plain] * 3))
    else:
        rgb = np.asarray(Image.open(io.BytesIO(record.data)).convert("RGB"))
        np.testing.assert_array_equal(colour, rgb[..., ::-1].transpose(2, 0, 1))
        np.testing.assert_array_equal(gray[0], decode.gray(rgb[..., ::-1]))


def test_alpha_is_dropped_and_not_blended():
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert decode.to_image(encoded(file(clear)), color="color")[:, 0, 0].tolist() == [30, 20, 10]


def test_a_palette_with_transparency_is_looked_up():
    image = picture("P")
    data = file(image, transparency=bytes([0, 128] + [255] * 14))
    expected = np.asarray(image.convert("RGB"))[..., ::-1].transpose(2, 0, 1)
    np.testing.assert_array_equal(decode.to_image(encoded(data), color="color"), expected)


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
@pytest.mark.parametrize("color", [None, "color", "gray"])
def test_modes_no_flag_helps_with(mode, color):
    with pytest.raises(ImageModeError, match="8-bit"):
        decode.to_image(encoded(file(picture(mode), KINDS[mode])), WHERE, color=color)


def test_16_bit_colour_is_not_cut_to_8_silently():
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    data = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(bytes(13)))
        + chunk(b"IEND", b"")
    )
    assert Image.open(io.BytesIO(data)).mode == "RGB"
    with pytest.raises(ImageModeError, match="8-bit"):
        decode.to_image(encoded(data), color="color")
    assert decode.probe(encoded(data)).mode == "RGB;16"


def test_an_unknown_conversion_is_refused():
    with pytest.raises(UsageError, match="sepia"):
        decode.to_image(Datum(), color="sepia")


# flag, sizes and bytes ------------------------------------------------------------------------------------------------


def test_four_combinations_of_flag_and_content(monkeypatch):
    monkeypatch.setattr(decode, "_warned_unflagged", False)
    image = file(picture("L"))
    raw = bytes(range(12))
    assert decode.to_image(Datum(data=image, encoded=True)).shape == (1, 7, 9)
    assert decode.to_image(Datum(1, 3, 4, raw)).shape == (1, 3, 4)
    with pytest.warns(DatasetWarning, match="without the flag 'encoded'"):
        assert decode.to_image(Datum(data=image)).shape == (1, 7, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode.to_image(Datum(data=image))  # said once
    with pytest.raises(ImageDecodeError, match="exactly the 1x3x4 raw pixels"):
        decode.to_image(Datum(1, 3, 4, raw, encoded=True), WHERE)


def test_an_unflagged_file_with_dimensions_is_told_apart_from_pixels():
    data = file(picture("L"))
    with pytest.raises(DatumSizeMismatch, match="begin like a PNG file"):
        decode.to_image(Datum(1, 7, 9, data), WHERE)


def test_pixels_that_look_like_a_file_stay_pixels():
    pixels = b"\xff\xd8\xff\xe0" + bytes(8)
    assert decode.to_image(Datum(1, 3, 4, pixels)).tobytes() == pixels


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (Datum(3, 4, 5, bytes(10)), "10 bytes"),
        (Datum(3, 4, 5, bytes(61)), "61 bytes"),
        (Datum(0, 0, 0, bytes(10)), "10 bytes"),
        (Datum(2, 1, 1, float_data=np.zeros(3, np.float32)), "3 floats"),
        (Datum(float_data=np.zeros(3, np.float32)), "3 floats"),
    ],
)
def test_sizes_must_agree_exactly(record, found):
    with pytest.raises(DatumSizeMismatch) as caught:
        decode.to_image(record, WHERE)
    assert WHERE in str(caught.value)
    assert found in str(caught.value)


@pytest.mark.parametrize(
    "record",
    [Datum(), Datum(1, 2, 2), Datum(encoded=True), Datum(-1, -1, 4, b"abcd"), Datum(data=b"hello", encoded=True)],
)
def test_records_without_content_or_sense(record):
    with pytest.raises(DatumError) as caught:
        decode.to_image(record, WHERE)
    assert WHERE in str(caught.value)


def test_data_wins_over_float_data():
    record = Datum(1, 1, 2, b"ab", float_data=np.zeros(2, np.float32))
    assert decode.to_image(record).dtype == np.uint8


@pytest.mark.parametrize(("channels", "color"), [(1, "color"), (3, "gray"), (4, "color")])
def test_raw_records_are_not_converted(channels, color):
    with pytest.raises(ImageModeError, match=f"force_{color}"):
        decode.to_image(Datum(channels, 1, 1, bytes(channels)), WHERE, color=color)
    wanted = 3 if color == "color" else 1
    assert decode.to_image(Datum(wanted, 1, 1, bytes(wanted)), color=color).shape == (wanted, 1, 1)


# damage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF"])
@pytest.mark.parametrize("keep", [0.5, 0.95, 0.02])
def test_cut_files_are_errors_and_not_half_pictures(kind, keep):
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8))
    data = file(noise.quantize(64) if kind == "GIF" else noise, kind)
    with pytest.raises(ImageDecodeError) as caught:
        decode.to_image(encoded(data[: max(12, int(len(data) * keep))]), WHERE, color="color")
    assert WHERE in str(caught.value)
    assert kind in str(caught.value)


def test_a_cmyk_jpeg_cut_in_half_is_an_error():
    data = file(picture("CMYK", size=(64, 64)), "JPEG")
    with pytest.raises(ImageDecodeError):
        decode.to_image(encoded(data[: len(data) // 2]), color="color")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM"])
def test_the_limit_of_pixels_can_be_set(kind):
    record = encoded(file(Image.new("L", (50, 50)), kind))
    for look in (decode.to_image, decode.probe):
        with pytest.raises(ImageDecodeError, match=r"at most 2,499 pixels(.|\n)*50 x 50 = 2,500"):
            look(record, WHERE, max_pixels=2499)
    assert decode.to_image(record, WHERE, "gray", max_pixels=2500).shape == (1, 50, 50)


@pytest.mark.parametrize("side", [12_000, 60_000])
def test_decompression_bombs_are_refused(side):
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    data += b"\x00\x00\x00\x00IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    with pytest.raises(ImageDecodeError, match="too large"):
        decode.to_image(encoded(data), WHERE)


FILES = [file(picture(mode), kind) for mode, kind in (("RGB", "JPEG"), ("L", "PNG"), ("P", "GIF"), ("RGB", "WEBP"))]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FILES), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6))
def test_scribbled_files_raise_nothing_but_datum_error(data, changes):
    scribbled = bytearray(data)
    for place, value in changes:
        scribbled[place % len(scribbled)] = value
    for flag in (True, False):
        record = Datum(data=bytes(scribbled), encoded=flag)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                image = decode.to_image(record, WHERE, color="color")
            except DatumError:
                continue
        assert image.dtype == np.uint8
        assert len(image) == 3


@given(st.binary(max_size=60), st.booleans(), st.tuples(*[st.integers(-2, 5)] * 3))
def test_any_record_gives_an_image_or_a_datum_error(data, flag, sizes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(DatumError):
            assert decode.to_image(Datum(*sizes, data, encoded=flag)).ndim == 3


# probe ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", KINDS)
def test_probe_reads_the_header(mode):
    seen = decode.probe(encoded(file(picture(mode), KINDS[mode])))
    assert (seen.encoding, seen.mode) == (KINDS[mode].lower(), mode)
    assert (seen.height, seen.width, seen.flagged) == (7, 9, True)
    assert seen.channels == len(picture(mode).getbands())


def test_probe_of_other_records():
    seen = decode.probe(Datum(2, 3, 4, bytes(24)))
    assert (seen.encoding, seen.mode, seen.channels, seen.height, seen.width) == ("raw", "", 2, 3, 4)
    assert decode.probe(Datum(1, 1, 2, float_data=np.zeros(2, np.float32))).encoding == "float"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not decode.probe(Datum(data=FILES[0])).flagged
    with pytest.raises(DatumSizeMismatch):
        decode.probe(Datum(1, 1, 2, b"x"))
