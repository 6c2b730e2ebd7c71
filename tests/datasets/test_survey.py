from itertools import pairwise

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasets import datum, open_source
from datasets.survey import stretches, survey


@given(st.integers(0, 10_000), st.integers(1, 12_000))
def test_stretches_hold_as_many_records_as_asked_for(records, limit):
    chosen = stretches(records, limit)
    assert sum(map(len, chosen)) == min(records, limit)
    assert all(before.stop < here.start for before, here in pairwise(chosen))
    assert all(0 <= one.start < one.stop <= records for one in chosen)
    assert len(chosen) <= 64
    if len(chosen) > 1:
        assert (chosen[0].start, chosen[-1].stop) == (0, records)
        assert min(map(len, chosen)) >= min(64, limit // 2)


def test_without_a_limit_all_is_one_stretch():
    assert stretches(1000, None) == stretches(1000, 1000) == [range(1000)]
    assert stretches(0, 5) == []


@pytest.fixture
def blocks(tmp_path):
    """2000 records in blocks of 100 equal labels."""
    with lmdb.open(str(tmp_path / "db"), map_size=16 << 20) as env, env.begin(write=True) as txn:
        for i in range(2000):
            value = datum.serialize(channels=1, height=1, width=i % 7 + 1, data=bytes(i % 7 + 1), label=i // 100)
            txn.put(b"%08d" % i, value)
    with open_source(tmp_path / "db") as source:
        yield source


def test_a_part_says_what_the_whole_says(blocks):
    whole, part = survey(blocks), survey(blocks, limit=640)
    assert (part.records, part.looked_at, part.stretches, part.complete) == (2000, 640, 10, False)
    assert (whole.looked_at, whole.stretches, whole.complete) == (2000, 1, True)
    for found in (whole, part):
        assert found.keys.padded
        assert found.keys.dense
        assert found.labels.grouped
        assert len(found.shapes) == 7
    assert part.labels.longest == 64
    assert whole.labels.longest == 100
    assert sum(part.shapes.values()) == 640


def test_a_gap_in_the_keys_shows_in_a_part_too(tmp_path):
    with lmdb.open(str(tmp_path / "db"), map_size=16 << 20) as env, env.begin(write=True) as txn:
        for i in range(500):
            txn.put(b"%08d" % (i + (i > 250)), datum.serialize(channels=1, height=1, width=1, data=b"x", label=0))
    with open_source(tmp_path / "db") as source:
        assert not survey(source).keys.dense
        assert not survey(source, limit=100).keys.dense


def test_progress_is_told_in_records(blocks):
    told = []
    survey(blocks, 300, told.append)
    assert told == sorted(told)
    assert told[-1] == 300
    assert len(told) >= 4


def test_places_of_what_is_odd(blocks):
    found = survey(blocks)
    assert found.labels.first == {label: 100 * label for label in range(20)}
    assert found.first["shape", "1x1x3"] == 2
    assert found.places == {"smallest": 0, "largest": 6}
    assert found.no_label is None
    assert len(found.sizes) == 2000
