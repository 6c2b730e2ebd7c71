"""Training runs of real Caffe (tests/data), repeated: losses, weights and accuracies.

Caffe's own reruns with another number of BLAS threads part ways after some 100 iterations (a max pooling takes another
of two nearly equal values); so losses are compared closely over 20 iterations, weights loosely later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from datasets import caffe_pb2
from gpu.caffemodel import read_weights
from gpu.solver import Solver
from gpu.solverstate import read_state, write_state
from tests.gpu.training import CIFAR, DATA, Batch, by_name, cifar, crops, distance, lenet, lenet_test, mnist, restored


@pytest.fixture(autouse=True)
def one_blas_thread() -> Iterator[None]:
    """As Caffe ran, and as a job does unless told otherwise. With two, cifar10_quick parts by 2e-3 at iteration 9."""
    with threadpool_limits(1):
        yield


STATE_H5 = DATA / "lenet" / "lenet_h5_iter_20.solverstate.h5"


def follow(solver: Solver, folder: Path, steps: range, batch: Callable[[int], Batch] = mnist) -> None:
    trace = np.load(folder / "loss_trace.npz")
    for step in steps:
        assert solver.iter == step
        assert solver.lr == pytest.approx(float(trace["lr"][step]), rel=1e-6)
        assert solver.step_on(batch(step)) == pytest.approx(float(trace["loss"][step]), rel=1e-3), f"iteration {step}"


@pytest.mark.parametrize("at", [0, 100])
def test_lenet_from_a_snapshot(at: int, tmp_path: Path) -> None:
    """The one at 0 holds the initial weights. On from 200 and from the HDF5 snapshot: test_parity_onward."""
    solver = restored(lenet(), f"lenet/lenet_iter_{at}", tmp_path)
    weights = by_name(DATA / "lenet" / f"lenet_iter_{at}.caffemodel")
    assert all(np.array_equal(param.blob.data, weights[param.name]) for param in solver.net.learnable)
    assert any(array.any() for array in solver.history) == bool(at)
    follow(solver, DATA / "lenet", range(at, at + 20))


def test_data_restart_where_caffe_restarts_them() -> None:
    """Caffe's log of a resume at 100: its data layer begins at record 0 again."""
    solver = lenet()
    solver.restore(DATA / "lenet" / "lenet_iter_100.solverstate")
    assert lenet_test(solver)["accuracy"] == pytest.approx(0.904, abs=1e-6)
    losses = [solver.step_on(mnist(step)) for step in range(21)]
    assert [losses[0], losses[10], losses[20]] == pytest.approx([0.202155, 0.197337, 0.152994], rel=1e-3)


def test_lenet_arrives_at_the_hdf5_snapshot_of_caffe(tmp_path: Path) -> None:
    """Two sub-batches a step; then on from both snapshots."""
    solver = lenet("lenet_solver_h5")
    for step in range(20):
        solver.step_on([mnist(2 * step), mnist(2 * step + 1)])
    resumed = restored(lenet("lenet_solver_h5"), "lenet/lenet_h5_iter_20", tmp_path)
    assert resumed.iter == 20
    weights, _ = solver.snapshot(tmp_path / "lenet_h5")
    assert weights.name == Path(read_state(STATE_H5).learned_net).name
    assert distance(solver, {param.name: param.blob.data for param in resumed.net.learnable}) < 2e-4
    for ours, theirs in zip(solver.history, resumed.history, strict=True):
        assert np.linalg.norm(ours - theirs) < 2e-3 * np.linalg.norm(theirs)
    gradients = np.load(DATA / "lenet" / "lenet_h5_iter_20.samples.npz")
    for param in solver.net.learnable:
        theirs = gradients[f"diff/{param.name.replace('.', '/')}"]
        np.testing.assert_allclose(param.blob.diff.reshape(-1)[::97], theirs, rtol=0, atol=1e-2 * np.abs(theirs).max())
    for step in range(20, 25):
        batches = [mnist(2 * step), mnist(2 * step + 1)]
        assert resumed.step_on(batches) == pytest.approx(solver.step_on(batches), rel=1e-3)


def test_cifar10_quick_from_its_initial_weights(tmp_path: Path) -> None:
    follow(restored(cifar(), "cifar10_quick/cifar10_quick_iter_0", tmp_path), CIFAR, range(20), crops)


def test_cifar10_quick_at_300_tests_as_in_caffe() -> None:
    solver = cifar()
    solver.net.copy_from(CIFAR / "cifar10_quick_iter_300.caffemodel")
    result = solver.test(0, (crops(step) for step in range(15)))
    assert result["accuracy"] == pytest.approx(0.96875, abs=1e-6)


def test_lenet_at_200_tests_as_in_caffe(tmp_path: Path) -> None:
    """Its own snapshot at 200, where its run ends: there are no losses of Caffe's to go on from there."""
    solver = restored(lenet(), "lenet/lenet_iter_200", tmp_path)
    assert solver.iter == 200
    assert lenet_test(solver)["accuracy"] == pytest.approx(0.938, abs=1e-6)


def test_what_is_stored_in_fewer_bytes_is_caffes_to_the_bit(tmp_path: Path) -> None:
    """tests/data/README.md: put back into files of Caffe's form, they have the SHA-256 of Caffe's files."""
    folder = DATA / "lenet"
    model = caffe_pb2.NetParameter.FromString((folder / "lenet_iter_100.caffemodel").read_bytes())
    weights = read_weights(folder / "lenet_iter_200.caffemodel.h5")
    for layer in model.layer:
        for blob, array in zip(layer.blobs, weights.get(layer.name, []), strict=True):
            blob.data[:] = array.reshape(-1)
    state = read_state(folder / "lenet_iter_200.solverstate.h5")
    write_state(tmp_path / "state", replace(state, learned_net=state.learned_net.removesuffix(".h5")))
    twenty = read_weights(folder / "lenet_h5_iter_20.caffemodel.h5")
    pieces = [
        model.SerializeToString(deterministic=True),
        (tmp_path / "state").read_bytes(),
        b"".join(array.tobytes() for name in sorted(twenty) for array in twenty[name]),
    ]
    assert [hashlib.sha256(piece).hexdigest() for piece in pieces] == [
        "79a65f68d09dc15f833e43048ffae892e17d06abfc81cf4a82addcb19024be7e",  # lenet_iter_200.caffemodel
        "520c0fbe68cf5ef7c623dc8e279bd0929c6f8d54dad5b012ff50ca01bfe1e367",  # lenet_iter_200.solverstate
        "bc21206917528cb72f96648876e3ce0491a6a80141985ea4d25089e01d73f2ed",  # lenet_h5_iter_20.caffemodel.h5: /data
    ]


@pytest.mark.long
def test_lenet_to_the_end() -> None:
    solver = lenet()
    for step in range(100):
        solver.step_on(mnist(step))
    assert distance(solver, by_name(DATA / "lenet" / "lenet_iter_100.caffemodel")) < 1e-3
    assert lenet_test(solver)["accuracy"] == pytest.approx(0.904, abs=0.01)
    for step in range(100, 200):
        solver.step_on(mnist(step))
    assert distance(solver, by_name(DATA / "lenet" / "lenet_iter_200.caffemodel.h5")) < 5e-2
    assert lenet_test(solver)["accuracy"] == pytest.approx(0.938, abs=0.01)


@pytest.mark.long
def test_cifar10_quick_to_the_end() -> None:
    # Rounding alone parts two correct runs by then: runs whose initial weights differ in the last digit ended between
    # 0.935 and 0.967. Caffe's one run is a draw of such, so it is compared with the median of five.
    accuracies = []
    for seed in range(5):
        solver, rng = cifar(), np.random.default_rng(seed)
        for param in solver.net.learnable if seed else ():
            param.blob.data *= 1 + 1e-7 * rng.standard_normal(param.blob.shape)
        for step in range(300):
            solver.step_on(crops(step))
        accuracies.append(solver.test(0, (crops(step) for step in range(15)))["accuracy"])
    assert np.median(accuracies) == pytest.approx(0.96875, abs=0.01)
