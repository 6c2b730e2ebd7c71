"""Batches of real Caffe's data layer, bit for bit: same records, same arithmetic, with Caffe's own draws put in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline import philox
from pipeline.feed import Feed
from pipeline.maker import LabelError
from pipeline.spec import FeedSpec, TransformSpec

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
    "encnative_test_crop64_forcecolor": ("crops24_encoded_native_lmdb", {"crop": 64, "color": "color"}),
    "encnative_train_crop64_forcecolor": (
        "crops24_encoded_native_lmdb",
        {"crop": 64, "mirror": True, "mean_value": (104.0, 117.0, 123.0), "color": "color"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_first_batch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database, transform = CASES[case]
    with np.load("tests/data/datalayer_caffe.npz") as file:
        expected, labels = file[f"{case}/data"], file[f"{case}/labels"]
        draws = file.get(f"{case}/draws")
    if draws is not None:
        caffes = philox.Draws(draws[:, 0].astype(bool), draws[:, 1], draws[:, 2])
        monkeypatch.setattr(philox, "draw", lambda *_, **__: caffes)
    spec = FeedSpec(
        f"tests/data/db/{database}", len(expected), phase="TEST" if draws is None else "TRAIN", depth=1,
        transform=TransformSpec(**transform),
    )  # fmt: skip
    with Feed.from_spec(spec) as feed:
        batch = next(feed)
        np.testing.assert_array_equal(batch.labels, labels)
        np.testing.assert_array_equal(batch.data, expected)


def test_extracted_features_have_no_label_where_caffe_says_zero() -> None:
    """The one place where we differ from Caffe on purpose: an absent label is an error."""
    with pytest.raises(LabelError, match="has no label"):
        Feed.from_spec(FeedSpec("tests/data/db/lenet_ip2_float_lmdb", 5))
