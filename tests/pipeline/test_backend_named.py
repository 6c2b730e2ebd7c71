"""What a prototxt says of the backend, and what lies in the folder: Caffe's default is LEVELDB, and must not decide."""

import os
import shutil
from pathlib import Path

import pytest

from datasets.errors import WrongBackend
from pipeline.feed import Feed
from pipeline.run import run
from pipeline.settings import load

DB = Path(__file__).resolve().parents[1] / "data" / "db"
LAYER = """
layer {{ name: "data" type: "Data" top: "data" top: "label" data_param {{ source: "db" batch_size: 8 {backend} }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param {{ num_output: 10 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }}
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.001 lr_policy: "fixed" max_iter: 2'
FLAGS = {"feed.engine": "inline", "profile.detail": "off", "device.backend": "numpy", "run.folder": "run"}


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Makes a job whose data layer says ``backend`` of a folder that holds ``name``."""
    monkeypatch.chdir(tmp_path)

    def make(name, backend):
        shutil.copytree(DB / name, tmp_path / "db")
        (tmp_path / "net.prototxt").write_text(LAYER.format(backend=backend))
        (tmp_path / "solver.prototxt").write_text(SOLVER)
        (tmp_path / "job.yaml").write_text("solver: solver.prototxt\n")
        return load("job.yaml", FLAGS)

    return make


def listing(folder):
    return {place.name: place.read_bytes() for place in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "kind"), [("crops96_raw_40x48_lmdb", "LMDB"), ("crops96_raw_40x48_leveldb", "LevelDB")]
)
def test_without_a_backend_the_folder_decides_and_the_log_says_so(job, tmp_path, capsys, name, kind):
    config = job(name, "")
    before = listing(tmp_path / "db")
    assert config.source("TRAIN").backend is None
    assert run(config) == 0
    said = capsys.readouterr().out
    assert f"data.train: {kind} {tmp_path}/db, 96 records (no backend named: told by what lies there)" in said
    assert listing(tmp_path / "db") == before


@pytest.mark.parametrize(
    ("name", "backend", "holds"),
    [("crops96_raw_40x48_lmdb", "LEVELDB", "LMDB"), ("crops96_raw_40x48_leveldb", "LMDB", "LEVELDB")],
)
def test_the_wrong_backend_is_refused_and_nothing_is_written(job, tmp_path, name, backend, holds):
    config = job(name, f"backend: {backend}")
    before = listing(tmp_path / "db")
    with pytest.raises(WrongBackend, match=f"the folder holds {holds}, the configuration says {backend}"):
        run(config)
    assert listing(tmp_path / "db") == before
    assert not (tmp_path / "run").exists()


def test_the_right_backend_is_no_news(job, tmp_path, capsys):
    assert run(job("crops96_raw_40x48_lmdb", "backend: LMDB")) == 0
    said = capsys.readouterr().out
    assert f"data.train: LMDB {tmp_path}/db, 96 records\n" in said


@pytest.mark.parametrize(
    ("shuffle", "asked", "ahead"),
    [
        ("none", "auto", True),
        ("full", "auto", False),
        ("block", "auto", False),
        ("full", "on", True),
        ("none", "off", False),
    ],
)
def test_reading_ahead_is_off_where_records_are_shuffled_unless_told(monkeypatch, shuffle, asked, ahead):
    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, size, advice: size or told.append(advice))
    flags = {
        "device.backend": "emulated", "run.iterations": 3, "feed.engine": "inline", "data.order.shuffle": shuffle,
        "data.train.source": str(DB / "crops96_raw_40x48_lmdb"), "data.train.batch": 8, "data.readahead": asked,
    }  # fmt: skip
    with Feed(load(None, flags)) as feed:
        next(feed).release()
    assert set(told) == {os.POSIX_FADV_NORMAL if ahead else os.POSIX_FADV_RANDOM}
