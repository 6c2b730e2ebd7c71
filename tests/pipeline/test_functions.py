"""A user's function per batch: what it is given, what becomes of what it returns, and that its bits stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets import datum
from datasets.source import open_source
from pipeline import native, per_batch, ray_runtime
from pipeline.feed import Feed
from pipeline.functions import OwnFunction, TransformError
from pipeline.maker import BatchMaker, LocalReader, probe
from pipeline.spec import FeedSpec, ResizedCropSpec, TransformSpec
from profiler import store
from profiler.errors import StallscopeError, UsageError
from profiler.events import Flag, Kind, Stage
from profiler.recorder import Recorder
from tests.pipeline import functions
from tests.pipeline.build import encoded, picture, raw, write_leveldb, write_lmdb, write_mean

HERE = "tests.pipeline.functions:"
SHAPE, RECORDS = (3, 14, 18), 26


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("sets")
    plain = [raw(picture(i, SHAPE), i) for i in range(RECORDS)]
    mixed = [encoded(picture(i, SHAPE), i, ("JPEG", "PNG")[i % 2]) if i % 3 else plain[i] for i in range(RECORDS)]
    floats = [
        datum.serialize(channels=3, height=14, width=18, float_data=picture(i, SHAPE).ravel() / np.float32(7), label=i)
        for i in range(RECORDS)
    ]
    return {
        "lmdb": write_lmdb(folder / "lmdb", plain), "leveldb": write_leveldb(folder / "leveldb", plain),
        "mixed": write_lmdb(folder / "mixed", mixed), "jpeg": write_lmdb(folder / "jpeg", mixed[1:2] * 2 + mixed[2:]),
        "floats": write_lmdb(folder / "floats", floats),
    }  # fmt: skip


def spec(source: str, function: str | None, **more: Any) -> FeedSpec:
    transform = {key: more.pop(key) for key in list(more) if key in TransformSpec.__annotations__}
    transform = {"crop": 10, "mirror": True, "mean_value": (9.0, 100.5, 120.0), "scale": 0.017, **transform}
    if transform.get("resized_crop"):
        transform["crop"] = 0
    return FeedSpec(
        source, poison=True, transform=TransformSpec(python=function and HERE + function, **transform),
        **{"batch": 8, "seed": 3, "shuffle": "full", "stop_step": 8, "fingerprints": "step", **more},
    )  # fmt: skip


def all_of(asked: FeedSpec) -> list[tuple[Any, ...]]:
    with Feed.from_spec(asked) as feed:
        return [
            (one.step, one.data.tobytes(), one.labels.tobytes(), one.ids.tolist(), one.epochs.tolist(), one.hashes)
            for one in feed
        ]


def oracle(seed: int, phase: int, epoch: int, place: int) -> np.random.Generator:
    key, counter = np.array([seed, phase], np.uint64), np.array([0, 5, epoch, place], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


@pytest.mark.parametrize(("name", "function", "pixels"), [
    *((name, "scrambles", "uint8") for name in ("lmdb", "mixed", "resized")),
    *((name, function, "float32") for name in ("lmdb", "leveldb", "mixed", "jpeg", "resized")
      for function in ("mixes", "scrambles")),
    ("floats", "mixes", "float32"),
])  # fmt: skip
def test_it_is_given_pixels_and_mean_and_scale_come_after(
    sets: dict[str, str], name: str, function: str, pixels: Any
) -> None:
    more: dict[str, Any] = {"resized_crop": ResizedCropSpec(10)} if name == "resized" else {}
    if name == "floats":
        plain = spec(sets[name], None, mean_value=(), scale=1.0)
    else:
        plain = spec(sets.get(name, sets["lmdb"]), None, pixels="uint8", **more)
    asked = spec(plain.source, function, pixels=pixels, **more)  # type: ignore[arg-type]
    mean = np.array(asked.transform.mean_value, np.float32).reshape(3, 1, 1)
    with Feed.from_spec(plain) as feed, Feed.from_spec(asked) as other:
        assert other.label_shape == ((8, 2) if function == "mixes" else (8,))
        for batch, found in zip(feed, other, strict=True):
            rng = oracle(3, 0, batch.epoch, batch.step)
            samples, labels = getattr(functions, function)(batch.data.copy(), batch.labels.copy(), rng)
            if pixels == "float32":
                samples = (samples.astype(np.float32) - mean) * np.float32(0.017)
            assert found.data.tobytes() == samples.tobytes()
            assert (found.labels.dtype, found.labels.tolist()) == (labels.dtype, labels.tolist())
            assert found.ids.tolist() == batch.ids.tolist()
            assert {**found.hashes, "fill": 0} == {**batch.hashes, "fill": 0}


def test_the_native_call_makes_its_batches(sets: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = native.Native.make
    monkeypatch.setattr(native.Native, "make", lambda *args: calls.append(original(*args)) or calls[-1])
    fast = all_of(spec(sets["lmdb"], "scrambles"))
    assert len(calls) == 8
    assert all(call is not None for call in calls)
    monkeypatch.setattr(native.Native, "of", lambda *_: None)
    assert all_of(spec(sets["lmdb"], "scrambles")) == fast


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 30), tail=st.sampled_from(["wrap", "partial", "drop"]), seed=st.integers(0, 2**40),
    shuffle=st.sampled_from(["none", "full", "block"]), step=st.integers(0, 9),
)  # fmt: skip
def test_a_batch_is_the_same_wherever_a_feed_begins(
    sets: dict[str, str], batch: int, tail: Any, seed: int, shuffle: Any, step: int
) -> None:
    if tail == "drop" and batch > RECORDS:
        tail = "wrap"
    asked = spec(sets["lmdb"], "mixes", batch=batch, tail=tail, seed=seed, shuffle=shuffle, stop_step=10)
    whole = all_of(asked)
    assert all_of(asked.starting_at(step)) == whole[step:]
    assert len({one[1] for one in whole}) == len(whole)


def test_threads_and_two_feeds_at_once_change_nothing(sets: dict[str, str]) -> None:
    asked = spec(sets["mixed"], "mixes")
    inline = all_of(asked)
    assert all_of(replace(asked, threads=2)) == inline
    with Feed.from_spec(asked) as one, Feed.from_spec(replace(asked, seed=4)) as other:
        both = [(mine.data.tobytes(), theirs.data.tobytes()) for mine, theirs in zip(one, other, strict=True)]
    assert [mine for mine, _ in both] == [found[1] for found in inline]
    assert not {mine for mine, _ in both} & {theirs for _, theirs in both}


@pytest.mark.ray
@pytest.mark.long
def test_engines_and_workers_change_nothing(sets: dict[str, str]) -> None:
    for name in ("lmdb", "mixed"):
        asked = spec(sets[name], "mixes")
        inline = all_of(asked)
        with ray_runtime.running(num_cpus=2):
            for workers, first in ((1, 0), (2, 0), (2, 5)):
                ray = replace(asked, engine="ray", workers=workers).starting_at(first)
                assert all_of(ray) == inline[first:]
            assert all_of(replace(asked, engine="ray", workers=1, topology="split")) == inline


def test_a_test_feed_gets_the_same_batches_in_each_round(sets: dict[str, str]) -> None:
    asked = spec(sets["lmdb"], "mixes", phase="TEST", shuffle="none", cycle=2, stop_step=6)
    data = [one[1] for one in all_of(asked)]
    assert data[:2] == data[2:4] == data[4:]
    assert data[0] != data[1]


@pytest.mark.parametrize(("number", "words"), [
    (1, ["something else than a pair", "images and labels", "ndarray"]),
    (2, ["images that cannot be used", "[8, 3, 10, 10]", "[7, 3, 10, 10]"]),
    (3, ["images that cannot be used", "uint8 or float32", "float64"]),
    (4, ["NaN or infinity", "place 1 of the batch", "record 1"]),
    (5, ["labels that cannot be used", "integers [8]", "int32, [7]"]),
    (6, ["labels that cannot be used", "float32 [8, K]", "float64, [8]"]),
    (7, ["labels that cannot be used", "in the range of int32", "int64, [8]"]),
    (8, ["failed on", "ZeroDivisionError: division by zero"]),
    (9, ["labels of another kind", "integers", "float32, 2 a sample"]),
])  # fmt: skip
@pytest.mark.parametrize("policy", ["stop", "skip", "zero"])
def test_what_it_does_wrong_is_named_and_no_record_is_to_blame(
    tmp_path: Path, number: int, words: list[str], policy: Any
) -> None:
    path = write_lmdb(tmp_path / "set", [raw(picture(i, SHAPE), number if i == 1 else 0) for i in range(8)])
    asked = spec(path, "wrongs", shuffle="none", on_bad_record=policy, bad_record_cap=1.0)
    with pytest.raises(TransformError) as caught, Feed.from_spec(asked) as feed:
        next(feed)
    text = str(caught.value)
    for word in [*words, "tests.pipeline.functions:wrongs", "the batch of step 0"]:
        assert word in text
    if number not in (1, 9):
        assert f"records 0, 1, 2, 3, 4, 5, 6, 7 of {path}" in text
        assert "data.on_bad_record does not apply" in text


@pytest.mark.parametrize("policy", ["skip", "zero"])
@pytest.mark.parametrize("way", ["raw", "jpeg"])
def test_bad_records_are_settled_before_it_is_called(tmp_path: Path, policy: Any, way: str) -> None:
    make = raw if way == "raw" else encoded
    values = [make(picture(i, SHAPE), i) for i in range(16)]
    values[5] = datum.serialize(data=b"\xff\xd8\xff nothing", label=5, encoded=True)
    path = write_lmdb(tmp_path / "set", values)
    shared = {"on_bad_record": policy, "bad_record_cap": 1.0, "stop_step": 4}
    with (
        Feed.from_spec(spec(path, None, mean_value=(), scale=1.0, **shared)) as feed,
        Feed.from_spec(spec(path, "scrambles", mean_value=(), scale=1.0, **shared)) as other,
    ):
        met = 0
        for batch, found in zip(feed, other, strict=True):
            given_ = batch.data.astype(np.uint8)
            samples, labels = functions.scrambles(given_, batch.labels.copy(), oracle(3, 0, batch.epoch, batch.step))
            samples = samples.copy()
            samples[batch.ids == 5] = 0  # never with skip
            met += len(found._bad)
            assert found.data.tobytes() == samples.astype(np.float32).tobytes()
            assert found.labels.tolist() == labels.tolist()
            assert found._bad == batch._bad
        assert met == 2


def test_what_cannot_go_together_is_refused_by_name(sets: dict[str, str], tmp_path: Path) -> None:
    mean = write_mean(tmp_path / "mean.binaryproto", np.zeros(SHAPE, np.float32))
    with pytest.raises(UsageError, match="cannot go with a mean image"):
        Feed.from_spec(spec(sets["lmdb"], "scrambles", mean_value=(), mean_file=mean))
    whole = spec(sets["lmdb"], "scrambles", mean_value=(), mean_file=mean, crop=0, mirror=False)
    assert len(all_of(whole)) == 8
    with pytest.raises(TransformError, match="mixes returned holds floats") as caught:
        Feed.from_spec(spec(sets["lmdb"], "mixes", pixels="uint8"))
    assert "feed.pixels: float32" in str(caught.value)
    later = datum.serialize(channels=3, height=14, width=18, float_data=np.zeros(756, np.float32), label=1)
    path = write_lmdb(tmp_path / "later", [raw(picture(i, SHAPE), i) for i in range(9)] + [later])
    with pytest.raises(StallscopeError, match="record 9"):
        all_of(spec(path, "scrambles", shuffle="none"))


def test_a_function_on_each_image_may_not_return_nan() -> None:
    function = OwnFunction.load(f"{HERE}returns_nan", 0, 0)
    with pytest.raises(TransformError, match=r"returns_nan returned NaN or infinity for record 4 of x"):
        function.on_image(np.zeros(SHAPE, np.uint8), 1, 0, 4, "record 4 of x")


def test_the_mark_is_that_of_the_function() -> None:
    assert OwnFunction.load(f"{HERE}mixes", 0, 0).per_batch
    assert not OwnFunction.load(f"{HERE}same", 0, 0).per_batch

    def plain(images: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return images, labels

    assert per_batch(plain) is plain


@pytest.mark.parametrize(("function", "order"), [
    ("same", [Stage.READ, Stage.DECODE, Stage.FUNCTION, Stage.AUGMENT, Stage.COLLATE]),
    ("scrambles", [Stage.READ, Stage.DECODE, Stage.AUGMENT, Stage.FUNCTION, Stage.AUGMENT, Stage.COLLATE]),
])  # fmt: skip
def test_it_has_a_stage_of_its_own(sets: dict[str, str], tmp_path: Path, function: str, order: list[Stage]) -> None:
    asked = spec(sets["mixed"], function)
    with Recorder.open(tmp_path, "trainer", "trainer") as recorder, open_source(sets["mixed"]) as source:
        made = BatchMaker(asked, probe(asked, source), LocalReader(source), recorder)
        made.make(3, made.probe.layout.views(np.zeros(made.probe.layout.nbytes, np.uint8)))
    rows = store.load_run(tmp_path).events.to_pylist()
    spans = sorted((row for row in rows if row["kind"] == Kind.SPAN), key=lambda row: row["t0_ns"])
    assert [row["stage"] for row in spans] == order
    own = [row for row in spans if row["stage"] == Stage.FUNCTION]
    assert [(row["items"], row["flags"], row["step"]) for row in own] == [(8, Flag.OWN_CODE, 3)]
    assert own[0]["bytes"] > 0
