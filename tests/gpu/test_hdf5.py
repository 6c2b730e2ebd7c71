"""HDF5 snapshots: laid out as Caffe's, read back, and refused where they are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from datasets import caffe_pb2
from gpu.caffemodel import read_weights, sniff
from gpu.net import Net
from gpu.solver import Solver
from gpu.solverstate import find_weights, read_state, write_state
from profiler.errors import StallscopeError
from tests.gpu.test_solver import MLP, SGD, bits, mlp, mlp_batch
from tests.gpu.training import DATA, lenet

STATE = DATA / "lenet" / "lenet_h5_iter_20.solverstate.h5"
LAYOUT = json.loads((DATA / "lenet" / "lenet_h5_iter_20.layout.json").read_text())
HDF5 = SGD + "snapshot_format: HDF5\n"


def layout(path: Path) -> dict[str, Any]:
    """Every group and data set with its shape, its type to the bit, its space and whether it has attributes."""
    rows: dict[str, Any] = {}

    def add(name: str, item: Any) -> None:
        if isinstance(item, h5py.Group):
            rows[name] = {"group": True, "attributes": len(item.attrs)}
            return
        rows[name] = {
            "shape": list(item.shape),
            "type": str(item.dtype),
            "encoded_type": item.id.get_type().encode().hex(),
            "layout": item.id.get_create_plist().get_layout(),
            "space": item.id.get_space().get_simple_extent_type(),
            "attributes": len(item.attrs),
        }

    with h5py.File(path, "r") as file:
        file.visititems(add)
    return rows


def test_a_state_of_caffe_is_read_and_written_again(tmp_path: Path) -> None:
    state = read_state(STATE)
    assert (state.iteration, state.current_step) == (20, 0)
    assert state.learned_net == "lenet/lenet_h5_iter_20.caffemodel.h5"
    with h5py.File(STATE, "r") as theirs:
        for index, array in enumerate(state.history):
            np.testing.assert_array_equal(array, theirs[f"history/{index}"][()])
    path = tmp_path / "again.solverstate.h5"
    write_state(path, state)
    assert layout(path) == layout(STATE) == LAYOUT["solverstate"]
    ours, theirs = path.read_bytes(), STATE.read_bytes()
    different = sum(one != other for one, other in zip(ours, theirs, strict=True))
    assert different <= 16 * len(state.history), "nothing but the times at which Caffe made the data sets"
    again = tmp_path / "twice.solverstate.h5"
    write_state(again, state)
    assert again.read_bytes() == ours


def test_weights_are_laid_out_as_caffes(tmp_path: Path) -> None:
    """Groups of layers without parameters too, and gradients, as the solver asks for them (snapshot_diff)."""
    solver = lenet("lenet_solver_h5")
    weights, state = solver.snapshot(tmp_path / "lenet_h5")
    assert (weights.name, state.name) == ("lenet_h5_iter_0.caffemodel.h5", "lenet_h5_iter_0.solverstate.h5")
    assert layout(weights) == LAYOUT["caffemodel"]
    assert sniff(weights) == "caffemodel"
    assert sniff(state) == "solverstate"
    plain = read_weights(DATA / "lenet" / "lenet_iter_0.caffemodel")
    for name, blobs in read_weights(weights).items():
        for one, other in zip(blobs, plain[name], strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("form", ["BINARYPROTO", "HDF5"])
@pytest.mark.parametrize("diff", [False, True])
def test_snapshots_of_both_formats_with_and_without_gradients(tmp_path: Path, form: str, diff: bool) -> None:
    text = SGD + f"snapshot_format: {form} snapshot_diff: {str(diff).lower()}\n"
    straight, stopped = mlp(text), mlp(text)
    for step in range(6):
        straight.step_on(mlp_batch(step))
    for step in range(3):
        stopped.step_on(mlp_batch(step))
    weights, state = stopped.snapshot(f"{tmp_path}/")
    gradients = [blob.diff for blob in stopped.net.params["ip1"]]
    if form == "HDF5":
        with h5py.File(weights, "r") as file:
            assert ("diff" in file) is diff
            stored = [file[f"diff/ip1/{i}"][()] for i in (0, 1)] if diff else []
    else:
        net = caffe_pb2.NetParameter.FromString(weights.read_bytes())
        (layer,) = [layer for layer in net.layer if layer.name == "ip1"]
        assert all(bool(blob.diff) is diff for blob in layer.blobs)
        stored = [np.array(blob.diff, np.float32).reshape(tuple(blob.shape.dim)) for blob in layer.blobs if blob.diff]
    for one, other in zip(stored, gradients if diff else [], strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.abs(one).max() > 0
    resumed = mlp(text)
    resumed.restore(state)
    assert bits(resumed) == bits(stopped)
    for step in range(3, 6):
        resumed.step_on(mlp_batch(step))
    assert bits(resumed) == bits(straight)


def test_more_than_ten_histories_keep_their_order(tmp_path: Path) -> None:
    """HDF5 lists 0, 1, 10, 11, 2: the order of the names is not that of the numbers."""
    deep = "".join(
        f'layer {{ name: "ip{i}" type: "InnerProduct" bottom: "{f"ip{i - 1}" if i else "data"}" top: "ip{i}"'
        ' inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }\n'
        for i in range(6)
    )
    head = 'layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 } } }\n'
    loss = 'layer { name: "loss" type: "EuclideanLoss" bottom: "ip5" bottom: "ip0" top: "loss" }\n'
    solver = Solver(HDF5, net=head + deep + loss, backend="numpy")
    for index, array in enumerate(solver.history):
        array[...] = index
    _, state = solver.snapshot(tmp_path / "deep")
    assert [float(array.reshape(-1)[0]) for array in read_state(state).history] == list(range(12))


SHARED = """
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 } } }
layer { name: "a" type: "InnerProduct" bottom: "data" top: "a" param { name: "w" } param { name: "b" }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "b" type: "InnerProduct" bottom: "a" top: "b" param { name: "w" } param { }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "c" type: "InnerProduct" bottom: "b" top: "c" param { name: "w" } param { name: "b" }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "c" bottom: "data" top: "loss" }
"""


def test_a_shared_parameter_is_stored_with_its_owner(tmp_path: Path) -> None:
    solver = Solver(HDF5, net=SHARED, backend="numpy")
    solver.step_on({"data": np.ones((2, 3), np.float32)})
    weights, state = solver.snapshot(tmp_path / "tied")
    with h5py.File(weights, "r") as file:
        assert {name: sorted(file["data"][name]) for name in ("a", "b", "c")} == {"a": ["0", "1"], "b": ["1"], "c": []}
    resumed = Solver(HDF5, net=SHARED, backend="numpy", seed=9)
    resumed.restore(state)
    assert bits(resumed) == bits(solver)
    untied = SHARED.replace('param { name: "w" } param { }', "")
    with pytest.raises(StallscopeError, match="b: 2 blobs in the net, 1 in the file"):
        Net(untied).copy_from(weights)


def test_names_that_hdf5_takes_for_paths_are_refused_at_once() -> None:
    slashed = MLP.replace('name: "ip1"', 'name: "block/ip1"')
    with pytest.raises(StallscopeError, match=r"snapshot_format HDF5 cannot hold 1 layer name(.|\n)*'block/ip1'"):
        Solver(HDF5, net=slashed, backend="numpy")
    Solver(SGD, net=slashed, backend="numpy")


def test_weights_are_found_beside_a_state_by_its_own_name(tmp_path: Path) -> None:
    _, state = mlp(HDF5).snapshot(tmp_path / "x")
    state = state.rename(tmp_path / "y_iter_0.solverstate.h5")
    (tmp_path / "x_iter_0.caffemodel.h5").rename(tmp_path / "y_iter_0.caffemodel.h5")
    assert find_weights(state, read_state(state)) == tmp_path / "y_iter_0.caffemodel.h5"


def test_content_decides_and_not_the_name(tmp_path: Path) -> None:
    weights, state = mlp(HDF5).snapshot(tmp_path / "x")
    renamed, other = weights.rename(tmp_path / "w.caffemodel"), state.rename(tmp_path / "s.solverstate")
    assert sniff(renamed) == "caffemodel"
    solver = mlp()
    solver.restore(other, weights=renamed)
    with pytest.raises(StallscopeError, match="found:    a solver state"):
        read_weights(other)
    with pytest.raises(StallscopeError, match="found:    weights"):
        read_state(renamed)
    binary, _ = mlp().snapshot(tmp_path / "plain")
    assert list(read_weights(binary.rename(tmp_path / "binary.caffemodel.h5"))) == ["ip1", "ip2"]


@pytest.mark.parametrize("kept", [9, 60, 300, 5_000])
def test_a_file_that_was_cut_says_so(tmp_path: Path, kept: int) -> None:
    weights, _ = mlp(HDF5).snapshot(tmp_path / "x")
    weights.write_bytes(weights.read_bytes()[:kept])
    says = r"ends at byte \d+" if kept >= 300 else "not a whole HDF5 file"
    with pytest.raises(StallscopeError, match=says) as caught:
        read_weights(weights)
    assert str(weights) in str(caught.value)


def _make(path: Path, build: Any) -> Path:
    with h5py.File(path, "w") as file:
        build(file)
    return path


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda f: f.create_group("else"), "is not weights"),
        (lambda f: f.create_dataset("data/ip/first", data=[1.0]), "holds 'first'"),
        (lambda f: f.create_dataset("data/ip", data=[1.0]), "data/ip is not a layer"),
        (lambda f: f.create_dataset("data/ip/0", data=b"text"), "not an array of numbers"),
        (lambda f: f.create_dataset("data/ip/0", shape=(1 << 40,), dtype="f4"), "shape and contents disagree"),
        (lambda f: f.create_group("data/ip").__setitem__("0", h5py.ExternalLink("/etc/passwd", "/x")), "not an array"),
        (lambda f: f.create_group("data/ip").__setitem__("0", h5py.SoftLink("/nowhere")), "not an array"),
    ],
)
def test_hdf5_files_that_are_something_else(tmp_path: Path, build: Any, says: str) -> None:
    with pytest.raises(StallscopeError, match=says):
        read_weights(_make(tmp_path / "odd.caffemodel.h5", build))


def test_a_state_with_a_gap_in_its_histories(tmp_path: Path) -> None:
    def build(file: Any) -> None:
        file["iter"], file["learned_net"] = np.array([3], "i4"), "x"
        for index in (0, 2):
            file[f"history/{index}"] = np.zeros(2, "f4")

    with pytest.raises(StallscopeError, match="histories are missing"):
        read_state(_make(tmp_path / "gap.solverstate.h5", build))


def test_numbers_of_other_types_are_read(tmp_path: Path) -> None:
    """A Caffe of doubles writes doubles; h5py writes texts of variable length."""

    def build(file: Any) -> None:
        file["iter"], file["current_step"], file["learned_net"] = np.array([7], "i8"), np.array([2], "i4"), "w.h5"
        file["history/0"] = np.array([1.5, 2.5], "f8")

    state = read_state(_make(tmp_path / "double.solverstate.h5", build))
    assert (state.iteration, state.current_step, state.learned_net) == (7, 2, "w.h5")
    np.testing.assert_array_equal(state.history[0], np.float32([1.5, 2.5]))
