"""What the acceptance on a GPU runs: layers of the golden cases, larger single layers, and a small net to train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpu.backend import Backend
from gpu.fingerprint import fingerprint_parts
from gpu.net import Net
from gpu.solver import Solver

GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "layers"
REFUSED = {"pool_max_k2s3_EMPTYWINDOW", "pool_ave_k2s3_EMPTYWINDOW", "bn_test_zero_factor"}


@dataclass(frozen=True)
class Amount:
    """How much to do. ``scale``: edge of images and matrices, relative to a full run."""

    repeats: int = 1000
    steps: int = 1000
    scale: float = 1.0
    cases: int | None = None

    def edge(self, full: int) -> int:
        return max(8, round(full * self.scale))


QUICK = Amount(repeats=3, steps=30, scale=0.05, cases=12)


def cases(amount: Amount) -> list[str]:
    names = sorted(path.stem for path in GOLDEN.glob("*.npz") if path.stem not in REFUSED)
    return names if amount.cases is None else names[:: max(1, len(names) // amount.cases)]


def load(case: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{case}.npz") as archive:
        return {key: archive[key] for key in archive.files}


def build(golden: dict[str, np.ndarray], backend: Backend) -> Net:
    net = Net(str(golden["prototxt"]), str(golden["phase"]), backend=backend, seed=5)
    for i, blob in enumerate(net.params.get("L", [])):
        blob.data = golden[f"p{i}"]
    for name, blobs in net.params.items():
        if name in golden:
            blobs[0].data = golden[name]
    return net


def once(net: Net, golden: dict[str, np.ndarray]) -> dict[str, Any]:
    """Forward and backward; the arrays that come out, where they lie."""
    net.iteration = 0
    for name in net.inputs:
        net.blobs[name].data = golden[f"in_{name}"]
    net.forward_only()
    out = {f"out_{name}": net.blobs[name].device_data for name in net.outputs}
    diffs = {key[5:]: golden[key] for key in golden if key.startswith("dout_")}
    if diffs:
        for name, diff in diffs.items():
            net.blobs[name].diff = diff
        net.clear_param_diffs()
        net.backward_only()
        out |= {f"din_{name}": net.blobs[name].device_diff for name in net.inputs if f"din_{name}" in golden}
        for i, blob in enumerate(net.params.get("L", [])):
            if f"dp{i}" in golden:
                out[f"dp{i}"] = blob.device_diff
    return out


def large_ops(amount: Amount) -> Iterator[tuple[str, str, dict[str, tuple[int, ...]]]]:
    """Single layers large enough to fill a device: name, prototxt of the layer, shapes of its inputs."""
    e = amount.edge(56)
    image = {"x": (16, 64, e, e)}
    one = 'bottom: "x" top: "y"'
    yield (
        "convolution",
        f'type: "Convolution" {one} convolution_param {{ num_output: 64 kernel_size: 3 pad: 1 }}',
        image,
    )
    grouped = "num_output: 64 kernel_size: 5 pad: 2 group: 2"
    yield "convolution, groups", f'type: "Convolution" {one} convolution_param {{ {grouped} }}', image
    depthwise = "num_output: 64 kernel_size: 3 pad: 1 group: 64"
    yield "convolution, depthwise", f'type: "Convolution" {one} convolution_param {{ {depthwise} }}', image
    up = "num_output: 16 kernel_size: 4 stride: 2 pad: 1"
    yield "deconvolution", f'type: "Deconvolution" {one} convolution_param {{ {up} }}', image
    for pool in ("MAX", "AVE"):
        window = f"pool: {pool} kernel_size: 3 stride: 2"
        yield f"pooling {pool}", f'type: "Pooling" {one} pooling_param {{ {window} }}', image
    yield "LRN", f'type: "LRN" {one} lrn_param {{ local_size: 5 }}', image
    yield "BatchNorm", f'type: "BatchNorm" {one}', image
    yield "ReLU", f'type: "ReLU" {one}', image
    yield "Dropout", f'type: "Dropout" {one}', image
    yield (
        "InnerProduct",
        f'type: "InnerProduct" {one} inner_product_param {{ num_output: 512 }}',
        {"x": (64, 4 * e * e)},
    )
    yield "Softmax", f'type: "Softmax" {one}', {"x": (64, 1000)}
    table = "num_output: 64 input_dim: 50"
    yield "Embed", f'type: "Embed" {one} embed_param {{ {table} }}', {"x": (amount.edge(4096),)}
    yield "BatchReindex", 'type: "BatchReindex" bottom: "x" bottom: "i" top: "y"', {"x": (64, 4096), "i": (e * 16,)}


def op_net(layer: str, inputs: dict[str, tuple[int, ...]], backend: Backend) -> tuple[Net, dict[str, np.ndarray]]:
    """A net of one layer, and values for it as a golden file has them."""
    texts = ["force_backward: true"]
    for name, shape in inputs.items():
        dims = " ".join(f"dim: {size}" for size in shape)
        texts.append(f'layer {{ name: "in {name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims} }} }} }}')
    net = Net("\n".join([*texts, f'layer {{ name: "L" {layer} }}']), "TRAIN", backend=backend, seed=5)
    rng = np.random.default_rng(3)
    values = {}
    for name, shape in inputs.items():
        picks = name == "i" or "Embed" in layer
        values[f"in_{name}"] = rng.integers(0, 50, shape) if picks else rng.standard_normal(shape)
        values[f"din_{name}"] = np.empty(0)
    for i, blob in enumerate(net.params.get("L", [])):
        blob.data = rng.standard_normal(blob.shape).astype(np.float32) * np.float32("BatchNorm" not in layer)
        values[f"dp{i}"] = np.empty(0)
    values["dout_y"] = rng.standard_normal(net.blobs["y"].shape)
    if "Embed" in layer:
        del values["din_x"]
    values.pop("din_i", None)
    return net, {name: np.asarray(value, np.float32) for name, value in values.items()}


NET = """
layer { name: "in" type: "Input" top: "data" top: "label" input_param {
  shape { dim: 32 dim: 1 dim: 28 dim: 28 } shape { dim: 32 } } }
layer { name: "c1" type: "Convolution" bottom: "data" top: "c1" convolution_param {
  num_output: 20 kernel_size: 5 weight_filler { type: "xavier" } } }
layer { name: "p1" type: "Pooling" bottom: "c1" top: "p1" pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "n1" type: "LRN" bottom: "p1" top: "n1" }
layer { name: "c2" type: "Convolution" bottom: "n1" top: "c2" convolution_param {
  num_output: 20 kernel_size: 3 group: 20 weight_filler { type: "xavier" } } }
layer { name: "r2" type: "ReLU" bottom: "c2" top: "c2" }
layer { name: "p2" type: "Pooling" bottom: "c2" top: "p2" pooling_param { pool: AVE kernel_size: 3 stride: 2 } }
layer { name: "d2" type: "Dropout" bottom: "p2" top: "p2" }
layer { name: "ip" type: "InnerProduct" bottom: "p2" top: "ip" inner_product_param {
  num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVERS = {
    kind: f'type: "{kind}" base_lr: 0.01 lr_policy: "fixed" weight_decay: 0.0005 {extra}\nrandom_seed: 7 max_iter: 9999'
    for kind, extra in {
        "SGD": "momentum: 0.9",
        "Nesterov": "momentum: 0.9",
        "AdaGrad": "",
        "RMSProp": "rms_decay: 0.98",
        "AdaDelta": "momentum: 0.95 delta: 1e-6",
        "Adam": "momentum: 0.9 momentum2: 0.999 delta: 1e-8",
    }.items()
}


def batch(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step % 16)
    labels = rng.integers(0, 10, 32)
    data = rng.standard_normal((32, 1, 28, 28)) + labels[:, None, None, None] * 0.1
    return {"data": data.astype(np.float32), "label": labels.astype(np.float32)}


def trajectory(kind: str, backend: Backend, steps: int, precision: str = "fp32") -> tuple[list[float], int]:
    """Losses, and the hash of the final parameters."""
    solver = Solver(SOLVERS[kind], net=NET, backend=backend, precision=precision)
    losses = [float(solver.step_on(batch(step))) for step in range(steps)]
    parts = [blob.device_data for blobs in solver.net.params.values() for blob in blobs]
    return losses, fingerprint_parts(*parts, xp=backend.xp)
