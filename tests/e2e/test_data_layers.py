"""Jobs whose nets have Caffe's other data layers: the same bits inline and through workers, and what reports say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.e2e.conftest import report, train
from tests.pipeline import build

SOLVER = 'base_lr: 0.01 lr_policy: "fixed" max_iter: 12 display: 4 random_seed: 3\n'
REST = """
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 8 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
LAYERS = {
    "ImageData": """
layer { name: "d" type: "ImageData" top: "data" top: "label"
  transform_param { crop_size: 32 mirror: true mean_value: 110 scale: 0.01 }
  image_data_param { source: "list.txt" root_folder: "crops/" batch_size: 6 new_height: 40 new_width: 48
    shuffle: true } }
""",
    "HDF5Data": """
layer { name: "d" type: "HDF5Data" top: "data" top: "label" top: "target"
  hdf5_data_param { source: "list.h5.txt" batch_size: 4 shuffle: true } }
layer { name: "near" type: "EuclideanLoss" bottom: "ip" bottom: "target" top: "near" loss_weight: 0.1 }
""",
    "Python": """
layer { name: "d" type: "Python" top: "data" top: "label" transform_param { scale: 0.01 }
  python_param { module: "tests.pipeline.user_data" layer: "Noise" param_str: '{"batch": 4}' } }
""",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    build.photos(tmp_path)
    rng = np.random.default_rng(1)
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["data"] = rng.standard_normal((9, 2, 3)).astype(np.float32)
            file["label"] = rng.integers(0, 8, 9)
            file["target"] = rng.standard_normal((9, 8))
    (tmp_path / "list.h5.txt").write_text("0.h5\n1.h5\n")
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    return tmp_path


def net(folder: Path, layer: str) -> None:
    first, *later = LAYERS[layer].strip().split("\nlayer ")
    (folder / "net.prototxt").write_text(first + REST + "".join(f"layer {text}\n" for text in later))


def weights(folder: Path, *flags: str) -> str:
    run = folder / f"run{len(list(folder.glob('run*')))}"
    done = train(
        "--net=net.prototxt", "--solver=solver.prototxt", "--device.backend=numpy", f"--run.folder={run}",
        "--profile.samplers_hz=0", *flags, cwd=folder,
    )  # fmt: skip
    assert done.code == 0, done.err + done.out
    return hashlib.sha256(next(run.glob("snapshots/*_12.caffemodel")).read_bytes()).hexdigest()


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.parametrize("layer", LAYERS)
def test_workers_change_no_bit_and_neither_does_a_resume(place: Path, layer: str) -> None:
    net(place, layer)
    inline = weights(place, "--feed.engine=inline")
    assert weights(place, "--feed.workers=2") == inline
    if layer != "HDF5Data":
        return  # what a resume does is one code for all
    run = f"--run.folder={place / 'parts'}"
    for iterations in (5, 12):
        done = train(
            "--net=net.prototxt", "--solver=solver.prototxt", "--device.backend=numpy", run, "--run.if_exists=resume",
            "--feed.engine=inline", f"--run.iterations={iterations}", cwd=place,
        )  # fmt: skip
        assert done.code == 0, done.err + done.out
    resumed = place / "parts" / "snapshots" / "iter_12.caffemodel"
    assert hashlib.sha256(resumed.read_bytes()).hexdigest() == inline


@pytest.mark.ray
def test_the_cost_of_a_python_data_layer_is_feed_and_not_compute(place: Path) -> None:
    """20 ms a sample, 4 samples a batch, one worker: the step waits, and the report says for what."""
    net(place, "Python")
    param = json.dumps({"batch": 4, "sleep": 0.02})
    weights(place, "--feed.workers=1", f"--data.train.param={param}")
    found = report(place / "run0")
    making, parts = found["making"]["ms_per_batch"], found["partition"]
    assert making["read"] > 0.5 * sum(making.values())  # not all it sleeps: what it waited for a CPU is told apart
    assert making["storage"] < 0.1 * making["read"]  # sleeping is no waiting for storage
    assert parts["feed_wait"] > 3 * parts["compute"]
    data = {stall["where"]: stall["seconds"] for stall in reversed(found["stalls"]) if stall["side"] == "data"}
    assert data["read"] > data.get("storage", 0)
