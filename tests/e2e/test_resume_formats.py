"""Case D12 as a whole: 100 records in batches of 8, stopped at 7, moved, resumed; in both formats of snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.caffemodel import read_weights
from gpu.solverstate import read_state
from tests.e2e.conftest import train_forked as train

NET = """
layer { name: "d" type: "Data" top: "data" top: "label" data_param { batch_size: 8 } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 10
  weight_filler { type: "xavier" } } }
layer { name: "drop" type: "Dropout" bottom: "ip" top: "ip" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def _job(folder: Path, iterations: int, *more: str) -> list[str]:
    return [
        f"--net={folder.parent / 'net.prototxt'}", f"--solver={folder.parent / 'solver.prototxt'}",
        "--data.train.source=memory:records=100,shape=1x5x5,classes=10,seed=1", "--data.train.batch=8",
        "--data.transform.scale=0.00390625", f"--run.folder={folder}", f"--run.iterations={iterations}",
        "--feed.engine=inline", "--profile.samplers_hz=0", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["BINARYPROTO", "HDF5"])
def test_14_steps_are_7_and_7_in_a_moved_folder(tmp_path: Path, form: str) -> None:
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "solver.prototxt").write_text(
        'base_lr: 0.1 momentum: 0.9 lr_policy: "step" gamma: 0.5 stepsize: 5 random_seed: 3 max_iter: 14'
        f" snapshot_format: {form} snapshot_diff: true\n"
    )
    for folder, iterations in (("straight", 14), ("stopped", 7)):
        done = train(*_job(tmp_path / folder, iterations), cwd=tmp_path)
        assert done.code == 0, done.err + done.out
    (tmp_path / "stopped").rename(tmp_path / "moved")
    done = train(*_job(tmp_path / "moved", 14, "--run.if_exists=resume"), cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    assert "resuming from iteration 7" in done.out
    ending = ".h5" if form == "HDF5" else ""
    names = {f"iter_{n}{part}" for n in (7, 14) for part in (f".caffemodel{ending}", f".solverstate{ending}", ".json")}
    assert {path.name for path in (tmp_path / "moved" / "snapshots").iterdir()} == names
    for name in (f"iter_14.caffemodel{ending}", f"iter_14.solverstate{ending}"):
        straight, resumed = (tmp_path / folder / "snapshots" / name for folder in ("straight", "moved"))
        assert straight.read_bytes() == resumed.read_bytes()
    assert read_weights(tmp_path / "moved" / "snapshots" / f"iter_14.caffemodel{ending}")["ip"][0].any()
    assert read_state(tmp_path / "moved" / "snapshots" / f"iter_14.solverstate{ending}").current_step == 2
    assert f"iter_14.caffemodel{ending}" in done.out, "the summary names the weights"
