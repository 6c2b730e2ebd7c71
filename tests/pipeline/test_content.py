"""A saved position knows its data set, wherever that lies now, by a few of its records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from datasets import datum
from datasets.lmdb_source import LmdbSource
from pipeline import Feed
from profiler.errors import UsageError
from tests.pipeline.build import picture, raw, write_leveldb, write_lmdb

SETTINGS: dict[str, Any] = {"batch": 8, "shuffle": True, "seed": 2}


def values(first: int = 0) -> list[bytes]:
    return [raw(picture(first + i, (3, 9, 9)), i % 5) for i in range(50)]


def saved(path: str, **more: Any) -> dict[str, Any]:
    with Feed(path, **SETTINGS, **more) as feed:
        next(feed)
        return json.loads(json.dumps(feed.state_dict()))


def test_another_data_set_of_the_same_length_and_keys_is_told(tmp_path: Path) -> None:
    state = saved(write_lmdb(tmp_path / "one", values()))
    other = write_lmdb(tmp_path / "other", values(1000))
    with pytest.raises(UsageError) as caught:
        Feed(other, **SETTINGS).load_state_dict(state)
    for word in ("another data set of 50 records", other, "where that lies now"):
        assert word in str(caught.value)


def test_a_copy_a_moved_one_and_another_database_are_the_same(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "one", values())
    state = saved(path)
    shutil.copytree(path, tmp_path / "copy")
    shutil.move(path, tmp_path / "moved")
    for place in (tmp_path / "copy", tmp_path / "moved", Path(write_leveldb(tmp_path / "leveldb", values()))):
        with Feed(str(place), **SETTINGS) as feed:
            feed.load_state_dict(state)
            assert next(feed).step == 1


def test_other_labels_of_the_same_images_are_told(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "images", [raw(picture(i, (3, 9, 9)), None) for i in range(50)])

    def labels(add: int) -> str:
        stored = [datum.serialize(channels=1, height=1, width=1, label=i + add) for i in range(50)]
        return write_lmdb(tmp_path / f"labels{add}", stored)

    first, second = labels(0), labels(1)
    state = saved(path, labels=first)
    Feed(path, **SETTINGS, labels=first).load_state_dict(state)
    with pytest.raises(UsageError, match="another data set"):
        Feed(path, **SETTINGS, labels=second).load_state_dict(state)


def test_a_few_records_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lmdb(tmp_path / "one", values() * 10)
    feed = Feed(path, **SETTINGS)
    reads: list[int] = []
    original = LmdbSource.read
    monkeypatch.setattr(LmdbSource, "read", lambda self, index: reads.append(index) or original(self, index))
    states = [feed.state_dict() for _ in range(3)]
    assert states[0] == states[2]
    assert len(reads) == 16
    assert (min(reads), max(reads)) == (0, 499)


def test_positions_of_older_feeds_and_of_sets_that_are_gone_are_not_compared(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "one", values())
    state = saved(path)
    del state["content"]
    Feed(path, **SETTINGS).load_state_dict(state)
    feed = Feed(path, **SETTINGS)
    shutil.rmtree(path)
    state = feed.state_dict()
    assert state["content"] is None
    Feed(write_lmdb(tmp_path / "again", values()), **SETTINGS).load_state_dict(state)
