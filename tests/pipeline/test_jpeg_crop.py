"""Crops straight from the decoder have the bits of a full decode, a crop, a mirror and the formula of the mean."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets import datum, decode, jpeg
from datasets.resize import resize
from datasets.source import Record, open_source
from pipeline import jpeg_crop, maker, philox, ray_runtime
from pipeline.feed import Feed
from pipeline.jpeg_crop import JpegCrop
from pipeline.maker import probe
from pipeline.spec import FeedSpec, TransformSpec
from pipeline.transforms import TransformError
from profiler.errors import StallscopeError, UsageError
from tests.pipeline.build import encoded, picture, raw, write_lmdb, write_mean

MEANS = (104.0, 117.5, 123.0)


def smooth(seed: int, height: int, width: int, channels: int = 3) -> np.ndarray:
    """A picture that the fast decoder takes: noise overflows libjpeg's vector code, and is left to it."""
    return resize(picture(seed, (channels, -(-height // 6), -(-width // 6))), height, width)


def file_of(image: np.ndarray, subsampling: str, quality: int) -> bytes:
    rows = np.ascontiguousarray(image.transpose(1, 2, 0))
    space = "GRAY" if len(image) == 1 else "BGR"
    return simplejpeg.encode_jpeg(rows, quality=quality, colorspace=space, colorsubsampling=subsampling)


def spec(source: str, **more: Any) -> FeedSpec:
    transform = {key: more.pop(key) for key in list(more) if key in TransformSpec.__annotations__}
    return FeedSpec(
        source, poison=True, transform=TransformSpec(**{"crop": 20, "mirror": True, **transform}),
        **{"batch": 4, "seed": 5, "shuffle": "full", "stop_step": 12, "fingerprints": "step", **more},
    )  # fmt: skip


class One:
    """A source of one record."""

    name, backend, blobs = "one", "memory", ()

    def __init__(self, value: bytes, index: int = 0) -> None:
        self.record = Record(index, b"key", value, "one")

    def __len__(self) -> int:
        return 1

    def read(self, index: int) -> Record:
        return self.record


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    height, width = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    noisy = draw(st.booleans())
    return {
        "height": height, "width": width, "noisy": noisy, "crop": draw(st.integers(0, min(height, width))),
        "channels": draw(st.sampled_from([1, 3])),
        "subsampling": draw(st.sampled_from(["444", "422", "420", "440", "411"])),
        "quality": draw(st.integers(5, 100)), "seed": draw(st.integers(0, 2**64 - 1)), "epoch": draw(st.integers(0, 5)),
        "index": draw(st.integers(0, 10**7)), "color": draw(st.sampled_from([None, "color", "gray"])),
        "phase": draw(st.sampled_from(["TRAIN", "TEST"])), "mirror": draw(st.booleans()),
        "decode": draw(st.sampled_from(["full", "region"])), "mean": draw(st.sampled_from(["none", "value", "image"])),
        "pixels": draw(st.sampled_from(["float32", "uint8"])),
    }  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _decoder() -> None:
    jpeg.prepare()


@settings(max_examples=250, deadline=None)
@given(case=cases())
def test_bits_are_those_of_the_whole_picture_cropped(tmp_path_factory: pytest.TempPathFactory, case: Any) -> None:
    shape = (case["channels"], case["height"], case["width"])
    image = picture(case["index"], shape) if case["noisy"] else smooth(case["index"], *shape[1:], shape[0])
    value = datum.serialize(data=file_of(image, case["subsampling"], case["quality"]), label=7, encoded=True)
    whole = decode.to_image(datum.parse(value), color=case["color"])
    mean: dict[str, Any] = {}
    means = np.zeros((len(whole), 1, 1), np.float32)
    if case["mean"] == "value":
        mean["mean_value"] = MEANS[: len(whole)]
        means[:, 0, 0] = mean["mean_value"]
    elif case["mean"] == "image" and case["pixels"] == "float32":
        means = np.random.default_rng(1).normal(100, 40, whole.shape).astype(np.float32)
        mean["mean_file"] = write_mean(tmp_path_factory.mktemp("mean") / "mean.binaryproto", means)
    asked = spec(
        "one", phase=case["phase"], crop=case["crop"], mirror=case["mirror"], scale=0.017, color=case["color"],
        seed=case["seed"] % 2**63, pixels=case["pixels"], decode=case["decode"] if case["crop"] else "full", **mean,
    )  # fmt: skip
    source = One(value, case["index"])
    probed = probe(asked, source)  # type: ignore[arg-type]
    made = maker.BatchMaker(asked, probed, source)._jpeg  # type: ignore[arg-type]
    assert made is not None
    out = np.full(probed.sample_shape, 0xFF, probed.layout.pixels)
    assert made.sample(source.record, case["epoch"], out) == 7

    rows, columns = probed.sample_shape[1:]
    draws = philox.draw(
        asked.seed, asked.phase_number, np.array([case["epoch"]]), np.array([case["index"]]),
        (np.array([whole.shape[1] - rows]), np.array([whole.shape[2] - columns])),
        mirror=case["mirror"], random_crop=bool(case["crop"]) and case["phase"] == "TRAIN",
    )  # fmt: skip
    top, left = int(draws.h_off[0]), int(draws.w_off[0])
    window = np.s_[:, top : top + rows, left : left + columns]
    want = whole[window]
    if case["pixels"] == "float32":
        want = (want.astype(np.float32) - (means if means.shape[1:] == (1, 1) else means[window])) * np.float32(0.017)
    assert out.tobytes() == (want[:, :, ::-1] if draws.mirror[0] else want).tobytes()


def test_the_fast_decoder_makes_the_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = []
    original = jpeg.decode

    def decode_part(data: Any, head: Any, channels: int, box: Any, *, whole: bool) -> Any:
        pixels = original(data, head, channels, box, whole=whole)
        boxes.append((box[2:], whole, pixels is not None))
        return pixels

    monkeypatch.setattr(jpeg, "decode", decode_part)
    value = datum.serialize(data=file_of(smooth(0, 90, 70), "420", 90), label=7, encoded=True)
    for extent in ("full", "region"):
        asked = spec("one", decode=extent)
        source = One(value)
        made = JpegCrop.of(asked, probe(asked, source), maker.Transform(asked.transform, 5, 0))  # type: ignore[arg-type]
        assert made is not None
        made._transform.fit((3, 90, 70), "x")
        made.sample(source.record, 0, np.zeros((3, 20, 20), np.float32))
    assert boxes == [((20, 20), True, True), ((20, 20), False, True)]


def mixed(number: int) -> bytes:
    image = smooth(number, 24 + number % 5, 40) if number % 3 else picture(number, (3, 24, 40))
    if number % 7 == 3:
        return raw(image, number)
    return encoded(image, number, "PNG" if number % 7 == 5 else "JPEG")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_lmdb(tmp_path_factory.mktemp("sets") / "photos", map(mixed, range(30)))


def batches_of(asked: FeedSpec) -> list[tuple[Any, ...]]:
    with Feed.from_spec(asked) as feed:
        return [(batch.step, batch.data.tobytes(), batch.labels.tolist(), batch.hashes) for batch in feed]


@pytest.mark.parametrize("pixels", ["float32", "uint8"])
def test_sets_of_jpeg_png_and_raw_records_are_made_as_without_it(
    photos: str, pixels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = spec(photos, pixels=pixels, mean_value=MEANS)
    fast = batches_of(asked)
    assert batches_of(spec(photos, pixels=pixels, mean_value=MEANS, decode="region")) == fast
    assert batches_of(replace(asked, threads=2)) == fast
    assert batches_of(asked.starting_at(5)) == fast[5:]
    monkeypatch.setattr(jpeg_crop.JpegCrop, "of", staticmethod(lambda *_: None))
    assert batches_of(asked) == fast


@pytest.mark.ray
@pytest.mark.long
def test_sets_are_made_the_same_by_workers(photos: str) -> None:
    asked = spec(photos, mean_value=MEANS, decode="region")
    inline = batches_of(asked)
    with ray_runtime.running(num_cpus=2):
        for workers in (1, 2):
            assert batches_of(replace(asked, engine="ray", workers=workers)) == inline


@pytest.mark.parametrize("policy", ["stop", "skip", "zero"])
@pytest.mark.parametrize("wrong", ["cut", "small", "gray", "no label"])
def test_bad_records_are_the_same_ones(
    tmp_path: Path, policy: Any, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [encoded(smooth(i, 24, 40), i) for i in range(16)]
    file = file_of(smooth(9, 24, 40), "420", 90)
    values[9] = {
        "cut": datum.serialize(data=file[:-40], label=9, encoded=True),
        "small": encoded(smooth(9, 19, 40), 9),
        "gray": encoded(smooth(9, 24, 40, 1), 9),
        "no label": datum.serialize(data=file, encoded=True),
    }[wrong]
    asked = spec(write_lmdb(tmp_path / "set", values), on_bad_record=policy, bad_record_cap=0.9)
    found = []
    for way in ("fast", "general"):
        if way == "general":
            monkeypatch.setattr(jpeg_crop.JpegCrop, "of", staticmethod(lambda *_: None))
        try:
            with Feed.from_spec(asked) as feed:
                assert feed.probe.jpeg
                found.append([(batch.data.tobytes(), batch.ids.tolist(), batch._bad) for batch in feed])
        except StallscopeError as error:
            found.append([type(error), str(error)])
    assert found[0] == found[1]
    assert "record 9" in str(found[0]) or any(bad for *_, bad in found[0])


def test_region_does_not_look_below_the_part(tmp_path: Path) -> None:
    file = file_of(smooth(1, 200, 40), "420", 90)
    values = [datum.serialize(data=file[:-60], label=1, encoded=True)]
    asked = spec(write_lmdb(tmp_path / "set", values), batch=1, phase="TEST", shuffle="none", stop_step=1, mirror=False)
    with pytest.raises(StallscopeError, match="record 0"):
        batches_of(asked)
    whole = decode.to_image(datum.parse(datum.serialize(data=file, label=1, encoded=True)))
    asked = replace(asked, transform=replace(asked.transform, decode="region"), on_bad_record="skip")
    with open_source(asked.source) as source:
        made = maker.BatchMaker(asked, _probed(asked, file), maker.LocalReader(source))._jpeg
        assert made is not None
        out = np.zeros((3, 20, 20), np.float32)
        made.sample(source.read(0), 0, out)
    np.testing.assert_array_equal(out, whole[:, 90:110, 10:30].astype(np.float32))


def _probed(asked: FeedSpec, file: bytes) -> Any:
    return probe(asked, One(datum.serialize(data=file, label=1, encoded=True)))  # type: ignore[arg-type]


def test_what_a_crop_cannot_be_decoded_by_is_refused_by_name() -> None:
    for transform, words in [
        ({"crop": 9, "decode": "scaled"}, ["scaled cannot go with", "other"]),
        ({"decode": "region", "crop": 0}, ["needs", "crop"]),
        ({"crop": 9, "decode": "half"}, ["full, region or scaled", "half"]),
    ]:
        with pytest.raises(UsageError) as caught:
            TransformSpec(**transform)  # type: ignore[arg-type]
        assert all(word in str(caught.value) for word in words)
    with pytest.raises(UsageError, match="function on each image"):
        maker.Transform(TransformSpec(crop=9, decode="region", python="tests.pipeline.functions:same"), 0, 0)


def test_a_mean_image_of_another_size_is_named(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "set", [encoded(smooth(i, 24 + i // 3, 40), i) for i in range(4)])
    mean = write_mean(tmp_path / "mean.binaryproto", np.zeros((3, 24, 40), np.float32))
    with pytest.raises(TransformError, match="does not fit record 3"):
        batches_of(spec(path, mean_file=mean, shuffle="none"))
