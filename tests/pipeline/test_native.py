"""The short way of a batch against the general way: the same bytes, hashes, errors and stand-ins, whatever the records
are."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import plyvel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets import caffe_pb2, datum
from datasets.errors import DatasetChanged, DatasetCorrupt, DatasetTruncated
from pipeline.maker import BatchMaker, LocalReader, probe
from pipeline.native import Native
from pipeline.spec import FeedSpec, TransformSpec
from pipeline.worker import open_data
from profiler import store
from profiler.errors import StallscopeError
from profiler.events import Kind, Stage
from profiler.recorder import NULL, Recorder
from tests.pipeline.build import encoded, picture, raw, write_leveldb, write_lmdb

SPEC = FeedSpec(
    "tests/data/db/crops96_raw_40x48_lmdb", 7, seed=5, shuffle="full", fingerprints="step",
    transform=TransformSpec(crop=24, mirror=True, mean_value=(104.0, 117.0, 123.0), scale=0.5),
)  # fmt: skip


def both(spec: FeedSpec, steps: int, monkeypatch: pytest.MonkeyPatch | None = None) -> tuple[list[Any], list[int]]:
    """What the two ways made of each step, as pairs, and how many batches each Native call gave."""
    taken: list[int] = []
    pairs: list[Any] = []
    with open_data(spec) as source:
        probed = probe(spec, source)
        short, general = (BatchMaker(spec, probed, LocalReader(source)) for _ in range(2))
        assert short._native is not None
        general._native = None
        make = short._native.make
        for step in range(steps):
            found = []
            for maker in (short, general):
                payload = np.full(probed.layout.nbytes, 0xEE, np.uint8)
                slot = probed.layout.views(payload)
                if maker is short:
                    raw_hashes = make(maker.stream.at(step), slot, NULL, {})
                    taken.append(raw_hashes is not None)
                try:
                    made = maker.make(step, slot)
                except StallscopeError as error:
                    found.append((type(error), str(error)))
                else:
                    found.append((made, slot.samples(made.items).tobytes(), slot.labels[: made.items].tolist(),
                                  slot.ids.tolist(), slot.epochs.tolist(),
                                  None if slot.bad is None else slot.bad[: int(slot.bad_count[0])].tolist()))  # type: ignore[index]  # fmt: skip
            pairs.append(found)
    return pairs, taken


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"fingerprints": "off"},
        {"phase": "TEST"},
        {"tail": "partial"},
        {"tail": "drop", "shuffle": "block"},
        {"on_bad_record": "skip"},
        {"on_bad_record": "zero", "batch": 96},
        {"batch": 200},
        {"transform": TransformSpec(scale=3.0)},
        {"transform": TransformSpec(mirror=True, mean_value=(100.0,))},
        {"transform": TransformSpec(crop=40, mirror=True)},
        {"source": "tests/data/db/crops96_raw_40x48_leveldb"},
        {"source": "tests/data/db/crops96_raw_40x48_leveldb", "fingerprints": "off", "batch": 200},
    ],
    ids=lambda change: ",".join(change) or "as it is",
)
def test_the_same_bytes_and_hashes(change: dict[str, Any]) -> None:
    pairs, taken = both(replace(SPEC, **change), 15)
    assert all(taken)
    for short, general in pairs:
        assert short == general


def test_a_mean_image_is_taken_at_the_place_of_the_crop(tmp_path: Path) -> None:
    blob = caffe_pb2.BlobProto(num=1, channels=3, height=40, width=48)
    blob.data.extend(np.random.default_rng(0).random(3 * 40 * 48).astype(np.float32))
    (tmp_path / "mean.binaryproto").write_bytes(blob.SerializeToString())
    transform = TransformSpec(crop=23, mirror=True, mean_file=str(tmp_path / "mean.binaryproto"), scale=0.3)
    pairs, taken = both(replace(SPEC, transform=transform), 14)
    assert all(taken)
    assert all(short == general for short, general in pairs)


def _varint(number: int) -> bytes:
    number &= 2**64 - 1
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


@st.composite
def _records(draw: Any) -> bytes:
    """A record of 2 x 4 x 5 pixels: in any order, said twice, with other fields, or wrong in one way."""
    numbers = {1: 2, 2: 4, 3: 5, 5: draw(st.sampled_from([0, 1, -1, 7, 2**31 - 1, -(2**31)]))}
    pixels = bytes(range(40))
    wrong = draw(
        st.sampled_from([None] * 10 + ["size", "label", "encoded", "floats", "other", "cut", "channels", "big"])
    )
    if wrong == "size":
        numbers[2] = draw(st.sampled_from([0, 3, 5, -4, 2**31 - 1, 6]))
    if wrong == "channels":
        numbers[1], numbers[2] = 4, 2
    if wrong == "big":
        numbers[2], pixels = 8, bytes(80)
    fields = [_varint(number << 3) + _varint(value) for number, value in numbers.items()]
    fields.append(b"\x22" + _varint(len(pixels)) + pixels)
    if wrong == "label":
        del fields[3]
    if wrong == "encoded":
        fields.append(b"\x38\x01")
    if wrong == "floats":
        fields.append(b"\x32\x04\0\0\x80\x3f")
    if wrong == "other":
        fields.append(draw(st.sampled_from([b"\x7a\x02hi", b"\xa0\x06\x01", b"\x0a\x01x", b"\x41" + bytes(8)])))
    fields = draw(st.permutations(fields))
    if draw(st.booleans()):
        fields = [b"\x28\x05", b"\x38\x00", *fields] if wrong != "label" else fields  # the last one counts
    value = b"".join(fields)
    if wrong == "cut":
        value = value[: draw(st.integers(0, len(value) - 1))]
    return value


@settings(max_examples=60, deadline=None)
@given(
    st.lists(_records(), min_size=1, max_size=9), st.sampled_from(["stop", "skip", "zero"]),
    st.sampled_from([0, 3]), st.booleans(), st.sampled_from([write_lmdb, write_leveldb]),
)  # fmt: skip
def test_any_record_gives_the_same_batch_or_the_same_error(
    values: list[bytes], policy: Any, crop: int, mirror: bool, write: Callable[..., str]
) -> None:
    sound = raw(np.arange(40, dtype=np.uint8).reshape(2, 4, 5), 1)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "db", [sound, sound, *values])
        spec = FeedSpec(
            path, 3, seed=1, shuffle="full", on_bad_record=policy, bad_record_cap=1.0, fingerprints="step",
            transform=TransformSpec(crop=crop, mirror=mirror),
        )  # fmt: skip
        pairs, _ = both(spec, 8)
    for short, general in pairs:
        assert short == general


@pytest.mark.parametrize(
    ("change", "labels"),
    [
        ({"transform": TransformSpec(python="tests.pipeline.functions:noise")}, [1]),
        ({"transform": TransformSpec(resize=(9, 9))}, [1]),
        ({"transform": TransformSpec(crop=3)}, [np.ones(2, np.float32)]),
    ],
)
def test_what_needs_python_takes_the_general_way(tmp_path: Path, change: dict[str, Any], labels: list[Any]) -> None:
    image = picture(1, (1, 8, 8))
    if isinstance(labels[0], int):
        value = raw(image, labels[0])
    else:
        value = datum.serialize(channels=1, height=8, width=8, data=image.tobytes(), float_data=labels[0])
    spec = FeedSpec(write_lmdb(tmp_path / "db", [value] * 3), 2, **change)
    with open_data(spec) as source:
        probed = probe(spec, source)
        assert BatchMaker(spec, probed, LocalReader(source))._native is None


def test_a_data_set_of_image_files_is_tried_three_times_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lmdb(tmp_path / "db", [encoded(picture(i, (3, 8, 8)), i, "PNG") for i in range(6)])
    spec = FeedSpec(path, 2)
    calls = []
    call = Native._call
    monkeypatch.setattr(Native, "_call", lambda self, *args: calls.append(1) or call(self, *args))
    with open_data(spec) as source:
        probed = probe(spec, source)
        maker = BatchMaker(spec, probed, LocalReader(source))
        slot = probed.layout.views(np.zeros(probed.layout.nbytes, np.uint8))
        for step in range(10):
            maker.make(step, slot)
    assert len(calls) == 3


def test_a_commit_and_a_cut_are_told_as_ever(tmp_path: Path) -> None:
    values = [raw(picture(i, (1, 30, 30)), i) for i in range(40)]
    for what, error in (("commit", DatasetChanged), ("cut", DatasetTruncated)):
        path = write_lmdb(tmp_path / what, values)
        spec = FeedSpec(path, 10)
        with open_data(spec) as source:
            probed = probe(spec, source)
            maker = BatchMaker(spec, probed, LocalReader(source))
            slot = probed.layout.views(np.zeros(probed.layout.nbytes, np.uint8))
            maker.make(0, slot)
            if what == "commit":
                with lmdb.open(path, map_size=64 << 20) as env, env.begin(write=True) as txn:
                    txn.put(b"x", b"y")
            else:
                os.truncate(Path(path) / "data.mdb", 3 * 4096)
            with pytest.raises(error):
                maker.make(1, slot)


@pytest.mark.parametrize("keys", ["%08d", "%03d-x"], ids=["numbers", "names"])
@pytest.mark.parametrize("block_size", [500, 65536])
@pytest.mark.parametrize("compression", ["snappy", None])
def test_tables_and_logs_of_a_leveldb(tmp_path: Path, compression: str | None, block_size: int, keys: str) -> None:
    """Blocks of one record and of many, records that span the log's own blocks, and both in one batch."""
    path = str(tmp_path / "db")
    options = {"compression": compression, "block_size": block_size, "write_buffer_size": 1 << 17}
    with plyvel.DB(path, create_if_missing=True, **options) as db:
        for i in range(20):
            db.put((keys % i).encode(), raw(picture(i, (3, 12, 12)), i))
        for i in range(20, 32):
            image = np.random.default_rng(i).integers(0, 256, (3, 90, 120)).astype(np.uint8)
            db.put((keys % i).encode(), raw(image, i))
    spec = FeedSpec(path, 9, seed=2, shuffle="full", fingerprints="step", transform=TransformSpec(crop=10, mirror=True))
    with open_data(spec) as source:
        located = source.locate(np.arange(32))  # type: ignore[attr-defined]
    assert located is not None
    assert set(located.arrays.blocks.tolist()) == {True, False}
    assert located.arrays.pieces[-1] > 33, "a record in several pieces of the log"
    pairs, taken = both(spec, 12)
    assert all(taken)
    assert all(short == general for short, general in pairs)


@pytest.mark.parametrize("how", ["cut", "flip"])
def test_damage_to_a_leveldb_is_told_as_ever(tmp_path: Path, how: str) -> None:
    path = tmp_path / "db"
    with plyvel.DB(str(path), create_if_missing=True, compression=None) as db:
        for i in range(40):
            db.put(b"%08d" % i, raw(picture(i, (1, 30, 30)), i))
        db.compact_range()
    spec = FeedSpec(str(path), 10, transform=TransformSpec(crop=20))
    with open_data(spec) as source:
        probed = probe(spec, source)
        maker = BatchMaker(spec, probed, LocalReader(source))
        slot = probed.layout.views(np.zeros(probed.layout.nbytes, np.uint8))
        maker.make(0, slot)
        (table,) = path.glob("*.ldb")
        if how == "cut":
            os.truncate(table, 14_000)
        else:
            content = bytearray(table.read_bytes())
            content[15_000] ^= 1
            table.write_bytes(content)
        wanted, text = (DatasetTruncated, "became shorter") if how == "cut" else (DatasetCorrupt, "checksum mismatch")
        with pytest.raises(wanted, match=text):
            maker.make(1, slot)


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_one_call_is_recorded_as_the_stages_it_did(tmp_path: Path, backend: str) -> None:
    spec = replace(SPEC, source=f"tests/data/db/crops96_raw_40x48_{backend}")
    with Recorder.open(tmp_path, "trainer", "trainer") as recorder, open_data(spec) as source:
        probed = probe(spec, source)
        maker = BatchMaker(spec, probed, LocalReader(source), recorder)
        slot = probed.layout.views(np.zeros(probed.layout.nbytes, np.uint8))
        maker.warm_up()
        for step in range(20):
            with recorder.span(Stage.BATCH, step=step):
                maker.make(step, slot)
    events = store.load_run(tmp_path).events.to_pylist()
    events = [row for row in events if row["kind"] == Kind.SPAN]
    for step in range(20):
        mine = {Stage(row["stage"]): row for row in events if row["step"] == step}
        assert len(mine) == sum(row["step"] == step for row in events) == 5
        order = [mine[stage] for stage in (Stage.READ, Stage.DECODE, Stage.AUGMENT, Stage.COLLATE)]
        assert mine[Stage.BATCH]["t0_ns"] <= order[0]["t0_ns"]
        assert order[-1]["t1_ns"] <= mine[Stage.BATCH]["t1_ns"]
        for before, after in itertools.pairwise(order):
            assert before["t0_ns"] <= before["t1_ns"] <= after["t0_ns"]
        assert order[0]["t1_ns"] == order[1]["t0_ns"]
        assert order[1]["t1_ns"] == order[2]["t0_ns"]
        for row in order[:3]:
            assert 0 <= row["cpu_ns"] <= row["t1_ns"] - row["t0_ns"] + 1_000_000
            assert row["items"] == 7
        assert order[0]["bytes"] > 7 * 3 * 40 * 48
        assert {row["inblock"] for row in order[1:3]} == {0}
