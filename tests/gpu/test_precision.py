"""Nets that store float16: held to an emulation that rounds by definition, and to the promises of float32 nets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.net import Net
from gpu.precision import check
from gpu.solver import Solver
from profiler.errors import UsageError
from tests.gpu import nets
from tests.gpu.counting import counted
from tests.gpu.nets import inputs, layer

SCALAR = 64
DENSE = 'inner_product_param { num_output: %d weight_filler { type: "xavier" } bias_filler { value: 0.1 } }'


def rounded(values: Any) -> np.ndarray:
    """To float16 and back, in float64: NumPy's own conversion."""
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32).astype(np.float16).astype(np.float64)


def lost(net: Net) -> dict[str, Any]:
    return {each.tensor.name: each for each in net.precision.losses()} if net.precision else {}


def dtypes(net: Net) -> dict[str, str]:
    return {name: blob.device_data.dtype.name for name, blob in net.blobs.items()}


def two_layers(**options: Any) -> Net:
    text = inputs(x=(4, 6), l=(4,)) + layer("InnerProduct", "a", ["x"], ["a"], DENSE % 8)
    text += layer("ReLU", "r", ["a"], ["r"]) + layer("InnerProduct", "b", ["r"], ["b"], DENSE % 3)
    return Net(text + layer("SoftmaxWithLoss", "loss", ["b", "l"], ["loss"]), "TRAIN", seed=3, **options)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_every_array_as_an_emulation_that_rounds(scale: float) -> None:
    net = two_layers(precision="fp16")
    rng = np.random.default_rng(0)
    x, label = rng.standard_normal((4, 6)).astype(np.float32), np.array([0, 2, 1, 1])
    net.loss_scale = scale
    net.clear_param_diffs()
    net.forward(x=x, l=label)
    net.backward()
    (wa, ba), (wb, bb) = ([rounded(blob.data) for blob in net.params[name]] for name in ("a", "b"))
    xh = rounded(x)
    a = rounded(xh @ wa.T + ba)
    r = np.maximum(a, 0)
    b = rounded(r @ wb.T + bb)
    p = np.exp(b - b.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    assert net.loss == pytest.approx(-np.log(p[np.arange(4), label]).mean(), rel=1e-6)
    p[np.arange(4), label] -= 1
    db = rounded(p / 4 * scale)
    dr = rounded(db @ wb)
    da = dr * (a > 0)
    for name, data, diff in (("a", a, da), ("r", r, dr), ("b", b, db)):
        # A float32 sum may fall on the other side of a tie: one step of float16 off, no more.
        np.testing.assert_allclose(net.blobs[name].data.astype(np.float64), data, rtol=2**-10, err_msg=name)
        np.testing.assert_allclose(net.blobs[name].diff.astype(np.float64), diff, rtol=2**-9, atol=2**-24, err_msg=name)
    for name, found, wanted in (
        ("b", net.params["b"], (db.T @ r, db.sum(0))),
        ("a", net.params["a"], (da.T @ xh, da.sum(0))),
    ):
        for blob, gradient in zip(found, wanted, strict=True):
            assert blob.diff.dtype == np.float32
            np.testing.assert_allclose(blob.diff, gradient, rtol=2e-3, atol=1e-4 * scale, err_msg=name)


ONE = "inner_product_param { num_output: 1 bias_term: false weight_filler { value: 1 } }"


def test_weights_collect_steps_that_float16_cannot_tell_apart() -> None:
    """Steps of 2^-13 from 1, where float16 has steps of 2^-11 below it: by hand, in powers of two."""
    text = inputs(x=(1, 1)) + layer("InnerProduct", "a", ["x"], ["a"], f"{ONE} loss_weight: 1")
    rule = f'base_lr: {2.0**-13} lr_policy: "fixed" random_seed: 1\n'
    made = Solver(rule, net=text, backend="numpy", precision="fp16")
    (weight,) = made.net.params["a"]
    for step in range(17):
        exact = 1 - step * 2.0**-13
        assert weight.data.item() == exact
        assert made.step_on({"x": [[1.0]]}) == float(np.float16(exact))
    assert weight.data.dtype == np.float32


def test_sums_inside_a_layer_and_over_sub_batches_are_float32() -> None:
    """In float16 a sum of ones ends at 2048, and 1 + 2^-12 is 1."""
    text = inputs(x=(4096, 1)) + layer("InnerProduct", "a", ["x"], ["a"], ONE)
    net = Net(text + layer("Reduction", "sum", ["a"], ["sum"], "loss_weight: 1"), "TRAIN", precision="fp16")
    assert net.forward(x=np.ones((4096, 1)))["sum"] == 4096
    net.backward()
    assert net.params["a"][0].diff.item() == 4096
    wide = Net(inputs(x=(1, 4096)) + layer("InnerProduct", "a", ["x"], ["a"], ONE), "TEST", precision="fp16")
    assert wide.forward(x=np.ones((1, 4096)))["a"].item() == 4096
    net = Net(inputs(x=(1, 1)) + layer("InnerProduct", "a", ["x"], ["a"], f"{ONE} loss_weight: 1"), "TRAIN",
              precision="fp16")  # fmt: skip
    net.clear_param_diffs()
    for value in (1, 2.0**-12):
        net.forward_only(x=[[value]])
        net.backward_only()
    assert net.params["a"][0].diff.item() == 1 + 2.0**-12


def test_what_stays_in_float32() -> None:
    net = two_layers(precision="fp16")
    assert dtypes(net) == {
        "x": "float16",
        "l": "float32",
        "a": "float16",
        "r": "float16",
        "b": "float16",
        "loss": "float32",
    }
    assert {blob.data.dtype.name for blobs in net.params.values() for blob in blobs} == {"float32"}
    order = ["x", "a.0", "a.1", "a", "r", "b.0", "b.1", "b", "b.diff", "r.diff", "a.diff", "x.diff"]
    assert [tensor.name for tensor in net.precision.tensors] == order  # as a step rounds them: the first one is named
    for name, each in lost(net).items():  # a blob's gradient belongs to the layer that makes the blob
        assert each.tensor.layer == name.split(".")[0]
        assert each.tensor.phase == ("backward" if name.endswith(".diff") else "forward")
    kept = two_layers(precision="fp16", keep_fp32=["b", "x"])
    assert dtypes(kept) | {"b": "float32", "x": "float32"} == dtypes(kept)
    assert not {"b", "b.0", "b.diff", "x"} & set(lost(kept))
    assert set(lost(net)) == {"x", "a.0", "a.1", "a", "r", "b.0", "b.1", "b", "b.diff", "r.diff", "a.diff", "x.diff"}


@pytest.mark.parametrize(
    ("text", "exact", "half"),
    [
        (layer("DummyData", "d", [], ["d"], "dummy_data_param { shape { dim: 2 dim: 5 } }")
         + layer("InnerProduct", "ip", ["d"], ["ip"], DENSE % 4), ["d"], ["ip"]),
        (inputs(x=(2, 5), l=(2,)) + layer("Accuracy", "acc", ["x", "l"], ["acc"]), ["x", "l", "acc"], []),
        (inputs(x=(2, 5), i=(2,)) + layer("Reshape", "i2", ["i"], ["i2"], "reshape_param { shape { dim: -1 } }")
         + layer("Embed", "e", ["i2"], ["e"], "embed_param { num_output: 4 input_dim: 9000 }")
         + layer("InnerProduct", "ip", ["x"], ["ip"], DENSE % 4) + layer("Eltwise", "s", ["e", "ip"], ["s"])
         + layer("ArgMax", "top", ["s"], ["top"]), ["i", "i2", "top"], ["x", "e", "ip", "s"]),
        (inputs(x=(2, 5), t=(2, 4)) + layer("InnerProduct", "ip", ["x"], ["ip"], DENSE % 4)
         + layer("EuclideanLoss", "loss", ["ip", "t"], ["loss"]), ["t", "loss"], ["x", "ip"]),
        (inputs(x=(2, 5), t=(2, 4), u=(2, 4)) + layer("Concat", "c", ["t", "u"], ["c"])
         + layer("InnerProduct", "ip", ["x"], ["ip"], DENSE % 8)
         + layer("SigmoidCrossEntropyLoss", "loss", ["ip", "c"], ["loss"]), ["t", "u", "c", "loss"], ["x", "ip"]),
        (inputs(x=(2, 5)) + layer("InnerProduct", "ip", ["x"], ["ip"], DENSE % 4)
         + layer("Softmax", "p", ["ip"], ["p"]), ["p"], ["x", "ip"]),
    ],
)  # fmt: skip
def test_labels_targets_and_indices_are_not_rounded(text: str, exact: list[str], half: list[str]) -> None:
    found = dtypes(Net(text, "TEST", precision="fp16"))
    assert found == dict.fromkeys(exact, "float32") | dict.fromkeys(half, "float16")


def test_an_index_above_2048_finds_its_row() -> None:
    text = inputs(i=(3,)) + layer(
        "Embed", "e", ["i"], ["e"], "embed_param { num_output: 2 input_dim: 9000 bias_term: false }"
    )
    net = Net(text, "TEST", precision="fp16")
    rows = np.arange(9000, dtype=np.float32) % 1999
    net.params["e"][0].data[...] = rows[:, None]
    assert net.forward(i=np.array([2049, 4097, 8999]))["e"][:, 0].tolist() == [rows[2049], rows[4097], rows[8999]]


def test_every_layer_with_its_memory_reused_and_poisoned() -> None:
    """Same bits with reuse, with poison and without, close to float32; a pass allocates nothing."""
    plain = Net(nets.every_layer(), "TRAIN")
    feed = nets.feed(plain)
    found = []
    for options in ({}, {"reuse": True}, {"reuse": True, "poison": True}):
        net = Net(nets.every_layer(), "TRAIN", precision="fp16", **options)
        for _ in range(2):
            net.forward_only(**feed)
            net.clear_param_diffs()
            net.backward_only()
        found.append([param.blob.diff.copy() for param in net.learnable])
        assert all(np.array_equal(a, b) for a, b in zip(found[0], found[-1], strict=True))
    plain.iteration = 1  # the masks of the second pass
    plain.forward(**feed)
    plain.backward()
    for param, gradient in zip(plain.learnable, found[0], strict=True):
        assert np.linalg.norm(gradient - param.blob.diff) <= 2e-3 * np.linalg.norm(param.blob.diff) + 1e-6, param.name
    with counted() as counts:
        for _ in range(20):
            net.forward_only(**feed)
            net.backward_only()
    assert {key: count for key, count in counts.items() if key[1] > SCALAR} == {}


@pytest.mark.filterwarnings("ignore::gpu.fields.FieldWarning")  # of gradients in place that Caffe gets wrong
@settings(deadline=None, max_examples=25)
@given(nets.random_net(), st.booleans())
def test_random_nets(text: str, reuse: bool) -> None:
    """Poisoned memory reaches no result, whatever is shared, added or worked on in place."""
    one, two = Net(text, "TRAIN", precision="fp16"), Net(text, "TRAIN", precision="fp16", reuse=reuse, poison=True)
    feed = nets.feed(one)
    with np.errstate(all="ignore"):  # products of products may overflow
        for net in (one, two):
            net.forward_only(**feed)
            net.clear_param_diffs()
            net.backward_only()
    assert np.array_equal(one.loss, two.loss, equal_nan=True)
    for a, b in zip(one.learnable, two.learnable, strict=True):
        assert np.array_equal(a.blob.diff, b.blob.diff, equal_nan=True), a.name
    assert np.array_equal(one.precision.counts(), two.precision.counts())


def test_gradients_of_several_readers_are_added_in_float32_and_rounded_once() -> None:
    text = inputs(x=(1, 1)) + layer("InnerProduct", "a", ["x"], ["a"], DENSE % 1)
    text += layer("Eltwise", "twice", ["a", "a"], ["twice"], "eltwise_param { coeff: 1 coeff: 0.0004882812 }")
    net = Net("force_backward: true\n" + text, "TRAIN", precision="fp16")
    net.forward(x=[[1.0]])
    net.backward(twice=np.array([[1.0]]))
    # 1 + 0.0004882812 lies just below the tie between 1 and the next float16, 0.00048828125 on it.
    assert net.blobs["a"].diff.item() == 1.0
    net.backward(twice=np.array([[3.0]]))
    assert net.blobs["a"].diff.item() == float(np.float16(3 * 1.0004882812))


def test_overflow_and_underflow_are_counted_where_they_happen() -> None:
    net = two_layers(precision="fp16")
    net.params["a"][0].data[...] = 1e-9
    net.params["a"][1].data[...] = 7e4
    with np.errstate(invalid="ignore"):
        net.forward(x=np.full((4, 6), 1e5), l=np.zeros(4))
    found = lost(net)
    assert found["x"].overflow == 24
    assert found["a.0"].flushed == found["a.0"].nonzero == 48
    assert found["a.1"].overflow == 8
    assert found["a"].tensor.layer == "a"
    assert [found[name].tensor.phase for name in ("x", "a.0", "b.diff")] == ["forward", "forward", "backward"]
    assert found["b.diff"].nonzero == 0  # no backward pass yet


def test_a_net_takes_less_memory_and_follows_other_shapes() -> None:
    text = inputs(x=(8, 4, 16, 16))
    at = "x"
    for i in range(6):
        text += layer("Sigmoid", f"s{i}", [at], [f"s{i}"])
        at = f"s{i}"
    text = "force_backward: true\n" + text
    totals = {}
    for precision in ("fp32", "fp16"):
        net = Net(text, "TRAIN", precision=precision, reuse=True)
        totals[precision] = net.memory_plan().total
        net.forward(x=np.ones((3, 4, 9, 9)))
        assert net.blobs[at].shape == (3, 4, 9, 9)
    assert totals["fp16"] < 0.85 * totals["fp32"]


def test_a_backward_pass_in_phase_test_and_what_comes_out() -> None:
    text = inputs(x=(2, 3)) + layer("InnerProduct", "a", ["x"], ["a"], DENSE % 4) + layer("TanH", "t", ["a"], ["t"])
    net = Net("force_backward: true\n" + text, "TEST", precision="fp16")
    assert net.forward(x=np.ones((2, 3)))["t"].dtype == np.float32
    assert net.backward(t=np.ones((2, 4)))["x"].dtype == np.float32
    late = two_layers(precision="fp16")
    test = Net(inputs(x=(2, 3), l=(2,)) + layer("InnerProduct", "a", ["x"], ["a"], DENSE % 4)
               + layer("SoftmaxWithLoss", "loss", ["a", "l"], ["loss"]), "TEST", precision="fp16")  # fmt: skip
    test.forward(x=np.ones((2, 3)), l=np.zeros(2))
    test.backward()
    assert np.abs(test.params["a"][0].diff).max() > 0
    assert late.blobs["a"].diff.dtype == np.float16


def test_wrong_settings_are_named() -> None:
    with pytest.raises(UsageError, match="unknown precision 'fp8'"):
        two_layers(precision="fp8")
    with pytest.raises(UsageError, match="keep_fp32 names layers that the net lacks") as caught:
        two_layers(precision="fp16", keep_fp32=["a", "c"])
    assert caught.value.found == "c"
    with pytest.raises(UsageError) as caught:
        check("fp16", ["e"], ["data", "data", "ip"])  # one of each phase
    assert (caught.value.expected, caught.value.found) == ("data, ip", "e")
    two_layers(keep_fp32=["a"])  # which it is in any case


def test_an_error_in_a_layer_leaves_the_parameters_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    net = two_layers(precision="fp16")
    before = net.params["b"][0].data
    kept = before.copy()

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(net.layers[4], "forward", fail)
    with pytest.raises(RuntimeError):
        net.forward(x=np.ones((4, 6)), l=np.zeros(4))
    assert net.params["b"][0].data is before
    assert np.array_equal(before, kept)
