"""Nets that are refused: without room, with blobs that are missing, with settings and inputs that cannot be right."""

from __future__ import annotations

import re
import tracemalloc

import numpy as np
import pytest

from gpu import arena
from gpu.net import Net
from gpu.prototxt import PrototxtError
from profiler.errors import StallscopeError, UsageError
from tests.gpu.nets import DATA, dense, inputs

LENET = DATA / "proto" / "lenet_train_test.prototxt"
SHAPES = {"data": (4, 1, 28, 28)}


def test_a_net_without_room_says_how_much_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000,000 images: what LeNet keeps of one (data, two convolutions, two poolings, two layers) is known."""
    per_image = 784 + 20 * 24 * 24 + 20 * 12 * 12 + 50 * 8 * 8 + 50 * 4 * 4 + 500 + 10 + 1
    shapes = {"data": (1_000_000, 1, 28, 28), "label": (1_000_000,)}
    monkeypatch.setattr("gpu.net.available_memory", lambda: 4 * per_image * 1_000_000)
    with pytest.raises(StallscopeError, match="no memory for net") as caught:
        Net(LENET, "TRAIN", input_shapes=shapes)
    assert "data 1000000x1x28x28" in str(caught.value)
    assert "smaller batch" in str(caught.value)
    needed = float(str(caught.value.expected).split()[-2])
    assert 4e6 * per_image < needed * 2**30 < 3 * 4e6 * per_image


def test_an_allocation_that_fails_says_how_much_the_net_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("Unable to allocate 2.92 GiB")

    monkeypatch.setattr("gpu.parameters.Blob", fails)
    with pytest.raises(StallscopeError, match="no memory for net") as caught:
        Net(LENET, "TEST", input_shapes=SHAPES)
    assert "Unable to allocate 2.92 GiB" in str(caught.value)


def test_a_net_is_not_refused_what_it_fits_in() -> None:
    """The bytes that are asked for beforehand are about those that are taken."""
    shapes = {"data": (64, 1, 28, 28), "label": (64,)}
    for phase in ("TRAIN", "TEST"):
        arena.blocks(np).release()  # else the net is put where one of before was
        tracemalloc.start()
        net = Net(LENET, phase, input_shapes=shapes)
        net.forward()  # work space is made at its first use
        if phase == "TRAIN":
            net.backward()
        arrays = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
        taken = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([arrays]).traces)
        tracemalloc.stop()
        assert 0.7 * taken < net._needed_bytes() <= 1.02 * taken


EXCLUDED = inputs(x=(2, 3)) + dense("maker", "x", "h", 4, 'include { stage: "a" }') + dense("reader", "h", "y", 2)


def test_a_missing_blob_says_which_rule_removed_its_producer() -> None:
    with pytest.raises(PrototxtError) as caught:
        Net(EXCLUDED, "TEST")
    assert caught.value.what == (
        "blob 'h' is produced by layer 'maker', which is excluded in TEST because stage 'a' is missing"
    )
    assert "'reader'" in str(caught.value.found)
    assert Net(EXCLUDED, "TEST", stages=("a",)).outputs == ["y"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (inputs(data=(2, 3)) + dense("ip", "date", "y", 2), r"no layer produces blob 'date'(.|\n)*did you mean 'data'"),
        (dense("ip", "x", "y", 2) + inputs(x=(2, 3)), "read before it is produced"),
        (
            inputs(x=(2, 3)) + dense("a", "x", "y", 2) + dense("b", "x", "y", 2),
            r"'y' is produced twice(.|\n)*'a' and 'b'",
        ),
        (inputs(x=(2, 3)) + dense("a", "x", "y", 2) + dense("a", "y", "z", 2), "two layers are named 'a'"),
        (inputs(x=(2, 3)) + 'layer { name: "r" type: "ReLU" bottom: "x" bottom: "x" top: "y" }', "number of bottoms"),
        (
            inputs(x=(2, 3)) + dense("a", "x", "y", 2, "param { } param { } param { }"),
            "too many param entries|param entries",
        ),
        (inputs(x=(2, 3)) + dense("a", "x", "y", 2, "loss_weight: 1 loss_weight: 2"), "loss_weight"),
        (inputs(x=(2, 3)) + dense("a", "x", "y", 2, "propagate_down: true propagate_down: true"), "propagate_down"),
        (
            inputs(x=(2, 3)) + 'layer { name: "p" type: "WindowData" } layer { name: "h" type: "HDF5Output" }',
            r"2 layer\(s\) of unsupported type(.|\n)*'p' \(WindowData\), 'h' \(HDF5Output\)",
        ),
        (
            inputs(x=(1, 2, 4, 4))
            + 'layer { name: "r" type: "ReLU" bottom: "x" top: "y" } '
            + 'layer { name: "p" type: "Pooling" bottom: "y" top: "y" pooling_param { kernel_size: 2 } }',
            r"'p' \(Pooling\): cannot write its output over its input 'y'",
        ),
        (LENET.read_text(), "shape of 'data' is not known"),
    ],
)
def test_nets_that_cannot_be_built(text: str, message: str) -> None:
    with pytest.raises(StallscopeError) as caught:
        Net(text)
    assert re.search(message, str(caught.value)), str(caught.value)


def test_wrong_inputs() -> None:
    with pytest.raises(UsageError, match="input_shapes names blobs that are no inputs"):
        Net(LENET, input_shapes={**SHAPES, "dota": (1,)})
    net = Net(LENET, input_shapes=SHAPES)
    with pytest.raises(UsageError, match="does not fit blob 'data'") as caught:
        net.forward(data=np.zeros((1, 28, 28)))
    assert (caught.value.expected, caught.value.found) == ((4, 1, 28, 28), (1, 28, 28))
    with pytest.raises(UsageError, match="no input 'image'"):
        net.forward(image=np.zeros(1))
    net.forward(data=np.zeros(SHAPES["data"]), label=np.zeros(4))
    with pytest.raises(UsageError, match="no output 'conv1'"):
        net.backward(conv1=np.zeros(1))
