"""Caffe's own training runs, repeated: the solvers and the batches in the order of its databases."""

from __future__ import annotations

import gzip
import lzma
import shutil
from functools import cache
from pathlib import Path

import numpy as np

from gpu.caffemodel import read_weights
from gpu.solver import Solver

DATA = Path(__file__).parents[1] / "data"
CIFAR = DATA / "cifar10_quick"
Batch = dict[str, np.ndarray]


@cache
def idx(prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8[N, 1, 28, 28] and labels of a part of MNIST."""
    images, labels = (
        gzip.decompress((DATA / "mnist" / f"{prefix}-{name}-ubyte.gz").read_bytes())
        for name in ("images-idx3", "labels-idx1")
    )
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 1, 28, 28)
    return pixels, np.frombuffer(labels, np.uint8, offset=8)


def mnist(step: int, batch: int = 64, prefix: str = "train") -> Batch:
    """Batch ``step`` in the order of Caffe's database, which wraps round."""
    images, labels = idx(prefix)
    at = (step * batch + np.arange(batch)) % len(images)
    return {"data": images[at].astype(np.float32) * np.float32(0.00390625), "label": labels[at].astype(np.int32)}


def lenet(solver: str = "lenet_solver") -> Solver:
    """LeNet as Caffe trained it, from the weights that Caffe began with."""
    made = Solver(
        DATA / "proto" / f"{solver}.prototxt",
        backend="numpy",
        net_root=DATA,
        input_shapes={"data": (64, 1, 28, 28), "label": (64,)},
        test_input_shapes={"data": (100, 1, 28, 28), "label": (100,)},
    )
    made.net.copy_from(DATA / "lenet" / "lenet_iter_0.caffemodel")
    return made


def lenet_test(solver: Solver) -> dict[str, float]:
    """Caffe's test of LeNet: ten batches of 100."""
    return solver.test(0, (mnist(step, 100, "t10k") for step in range(10)))


@cache
def _crops() -> tuple[np.ndarray, np.ndarray]:
    from datasets import caffe_pb2

    stored = np.load(CIFAR / "crops32.npz")
    mean = caffe_pb2.BlobProto.FromString((CIFAR / "mean_32.binaryproto").read_bytes())
    centred = stored["images"].astype(np.float32) - np.array(mean.data, np.float32).reshape(3, 32, 32)
    return centred, stored["labels"].astype(np.int32)


def crops(step: int, batch: int = 32) -> Batch:
    """Batch ``step`` of cifar10_quick's data: photo crops less their mean, in the order of Caffe's database."""
    images, labels = _crops()
    at = (step * batch + np.arange(batch)) % len(images)
    return {"data": images[at], "label": labels[at]}


def cifar() -> Solver:
    """cifar10_quick as Caffe trained it, from the weights that Caffe began with."""
    shapes = {"data": (32, 3, 32, 32), "label": (32,)}
    made = Solver(
        CIFAR / "cifar10_quick_solver.prototxt",
        net=(CIFAR / "cifar10_quick_train_test.prototxt"),
        backend="numpy",
        input_shapes=shapes,
        test_input_shapes=shapes,
    )
    made.net.copy_from(CIFAR / "cifar10_quick_iter_0.caffemodel")
    return made


def restored(solver: Solver, name: str, folder: Path) -> Solver:
    """``solver`` at a snapshot of Caffe's in tests/data, ``lenet/lenet_iter_0``, restored from the state file.

    Weights and histories are other ones before, so that what is not restored shows.
    """
    (state,) = DATA.glob(f"{name}.solverstate*")
    if state.suffix == ".xz":
        shutil.copy(DATA / f"{name}.caffemodel", folder)
        unpacked = folder / state.stem
        unpacked.write_bytes(lzma.decompress(state.read_bytes()))
        state = unpacked
    for param, history in zip(solver.net.learnable, solver.history, strict=True):
        param.blob.data = np.full(param.blob.shape, 7, np.float32)
        history[...] = 7
    solver.restore(state)
    return solver


def distance(solver: Solver, weights: dict[str, np.ndarray]) -> float:
    """The largest, over parameters, of |ours − theirs| / |theirs| (Euclidean norms); ``weights`` by ``layer.index``."""
    norm = np.linalg.norm
    return max(
        float(norm(param.blob.data - weights[param.name]) / norm(weights[param.name])) for param in solver.net.learnable
    )


def by_name(path: Path) -> dict[str, np.ndarray]:
    """The weights of a file by ``layer.index``."""
    return {f"{layer}.{i}": array for layer, blobs in read_weights(path).items() for i, array in enumerate(blobs)}
