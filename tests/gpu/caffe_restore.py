"""What real Caffe 1.0 does when it restores a solver, step by step, made of protobuf and h5py and of nothing of ours.

Every ``assert`` stands for an end of Caffe's: a CHECK of its own, or a call of the HDF5 library that fails.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from datasets import caffe_pb2

MAX_AXES = 32
Shape = tuple[int, ...]


@dataclass(frozen=True)
class CaffeNet:
    """A net and solver as Caffe has built them, before it restores.

    ``layers``: shapes of the blobs of each layer, in order, layers without parameters included. ``owners``: who owns a
    blob that is shared, ``{(layer, index): (layer, index)}``. ``histories``: blobs kept for each parameter.
    """

    layers: dict[str, list[Shape]]
    owners: dict[tuple[str, int], tuple[str, int]]
    histories: int = 1

    @property
    def learned(self) -> list[tuple[str, int]]:
        """Parameters in Caffe's order, each shared one once."""
        return [(n, i) for n, shapes in self.layers.items() for i in range(len(shapes)) if (n, i) not in self.owners]

    @property
    def history(self) -> list[Shape]:
        """Shapes of the histories."""
        return [self.layers[name][i] for name, i in self.learned] * self.histories


@dataclass
class Restored:
    """What Caffe has in its memory afterwards; blobs by (layer, index)."""

    iteration: int
    current_step: int
    history: list[np.ndarray]
    blobs: dict[tuple[str, int], np.ndarray]


def restore(net: CaffeNet, state: Path, folder: Path) -> Restored:
    """``Solver::Restore``, of a Caffe that was started in ``folder``: the end of the name decides the format."""
    return (_from_hdf5 if state.name.endswith(".h5") else _from_binary)(net, state, folder)


def _from_binary(net: CaffeNet, path: Path, folder: Path) -> Restored:
    state = caffe_pb2.SolverState()
    assert state.MergeFromString(path.read_bytes()) == path.stat().st_size
    assert state.HasField("iter")
    assert state.HasField("learned_net"), "without it Caffe goes on from the fillers' values, silently"
    blobs = _weights(net, folder / state.learned_net)
    assert len(state.history) == len(net.history), "Incorrect length of history blobs."
    # (Caffe reshapes a history to what the file says, and the update then reads as many values as the parameter has.)
    history = [_blob(proto, want) for proto, want in zip(state.history, net.history, strict=True)]
    return Restored(state.iter, state.current_step, history, blobs)


def _weights(net: CaffeNet, path: Path) -> dict[tuple[str, int], np.ndarray]:
    """``Net::CopyTrainedLayersFrom``: what the file is, its bytes say."""
    assert path.is_file(), f"File not found: {path}"
    if path.read_bytes()[:8] == b"\x89HDF\r\n\x1a\n":
        return _hdf5_weights(net, path)
    stored = caffe_pb2.NetParameter()
    assert stored.MergeFromString(path.read_bytes()) == path.stat().st_size
    assert not stored.layers, "an old net, which Caffe would upgrade first"
    found: dict[tuple[str, int], np.ndarray] = {}
    for layer in stored.layer:
        if layer.name not in net.layers:
            continue  # "Ignoring source layer"
        shapes = net.layers[layer.name]
        assert len(layer.blobs) == len(shapes), f"Incompatible number of blobs for layer {layer.name}"
        for i, (proto, want) in enumerate(zip(layer.blobs, shapes, strict=True)):
            found[net.owners.get((layer.name, i), (layer.name, i))] = _blob(proto, want)
    return found


def _blob(proto: Any, want: Shape) -> np.ndarray:
    """``Blob::FromProto`` without reshaping."""
    if any(proto.HasField(name) for name in ("num", "channels", "height", "width")):
        assert len(want) <= 4
        assert (proto.num, proto.channels, proto.height, proto.width) == (1,) * (4 - len(want)) + want
    else:
        assert tuple(proto.shape.dim) == want
    assert not proto.double_data
    assert len(proto.data) == math.prod(want)
    assert len(proto.diff) in (0, math.prod(want))
    return np.array(proto.data, np.float32).reshape(want)


def _from_hdf5(net: CaffeNet, path: Path, folder: Path) -> Restored:
    with h5py.File(path, "r") as file:
        iteration = _int(file, "iter")
        assert "learned_net" in file
        blobs = _weights(net, folder / _string(file, "learned_net"))
        current_step = _int(file, "current_step")
        group = file["history"]
        assert isinstance(group, h5py.Group)
        assert len(group) == len(net.history), "Incorrect length of history blobs."
        history = [_nd(group, str(i), want) for i, want in enumerate(net.history)]
    return Restored(iteration, current_step, history, blobs)


def _hdf5_weights(net: CaffeNet, path: Path) -> dict[tuple[str, int], np.ndarray]:
    found: dict[tuple[str, int], np.ndarray] = {}
    with h5py.File(path, "r") as file:
        data = file["data"]
        assert isinstance(data, h5py.Group)
        for name in data:
            if name not in net.layers:
                continue
            group = data[name]
            assert isinstance(group, h5py.Group)
            assert len(group) <= len(net.layers[name]), f"Incompatible number of blobs for layer {name}"
            for i, want in enumerate(net.layers[name]):
                if str(i) not in group:
                    assert (name, i) in net.owners, f"Incompatible number of blobs for layer {name}"
                    continue
                found[net.owners.get((name, i), (name, i))] = _nd(group, str(i), want)
    return found


def _nd(group: Any, name: str, want: Shape) -> np.ndarray:
    """``hdf5_load_nd_dataset``."""
    assert name in group, f"Failed to find HDF5 dataset {name}"
    dataset = group[name]
    assert len(dataset.shape) <= MAX_AXES
    assert dataset.id.get_type().get_class() in (h5py.h5t.FLOAT, h5py.h5t.INTEGER), "Unsupported datatype class"
    assert dataset.shape == want, "shape mismatch"
    return dataset[()].astype(np.float32)


def _int(file: Any, name: str) -> int:
    """``H5LTread_dataset_int`` reads into one int, whatever the data set holds."""
    assert name in file, f"Failed to load int dataset with name {name}"
    assert file[name].id.get_type().get_class() == h5py.h5t.INTEGER
    assert file[name].size == 1
    return int(file[name][()].reshape(()))


def _string(file: Any, name: str) -> str:
    """``H5LTread_dataset_string`` wants a text of fixed length, and C's string ends at the first zero."""
    kind = file[name].id.get_type()
    assert kind.get_class() == h5py.h5t.STRING
    assert not kind.is_variable_str()
    raw = np.empty((), f"S{kind.get_size()}")
    file[name].id.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, mtype=kind)
    text = raw.tobytes()
    assert b"\0" in text
    return os.fsdecode(text.split(b"\0", 1)[0])


def same(one: Iterable[np.ndarray], other: Iterable[np.ndarray]) -> bool:
    """Bit for bit."""
    return [a.tobytes() for a in one] == [b.tobytes() for b in other]
