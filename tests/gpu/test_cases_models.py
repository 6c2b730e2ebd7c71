"""Cases D11 to D13 of the list of things that go wrong: weights that do not fit, wrong files, big files, full disks.

D1 is in test_upgrade.py, its resume here; D3 and D4 in test_net.py; D6 in test_fillers.py and test_start.py; D7 and
D8 in test_layers.py; the rest of D12 (data position, bits of a resumed run) in tests/e2e.
"""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from datasets import caffe_pb2
from gpu.caffemodel import MAX_BYTES, read_layers, read_weights, write_layers
from gpu.net import Net
from gpu.solver import Solver
from gpu.solverstate import read_state, write_state
from profiler.errors import StallscopeError
from tests.gpu.test_solver import ADAM, MLP, SGD, bits, mlp, mlp_batch

HEAD = """
layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 6 } } }
layer { name: "base" type: "InnerProduct" bottom: "data" top: "base" inner_product_param { num_output: 4 } }
layer { name: "score" type: "InnerProduct" bottom: "base" top: "score" inner_product_param { num_output: 2 } }
layer { name: "extra" type: "InnerProduct" bottom: "score" top: "extra" inner_product_param { num_output: 3 } }
"""
FORMATS = ["BINARYPROTO", "HDF5"]


def ending(form: str) -> str:
    return ".caffemodel" + (".h5" if form == "HDF5" else "")


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """A real failure of a write in its middle: the system refuses to let a file of this process grow further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# -- D1: old formats --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["V0", "V1"])
def test_d1_a_resume_takes_weights_of_old_formats(tmp_path: Path, version: str) -> None:
    """The way of nets and of weights is the way of a resume: the weights beside the state are brought up to date."""
    solver = mlp(SGD)
    solver.step_on(mlp_batch(0))
    weights, state = solver.snapshot(tmp_path / "net")
    old = caffe_pb2.NetParameter(name="old")
    for name, blobs in solver.net.params.items():
        if blobs:
            layer = old.layers.add()
            if version == "V0":
                layer.layer.name, layer.layer.type = name, "innerproduct"
                layer = layer.layer
            else:
                layer.name, layer.type = name, caffe_pb2.V1LayerParameter.INNER_PRODUCT
            for blob in blobs:
                axes = dict(zip(("num", "channels", "height", "width"), (1, 1, 1, *blob.shape)[-4:], strict=True))
                layer.blobs.add(data=blob.data.reshape(-1).tolist(), **axes)
    weights.write_bytes(old.SerializeToString())
    resumed = mlp(SGD)
    resumed.restore(state)
    assert bits(resumed) == bits(solver)


# -- D7: BatchNorm's third blob ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1.0, 2.0, 999.98])
def test_d7_stored_sums_are_divided_by_their_weight(tmp_path: Path, count: float) -> None:
    text = """
    layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 2 dim: 1 dim: 3 dim: 3 } } }
    layer { name: "bn" type: "BatchNorm" bottom: "data" top: "y" }
    """
    stored = Net(text)
    for blob, value in zip(stored.params["bn"], (10, 40, count), strict=True):
        blob.data = np.full(blob.shape, value, np.float32)
    for form in FORMATS:
        stored.save(tmp_path / f"bn{ending(form)}")
        x = np.random.default_rng(0).standard_normal((2, 1, 3, 3)).astype(np.float32)
        y = Net(text, weights=tmp_path / f"bn{ending(form)}").forward(data=x)["y"]
        np.testing.assert_allclose(y, (x - 10 / count) / np.sqrt(40 / count + 1e-5), rtol=2e-5)
    stored.params["bn"][2].data = np.zeros(1, np.float32)
    with pytest.raises(StallscopeError, match="statistics never accumulated"):
        stored.forward(data=x)


# -- D11: copying by name ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_d11_a_head_of_21_classes_on_2(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"voc{ending(form)}"
    Net(HEAD.replace("num_output: 2 ", "num_output: 21 ")).save(path)
    net = Net(HEAD)
    before = [blob.data.copy() for blobs in net.params.values() for blob in blobs]
    with pytest.raises(StallscopeError) as caught:
        net.copy_from(path)
    text = str(caught.value)
    assert "in 3 place(s)" in text, "the head's weights and bias, and the layer on top of it"
    for line in (
        "score.0: (2, 4) in the net, (21, 4) in the file (another size)",
        "score.1: (2,) in the net, (21,) in the file (another size)",
        "extra.0: (3, 2) in the net, (3, 21) in the file (another size)",
    ):
        assert line in text
    assert "another name" in text
    after = [blob.data for blobs in net.params.values() for blob in blobs]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    renamed = Net(HEAD.replace('name: "score"', 'name: "score2"').replace('name: "extra"', 'name: "extra2"'))
    report = renamed.copy_from(path)
    assert (report.copied, sorted(report.ignored), report.at_init) == (
        ["base"],
        ["extra", "score"],
        ["score2", "extra2"],
    )


def test_d11_legacy_blobs_are_accepted_and_another_shape_needs_reshape(tmp_path: Path) -> None:
    net = caffe_pb2.NetParameter()
    layer = net.layer.add(name="base", type="InnerProduct")
    layer.blobs.add(num=1, channels=1, height=4, width=6, data=range(24))
    layer.blobs.add(num=1, channels=1, height=1, width=4, data=range(4))
    path = tmp_path / "legacy.caffemodel"
    path.write_bytes(net.SerializeToString())
    target = Net(HEAD)
    assert target.copy_from(path).copied == ["base"]
    np.testing.assert_array_equal(target.params["base"][0].data, np.arange(24, dtype=np.float32).reshape(4, 6))
    np.testing.assert_array_equal(target.params["base"][1].data, np.arange(4, dtype=np.float32))
    layer.blobs[0].height, layer.blobs[0].width = 6, 4  # as many values, another shape
    path.write_bytes(net.SerializeToString())
    with pytest.raises(
        StallscopeError, match=r"base.0: \(4, 6\) in the net, \(1, 1, 6, 4\) .*same size(.|\n)*reshape=True"
    ):
        target.copy_from(path)
    target.copy_from(path, reshape=True)


@pytest.mark.parametrize("form", FORMATS)
def test_d11_zero_matching_names(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"w{ending(form)}"
    Net(HEAD).save(path)
    other = Net(
        HEAD.replace('name: "base"', 'name: "x"').replace('"score"', '"y"').replace('name: "extra"', 'name: "z"')
    )
    with pytest.raises(StallscopeError, match="nothing was copied"):
        other.copy_from(path)


# -- D12: resume ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_d12_the_wrong_file_another_solver_and_a_moved_folder(tmp_path: Path, form: str) -> None:
    text = f"snapshot_format: {form}\n"
    solver = mlp(SGD + text)
    solver.step_on(mlp_batch(0))
    (tmp_path / "a").mkdir()
    weights, state = solver.snapshot(tmp_path / "a" / "net")
    with pytest.raises(StallscopeError, match=r"is not a solver state.*(.|\n)*found:    weights"):
        mlp(SGD).restore(weights)
    with pytest.raises(StallscopeError, match="found:    a solver state"):
        mlp(SGD).restore(state, weights=state)
    for kind in ("Adam", "Nesterov", "AdaGrad"):  # the last two have as many histories, of the same shapes
        other = Solver(f'type: "{kind}" base_lr: 0.1 lr_policy: "fixed" random_seed: 5\n', net=MLP, backend="numpy")
        before = bits(other)
        with pytest.raises(StallscopeError, match=rf"another type\n  expected: {kind}\n  found:    SGD"):
            other.restore(state)
        assert bits(other) == before
    # Caffe's states do not say their type: number and shapes decide.
    write_state(state, replace(read_state(state), solver_type=""))
    with pytest.raises(StallscopeError, match=r"8 \(Adam over 4 parameters\)"):
        mlp(ADAM).restore(state)
    Solver('type: "Nesterov" base_lr: 0.1 lr_policy: "fixed"\n', net=MLP, backend="numpy").restore(state)
    shutil.move(tmp_path / "a", tmp_path / "b")
    resumed = mlp(SGD)
    resumed.restore(tmp_path / "b" / state.name)
    assert bits(resumed) == bits(solver)
    (tmp_path / "b" / weights.name).unlink()
    with pytest.raises(StallscopeError, match="are gone") as caught:
        mlp(SGD).restore(tmp_path / "b" / state.name)
    assert str(tmp_path / "a") in str(caught.value)
    assert str(tmp_path / "b") in str(caught.value)


@pytest.mark.parametrize("form", FORMATS)
def test_d12_a_full_disk_leaves_the_old_snapshot(tmp_path: Path, form: str) -> None:
    solver = mlp(SGD + f"snapshot_format: {form}\n")
    weights, state = solver.snapshot(tmp_path / "net")
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    solver.net.params["ip1"][0].data = np.full((5, 6), 7, np.float32)
    with file_size_limit(100), pytest.raises(StallscopeError, match="could not be written: File too large"):
        solver.snapshot(tmp_path / "net")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept, "no temporary file either"
    mlp(SGD).restore(state, weights=weights)


# -- D13: big messages ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One blob of 25 million floats in each format."""
    folder = tmp_path_factory.mktemp("big")
    text = """
    layer { name: "in" type: "Input" top: "data" input_param { shape { dim: 1 dim: 5000 } } }
    layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
      inner_product_param { num_output: 5000 bias_term: false weight_filler { type: "constant" value: 0.5 } } }
    """
    net = Net(text)
    net.params["ip"][0].data[0, :5] = range(5)
    net.params["ip"][0].data[-1, -1] = -1
    paths = {form: folder / f"big{ending(form)}" for form in FORMATS}
    for path in paths.values():
        net.save(path)
    return paths


@pytest.mark.parametrize("form", FORMATS)
def test_d13_25_million_floats_are_read(big: dict[str, Path], form: str) -> None:
    (array,) = read_weights(big[form])["ip"]
    assert array.shape == (5000, 5000)
    assert array[0, :5].tolist() == [0, 1, 2, 3, 4]
    assert array[-1, -1] == -1
    assert array.mean(dtype=np.float64) == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("form", FORMATS)
def test_d13_a_cut_file_ends_at_a_byte(big: dict[str, Path], form: str, tmp_path: Path) -> None:
    path = tmp_path / f"cut{ending(form)}"
    with big[form].open("rb") as whole:
        path.write_bytes(whole.read(60_000_000))
    with pytest.raises(StallscopeError, match="ends at byte 60000000") as caught:
        read_layers(path)
    assert str(path) in str(caught.value)
    assert "interrupted" in str(caught.value)


def test_d13_more_than_two_gigabytes_is_said_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "huge.caffemodel"
    array = np.zeros(MAX_BYTES // 4 + 1, np.float32)  # never touched, so it takes no memory
    with pytest.raises(StallscopeError, match=r"larger than a protocol buffer may be(.|\n)*snapshot_format: HDF5"):
        write_layers(path, "n", [(caffe_pb2.LayerParameter(name="ip"), [array])])
    assert not path.exists()


def test_d12_the_nets_of_this_file_learn() -> None:
    """The cases above compare bits; they would also agree if nothing were ever updated."""
    assert "ip1" in MLP
    solver = mlp(SGD)
    first = solver.net.params["ip1"][0].data.copy()
    solver.step_on(mlp_batch(0))
    assert (solver.net.params["ip1"][0].data != first).any()
