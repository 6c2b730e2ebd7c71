"""Labels in a second source, several sources one after the other, and every record exactly once an epoch (case C12)."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets import datum, open_source
from datasets.concat import ConcatSource
from datasets.errors import PairMismatch
from datasets.paired import PairedSource
from pipeline.config import validate
from pipeline.feed import Feed
from pipeline.maker import LabelError
from pipeline.settings import load
from pipeline.spec import FeedSpec, feed_spec
from pipeline.worker import open_data
from profiler.errors import StallscopeError, UsageError
from tests.pipeline.build import picture, raw, write_leveldb, write_lmdb
from tests.pipeline.test_crew import engine

SHAPE = (1, 6, 7)


def images(count: int, first: int = 0) -> list[bytes]:
    return [raw(picture(first + i, SHAPE), 1000 + first + i) for i in range(count)]


def number(label: int | None, floats: Any = None) -> bytes:
    return datum.serialize(channels=1, height=1, width=1, label=label, float_data=floats)


# -- paired ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_labels_of_the_second_source_win(tmp_path: Path, backend: str) -> None:
    path = write_lmdb(tmp_path / "images", images(12))
    write = write_lmdb if backend == "lmdb" else write_leveldb
    labels = write(tmp_path / "labels", [number(i * 3) for i in range(12)])
    spec = FeedSpec(path, 5, labels=labels, shuffle="full", stop_step=3, fingerprints="step")
    with Feed.from_spec(spec) as feed:
        for batch in feed:
            assert batch.labels.dtype == np.int32
            assert batch.labels.tolist() == [3 * i for i in batch.ids.tolist()]
            for i, record in enumerate(batch.ids.tolist()):
                np.testing.assert_array_equal(batch.data[i], picture(record, SHAPE))
    with open_data(spec) as source:
        assert source.backend == backend  # a LevelDB anywhere in it wants one owner on a node
        assert source.identity()["labels"]["path"] == labels


def test_vectors_from_float_data(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "images", images(4))
    labels = write_lmdb(tmp_path / "labels", [number(None, [i, i + 0.25, -i]) for i in range(4)])
    with Feed.from_spec(FeedSpec(path, 4, labels=labels)) as feed:
        assert feed.label_shape == (4, 3)
        batch = next(feed)
        assert batch.labels.dtype == np.float32
        assert batch.labels.tolist() == [[i, i + 0.25, -i] for i in range(4)]


def test_one_record_missing_names_the_first_key_that_differs(tmp_path: Path) -> None:
    keys = [b"%08d_img" % i for i in range(12)]
    path = write_lmdb(tmp_path / "images", images(12))
    labels = write_lmdb(tmp_path / "labels", [number(i) for i in range(11)], [key for key in keys if b"7_" not in key])
    with pytest.raises(PairMismatch, match="they differ at record 7") as caught:
        Feed.from_spec(FeedSpec(path, 4, labels=labels))
    text = str(caught.value)
    assert "key '00000007_img' (12 records)" in text
    assert "key '00000008_img' (11 records)" in text
    assert path in text
    assert labels in text


def test_the_last_record_missing_is_named_too(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "images", images(5))
    labels = write_lmdb(tmp_path / "labels", [number(i) for i in range(4)])
    with pytest.raises(PairMismatch, match="differ at record 4") as caught:
        Feed.from_spec(FeedSpec(path, 4, labels=labels))
    assert "no such record (4 records)" in str(caught.value)


def test_other_keys_of_the_same_number_are_found_when_they_are_read(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "images", images(6), [b"a", b"b", b"c", b"d", b"e", b"f"])
    labels = write_lmdb(tmp_path / "labels", [number(i) for i in range(6)], [b"a", b"b", b"c", b"dd", b"e", b"f"])
    with Feed.from_spec(FeedSpec(path, 2, labels=labels)) as feed:
        next(feed)
        with pytest.raises(PairMismatch, match="differ at record 3") as caught:
            next(feed)
    assert "key 'd' " in str(caught.value)
    assert "key 'dd' " in str(caught.value)


def test_a_label_record_without_label_is_named_with_both_sources(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "images", images(3))
    labels = write_lmdb(tmp_path / "labels", [number(0), number(1), number(None)])
    with Feed.from_spec(FeedSpec(path, 3, labels=labels)) as feed, pytest.raises(LabelError) as caught:
        next(feed)
    text = str(caught.value)
    assert "record 2 (key '00000002_img')" in text
    assert path in text
    assert labels in text
    skipping = FeedSpec(path, 3, labels=labels, on_bad_record="skip", bad_record_cap=0.5)
    with Feed.from_spec(skipping) as feed:
        assert set(next(feed).ids.tolist()) == {0, 1}


def test_a_paired_source_survives_pickling(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "images", images(3))
    labels = write_lmdb(tmp_path / "labels", [number(i) for i in range(3)])
    with open_data(FeedSpec(path, 1, labels=labels)) as source, pickle.loads(pickle.dumps(source)) as copy:
        assert isinstance(copy, PairedSource)
        assert copy.read(2) == source.read(2)


# -- one after the other -----------------------------------------------------------------------------------------------


def test_several_sources_have_one_index(tmp_path: Path) -> None:
    parts = [
        write_lmdb(tmp_path / "a", images(5)), write_leveldb(tmp_path / "b", images(4, 5)),
        write_lmdb(tmp_path / "c", images(6, 9)),
    ]  # fmt: skip
    whole = write_lmdb(tmp_path / "whole", images(15))
    spec = FeedSpec(tuple(parts), 4, shuffle="full", seed=2, stop_step=8, fingerprints="step")
    with Feed.from_spec(spec) as feed, Feed.from_spec(replace(spec, source=whole)) as one:
        assert feed.records == 15
        for batch, expected in zip(feed, one, strict=True):
            assert batch.hashes == expected.hashes
            assert batch.labels.tolist() == (batch.ids + 1000).tolist()
    with open_data(spec) as source:
        assert source.backend == "leveldb"
        assert source.identity()["records"] == 15
        assert [part["records"] for part in source.identity()["parts"]] == [5, 4, 6]
        with pytest.raises(IndexError):
            source.read(15)


def test_a_bad_record_of_a_part_is_named_with_that_part(tmp_path: Path) -> None:
    parts = [write_lmdb(tmp_path / "a", images(3)), write_lmdb(tmp_path / "b", [*images(1), b"\xff\xff"])]
    with Feed.from_spec(FeedSpec(tuple(parts), 5)) as feed, pytest.raises(StallscopeError) as caught:
        next(feed)
    assert f"record 4 (key '00000001_img') of LMDB {parts[1]}, its record 1" in str(caught.value)


def test_no_sources_at_all_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one"):
        ConcatSource([])


def test_a_list_and_labels_in_a_configuration(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_lmdb(tmp_path / name, images(3))
    write_lmdb(tmp_path / "labels", [number(i) for i in range(6)])
    path = tmp_path / "job.yaml"
    path.write_text(
        "device: {backend: emulated}\nrun: {iterations: 3}\n"
        "data: {train: {source: [a, b], labels: labels, batch: 2}, on_bad_record: zero}\n"
    )
    config = load(path)
    spec = feed_spec(config)
    assert spec.source == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert spec.labels == str(tmp_path / "labels")
    with pytest.raises(UsageError, match=r"data\.train\.source: c does not exist"):
        load(path, ["--data.train.source", "[a, c]"])
    with pytest.raises(UsageError, match=r"data\.train\.labels: nowhere does not exist"):
        load(path, ["--data.train.labels", "nowhere"])
    assert validate({"data": {"train": {"source": ["x"]}}}).source("TRAIN").source == ("x",)


# -- each record once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 4])
def test_every_record_once_an_epoch_whatever_the_number_of_readers(tmp_path: Path, workers: int) -> None:
    """103 records, 8 a batch: neither divides the other. (Two workers: see the golden batches.)"""
    path = write_lmdb(tmp_path / "db", images(103))
    made = engine(FeedSpec(path, 8, shuffle="full", seed=1, stop_step=26, depth=5), workers)
    seen: list[tuple[int, int]] = []
    try:
        for step in range(26):
            slot = made.slots[made.get(step).slot]
            assert slot.labels.tolist() == (slot.ids + 1000).tolist()
            seen += zip(slot.epochs.tolist(), slot.ids.tolist(), strict=True)
            made.ring.release(step)
    finally:
        made.close()
    for epoch in (0, 1):
        assert sorted(record for at, record in seen if at == epoch) == list(range(103))
    assert len(seen) == 208


def test_ignored_fields_of_a_data_layer_are_said(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", images(4))
    (tmp_path / "net.prototxt").write_text(
        'layer { name: "d" type: "Data" top: "data" top: "label"\n'
        f'  data_param {{ source: "{path}" batch_size: 2 backend: LMDB rand_skip: 7 prefetch: 9 }} }}\n'
        'layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 2 } }\n'
        'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }\n'
    )
    (tmp_path / "solver.prototxt").write_text('net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 1\n')
    (tmp_path / "job.yaml").write_text("solver: solver.prototxt\n")
    notes = "\n".join(load(tmp_path / "job.yaml").notes)
    for name in ("rand_skip", "prefetch"):
        assert f"data_param.{name} of layer 'd'" in notes
    assert notes.count("has no effect here") == 2


def test_read_through_a_source_that_is_opened_alone(tmp_path: Path) -> None:
    """Pairing and joining go together: labels of all parts in one second source."""
    parts = [write_lmdb(tmp_path / "a", images(2)), write_lmdb(tmp_path / "b", images(2, 2), [b"x", b"y"])]
    keys = [b"00000000_img", b"00000001_img", b"x", b"y"]
    labels = write_lmdb(tmp_path / "labels", [number(i) for i in range(4)], keys)
    with Feed.from_spec(FeedSpec(tuple(parts), 4, labels=labels)) as feed:
        assert next(feed).labels.tolist() == [0, 1, 2, 3]
    with open_source(parts[0]) as source:
        assert len(source) == 2
