"""Filter, and layers of every kind behind one: they are shaped anew in each pass, in memory planned for all rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu import crosscheck
from gpu import time as gpu_time
from gpu.layers.base import LayerError
from gpu.net import Net
from gpu.solver import Solver
from profiler.errors import UsageError
from tests.gpu import nets
from tests.gpu.counting import counted
from tests.gpu.layer_checks import BACKENDS, one_layer

ROWS = 5
FILL = nets.FILL
IMAGE, LINE = (4, 5, 6), (6,)
SINGLE: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "conv": (f'type: "Convolution" bottom: "x" top: "y" {nets.CONV}', {"x": IMAGE}),
    "deconv": (f'type: "Deconvolution" bottom: "x" top: "y" {nets.DECONV}', {"x": IMAGE}),
    "depthwise": (
        'type: "Convolution" bottom: "x" top: "y" '
        f"convolution_param {{ num_output: 4 group: 4 kernel_size: 3 pad: 1 {FILL} }}",
        {"x": IMAGE},
    ),
    "prelu": ('type: "PReLU" bottom: "x" top: "y"', {"x": IMAGE}),
    "elu": ('type: "ELU" bottom: "x" top: "y"', {"x": IMAGE}),
    "swish": ('type: "Swish" bottom: "x" top: "y"', {"x": IMAGE}),
    "mvn": ('type: "MVN" bottom: "x" top: "y"', {"x": IMAGE}),
    "bn": ('type: "BatchNorm" bottom: "x" top: "y" batch_norm_param { use_global_stats: false }', {"x": IMAGE}),
    "bias": ('type: "Bias" bottom: "x" top: "y"', {"x": IMAGE}),
    "scale by another": (
        'type: "Scale" bottom: "x" bottom: "z" top: "y" scale_param { axis: 0 }',
        {"x": IMAGE, "z": ()},
    ),
    "tile": ('type: "Tile" bottom: "x" top: "y" tile_param { tiles: 2 }', {"x": IMAGE}),
    "spp": ('type: "SPP" bottom: "x" top: "y" spp_param { pyramid_height: 2 }', {"x": IMAGE}),
    "im2col": ('type: "Im2col" bottom: "x" top: "y" convolution_param { kernel_size: 3 }', {"x": IMAGE}),
    "max": ('type: "Pooling" bottom: "x" top: "y" pooling_param { kernel_size: 2 stride: 2 }', {"x": IMAGE}),
    "reduction": ('type: "Reduction" bottom: "x" top: "y"', {"x": IMAGE}),
    "reduction of rows": (
        'type: "Reduction" bottom: "x" top: "y" reduction_param { axis: 1 operation: MEAN }',
        {"x": IMAGE},
    ),
    "argmax": ('type: "ArgMax" bottom: "x" top: "y"', {"x": LINE}),
    "embed": (
        f'type: "Embed" bottom: "l" top: "y" embed_param {{ num_output: 3 input_dim: 6 {FILL} }}',
        {"l": ()},
    ),
    "ip": (f'type: "InnerProduct" bottom: "x" top: "y" inner_product_param {{ num_output: 3 {FILL} }}', {"x": IMAGE}),
    "softmax loss": ('type: "SoftmaxWithLoss" bottom: "x" bottom: "l" top: "y"', {"x": LINE, "l": ()}),
    "ignoring loss": (
        'type: "SoftmaxWithLoss" bottom: "x" bottom: "l" top: "y" loss_param { ignore_label: 2 }',
        {"x": LINE, "l": ()},
    ),
    "sigmoid loss": ('type: "SigmoidCrossEntropyLoss" bottom: "x" bottom: "z" top: "y"', {"x": LINE, "z": LINE}),
    "hinge": ('type: "HingeLoss" bottom: "x" bottom: "l" top: "y"', {"x": LINE, "l": ()}),
    "euclid": ('type: "EuclideanLoss" bottom: "x" bottom: "z" top: "y"', {"x": LINE, "z": LINE}),
    "accuracy": ('type: "Accuracy" bottom: "x" bottom: "l" top: "y"', {"x": LINE, "l": ()}),
    "contrastive": (
        'type: "ContrastiveLoss" bottom: "x" bottom: "z" bottom: "b" top: "y"',
        {"x": LINE, "z": LINE, "b": ()},
    ),
    "slice": ('type: "Slice" bottom: "x" top: "y" top: "w" slice_param { axis: 1 }', {"x": LINE}),
    "reshape": ('type: "Reshape" bottom: "x" top: "y" reshape_param { shape { dim: 0 dim: 2 dim: -1 } }', {"x": LINE}),
    "flatten": ('type: "Flatten" bottom: "x" top: "y"', {"x": IMAGE}),
    "rows in one": ('type: "Flatten" bottom: "x" top: "y" flatten_param { axis: 0 }', {"x": IMAGE}),
    "concat": ('type: "Concat" bottom: "x" bottom: "z" top: "y" concat_param { axis: 0 }', {"x": LINE, "z": LINE}),
    "silence": ('type: "Silence" bottom: "x"', {"x": LINE}),
}  # fmt: skip
"""Layers to put behind a Filter, with the shape of one row of each input."""


def behind(layer: str, rows: dict[str, tuple[int, ...]], count: int, chosen: bool, **options: Any) -> Net:
    """A layer L on ``count`` rows; with ``chosen`` on those that a Filter passes on (of inputs named ``all_...``)."""
    text = "force_backward: true\n"
    if chosen:
        text += nets.inputs(**{f"all_{name}": (count, *row) for name, row in rows.items()}, s=(count,))
        text += nets.layer("Filter", "f", [*(f"all_{name}" for name in rows), "s"], list(rows))
    else:
        text += nets.inputs(**{name: (count, *row) for name, row in rows.items()})
    return Net(text + f'layer {{ name: "L" {layer} }}', "TRAIN", seed=3, **options)


def numbers(rows: dict[str, tuple[int, ...]], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A value for each of all rows: whole numbers for labels, 0 or 1 for "b"."""
    limits = {"l": 6, "b": 2}
    return {
        name: rng.integers(0, limits[name], ROWS).astype(np.float32)
        if name in limits
        else rng.standard_normal((ROWS, *row), np.float32)
        for name, row in rows.items()
    }


def selections(rng: np.random.Generator) -> list[np.ndarray]:
    """All, none, one, some, the same number again, and others."""
    some = [np.arange(ROWS) < 2, np.arange(ROWS) > 2]
    return [np.ones(ROWS), np.eye(ROWS)[3], *some, np.zeros(ROWS), *(rng.random((4, ROWS)) < 0.6)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", SINGLE)
def test_a_layer_behind_a_filter_has_the_bits_of_one_fed_with_the_chosen_rows(kind: str, backend: str) -> None:
    layer, rows = SINGLE[kind]
    how = {"backend": BACKENDS[backend]}
    rng = np.random.default_rng(1)
    net = behind(layer, rows, ROWS, True, reuse=True, poison=True, **how)
    for pick in selections(rng):
        values, chosen = numbers(rows, rng), np.flatnonzero(pick)
        found = net.forward(s=pick, **{f"all_{name}": array for name, array in values.items()})
        if not len(chosen):
            assert all(0 in array.shape or not array.any() for array in found.values())
            assert net.loss == 0
            continue
        alone = behind(layer, rows, len(chosen), False, **how)
        alone.iteration = net.iteration - 1
        wanted = alone.forward(**{name: array[chosen] for name, array in values.items()})
        assert found.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name])
            assert net.blobs[name].shape == wanted[name].shape
        if kind in ("argmax", "accuracy", "silence"):
            continue
        diffs = {
            name: rng.standard_normal(array.shape, np.float32) for name, array in wanted.items() if alone.loss == 0
        }
        net.clear_param_diffs()
        gradients, own = net.backward(**diffs), alone.backward(**diffs)
        for name, array in own.items():
            whole = np.zeros_like(values[name])
            whole[chosen] = array
            np.testing.assert_array_equal(gradients[f"all_{name}"], whole)
        for mine, theirs in zip(net.params.get("L", []), alone.params.get("L", []), strict=True):
            np.testing.assert_array_equal(mine.diff, theirs.diff)


@pytest.mark.parametrize("kind", [kind for kind in SINGLE if kind not in ("argmax", "accuracy", "silence")])
def test_no_rows_leave_no_gradient(kind: str) -> None:
    layer, rows = SINGLE[kind]
    net = behind(layer, rows, ROWS, True)
    values = {f"all_{name}": array for name, array in numbers(rows, np.random.default_rng(2)).items()}
    for pick in (np.ones(ROWS), np.zeros(ROWS)):
        net.forward(s=pick, **values)
        net.clear_param_diffs()
        gradients = net.backward(**{name: net.blobs[name].data * 0 + 1 for name in net.outputs if not net.loss})
        everything = [*gradients.values(), *(blob.diff for blob in net.params.get("L", []))]
        assert all(np.isfinite(array).all() for array in everything)
        if not pick.any():
            assert not any(array.any() for array in everything)


def every(chosen: bool) -> str:
    """A net of all kinds of layers; with ``chosen`` its inputs come through a Filter."""
    text = "force_backward: true\n" + nets.every_layer()
    if not chosen:
        return text
    shapes = {"x": (ROWS, 4, 6, 7), "l": (ROWS,), "t": (ROWS, 5)}
    rest = text[text.index('layer { name: "relu"') :]
    front = nets.inputs(**{f"all_{name}": shape for name, shape in shapes.items()}, s=(ROWS, 1))
    front += nets.layer("Filter", "f", ["all_x", "all_l", "all_t", "s"], ["x", "l", "t"])
    return "force_backward: true\n" + front + rest


@pytest.mark.parametrize("reuse", [False, True])
def test_a_whole_net_behind_a_filter_has_the_bits_of_one_fed_with_the_chosen_rows(reuse: bool) -> None:
    rng = np.random.default_rng(0)
    net = Net(every(True), "TRAIN", reuse=reuse, poison=reuse)
    for pick in [row for row in rng.random((6, ROWS)) < 0.5 if row.any()]:
        chosen = np.flatnonzero(pick)
        values = {"x": rng.standard_normal((ROWS, 4, 6, 7), np.float32), "l": rng.integers(0, 5, ROWS)}
        values["t"] = rng.standard_normal((ROWS, 5), np.float32)
        n = len(chosen)
        alone = Net(every(False), "TRAIN", input_shapes={"x": (n, 4, 6, 7), "l": (n,), "t": (n, 5)})
        alone.iteration = net.iteration
        found = net.forward(s=pick[:, None], **{f"all_{name}": array for name, array in values.items()})
        wanted = alone.forward(**{name: array[chosen] for name, array in values.items()})
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
        net.clear_param_diffs()
        gradients, own = net.backward(), alone.backward()
        for name in ("x", "t"):
            whole = np.zeros_like(values[name])
            whole[chosen] = own[name]
            np.testing.assert_array_equal(gradients[f"all_{name}"], whole)
        for name, blobs in alone.params.items():
            for mine, theirs in zip(net.params[name], blobs, strict=True):
                np.testing.assert_array_equal(mine.diff, theirs.diff, err_msg=name)
                mine.data = theirs.data  # BatchNorm's statistics go on in one and not in the other


def test_sizes_seen_before_allocate_nothing() -> None:
    net = Net(every(True), "TRAIN", reuse=True)
    rng = np.random.default_rng(0)
    picks = [(np.arange(ROWS) < n)[:, None].astype(np.float32) for n in (5, 1, 3, 2, 4, 1)]
    values = {"all_x": rng.standard_normal((ROWS, 4, 6, 7), np.float32), "all_l": np.zeros(ROWS, np.float32)}
    values["all_t"] = rng.standard_normal((ROWS, 5), np.float32)

    def steps() -> None:
        for pick in picks:
            net.forward_only(s=pick, **values)
            net.clear_param_diffs()
            net.backward_only()

    steps()
    block = net._layout.nbytes
    with counted() as counts:
        for _ in range(10):
            steps()
    assert {key: count for key, count in counts.items() if key[1] > 64} == {}
    assert net._layout.nbytes == block


@settings(max_examples=40, deadline=None)
@given(chosen=st.lists(st.sampled_from([0.0, 1.0, -2.0]), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_filter_alone(chosen: list[float], seed: int) -> None:
    rng, rows = np.random.default_rng(seed), len(chosen)
    net = one_layer(
        'type: "Filter" bottom: "x" bottom: "z" bottom: "s" top: "y" top: "w"',
        {"x": (rows, 2, 3), "z": (rows,), "s": (rows, 1)},
    )
    assert net.blobs["y"].shape == (rows, 2, 3)  # before the first pass, as in Caffe
    x, z, picked = rng.standard_normal((rows, 2, 3)), rng.standard_normal(rows), np.flatnonzero(chosen)
    out = net.forward(x=x, z=z, s=np.array(chosen)[:, None])
    live = len(picked)
    assert (net.blobs["y"].shape, net.blobs["w"].shape) == ((live, 2, 3), (live,))
    for name, array in (("y", x), ("w", z)):
        np.testing.assert_array_equal(out[name], array[picked].astype(np.float32))
    gradients = net.backward(y=np.full((live, 2, 3), 5), w=np.full(live, 7))
    assert not gradients["s"].any()
    wanted = np.zeros(rows)
    wanted[picked] = 1
    np.testing.assert_array_equal(gradients["x"], 5 * np.broadcast_to(wanted[:, None, None], (rows, 2, 3)))
    np.testing.assert_array_equal(gradients["z"], 7 * wanted)


TWO = (
    nets.inputs(x=(6, 2), s=(6,), q=(6,), e=(2, 2))
    + nets.layer("Filter", "f", ["x", "q", "s"], ["y", "r"])
    + nets.layer("Filter", "g", ["y", "r"], ["z"])
    + nets.layer("Power", "double", ["z"], ["z"], "power_param { scale: 2 }")
    + nets.layer("Concat", "joined", ["z", "e"], ["out"], "concat_param { axis: 0 }")
)


@settings(max_examples=30, deadline=None)
@given(
    picks=st.lists(st.tuples(st.integers(0, 63), st.integers(0, 63)), min_size=1, max_size=4),
    precision=st.sampled_from(["fp32", "fp16"]),  # which holds these numbers exactly
)
def test_a_filter_behind_a_filter_joined_with_what_is_not_filtered(
    picks: list[tuple[int, int]], precision: str
) -> None:
    net = Net("force_backward: true\n" + TWO, reuse=True, poison=True, precision=precision)
    x, e = np.arange(12, dtype=np.float32).reshape(6, 2), np.full((2, 2), 9, np.float32)
    for a, b in picks:
        s, q = ((np.array([a, b])[:, None] >> np.arange(6)) & 1).astype(np.float32)
        out = net.forward(x=x, s=s, q=q, e=e)["out"]
        both = (s * q) > 0
        np.testing.assert_array_equal(out, np.concatenate([2 * x[both], e]))
        gradients = net.backward(out=np.ones(out.shape))
        np.testing.assert_array_equal(gradients["x"], 2 * np.broadcast_to(both[:, None], (6, 2)))
        np.testing.assert_array_equal(gradients["e"], np.ones((2, 2)))


def test_a_layer_that_cannot_follow_is_named_and_the_net_goes_on() -> None:
    text = nets.inputs(x=(4, 6), s=(4,)) + nets.layer("Filter", "f", ["x", "s"], ["y"])
    text += nets.layer("Reshape", "r", ["y"], ["z"], "reshape_param { shape { dim: 2 dim: -1 dim: 4 } }")
    net, x = Net(text), np.arange(24).reshape(4, 6)
    for _ in range(2):
        with pytest.raises(LayerError, match=r"'r' \(Reshape\)"):
            net.forward(x=x, s=[1, 1, 1, 0])
        assert net.forward(x=x, s=np.ones(4))["z"].shape == (2, 3, 4)
    text = nets.inputs(x=(4, 6), s=(4,)) + nets.layer("Filter", "f", ["x", "s"], ["y"])
    text += nets.layer("InnerProduct", "ip", ["y"], ["z"], f"inner_product_param {{ num_output: 2 axis: 0 {FILL} }}")
    net = Net(text)
    with pytest.raises(LayerError, match=r"'ip' \(InnerProduct\): its parameters cannot follow"):
        net.forward(x=x, s=[0, 1, 1, 1])


def test_other_inputs_reshape_the_net_whatever_was_chosen() -> None:
    text = nets.inputs(x=(4, 2), s=(4,)) + nets.layer("Filter", "f", ["x", "s"], ["y"])
    net = Net(text + nets.layer("ReLU", "r", ["y"], ["z"]), reuse=True)
    for rows in (4, 9, 2):
        net.forward(x=np.ones((rows, 2)), s=np.ones(rows))
        out = net.forward(x=np.full((rows, 2), 3), s=np.arange(rows) % 2)
        np.testing.assert_array_equal(out["z"], np.full((rows // 2, 2), 3))
        net.reshape()
        np.testing.assert_array_equal(net.forward(x=np.full((rows, 2), 3), s=np.arange(rows) % 2)["z"], out["z"])


def test_backward_of_a_net_that_planned_none() -> None:
    layer, _ = SINGLE["ip"]
    text = nets.inputs(all_x=(ROWS, *IMAGE), s=(ROWS,)) + nets.layer("Filter", "f", ["all_x", "s"], ["x"])
    text += f'layer {{ name: "L" {layer} }}' + nets.inputs(t=(ROWS, 3))
    text += nets.layer("Filter", "g", ["t", "s"], ["u"]) + nets.layer("EuclideanLoss", "loss", ["y", "u"], ["loss"])
    late, planned = Net(text, "TEST"), Net(text, "TRAIN")
    rng = np.random.default_rng(0)
    for pick in selections(rng):
        values = {"all_x": rng.standard_normal((ROWS, *IMAGE)), "t": rng.standard_normal((ROWS, 3))}
        for net in (late, planned):
            net.forward_only(s=pick, **values)
            net.clear_param_diffs()
            net.backward_only()
        for mine, theirs in zip(late.params["L"], planned.params["L"], strict=True):
            np.testing.assert_array_equal(mine.diff, theirs.diff)


def test_float16_behind_a_filter() -> None:
    rng = np.random.default_rng(0)
    half, single = (Net(every(True), "TRAIN", precision=p, reuse=True, poison=True) for p in ("fp16", "fp32"))
    for pick in [np.ones(ROWS), np.arange(ROWS) < 2, np.zeros(ROWS), np.arange(ROWS) > 1]:
        values = {"all_x": rng.standard_normal((ROWS, 4, 6, 7), np.float32), "all_l": rng.integers(0, 5, ROWS)}
        values["all_t"] = rng.standard_normal((ROWS, 5), np.float32)
        for net in (half, single):
            net.forward_only(s=np.float32(pick)[:, None], **values)
            net.clear_param_diffs()
            net.backward_only()
        assert half.loss == pytest.approx(single.loss, rel=0.05)
        mine, theirs = (net.params["ip"][0].diff for net in (half, single))
        assert np.linalg.norm(mine - theirs) <= 0.1 * np.linalg.norm(theirs)


def test_a_mean_over_batches_needs_outputs_of_one_size() -> None:
    text = nets.inputs(x=(4, 2), s=(4,)) + nets.layer("Filter", "f", ["x", "s"], ["y"])
    text += nets.layer("InnerProduct", "ip", ["x"], ["z"], f"inner_product_param {{ num_output: 1 {FILL} }}")
    solver = Solver("base_lr: 0.1 lr_policy: 'fixed' test_interval: 1 test_iter: 2\n", net=text, backend="numpy")
    batches = [{"x": np.ones((4, 2)), "s": np.arange(4) < n} for n in (2, 1)]
    assert solver.test(0, batches[:1] * 2)["y"].shape == (2, 2)
    with pytest.raises(UsageError, match="output 'y' has another size"):
        solver.test(0, batches)


def test_tools_follow(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """gpu.crosscheck and gpu.time on a net whose selector is drawn, and whose labels pass through the Filter."""
    text = nets.inputs(x=(6, 3), l=(6,), s=(6,)) + nets.layer("Filter", "f", ["x", "l", "s"], ["y", "m"])
    text += nets.layer("InnerProduct", "ip", ["y"], ["z"], f"inner_product_param {{ num_output: 5 {FILL} }}")
    (tmp_path / "net.prototxt").write_text(text + nets.layer("SoftmaxWithLoss", "loss", ["z", "m"], ["loss"]))
    assert crosscheck.main([str(tmp_path / "net.prototxt"), "--seed", "1"]) == 0
    assert "loss" in capsys.readouterr().out
    assert gpu_time.main([str(tmp_path / "net.prototxt"), "--phase", "TRAIN", "--iterations", "2"]) == 0


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ('type: "Filter" bottom: "x" bottom: "s" top: "y" top: "z"', "one top for each bottom"),
        ('type: "Filter" bottom: "x" bottom: "x" top: "y"', "one value for each row"),
        ('type: "Filter" bottom: "x" bottom: "q" top: "y"', "other rows"),
    ],
)
def test_what_does_not_fit(layer: str, message: str) -> None:
    with pytest.raises(LayerError, match=f"'L'.*{message}"):
        one_layer(layer, {"x": (4, 3), "s": (4, 1), "q": (2,)})


@pytest.mark.oracle
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_as_torch_in_float64(backend: str) -> None:
    """Two branches, one on chosen rows with a loss of its own, trained together; now and then none is chosen."""
    torch = pytest.importorskip("torch")
    text = nets.inputs(x=(8, 2, 6, 6), l=(8,), s=(8,), t=(8, 3))
    text += nets.layer("Convolution", "conv", ["x"], ["c"], nets.CONV) + nets.layer("ReLU", "relu", ["c"], ["c"])
    text += nets.layer("Filter", "f", ["c", "l", "s"], ["some", "labels"])
    text += nets.layer("Convolution", "conv2", ["some"], ["c2"], nets.CONV) + nets.layer("TanH", "tanh", ["c2"], ["c2"])
    dense = f"inner_product_param {{ num_output: 3 {FILL} }}"
    text += nets.layer("InnerProduct", "ip", ["c2"], ["ip"], dense)
    text += nets.layer("SoftmaxWithLoss", "loss", ["ip", "labels"], ["loss"])
    text += nets.layer("InnerProduct", "all", ["c"], ["a"], dense)
    text += nets.layer("EuclideanLoss", "far", ["a", "t"], ["far"], "loss_weight: 0.5")
    net = Net(text, "TRAIN", reuse=True, seed=1, backend=BACKENDS[backend])
    solver = Solver("base_lr: 0.05 lr_policy: 'fixed' momentum: 0.9\n", net=net)
    shapes = {name: [b.shape for b in blobs] for name, blobs in net.params.items()}
    params = {
        name: [torch.tensor(blob.data.astype(np.float64).reshape(blob.shape), requires_grad=True) for blob in blobs]
        for name, blobs in net.params.items()
    }
    optimizer = torch.optim.SGD([p for pair in params.values() for p in pair], lr=0.05, momentum=0.9)
    rng, functional = np.random.default_rng(0), torch.nn.functional
    for step in range(40):
        x, t = rng.standard_normal((8, 2, 6, 6)), rng.standard_normal((8, 3))
        labels, s = rng.integers(0, 3, 8), (rng.random(8) < 0.5) & (step % 7 != 3)
        x, t = x.astype(np.float32), t.astype(np.float32)
        found = solver.step_on({"x": x, "l": labels, "s": s, "t": t})
        c = torch.relu(functional.conv2d(torch.tensor(x.astype(np.float64)), *params["conv"], padding=1))
        loss = 0.5 * ((functional.linear(c.flatten(1), *params["all"]) - torch.tensor(t)) ** 2).sum() / 16
        if s.any():
            c2 = torch.tanh(functional.conv2d(c[torch.tensor(s)], *params["conv2"], padding=1))
            scores = functional.linear(c2.flatten(1), *params["ip"])
            loss = loss + functional.cross_entropy(scores, torch.tensor(labels[s]))
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        assert found == pytest.approx(loss.item(), rel=1e-4), step
    for name, blobs in net.params.items():
        assert [b.shape for b in blobs] == shapes[name]
        for mine, theirs in zip(blobs, params[name], strict=True):
            np.testing.assert_allclose(mine.data, theirs.detach().numpy(), rtol=1e-3, atol=1e-4)
