"""A data set that is cut, written to or moved while a feed reads it."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from datasets.errors import DatasetChanged, DatasetTruncated
from pipeline.engines import CrewEngine
from pipeline.feed import Feed
from pipeline.spec import FeedSpec
from pipeline.worker import open_data
from tests.pipeline.spawned import SpawnLauncher

DB = Path(__file__).resolve().parents[1] / "data" / "db"


def rewrite(folder):
    import lmdb

    with lmdb.open(str(folder), map_size=64 << 20, lock=False) as env, env.begin(write=True) as txn:
        key, value = next(iter(txn.cursor()))
        txn.put(bytes(key), bytes(value))


def test_a_worker_that_starts_after_a_commit_refuses_the_data_set(tmp_path):
    shutil.copytree(DB / "crops96_raw_40x48_lmdb", tmp_path / "db")
    with Feed(FeedSpec(source=str(tmp_path / "db"), batch=8)) as feed:
        next(feed).release()
        spec = feed.spec
    with open_data(spec) as source:
        assert len(source) == 96
    rewrite(tmp_path / "db")
    with pytest.raises(DatasetChanged, match="written to while this job was using it"):
        open_data(spec)


def test_the_same_data_set_under_another_path_is_accepted(tmp_path, monkeypatch):
    shutil.copytree(DB / "crops96_raw_40x48_lmdb", tmp_path / "db")
    with Feed(FeedSpec(source=str(tmp_path / "db"), batch=8)) as feed:
        spec = feed.spec
    os.rename(tmp_path / "db", tmp_path / "moved")
    (tmp_path / "db").symlink_to("moved")
    with open_data(spec) as source:
        assert len(source) == 96


def cut(folder):
    size = (folder / "data.mdb").stat().st_size
    os.truncate(folder / "data.mdb", size // 2 // 4096 * 4096)


@pytest.mark.parametrize(("harm", "error"), [(cut, DatasetTruncated), (rewrite, DatasetChanged)])
@pytest.mark.parametrize("killed", [False, True], ids=["noticed by the worker", "noticed by the one after it"])
def test_harm_done_during_a_feed_ends_it_with_the_reason(tmp_path, harm, error, killed):
    """Also where a worker died of it (SIGBUS): the one that takes its place finds out why."""
    shutil.copytree(DB / "mnist_test_lmdb", tmp_path / "db")
    spec = FeedSpec(source=str(tmp_path / "db"), batch=16, depth=2, stop_step=200, shuffle="full")
    with Feed(spec) as feed:
        spec, probed = replace(feed.spec, engine="ray"), feed.probe
    made = CrewEngine(spec, probed, feed.recorder, lambda address: SpawnLauncher(spec, probed, address), 1)

    def take(steps):
        for step in steps:
            made.get(step)
            made.ring.release(step)

    try:
        take(range(3))
        if killed:
            os.kill(made.pids[0], signal.SIGSTOP)  # so that it cannot notice first
        harm(tmp_path / "db")
        if killed:
            os.kill(made.pids[0], signal.SIGBUS)
            os.kill(made.pids[0], signal.SIGCONT)
        with pytest.raises(error, match=str(tmp_path / "db")):
            take(range(3, 200))
        assert made.restarts == (1 if killed else 0)
    finally:
        made.close()
