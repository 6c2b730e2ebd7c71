"""Real-world failures, each built and run through the feed or a whole job: what does not fit, labels, orders, colours,
slow and dead producers, databases that change under a run."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets.errors import DatasetChanged, DatasetTruncated
from gpu.layers.loss import LabelOutOfRange
from pipeline.crew import FeedError
from pipeline.feed import Feed
from pipeline.maker import LabelError
from pipeline.run import run
from pipeline.settings import load
from pipeline.spec import FeedSpec, TransformSpec
from profiler import report, store
from profiler.errors import StallscopeError
from profiler.finding import Finding
from profiler.recorder import Recorder
from tests.pipeline.build import commit, encoded, picture, raw, write_lmdb, write_mean
from tests.pipeline.test_crew import engine

SMALL = (1, 4, 4)


def small(labels: list[int | None]) -> list[bytes]:
    return [raw(picture(i, SMALL), label) for i, label in enumerate(labels)]


def failing(spec: FeedSpec) -> str:
    """The text of the error that a feed ends with."""
    with pytest.raises(StallscopeError) as caught, Feed.from_spec(spec) as feed:
        list(feed)
    return str(caught.value)


# -- C4: a mean that does not fit --------------------------------------------------------------------------------------


def test_mean_of_256_on_records_of_227(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [raw(picture(i, (3, 227, 227)), i) for i in range(2)])
    mean = write_mean(tmp_path / "mean.binaryproto", np.full((3, 256, 256), 100, np.float32))
    text = failing(FeedSpec(path, 2, stop_step=1, transform=TransformSpec(mean_file=mean, crop=224)))
    for part in (
        "record 0 (key '00000000_img')",
        path,
        mean,
        "3 x 256 x 256",
        "3 x 227 x 227",
        "crop 224",
        "nothing is",
    ):
        assert part in text


def test_three_mean_values_on_gray(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", small([1, 2]))
    text = failing(FeedSpec(path, 2, stop_step=1, transform=TransformSpec(mean_value=(104.0, 117.0, 123.0))))
    for part in ("record 0 (key '00000000_img')", path, "mean_value", "1 channels", "[104.0, 117.0, 123.0]"):
        assert part in text


def test_mean_in_rows_columns_channels(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [raw(picture(0, (3, 20, 24)), 0)])
    mean = write_mean(tmp_path / "mean.binaryproto", np.zeros((20, 24, 3), np.float32))
    text = failing(FeedSpec(path, 1, stop_step=1, transform=TransformSpec(mean_file=mean)))
    assert "20 x 24 x 3" in text
    assert "3 x 20 x 24" in text


def test_a_later_record_that_the_mean_does_not_fit(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [raw(picture(i, (3, 20 + (i == 3), 24)), 0) for i in range(4)])
    mean = write_mean(tmp_path / "mean.binaryproto", np.zeros((3, 20, 24), np.float32))
    text = failing(FeedSpec(path, 4, stop_step=1, transform=TransformSpec(mean_file=mean, crop=10)))
    assert "does not fit record 3 (key '00000003_img')" in text


# -- C5: sizes ---------------------------------------------------------------------------------------------------------


def test_one_record_of_300_x_237_among_300_x_300(tmp_path: Path) -> None:
    shapes = [(3, 300, 300)] * 2 + [(3, 300, 237), (3, 300, 300)]
    path = write_lmdb(tmp_path / "db", [raw(picture(i, shape), i) for i, shape in enumerate(shapes)])
    text = failing(FeedSpec(path, 4, stop_step=1))
    for part in ("record 2 (key '00000002_img')", "record 0 (key '00000000_img')", "3 x 300 x 300", "3 x 300 x 237"):
        assert part in text
    with Feed.from_spec(FeedSpec(path, 4, stop_step=1, transform=TransformSpec(crop=200))) as feed:
        assert sum(len(sent) for sent in feed) == 4
    with Feed.from_spec(FeedSpec(path, 1, stop_step=4)) as feed:  # one at a time, any size is a batch
        for sent, shape in zip(feed, shapes, strict=True):
            np.testing.assert_array_equal(sent.data[0], picture(sent.step, shape))


def test_a_net_that_needs_one_size_says_which_layer(tmp_path: Path) -> None:
    shapes = [(3, 20, 24), (3, 20, 23)]
    path = write_lmdb(tmp_path / "db", [raw(picture(i, shape), i) for i, shape in enumerate(shapes)])
    net = tmp_path / "net.prototxt"
    net.write_text(_DATA.replace("batch_size: 4", "batch_size: 1") % ("d", "TRAIN", path) + _NET % "")
    (tmp_path / "solver.prototxt").write_text(
        'base_lr: 0.1 lr_policy: "fixed" max_iter: 2 snapshot_prefix: "x" solver_mode: CPU'
    )
    config = load(
        None,
        [
            f"--net={net}", f"--solver={tmp_path / 'solver.prototxt'}", "--feed.engine=inline",
            "--data.order.shuffle=none", f"--run.folder={tmp_path / 'run'}",
        ],
    )  # fmt: skip
    with pytest.raises(StallscopeError, match=r"layer 'ip' \(InnerProduct\): its parameters cannot follow"):
        run(config)


# -- C7 and C8: labels -------------------------------------------------------------------------------------------------

_DATA = """
layer { name: "%s" type: "Data" top: "data" top: "label" include { phase: %s }
  data_param { source: "%s" batch_size: 4 backend: LMDB } }
"""
_NET = """
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" %s }
"""


def job(tmp_path: Path, train: str, *, ignore: int | None = None, test: str | None = None) -> list[str]:
    """Flags of a job with a small net."""
    net = _DATA % ("train", "TRAIN", train) + (_DATA % ("test", "TEST", test) if test else "")
    net += _NET % ("" if ignore is None else f"loss_param {{ ignore_label: {ignore} }}")
    (tmp_path / "net.prototxt").write_text(net)
    tests = "test_iter: 2 test_interval: 2\n" if test else ""
    (tmp_path / "solver.prototxt").write_text(f'base_lr: 0.01 lr_policy: "fixed" max_iter: 4 random_seed: 1\n{tests}')
    return [
        f"--net={tmp_path}/net.prototxt", f"--solver={tmp_path}/solver.prototxt", "--feed.engine=inline",
        f"--run.folder={tmp_path}/run", "--run.log_level=error", "--profile.samplers_hz=0", "--device.backend=numpy",
        "--data.order.shuffle=none",
    ]  # fmt: skip


@pytest.mark.parametrize("label", [-1, 10, 1456, 300])
def test_a_label_that_is_no_class_is_named_with_its_record(tmp_path: Path, label: int) -> None:
    path = write_lmdb(tmp_path / "db", small([0, 1, 2, 3, 4, 5, label, 7]))
    with pytest.raises(LabelOutOfRange) as caught:
        run(load(None, job(tmp_path, path)))
    assert (caught.value.value, caught.value.classes) == (label, 10)
    text = str(caught.value)
    for part in (f"label {label} ", "record 6 (key '00000006_img')", path, "from 0 to 9 (10 classes)"):
        assert part in text
    assert store.load_run(tmp_path / "run").manifest["outcome"]["error"] == text


def test_a_label_of_the_test_set_is_named_with_that_set(tmp_path: Path) -> None:
    train = write_lmdb(tmp_path / "train", small([1] * 8))
    test = write_lmdb(tmp_path / "test", small([1] * 5 + [77] + [1] * 2))
    with pytest.raises(LabelOutOfRange, match=r"record 5 \(key '00000005_img'\)") as caught:
        run(load(None, job(tmp_path, train, test=test)))
    assert test in str(caught.value)


def test_ignored_labels_are_no_error_and_300_is_a_label_like_others(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", small([0, 1, 300, 3, 300, 5, 300, 7]))
    assert run(load(None, job(tmp_path, path, ignore=300))) == 0
    assert math.isfinite(store.load_run(tmp_path / "run").manifest["outcome"]["loss"])


def test_a_loss_of_87_is_told_once_with_what_to_look_at(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", small([1, 1, 1, 1, 2, 2, 2, 2]))
    flags = [*job(tmp_path, path), "--run.if_exists=replace"]

    def told(*more: str) -> list[Finding]:
        assert run(load(None, [*flags, *more])) == 0
        found = report.build(store.load_run(tmp_path / "run")).findings
        return [finding for finding in found if finding.kind == "loss_saturated"]

    (finding,) = told()  # pixels up to 255 are enough
    assert (finding.level, finding.step) == ("warning", 0)
    for part in ("In step 0 the loss is 87.3365", "base_lr", "scale"):
        assert part in finding.text
    assert told("--data.transform.scale=0.00390625") == []


def test_a_record_cut_just_before_its_label_has_no_label(tmp_path: Path) -> None:
    """It parses, and Caffe would train on label 0."""
    values = small([1, 2, 3, 4])
    path = write_lmdb(tmp_path / "db", [*values[:2], values[2][:-2], values[3]])
    with Feed.from_spec(FeedSpec(path, 4)) as feed, pytest.raises(LabelError, match=r"record 2 .* has no label"):
        next(feed)
    whole = write_lmdb(tmp_path / "zero", small([1, 2, 0, 4]))
    with Feed.from_spec(FeedSpec(whole, 4)) as feed:
        assert next(feed).labels.tolist() == [1, 2, 0, 4]


# -- C10: grouped records ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_records_in_two_blocks_come_mixed_and_otherwise_each_epoch(tmp_path: Path, shuffle: Any) -> None:
    path = write_lmdb(tmp_path / "db", [raw(picture(0, (1, 1, 1)), label) for label in [0] * 500 + [1] * 500])
    spec = FeedSpec(path, 50, shuffle=shuffle, seed=1, stop_step=40)

    def stream() -> list[list[int]]:
        with Feed.from_spec(spec) as feed:
            return [batch.ids.tolist() for batch in feed]

    first = stream()
    assert stream() == first
    assert first[:20] != first[20:]
    with Feed.from_spec(spec) as feed:
        shares = [float(batch.labels.mean()) for batch in feed]
    assert min(shares) > 0
    assert max(shares) < 1
    with Feed.from_spec(replace(spec, shuffle="none", stop_step=20)) as feed:
        assert Counter(float(batch.labels.mean()) for batch in feed) == {0.0: 10, 1.0: 10}


# -- C11: colours ------------------------------------------------------------------------------------------------------


def test_red_is_0_0_255_however_it_is_stored(tmp_path: Path) -> None:
    red = np.zeros((3, 16, 16), np.uint8)
    red[2] = 255  # B, G, R
    values = [encoded(red, 0, "PNG"), encoded(red, 0, "BMP"), raw(red, 0), encoded(red, 0, "JPEG")]
    path = write_lmdb(tmp_path / "db", values)
    with Feed.from_spec(FeedSpec(path, 4)) as feed:
        batch = next(feed)
        for sample in batch.data[:3]:
            assert [set(np.unique(channel)) for channel in sample] == [{0.0}, {0.0}, {255.0}]
        assert np.abs(batch.data[3] - red).max() <= 2  # JPEG's own colour rounding


# -- C16: slow at first, slow always, dead -----------------------------------------------------------------------------


def test_a_slow_first_batch_is_a_cold_start_and_no_stall(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", small(list(range(10)) * 8))
    python = "tests.pipeline.functions:slow_at_first"
    config = load(
        None,
        [
            "--device.backend=emulated", "--device.step_ms=5", "--run.iterations=20", f"--run.folder={tmp_path}/run",
            f"--data.train.source={path}", "--data.train.batch=4", f"--data.transform.python={python}",
            "--feed.engine=inline", "--run.log_level=error", "--profile.samplers_hz=0", "--data.order.shuffle=none",
        ],
    )  # fmt: skip
    assert run(config) == 0
    found = report.build(store.load_run(tmp_path / "run"))
    assert found.cold_steps == 1
    worst = max(found.stalls, key=lambda cause: cause.seconds)
    assert worst.why == "cold_start"
    assert worst.seconds > 0.9
    assert sum(cause.seconds for cause in found.stalls if cause is not worst) < 0.5 * worst.seconds
    assert (found.step_ms["p99"] or 0) < 500  # the second is in no figure of the steady run
    assert "the feed was starting up" not in found.headline


def test_a_slow_stage_is_named(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", small(list(range(10)) * 8))
    with Recorder.open(tmp_path / "run", "trainer", "trainer", detail="full") as recorder:
        spec = FeedSpec(path, 4, stop_step=3, transform=TransformSpec(python="tests.pipeline.functions:slow"))
        with Feed.from_spec(spec, recorder) as feed:
            list(feed)
    from profiler.events import Kind, Stage

    rows = store.load_run(tmp_path / "run").events.to_pylist()
    took = {
        stage: sum(row["t1_ns"] - row["t0_ns"] for row in rows if (row["stage"], row["kind"]) == (stage, Kind.SPAN))
        for stage in (Stage.READ, Stage.DECODE, Stage.FUNCTION, Stage.AUGMENT)
    }
    assert took[Stage.FUNCTION] > 3 * 4 * 1e6  # three batches of four, a millisecond each
    assert took[Stage.FUNCTION] > took[Stage.READ] + took[Stage.DECODE]


def test_a_producer_that_ends_without_a_word_is_an_error_within_seconds(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", small([1] * 8))
    spec = FeedSpec(
        path, 4, stop_step=40, max_restarts=0, stall_timeout_s=600,
        transform=TransformSpec(python="tests.pipeline.functions:exits"),
    )  # fmt: skip
    made = engine(spec, workers=1)
    began = time.monotonic()
    try:
        with pytest.raises(FeedError, match="was lost while it made step 0") as caught:
            made.get(0)
    finally:
        made.close()
    assert time.monotonic() - began < 60  # and not stall_timeout_s
    assert "exit status 3" in str(caught.value) or "unknown" in str(caught.value)


# -- a database that changes under the run -----------------------------------------------------------------------------


def test_a_commit_during_a_run_is_noticed_at_the_next_lease(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", small([1] * 64))
    with Feed.from_spec(FeedSpec(path, 4)) as feed:
        next(feed)
        commit(path)
        with pytest.raises(DatasetChanged, match="written to while it was in use") as caught:
            next(feed)
    assert path in str(caught.value)


def test_no_policy_for_bad_records_hides_a_commit(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", small([1] * 64))
    with Feed.from_spec(FeedSpec(path, 4, on_bad_record="skip", bad_record_cap=1.0)) as feed:
        next(feed)
        commit(path)
        with pytest.raises(DatasetChanged):
            next(feed)


def test_a_cut_during_a_run_is_refused_before_a_page_is_touched(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", small([1] * 64))
    with Feed.from_spec(FeedSpec(path, 4)) as feed:
        next(feed)
        with open(f"{path}/data.mdb", "r+b") as file:
            file.truncate(8192)
        with pytest.raises(DatasetTruncated, match="became shorter while it was being read") as caught:
            next(feed)
    assert path in str(caught.value)
