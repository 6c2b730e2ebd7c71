"""Every result is held to libjpeg-turbo's own (simplejpeg): the same pixels, or left to it."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from datasets import datum, decode, image_file, jpeg
from datasets.image_file import ImageDecodeError, ImageModeError


@pytest.fixture(scope="module", autouse=True)
def _ready() -> None:
    jpeg.prepare()


def turbo(data: bytes, channels: int = 3) -> np.ndarray:
    """uint8[H, W, C] of the whole file. Raises ValueError for damage that libjpeg-turbo warns of."""
    return simplejpeg.decode_jpeg(
        data, colorspace="BGR" if channels == 3 else "GRAY", fastdct=False, fastupsample=False, strict=True
    )


def photo(height: int, width: int, seed: int = 0, noise: int = 30) -> np.ndarray:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 5, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    return np.clip(np.asarray(coarse).astype(int) + rng.integers(-noise, noise + 1, (height, width, 3)), 0, 255).astype(
        np.uint8
    )


def file(pixels: np.ndarray, **how: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", **how)
    return out.getvalue()


def ours(data: bytes, channels: int = 3, box: jpeg.Box | None = None, *, whole: bool = True) -> np.ndarray | None:
    head = jpeg.header(data)
    pixels = jpeg.decode(data, head, channels, box, whole=whole) if head is not None else None
    return None if pixels is None else pixels[..., :channels].copy()


@st.composite
def files(draw: Any) -> tuple[bytes, int]:
    height, width = draw(st.integers(1, 70)), draw(st.integers(5, 70))
    pixels = photo(height, width, draw(st.integers(0, 99)), draw(st.sampled_from([0, 10, 60])))
    gray = draw(st.integers(0, 4)) == 0
    if gray:
        pixels = pixels[..., 1]
    how: dict[str, Any] = {} if gray else {"subsampling": draw(st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]))}
    data = file(pixels, quality=draw(st.integers(1, 95)), optimize=draw(st.booleans()), **how)
    return data, draw(st.sampled_from([1, 3]))


@settings(max_examples=60, deadline=None)
@given(files(), st.data())
def test_all_and_any_part_have_the_bits_of_libjpeg_turbo(made: tuple[bytes, int], data: st.DataObject) -> None:
    stored, channels = made
    want = turbo(stored, channels)
    height, width = want.shape[:2]
    got = ours(stored, channels)
    assert got is not None
    assert got.tobytes() == want.tobytes()
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    box = (top, left, data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left)))
    for whole in (True, False):
        got = ours(stored, channels, box, whole=whole)
        assert got is not None
        assert got.tobytes() == want[top : top + box[2], left : left + box[3]].tobytes()


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_large_pictures_and_what_a_memoryview_holds(subsampling: str) -> None:
    stored = file(photo(375, 500, noise=12), quality=90, subsampling=subsampling)
    head = jpeg.header(memoryview(b"xx" + stored)[2:])
    assert head is not None
    pixels = jpeg.decode(memoryview(b"xx" + stored)[2:], head, 3)
    assert pixels is not None
    assert pixels[..., :3].tobytes() == turbo(stored).tobytes()


def test_coefficients_that_overflow_16_bits_are_left_to_libjpeg_turbo() -> None:
    checks = np.random.default_rng(0).integers(0, 2, (64, 64, 1), np.uint8) * np.uint8(255)
    stored = file(np.repeat(checks, 3, 2), quality=100, subsampling="4:4:4")
    assert ours(stored) is None
    tables = [[1] * 64, [1] * 64]
    gentle = file(photo(64, 64, noise=3), qtables=tables, subsampling="4:4:4")
    assert ours(gentle) is not None


@pytest.mark.parametrize(
    "how",
    [
        {"progressive": True}, {"restart_marker_blocks": 2}, {"streamtype": 2},
    ],
)  # fmt: skip
def test_other_files_are_not_for_this_decoder(how: dict[str, Any]) -> None:
    assert jpeg.header(file(photo(40, 40), **how)) is None


def test_cmyk_and_narrow_chroma_and_other_sampling_are_not_for_this_decoder() -> None:
    cmyk = io.BytesIO()
    Image.new("CMYK", (20, 20)).save(cmyk, "JPEG")
    assert jpeg.header(cmyk.getvalue()) is None
    assert jpeg.header(file(photo(20, 4), subsampling="4:2:0")) is None
    odd = simplejpeg.encode_jpeg(photo(20, 20), colorsubsampling="440")
    assert jpeg.header(odd) is None


def agrees(stored: bytes, channels: int = 3) -> bool:
    """Whether the decoder leaves the file alone, or gives what libjpeg-turbo gives without a warning."""
    got = ours(stored, channels)
    if got is None:
        return False
    assert got.tobytes() == turbo(stored, channels).tobytes()
    return True


def test_a_file_that_is_cut_anywhere_is_never_taken_for_whole() -> None:
    stored = file(photo(24, 40, noise=60), quality=85, subsampling="4:2:0")
    assert agrees(stored)
    for length in range(len(stored)):
        assert ours(stored[:length]) is None


def test_bytes_that_were_changed_are_refused_or_decoded_as_libjpeg_turbo_decodes_them() -> None:
    rng = random.Random(3)
    stored = [
        file(photo(24, 40, noise=60), quality=85, subsampling=way, optimize=way == "4:2:2")
        for way in ("4:2:0", "4:2:2")
    ]
    taken = 0
    for turn in range(1000):
        changed = bytearray(stored[turn % 2])
        for _ in range(rng.choice([1, 1, 2, 5])):
            # The tables are where a mistake would matter most, and a small part of the bytes.
            place = rng.randrange(len(changed) if turn % 3 else 700)
            changed[place] = rng.choice([0, 255, rng.randrange(256), changed[place] ^ (1 << rng.randrange(8))])
        taken += agrees(bytes(changed))
        head = jpeg.header(bytes(changed))
        if head is not None:  # whatever comes out: it ends, and in its own memory
            height, width = min(head.height, 9), min(head.width, 17)
            ours(bytes(changed), box=(head.height - height, head.width - width, height, width), whole=False)
    assert taken > 100


def test_a_part_does_not_notice_damage_below_it_and_a_whole_file_does() -> None:
    stored = file(photo(64, 48, noise=60), quality=85, subsampling="4:2:0")
    cut = stored[: len(stored) * 2 // 3]
    got = ours(cut, box=(0, 0, 16, 48), whole=False)
    assert got is not None
    assert got.tobytes() == turbo(stored)[:16].tobytes()
    assert ours(cut, box=(0, 0, 16, 48)) is None
    assert ours(cut, box=(0, 0, 64, 48), whole=False) is None


@pytest.mark.parametrize("box", [(-1, 0, 4, 4), (0, 0, 0, 4), (20, 0, 5, 4), (0, 39, 4, 2)])
def test_a_part_outside_of_the_picture_is_an_error_of_the_caller(box: jpeg.Box) -> None:
    with pytest.raises(ValueError, match="does not lie in a picture of 40 x 24"):
        ours(file(photo(24, 40)), box=box)


def record(data: bytes) -> datum.Datum:
    return datum.Datum(data=data, label=1, encoded=True)


def choose(height: int, width: int) -> jpeg.Box:
    return height // 4, width // 3, height // 2, width // 2


def planes(part: image_file.Part) -> np.ndarray:
    return part.pixels[..., : part.channels].transpose(2, 0, 1) if part.packed else part.pixels


@pytest.mark.parametrize("extent", ["full", "region", "scaled"])
@pytest.mark.parametrize("color", [None, "color", "gray"])
@pytest.mark.parametrize("kind", ["jpeg", "gray", "progressive", "restart", "cmyk", "exif", "png", "palette"])
def test_a_part_is_that_of_the_whole_image(kind: str, color: Any, extent: Any) -> None:
    pixels = photo(60, 90)
    made = {
        "jpeg": lambda: file(pixels), "gray": lambda: file(pixels[..., 0]),
        "progressive": lambda: file(pixels, progressive=True), "restart": lambda: file(pixels, restart_marker_blocks=3),
        "cmyk": lambda: _saved(Image.fromarray(pixels).convert("CMYK"), "JPEG"), "exif": lambda: _turned(pixels),
        "png": lambda: _saved(Image.fromarray(pixels), "PNG"),
        "palette": lambda: _saved(Image.fromarray(pixels).quantize(), "PNG"),
    }[kind]()  # fmt: skip
    if color is None and kind in ("cmyk", "palette"):
        with pytest.raises(ImageModeError):
            decode.part(record(made), "a record", color, choose, extent=extent, size=40)
        return
    whole = decode.to_image(record(made), color=color)
    part = decode.part(record(made), "a record", color, choose, extent=extent, size=40)
    assert part.packed == (kind in ("jpeg", "gray", "exif"))
    assert part.span == (0, whole.shape[1] // 2, 0, whole.shape[2] // 2)
    top, left, height, width = choose(*whole.shape[1:])
    assert planes(part).tobytes() == whole[:, top : top + height, left : left + width].tobytes()


@pytest.mark.parametrize("extent", ["full", "region", "scaled"])
@pytest.mark.parametrize("kind", ["jpeg", "gray", "progressive", "cmyk"])
def test_a_cut_file_is_an_error_that_names_the_record(kind: str, extent: Any) -> None:
    pixels = photo(60, 90)
    whole = {
        "jpeg": lambda: file(pixels), "gray": lambda: file(pixels[..., 0]),
        "progressive": lambda: file(pixels, progressive=True),
        "cmyk": lambda: _saved(Image.fromarray(pixels).convert("CMYK"), "JPEG"),
    }[kind]()  # fmt: skip
    cut = record(whole[: len(whole) // 2])
    with pytest.raises(ImageDecodeError, match="record 7"):
        decode.part(cut, "record 7", "color", lambda height, width: (0, 0, height, width), extent=extent, size=4)


def test_an_image_that_is_too_large_or_has_too_many_scans_is_refused_by_its_header() -> None:
    with pytest.raises(ImageDecodeError, match="too large"):
        decode.part(record(file(photo(60, 90))), "r", None, choose, max_pixels=5399)
    many = file(photo(60, 90), comment=b"\xff\xda" * 501)
    with pytest.raises(ImageDecodeError, match="too many scans"):
        decode.part(record(many), "r", None, choose)


@pytest.mark.parametrize(("size", "factor"), [(31, 1), (30, 2), (15, 4), (14, 4), (7, 8), (1, 8)])
def test_scaled_takes_the_largest_factor_that_leaves_enough(size: int, factor: int) -> None:
    stored = file(photo(121, 187), quality=95)
    part = decode.part(record(stored), "r", None, lambda height, width: (33, 51, 61, 90), extent="scaled", size=size)
    assert part.packed == (factor == 1)
    top, height, left, width = part.span
    assert (height, width) == (61 / factor, 90 / factor)
    if factor == 1:
        return
    assert (top, left) == (33 / factor % 1, 51 / factor % 1)
    whole = simplejpeg.decode_jpeg(
        stored, "BGR", min_height=-(-121 // factor), min_width=-(-187 // factor), min_factor=factor
    )
    assert whole.shape == (-(-121 // factor), -(-187 // factor), 3)
    rows, columns = slice(33 // factor, -(-94 // factor)), slice(51 // factor, -(-141 // factor))
    assert part.pixels.tobytes() == whole[rows, columns].transpose(2, 0, 1).tobytes()


def test_before_the_kernels_are_there_libjpeg_turbo_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = record(file(photo(60, 90)))
    fast = planes(decode.part(stored, "r", None, choose)).copy()
    monkeypatch.setattr(jpeg, "ready", lambda: False)
    slow = decode.part(stored, "r", None, choose)
    assert not slow.packed
    assert slow.pixels.tobytes() == fast.tobytes()


def _saved(image: Image.Image, kind: str) -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def _turned(pixels: np.ndarray) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return file(pixels, exif=exif)


def test_headers_that_begin_alike_are_read_once_and_others_are_not_taken_for_them() -> None:
    def file(quality: int, height: int = 24) -> bytes:
        picture = np.random.default_rng(quality).integers(0, 256, (height, 32, 3), dtype=np.uint8)
        return simplejpeg.encode_jpeg(picture, quality, "BGR", "420")

    files = [file(quality) for quality in range(60, 60 + 2 * jpeg._KEPT)] + [file(60, 25), file(61)[:-40]]
    found = [jpeg.header(one) for one in files]
    assert len({id(head) for head in found}) == 2 * jpeg._KEPT + 2
    for one, head in zip(files, found, strict=True):
        assert head == jpeg._segments(one)
        again = jpeg.header(memoryview(bytearray(one)))
        assert again == head
        assert jpeg.header(one) is again
    for cut in range(len(files[0][: found[0].start])):  # type: ignore[union-attr]
        assert jpeg.header(files[0][:cut]) is None


def test_tables_of_another_file_are_not_used() -> None:
    """Decoded in turn, each file is what it is alone."""
    picture = np.random.default_rng(1).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    files = [simplejpeg.encode_jpeg(picture, quality, "BGR", "420") for quality in (50, 90, 50, 75, 90)]
    for one in files:
        head = jpeg.header(one)
        assert head is not None
        decoded = jpeg.decode(one, head, 3)
        assert decoded is not None
        wanted = simplejpeg.decode_jpeg(one, "BGR", fastdct=False, fastupsample=False)
        np.testing.assert_array_equal(decoded[..., :3], wanted)
