"""Whole nets that everybody has run, from the prototxts in examples/nets: sizes, and numbers against PyTorch."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.net import Net
from tests.gpu import torch_nets
from tests.gpu.test_layers import error

NETS = Path(__file__).parents[2] / "examples" / "nets"
# learned parameters as published (conv1 of ResNet without bias), in TRAIN where the auxiliary classifiers exist
PUBLISHED = {
    "lenet": 431_080,
    "cifar10_quick": 145_578,
    "cifar10_full": 89_578,
    "alexnet": 60_965_224,
    "caffenet": 60_965_224,
    "vgg16": 138_357_544,
    "googlenet": 13_378_280,
    "resnet50": 25_557_032,
    "mobilenet": 4_231_976,
    "squeezenet": 1_235_496,
}
# channels, the size of the paper, and a smaller one that leaves every layer something to do
SIZES = {
    "lenet": (1, 28, 28),
    "cifar10_quick": (3, 32, 32),
    "cifar10_full": (3, 32, 32),
    "alexnet": (3, 227, 99),
    "caffenet": (3, 227, 99),
    "vgg16": (3, 224, 48),
    "googlenet": (3, 224, 96),
    "resnet50": (3, 224, 64),
    "mobilenet": (3, 224, 64),
    "squeezenet": (3, 227, 67),
}
LIMIT = 1e-4
"""Relative L2 of each array. A product of k terms is off by about sqrt(k) * 6e-8, up to 5e-6 in these layers, and
errors add up over 50 layers and back; small batches in BatchNorm enlarge them."""


def build(name: str, phase: str, size: int, batch: int) -> Net:
    channels = SIZES[name][0]
    text = "force_backward: true\n" + (NETS / f"{name}.prototxt").read_text(encoding="utf-8")
    return Net(text, phase, input_shapes={"data": (batch, channels, size, size), "label": (batch,)})


def test_every_prototxt_is_listed() -> None:
    assert {path.stem for path in NETS.glob("*.prototxt")} == set(PUBLISHED) == set(SIZES)


def test_the_prototxts_are_what_the_generator_writes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("generate", NETS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.main([str(tmp_path)]) == 0
    for name in PUBLISHED:
        assert (NETS / f"{name}.prototxt").read_bytes() == (tmp_path / f"{name}.prototxt").read_bytes(), name


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_as_published(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "_allocate", lambda self: None)  # shapes are enough: VGG-16 would fill half a GiB
    net = build(name, "TRAIN", SIZES[name][1], 1)
    shapes = [wanted.shape for layer in net.layers if layer.learned for wanted in layer.param_shapes]
    assert sum(map(math.prod, shapes)) == PUBLISHED[name]


def compare(name: str, phase: str, size: int, batch: int) -> dict[str, float]:
    """Relative L2 of the scores, the losses and every gradient, by what it is."""
    import torch

    train = phase == "TRAIN"
    net = build(name, phase, size, batch)
    torch_nets.randomise(net, 1)
    rng = np.random.default_rng(2)
    data = rng.standard_normal(net.blobs["data"].shape, np.float32)
    labels = rng.integers(0, 10, batch)
    # before the pass: what TRAIN does to the statistics of BatchNorm is compared by the layer's own tests
    leaves = {layer.name: [blob.data.copy() for blob in layer.blobs] for layer in net.layers}
    found = net.forward(data=data, label=labels)
    gradient = net.backward()["data"]
    for layer in net.layers:
        for blob, value in zip(layer.blobs, leaves[layer.name], strict=True):
            blob.data = value
    t = torch_nets.Parts(net, train)
    x = torch.tensor(data, dtype=torch.float64, requires_grad=True)
    scores = getattr(torch_nets, name)(t, x)
    wanted = [(weight, torch.nn.functional.cross_entropy(s, torch.tensor(labels))) for weight, s in scores]
    total: Any = sum(weight * loss for weight, loss in wanted)
    total.backward()
    last = net.layers[-1].spec.bottom[0]
    errors = {"scores": error(net.blobs[last].data.reshape(batch, -1), scores[-1][1].detach().numpy())}
    losses = [found[layer.spec.top[0]] for layer in net.layers if layer.type == "SoftmaxWithLoss"]
    errors["losses"] = error(np.array(losses).ravel(), np.array([loss.item() for _, loss in wanted]))
    assert x.grad is not None
    errors["data"] = error(gradient, x.grad.numpy())
    for layer in net.layers:
        for i, blob in enumerate(layer.blobs if layer.learned else []):
            errors[f"{layer.name}.{i}"] = error(blob.diff, t.leaves[layer.name][i].grad.numpy())
    return errors


@pytest.mark.oracle
@pytest.mark.parametrize("phase", ["TRAIN", "TEST"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_small_images_as_torch(name: str, phase: str) -> None:
    pytest.importorskip("torch")
    errors = compare(name, phase, SIZES[name][2], 2)
    assert {what: value for what, value in errors.items() if not value <= LIMIT} == {}


@pytest.mark.oracle
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, (_, full, small) in SIZES.items() if full != small])
def test_full_size_as_torch(name: str) -> None:
    pytest.importorskip("torch")
    errors = compare(name, "TRAIN", SIZES[name][1], 1 if name == "vgg16" else 2)
    assert {what: value for what, value in errors.items() if not value <= LIMIT} == {}
