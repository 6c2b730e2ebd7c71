"""What ``--log-level debug`` says of each layer, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from gpu.describe import describe, line
from gpu.net import Net
from tests.gpu.nets import inputs, layer

NET = (
    inputs(x=(2, 3, 6, 6), l=(2,))
    + layer(
        "Convolution", "c", ["x"], ["c"],
        "convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: 'gaussian' std: 0.5 mean: 1 } "
        "bias_filler { value: -2 } }",
    )
    + layer("ReLU", "r", ["c"], ["c"])
    + layer("Pooling", "p", ["c"], ["p"], "pooling_param { kernel_size: 2 stride: 2 }")
    + layer("InnerProduct", "i", ["p"], ["i"], "inner_product_param { num_output: 5 }")
    + layer("SoftmaxWithLoss", "s", ["i", "l"], ["s"])
)  # fmt: skip


def test_shapes_and_memory_of_each_layer() -> None:
    net = Net(NET, "TRAIN", seed=1)
    rows = {row["layer"]: row for row in describe(net)}
    assert list(rows) == ["x", "l", "c", "r", "p", "i", "s"]
    assert {row["phase"] for row in rows.values()} == {"TRAIN"}
    assert (rows["c"]["type"], rows["c"]["bottoms"], rows["c"]["tops"]) == (
        "Convolution", {"x": [2, 3, 6, 6]}, {"c": [2, 4, 4, 4]},
    )  # fmt: skip
    assert rows["s"]["bottoms"] == {"i": [2, 5], "l": [2]}
    assert [name for name, row in rows.items() if row["in_place"]] == ["r"]
    assert [name for name, row in rows.items() if not row["backward"]] == ["x", "l"]
    buffers = net.memory_plan().buffers
    work = {buffer.name.split()[0]: buffer.nbytes for buffer in buffers if buffer.kind == "work"}
    assert {"c", "r", "s"} <= set(work)
    values = {"x": 216, "l": 2, "c": 112, "r": 2 * 128, "p": 2 * 32, "i": 2 * 10 + 85, "s": 2 * 1}
    assert {name: row["bytes"] for name, row in rows.items()} == {
        name: 4 * count + work.get(name, 0) for name, count in values.items()
    }  # data and gradients, in place in the last layer; of parameters the gradients before they are added up
    assert sum(row["bytes"] for row in rows.values()) == sum(buffer.nbytes for buffer in buffers)
    assert {name: row["param_bytes"] for name, row in rows.items() if row["param_bytes"]} == {
        "c": 2 * 4 * (4 * 27 + 4), "i": 2 * 4 * (5 * 16 + 5),
    }  # fmt: skip
    assert rows["p"]["kept_bytes"] == 4 * 32  # which value was the largest
    test = {row["layer"]: row for row in describe(Net(NET, "TEST", seed=1))}
    assert test["i"]["param_bytes"] == 4 * 85
    assert test["c"]["phase"] == "TEST"


def test_fillers_and_initial_values() -> None:
    net = Net(NET, "TRAIN", seed=1)
    rows = {row["layer"]: row for row in describe(net)}
    weight, bias = rows["c"]["params"]
    values = net.params["c"][0].data.astype(np.float64)
    assert (weight["name"], weight["shape"], weight["filler"]) == ("c.0", [4, 3, 3, 3], "gaussian mean 1 std 0.5")
    told = [weight[name] for name in ("mean", "std", "min", "max")]
    assert told == pytest.approx([values.mean(), values.std(), values.min(), values.max()])
    assert told[:2] == pytest.approx([1, 0.5], abs=0.15)
    assert bias == {
        "name": "c.1", "shape": [4], "filler": "constant value -2", "mean": -2, "std": 0, "min": -2, "max": -2,
        "zeros": 0,
    }  # fmt: skip
    assert [param["zeros"] for param in rows["i"]["params"]] == [80, 5]
    shown = line(rows["c"])
    nbytes = sum(rows["c"][name] for name in ("bytes", "param_bytes", "kept_bytes"))
    assert shown.startswith(f"TRAIN c (Convolution): x 2x3x6x6 -> c 2x4x4x4, {nbytes:,} bytes; c.0 4x3x3x3 gaussian")
    assert "c.1 4 constant value -2 mean -2 std 0 [-2, -2] zeros 0" in shown
    assert line(rows["x"]) == "TRAIN x (Input): - -> x 2x3x6x6, 864 bytes, no backward"
