"""``data.on_bad_record``: which bytes come in the place of those of a bad record, by policy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from datasets import datum
from datasets.order import Order
from pipeline.bad_records import ATTEMPTS, TooManyBadRecords
from pipeline.feed import Feed
from pipeline.spec import FeedSpec, TransformSpec
from profiler.errors import StallscopeError
from tests.pipeline.bad_sets import BATCH, PINNED, RECORDS, SHAPE, STEPS, sound, spec, values, zeroable
from tests.pipeline.build import picture, raw, write_lmdb

# -- stop --------------------------------------------------------------------------------------------------------------


def test_stop_names_data_set_key_record_expected_found_and_what_to_try(sets: dict[str, str]) -> None:
    with Feed.from_spec(spec(sets["lmdb"], "stop")) as feed, pytest.raises(StallscopeError) as caught:
        list(feed)
    text = str(caught.value)
    assert sets["lmdb"] in text
    assert "_img'" in text
    assert "record " in text
    assert caught.value.hint


@pytest.mark.parametrize("bad", sorted(values()))
def test_stop_ends_at_every_kind_of_bad_record(tmp_path: Path, bad: int) -> None:
    path = write_lmdb(tmp_path / "db", [sound(0), sound(1), values()[bad], sound(3)])
    asked = FeedSpec(path, 2, stop_step=2)
    with Feed.from_spec(asked) as feed:
        assert len(next(feed)) == 2
        with pytest.raises(StallscopeError, match="record 2 ") as caught:
            next(feed)
    assert "00000002_img" in str(caught.value)
    assert caught.value.hint


# -- skip --------------------------------------------------------------------------------------------------------------


def test_a_stand_in_is_the_record_of_another_permutation_at_the_same_place(sets: dict[str, str]) -> None:
    order, bad = Order(RECORDS, seed=3), set(values())
    with Feed.from_spec(spec(sets["lmdb"], "skip")) as feed:
        for batch in feed:
            assert len(batch) == BATCH
            for i, record in enumerate(batch.ids.tolist()):
                epoch, place = divmod(batch.step * BATCH + i, RECORDS)
                wanted = int(order.records([epoch], [place])[0])
                attempts = iter(range(ATTEMPTS))
                while wanted in bad:
                    wanted = int(order.replacements(np.array([epoch]), np.array([place]), next(attempts))[0])
                assert record == wanted
                assert batch.labels[i] == record % 10
                assert int(batch.epochs[i]) == epoch


def test_stand_ins_are_made_like_any_other_sample(sets: dict[str, str]) -> None:
    """With the draws of their own number: the same record in the same epoch gives the same bytes wherever it stands."""
    seen: dict[tuple[int, int], bytes] = {}
    again = 0
    with Feed.from_spec(spec(sets["lmdb"], "skip", stop_step=60)) as feed:
        for batch in feed:
            for i in range(len(batch)):
                at = (int(batch.epochs[i]), int(batch.ids[i]))
                again += at in seen
                assert seen.setdefault(at, batch.data[i].tobytes()) == batch.data[i].tobytes()
    assert again > 5


def test_records_of_other_places_are_not_moved(sets: dict[str, str]) -> None:
    with Feed.from_spec(spec(sets["lmdb"], "skip")) as feed:
        ids = np.concatenate([batch.ids.copy() for batch in feed])
    plain = Order(RECORDS, seed=3).records(*np.divmod(np.arange(STEPS * BATCH), RECORDS))
    moved = ids != plain
    assert set(plain[moved]) == set(values())
    assert not set(ids) & set(values())


def test_the_permutations_of_stand_ins_are_pinned() -> None:
    order, places = Order(10, seed=1), np.arange(10)
    zeros = np.zeros(10, np.int64)
    table = [order.replacements(zeros + epoch, places, attempt).tolist() for epoch in (0, 1) for attempt in (0, 1)]
    assert table == json.loads(PINNED.read_text())["order"]
    assert all(sorted(row) == list(range(10)) for row in table)
    whole = Order(10, seed=1, shuffle="none")
    assert whole.replacements(zeros, places, 0).tolist() == table[0]


def test_no_stand_in_at_all_is_an_error_and_not_a_loop(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [sound(0), *(values()[17] for _ in range(30))])
    asked = FeedSpec(path, 16, stop_step=1, on_bad_record="skip", bad_record_cap=1.0)
    with Feed.from_spec(asked) as feed, pytest.raises(TooManyBadRecords) as caught:
        next(feed)
    assert "record " in str(caught.value)


# -- zero --------------------------------------------------------------------------------------------------------------


def test_zero_keeps_record_and_label_and_blanks_the_sample(tmp_path: Path) -> None:
    path = zeroable(tmp_path / "db")
    blank, bad = 0, set(values()) - {60}
    with Feed.from_spec(spec(path, "zero")) as feed:
        order = Order(RECORDS, seed=3)
        for batch in feed:
            items = np.arange(batch.step * BATCH, batch.step * BATCH + BATCH)
            assert batch.ids.tolist() == order.records(*np.divmod(items, RECORDS)).tolist()
            for i, record in enumerate(batch.ids.tolist()):
                if record in bad:
                    blank += 1
                    assert not batch.data[i].any()
                    assert batch.labels[i] == datum.parse(values()[record]).label
                else:
                    assert batch.data[i].any()
        stats = feed.stats()["bad_records"]
    assert sum(stats["items_by_epoch"].values()) == blank
    assert stats["records"] == 6


def test_zero_without_a_label_stops_and_says_why(sets: dict[str, str]) -> None:
    with Feed.from_spec(spec(sets["lmdb"], "zero")) as feed, pytest.raises(StallscopeError) as caught:
        list(feed)
    assert "record 60 (key '00000060_img')" in str(caught.value)
    assert "on_bad_record: zero" in str(caught.value)


def test_a_users_function_is_not_called_for_a_blank_sample(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [sound(1), values()[17], sound(2)])
    asked = FeedSpec(
        path, 3, stop_step=1, on_bad_record="zero", transform=TransformSpec(python="tests.pipeline.functions:halves")
    )
    with Feed.from_spec(asked) as feed:
        batch = next(feed)
        assert batch.data.shape == (3, 3, 10, 12)
        assert [bool(sample.any()) for sample in batch.data] == [True, False, True]
        assert batch.labels.tolist() == [1, 2, 2]


def test_a_failing_function_is_code_and_always_stops(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [raw(picture(i, SHAPE), i) for i in range(10)])
    asked = FeedSpec(
        path, 10, stop_step=1, on_bad_record="skip", bad_record_cap=1.0,
        transform=TransformSpec(python="tests.pipeline.functions:breaks_on_label_7"),
    )  # fmt: skip
    with Feed.from_spec(asked) as feed, pytest.raises(StallscopeError, match="seven is right out"):
        next(feed)


# -- the cap and the lists ---------------------------------------------------------------------------------------------
