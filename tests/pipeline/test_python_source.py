"""Python data layers as sources: samples by index, the same whoever makes them, errors with file and line."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import settings
from pipeline.feed import Feed
from pipeline.python_source import PythonDataError, PythonSource
from pipeline.samples import LabelError, NotFiniteError
from pipeline.spec import FeedSpec, TransformSpec
from pipeline.transforms import TransformError
from profiler.errors import StallscopeError, UsageError
from tests.datasets import golden

MODULE = "python:tests.pipeline.user_data:"
NOISE = FeedSpec(MODULE + "Noise", 6, seed=3, shuffle="full", stop_step=9, fingerprints="step", depth=4)


def fails(wrong: str, **more: Any) -> FeedSpec:
    return FeedSpec(MODULE + "Fails", 5, param=json.dumps({"wrong": wrong}), **more)


def test_samples_go_through_transform_and_order_like_records() -> None:
    spec = replace(NOISE, transform=TransformSpec(crop=5, mirror=True, scale=0.5, mean_value=(100.0,)))
    with Feed.from_spec(spec) as feed:
        assert (feed.records, feed.shape, feed.label_shape) == (40, (6, 3, 5, 5), (6,))
        seen = []
        for batch in feed:
            assert batch.labels.tolist() == [index % 4 for index in batch.ids]
            windows = [np.random.default_rng(index).integers(0, 256, (3, 8, 8), dtype=np.uint8) for index in batch.ids]
            for sample, whole in zip(batch.data, windows, strict=True):
                values = (whole.astype(np.float32) - np.float32(100)) * np.float32(0.5)
                crops = [values[:, y : y + 5, x : x + 5] for y in range(4) for x in range(4)]
                assert any(np.array_equal(sample, side) for crop in crops for side in (crop, crop[:, :, ::-1]))
            seen += batch.ids.tolist()
    assert sorted(seen[:40]) == list(range(40))


def test_floats_and_pixels() -> None:
    with Feed.from_spec(replace(NOISE, param='{"floats": true}')) as floats, Feed.from_spec(NOISE) as pixels:
        np.testing.assert_array_equal(next(floats).data, next(pixels).data / np.float32(255))


def test_arrays_of_any_rank_and_several_labels() -> None:
    with Feed.from_spec(FeedSpec(MODULE + "Rows", 4, stop_step=1)) as feed:
        assert feed.blob_shapes == [(4, 5), (4, 2)]
        data, labels = next(feed).blobs
        np.testing.assert_array_equal(data, np.arange(5) + np.arange(4)[:, None])
        np.testing.assert_array_equal(labels, [[0, 0], [0.5, -1], [1, -2], [1.5, -3]])
        with PythonSource(MODULE + "Rows") as source:
            assert str(source.read(3)) == ("record 3 (key 'row 3') of Python data layer tests.pipeline.user_data:Rows")
    with pytest.raises(UsageError, match=r"transform\.scale is set"):
        Feed.from_spec(FeedSpec(MODULE + "Rows", 4, transform=TransformSpec(scale=2)))


@pytest.mark.long
@pytest.mark.ray
def test_workers_make_the_same_bytes_and_each_its_own_instance() -> None:
    from pipeline import ray_runtime

    with Feed.from_spec(NOISE) as feed:
        inline = [batch.hashes for batch in feed]
    processes = FeedSpec(
        MODULE + "Process", 4, engine="ray", workers=2, stop_step=12, param='{"records": 100}', depth=4
    )
    with ray_runtime.running(num_cpus=2):
        with Feed.from_spec(replace(NOISE, engine="ray", workers=2)) as feed:
            assert [batch.hashes for batch in feed] == inline
        makers: set[int] = set()
        with Feed.from_spec(processes) as feed:
            for batch in feed:
                workers = set(feed.stats()["workers"])
                makers |= {int(value) for value in batch.data.ravel()} - {0}
    assert makers
    assert makers <= workers
    assert os.getpid() not in makers


def test_a_copy_and_a_fork_make_an_instance_of_their_own() -> None:
    source = PythonSource(MODULE + "Noise")
    copy = pickle.loads(pickle.dumps(source))
    assert copy._instance is None
    assert copy.read(5) == source.read(5)
    mine = source._instance

    def child() -> None:
        source.read(5)
        assert source._instance is not mine

    assert golden.in_child(child) == 0
    assert source._instance is mine


def test_what_depends_on_more_than_the_index_is_refused() -> None:
    with pytest.raises(PythonDataError, match=r"read\(0\) of .*Chance gave two different samples") as caught:
        PythonSource(MODULE + "Chance")
    assert "data.transform.python" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "told"), [("NextBatch", r"gives the next batch in forward\(\)"), ("Plain", "has no read")]
)
def test_layers_that_only_go_on_are_told_how_to_be_indexed(name: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        PythonSource(MODULE + name)
    assert "def read(self, index): return array, label" in str(caught.value)
    assert "docs/custom_layers.md" in str(caught.value)


def test_classes_that_are_not_there_are_named() -> None:
    with pytest.raises(StallscopeError, match="did you mean 'Noise'"):
        PythonSource(MODULE + "Noises")
    with pytest.raises(StallscopeError, match="'no_such_module' is not there"):
        PythonSource("python:no_such_module:X")
    with pytest.raises(UsageError, match="python:module:Class"):
        PythonSource("python:tests.pipeline.user_data")


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        ("raises", PythonDataError, r"read\(3\) of .*Fails raised IndexError"),
        ("exits", PythonDataError, r"read\(3\) of .*Fails raised SystemExit: 5"),
        ("nothing", PythonDataError, r"read\(3\) .* gave no sample"),
        ("ints", PythonDataError, "int64"),
        ("label", PythonDataError, "a label that is an int"),
        ("no label", LabelError, "has no label"),
        ("shape", TransformError, "another size than record 0"),
        ("nan", NotFiniteError, "holds NaN"),
    ],
)
def test_what_is_wrong_with_a_sample_names_it(wrong: str, error: type, told: str) -> None:
    with Feed.from_spec(fails(wrong)) as feed, pytest.raises(error, match=told) as caught:
        next(feed)
    if wrong == "raises":
        assert "user_data.py, line" in str(caught.value)
        assert "lambda: [][index]" in str(caught.value)


def test_setup_that_fails_names_the_line() -> None:
    with pytest.raises(PythonDataError, match=r"setup\(\) of .* raised KeyError: 'no such option'") as caught:
        Feed.from_spec(fails("setup"))
    assert "user_data.py, line" in str(caught.value)


@pytest.mark.parametrize("wrong", ["no label", "nan"])
def test_samples_that_cannot_be_used_are_replaced(wrong: str) -> None:
    with Feed.from_spec(fails(wrong, on_bad_record="skip", bad_record_cap=1, stop_step=1)) as feed:
        batch = next(feed)
        assert batch.ids[:3].tolist() == [0, 1, 2]
        assert set(batch.ids.tolist()) <= {0, 1, 2}


def test_a_failing_class_is_no_bad_record() -> None:
    with (
        Feed.from_spec(fails("raises", on_bad_record="skip")) as feed,
        pytest.raises(PythonDataError, match="IndexError"),
    ):
        next(feed)


def test_the_layer_of_a_net_is_the_data_set(tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(
        'layer { name: "d" type: "Python" top: "data" top: "label" transform_param { scale: 0.25 }\n'
        '  python_param { module: "tests.pipeline.user_data" layer: "Noise" param_str: \'{"batch": 7}\' } }\n'
        'layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 4 } }\n'
        'layer { name: "l" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "l" }\n'
    )
    (tmp_path / "solver.prototxt").write_text('base_lr: 0.1 lr_policy: "fixed" max_iter: 3\n')
    given = {
        "net": str(tmp_path / "net.prototxt"),
        "solver": str(tmp_path / "solver.prototxt"),
        "feed.engine": "inline",
    }
    config = settings.load(None, given)
    assert config.data.train.source == MODULE + "Noise"
    assert (config.data.train.batch, config.data.train.param) == (7, '{"batch": 7}')
    with Feed(config) as feed:
        assert feed.shape == (7, 3, 8, 8)
        assert next(feed).data.max() <= 255 / 4
    config = settings.load(None, {**given, "data.train.batch": 3, "data.train.param": '{"records": 5}'})
    with Feed(config) as feed:
        assert (feed.shape[0], feed.records) == (3, 5)
