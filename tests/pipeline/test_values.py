"""Records of floats that hold NaN or infinity, and image files above ``data.max_pixels``: told with their keys."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets import datum, image_file
from datasets.image_file import ImageDecodeError
from pipeline import run as runs
from pipeline.config import validate
from pipeline.feed import Feed
from pipeline.runfolder import stream
from pipeline.samples import NotFiniteError
from pipeline.settings import load
from pipeline.spec import FeedSpec, feed_spec
from profiler import report, store
from tests.pipeline.build import encoded, picture, raw, write_leveldb, write_lmdb

BATCH, RECORDS, BAD = 4, 40, (7, 21)


def floats(number: int, value: float) -> bytes:
    image = np.full((1, 2, 3), float(number), np.float32)
    image[0, 1, 2] = value
    return datum.serialize(channels=1, height=2, width=3, float_data=image.ravel().tolist(), label=number % 10)


@pytest.fixture(params=[math.nan, math.inf, -math.inf])
def values(request: pytest.FixtureRequest) -> list[bytes]:
    return [floats(i, request.param if i in BAD else 1.0) for i in range(RECORDS)]


def spec(path: str, policy: str, **more: Any) -> FeedSpec:
    return FeedSpec(path, BATCH, stop_step=10, on_bad_record=policy, bad_record_cap=0.1, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("write", [write_lmdb, write_leveldb])
def test_stop_names_record_key_and_place(tmp_path: Path, values: list[bytes], write: Any) -> None:
    with Feed(spec(write(tmp_path / "db", values), "stop")) as feed:
        next(feed)
        with pytest.raises(NotFiniteError) as caught:
            next(feed)
    text = str(caught.value)
    for part in ("00000007_img", "NaN or infinity", "1 of 6 values", "row 1, column 2", "on_bad_record"):
        assert part in text


def test_skip_and_zero_never_let_one_through(tmp_path: Path, values: list[bytes]) -> None:
    path = write_lmdb(tmp_path / "db", values)
    for policy in ("skip", "zero"):
        with Feed(spec(path, policy)) as feed:
            seen = [(batch.data.copy(), batch.ids.copy()) for batch in feed]
            stats = feed.stats()["bad_records"]
        assert all(np.isfinite(data).all() for data, _ in seen)
        ids = np.concatenate([ids for _, ids in seen]).tolist()
        assert stats["records"] == len(BAD)
        if policy == "skip":
            assert not set(BAD) & set(ids)
        else:
            assert ids == list(range(RECORDS))
            assert not any(seen[i // BATCH][0][i % BATCH].any() for i in BAD)


def test_the_report_lists_the_keys(tmp_path: Path, values: list[bytes]) -> None:
    path = write_lmdb(tmp_path / "db", values)
    flags = {
        "data.train.source": path, "data.train.batch": BATCH, "data.order.shuffle": "none", "run.iterations": 25,
        "run.folder": str(tmp_path / "run"), "run.log_level": "error", "feed.engine": "inline",
        "device.backend": "emulated", "device.step_ms": 0, "data.on_bad_record": "skip", "data.bad_record_cap": 0.1,
    }  # fmt: skip
    assert runs.run(load(None, flags)) == 0
    (finding,) = [f for f in report.build(store.load_run(tmp_path / "run")).findings if f.kind == "bad_records"]
    assert "2 records of the TRAIN set could not be used" in finding.text
    for part in ("'00000007_img' (value)", "'00000021_img' (value)", "epoch 0: 2"):
        assert part in finding.text


def test_integers_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raw pixels and image files cannot hold NaN: they cost nothing."""
    path = write_lmdb(tmp_path / "db", [raw(picture(i, (1, 4, 4)), 1) for i in range(8)])
    with Feed(spec(path, "stop")) as feed, monkeypatch.context() as patch:
        patch.setattr(np, "isfinite", lambda _: pytest.fail("looked at integers"))
        next(feed)


# data.max_pixels ------------------------------------------------------------------------------------------------------


@pytest.fixture
def photos(tmp_path: Path) -> str:
    """Eight PNG files of 20 x 20, the sixth (record 5) of 40 x 40."""
    sides = [40 if i == 5 else 20 for i in range(8)]
    values = [encoded(picture(i, (3, side, side)), i, "PNG") for i, side in enumerate(sides)]
    return write_lmdb(tmp_path / "photos", values)


def job(path: str, **more: Any) -> dict[str, Any]:
    emulated = {"device.backend": "emulated", "run.iterations": 2}
    return {"data.train.source": path, "data.train.batch": 4, "data.transform.crop": 16, **emulated, **more}


def test_larger_images_stop_the_job_and_the_key_to_raise_is_named(photos: str) -> None:
    flags = job(photos, **{"data.max_pixels": 1599, "feed.engine": "inline", "data.order.shuffle": "none"})
    with Feed(load(None, flags), stop_step=2) as feed:
        next(feed)
        with pytest.raises(ImageDecodeError) as caught:
            next(feed)
    for part in ("00000005_img", "at most 1,599 pixels", "40 x 40 = 1,600", "raise data.max_pixels"):
        assert part in str(caught.value)


def test_the_first_record_is_held_to_it_too(photos: str) -> None:
    with pytest.raises(ImageDecodeError, match=r"at most 399 pixels(.|\n)*data\.max_pixels"):
        Feed(load(None, job(photos, **{"data.max_pixels": 399})))


def test_skip_goes_on_without_them_and_left_out_is_the_default(photos: str) -> None:
    flags = {"feed.engine": "inline", "data.order.shuffle": "none", "data.bad_record_cap": 0.2}
    skipping = {"data.max_pixels": 1599, "data.on_bad_record": "skip"}
    with Feed(load(None, job(photos, **flags, **skipping)), stop_step=2) as feed:
        assert 5 not in np.concatenate([batch.ids.copy() for batch in feed])
    with Feed(load(None, job(photos, **flags)), stop_step=2) as feed:
        assert 5 in np.concatenate([batch.ids.copy() for batch in feed])


def test_samples_of_any_size_are_held_to_it(photos: str) -> None:
    """Batch 1 without a crop: the slots need no room for an image that is refused."""
    free, held = (Feed(FeedSpec(photos, 1, stop_step=8, max_pixels=most)) for most in (None, 1599))
    assert free.sizes_change
    assert not held.sizes_change


def test_the_limit_can_be_raised_above_pillows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow refuses twice its own limit and warns of more than it; both give way for one call, and only for it."""
    from PIL import Image

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    monkeypatch.setattr(image_file, "MAX_PIXELS", 100)
    for side, kind in ((12, "PNG"), (20, "PNG"), (20, "JPEG"), (20, "BMP"), (20, "GIF")):
        data = build_file(picture(1, (3, side, side)), kind)
        color = "color" if kind == "GIF" else None
        sniffed = image_file.kind_of(data)
        assert image_file.read(data, "it", color, sniffed, side * side).shape == (3, side, side)
        with pytest.raises(ImageDecodeError):
            image_file.read(data, "it", color, sniffed, side * side - 1)
    assert Image.MAX_IMAGE_PIXELS == 100


def build_file(image: np.ndarray, kind: str) -> bytes:
    from tests.pipeline.build import image_file as make

    return make(image, kind)


def test_the_key_reaches_the_feed_and_binds_a_resume_only_where_it_decides_bytes() -> None:
    config = validate({"data": {"train": {"source": "db", "batch": 2}, "max_pixels": 5000, "on_bad_record": "skip"}})
    assert feed_spec(config).max_pixels == 5000
    assert stream(config, {})["max_pixels"] == 5000
    stops = validate({"data": {"train": {"source": "db", "batch": 2}, "max_pixels": 5000}})
    assert "max_pixels" not in stream(stops, {})  # a job that stopped may go on with a larger one
