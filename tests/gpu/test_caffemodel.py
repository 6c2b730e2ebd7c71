"""Weights and solver states: files made by Caffe, old forms, wrong files, damage, and copying by name."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from datasets import caffe_pb2
from gpu import wire
from gpu.blob import Blob
from gpu.caffemodel import copy_weights, read_layers, read_weights, sniff, write_atomically, write_layers
from gpu.solverstate import SolverState, find_weights, read_state, write_state
from profiler.errors import StallscopeError

DATA = Path(__file__).parents[1] / "data"
LENET = DATA / "lenet" / "lenet_iter_100.caffemodel"
STATE = DATA / "lenet" / "lenet_iter_100.solverstate"
LENET_SHAPES = {
    "conv1": [(20, 1, 5, 5), (20,)],
    "conv2": [(50, 20, 5, 5), (50,)],
    "ip1": [(500, 800), (500,)],
    "ip2": [(10, 500), (10,)],
}


def net_of(shapes: dict[str, list[tuple[int, ...]]]) -> Any:
    return SimpleNamespace(params={name: [Blob(shape) for shape in blobs] for name, blobs in shapes.items()})


def numbers(*shape: int) -> np.ndarray:
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


def blob_proto(array: np.ndarray, *, legacy: bool = False) -> Any:
    blob = caffe_pb2.BlobProto(data=array.reshape(-1).tolist())
    if legacy:
        blob.num, blob.channels, blob.height, blob.width = array.shape
    else:
        blob.shape.dim.extend(array.shape)
    return blob


def save(path: Path, **layers: list[np.ndarray]) -> Path:
    """A current weights file written by the protobuf library, not by the code under test."""
    net = caffe_pb2.NetParameter(name="net")
    for name, arrays in layers.items():
        net.layer.add(name=name, type="InnerProduct").blobs.extend(blob_proto(array) for array in arrays)
    path.write_bytes(net.SerializeToString())
    return path


# -- reading --------------------------------------------------------------------------------------------------------


def test_weights_of_caffe_are_read_as_the_protobuf_library_reads_them() -> None:
    ours = read_weights(LENET)
    theirs = caffe_pb2.NetParameter.FromString(LENET.read_bytes())
    assert {name: [blob.shape for blob in blobs] for name, blobs in ours.items()} == LENET_SHAPES
    for layer in theirs.layer:
        for index, blob in enumerate(layer.blobs):
            array = ours[layer.name][index]
            assert array.dtype == np.float32
            assert array.flags.writeable
            np.testing.assert_array_equal(array.reshape(-1), np.array(blob.data, np.float32))


@pytest.mark.parametrize("version", ["V0", "V1"])
def test_old_layers_with_four_axis_blobs(tmp_path: Path, version: str) -> None:
    weight, bias = numbers(1, 1, 3, 4), numbers(1, 1, 1, 3)
    net = caffe_pb2.NetParameter(name="old")
    for name, kind in (("ip", "INNER_PRODUCT"), ("more", "INNER_PRODUCT"), ("relu", "RELU")):
        layer = net.layers.add()
        if version == "V0":
            layer.layer.name, layer.layer.type = name, kind.replace("_", "").lower()
            layer = layer.layer
        else:
            layer.name, layer.type = name, caffe_pb2.V1LayerParameter.LayerType.Value(kind)
        if name != "relu":
            layer.blobs.extend([blob_proto(weight, legacy=True), blob_proto(bias, legacy=True)])
    path = tmp_path / "old.caffemodel"
    path.write_bytes(net.SerializeToString())
    assert sniff(path) == "caffemodel"
    layers = read_layers(path)
    assert [layer.name for layer in layers] == ["ip", "more"]
    assert all(blob.legacy for layer in layers for blob in layer.blobs)
    target = net_of({"ip": [(3, 4), (3,)], "more": [(3, 4), (3,)]})
    copy_weights(target, path)
    for name in ("ip", "more"):
        np.testing.assert_array_equal(target.params[name][0].data, weight.reshape(3, 4))
        np.testing.assert_array_equal(target.params[name][1].data, bias.reshape(3))


def test_weights_of_types_that_are_not_known_here_are_read(tmp_path: Path) -> None:
    net = caffe_pb2.NetParameter()
    net.layers.add(name="v1").blobs.append(blob_proto(numbers(1, 1, 1, 2), legacy=True))
    path = tmp_path / "fork.caffemodel"
    path.write_bytes(net.SerializeToString())
    assert list(read_weights(path)) == ["v1"]


@pytest.mark.parametrize("old", ["V0", "V1"])
def test_weights_of_two_generations_in_one_file_are_refused(tmp_path: Path, old: str) -> None:
    net = caffe_pb2.NetParameter()
    net.layer.add(name="new")
    layer = net.layers.add()
    (layer.layer if old == "V0" else layer).name = "old"
    path = tmp_path / "mixed.caffemodel"
    path.write_bytes(net.SerializeToString())
    with pytest.raises(StallscopeError, match=r"both 'layers' .*and 'layer'"):
        read_weights(path)


def test_doubles_unpacked_numbers_and_split_runs(tmp_path: Path) -> None:
    values = numbers(2, 3)
    double = caffe_pb2.BlobProto(double_data=values.reshape(-1).tolist())
    double.shape.dim.extend(values.shape)
    shape = caffe_pb2.BlobProto()
    shape.shape.dim.extend(values.shape)
    raw = values.astype("<f4").tobytes()
    unpacked = b"".join(wire.varint(5 << 3 | wire.FIXED32) + raw[at : at + 4] for at in range(0, 24, 4))
    split = wire.header(5, 8) + raw[:8] + wire.header(5, 16) + raw[8:]
    dims_unpacked = wire.header(7, 4) + bytes([8, 2, 8, 3])
    body = b""
    for blob in (
        double.SerializeToString(),
        shape.SerializeToString() + unpacked,
        shape.SerializeToString() + split,
        dims_unpacked + split,
    ):
        body += wire.header(7, len(blob)) + blob
    layer = caffe_pb2.LayerParameter(name="ip", type="InnerProduct").SerializeToString() + body
    path = tmp_path / "odd.caffemodel"
    path.write_bytes(wire.header(100, len(layer)) + layer)
    blobs = read_weights(path)["ip"]
    assert len(blobs) == 4
    for blob in blobs:
        np.testing.assert_array_equal(blob, values)


@pytest.mark.parametrize("kept", [1, 100, 5_000, 1_700_000, 1_724_993])
def test_a_truncated_file_says_where_it_ends(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "cut.caffemodel"
    path.write_bytes(LENET.read_bytes()[:kept])
    with pytest.raises(StallscopeError, match=r"ends at byte|is not weights"):
        read_weights(path)


def test_shape_and_contents_that_disagree(tmp_path: Path) -> None:
    net = caffe_pb2.NetParameter()
    blob = net.layer.add(name="ip").blobs.add(data=[1.0, 2.0, 3.0])
    blob.shape.dim.extend([2, 2])
    path = tmp_path / "bad.caffemodel"
    path.write_bytes(net.SerializeToString())
    with pytest.raises(StallscopeError, match=r"blob 0 of layer 'ip': shape and contents disagree"):
        read_weights(path)


# -- telling files apart ---------------------------------------------------------------------------------------------


def other_files(folder: Path) -> dict[str, Path]:
    files = {
        "text": folder / "net.prototxt",
        "hdf5": folder / "net.caffemodel.h5",
        "empty": folder / "empty",
        "unknown": folder / "noise",
    }
    files["text"].write_text('name: "LeNet"\nlayer { name: "a" }\n')
    files["hdf5"].write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    files["empty"].write_bytes(b"")
    files["unknown"].write_bytes(bytes(range(7, 256)))
    return {**files, "blob": DATA / "proto" / "mean_mnist.binaryproto"}


def test_files_are_told_apart_by_their_contents(tmp_path: Path) -> None:
    assert sniff(LENET) == "caffemodel"
    assert sniff(STATE) == "solverstate"
    for kind, path in other_files(tmp_path).items():
        assert sniff(path) == kind
    fresh = tmp_path / "s"
    write_state(fresh, SolverState(0, "", []))
    assert sniff(fresh) == "solverstate"


def test_the_wrong_file_is_named_as_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(StallscopeError, match=r"found:    a solver state") as caught:
        read_weights(STATE)
    assert ".caffemodel" in str(caught.value)
    with pytest.raises(StallscopeError, match=r"found:    weights"):
        read_state(LENET)
    for path in other_files(tmp_path).values():
        for read in (read_weights, read_state):
            with pytest.raises(StallscopeError, match="is not"):
                read(path)
    with pytest.raises(StallscopeError, match="does not exist"):
        read_weights(tmp_path / "missing")
    with pytest.raises(StallscopeError, match="is a folder"):
        read_weights(tmp_path)


# -- writing --------------------------------------------------------------------------------------------------------


def test_a_round_trip_keeps_every_bit_and_the_protobuf_library_agrees(tmp_path: Path) -> None:
    original = caffe_pb2.NetParameter.FromString(LENET.read_bytes())
    weights = read_weights(LENET)
    layers = []
    for layer in original.layer:
        bare = caffe_pb2.LayerParameter()
        bare.CopyFrom(layer)
        bare.ClearField("blobs")
        layers.append((bare, weights.get(layer.name, [])))
    path = tmp_path / "copy.caffemodel"
    write_layers(path, original.name, layers)
    assert caffe_pb2.NetParameter.FromString(path.read_bytes()) == original
    again = read_weights(path)
    for name, blobs in weights.items():
        for one, other in zip(blobs, again[name], strict=True):
            assert one.tobytes() == other.tobytes()


def test_special_values_scalars_and_empty_blobs_survive(tmp_path: Path) -> None:
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)
    arrays = [special, np.float32(3).reshape(()), np.zeros((0, 4), np.float32), special[::-1]]
    path = tmp_path / "w.caffemodel"
    write_layers(path, "n", [(caffe_pb2.LayerParameter(name="odd"), arrays)])
    for one, other in zip(arrays, read_weights(path)["odd"], strict=True):
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def test_a_solver_state_round_trip_and_the_protobuf_library_agrees(tmp_path: Path) -> None:
    state = read_state(STATE)
    assert (state.iteration, state.learned_net) == (100, "lenet/lenet_iter_100.caffemodel")
    assert [array.shape for array in state.history] == [shape for blobs in LENET_SHAPES.values() for shape in blobs]
    path = tmp_path / "copy.solverstate"
    write_state(path, state)
    theirs = caffe_pb2.SolverState.FromString(path.read_bytes())
    assert theirs == caffe_pb2.SolverState.FromString(STATE.read_bytes())
    assert path.stat().st_size == STATE.stat().st_size


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.caffemodel"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StallscopeError, match="No space left"):
        write_atomically(path, [b"new"])
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["w.caffemodel"]


# -- copying by name --------------------------------------------------------------------------------------------------


def test_copy_reports_what_was_copied_ignored_and_left(tmp_path: Path) -> None:
    path = save(tmp_path / "w", a=[numbers(2, 3), numbers(2)], gone=[numbers(4)])
    net = net_of({"a": [(2, 3), (2,)], "relu": [], "new": [(5,)]})
    report = copy_weights(net, path)
    assert (report.copied, report.ignored, report.at_init) == (["a"], ["gone"], ["new"])
    assert "gone" in str(report)
    assert "new" in str(report)
    np.testing.assert_array_equal(net.params["a"][0].data, numbers(2, 3))
    np.testing.assert_array_equal(net.params["a"][1].data, numbers(2))
    with pytest.raises(StallscopeError, match="new: not in the file"):
        copy_weights(net, path, complete=True)


def test_all_mismatches_are_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    path = save(tmp_path / "w", fine=[numbers(2)], head=[numbers(21, 4), numbers(21)], more=[numbers(1)])
    net = net_of({"fine": [(2,)], "head": [(2, 4), (2,)], "more": [(1,), (1,)]})
    with pytest.raises(StallscopeError) as caught:
        copy_weights(net, path)
    text = str(caught.value)
    assert "in 3 place(s)" in text
    assert "head.0: (2, 4) in the net, (21, 4) in the file (another size)" in text
    assert "head.1: (2,) in the net, (21,) in the file" in text
    assert "more: 2 blobs in the net, 1 in the file" in text
    assert not net.params["fine"][0].data.any()


def test_same_size_in_another_shape_needs_reshape(tmp_path: Path) -> None:
    path = save(tmp_path / "w", a=[numbers(2, 6)])
    net = net_of({"a": [(3, 4)]})
    with pytest.raises(StallscopeError, match="reshape=True"):
        copy_weights(net, path)
    copy_weights(net, path, reshape=True)
    np.testing.assert_array_equal(net.params["a"][0].data, numbers(3, 4))


def test_leading_ones_are_only_forgiven_in_the_old_form(tmp_path: Path) -> None:
    path = save(tmp_path / "w", a=[numbers(1, 1, 3, 4)])
    with pytest.raises(StallscopeError, match="same size"):
        copy_weights(net_of({"a": [(3, 4)]}), path)


def test_nothing_in_common_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path / "w", conv1=[numbers(2)])
    with pytest.raises(StallscopeError, match="nothing was copied") as caught:
        copy_weights(net_of({"Conv1": [(2,)]}), path)
    assert "Conv1" in str(caught.value)
    assert "conv1" in str(caught.value)


# -- where the weights of a state are --------------------------------------------------------------------------------


def test_weights_are_found_beside_a_moved_state(tmp_path: Path) -> None:
    state = SolverState(5, str(tmp_path / "old" / "iter_5.caffemodel"), [])
    new = tmp_path / "new"
    new.mkdir()
    with pytest.raises(StallscopeError, match="are gone") as caught:
        find_weights(new / "iter_5.solverstate", state)
    assert str(tmp_path / "old") in str(caught.value)
    (new / "iter_5.caffemodel").write_bytes(b"")
    assert find_weights(new / "iter_5.solverstate", state) == new / "iter_5.caffemodel"
    (new / "iter_5.caffemodel").unlink()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "iter_5.caffemodel").write_bytes(b"")
    assert find_weights(new / "iter_5.solverstate", state) == tmp_path / "old" / "iter_5.caffemodel"


def test_a_bare_name_is_never_looked_for_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "iter_5.caffemodel").write_bytes(b"of another run")
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StallscopeError, match="are gone"):
        find_weights(tmp_path / "run" / "iter_5.solverstate", SolverState(5, "iter_5.caffemodel", []))
