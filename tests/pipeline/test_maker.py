from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets import datum
from datasets.order import Order, Stream
from datasets.source import Record, Source
from pipeline import philox
from pipeline.maker import BatchMaker, LabelError, Layout, LocalReader, Made, Slot, fill_hash, probe, record_hashes
from pipeline.spec import FeedSpec, TransformSpec
from pipeline.transforms import TransformError
from pipeline.worker import open_data
from profiler import hashing
from profiler.errors import StallscopeError
from profiler.events import Flag, Kind, Stage
from profiler.recorder import Recorder

CROPS = "tests/data/db/crops96_raw_40x48_lmdb"
SPEC = FeedSpec(
    CROPS, 7, seed=5, shuffle="full", fingerprints="step",
    transform=TransformSpec(crop=24, mirror=True, mean_value=(104.0, 117.0, 123.0), scale=0.5),
)  # fmt: skip


class Listed(Source):
    """Records given one by one."""

    backend, path = "memory", "memory:listed"

    def __init__(self, *values: bytes) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def key(self, index: int) -> bytes:
        return b"key-%d" % index

    def read(self, index: int) -> Record:
        return Record(int(index), self.key(index), self.values[index], self.name)

    def identity(self) -> dict[str, Any]:
        return {"records": len(self)}

    def close(self) -> None:
        pass


def pixels(channels: int = 1, height: int = 4, width: int = 5, label: int | None = 3, **more: Any) -> bytes:
    data = np.arange(channels * height * width, dtype=np.uint8).tobytes()
    return datum.serialize(channels=channels, height=height, width=width, data=data, label=label, **more)


def make(spec: FeedSpec, step: int, source: Source | None = None, **more: Any) -> tuple[Made, Slot]:
    with open_data(spec) if source is None else source as opened:
        probed = probe(spec, opened)
        slot = probed.layout.views(np.full(probed.layout.nbytes, 0xFF, np.uint8))
        return BatchMaker(spec, probed, LocalReader(opened), **more).make(step, slot), slot


def test_a_batch_is_what_the_design_says() -> None:
    step = 13  # 96 records, batch 7: items 91..97, so it runs on into epoch 1
    made, slot = make(SPEC, step)
    items = Stream(Order(96, seed=5, shuffle="full"), 7, "wrap").at(step)
    assert (made.step, made.epoch, made.items) == (13, 0, 7)
    assert slot.ids.tolist() == items.records.tolist()
    assert slot.epochs.tolist() == items.epochs.tolist() == [0] * 5 + [1] * 2
    with open_data(SPEC) as source:
        for i in range(7):
            record = source.read(int(items.records[i]))
            parsed = datum.parse(record.value)
            image = np.frombuffer(parsed.data, np.uint8).reshape(3, 40, 48)
            key = np.array([5, 0], np.uint64)
            counter = np.array([0, 0, items.epochs[i], record.index], np.uint64)
            words = [int(word) for word in np.random.Philox(key=key, counter=counter).random_raw(4)]
            top, left = words[1] % 17, words[2] % 25
            window = image[:, top : top + 24, left : left + 24].astype(np.float32)
            expected = (window - np.float32([104, 117, 123])[:, None, None]) * np.float32(0.5)
            if words[0] & 1:
                expected = expected[:, :, ::-1]
            np.testing.assert_array_equal(slot.data[i], expected)
            assert slot.labels[i] == parsed.label


def test_hashes_are_those_of_the_definitions() -> None:
    made, slot = make(SPEC, 2)
    with open_data(SPEC) as source:
        values = [record.value for record in source.read_many(slot.ids)]
    assert made.hashes == {
        "ids": hashing.ordered(slot.ids),
        "ids_set": hashing.multiset(slot.ids),
        "raw": hashing.ordered_parts(values),
        "raw_set": hashing.multiset(values),
        "fill": fill_hash(slot.data, slot.labels),
    }
    again, _ = make(SPEC, 2)
    assert again.hashes == made.hashes
    assert make(replace(SPEC, fingerprints="off"), 2)[0].hashes == {}


@pytest.mark.parametrize("offset", [0, 1])
def test_record_hashes_are_ordered_hashes_whatever_the_length(offset: int) -> None:
    rng = np.random.default_rng(1)
    whole = [rng.integers(0, 256, size + offset).astype(np.uint8).tobytes() for size in [*range(20), 4099]]
    values: list[Any] = [memoryview(value)[offset:] for value in whole]
    assert record_hashes(values).tolist() == [hashing.ordered(value) for value in values]
    assert len(set(record_hashes(values).tolist())) == len(values)


def test_short_last_batch_fills_the_first_rows_only() -> None:
    made, slot = make(replace(SPEC, tail="partial"), 13)
    assert made.items == 5
    assert np.isfinite(slot.data[:5]).all()
    assert np.isnan(slot.data[5:]).all()
    assert made.hashes["fill"] == fill_hash(slot.data[:5], slot.labels[:5])


def test_test_phase_cycles_crops_in_the_middle_and_draws_from_its_own_key() -> None:
    spec = replace(SPEC, phase="TEST", shuffle="none", cycle=3)
    first, slot = make(spec, 1)
    later, _ = make(spec, 1 + 3 * 50)
    assert first.hashes == later.hashes
    assert slot.ids.tolist() == list(range(7, 14))
    flips = philox.draw(
        5, 1, slot.epochs, slot.ids, (np.zeros(7, int), np.zeros(7, int)), mirror=True, random_crop=False
    ).mirror
    with open_data(spec) as source:
        image = np.frombuffer(datum.parse(source.read(7).value).data, np.uint8).reshape(3, 40, 48)
    middle = image[:, 8:32, 12:36].astype(np.float32)
    expected = (middle - np.float32([104, 117, 123])[:, None, None]) * np.float32(0.5)
    np.testing.assert_array_equal(slot.data[0], expected[:, :, ::-1] if flips[0] else expected)


@pytest.mark.parametrize("path", ["tests/data/db/mnist_test_lmdb", CROPS])
def test_plain_batches_are_the_stored_pixels_in_order(path: str) -> None:
    spec = FeedSpec(path, 10, transform=TransformSpec())
    with open_data(spec) as source:
        last = len(source) // 10
        made, slot = make(spec, last, source=open_data(spec))
        for i, record in enumerate(source.read_many(slot.ids)):
            assert slot.data[i].astype(np.uint8).tobytes() == bytes(datum.parse(record.value).data)
    assert made.items == 10


def test_layout_parts_are_aligned_and_apart() -> None:
    layout = Layout(3, (1, 5, 5), 2)
    payload = np.zeros(layout.nbytes, np.uint8)
    slot = layout.views(payload)
    assert slot.labels.shape == (3, 2)
    assert slot.labels.dtype == np.float32
    for number, array in enumerate((slot.data, slot.labels, slot.ids, slot.epochs), 1):
        assert (array.ctypes.data - payload.ctypes.data) % 64 == 0
        assert not array.any()
        array.view(np.uint8)[:] = number
    assert layout.nbytes == 320 + 64 + 64 + 64


def test_float_labels_beside_pixels() -> None:
    source = Listed(*(pixels(label=None, float_data=[i, i + 0.5]) for i in range(4)))
    _, slot = make(FeedSpec("memory:listed", 4), 0, source)
    assert slot.labels.dtype == np.float32
    assert slot.labels.tolist() == [[0, 0.5], [1, 1.5], [2, 2.5], [3, 3.5]]


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        (pixels(label=None), LabelError, "has no label"),
        (pixels(label=None, float_data=[1.0]), LabelError, "of another kind than that of the first record"),
        (pixels(height=5), TransformError, "another size"),
        (pixels(channels=3), TransformError, "another number of channels"),
        (b"\xff\xff\xff", StallscopeError, "not a Datum"),
        (datum.serialize(channels=1, height=4, width=5, data=b"short", label=0), StallscopeError, "expected"),
    ],
    ids=["no-label", "other-label", "other-size", "other-channels", "no-datum", "short"],
)
def test_a_bad_record_is_named_with_key_and_data_set(bad: bytes, error: type[Exception], text: str) -> None:
    source = Listed(pixels(), pixels(), bad, pixels())
    with pytest.raises(error) as caught:
        make(FeedSpec("memory:listed", 4), 0, source)
    assert text in str(caught.value)
    assert "record 2 (key 'key-2') of memory:listed" in str(caught.value)


def test_an_absent_label_is_no_zero_even_in_record_0() -> None:
    with pytest.raises(LabelError, match="record 0 "):
        make(FeedSpec("memory:listed", 1), 0, Listed(pixels(label=None)))
    _, slot = make(FeedSpec("memory:listed", 1), 0, Listed(pixels(label=0)))
    assert slot.labels.tolist() == [0]


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(TransformError, match="holds no records"):
        make(FeedSpec("memory:listed", 1), 0, Listed())


def test_user_function_decides_shape_pixels_and_label() -> None:
    spec = replace(SPEC, transform=TransformSpec(python="tests.pipeline.functions:halves"))
    _, slot = make(spec, 0)
    assert slot.data.shape == (7, 3, 20, 24)
    spec = replace(SPEC, transform=TransformSpec(python="tests.pipeline.functions:noise"))
    made, slot = make(spec, 0)
    assert make(spec, 0)[0].hashes == made.hashes
    assert make(replace(spec, seed=6, shuffle="none"), 0)[0].hashes["fill"] != made.hashes["fill"]
    plain, _ = make(replace(SPEC, transform=TransformSpec()), 0)
    assert plain.hashes["raw"] == made.hashes["raw"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"on_bad_record": "ignore"}, "unknown on_bad_record"),
        ({"bad_record_cap": 1.5}, "bad_record_cap"),
        ({"phase": "VALID"}, "unknown phase"),
        ({"depth": 0}, "depth"),
        ({"workers": 0}, "workers"),
    ],
)
def test_spec_refuses_by_name(change: dict[str, Any], text: str) -> None:
    with pytest.raises(StallscopeError, match=text):
        replace(SPEC, **change)


def test_one_span_per_stage_in_order(tmp_path: Path) -> None:
    from profiler import store

    with Recorder.open(tmp_path, "trainer", "trainer") as recorder:
        make(replace(SPEC, phase="TEST"), 3, recorder=recorder)
    events = store.load_run(tmp_path).events.to_pylist()
    spans = sorted((event for event in events if event["kind"] == Kind.SPAN), key=lambda event: event["t0_ns"])
    assert [event["stage"] for event in spans] == [Stage.READ, Stage.DECODE, Stage.AUGMENT, Stage.COLLATE]
    for before, after in itertools.pairwise(spans):
        assert before["t1_ns"] <= after["t0_ns"]
    for event in spans:
        assert (event["step"], event["items"], event["flags"]) == (3, 7, Flag.TEST_PHASE)
        assert event["bytes"] > 0
    assert json.dumps([event["epoch"] for event in spans]) == "[0, 0, 0, 0]"
