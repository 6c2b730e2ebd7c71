"""Kernels on several threads: the same bits, and every item once."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from gpu import threads
from gpu.threads import set_threads, spread
from tests.gpu.test_layers import layer_net


@pytest.fixture(autouse=True)
def _put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "_WORTH", 0)
    before = threads._count
    yield
    set_threads(before)


def test_every_item_is_done_once_and_errors_arrive() -> None:
    set_threads(3)
    done = np.zeros(10, int)

    def kernel(into: np.ndarray, first: int, last: int) -> None:
        into[first:last] += 1
        if into.size != 10:
            raise ValueError("no")

    spread(kernel, 10, 10, done)
    assert (done == 1).all()
    spread(kernel, 1, 10, done)
    spread(kernel, 0, 10, done)
    assert done.sum() == 11
    with pytest.raises(ValueError, match="no"):
        spread(kernel, 9, 9, np.zeros(9))


CONV = "num_output: 6 kernel_size: 3 pad: 1 stride: 2"
LAYERS = {
    "convolution": ((5, 6, 9, 11), f'type: "Convolution" convolution_param {{ {CONV} }}'),
    "one image": ((1, 6, 9, 11), f'type: "Convolution" convolution_param {{ {CONV} }}'),
    "depthwise": ((5, 6, 9, 11), f'type: "Convolution" convolution_param {{ {CONV} group: 6 }}'),
    "deconvolution": ((5, 6, 9, 11), f'type: "Deconvolution" convolution_param {{ {CONV} }}'),
    "max": ((5, 6, 9, 11), 'type: "Pooling" pooling_param { kernel_size: 3 stride: 2 }'),
    "mean": ((5, 6, 9, 11), 'type: "Pooling" pooling_param { pool: AVE kernel_size: 3 stride: 2 }'),
    "lrn": ((5, 6, 9, 11), 'type: "LRN" lrn_param { local_size: 3 }'),
}
EMBED = "embed_param { input_dim: 5 num_output: 6 }"


@pytest.mark.parametrize("name", LAYERS)
def test_the_bits_do_not_depend_on_the_number_of_threads(name: str) -> None:
    shape, layer = LAYERS[name]
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape, np.float32)
    found = []
    for count in (1, 2, 3, 7):
        set_threads(count)
        net = layer_net(shape, f"{layer} bottom: 'x' top: 'y'", phase="TRAIN")
        for i, blob in enumerate(net.params.get("L", [])):
            blob.data = np.random.default_rng(i).standard_normal(blob.shape, np.float32)
        y = net.forward(x=x)["y"]
        dx = net.backward(y=np.sin(np.arange(y.size, dtype=np.float32)).reshape(y.shape))["x"]
        found.append([y.tobytes(), dx.tobytes(), *(blob.diff.tobytes() for blob in net.params.get("L", []))])
    assert all(other == found[0] for other in found[1:])


def test_places_and_sums_of_picks_do_not_depend_on_the_number_of_threads() -> None:
    rng, found = np.random.default_rng(0), []
    x, rows = rng.standard_normal((7, 9, 4), np.float32), rng.integers(0, 5, 40)
    for count in (1, 2, 3, 7):
        set_threads(count)
        places = layer_net(x.shape, "type: 'ArgMax' bottom: 'x' top: 'y' argmax_param { top_k: 3 axis: 1 }")
        table = layer_net(rows.shape, f"type: 'Embed' bottom: 'x' top: 'y' {EMBED}", phase="TRAIN")
        table.forward(x=rows)
        table.backward(y=np.sin(np.arange(240, dtype=np.float32)).reshape(40, 6))
        found.append([places.forward(x=x)["y"].tobytes(), *(blob.diff.tobytes() for blob in table.params["L"])])
    assert all(other == found[0] for other in found[1:])


def test_a_forked_child_makes_threads_of_its_own() -> None:
    set_threads(2)
    values = np.zeros(4)

    def kernel(into: np.ndarray, first: int, last: int) -> None:
        into[first:last] += 1

    spread(kernel, 4, 4, values)
    assert threads._team is not None
    threads._team = (os.getpid() + 1, *threads._team[1:])  # as a child sees what it inherits
    spread(kernel, 4, 4, values)
    assert threads._team[0] == os.getpid()
    assert (values == 2).all()
