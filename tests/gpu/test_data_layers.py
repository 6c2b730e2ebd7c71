"""Data layers of a net: what they ask of the feed, what a net makes of them, and DummyData as in Caffe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu import Net
from gpu.data_layers import DataLayer, Transform, data_layers
from gpu.solver import Solver
from profiler.errors import StallscopeError

IMAGES = (
    'layer { name: "d" type: "ImageData" top: "data" top: "label" transform_param { crop_size: 5 force_gray: true }\n'
    '  image_data_param { source: "list.txt" new_height: 7 new_width: 8 shuffle: true rand_skip: 2 } }\n'
)
ROWS = (
    'layer { name: "h" type: "HDF5Data" top: "x" top: "y" top: "z" %s\n'
    '  hdf5_data_param { source: "rows.txt" batch_size: 4 } }\n'
)


def test_image_data() -> None:
    (layer,) = data_layers(IMAGES, "TRAIN")
    assert layer == DataLayer(
        name="d", phase="TRAIN", tops=("data", "label"), source="list.txt", batch=1, backend="LIST",
        transform=Transform(crop=5, force_color=True, resize=(7, 8)), root=".", shuffle=True,
        unused=("image_data_param.rand_skip", "transform_param.force_gray"),
    )  # fmt: skip
    net = Net(IMAGES, input_shapes={"data": (2, 3, 5, 5)})
    assert net.inputs == ["data", "label"]
    assert net.blobs["label"].shape == (2,)
    assert net.data_layers[0].batch == 1


def test_hdf5_data_with_three_tops() -> None:
    net = Net(ROWS % "", input_shapes={"x": (4, 2), "y": (4,), "z": (4, 3, 1)})
    assert net.inputs == ["x", "y", "z"]
    assert net.data_layers == data_layers(ROWS % "", "TEST")
    assert (net.data_layers[0].tops, net.data_layers[0].backend) == (("x", "y", "z"), "HDF5")
    assert Net(ROWS % "", input_shapes={"x": (4, 2)}).blobs["z"].shape == (4,)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (ROWS % "transform_param { mirror: true }", "not transformed"),
        (ROWS % "transform_param { }", "not transformed"),
        (IMAGES.replace("new_width: 8", ""), "new_height and new_width go together"),
        (IMAGES.replace('source: "list.txt"', ""), "has no source"),
        ('layer { name: "w" type: "WindowData" top: "data" }', r"unsupported type.*\n.*\n.*'w' \(WindowData\)"),
        (
            'layer { name: "o" type: "HDF5Output" bottom: "x" hdf5_output_param { file_name: "x" } }',
            r"unsupported type.*\n.*\n.*'o' \(HDF5Output\)",
        ),
    ],
)
def test_what_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(StallscopeError, match=told):
        Net(text, input_shapes={"data": (2, 3, 5, 5)} if "ImageData" in text else {"x": (4, 2)})


def dummy(fields: str, tops: int = 2, phase: str = "TRAIN", **more: Any) -> Net:
    names = " ".join(f'top: "t{i}"' for i in range(tops))
    keep = "".join(f'layer {{ name: "k{i}" type: "Power" bottom: "t{i}" top: "k{i}" }}\n' for i in range(tops))
    return Net(
        f'layer {{ name: "d" type: "DummyData" {names} dummy_data_param {{ {fields} }} }}\n{keep}', phase, **more
    )


def test_dummy_data_has_zeros_without_a_filler_and_one_shape_for_all_tops() -> None:
    found = dummy("shape { dim: 2 dim: 3 }").forward()
    assert [found[f"k{i}"].shape for i in range(2)] == [(2, 3)] * 2
    assert not found["k0"].any()
    assert not found["k1"].any()


def test_dummy_data_of_the_old_form_may_mix_one_and_one_for_each() -> None:
    found = dummy("num: 2 num: 4 channels: 3 height: 1 width: 5 width: 6 data_filler { value: 2.5 }").forward()
    assert (found["k0"].shape, found["k1"].shape) == ((2, 3, 1, 5), (4, 3, 1, 6))
    assert (found["k1"] == 2.5).all()


def test_draws_of_dummy_data_are_new_in_each_pass_of_train_and_constants_are_not() -> None:
    fields = 'shape { dim: 50 } data_filler { type: "gaussian" std: 1 } data_filler { value: 3 }'
    net, same = dummy(fields, seed=1), dummy(fields, seed=1)
    first, second = net.forward(), net.forward()
    assert not np.array_equal(first["k0"], second["k0"])
    assert (second["k1"] == 3).all()
    same.iteration = 1
    np.testing.assert_array_equal(same.forward()["k0"], second["k0"])  # a function of seed and iteration
    test = dummy(fields, phase="TEST", seed=1)
    np.testing.assert_array_equal(test.forward()["k0"], test.forward()["k0"])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ("num: 2 channels: 3 height: 1", "one num, channels, height and width"),
        ("num: 2 num: 3 num: 4 channels: 3 height: 1 width: 1", "one num, channels, height and width"),
        ("shape { dim: 2 } shape { dim: 2 } shape { dim: 2 }", "one shape, or one for each top"),
        ("shape { dim: 2 } " + "data_filler { value: 1 } " * 3, "no filler, one, or one for each top"),
        ("shape { dim: 2 } num: 2", "exclude each other"),
    ],
)
def test_dummy_data_that_contradicts_itself(fields: str, told: str) -> None:
    with pytest.raises(StallscopeError, match=told):
        dummy(fields)


MEMORY = (
    'layer { name: "m" type: "MemoryData" top: "data" top: "label" memory_data_param '
    "{ batch_size: 2 channels: 1 height: 2 width: 3 } }\n"
)
SCORES = (
    'layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 3 '
    'weight_filler { type: "xavier" } } }\n'
    'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }\n'
)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_memory_data_goes_round_its_arrays(precision: str) -> None:
    data = np.arange(36, dtype=np.float32).reshape(6, 1, 2, 3)
    labels = np.arange(6, dtype=np.float32).reshape(6, 1, 1, 1)  # as pycaffe wants them
    net = Net(MEMORY, "TRAIN", precision=precision)
    net.set_input_arrays(data, labels)
    for start in (0, 2, 4, 0, 2):
        net.forward_only()
        out = {name: net.blobs[name].data for name in ("data", "label")}
        np.testing.assert_array_equal(out["data"], data[start : start + 2])
        np.testing.assert_array_equal(out["label"], labels[start : start + 2, 0, 0, 0])
    data[4] = -1  # not copied, as in Caffe
    np.testing.assert_array_equal(_seen(net)[0], np.full((1, 2, 3), -1))
    net.set_input_arrays(data[:2], labels[:2])
    np.testing.assert_array_equal(_seen(net), data[:2])
    net.set_input_arrays(None)
    net.forward(data=np.full((2, 1, 2, 3), 7), label=np.zeros(2))
    np.testing.assert_array_equal(net.blobs["data"].data, np.full((2, 1, 2, 3), 7))


def _seen(net: Net) -> np.ndarray:
    net.forward_only()
    return net.blobs["data"].data.copy()


def test_training_from_arrays_is_training_on_the_same_batches() -> None:
    rng = np.random.default_rng(0)
    data, labels = rng.standard_normal((6, 1, 2, 3), np.float32), rng.integers(0, 3, 6)
    text = "base_lr: 0.1 lr_policy: 'fixed' momentum: 0.9\n"
    solver, fed = (Solver(text, net=MEMORY + SCORES, backend="numpy", seed=1) for _ in range(2))
    solver.net.set_input_arrays(data, labels)
    for step in range(7):
        part = slice(2 * step % 6, 2 * step % 6 + 2)
        assert solver.step() == fed.step_on({"data": data[part], "label": labels[part]})
    np.testing.assert_array_equal(solver.net.params["ip"][0].data, fed.net.params["ip"][0].data)


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        (((5, 1, 2, 3), (5,)), "no whole batches"),
        (((0, 1, 2, 3), (0,)), "no whole batches"),
        (((4, 1, 3, 2), (4,)), "another size"),
        (((4, 1, 2, 3), (2,)), "needs its label"),
        (((4, 1, 2, 3), None), "an array for each top"),
        (((), ()), "another size"),
    ],
)
def test_arrays_that_do_not_fit_memory_data(shapes: tuple[Any, Any], told: str) -> None:
    net = Net(MEMORY)
    with pytest.raises(StallscopeError, match=rf"'m' \(MemoryData\).*{told}"):
        net.set_input_arrays(*(None if shape is None else np.zeros(shape) for shape in shapes))
    net.forward(data=np.ones((2, 1, 2, 3)), label=np.ones(2))


def test_a_net_that_does_not_take_arrays_says_so() -> None:
    net = Net(MEMORY)
    net.set_input_arrays(np.zeros((2, 1, 2, 3)), np.zeros(2))
    with pytest.raises(StallscopeError, match="'data' comes from the arrays that layer 'm' was given"):
        net.forward(data=np.zeros((2, 1, 2, 3)))
    net.reshape(data=(4, 1, 2, 3), label=(4,))
    with pytest.raises(StallscopeError, match="no whole batches"):
        net.forward()
    with pytest.raises(StallscopeError, match="no MemoryData layer"):
        Net(ROWS % "", input_shapes={"x": (4, 2), "y": (4,), "z": (4,)}).set_input_arrays(np.zeros((4, 2)))
    two = Net(MEMORY + MEMORY.replace('"m"', '"n"').replace('"data"', '"b"').replace('"label"', '"c"'))
    with pytest.raises(StallscopeError, match="needs the name of a MemoryData layer") as caught:
        two.set_input_arrays(np.zeros((2, 1, 2, 3)), np.zeros(2))
    assert caught.value.expected == "m, n"
    two.set_input_arrays(np.ones((2, 1, 2, 3)), np.zeros(2), layer="n")
    two.forward_only()
    assert (two.blobs["b"].data.all(), two.blobs["data"].data.any()) == (True, False)
    with pytest.raises(StallscopeError, match=r"'m' \(MemoryData\): height is missing"):
        Net(MEMORY.replace("height: 2", ""))
