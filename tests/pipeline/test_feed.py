from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets.errors import SourceClosed
from pipeline import engines as engines_module
from pipeline import feed as feed_module
from pipeline.config import validate
from pipeline.crew import FeedError
from pipeline.feed import Feed
from pipeline.spec import FeedSpec, TransformSpec, feed_spec
from profiler.errors import StallscopeError, UsageError
from profiler.events import Flag, Kind, Stage
from profiler.recorder import Recorder

CROPS = "tests/data/db/crops96_raw_40x48_lmdb"
SPEC = FeedSpec(
    CROPS, 8, seed=5, shuffle="full", stop_step=20, depth=3, fingerprints="step", poison=True,
    transform=TransformSpec(crop=24, mirror=True),
)  # fmt: skip


def test_steps_come_in_order_until_the_stop() -> None:
    with Feed.from_spec(replace(SPEC, start_step=4)) as feed:
        assert feed.shape == (8, 3, 24, 24)
        assert feed.sample_shape == (3, 24, 24)
        assert feed.label_shape == (8,)
        assert feed.records == 96
        assert feed.steps_per_epoch == 12
        steps = [(batch.step, batch.epoch, len(batch), batch.data.shape) for batch in feed]
        assert steps == [(step, step * 8 // 96, 8, (8, 3, 24, 24)) for step in range(4, 20)]
        with pytest.raises(StopIteration):
            next(feed)
    assert feed.stats()["batches"] == 16


def test_short_batches_are_short_everywhere() -> None:
    with Feed.from_spec(replace(SPEC, batch=50, tail="partial", stop_step=4)) as feed:
        sizes = [
            (len(batch), *(len(getattr(batch, name)) for name in ("data", "labels", "ids", "epochs"))) for batch in feed
        ]
    assert sizes == [(50,) * 5, (46,) * 5] * 2


def test_a_batch_ends_when_the_next_is_asked_for() -> None:
    with Feed.from_spec(SPEC) as feed:
        first = next(feed)
        view, copy = first.data, first.data.copy()
        next(feed)
        with pytest.raises(FeedError, match="step 0 was given back"):
            _ = first.data
        first.release()  # idempotent
        assert np.isnan(view).all()  # poisoned: whoever kept the view sees it
        assert np.isfinite(copy).all()
        assert feed.stats()["slots"]["leased"] == 1


def test_held_batches_stay_and_may_be_given_back_in_any_order() -> None:
    with Feed.from_spec(SPEC) as feed:
        held = [next(feed).hold() for _ in range(3)]
        copies = [batch.data.copy() for batch in held]
        with pytest.raises(
            FeedError, match="step 3 needs the slot of step 0, which the consumer still holds"
        ) as caught:
            next(feed)
        assert "feed.depth" in str(caught.value)
        for batch, copy in zip(held, copies, strict=True):
            np.testing.assert_array_equal(batch.data, copy)
        for batch in reversed(held):
            batch.release()
        assert next(feed).step == 3


def test_depth_auto_takes_the_slots_that_held_batches_need() -> None:
    with Feed.from_spec(SPEC) as feed:
        whole = [batch.hashes for batch in feed]
    with Feed.from_spec(replace(SPEC, depth="auto")) as feed:
        assert feed.memory_bytes == 2 * feed.stats()["slot_bytes"]
        held = [next(feed).hold() for _ in range(12)]
        copies = [batch.data.copy() for batch in held]
        assert feed.stats()["depth"] == 12
        for batch in held[::2]:
            batch.release()
        rest = [batch.hashes for batch in feed]
        for batch, copy in zip(held[1::2], copies[1::2], strict=True):
            np.testing.assert_array_equal(batch.data, copy)
        assert [batch.hashes for batch in held] + rest == whole


def test_a_held_batch_is_not_read_after_the_feed_is_closed() -> None:
    with Feed.from_spec(SPEC) as feed:
        held = [next(feed).hold() for _ in range(2)]
        held[1].release()
    for batch in held:
        for name in ("data", "labels", "ids", "epochs"):
            with pytest.raises(FeedError, match=f"step {batch.step} was given back"):
                getattr(batch, name)
        batch.release()  # idempotent


def test_a_closed_feed_says_so_and_closing_twice_is_fine() -> None:
    feed = Feed.from_spec(SPEC)
    batch = next(feed)
    feed.close()
    feed.close()
    batch.release()
    with pytest.raises(FeedError, match="closed"):
        next(feed)


def test_state_is_one_number_and_what_gives_it_meaning() -> None:
    with Feed.from_spec(SPEC) as feed:
        whole = [batch.hashes for batch in feed]
    with Feed.from_spec(SPEC) as feed:
        for _ in range(7):
            next(feed)
        state = feed.state_dict()
    assert state["next_step"] == 7
    resumed = Feed.from_spec(SPEC)
    resumed.load_state_dict(state)
    with resumed:
        assert [batch.hashes for batch in resumed] == whole[7:]
        with pytest.raises(UsageError, match="before it has started"):
            resumed.load_state_dict(state)


@pytest.mark.parametrize("change", [{"seed": 6}, {"batch": 9}, {"shuffle": "block"}, {"tail": "drop"}])
def test_state_of_another_stream_is_refused(change: dict[str, object]) -> None:
    state = Feed.from_spec(SPEC).state_dict()
    other = Feed.from_spec(replace(SPEC, **change))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"{next(iter(change))} differs"):
        other.load_state_dict(state)


def test_an_error_leaves_the_feed_closable_and_comes_again() -> None:
    spec = replace(
        SPEC, source="tests/data/db/mnist_test_lmdb",
        transform=TransformSpec(python="tests.pipeline.functions:breaks_on_label_7"),
    )  # fmt: skip
    with Feed.from_spec(spec) as feed, pytest.raises(StallscopeError, match="seven is right out"):
        list(feed)


def test_waits_and_releases_are_recorded_and_making_lies_inside_the_wait(tmp_path: Path) -> None:
    from profiler import store

    with Recorder.open(tmp_path, "trainer", "trainer") as recorder:
        feed = Feed.from_spec(SPEC, recorder)
        with feed:
            for _ in feed:
                pass
    rows = store.load_run(tmp_path).events.to_pylist()
    spans = {}
    for stage in (Stage.FEED_WAIT, Stage.BATCH, Stage.READ, Stage.COLLATE):
        found = {row["step"]: row for row in rows if row["stage"] == stage and row["kind"] == Kind.SPAN}
        assert sorted(found) == list(range(20))
        spans[stage] = found
    for step in range(20):
        wait, batch = spans[Stage.FEED_WAIT][step], spans[Stage.BATCH][step]
        assert wait["t0_ns"] <= batch["t0_ns"] <= batch["t1_ns"] <= wait["t1_ns"]
        assert batch["flags"] & Flag.INLINE
        assert bool(wait["flags"] & Flag.FIRST) == (step == 0)
        assert wait["epoch"] == step * 8 // 96
    for stage in (Stage.READY, Stage.RELEASE):
        assert sorted(row["step"] for row in rows if row["stage"] == stage) == list(range(20))


def test_spec_from_a_configuration() -> None:
    config = validate(
        {
            "net": "x.prototxt",
            "data": {
                "train": {"source": CROPS, "batch": 8},
                "test": {"source": CROPS, "batch": 4},
                "order": {"seed": 9, "shuffle": "block"},
                "transform": {"crop": 24, "mirror": True, "mean_value": [1.0], "force_color": True},
            },
            "feed": {"engine": "inline", "depth": 6, "workers": 2},
        }
    )
    train, test = feed_spec(config), feed_spec(config, "TEST", cycle=5)
    assert (train.batch, train.seed, train.shuffle, train.depth, train.workers) == (8, 9, "block", 6, 2)
    assert train.transform == TransformSpec(crop=24, mirror=True, mean_value=(1.0,), color="color")
    assert (test.batch, test.shuffle, test.depth, test.workers, test.cycle) == (4, "none", 4, 1, 5)
    assert not test.transform.mirror
    assert test.first_actor != train.first_actor
    assert train.recorder_folder is None
    with Feed(config, "TEST", cycle=5) as feed:
        first = [next(feed).hashes for _ in range(10)]
    assert first[:5] == first[5:]


def test_a_phase_without_data_set_names_the_key() -> None:
    config = validate({"data": {"train": {"batch": 8}}})
    with pytest.raises(UsageError, match=r"data\.train\.source is not set"):
        Feed(config)


def test_missing_data_set_and_too_large_crop_end_before_anything_starts() -> None:
    with pytest.raises(StallscopeError, match="no data set at"):
        Feed.from_spec(replace(SPEC, source="no/such/place"))
    with pytest.raises(StallscopeError, match="crop is larger"):
        Feed.from_spec(replace(SPEC, engine="ray", transform=TransformSpec(crop=41)))


def test_importing_the_feed_loads_neither_ray_nor_numba_nor_a_database() -> None:
    script = (
        "import sys, pipeline.feed, pipeline.actors, pipeline.placement, pipeline.ray_runtime, pipeline.worker\n"
        "print([name for name in ('ray', 'numba', 'lmdb', 'plyvel', 'cupy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("end", ["close", "forget"])
def test_an_inline_feed_opens_its_data_set_once_and_closes_it(
    monkeypatch: pytest.MonkeyPatch, started: bool, end: str
) -> None:
    opened: list[Any] = []
    real = feed_module.open_data

    def open_data(spec: FeedSpec) -> Any:
        opened.append(real(spec))
        return opened[-1]

    monkeypatch.setattr(feed_module, "open_data", open_data)
    monkeypatch.setattr(engines_module, "open_data", open_data)
    feed = Feed(CROPS, batch=4)
    if started:
        next(feed)
    assert len(opened) == 1
    if end == "close":
        feed.close()
    del feed
    gc.collect()
    with pytest.raises(SourceClosed):
        opened[0].read(0)


def test_an_inline_feed_that_begins_again_opens_its_data_set_anew() -> None:
    with Feed(CROPS, batch=4) as feed:
        state = {**feed.state_dict(), "next_step": 3}
        feed.load_state_dict(state)
        assert next(feed).step == 3
