"""Layers in float64 are float64: held to differences of their own outputs, and to Caffe's results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpu.error_bounds import distance
from gpu.isolated import Double, Work, run_double
from gpu.probe import bare_graph, quiet_net
from gpu.prototxt import filter_net, load_net
from gpu.wiring import Node

GOLDEN = Path(__file__).parents[1] / "data" / "layers"
REFUSED = {"pool_max_k2s3_EMPTYWINDOW", "pool_ave_k2s3_EMPTYWINDOW", "bn_test_zero_factor"}
OTHER_DRAWS = {"dropout_train"}
KINKS = {"contrastive", "pool_max_ties"}  # no derivative there, or one that Caffe smooths
CASES = sorted(path.stem for path in GOLDEN.glob("*.npz") if path.stem not in REFUSED)


def load(case: str) -> tuple[Node, Work, dict[str, np.ndarray]]:
    with np.load(GOLDEN / f"{case}.npz") as archive:
        golden = {key: archive[key] for key in archive.files}
    text, phase = str(golden["prototxt"]), str(golden["phase"])
    net = quiet_net(text, phase)
    for i, blob in enumerate(net.params.get("L", [])):
        blob.data = golden[f"p{i}"]
    for name, blobs in net.params.items():
        if name in golden:
            blobs[0].data = golden[name]
    graph = bare_graph(filter_net(load_net(text), phase), {}, 0)
    double = Double(graph, {name: [blob.data for blob in blobs] for name, blobs in net.params.items()})
    diffs = {key[5:]: golden[key] for key in golden if key.startswith("dout_")}
    works = list(double.works({name: golden[f"in_{name}"] for name in graph.inputs}, diffs, rounded=True))
    node, work = next((node, work) for node, work in works if node.layer.name == "L")
    return node, work, golden


def total(node: Node, work: Work, bottom: int, moved: np.ndarray) -> float:
    bottoms = [*work.bottoms[:bottom], moved, *work.bottoms[bottom + 1 :]]
    found = run_double(node, replace(work, bottoms=bottoms, backward=False))
    pairs = ((found.forward[f"top {i}"], diff) for i, diff in enumerate(work.top_diffs))
    return float(sum((top * (diff if top.shape == diff.shape else diff[: len(top)])).sum() for top, diff in pairs))


@pytest.mark.parametrize("case", CASES)
def test_float64_layers(case: str) -> None:
    node, work, golden = load(case)
    found = run_double(node, work)
    for i, top in enumerate(node.tops):
        if f"out_{top.name}" in golden and case not in OTHER_DRAWS:
            assert distance(found.forward[f"top {i}"], golden[f"out_{top.name}"].astype(np.float64)).relative < 3e-6
    for array in (*found.forward.values(), *found.backward.values()):
        assert array.dtype == np.float64
    if case in KINKS:
        return
    rng = np.random.default_rng(0)
    for i, wanted in enumerate(work.wants):
        if wanted:
            along, step = rng.standard_normal(work.bottoms[i].shape), 1e-6
            up, down = (total(node, work, i, work.bottoms[i] + sign * step * along) for sign in (1, -1))
            gradient = found.backward[f"bottom {i} gradient"]
            # In float32 the difference would drown in rounding: 1e-7 / 1e-6 of the outputs.
            size = np.linalg.norm(gradient) + 1e-3 * np.linalg.norm(work.top_diffs[0])
            assert abs((up - down) / (2 * step) - (gradient * along).sum()) <= 1e-5 * size


def test_enough_cases() -> None:
    assert len(CASES) > 100
