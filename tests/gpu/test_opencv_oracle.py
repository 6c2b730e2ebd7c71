"""Our weights files in a program of others: OpenCV's own importer of Caffe's nets, in C++, reads and runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.net import Net
from gpu.prototxt import filter_net, load_net
from tests.gpu import torch_nets
from tests.gpu.test_big_nets import NETS, SIZES, build
from tests.gpu.test_layers import error
from tests.gpu.training import DATA

pytestmark = pytest.mark.oracle
LIMIT = 1e-5
"""Relative L2 of the scores; sums in another order over up to 50 layers: 8e-7 was the worst seen."""
LARGE = ("alexnet", "caffenet", "vgg16")  # a quarter to half a GB of weights, of the same layers as the others


def opencv() -> Any:
    cv2 = pytest.importorskip("cv2")
    if not hasattr(cv2.dnn, "readNetFromCaffe"):
        pytest.skip(f"OpenCV {cv2.__version__} no longer reads Caffe's files: opencv-python-headless<5")
    return cv2


def deployed(name: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """The net from its data to its scores, as texts for deployment have it; and the name of the scores."""
    net = filter_net(load_net(NETS / f"{name}.prototxt"), "TEST").net
    kept = [layer for layer in net.layer if layer.bottom and "label" not in layer.bottom]
    dims = " ".join(f"dim: {size}" for size in shape)
    head = f'layer {{ name: "data" type: "Input" top: "data" input_param {{ shape {{ {dims} }} }} }}\n'
    return head + "\n".join(f"layer {{\n{layer}}}" for layer in kept), kept[-1].top[0]


def run(cv2: Any, text: str, weights: Path, data: np.ndarray, scores: str) -> np.ndarray:
    prototxt = weights.with_name("deploy.prototxt")
    prototxt.write_text(text)
    net = cv2.dnn.readNetFromCaffe(str(prototxt), str(weights))
    net.setPreferableBackend(cv2.dnn.DNN_BACKEND_OPENCV)
    net.setInput(data)
    return net.forward(scores)


@pytest.mark.parametrize("name", [name for name in SIZES if name not in LARGE])
def test_opencv_computes_our_scores_from_our_weights(name: str, tmp_path: Path) -> None:
    cv2 = opencv()
    net = build(name, "TEST", SIZES[name][2], 2)
    torch_nets.randomise(net, 1)
    data = np.random.default_rng(2).standard_normal(net.blobs["data"].shape, np.float32)
    text, scores = deployed(name, data.shape)
    net.save(tmp_path / "ours.caffemodel")
    net.forward(data=data, label=np.zeros(2, np.int32))
    ours = net.blobs[scores].data
    assert np.abs(ours).max() > 0
    assert error(run(cv2, text, tmp_path / "ours.caffemodel", data, scores), ours) <= LIMIT
    # The comparison sees a file that is a little wrong: one filter of the first layer is another.
    first = next(layer for layer in net.layers if layer.blobs)
    first.blobs[0].data[0] *= 1.1
    net.save(tmp_path / "other.caffemodel")
    assert error(run(cv2, text, tmp_path / "other.caffemodel", data, scores), ours) > LIMIT


def test_weights_of_caffe_are_the_same_in_its_file_and_in_ours(tmp_path: Path) -> None:
    cv2 = opencv()
    data = np.random.default_rng(3).random((2, 1, 28, 28), np.float32)
    text, scores = deployed("lenet", data.shape)
    theirs = DATA / "lenet" / "lenet_iter_100.caffemodel"
    net = Net(text, "TEST", weights=theirs)
    net.save(tmp_path / "ours.caffemodel")
    (tmp_path / "theirs.caffemodel").write_bytes(theirs.read_bytes())
    first, second = (run(cv2, text, tmp_path / f"{name}.caffemodel", data, scores) for name in ("theirs", "ours"))
    np.testing.assert_array_equal(first, second)
    assert error(first, net.forward(data=data)[scores]) <= LIMIT
