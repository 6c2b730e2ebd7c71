"""The feed alone, as somebody uses it who knows no other part of the project."""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import Feed
from pipeline.crew import FeedError
from pipeline.spec import FeedSpec, TransformSpec
from pipeline.transforms import TransformError
from profiler.errors import StallscopeError, UsageError
from tests.pipeline import functions

CROPS = "tests/data/db/crops96_raw_40x48_lmdb"
RECORDS = 96
TAILS = ("wrap", "partial", "drop")


def mapped() -> int:
    """Rings in this process's memory."""
    return sum("stallscope-ring" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.fixture
def clean() -> Iterator[None]:
    """What a test leaves behind: no ring, no descriptor, no thread."""

    def all_of_it() -> tuple[int, int, int]:
        gc.collect()
        return mapped(), len(os.listdir("/proc/self/fd")), threading.active_count()

    with Feed(CROPS, batch=8) as feed:  # what is loaded once for good
        next(feed)
    before = all_of_it()
    yield
    assert all_of_it() == before


def fills(feed: Feed) -> list[int]:
    with feed:
        return [batch.hashes["fill"] for batch in feed]


# -- what is typed first -----------------------------------------------------------------------------------------------


def test_a_path_and_keywords_are_a_spec() -> None:
    typed = Feed(Path(CROPS), batch=8, shuffle=True, seed=5, crop=24, mirror=True, mean_value=104, drop_last=True)
    assert typed.spec == replace(
        FeedSpec(CROPS, 8, shuffle="full", seed=5, tail="drop"),
        transform=TransformSpec(crop=24, mirror=True, mean_value=(104.0,)), identity=typed.identity(),
    )  # fmt: skip
    assert repr(typed) == f"<Feed of {CROPS}: 96 records, batch 8, inline, next step 0>"
    images, labels = next(typed)
    assert (images.shape, images.dtype, labels.shape, labels.dtype) == ((8, 3, 24, 24), "float32", (8,), "int32")
    typed.close()
    assert "next step 1, closed" in repr(typed)


def test_what_a_batch_is_shows() -> None:
    with Feed(CROPS, batch=8, pixels="uint8") as feed:
        batch = next(feed)
        assert repr(batch) == "<Batch of step 0, epoch 0: uint8[8, 3, 40, 48], int32[8]>"
        assert len(batch) == 8
    assert repr(batch) == "<Batch of step 0, given back>"


def test_several_paths_are_read_one_after_another() -> None:
    with Feed([CROPS, CROPS], batch=96) as feed:
        first, second = (next(feed).ids.copy() for _ in range(2))
    assert first.tolist() == list(range(96))
    assert second.tolist() == list(range(96, 192))


def test_a_function_itself_may_be_given_and_workers_mean_ray() -> None:
    feed = Feed(CROPS, batch=8, python=functions.slow, workers=2)
    assert feed.spec.transform.python == "tests.pipeline.functions:slow"
    assert (feed.spec.engine, feed.spec.workers) == ("ray", 2)
    assert Feed(CROPS, batch=8).spec.engine == "inline"


def test_arguments_beside_a_spec_are_not_ignored() -> None:
    feed = Feed(FeedSpec(CROPS, 8), "TEST", 3, 7, cycle=12)
    assert (feed.spec.phase, feed.spec.start_step, feed.spec.stop_step, feed.spec.cycle) == ("TEST", 3, 7, 12)
    assert len(feed) == 4


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((CROPS,), {}, ["batch is not set", "batch=64"]),
        ((CROPS,), {"batch_size": 8}, ["no option batch_size", "did you mean batch?"]),
        ((CROPS,), {"batch": 8, "num_workers": 2}, ["no option num_workers", "did you mean workers?"]),
        ((CROPS,), {"batch": 8, "shufle": True}, ["did you mean shuffle?"]),
        ((CROPS,), {"batch": 8, "transform": print}, ["no option transform", "did you mean python?"]),
        ((CROPS,), {"batch": "8"}, ["batch of a feed", "found:    '8'"]),
        ((CROPS,), {"batch": 8.0}, ["batch of a feed", "an integer, 1 or more"]),
        ((CROPS,), {"batch": True}, ["batch of a feed"]),
        ((CROPS,), {"batch": 8, "workers": 0}, ["feed.workers", "1 to 256"]),
        ((CROPS,), {"batch": 8, "workers": "two"}, ["feed.workers", "'two'"]),
        ((CROPS,), {"batch": 8, "engine": "threads"}, ["unknown engine", "ray, inline", "threads"]),
        ((CROPS,), {"batch": 8, "shuffle": "yes"}, ["unknown shuffle", "none, block, full"]),
        ((CROPS,), {"batch": 8, "seed": -1}, ["seed of a feed"]),
        ((CROPS,), {"batch": 8, "crop": -1}, ["crop", "-1"]),
        ((CROPS,), {"batch": 8, "crop": 24.0}, ["crop", "24.0"]),
        ((CROPS,), {"batch": 8, "color": "rgb"}, ["color", "rgb"]),
        ((CROPS,), {"batch": 8, "drop_last": True, "tail": "wrap"}, ["drop_last and tail exclude"]),
        ((CROPS,), {"batch": 97, "drop_last": True}, ["leaves no batch"]),
        ((CROPS,), {"batch": 8, "epochs": 2, "stop_step": 5}, ["epochs", "stop_step"]),
        ((CROPS,), {"batch": 8, "epochs": -1}, ["epochs", "-1"]),
        ((CROPS,), {"batch": 8, "epochs": 1.5}, ["epochs", "1.5"]),
        ((CROPS,), {"batch": 8, "python": lambda image, label, rng: (image, label)}, ["<lambda>", "module"]),
        (("job.yaml",), {}, ["job.yaml is a configuration", "pipeline.load('job.yaml')"]),
        ((FeedSpec(CROPS, 8),), {"shuffle": True}, ["shuffle is no argument", "FeedSpec"]),
        (({"source": CROPS},), {}, ["cannot be made from this", "dict", "pipeline.load"]),
        ((3,), {}, ["cannot be made from this", "int: 3"]),
        (("no/such/place",), {"batch": 8}, ["no data set at"]),
    ],
)  # fmt: skip
def test_what_is_typed_wrong_is_told(arguments: Any, options: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(StallscopeError) as caught:
        Feed(*arguments, **options)
    for text in says:
        assert text in str(caught.value)


def test_an_open_database_in_place_of_its_path_is_one_line(tmp_path: Path) -> None:
    """Case E6: handles stay in their process; paths and specs travel."""
    with lmdb.open(str(tmp_path / "db")) as environment:
        with pytest.raises(UsageError, match="cannot be made from this") as caught:
            Feed(environment, batch=8)
        assert "Environment" in str(caught.value)


# -- epochs ------------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    batch=st.integers(1, 130),
    tail=st.sampled_from(["wrap", "partial", "drop"]),
    shuffle=st.sampled_from(["none", "full"]),
)
def test_every_record_is_delivered_once_an_epoch(batch: int, tail: Any, shuffle: Any) -> None:
    if tail == "drop":
        batch = min(batch, RECORDS)
    epochs, seen, sizes = 2, [], []
    with Feed(CROPS, batch=batch, tail=tail, shuffle=shuffle, epochs=epochs, depth=2) as feed:
        for one in feed:
            seen += zip(one.epochs.tolist(), one.ids.tolist(), strict=True)
            sizes.append(len(one))
        assert len(feed) == len(sizes)
    counts = [sorted(record for at, record in seen if at == epoch) for epoch in range(epochs)]
    if tail == "drop":
        assert set(sizes) == {batch}
        assert [len(set(one)) for one in counts] == [len(one) for one in counts] == [RECORDS // batch * batch] * epochs
        return
    assert counts == [list(range(RECORDS))] * epochs
    if tail == "wrap":
        assert set(sizes) == {batch}
        assert len(seen) - epochs * RECORDS < batch, "it ends with the batch that ends the last epoch"
    else:
        assert sum(sizes) == epochs * RECORDS


@pytest.mark.parametrize("tail", TAILS)
def test_epoch_by_epoch_is_the_same_stream(tail: Any) -> None:
    options: dict[str, Any] = {"batch": 22, "tail": tail, "shuffle": True, "fingerprints": "step", "epochs": 3}
    whole = fills(Feed(CROPS, **options))
    parts = []
    with Feed(CROPS, **options) as feed:
        for number in range(3):
            parts.append([batch.hashes["fill"] for batch in feed.epoch()])
            assert feed.epoch_of(feed.next_step) == number + 1
        assert list(feed.epoch()) == []
    assert [len(part) for part in parts] == {"wrap": [5, 4, 5], "partial": [5] * 3, "drop": [4] * 3}[tail]
    assert list(itertools.chain(*parts)) == whole


def test_an_endless_feed_goes_epoch_by_epoch_and_a_round_of_tests_is_one() -> None:
    with Feed(CROPS, batch=32) as feed:
        assert [[batch.step for batch in feed.epoch()] for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
        with pytest.raises(TypeError, match="steps_per_epoch"):
            len(feed)
        assert feed  # and no question of its length
    with Feed(CROPS, "TEST", batch=32, cycle=2) as feed:
        rounds = [[batch.ids[0] for batch in feed.epoch()] for _ in range(2)]
        assert rounds == [[0, 32], [0, 32]]


def test_the_loop_may_be_left_and_gone_on_with() -> None:
    with Feed(CROPS, batch=8, epochs=1) as feed:
        for batch in feed:
            if batch.step == 4:
                break
        assert batch.data.shape == (8, 3, 40, 48), "the batch in hand stays until the next is asked for"
        assert [batch.step for batch in feed] == list(range(5, 12))
        assert [batch.step for batch in feed] == []
    with Feed(CROPS, batch=8) as feed:
        assert [batch.step for batch in itertools.islice(feed.epoch(), 5)] == list(range(5))
        assert [batch.step for batch in feed.epoch()] == list(range(5, 12)), "the rest of the epoch"


# -- resume ------------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    step=st.integers(0, 40), batch=st.sampled_from([7, 8, 96, 100]), depths=st.tuples(*[st.integers(1, 5)] * 2),
    tail=st.sampled_from(["wrap", "partial"]), shuffle=st.sampled_from(["none", "block", "full"]), inside=st.booleans(),
)  # fmt: skip
def test_resumed_at_any_step_the_bytes_are_the_same(
    step: int, batch: int, depths: tuple[int, int], tail: Any, shuffle: Any, inside: bool
) -> None:
    spec = FeedSpec(
        CROPS, batch, seed=3, shuffle=shuffle, tail=tail, stop_step=step + 4, fingerprints="step", depth=depths[0],
        transform=TransformSpec(crop=16, mirror=True),
    )  # fmt: skip
    with Feed(spec) as feed:
        whole = [batch.hashes for batch in feed]
    with Feed(spec) as feed:
        for _ in range(step):
            next(feed)
        state = json.loads(json.dumps(feed.state_dict()))
    resumed = Feed(replace(spec, depth=depths[1]))
    if not inside:
        resumed.load_state_dict(state)
    with resumed:
        if inside:  # `with` has started the feed already
            resumed.load_state_dict(state)
        assert len(resumed) == 4
        assert [batch.hashes for batch in resumed] == whole[step:]


@pytest.mark.parametrize(
    "state", [None, {}, {"step": 3}, {"next_step": "3"}, {"next_step": -1}, {"next_step": 2.0}, [3]], ids=repr
)
def test_what_is_no_position_is_refused(state: Any) -> None:
    with pytest.raises(UsageError, match="no position of a feed"):
        Feed(CROPS, batch=8).load_state_dict(state)


# -- leaving, failing, forgetting --------------------------------------------------------------------------------------


def test_an_error_in_the_loops_body_leaves_nothing(clean: None) -> None:
    def body() -> None:
        with Feed(CROPS, batch=8) as feed:
            for batch in feed:
                batch.hold()
                if batch.step == 3:
                    raise ZeroDivisionError("the user's own")

    with pytest.raises(ZeroDivisionError) as caught:
        body()
    assert mapped() == 0, "though the traceback, which knows the feed and the batch, lives"
    del caught


def test_a_feed_that_nobody_has_any_more_ends_by_itself(clean: None) -> None:
    for _ in range(3):
        for batch in Feed(CROPS, batch=8):
            if batch.step == 2:
                break
    assert batch.data.shape == (8, 3, 40, 48), "a batch keeps its feed"
    del batch


@pytest.mark.parametrize("threads", [0, 2])
def test_a_feed_that_fails_frees_its_memory_while_its_error_lives(clean: None, threads: int) -> None:
    options: dict[str, Any] = {"batch": 8, "python": functions.breaks_on_label_7, "threads": threads}
    with Feed(CROPS, **options) as feed, pytest.raises(TransformError) as caught:
        list(feed)
    assert mapped() == 0
    cause: Any = caught.value.__cause__
    inner = cause.__traceback__
    while inner.tb_next is not None:
        inner = inner.tb_next
    assert inner.tb_frame.f_locals["label"] == 7, "the user's own function is left as it was for a debugger"
    del inner, cause, caught


def test_an_error_comes_again_when_the_step_is_asked_for_again() -> None:
    with Feed(CROPS, batch=8, python=functions.breaks_on_label_7) as feed:
        texts = []
        for _ in range(2):
            with pytest.raises(TransformError, match="seven is right out") as caught:
                list(feed)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]


def test_an_interrupt_costs_no_batch(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from the stop button of a notebook, whose user then runs the cell again."""
    options: dict[str, Any] = {"batch": 8, "epochs": 2, "python": functions.slow, "fingerprints": "step"}
    whole = fills(Feed(CROPS, **options))
    got, left = [], itertools.count()

    def interrupted(seconds: float) -> None:
        if next(left) in (3, 40, 41, 100):
            raise KeyboardInterrupt

    with Feed(CROPS, **options) as feed:
        monkeypatch.setattr(functions.time, "sleep", interrupted)
        stops = 0
        while feed.next_step < len(feed):
            try:
                got.append(next(feed).hashes["fill"])
            except KeyboardInterrupt:
                stops += 1
    assert stops == 4
    assert got == whole


USES: dict[str, Callable[[Feed], object]] = {
    "next": next,
    "epoch": lambda feed: list(feed.epoch()),
    "with": lambda feed: feed.__enter__(),
    "warm_up": lambda feed: feed.warm_up(),
    "memory": lambda feed: feed.memory,
}


@pytest.mark.parametrize("use", USES)
def test_a_closed_feed_says_so(use: str) -> None:
    feed = Feed(CROPS, batch=8)
    next(feed)
    feed.close()
    with pytest.raises(FeedError, match="this feed is closed"):
        USES[use](feed)
    assert feed.peek() is None
    assert feed.stats()["batches"] == 1
    assert feed.state_dict()["next_step"] == 1
    with pytest.raises(UsageError, match="closed"):
        feed.load_state_dict(feed.state_dict())


def in_a_fork(body: Callable[[], object]) -> str:
    """What ``body`` raised in a forked copy of this process."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            body()
            os.write(write, b"nothing")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as file:
        return file.read()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_copy_is_refused_and_cannot_harm_its_parent(clean: None) -> None:
    options: dict[str, Any] = {"batch": 8, "epochs": 1, "fingerprints": "step"}
    whole = fills(Feed(CROPS, **options))
    with Feed(CROPS, **options) as feed:
        batch = next(feed)
        got = [batch.hashes["fill"]]
        own = f"FeedError: this feed was started by process {os.getpid()} and cannot be used in process"
        assert in_a_fork(lambda: next(feed)).startswith(own)
        assert in_a_fork(batch.release).startswith(own)
        assert in_a_fork(feed.peek).startswith(own)
        assert in_a_fork(lambda: batch.data.sum()) == "nothing", "reading what is there is fine"
        assert in_a_fork(feed.close) == "nothing"
        assert in_a_fork(lambda: feed.__exit__(None, None, None)) == "nothing"
        got += [batch.hashes["fill"] for batch in feed]
    assert got == whole


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_feed_that_has_not_started_may_start_in_a_fork() -> None:
    feed = Feed(CROPS, batch=8)
    assert in_a_fork(lambda: next(feed).data.sum()) == "nothing"
    assert next(feed).step == 0
    feed.close()


def test_neither_feed_nor_batch_can_be_sent() -> None:
    with Feed(CROPS, batch=8) as feed:
        with pytest.raises(FeedError, match="a feed cannot be sent") as caught:
            pickle.dumps(feed)
        assert "feed.spec" in str(caught.value)
        assert pickle.loads(pickle.dumps(feed.spec)) == feed.spec
        with pytest.raises(FeedError, match=r"step 0 .* cannot be sent") as caught:
            pickle.dumps(next(feed))
        assert "batch.data.copy()" in str(caught.value)


# -- several of them ---------------------------------------------------------------------------------------------------


def test_train_and_test_on_one_data_set_know_nothing_of_one_another(clean: None) -> None:
    train: dict[str, Any] = {"batch": 16, "shuffle": True, "seed": 1, "crop": 24, "fingerprints": "step", "epochs": 3}
    test: dict[str, Any] = {"batch": 24, "crop": 24, "fingerprints": "step", "cycle": 4, "stop_step": 12}
    alone = fills(Feed(CROPS, **train)), fills(Feed(CROPS, "TEST", **test))
    got: tuple[list[int], list[int]] = ([], [])
    with Feed(CROPS, **train) as one, Feed(CROPS, "TEST", **test) as other:
        for _ in range(3):
            got[0].extend(batch.hashes["fill"] for batch in one.epoch())
            got[1].extend(batch.hashes["fill"] for batch in other.epoch())
    assert got == alone
    with Feed(CROPS, **train) as one:
        other = Feed(CROPS, "TEST", **test)
        next(one), next(other)
        other.close()  # the environment of the data set is shared, and still in use
        assert np.isfinite(next(one).data).all()


def test_stats_count_what_was_delivered() -> None:
    with Feed(CROPS, batch=40, tail="partial", epochs=2, depth=3) as feed:
        assert feed.stats()["batches"] == 0
        for _ in feed:
            pass
        stats = feed.stats()
        assert (stats["batches"], stats["items"], stats["depth"]) == (6, 192, 3)
        assert stats["wait_ns"] > 0
        assert sum(stats["slots"].values()) == 3
    assert feed.stats() == {**stats, "slots": {}}
    json.dumps(feed.stats())
