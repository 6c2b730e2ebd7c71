"""Whole nets: as Caffe computed them, and wired as written."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from gpu.backend import Backend
from gpu.layers.base import LayerError
from gpu.net import Net
from profiler.errors import UsageError
from tests.gpu.nets import DATA, dense, inputs

LENET = DATA / "proto" / "lenet_train_test.prototxt"
SHAPES = {"data": (4, 1, 28, 28)}


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Relative L2."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-12))


@pytest.mark.parametrize("backend", ["numpy", "portable"])
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("lenet_iter200_b8", "lenet/lenet_iter_200.caffemodel.h5"),
        ("cifar10_quick_b4", "cifar10_quick/cifar10_quick_iter_300.caffemodel"),
    ],
)
def test_whole_nets_as_caffe(name: str, weights: str, backend: str) -> None:
    with np.load(DATA / "nets" / f"{name}.npz") as archive:
        golden = {key: archive[key] for key in archive.files}
    net = Net(DATA / "nets" / f"{name}.prototxt", backend=Backend(backend, np, "test"))
    net.copy_from(DATA / weights)
    with threadpool_limits(1):  # as Caffe made them: through 13 layers the order of sums is all of the difference
        net.forward(data=golden["b:data"], label=golden["b:label"])
        net.backward()
    kinds = {"b": 0, "d": 0, "g": 0}
    for key, wanted in golden.items():
        kind, _, what = key.partition(":")
        if kind not in kinds:
            continue
        kinds[kind] += 1
        if kind == "g":
            layer, i = what.rsplit(".", 1)
            found = net.params[layer][int(i)].diff
        else:
            found = net.blobs[what].data if kind == "b" else net.blobs[what].diff
        assert error(found, wanted) <= 1e-5, key
    assert min(kinds.values()) >= 8


def test_lenet_has_caffes_face() -> None:
    net = Net(LENET, "TRAIN", input_shapes=SHAPES)
    assert (net.inputs, net.outputs) == (["data", "label"], ["loss"])
    assert net.blobs["label"].shape == (4,)  # one per image, without being told
    assert [layer.type for layer in net.layers][:3] == ["Data", "Convolution", "Pooling"]
    assert {name: [blob.shape for blob in blobs] for name, blobs in net.params.items()}["conv2"] == [
        (50, 20, 5, 5),
        (50,),
    ]
    assert [param.name for param in net.learnable][:2] == ["conv1.0", "conv1.1"]
    assert [param.lr_mult for param in net.learnable] == [1, 2] * 4
    assert net.data_layers[0].batch == 64
    test = Net(LENET, "TEST", input_shapes=SHAPES)
    assert test.outputs == ["accuracy", "loss"]
    assert test.data_layers[0].batch == 100
    x = np.random.default_rng(0).random(SHAPES["data"], np.float32)
    out = test.forward(data=x, label=np.array([1, 2, 3, 4], np.int32))
    assert set(out) == {"accuracy", "loss"}
    kept = out["loss"].copy()
    test.forward(data=x * 0)
    assert out["loss"] == kept  # outputs are copies: the next pass does not change them
    assert test.loss == pytest.approx(float(test.blobs["loss"].data))


def test_a_seed_decides_everything() -> None:
    def loss(seed: int | None) -> float:
        net = Net(LENET, "TRAIN", input_shapes=SHAPES, seed=seed)
        x = np.linspace(0, 1, 4 * 784, dtype=np.float32).reshape(SHAPES["data"])
        return float(net.forward(data=x, label=np.arange(4))["loss"])

    assert loss(1) == loss(1)
    assert loss(1) != loss(2)
    assert loss(None) == loss(0)


IN_PLACE = """
layer { name: "conv" type: "Convolution" bottom: "x" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { kernel_size: 2 stride: 2 } }
layer { name: "sig" type: "Sigmoid" bottom: "pool" top: "sig" }
layer { name: "drop" type: "Dropout" bottom: "sig" top: "DROP" dropout_param { dropout_ratio: 0.4 } }
layer { name: "relu" type: "ReLU" bottom: "DROP" top: "RELU" }
layer { name: "scale" type: "Scale" bottom: "RELU" top: "SCALE" }
layer { name: "power" type: "Power" bottom: "SCALE" top: "POWER" power_param { power: 2 shift: 1 } }
layer { name: "bn" type: "BatchNorm" bottom: "POWER" top: "BN" }
""" + dense("ip", "BN", "ip", 3)


def _chain(in_place: bool) -> Net:
    text = IN_PLACE
    for name in ("DROP", "RELU", "SCALE", "POWER", "BN"):
        text = text.replace(f'"{name}"', '"sig"' if in_place else f'"{name.lower()}"')
    loss = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "l" top: "loss" }'
    return Net("force_backward: true\n" + inputs(x=(3, 2, 8, 8), l=(3,)) + text + loss, "TRAIN", seed=4)


@pytest.mark.filterwarnings("ignore::gpu.fields.FieldWarning")  # of the gradient that Caffe gets wrong
def test_in_place_layers_compute_what_they_compute_out_of_place() -> None:
    """Case D4: later layers write over what Sigmoid, ReLU, Scale and Power read in backward."""
    rng = np.random.default_rng(2)
    x, labels = rng.standard_normal((3, 2, 8, 8), np.float32), np.array([0, 2, 1])
    results = []
    for in_place in (True, False):
        net = _chain(in_place)
        loss = net.forward(x=x, l=labels)["loss"]
        results.append((loss, net.backward()["x"], [param.blob.diff.copy() for param in net.learnable]))
    (loss, dx, gradients), (other_loss, other_dx, other_gradients) = results
    assert loss == other_loss
    assert np.array_equal(dx, other_dx)
    assert all(np.array_equal(a, b) for a, b in zip(gradients, other_gradients, strict=True))
    assert np.abs(dx).max() > 0


def test_in_place_gradients_agree_with_differences() -> None:
    """conv, pool, dropout in place, ip in TRAIN: the loss is differenced along one direction of every parameter."""
    text = (
        "\n".join(
            line
            for line in IN_PLACE.splitlines()
            if not line.startswith(('layer { name: "scale"', 'layer { name: "power"', 'layer { name: "bn"'))
        )
        + "\n"
    )
    text = text.replace('"DROP"', '"sig"').replace('"RELU"', '"sig"').replace('bottom: "BN"', 'bottom: "sig"')
    net = Net(
        inputs(x=(3, 2, 8, 8), l=(3,))
        + text
        + 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "l" top: "loss" }',
        "TRAIN",
        seed=4,
    )
    rng = np.random.default_rng(3)
    feed = {"x": rng.standard_normal((3, 2, 8, 8), np.float32), "l": np.array([0, 2, 1])}

    def loss() -> float:
        net.iteration = 0  # the same dropout mask each time
        return float(net.forward(**feed)["loss"])

    loss()
    net.clear_param_diffs()
    net.backward()
    for param in net.learnable:
        direction = rng.standard_normal(param.blob.shape, np.float32)
        slope = float((param.blob.diff * direction).sum())
        start, step = param.blob.data.copy(), np.float32(5e-3)
        param.blob.data[...] = start + step * direction
        above = loss()
        param.blob.data[...] = start - step * direction
        below = loss()
        param.blob.data[...] = start
        assert (above - below) / (2 * step) == pytest.approx(slope, rel=0.03, abs=2e-4), param.name


def test_memory_is_shared_only_where_nobody_reads_it_later() -> None:
    def homes(phase: str) -> tuple[bool, bool]:
        net = Net(
            inputs(x=(2, 3), l=(2,))
            + dense("ip", "x", "y", 4)
            + 'layer { name: "relu" type: "ReLU" bottom: "y" top: "y" }'
            + 'layer { name: "drop" type: "Dropout" bottom: "y" top: "y" }'
            + 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "l" top: "loss" }',
            phase,
        )
        arrays = {layer.name: (bottoms[0], tops[0]) for layer, bottoms, tops in net._passes.forward if bottoms}
        return arrays["relu"][0] is arrays["relu"][1], arrays["drop"][0] is arrays["drop"][1]

    # In TRAIN the ReLU reads its own output in backward, so the dropout after it may not write over it.
    assert homes("TRAIN") == (True, False)


def test_an_input_is_never_overwritten() -> None:
    net = Net(inputs(x=(2, 2)) + 'layer { name: "r" type: "ReLU" bottom: "x" top: "x" }' + dense("ip", "x", "y", 1))
    x = np.float32([[-1, 2], [3, -4]])
    first = net.forward(x=x)["y"]
    assert np.array_equal(net.blobs["x"].data, x)
    assert np.array_equal(net.forward()["y"], first)


def test_gradients_of_a_blob_with_several_readers_add_up() -> None:
    """The same net with a Split layer, and with none, and a blob that is read twice by one layer."""
    joins = """
    layer { name: "s" type: "Sigmoid" bottom: "A" top: "s" }
    layer { name: "t" type: "TanH" bottom: "B" top: "t" }
    layer { name: "sum" type: "Eltwise" bottom: "s" bottom: "t" bottom: "C" bottom: "C" top: "y" }
    """
    head = "force_backward: true\n" + inputs(x=(3, 4))
    split = 'layer { name: "split" type: "Split" bottom: "x" top: "a" top: "b" top: "c" }'
    named = Net(head + split + joins.replace('"A"', '"a"').replace('"B"', '"b"').replace('"C"', '"c"'))
    plain = Net(head + joins.replace('"A"', '"x"').replace('"B"', '"x"').replace('"C"', '"x"'))
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((3, 4), np.float32), rng.standard_normal((3, 4), np.float32)
    assert np.array_equal(named.forward(x=x)["y"], plain.forward(x=x)["y"])
    for _ in range(2):  # the second pass starts from nothing again
        first, second = named.backward(y=dy)["x"], plain.backward(y=dy)["x"]
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)
        s = 1 / (1 + np.exp(-x.astype(np.float64)))
        np.testing.assert_allclose(first, dy * (s * (1 - s) + 1 - np.tanh(x) ** 2 + 2), rtol=1e-5)


def test_losses_are_weighted_and_added() -> None:
    text = (
        "force_backward: true\n"
        + inputs(a=(2, 3), b=(2, 3))
        + 'layer { name: "one" type: "EuclideanLoss" bottom: "a" bottom: "b" top: "one" loss_weight: 2 }'
        + 'layer { name: "p" type: "Power" bottom: "a" top: "p" loss_weight: 0.5 power_param { scale: 3 } }'
        + 'layer { name: "r" type: "ReLU" bottom: "p" top: "r" }'
    )
    net = Net(text)
    a, b = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([[1, 1, 1], [1, 1, 1]])
    net.forward(a=a, b=b)
    assert net.loss == pytest.approx(2 * ((a - b) ** 2).sum() / 4 + 0.5 * 3 * a.sum())
    gradients = net.backward(r=np.full((2, 3), 7))
    np.testing.assert_allclose(gradients["a"], 2 * (a - b) / 2 + 3 * (0.5 + 7), rtol=1e-6)
    np.testing.assert_allclose(gradients["b"], -2 * (a - b) / 2, rtol=1e-6)


def test_shared_parameters_appear_once_and_collect_both_gradients() -> None:
    first = dense("ipa", "data", "a", 6, 'param { name: "w" lr_mult: 1.5 } param { name: "b" decay_mult: 0 }')
    second = dense("ipb", "a", "y", 6, 'param { name: "w" } param { name: "b" lr_mult: 2 }')
    loss = 'layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" top: "loss" }'
    shared = Net(inputs(data=(4, 6), t=(4, 6)) + first + second + loss, "TRAIN")
    assert [(p.name, p.lr_mult, p.decay_mult) for p in shared.learnable] == [("ipa.0", 1.5, 1), ("ipa.1", 2, 0)]
    assert shared.params["ipa"][0] is shared.params["ipb"][0]
    apart = Net(
        inputs(data=(4, 6), t=(4, 6)) + dense("ipa", "data", "a", 6) + dense("ipb", "a", "y", 6) + loss, "TRAIN"
    )
    rng = np.random.default_rng(0)
    feed = {"data": rng.standard_normal((4, 6), np.float32), "t": rng.standard_normal((4, 6), np.float32)}
    for layer in ("ipa", "ipb"):
        for i in range(2):
            apart.params[layer][i].data = shared.params["ipa"][i].data
    assert shared.forward(**feed)["loss"] == apart.forward(**feed)["loss"]
    shared.backward()
    apart.backward()
    for i in range(2):
        both = apart.params["ipa"][i].diff + apart.params["ipb"][i].diff
        np.testing.assert_allclose(shared.params["ipa"][i].diff, both, rtol=1e-5, atol=1e-6)
    with pytest.raises(LayerError, match=r"'ipb'.*two values of lr_mult"):
        Net(inputs(data=(4, 6)) + first + second.replace('"w" }', '"w" lr_mult: 9 }'))
    with pytest.raises(LayerError, match=r"'ipb'.*shape of its owner"):
        Net(inputs(data=(4, 6)) + first + second.replace("num_output: 6", "num_output: 5"))


def test_gradients_go_only_where_they_are_needed() -> None:
    text = inputs(data=(2, 3), l=(2,)) + dense("frozen", "data", "f", 4, "param { lr_mult: 0 } param { lr_mult: 0 }")
    text += dense("ip", "f", "y", 2) + 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "l" top: "q" }'
    feed = {"data": np.ones((2, 3)), "l": [0, 1]}
    net = Net(text, "TRAIN")
    net.forward(**feed)
    assert net.backward() == {}
    assert net._passes.steps is not None
    assert [step.layer.name for step in net._passes.steps] == ["loss", "ip"]
    assert not net.params["frozen"][0].diff.any()
    assert net.params["ip"][0].diff.any()
    forced = Net("force_backward: true\n" + text, "TRAIN")
    forced.forward(**feed)
    assert set(forced.backward()) == {"data", "l"}
    assert forced.params["frozen"][0].diff.any()
    cut = Net(
        text.replace('bottom: "y" bottom: "l"', 'bottom: "y" bottom: "l" propagate_down: false propagate_down: false')
    )
    cut.forward(**feed)
    with pytest.raises(UsageError, match="no backward pass"):
        cut.backward()


def test_parameter_gradients_add_up_until_cleared() -> None:
    net = Net(LENET, "TRAIN", input_shapes=SHAPES)
    feed = {"data": np.random.default_rng(0).random(SHAPES["data"], np.float32), "label": np.arange(4)}
    net.forward(**feed)
    net.backward()
    once = net.params["conv1"][0].diff.copy()
    net.backward()
    np.testing.assert_array_equal(net.params["conv1"][0].diff, 2 * once)
    net.clear_param_diffs()
    assert not net.params["conv1"][0].diff.any()


def test_test_nets_share_the_memory_of_parameters(tmp_path: Path) -> None:
    train, test = (Net(LENET, phase, input_shapes=SHAPES, seed=i) for i, phase in enumerate(("TRAIN", "TEST")))
    test.share_params(train)
    x, labels = np.random.default_rng(0).random(SHAPES["data"], np.float32), np.arange(4)
    assert test.forward(data=x, label=labels)["loss"] == train.forward(data=x, label=labels)["loss"]
    train.params["ip2"][1].data[...] += 1
    assert test.params["ip2"][1].data is train.params["ip2"][1].data
    train.save(tmp_path / "w.caffemodel")
    other = Net(LENET, "TEST", tmp_path / "w.caffemodel", input_shapes=SHAPES, seed=5)
    assert all(
        np.array_equal(a.data, b.data)
        for name, blobs in train.params.items()
        for a, b in zip(blobs, other.params[name], strict=True)
    )


def test_a_pass_allocates_little() -> None:
    net = Net(LENET, "TRAIN", input_shapes={"data": (32, 1, 28, 28)})
    feed = {"data": np.zeros((32, 1, 28, 28), np.float32), "label": np.zeros(32, np.int32)}

    def step() -> None:
        net.forward(**feed)
        net.backward()

    step()
    tracemalloc.start()
    step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    activations = sum(4 * blob.count for blob in net.blobs.values())
    assert peak < 0.05 * activations


def test_inputs_of_other_kinds(tmp_path: Path) -> None:
    text = (
        'layer { name: "m" type: "MemoryData" top: "m" top: "l" memory_data_param '
        "{ batch_size: 2 channels: 1 height: 3 width: 3 } }"
        'layer { name: "d" type: "DummyData" top: "c" dummy_data_param { shape { dim: 2 dim: 9 } '
        'data_filler { type: "constant" value: 3 } } }'
        'layer { name: "f" type: "Flatten" bottom: "m" top: "f" }'
        'layer { name: "e" type: "Eltwise" bottom: "f" bottom: "c" top: "y" }'
        'layer { name: "s" type: "Silence" bottom: "l" }'
    )
    net = Net(text)
    assert (net.inputs, net.outputs) == (["m", "l"], ["y"])
    np.testing.assert_array_equal(net.forward(m=np.ones((2, 1, 3, 3)))["y"], np.full((2, 9), 4))


def test_a_loss_without_a_top_gets_its_own_name() -> None:
    layer: Any = 'layer { name: "cost" type: "SoftmaxWithLoss" bottom: "x" bottom: "l" }'
    assert Net(inputs(x=(2, 3), l=(2,)) + layer).outputs == ["cost"]


SHARED = """
input: "x" input_shape { dim: 2 dim: 3 }
layer { name: "a" type: "InnerProduct" bottom: "x" top: "a" param { name: "w" }
  inner_product_param { num_output: %d bias_term: false weight_filler { type: "xavier" } } }
layer { name: "b" type: "InnerProduct" bottom: "a" top: "b" param { name: "w" share_mode: PERMISSIVE }
  inner_product_param { num_output: 3 bias_term: false } }
layer { name: "still" type: "InnerProduct" bottom: "b" top: "y" loss_weight: 1 param { lr_mult: 0 }
  inner_product_param { num_output: 1 bias_term: false weight_filler { type: "xavier" } } }
"""


@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("outputs", [3, 2])  # with 2 the shared parameter has two shapes
def test_gradients_after_a_clear_are_the_sums_of_what_came_since(outputs: int, looked_at: bool) -> None:
    # Of two layers that share a parameter the first may write its gradient, the other adds; so does a second pass.
    net = Net(SHARED % outputs, "TRAIN")
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal((2, 3), np.float32) for _ in range(3)]
    blobs = [net.params["a"][0], net.params["b"][0], net.params["still"][0]]

    def sums(xs: list[np.ndarray]) -> list[np.ndarray]:
        for blob in blobs:
            blob.diff[...] = np.nan
        net.clear_param_diffs()
        if looked_at:
            assert not any(blob.diff.any() for blob in blobs)
        for x in xs:
            net.forward(x=x)
            net.backward()
        return [blob.diff.ravel().copy() for blob in blobs]

    alone = [sums([x]) for x in batches]
    together = sums(batches)
    np.testing.assert_array_equal(together[0], together[1])
    np.testing.assert_allclose(together[0], sum(each[0] for each in alone), rtol=1e-5)
    assert together[0].any()
    assert not together[2].any()
    w = blobs[0].data.astype(float)
    v = blobs[2].data.astype(float)
    x, dy = batches[0].astype(float), np.ones((2, 1))
    a, db = x @ w.T, dy @ v
    wanted = (db.T @ a).ravel() + ((db @ w.reshape(3, outputs)).T @ x).ravel()
    np.testing.assert_allclose(alone[0][0], wanted, rtol=1e-5)
