from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets import datum, decode
from datasets.jpeg import Box
from datasets.resize import resize
from datasets.source import open_source
from pipeline import philox, ray_runtime
from pipeline.config import validate
from pipeline.feed import Feed
from pipeline.resized_crop import ResizedCrop
from pipeline.spec import FeedSpec, ResizedCropSpec, TransformSpec, feed_spec
from pipeline.transforms import Transform, TransformError
from profiler.errors import StallscopeError, UsageError
from tests.pipeline.build import encoded, image_file, picture, raw, write_lmdb, write_mean

RECORDS, SIZE = 30, 16


def sound(number: int) -> bytes:
    image = np.repeat(np.repeat(picture(number, (3, 8 + number % 5, 13)), 4, 1), 4, 2)  # sizes differ
    if number % 7 == 3:
        return raw(image, number)
    return encoded(image, number, "PNG" if number % 7 == 5 else "JPEG")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_lmdb(tmp_path_factory.mktemp("sets") / "photos", map(sound, range(RECORDS)))


def spec(source: str, **more: Any) -> FeedSpec:
    parts = {key: more.pop(key) for key in ("scale", "ratio") if key in more}
    transform = {"mirror": True, **{key: more.pop(key) for key in list(more) if key in TransformSpec.__annotations__}}
    return FeedSpec(
        source, poison=True,
        **{"batch": 4, "seed": 5, "shuffle": "full", "stop_step": 15, "fingerprints": "step", **more},
        transform=TransformSpec(**transform, resized_crop=ResizedCropSpec(SIZE, **parts)),
    )  # fmt: skip


def reference(seed: int, phase: int, epoch: int, record: int, size: tuple[int, int], asked: ResizedCropSpec) -> Box:
    """torchvision's RandomResizedCrop.get_params with the numbers of NumPy's own Philox."""
    height, width = size
    key = np.array([seed, phase], np.uint64)
    for turn in range(10):
        words = np.random.Philox(key=key, counter=np.array([turn, 4, epoch, record], np.uint64)).random_raw(4)
        first, second = ((int(word) >> 11) / 2**53 for word in words[:2])
        area = height * width * (asked.scale[0] + (asked.scale[1] - asked.scale[0]) * first)
        low, high = (math.log(ratio) for ratio in asked.ratio)
        ratio = math.exp(low + (high - low) * second)
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            return int(words[2]) % (height - tall + 1), int(words[3]) % (width - wide + 1), tall, wide
    wide, tall = width, height
    if width / height < asked.ratio[0]:
        tall = round(width / asked.ratio[0])
    elif width / height > asked.ratio[1]:
        wide = round(height * asked.ratio[1])
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def crop(seed: int = 0, phase: Any = "TRAIN", **asked: Any) -> ResizedCrop:
    feed = FeedSpec(
        "x",
        1,
        seed=seed,
        phase=phase,
        transform=TransformSpec(mirror=True, resized_crop=ResizedCropSpec(SIZE, **asked)),
    )
    made = ResizedCrop.of(feed, Transform(feed.transform, seed, feed.phase_number))
    assert made is not None
    return made


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000), record=st.integers(0, 2**40),
    size=st.tuples(st.integers(1, 700), st.integers(1, 700)),
    scale=st.sampled_from([(0.08, 1.0), (0.5, 0.5), (0.9, 1.0)]),
    ratio=st.sampled_from([(3 / 4, 4 / 3), (1.0, 1.0), (0.5, 3.0)]),
)  # fmt: skip
def test_parts_are_those_of_the_formula(
    seed: int, epoch: int, record: int, size: tuple[int, int], scale: Any, ratio: Any
) -> None:
    made = crop(seed, scale=scale, ratio=ratio)
    found = made.box(epoch, record, *size)
    top, left, height, width = found
    assert 0 <= top <= size[0] - height
    assert 0 <= left <= size[1] - width
    if min(size) > 2:  # below, a part of the middle may round to nothing
        assert found == reference(seed, 0, epoch, record, size, ResizedCropSpec(SIZE, scale, ratio))


def test_parts_are_spread_as_evenly_as_they_should_be() -> None:
    made = crop(3)
    boxes = np.array([made.box(0, record, 300, 400) for record in range(4000)])
    share = boxes[:, 2] * boxes[:, 3] / (300 * 400)
    ratio = boxes[:, 3] / boxes[:, 2]
    assert 0.075 < share.min() < 0.09
    assert 0.95 < share.max() <= 1
    # Up to half of the area each part fits at once; large ones are drawn as often and fit less often.
    lower, upper = (share < 0.29).mean(), ((share >= 0.29) & (share < 0.5)).mean()
    assert abs(lower - upper) < 0.02
    assert 0.19 < lower < 0.35
    assert abs(np.median(np.log(ratio[share < 0.4]))) < 0.03
    assert np.allclose([ratio.min(), ratio.max()], [3 / 4, 4 / 3], atol=0.02)
    free = boxes[boxes[:, 2] < 250]
    assert abs((free[:, 0] / (300 - free[:, 2])).mean() - 0.5) < 0.02
    assert len({tuple(box) for box in boxes.tolist()}) > 3900


def test_mirroring_is_decided_as_for_any_other_crop() -> None:
    made = crop(9)
    one = np.zeros(50, np.int64)
    draws = philox.draw(9, 0, one, np.arange(50), (one, one), mirror=True, random_crop=False)
    flips = []
    for record in range(50):
        made.box(0, record, 50, 60)
        flips.append(made.mirrored)
    assert flips == draws.mirror.tolist()


def test_in_test_the_part_is_the_middle() -> None:
    assert crop(phase="TEST").box(3, 7, 256, 300) == (16, 38, 224, 224)
    assert crop(phase="TEST").box(3, 7, 1, 1) == (0, 0, 1, 1)


def expected(feed: FeedSpec, source: Any, epoch: int, record: int) -> np.ndarray:
    """What datasets.resize makes of the part that the formula names."""
    asked = feed.transform.resized_crop
    assert asked is not None
    value = datum.parse(source.read(record).value)
    image = decode.to_image(value, color=feed.transform.color)
    top, left, height, width = reference(feed.seed, 0, epoch, record, image.shape[1:], asked)
    sample = resize(np.ascontiguousarray(image[:, top : top + height, left : left + width]), SIZE, SIZE)
    flip = np.random.Philox(
        key=np.array([feed.seed, 0], np.uint64), counter=np.array([0, 0, epoch, record], np.uint64)
    ).random_raw(1)[0] & np.uint64(1)
    return sample[:, :, ::-1] if flip and feed.transform.mirror else sample


@pytest.mark.parametrize("settings", [
    {}, {"mirror": False}, {"decode": "region"}, {"scale": (0.3, 0.6), "ratio": (1.0, 2.0)}, {"color": "color"},
    {"python": "tests.pipeline.functions:same"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("pixels", ["uint8", "float32"])
def test_samples_are_the_part_resized(photos: str, settings: dict[str, Any], pixels: Any) -> None:
    numbers = {"mean_value": (104.0, 117.5, 123.0), "scale": 0.017} if "scale" not in settings else {}
    feed = spec(photos, pixels=pixels, **settings)
    feed = replace(feed, transform=replace(feed.transform, **numbers))
    seen = 0
    with Feed.from_spec(feed) as batches, open_source(photos) as source:
        for batch in batches:
            for i, record in enumerate(batch.ids.tolist()):
                sample = expected(feed, source, int(batch.epochs[i]), record)
                if pixels == "float32" and numbers:
                    mean = np.array(numbers["mean_value"], np.float32).reshape(3, 1, 1)
                    sample = (sample.astype(np.float32) - mean) * np.float32(0.017)
                assert batch.data[i].tobytes() == sample.astype(pixels).tobytes()
                assert batch.labels[i] == record
                seen += 1
    assert seen == 60


def test_gray_and_more_channels_than_a_pixel_has_lanes(tmp_path: Path) -> None:
    gray = write_lmdb(tmp_path / "gray", [encoded(picture(i, (1, 30, 40)), i) for i in range(6)])
    many = write_lmdb(tmp_path / "many", [raw(picture(i, (7, 30, 40)), i) for i in range(6)])
    for path in (gray, many):
        feed = spec(path, stop_step=3, pixels="uint8")
        with Feed.from_spec(feed) as batches, open_source(path) as source:
            for batch in batches:
                for i, record in enumerate(batch.ids.tolist()):
                    assert batch.data[i].tobytes() == expected(feed, source, int(batch.epochs[i]), record).tobytes()


def test_a_mean_image_belongs_to_the_sample(photos: str, tmp_path: Path) -> None:
    mean = np.random.default_rng(0).random((3, SIZE, SIZE)).astype(np.float32) * 100
    feed = spec(photos, mean_file=write_mean(tmp_path / "mean.binaryproto", mean), stop_step=4)
    with Feed.from_spec(replace(feed, pixels="float32")) as batches, open_source(photos) as source:
        for batch in batches:
            for i, record in enumerate(batch.ids.tolist()):
                sample = expected(replace(feed, transform=replace(feed.transform, mirror=False)), source, 0, record)
                want = sample.astype(np.float32) - mean
                flips = expected(feed, source, 0, record).tobytes() != sample.tobytes()
                assert batch.data[i].tobytes() == (want[:, :, ::-1] if flips else want).tobytes()
    other = write_mean(tmp_path / "other.binaryproto", mean[:, 1:])
    with pytest.raises(TransformError, match="does not fit the samples of random_resized_crop"):
        Feed.from_spec(spec(photos, mean_file=other))


@pytest.mark.parametrize("policy", ["stop", "skip", "zero"])
@pytest.mark.parametrize("extent", ["full", "region", "scaled"])
def test_bad_records_are_met_as_with_any_transform(tmp_path: Path, policy: Any, extent: Any) -> None:
    image = np.repeat(np.repeat(picture(0, (3, 8, 13)), 4, 1), 4, 2)
    cut = datum.serialize(data=image_file(image)[:300], label=9, encoded=True)  # the header alone
    values = [encoded(image, i) for i in range(8)]
    values[5], values[2] = cut, datum.serialize(channels=1, height=20, width=20, data=bytes(400), label=2)
    path = write_lmdb(tmp_path / "bad", values)
    feed = spec(path, on_bad_record=policy, bad_record_cap=0.9, decode=extent, stop_step=6, batch=8)
    if policy == "stop":
        with pytest.raises(StallscopeError, match=r"record [25]"), Feed.from_spec(feed) as batches:
            list(batches)
        return
    with Feed.from_spec(feed) as batches:
        for batch in batches:
            ids = batch.ids.tolist()
            assert len(ids) == 8
            if policy == "skip":
                assert not {2, 5} & set(ids)
                assert (batch.data.reshape(8, -1).std(1) > 1).all()
            else:
                for i, record in enumerate(ids):
                    assert (batch.data[i] == 0).all() == (record in (2, 5))
            assert len(batch.bad) == 2 if hasattr(batch, "bad") else True


def test_batches_do_not_depend_on_where_a_feed_begins(photos: str) -> None:
    whole = {batch.step: batch.hashes["fill"] for batch in Feed.from_spec(spec(photos))}
    later = {batch.step: batch.hashes["fill"] for batch in Feed.from_spec(spec(photos, start_step=9))}
    assert later == {step: whole[step] for step in range(9, 15)}
    region = {batch.step: batch.hashes["fill"] for batch in Feed.from_spec(spec(photos, decode="region"))}
    assert region == whole
    with Feed.from_spec(spec(photos, decode="region", threads=2)) as batches:
        assert {batch.step: batch.hashes["fill"] for batch in batches} == whole
    scaled = {
        batch.step: batch.hashes["fill"] for batch in Feed.from_spec(spec(photos, decode="scaled", scale=(0.95, 1)))
    }
    assert scaled != {batch.step: batch.hashes["fill"] for batch in Feed.from_spec(spec(photos, scale=(0.95, 1)))}


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize("extent", ["full", "region", "scaled"])
def test_batches_do_not_depend_on_engine_or_workers(photos: str, extent: Any) -> None:
    inline = [batch.hashes for batch in Feed.from_spec(spec(photos, decode=extent))]
    with ray_runtime.running(num_cpus=2):
        for workers in (1, 2):
            with Feed.from_spec(spec(photos, decode=extent, engine="ray", workers=workers)) as batches:
                assert [batch.hashes for batch in batches] == inline


def test_scaled_is_near_to_full(tmp_path: Path) -> None:
    smooth = [resize(picture(i, (3, 3, 4)), 150, 190) for i in range(8)]
    path = write_lmdb(tmp_path / "smooth", [encoded(image, i) for i, image in enumerate(smooth)])
    full, scaled = (
        np.stack([batch.data.astype(float) for batch in Feed.from_spec(spec(path, decode=extent, pixels="uint8"))])
        for extent in ("full", "scaled")
    )
    assert 0.01 < np.abs(full - scaled).mean() < 2
    assert np.abs(full - scaled).max() < 20


def floats_of(image: np.ndarray, box: Box) -> np.ndarray:
    top, left, height, width = box
    return image[:, top : top + height, left : left + width].astype(np.float64)


@settings(max_examples=25, deadline=None)
@given(size=st.tuples(st.integers(1, 60), st.integers(1, 60)), seed=st.integers(0, 1000))
def test_resizing_is_bilinear_between_centres_to_a_level(size: tuple[int, int], seed: int) -> None:
    image, made = picture(seed, (3, *size)), crop(seed)
    out = np.zeros((3, SIZE, SIZE), np.uint8)
    made._transform.fit(image.shape, "x")
    made.put(image, _Record(seed), 0, out)  # type: ignore[arg-type]
    got = out[:, :, ::-1] if made.mirrored else out
    want = floats_of(image, made.box(0, seed, *size))
    for axis in (1, 2):
        count = want.shape[axis]
        centre = np.clip((np.arange(SIZE) + 0.5) * count / SIZE - 0.5, 0, count - 1)
        low = np.floor(centre).astype(int)
        weight = (centre - low).reshape((-1, 1) if axis == 1 else (1, -1))
        high = np.minimum(low + 1, count - 1)
        want = want.take(low, axis) * (1 - weight) + want.take(high, axis) * weight
    assert np.abs(got - want).max() <= 1


@pytest.mark.oracle
def test_resizing_is_pytorchs() -> None:
    import torch

    rng = np.random.default_rng(1)
    for seed in range(30):
        image, made = picture(seed, (3, *rng.integers(1, 90, 2).tolist())), crop(seed)
        out = np.zeros((3, SIZE, SIZE), np.uint8)
        made._transform.fit(image.shape, "x")
        made.put(image, _Record(seed), 0, out)  # type: ignore[arg-type]
        part = torch.from_numpy(floats_of(image, made.box(0, seed, *image.shape[1:])))[None]
        want = torch.nn.functional.interpolate(
            part, (SIZE, SIZE), mode="bilinear", align_corners=False, antialias=False
        )
        got = out[:, :, ::-1] if made.mirrored else out
        assert np.abs(got - want[0].numpy()).max() <= 1


class _Record:
    def __init__(self, index: int) -> None:
        self.index = index


def config(**transform: Any) -> Any:
    return validate({"data": {"train": {"source": "memory:x", "batch": 2}, "transform": transform}})


def test_the_configuration() -> None:
    asked = feed_spec(config(random_resized_crop=True, crop=20)).transform
    assert (asked.resized_crop, asked.crop) == (ResizedCropSpec(20), 0)
    mapping = {"size": 9, "scale": [0.5, 1], "ratio": [1, 2]}
    asked = feed_spec(config(random_resized_crop=mapping, decode="scaled")).transform
    assert asked.resized_crop == ResizedCropSpec(9, (0.5, 1.0), (1.0, 2.0))
    assert asked.decode == "scaled"
    asked = feed_spec(config(random_resized_crop=False, crop=20)).transform
    assert (asked.resized_crop, asked.crop) == (None, 20)


@pytest.mark.parametrize(("transform", "words"), [
    ({"random_resized_crop": True}, ["has no size", "crop"]),
    ({"random_resized_crop": {"size": 8}, "crop": 9}, ["differ", "8 and 9"]),
    ({"random_resized_crop": True, "crop": 9, "resize": [9, 9]}, ["resize and random_resized_crop exclude"]),
    ({"decode": "region"}, ["decode: region needs", "crop", "random_resized_crop"]),
    ({"decode": "region", "crop": 9, "resize": [9, 9]}, ["decode: region needs", "no resize"]),
    ({"decode": "scaled", "crop": 9}, ["decode: scaled cannot go with", "crop", "other"]),
    ({"decode": "scaled"}, ["decode: scaled needs"]),
    ({"decode": "half"}, ["full, region", "half"]),
    ({"random_resized_crop": {"size": 8, "scale": [0.5, 0.1]}}, ["scale is upside down"]),
    ({"random_resized_crop": {"size": 8, "scale": [0, 1]}}, ["random_resized_crop.scale", "above 0"]),
    ({"random_resized_crop": {"size": 8, "ratio": [2, 1]}}, ["ratio is upside down"]),
    ({"random_resized_crop": {"sizes": 8}}, ["unknown key", "random_resized_crop.size"]),
    ({"random_resized_crop": 7, "crop": 8}, ["random_resized_crop", "true, false or a mapping"]),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_name(transform: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        config(**transform)
    for word in words:
        assert word in str(caught.value)


def test_floats_and_another_number_of_channels_are_named(tmp_path: Path) -> None:
    features = np.zeros((3, 20, 20), np.float32)
    floats = write_lmdb(tmp_path / "floats", [
        datum.serialize(channels=3, height=20, width=20, float_data=features.ravel(), label=1)
    ])  # fmt: skip
    with pytest.raises(TransformError, match="floats, which are not resized"), Feed.from_spec(spec(floats)) as feed:
        next(iter(feed))
    mixed = write_lmdb(tmp_path / "mixed", [encoded(picture(i, (3 if i < 3 else 1, 20, 20)), i) for i in range(4)])
    with pytest.raises(TransformError, match="another number of channels"), Feed.from_spec(spec(mixed)) as feed:
        list(feed)
