"""Records of different sizes through a net, one at a time: training and tests, the same bits from every engine."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.run import run
from pipeline.settings import load
from profiler import store
from profiler.errors import StallscopeError
from tests.gpu import nets
from tests.pipeline.build import picture, raw, write_lmdb

_DATA = """layer { name: "%s" type: "Data" top: "data" top: "label" include { phase: %s }
  data_param { source: "%s" batch_size: 1 backend: LMDB } }
"""
_SHAPES = [(3, 20, 24), (3, 9, 11), (3, 31, 8), (3, 20, 24), (3, 12, 12), (3, 30, 30)]


def job(folder: Path, head: str, *more: str, engine: str = "inline") -> list[str]:
    folder.mkdir(exist_ok=True)
    db = folder / "db"
    if not db.exists():
        write_lmdb(db, [raw(picture(i, shape), i % 5) for i, shape in enumerate(_SHAPES)])
    text = _DATA % ("d", "TRAIN", db) + _DATA % ("t", "TEST", db)
    text += nets.layer("Convolution", "conv", ["data"], ["conv"], nets.CONV)
    text += nets.layer("ReLU", "r", ["conv"], ["conv"])
    text += head
    text += nets.layer("InnerProduct", "ip", ["all"], ["ip"], f"inner_product_param {{ num_output: 5 {nets.FILL} }}")
    text += nets.layer("SoftmaxWithLoss", "loss", ["ip", "label"], ["loss"])
    (folder / "net.prototxt").write_text(text)
    (folder / "solver.prototxt").write_text(
        'base_lr: 0.001 lr_policy: "fixed" max_iter: 24 test_iter: 6 test_interval: 8 snapshot_prefix: "x" '
        "solver_mode: CPU"
    )
    return [
        f"--net={folder / 'net.prototxt'}", f"--solver={folder / 'solver.prototxt'}", f"--feed.engine={engine}",
        "--device.backend=numpy", f"--run.folder={folder / engine}", *more,
    ]  # fmt: skip


GLOBAL = nets.layer("Pooling", "all", ["conv"], ["all"], "pooling_param { pool: AVE global_pooling: true }")
FIXED = nets.layer("Pooling", "all", ["conv"], ["all"], "pooling_param { kernel_size: 2 stride: 2 }")


def prints(folder: Path) -> list[tuple[int, str, int]]:
    table = store.load_run(folder).fingerprints
    columns = [table.column(name).to_pylist() for name in ("step", "name", "ordered")]
    return sorted(zip(*columns, strict=True))


@pytest.mark.long
def test_changing_sizes_train_and_test_with_the_same_bits(tmp_path: Path) -> None:
    flags = {engine: job(tmp_path, GLOBAL, "--feed.workers=2", engine=engine) for engine in ("inline", "ray")}
    gc.collect()  # nets of other tests, kept alive by cycles, count as memory of this process until they are collected
    for engine in flags:
        assert run(load(None, flags[engine])) == 0
    a, b = (prints(tmp_path / engine) for engine in flags)
    assert len(a) > 24
    assert a == b
    manifests = [json.loads((tmp_path / engine / "manifest.json").read_text()) for engine in flags]
    assert manifests[0]["tests"] == manifests[1]["tests"]
    assert len(manifests[0]["tests"]) >= 3
    weights = [(tmp_path / engine / "snapshots" / "iter_24.caffemodel").read_bytes() for engine in flags]
    assert weights[0] == weights[1]
    memory = store.load_run(tmp_path / "inline").memory
    reserved = np.asarray(memory.column("reserved"))
    assert memory.column("step").to_pylist() == list(range(24))
    assert (np.diff(reserved) >= 0).all()
    assert (reserved[12:] == reserved[-1]).all()  # after each size was seen twice nothing moves any more


def test_a_net_that_needs_one_size_names_its_layer(tmp_path: Path) -> None:
    with pytest.raises(StallscopeError, match=r"layer 'ip' \(InnerProduct\): its parameters cannot follow"):
        run(load(None, job(tmp_path, FIXED)))


@pytest.mark.parametrize("level", ["debug", "info"])
def test_the_debug_log_lists_every_layer(tmp_path: Path, level: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(level.upper(), logger="pipeline"):
        assert run(load(None, job(tmp_path, GLOBAL, f"--run.log_level={level}"))) == 0
    run_ = store.load_run(tmp_path / "inline")
    notes = [note for note in run_.notes if note["note"] == "layer"]
    if level == "info":
        assert notes == []
        return
    assert [note["layer"] for note in notes if note["phase"] == "TRAIN"] == ["d", "conv", "r", "all", "ip", "loss"]
    conv = next(note for note in notes if note["layer"] == "conv")
    (weight, bias) = conv["params"]
    assert (weight["shape"], weight["filler"], bias["mean"]) == ([4, 3, 3, 3], "xavier", pytest.approx(0.1))
    assert weight["std"] == pytest.approx((3 * (1 / 27)) ** 0.5 / 3**0.5, rel=0.3)
    assert conv["bytes"] > 2 * 4 * np.prod(conv["tops"]["conv"])
    lines = [record.message for record in caplog.records if record.message.startswith("TRAIN conv (Convolution)")]
    assert len(lines) == 1
    assert "xavier" in lines[0]
    assert "4x3x3x3" in lines[0]
    report = json.loads((tmp_path / "inline" / "report.json").read_text())
    assert "layer" not in {finding["kind"] for finding in report["findings"]}
