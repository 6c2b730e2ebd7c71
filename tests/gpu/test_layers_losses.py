"""The losses against float64, numeric gradients and PyTorch, over shapes, axes, labels and ways to divide."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets import caffe_pb2
from gpu.layers.base import LayerError
from gpu.layers.labels import LabelOutOfRange
from gpu.net import Net
from profiler.errors import StallscopeError
from tests.gpu.test_layers import BACKENDS

pytestmark = pytest.mark.filterwarnings("ignore::gpu.fields.FieldWarning")  # see test_fields

Function = Callable[..., float]
SEEDS = st.integers(0, 999)
NAMES = st.sampled_from(sorted(BACKENDS))
MODES = st.sampled_from(["FULL", "VALID", "BATCH_SIZE", "NONE"])


def loss_net(layer: str, shapes: dict[str, tuple[int, ...]], backend: str = "compiled", tops: str = 'top: "y"') -> Net:
    text = "force_backward: true\n"
    for name, shape in shapes.items():
        dims = " ".join(f"dim: {size}" for size in shape)
        text += f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims} }} }} }}\n'
    bottoms = " ".join(f'bottom: "{name}"' for name in shapes)
    return Net(text + f'layer {{ name: "L" {layer} {bottoms} {tops} }}', "TRAIN", backend=BACKENDS[backend])


def check(
    layer: str, function: Function, inputs: dict[str, np.ndarray], wanted: list[str], backend: str, weight: float = 1
) -> Net:
    """Loss and gradients are those of ``function`` in float64; blobs not in ``wanted`` have none."""
    told = f"{layer} loss_weight: {weight}"
    net = loss_net(told, {name: array.shape for name, array in inputs.items()}, backend)
    wide = {name: array.astype(np.float64) for name, array in inputs.items()}
    loss = net.forward(**inputs)["y"]
    want = function(**wide)
    assert loss == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert net.loss == pytest.approx(want * weight, rel=1e-5, abs=1e-6)
    found = net.backward()
    assert not any(found[name].any() for name in inputs if name not in wanted)
    for name in wanted:
        array, slope = wide[name], np.zeros(wide[name].shape)
        for place in itertools.product(*map(range, array.shape)):
            kept = array[place]
            array[place] = kept + 1e-5
            above = function(**wide)
            array[place] = kept - 1e-5
            below = function(**wide)
            array[place] = kept
            slope[place] = weight * (above - below) / 2e-5
        np.testing.assert_allclose(found[name], slope, rtol=2e-4, atol=2e-5)
    return net


def divisor(mode: str, counted: np.ndarray, images: int) -> float:
    """``counted``: which of the terms are no ignored ones."""
    return max(1, {"FULL": counted.size, "VALID": counted.sum(), "BATCH_SIZE": images, "NONE": 1}[mode])


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 4), classes=st.integers(1, 5), rest=st.integers(1, 2), l2=st.booleans(), seed=SEEDS, backend=NAMES
)
def test_hinge_loss(n: int, classes: int, rest: int, l2: bool, seed: int, backend: str) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, classes, rest)).astype(np.float32)
    x = np.where(abs(abs(x) - 1) < 0.01, np.float32(1.5), x)  # away from the kink
    labels = rng.integers(0, classes * rest, n).astype(np.float32)

    def function(x: np.ndarray, l: np.ndarray) -> float:  # noqa: E741
        flat = x.reshape(n, -1).copy()
        flat[np.arange(n), l.astype(int)] *= -1
        terms = np.maximum(0, 1 + flat)
        return float((terms**2 if l2 else terms).sum() / n)

    layer = f'type: "HingeLoss" hinge_loss_param {{ norm: {"L2" if l2 else "L1"} }}'
    check(layer, function, {"x": x, "l": labels}, ["x"], backend, weight=0.5)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 5), channels=st.integers(1, 4), flat=st.booleans(), legacy=st.booleans(), seed=SEEDS, backend=NAMES
)
def test_contrastive_loss(n: int, channels: int, flat: bool, legacy: bool, seed: int, backend: str) -> None:
    rng = np.random.default_rng(seed)
    shape = (n, channels) if flat else (n, channels, 1, 1)
    a, b = rng.standard_normal((2, *shape)).astype(np.float32)
    b += np.where(abs(a - b) < 0.3, np.float32(1), np.float32(0))  # d is far from 0, where Caffe's 0.0001 would show
    pairs = rng.integers(0, 2, (n, 1)).astype(np.float32)

    def function(a: np.ndarray, b: np.ndarray, s: np.ndarray) -> float:
        square = ((a - b).reshape(n, -1) ** 2).sum(axis=1)
        apart = np.maximum(0, 4 - square) if legacy else np.maximum(0, 4 - np.sqrt(square)) ** 2
        return float(np.where(s[:, 0] == 1, square, apart).sum() / (2 * n))

    told = f"margin: 4 legacy_version: {str(legacy).lower()}"
    layer = f'type: "ContrastiveLoss" contrastive_loss_param {{ {told} }}'
    inputs = {"a": a, "b": b, "s": pairs}
    net = loss_net(layer, {name: array.shape for name, array in inputs.items()}, backend)
    assert net.forward(**inputs)["y"] == pytest.approx(function(a, b, pairs), rel=1e-5)
    found = net.backward()
    assert not found["s"].any()
    difference = (a - b).reshape(n, -1).astype(np.float64)
    square = (difference**2).sum(axis=1, keepdims=True)
    distance = np.sqrt(square)
    apart = np.where(square < 4, -1, 0) if legacy else -np.maximum(0, 4 - distance) / (distance + 1e-4)
    slope = np.where(pairs == 1, 1, apart) * difference / n
    np.testing.assert_allclose(found["a"].reshape(n, -1), slope, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(found["b"], -found["a"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pair_of_equal_vectors_has_a_finite_gradient(backend: str) -> None:
    net = loss_net('type: "ContrastiveLoss"', {"a": (2, 3), "b": (2, 3), "s": (2,)}, backend)
    assert net.forward(a=np.ones((2, 3)), b=np.ones((2, 3)), s=np.float32([0, 1]))["y"] == 0.25
    assert not net.backward()["a"].any()


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    mode=st.none() | MODES,
    normalize=st.none() | st.booleans(),
    ignore=st.none() | st.sampled_from([-1, 1]),
    soft=st.booleans(),
    seed=SEEDS,
    backend=NAMES,
)
def test_sigmoid_cross_entropy_loss(
    shape: tuple[int, ...],
    mode: str | None,
    normalize: bool | None,
    ignore: int | None,
    soft: bool,
    seed: int,
    backend: str,
) -> None:
    rng = np.random.default_rng(seed)
    x = (3 * rng.standard_normal(shape)).astype(np.float32)
    t = (rng.random(shape) if soft else rng.integers(0, 2, shape)).astype(np.float32)
    if ignore is not None:
        t = np.where(rng.random(shape) < 0.3, np.float32(ignore), t).astype(np.float32)
    counted = np.ones(shape, bool) if ignore is None else np.trunc(t) != ignore
    used = mode or ("BATCH_SIZE" if normalize is None else "VALID" if normalize else "BATCH_SIZE")

    def function(x: np.ndarray, t: np.ndarray) -> float:
        terms = np.logaddexp(0, x) - x * t
        return float((terms * counted).sum() / divisor(used, counted, shape[0]))

    told = f"normalization: {mode} " if mode else ""
    told += f"normalize: {str(normalize).lower()} " if normalize is not None else ""
    told += f"ignore_label: {ignore}" if ignore is not None else ""
    check(f'type: "SigmoidCrossEntropyLoss" loss_param {{ {told} }}', function, {"x": x, "t": t}, ["x"], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sigmoid_cross_entropy_far_from_zero(backend: str) -> None:
    net = loss_net('type: "SigmoidCrossEntropyLoss"', {"x": (1, 4), "t": (1, 4)}, backend)
    loss = net.forward(x=np.float32([[-1e4, 1e4, -1e4, 1e4]]), t=np.float32([[0, 1, 1, 0]]))["y"]
    assert loss == pytest.approx(2e4)
    np.testing.assert_array_equal(net.backward()["x"], [[0, 0, -1, 1]])


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 4), classes=st.integers(1, 5), rest=st.integers(1, 2), seed=SEEDS, backend=NAMES)
def test_multinomial_logistic_loss(n: int, classes: int, rest: int, seed: int, backend: str) -> None:
    rng = np.random.default_rng(seed)
    p = rng.uniform(0.05, 1, (n, classes, rest)).astype(np.float32)
    labels = rng.integers(0, classes * rest, (n, 1, 1)).astype(np.float32)

    def function(p: np.ndarray, l: np.ndarray) -> float:  # noqa: E741
        return float(-np.log(p.reshape(n, -1)[np.arange(n), l.reshape(n).astype(int)]).sum() / n)

    check('type: "MultinomialLogisticLoss"', function, {"p": p, "l": labels}, ["p"], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_probability_of_zero_counts_as_1e_20(backend: str) -> None:
    net = loss_net('type: "MultinomialLogisticLoss"', {"p": (1, 2), "l": (1,)}, backend)
    assert net.forward(p=np.float32([[0, np.nan]]), l=np.zeros(1))["y"] == pytest.approx(20 * np.log(10))
    np.testing.assert_allclose(net.backward()["p"], [[-1e20, 0]], rtol=1e-6)


def write_matrix(path: Path, matrix: np.ndarray) -> None:
    blob = caffe_pb2.BlobProto(num=1, channels=1, height=matrix.shape[0], width=matrix.shape[1])
    blob.data.extend(matrix.reshape(-1).tolist())
    path.write_bytes(blob.SerializeToString())


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    data=st.data(),
    mode=st.none() | MODES,
    ignore=st.none() | st.sampled_from([-1, 1]),
    from_file=st.booleans(),
    seed=SEEDS,
    backend=NAMES,
)
def test_infogain_loss(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, ...],
    data: st.DataObject,
    mode: str | None,
    ignore: int | None,
    from_file: bool,
    seed: int,
    backend: str,
) -> None:
    rng = np.random.default_rng(seed)
    axis = data.draw(st.integers(0, len(shape) - 1))
    classes, others = shape[axis], shape[:axis] + shape[axis + 1 :]
    x = rng.standard_normal(shape).astype(np.float32)
    labels = rng.integers(0, classes, others).astype(np.float32)
    if ignore is not None:
        labels = np.where(rng.random(others) < 0.4, np.float32(ignore), labels).astype(np.float32)
    labels = labels.reshape(others or (1,))
    matrix = rng.uniform(-1, 2, (classes, classes)).astype(np.float32)
    counted = np.ones(labels.shape, bool) if ignore is None else labels != ignore
    outer = int(np.prod(shape[:axis]))

    def function(x: np.ndarray, l: np.ndarray, H: np.ndarray | None = None) -> float:  # noqa: E741
        wide = np.moveaxis(x, axis, -1)
        logs = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
        index = np.where(counted, l, 0).astype(int).reshape(others)
        terms = -(matrix.astype(np.float64)[index] * logs).sum(axis=-1).reshape(l.shape)
        return float((terms * counted).sum() / divisor(mode or "VALID", counted, outer))

    told = f"axis: {axis - len(shape) if seed % 2 else axis} "
    inputs = {"x": x, "l": labels}
    if from_file:
        path = tmp_path_factory.mktemp("infogain") / "H.binaryproto"
        write_matrix(path, matrix)
        told += f'source: "{path}"'
    else:
        inputs["H"] = matrix
    other = f"normalization: {mode} " if mode else ""
    other += f"ignore_label: {ignore}" if ignore is not None else ""
    layer = f'type: "InfogainLoss" infogain_loss_param {{ {told} }} loss_param {{ {other} }}'
    check(layer, function, inputs, ["x"], backend)


def test_infogain_with_the_identity_is_the_softmax_loss() -> None:
    x, labels = np.random.default_rng(1).standard_normal((4, 5)).astype(np.float32), np.float32([0, 4, 2, 2])
    shapes: dict[str, tuple[int, ...]] = {"x": (4, 5), "l": (4,), "H": (5, 5)}
    gain = loss_net('type: "InfogainLoss"', shapes, tops='top: "y" top: "prob"')
    other = loss_net('type: "SoftmaxWithLoss"', {"x": (4, 5), "l": (4,)}, tops='top: "y" top: "prob"')
    have, want = gain.forward(x=x, l=labels, H=np.eye(5)), other.forward(x=x, l=labels)
    assert have["y"] == pytest.approx(want["y"], rel=1e-6)
    np.testing.assert_array_equal(have["prob"], want["prob"])
    np.testing.assert_allclose(gain.backward()["x"], other.backward()["x"], atol=1e-7)


@pytest.mark.parametrize(
    ("layer", "third"),
    [
        ('type: "HingeLoss"', None),
        ('type: "MultinomialLogisticLoss"', None),
        ('type: "InfogainLoss"', (10, 10)),
    ],
)
@pytest.mark.parametrize("value", [-1, 10, 2.5, np.nan, np.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_labels_that_name_no_class(layer: str, third: tuple[int, ...] | None, value: float, backend: str) -> None:
    shapes: dict[str, tuple[int, ...]] = {"x": (4, 10), "l": (4,)} | ({"H": third} if third else {})
    net = loss_net(layer, shapes, backend)
    with pytest.raises(LabelOutOfRange, match=r"label .* at position \(2,\) of blob 'l'") as caught:
        net.forward(x=np.ones((4, 10), np.float32), l=np.array([0, 9, value, -7], np.float32))
    assert caught.value.classes == 10
    assert caught.value.position == (2,)


@pytest.mark.parametrize("value", [-1, 2, 0.5])
def test_pairs_are_similar_or_not(value: float) -> None:
    net = loss_net('type: "ContrastiveLoss"', {"a": (3, 2), "b": (3, 2), "s": (3,)})
    with pytest.raises(LabelOutOfRange, match=r"position \(1,\) of blob 's'.*\n.*\n.*\n.*similar: 1"):
        net.forward(s=np.float32([1, value, 0]))


@pytest.mark.parametrize(
    ("layer", "shapes", "message"),
    [
        ('type: "HingeLoss"', [(4, 3), (4, 2)], "labels do not fit"),
        ('type: "MultinomialLogisticLoss"', [(4, 3), (3,)], "labels do not fit"),
        ('type: "SigmoidCrossEntropyLoss"', [(4, 3), (4, 2)], "as many images and values"),
        ('type: "SigmoidCrossEntropyLoss"', [(4, 3), (3, 4)], "as many images and values"),
        ('type: "ContrastiveLoss"', [(4, 3), (4, 2), (4,)], "one shape"),
        ('type: "ContrastiveLoss"', [(4, 3, 2, 1), (4, 3, 2, 1), (4,)], "one shape"),
        ('type: "ContrastiveLoss"', [(4, 3), (4, 3), (4, 2)], "labels do not fit"),
        ('type: "InfogainLoss"', [(4, 3), (4,)], "needs its matrix"),
        ('type: "InfogainLoss"', [(4, 3), (4,), (3, 2)], "matrix does not fit"),
        ('type: "InfogainLoss" infogain_loss_param { axis: 2 }', [(4, 3), (4,), (3, 3)], "axis is out of range"),
        ('type: "InfogainLoss" loss_param { normalize: true }', [(4, 3), (4,), (3, 3)], "normalize"),
    ],
)
def test_settings_that_make_no_sense(layer: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(LayerError, match=f"'L'.*{message}"):
        loss_net(layer, dict(zip("xlm", shapes, strict=False)))


def test_a_matrix_that_is_none(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"x": (4, 3), "l": (4,)}
    with pytest.raises(StallscopeError, match="does not exist"):
        loss_net(f'type: "InfogainLoss" infogain_loss_param {{ source: "{tmp_path}/H" }}', shapes)
    (tmp_path / "H").write_text("layer { }")
    with pytest.raises(StallscopeError, match="is not a single blob"):
        loss_net(f'type: "InfogainLoss" infogain_loss_param {{ source: "{tmp_path}/H" }}', shapes)
