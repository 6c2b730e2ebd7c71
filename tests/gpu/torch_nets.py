"""The nets of examples/nets once more, in PyTorch's functions, from the papers' tables and not from the prototxts.

Each function takes a :class:`Parts`, which knows the weights by layer name, and a batch; it returns the scores of the
classifiers, the main one last, with the weight of each in the loss.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Scores = list[tuple[float, Any]]


class Parts:
    """Layers by name, in float64: the weights are copies of a net of ours, so are its dropout masks.

    A ReLU whose input is 0 but for rounding goes one way in float32 and the other in float64, which moves a gradient of
    n values by about 1 / sqrt(n). Every ReLU here takes the side that ours took, and refuses where that is no rounding;
    max pooling likewise takes the place that ours took of values that are equal but for rounding.
    """

    def __init__(self, net: Any, train: bool) -> None:
        import torch

        self._torch, self._f, self.train = torch, torch.nn.functional, train
        self.leaves = {
            layer.name: [
                torch.tensor(blob.data, dtype=torch.float64, requires_grad=layer.learned) for blob in layer.blobs
            ]
            for layer in net.layers
            if layer.blobs
        }
        rectified = [net.blobs[layer.spec.top[0]].data > 0 for layer in net.layers if layer.type == "ReLU"]
        self._sides = iter([torch.tensor(side) for side in rectified])
        pools = [layer for layer in net.layers if layer.type == "Pooling" and layer.spec.pooling_param.pool == 0]
        self._places = iter([torch.tensor(layer._index, dtype=torch.int64) for layer in pools])
        self._masks = {
            layer.name: torch.tensor(layer._mask, dtype=torch.float64)
            for layer in net.layers
            if layer.type == "Dropout" and train
        }

    def conv(self, name: str, x: Any, stride: int = 1, pad: int = 0, group: int = 1) -> Any:
        weight, *bias = self.leaves[name]
        return self._f.conv2d(x, weight, bias[0] if bias else None, stride, pad, 1, group)

    def rect(self, name: str, x: Any, stride: int = 1, pad: int = 0, group: int = 1) -> Any:
        return self.relu(self.conv(name, x, stride, pad, group))

    def norm(self, name: str, x: Any, stride: int = 1, pad: int = 0, group: int = 1, relu: bool = True) -> Any:
        """Convolution, normalised by the batch in TRAIN and by Caffe's sums over their weight in TEST, then scaled."""
        y = self.conv(name, x, stride, pad, group)
        mean, variance, weight = self.leaves[f"{name}/bn"]
        kept = (None, None) if self.train else (mean / weight, variance / weight)
        y = self._f.batch_norm(y, *kept, *self.leaves[f"{name}/scale"], training=self.train, eps=1e-5)
        return self.relu(y) if relu else y

    def dense(self, name: str, x: Any) -> Any:
        return self._f.linear(x.flatten(1), *self.leaves[name])

    def drop(self, name: str, x: Any) -> Any:
        return x * self._masks[name].reshape(x.shape) if self.train else x

    def largest(self, x: Any, kernel: int, stride: int, pad: int = 0) -> Any:
        y = self._f.max_pool2d(x.detach(), kernel, stride, pad, ceil_mode=True)  # Caffe rounds sizes up
        ours = x.flatten(2).gather(2, next(self._places).reshape(*y.shape[:2], -1)).reshape(y.shape)
        assert float((y - ours.detach()).abs().max()) <= 1e-4 * float(y.pow(2).mean().sqrt())
        return ours

    def mean(self, x: Any, kernel: int, stride: int) -> Any:
        return self._f.avg_pool2d(x, kernel, stride, ceil_mode=True)

    def across(self, x: Any) -> Any:
        return self._f.local_response_norm(x, 5, 1e-4, 0.75, 1.0)

    def within(self, x: Any) -> Any:
        squares = self._f.avg_pool2d(x * x, 3, 1, 1, count_include_pad=True)
        return x * (1 + 5e-5 * squares) ** -0.75

    def cat(self, parts: list[Any]) -> Any:
        return self._torch.cat(parts, 1)

    def relu(self, x: Any, kept: Any = 1) -> Any:
        """max(x, 0), by our side where it is kept; ReLUs come in the order of the prototxt."""
        side = next(self._sides).reshape(x.shape)
        crossed = (kept * self._torch.relu(x) > 0) != side
        assert float((x.detach() * kept * crossed).abs().max()) <= 1e-4 * float(x.detach().pow(2).mean().sqrt())
        return x * side

    def dropped(self, name: str, x: Any) -> Any:
        """ReLU and then dropout, in place one after the other: what was dropped says nothing of its side."""
        kept = (self._masks[name] > 0).reshape(x.shape) if self.train else 1
        return self.drop(name, self.relu(x, kept))


def lenet(t: Parts, x: Any) -> Scores:
    x = t.largest(t.conv("conv2", t.largest(t.conv("conv1", x), 2, 2)), 2, 2)
    return [(1, t.dense("ip2", t.relu(t.dense("ip1", x))))]


def cifar10_quick(t: Parts, x: Any) -> Scores:
    x = t.relu(t.largest(t.conv("conv1", x, pad=2), 3, 2))
    x = t.mean(t.rect("conv2", x, pad=2), 3, 2)
    x = t.mean(t.rect("conv3", x, pad=2), 3, 2)
    return [(1, t.dense("ip2", t.dense("ip1", x)))]


def cifar10_full(t: Parts, x: Any) -> Scores:
    x = t.within(t.relu(t.largest(t.conv("conv1", x, pad=2), 3, 2)))
    x = t.within(t.mean(t.rect("conv2", x, pad=2), 3, 2))
    return [(1, t.dense("ip1", t.mean(t.rect("conv3", x, pad=2), 3, 2)))]


def _classifier(t: Parts, x: Any) -> Scores:
    for i in (6, 7):
        x = t.dropped(f"drop{i}", t.dense(f"fc{i}", x))
    return [(1, t.dense("fc8", x))]


def _krizhevsky(t: Parts, x: Any) -> Any:
    x = t.rect("conv4", t.rect("conv3", x, pad=1), pad=1, group=2)
    return t.largest(t.rect("conv5", x, pad=1, group=2), 3, 2)


def caffenet(t: Parts, x: Any) -> Scores:
    x = t.across(t.largest(t.rect("conv1", x, 4), 3, 2))
    x = t.across(t.largest(t.rect("conv2", x, pad=2, group=2), 3, 2))
    return _classifier(t, _krizhevsky(t, x))


def alexnet(t: Parts, x: Any) -> Scores:
    x = t.largest(t.across(t.rect("conv1", x, 4)), 3, 2)
    x = t.largest(t.across(t.rect("conv2", x, pad=2, group=2)), 3, 2)
    return _classifier(t, _krizhevsky(t, x))


def vgg16(t: Parts, x: Any) -> Scores:
    for block, count in ((1, 2), (2, 2), (3, 3), (4, 3), (5, 3)):
        for i in range(count):
            x = t.rect(f"conv{block}_{i + 1}", x, pad=1)
        x = t.largest(x, 2, 2)
    return _classifier(t, x)


def googlenet(t: Parts, x: Any) -> Scores:
    scores: Scores = []
    x = t.across(t.largest(t.rect("conv1/7x7_s2", x, 2, 3), 3, 2))
    x = t.rect("conv2/3x3", t.rect("conv2/3x3_reduce", x), pad=1)
    x = t.largest(t.across(x), 3, 2)
    for name in ("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
        if name in ("4a", "5a"):
            x = t.largest(x, 3, 2)
        i = f"inception_{name}"
        x = t.cat(
            [
                t.rect(f"{i}/1x1", x),
                t.rect(f"{i}/3x3", t.rect(f"{i}/3x3_reduce", x), pad=1),
                t.rect(f"{i}/5x5", t.rect(f"{i}/5x5_reduce", x), pad=2),
                t.rect(f"{i}/pool_proj", t.largest(x, 3, 1, 1)),
            ]
        )
        if t.train and name in ("4a", "4d"):
            a = f"loss{1 if name == '4a' else 2}"
            y = t.dropped(f"{a}/drop", t.dense(f"{a}/fc", t.rect(f"{a}/conv", t.mean(x, 5, 3))))
            scores.append((0.3, t.dense(f"{a}/classifier", y)))
    x = t.drop("pool5/drop", x.mean((2, 3)))
    return [*scores, (1, t.dense("loss3/classifier", x))]


def resnet50(t: Parts, x: Any) -> Scores:
    x = t.largest(t.norm("conv1", x, 2, 3), 3, 2)
    for stage, blocks in ((2, "abc"), (3, "abcd"), (4, "abcdef"), (5, "abc")):
        for block in blocks:
            here, stride = f"res{stage}{block}", 2 if stage > 2 and block == "a" else 1
            y = t.norm(f"{here}/3x3", t.norm(f"{here}/1x1_in", x, stride), pad=1)
            y = t.norm(f"{here}/1x1_out", y, relu=False)
            x = t.relu(y + (t.norm(f"{here}/project", x, stride, relu=False) if block == "a" else x))
    return [(1, t.dense("fc1000", x.mean((2, 3))))]


def mobilenet(t: Parts, x: Any) -> Scores:
    x = t.norm("conv1", x, 2, 1)
    for i, stride in enumerate((1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1), 2):
        x = t.norm(f"conv{i}/pw", t.norm(f"conv{i}/dw", x, stride, 1, group=x.shape[1]))
    return [(1, t.dense("fc", x.mean((2, 3))))]


def squeezenet(t: Parts, x: Any) -> Scores:
    x = t.largest(t.rect("conv1", x, 2), 3, 2)
    for i in range(2, 10):
        y = t.rect(f"fire{i}/squeeze1x1", x)
        x = t.cat([t.rect(f"fire{i}/expand1x1", y), t.rect(f"fire{i}/expand3x3", y, pad=1)])
        if i in (3, 5):
            x = t.largest(x, 3, 2)
    x = t.rect("conv10", t.drop("drop9", x))
    return [(1, x.mean((2, 3)))]


def randomise(net: Any, seed: int) -> None:
    """Weights that keep the size of the values from layer to layer, biases and scales that show where they are lost."""
    rng = np.random.default_rng(seed)
    for layer in net.layers:
        for i, blob in enumerate(layer.blobs):
            shape = blob.shape
            if layer.type == "BatchNorm":
                values = (rng.normal(0, 0.2, shape), rng.uniform(1, 3, shape), np.full(shape, 2.0))[i]
            elif layer.type == "Scale":
                # The ends of ResNet's branches are small, or sixteen sums would double the values sixteen times.
                small = 0.2 if "1x1_out" in layer.name else 1.0
                values = rng.normal(0, 0.1, shape) if i else rng.uniform(0.5, 1.5, shape) * small
            elif i:
                values = rng.normal(0, 0.1, shape)
            else:
                values = rng.standard_normal(shape, np.float32) * np.sqrt(2 / (blob.count / shape[0]))
            blob.data = values
