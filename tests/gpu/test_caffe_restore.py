"""Snapshots of ours as real Caffe would restore them, and Caffe's own, which come out of our hands as they went in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from datasets import caffe_pb2
from gpu.caffemodel import read_weights, write_layers
from gpu.solver import Solver
from gpu.solverstate import read_state, write_state
from tests.gpu.caffe_restore import CaffeNet, restore, same
from tests.gpu.training import CIFAR, DATA

LENET = DATA / "lenet"
NET = """
name: "tied"
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 4 dim: 2 dim: 5 dim: 5 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 3 kernel_size: 3 bias_term: false weight_filler { type: "xavier" } } }
layer { name: "norm" type: "BatchNorm" bottom: "conv" top: "norm" }
layer { name: "scale" type: "Scale" bottom: "norm" top: "norm" scale_param { bias_term: true } }
layer { name: "relu" type: "ReLU" bottom: "norm" top: "norm" }
layer { name: "ip1" type: "InnerProduct" bottom: "norm" top: "ip1"
  inner_product_param { num_output: 6 weight_filler { type: "xavier" } } }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2" param { name: "w" } param { name: "b" }
  inner_product_param { num_output: 6 weight_filler { type: "xavier" } } }
layer { name: "ip3" type: "InnerProduct" bottom: "ip2" top: "ip3" param { name: "w" } param { name: "b" }
  inner_product_param { num_output: 6 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip3" bottom: "ip1" top: "loss" }
"""
# By hand, from Caffe's documentation of its layers; the loss and others without parameters count as layers, too.
LAYERS = {
    **{name: [] for name in ("data", "relu", "loss")},
    "conv": [(3, 2, 3, 3)],
    "norm": [(3,), (3,), (1,)],
    "scale": [(3,), (3,)],
    "ip1": [(6, 27), (6,)],
    "ip2": [(6, 6), (6,)],
    "ip3": [(6, 6), (6,)],
}
OWNERS = {("ip3", 0): ("ip2", 0), ("ip3", 1): ("ip2", 1)}
TYPES = {
    "SGD": "momentum: 0.9",
    "Nesterov": "momentum: 0.9",
    "AdaGrad": "delta: 1e-6",
    "RMSProp": "rms_decay: 0.9 delta: 1e-6",
    "AdaDelta": "momentum: 0.9 delta: 1e-6",
    "Adam": "momentum: 0.9 momentum2: 0.99",
}
FORMATS = ["BINARYPROTO", "HDF5"]
RATES = {
    'lr_policy: "fixed"': 0,
    'lr_policy: "step" gamma: 0.5 stepsize: 2': 1,  # Caffe keeps the step of the rate it used last, in iteration 3
    'lr_policy: "multistep" gamma: 0.5 stepvalue: 1 stepvalue: 3 stepvalue: 4': 2,
}


def trained(kind: str, form: str, more: str = 'lr_policy: "fixed"') -> Solver:
    text = f'type: "{kind}" base_lr: 0.01 {TYPES[kind]} random_seed: 3 snapshot_format: {form} {more}\n'
    solver = Solver(text, net=NET, backend="numpy")
    for step in range(4):
        solver.step_on({"data": np.random.default_rng(step).standard_normal((4, 2, 5, 5), np.float32)})
    return solver


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", TYPES)
def test_caffe_can_restore_what_each_solver_writes(tmp_path: Path, kind: str, form: str) -> None:
    solver = trained(kind, form)
    _, state = solver.snapshot(tmp_path / "deep" / "er")
    caffe = CaffeNet(LAYERS, OWNERS, 2 if kind in ("Adam", "AdaDelta") else 1)
    found = restore(caffe, state, Path.cwd())
    assert (found.iteration, found.current_step) == (4, 0)
    assert same(found.history, solver.history)
    assert any(array.any() for array in found.history)
    params = {(name, i): blob.data for name, blobs in solver.net.params.items() for i, blob in enumerate(blobs)}
    assert found.blobs.keys() == set(caffe.learned)
    assert same(found.blobs.values(), [params[place] for place in found.blobs])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("policy", RATES)
def test_the_step_of_the_rate_is_the_one_caffe_used_last(tmp_path: Path, policy: str, form: str) -> None:
    _, state = trained("SGD", form, policy).snapshot(tmp_path / "x")
    assert restore(CaffeNet(LAYERS, OWNERS), state, Path.cwd()).current_step == RATES[policy]


@pytest.mark.parametrize("form", FORMATS)
def test_snapshots_in_a_folder_are_for_a_caffe_that_is_started_there(tmp_path: Path, form: str) -> None:
    """As a job writes them: the state names its neighbour and nothing else, so the folder may go anywhere."""
    _, state = trained("SGD", form).snapshot(f"{tmp_path}/")
    (tmp_path / "moved").mkdir()
    for path in [path for path in tmp_path.iterdir() if path.is_file()]:
        path.rename(tmp_path / "moved" / path.name)
    assert restore(CaffeNet(LAYERS, OWNERS), tmp_path / "moved" / state.name, tmp_path / "moved").iteration == 4


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "other",
    [
        CaffeNet(LAYERS, OWNERS, 2),
        CaffeNet(LAYERS, {}),
        CaffeNet({**LAYERS, "conv": [(3, 2, 3, 3), (3,)]}, OWNERS),
        CaffeNet({**LAYERS, "ip1": [(6, 26), (6,)]}, OWNERS),
        CaffeNet({**LAYERS, "scale": [(3,)]}, OWNERS),
    ],
    ids=["another type", "nothing shared", "a bias more", "another width", "a blob less"],
)
def test_the_check_refuses_what_caffe_refuses(tmp_path: Path, form: str, other: CaffeNet) -> None:
    _, state = trained("SGD", form).snapshot(tmp_path / "x")
    with pytest.raises(AssertionError):
        restore(other, state, Path.cwd())


# -- Caffe's own files ------------------------------------------------------------------------------------------------

CAFFES_LENET = {
    "conv1": [(20, 1, 5, 5), (20,)],
    "conv2": [(50, 20, 5, 5), (50,)],
    "ip1": [(500, 800), (500,)],
    "ip2": [(10, 500), (10,)],
}


def test_the_check_passes_what_caffe_wrote(tmp_path: Path) -> None:
    """Its state says ``lenet/…``, for a Caffe that is started one folder above."""
    found = restore(CaffeNet(CAFFES_LENET, {}), LENET / "lenet_iter_100.solverstate", DATA)
    assert found.iteration == 100
    assert len(found.history) == len(found.blobs) == 8


@pytest.mark.parametrize(
    "path",
    [LENET / "lenet_iter_0.caffemodel", LENET / "lenet_iter_100.caffemodel", *sorted(CIFAR.glob("*.caffemodel"))],
    ids=lambda path: path.name,
)
def test_weights_of_caffe_are_written_to_the_byte(tmp_path: Path, path: Path) -> None:
    stored = caffe_pb2.NetParameter.FromString(path.read_bytes())
    weights = read_weights(path)
    for layer in stored.layer:
        layer.ClearField("blobs")
    write_layers(tmp_path / "again", stored.name, [(layer, weights.get(layer.name, [])) for layer in stored.layer])
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_a_state_of_caffe_is_written_to_the_byte(tmp_path: Path) -> None:
    path = LENET / "lenet_iter_100.solverstate"
    write_state(tmp_path / "again", read_state(path))
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_our_weights_hold_what_caffes_hold_in_its_order(tmp_path: Path) -> None:
    """A whole net's file, byte for byte what the protobuf library makes of the message, gradients included."""
    solver = trained("SGD", "BINARYPROTO", 'lr_policy: "fixed" snapshot_diff: true')
    weights, _ = solver.snapshot(tmp_path / "x")
    message = caffe_pb2.NetParameter.FromString(weights.read_bytes())
    assert weights.read_bytes() == message.SerializeToString(deterministic=True)
    assert [layer.name for layer in message.layer] == [layer.name for layer in solver.net.layers]
    assert all(len(blob.diff) == len(blob.data) for layer in message.layer for blob in layer.blobs)
