"""Batches of real Caffe's data layer, bit for bit: same records, same arithmetic, with Caffe's own draws put in."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets import datum, decode
from pipeline import native, philox, sizes
from pipeline.feed import Feed
from pipeline.maker import LabelError, fill_hash
from pipeline.spec import FeedSpec, TransformSpec
from pipeline.transforms import TransformError
from pipeline.worker import open_data

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mnist_lmdb_test": ("mnist_test_lmdb", {"scale": 0.00390625}),
    "leveldb_crops96_raw_40x48_leveldb": ("crops96_raw_40x48_leveldb", {}),
    "raw_train_crop_mirror_meanval": (
        "crops96_raw_40x48_lmdb",
        {"scale": 0.017, "crop": 24, "mirror": True, "mean_value": (104.0, 117.0, 123.0)},
    ),
    "raw_train_crop_meanfile": (
        "crops96_raw_40x48_lmdb",
        {"scale": 0.5, "crop": 24, "mean_file": "tests/data/proto/mean_40x48.binaryproto"},
    ),
    "raw_train_crop_mirror_meanval1": (
        "crops96_raw_40x48_lmdb",
        {"crop": 24, "mirror": True, "mean_value": (110.0,)},
    ),
    "raw_noop_wrap": ("crops96_raw_40x48_lmdb", {}),
    "gray_raw_40x48": ("crops24_gray_40x48_lmdb", {}),
    "png72_test_meanfile": ("crops24_png_72_lmdb", {"mean_file": "tests/data/db/mean_png_72.binaryproto"}),
    "encguess72_test": ("crops24_encguess_72_lmdb", {}),
    "leveldb_mnist_test_leveldb": ("mnist_test_leveldb", {}),
    "encnative_batch1_varshape": ("crops24_encoded_native_lmdb", {"color": "color"}),
    "encnative_test_crop64_forcecolor": ("crops24_encoded_native_lmdb", {"crop": 64, "color": "color"}),
    "encnative_train_crop64_forcecolor": (
        "crops24_encoded_native_lmdb",
        {"crop": 64, "mirror": True, "mean_value": (104.0, 117.0, 123.0), "color": "color"},
    ),
}


@cache
def all_batches() -> dict[str, Any]:
    """By case: labels and shapes of all batches that Caffe made, SHA-256 of those whose values were kept, its draws."""
    return json.loads(Path("tests/data/datalayer_batches.json").read_text())


@pytest.mark.parametrize("way", ["native", "general"])
@pytest.mark.parametrize("case", CASES)
def test_batches_of_caffe(case: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one value for value, the hashes of the others that were kept, the labels of all."""
    if way == "general":
        monkeypatch.setattr(native.Native, "of", lambda *_: None)
    database, transform = CASES[case]
    caffes = all_batches()[case]
    with np.load("tests/data/datalayer_caffe.npz") as file:
        first = file[f"{case}/data"]
    draws = caffes.get("draws")
    if draws is not None:
        # Words that give Caffe's draws: a bit for the mirror, offsets that are what is left of a division by more.
        words = np.array(draws, np.uint64)[:, [0, 1, 2, 0]]
        monkeypatch.setattr(philox, "block_1", lambda *arguments: words[arguments[-1]])  # by record
        places = {i: (int(top), int(left), bool(flip)) for i, (flip, top, left) in enumerate(draws)}
        monkeypatch.setattr(philox, "draw_one", lambda seed, phase, epoch, record, spare, **_: places[record])
    spec = FeedSpec(
        f"tests/data/db/{database}", len(first), phase="TEST" if draws is None else "TRAIN", depth=1,
        stop_step=len(caffes["labels"]), transform=TransformSpec(**transform),
    )  # fmt: skip
    with Feed.from_spec(spec) as feed:
        for batch, labels, shape in zip(feed, caffes["labels"], caffes["shapes"], strict=True):
            assert batch.labels.tolist() == labels
            assert list(batch.data.shape) == shape
            if batch.step == 0:
                np.testing.assert_array_equal(batch.data, first)
            if kept := caffes["sha256"].get(str(batch.step)):
                assert hashlib.sha256(batch.data.tobytes()).hexdigest() == kept, batch.step


def test_a_batch_runs_on_into_the_next_epoch() -> None:
    """96 records, 7 a batch: the 14th batch is the last five and the first two."""
    with np.load("tests/data/datalayer_caffe.npz") as file:
        expected, labels = file["raw_noop_wrap/data13"], file["raw_noop_wrap/all_labels"]
    with Feed.from_spec(FeedSpec("tests/data/db/crops96_raw_40x48_lmdb", 7, phase="TEST", stop_step=15)) as feed:
        for batch in feed:
            np.testing.assert_array_equal(batch.labels, labels[batch.step])
            if batch.step == 13:
                np.testing.assert_array_equal(batch.data, expected)


BATCH_1 = FeedSpec(
    "tests/data/db/crops24_encoded_native_lmdb", 1, phase="TEST", fingerprints="step", stop_step=30,
    transform=TransformSpec(color="color", scale=0.5),
)  # fmt: skip


def test_one_at_a_time_every_record_has_its_own_size_as_in_caffe() -> None:
    """24 photos of 24 sizes, around the end of the epoch; each is what its record decodes to."""
    with Feed.from_spec(BATCH_1) as feed, open_data(BATCH_1) as source:
        assert feed.sizes_change
        shapes = set()
        for batch in feed:
            record = source.read(int(batch.ids[0]))
            image = decode.to_image(datum.parse(record.value, record), record, "color")
            np.testing.assert_array_equal(batch.data, image[None].astype(np.float32) * np.float32(0.5))
            assert batch.hashes["fill"] == fill_hash(batch.data, batch.labels)
            shapes.add(batch.data.shape)
        assert batch.step == 29
    assert len(shapes) == 24


@pytest.mark.long
@pytest.mark.ray
def test_sizes_that_change_are_the_same_bytes_for_workers() -> None:
    from pipeline import ray_runtime

    with Feed.from_spec(BATCH_1) as feed:
        inline = [(batch.data.shape, batch.hashes) for batch in feed]
    with ray_runtime.running(num_cpus=2), Feed.from_spec(replace(BATCH_1, engine="ray", workers=2)) as feed:
        assert [(batch.data.shape, batch.hashes) for batch in feed] == inline


def test_sizes_that_change_need_a_crop_in_larger_batches() -> None:
    with Feed.from_spec(replace(BATCH_1, batch=2)) as feed, pytest.raises(TransformError) as caught:
        next(feed)
    text = str(caught.value)
    assert "another size than record 0 " in text
    assert text.count("(key '") == 2
    assert "3 x 231 x 192" in text
    assert "3 x 187 x 96" in text


def test_a_record_too_large_for_the_slots_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "room", lambda *_: 3 * 187 * 96)
    with Feed.from_spec(BATCH_1) as feed, pytest.raises(TransformError, match="larger than every record that was"):
        for _ in feed:
            pass


def test_float_features_with_their_labels_in_a_second_database() -> None:
    with np.load("tests/data/datalayer_caffe.npz") as file:
        expected = [file["float_data_test/data"], file["float_data_test/data1"]]
    spec = FeedSpec(
        "tests/data/db/lenet_ip2_float_lmdb", 5, labels="tests/data/db/lenet_label_float_lmdb", phase="TEST",
        stop_step=2, transform=TransformSpec(scale=2, mean_value=(0.5,)),
    )  # fmt: skip
    with Feed.from_spec(spec) as feed, open_data(spec) as source:
        assert feed.label_shape == (5, 1)
        for batch, wanted in zip(feed, expected, strict=True):
            np.testing.assert_array_equal(batch.data, wanted)
            stored = [datum.parse(source.read(i).label_value).float_data for i in batch.ids]  # type: ignore[attr-defined]
            np.testing.assert_array_equal(batch.labels, np.stack(stored))


def test_extracted_features_have_no_label_where_caffe_says_zero() -> None:
    """The one place where we differ from Caffe on purpose: an absent label is an error."""
    with pytest.raises(LabelError, match="has no label"):
        Feed.from_spec(FeedSpec("tests/data/db/lenet_ip2_float_lmdb", 5))
