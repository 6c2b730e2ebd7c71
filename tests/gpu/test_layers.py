"""Every layer against what Caffe computed, against PyTorch, and where it must refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layer_parity import LIMITS, errors, kind
from gpu.backend import Backend
from gpu.layers import kernels
from gpu.layers.base import LayerError
from gpu.layers.loss import LabelOutOfRange
from gpu.net import Net

GOLDEN = Path(__file__).parents[1] / "data" / "layers"
# The second one takes the code path of devices: the same source, with NumPy's arrays in place of cupy's.
BACKENDS = {"compiled": Backend("numpy", np, "test"), "portable": Backend("portable", np, "test")}
REFUSED = {"pool_max_k2s3_EMPTYWINDOW", "pool_ave_k2s3_EMPTYWINDOW", "bn_test_zero_factor", "dropout_train"}
CASES = sorted(path.stem for path in GOLDEN.glob("*.npz") if path.stem not in REFUSED)


def layer_net(shape: tuple[int, ...], layer: str, **options: Any) -> Net:
    """Input x (and label l, one per image) and one layer."""
    dims = " ".join(f"dim: {size}" for size in shape)
    return Net(
        f"""force_backward: true
        layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ {dims} }} }} }}
        layer {{ name: "l" type: "Input" top: "l" input_param {{ shape {{ dim: {shape[0]} }} }} }}
        layer {{ name: "L" {layer} }}""",
        **options,
    )


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Relative L2."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-12))


def load(case: str, backend: str, **options: Any) -> tuple[Net, dict[str, np.ndarray]]:
    with np.load(GOLDEN / f"{case}.npz") as archive:
        golden = {key: archive[key] for key in archive.files}
    net = Net(str(golden["prototxt"]), str(golden["phase"]), backend=BACKENDS[backend], **options)
    for i, blob in enumerate(net.params.get("L", [])):
        blob.data = golden[f"p{i}"]
    return net, golden


def test_enough_cases_are_compared() -> None:
    assert len(CASES) >= 96


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_as_caffe(case: str, backend: str) -> None:
    check_as_caffe(case, *load(case, backend))


def check_as_caffe(case: str, net: Net, golden: dict[str, np.ndarray], rounding: float | None = None) -> None:
    """Forward, backward and changed parameters of a one-layer net against a golden file, held to its type's limit.

    ``rounding``: of another machine than the CPU, in place of the limits that are not 0.
    """
    for name, blobs in net.params.items():
        if name in golden:  # an input that is learned: Caffe's layers above it would get no gradient otherwise
            blobs[0].data = golden[name]
    off = errors(net, golden)
    kept = LIMITS[kind(net)]
    assert off["outputs"]
    assert bool(off["gradients"]) == any(key.startswith("dout_") for key in golden)
    for part, arrays in off.items():
        limit = kept.gradients if part == "gradients" else kept.outputs
        for key, found in arrays.items():
            assert limit is not None, f"{case}: {kind(net)} is said to have no {part}"
            assert found <= (rounding if limit and rounding else limit), key


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_keeps_scaled_values_where_its_mask_says(backend: str) -> None:
    net, golden = load("dropout_train", backend, seed=5)
    x = golden["in_x"]
    first = net.forward(x=x)["y"]
    kept = first != 0
    np.testing.assert_allclose(first[kept], x[kept] / np.float32(0.6), rtol=1e-6)
    assert kept.mean() == pytest.approx(0.6, abs=0.12)
    dx = net.backward(y=golden["dout_y"])["x"]
    np.testing.assert_allclose(dx, np.where(kept, golden["dout_y"] / np.float32(0.6), 0), rtol=1e-6)
    second = net.forward(x=x)["y"]
    assert not np.array_equal(first, second)  # the next iteration draws anew
    net.iteration = 0
    assert np.array_equal(net.forward(x=x)["y"], first)


def test_dropout_mask_follows_the_contract() -> None:
    """docs/design.md 2.2: key (seed, SHA-256 of the layer's name), counter (0, stream 3, iteration, shard)."""
    import hashlib

    net, golden = load("dropout_train", "compiled", seed=5)
    net.iteration = 9
    y = net.forward(x=golden["in_x"])["y"]
    key = int.from_bytes(hashlib.sha256(b"L").digest()[:8], "little")
    words = np.random.Philox(key=[5, key], counter=[0, 3, 9, 0]).random_raw(100)
    halves = np.stack([words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)], axis=1).reshape(4, 50)
    assert np.array_equal(y != 0, halves >= int(np.float32(0.4) * 2.0**32))


def test_statistics_that_were_never_accumulated_are_refused() -> None:
    net, golden = load("bn_test_zero_factor", "compiled")
    with pytest.raises(LayerError, match=r"'L'.*statistics never accumulated"):
        net.forward(x=golden["in_x"])


def test_batch_norm_divides_its_sums_by_their_weight() -> None:
    net = layer_net((2, 1, 2, 2), 'type: "BatchNorm" bottom: "x" top: "y" batch_norm_param { eps: 0 }')
    for blob, value in zip(net.params["L"], (10, 40, 2), strict=True):
        blob.data[...] = value
    y = net.forward(x=np.full((2, 1, 2, 2), 7, np.float32))["y"]
    np.testing.assert_allclose(y, (7 - 5) / np.sqrt(20), rtol=1e-6)
    with pytest.raises(LayerError, match="cannot be learned"):
        layer_net((2, 1, 2, 2), 'type: "BatchNorm" bottom: "x" top: "y" param { lr_mult: 1 }')


@pytest.mark.parametrize("method", ["MAX", "AVE"])
def test_pooling_windows_outside_the_input_are_refused(method: str) -> None:
    with pytest.raises(LayerError, match=r"'L'.*outside the input") as caught:
        load(f"pool_{method.lower()}_k2s3_EMPTYWINDOW", "compiled")
    assert "stride 3" in str(caught.value.found)
    param = f"pool: {method} kernel_size: 2 stride: 3 round_mode: FLOOR"
    floor = f'type: "Pooling" bottom: "x" top: "y" pooling_param {{ {param} }}'
    assert layer_net((1, 2, 9, 10), floor).blobs["y"].shape == (1, 2, 3, 3)


@pytest.mark.parametrize(
    ("size", "settings_", "out"),
    [
        (112, "kernel_size: 3 stride: 2 pad: 1", 57),
        (112, "kernel_size: 3 stride: 2 pad: 1 round_mode: FLOOR", 56),
        (64, "kernel_size: 3 stride: 2 pad: 1", 33),
        (129, "kernel_size: 2 stride: 2", 65),
        (3, "kernel_size: 2 stride: 2 pad: 1", 2),
    ],
)
def test_pooling_sizes(size: int, settings_: str, out: int) -> None:
    net = layer_net((1, 1, size, size), f'type: "Pooling" bottom: "x" top: "y" pooling_param {{ {settings_} }}')
    assert net.blobs["y"].shape == (1, 1, out, out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_max_pooling_lets_nan_through(backend: str) -> None:
    pool = 'type: "Pooling" bottom: "x" top: "y" pooling_param { kernel_size: 2 stride: 2 }'
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    x[0, 0, 0, 1] = x[0, 0, 3, 3] = np.nan
    y = layer_net(x.shape, pool, backend=BACKENDS[backend]).forward(x=x)["y"][0, 0]
    assert np.isnan(y[0, 0])
    assert np.isnan(y[1, 1])
    assert y[0, 1] == 7
    lowest = np.full((1, 1, 4, 4), -np.inf, np.float32)
    assert np.isneginf(layer_net(x.shape, pool, backend=BACKENDS[backend]).forward(x=lowest)["y"]).all()


LOSS = 'type: "SoftmaxWithLoss" bottom: "x" bottom: "l" top: "loss"'


@pytest.mark.parametrize("layer", [LOSS, 'type: "Accuracy" bottom: "x" bottom: "l" top: "loss"'])
@pytest.mark.parametrize("value", [-1, 10, 1456, 300, 2.5, np.nan])
def test_labels_that_name_no_class(layer: str, value: float) -> None:
    net = layer_net((4, 10), layer)
    labels = np.array([0, 9, value, -7], np.float32)
    with pytest.raises(LabelOutOfRange, match=r"label .* at position \(2,\) of blob 'l'") as caught:
        net.forward(x=np.zeros((4, 10), np.float32), l=labels)
    assert caught.value.classes == 10
    assert caught.value.position == (2,)
    assert caught.value.value == value or np.isnan(value)
    assert "10 classes" in str(caught.value.expected)


def test_an_ignored_label_is_no_class_and_no_error() -> None:
    net = layer_net((3, 4), LOSS + " loss_param { ignore_label: -1 }")
    loss = net.forward(x=np.zeros((3, 4), np.float32), l=np.float32([-1, 2, 3]))["loss"]
    assert loss == pytest.approx(np.log(4), rel=1e-6)
    assert not net.backward()["x"][0].any()


def test_the_loss_is_clamped_at_the_smallest_float() -> None:
    x = np.float32([[0, 1000]])
    assert layer_net((1, 2), LOSS).forward(x=x, l=np.zeros(1))["loss"] == pytest.approx(87.3365, abs=1e-3)


def test_a_score_that_is_no_number_is_not_right() -> None:
    net = layer_net((2, 3), 'type: "Accuracy" bottom: "x" bottom: "l" top: "share" top: "each"')
    x = np.float32([[np.nan, np.nan, np.nan], [0, 5, 1]])
    out = net.forward(x=x, l=np.float32([0, 1]))
    assert out["share"] == 0.5
    np.testing.assert_array_equal(out["each"], [0, 1, 0])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ('type: "Convolution" bottom: "x" top: "y" convolution_param { num_output: 4 }', "kernel_size"),
        ('type: "Convolution" bottom: "x" top: "y" convolution_param { kernel_size: 3 }', "num_output"),
        ('type: "Convolution" bottom: "x" top: "y" convolution_param { num_output: 4 kernel_size: 9 }', "padded input"),
        (
            'type: "Convolution" bottom: "x" top: "y" convolution_param { num_output: 4 kernel_size: 1 group: 2 }',
            "group",
        ),
        (
            'type: "Convolution" bottom: "x" top: "y" convolution_param { num_output: 4 kernel_size: 1 stride: 0 }',
            "stride",
        ),
        ('type: "Pooling" bottom: "x" top: "y" pooling_param { pool: STOCHASTIC kernel_size: 2 }', "STOCHASTIC"),
        ('type: "Pooling" bottom: "x" top: "y" pooling_param { kernel_size: 2 pad: 2 }', "pad"),
        ('type: "Pooling" bottom: "x" top: "x" pooling_param { kernel_size: 2 stride: 2 }', "over its input"),
        (
            'type: "Convolution" bottom: "x" top: "x" convolution_param { num_output: 3 kernel_size: 1 }',
            "over its input",
        ),
        ('type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 3 axis: 4 }', "axis"),
        ('type: "Dropout" bottom: "x" top: "y" dropout_param { dropout_ratio: 1 }', "dropout_ratio"),
        ('type: "LRN" bottom: "x" top: "y" lrn_param { local_size: 4 }', "odd"),
        ('type: "Reshape" bottom: "x" top: "y" reshape_param { shape { dim: 7 } }', "number of values"),
        ('type: "Eltwise" bottom: "x" bottom: "l" top: "y"', "one shape"),
        ('type: "Slice" bottom: "x" top: "y" top: "z"', "2 parts"),
        (LOSS + " softmax_param { axis: 3 }", "labels do not fit"),
    ],
)
def test_settings_that_make_no_sense(layer: str, message: str) -> None:
    with pytest.raises(LayerError, match=f"'L'.*{message}"):
        layer_net((2, 3, 5, 5), layer)


@settings(max_examples=60, deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    pad=st.integers(0, 1),
    size=st.tuples(st.integers(4, 19), st.integers(4, 19)),
    seed=st.integers(0, 2**31),
)
def test_compiled_max_pooling_is_the_portable_one_bit_for_bit(
    kernel: tuple[int, int], stride: tuple[int, int], pad: int, size: tuple[int, int], seed: int
) -> None:
    stride = (min(stride[0], kernel[0]), min(stride[1], kernel[1]))
    pad = min(pad, *(k - 1 for k in kernel))
    text = (
        f'type: "Pooling" bottom: "x" top: "y" top: "mask" pooling_param {{ kernel_h: {kernel[0]} '
        f"kernel_w: {kernel[1]} stride_h: {stride[0]} stride_w: {stride[1]} pad: {pad} }}"
    )
    special = np.float32([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1, -1, 2, 2])
    x = np.random.default_rng(seed).choice(special, (2, 3, *size))
    found = []
    for backend in BACKENDS.values():
        net = layer_net(x.shape, text, backend=backend)
        tops = net.forward(x=x)
        dy = np.arange(tops["y"].size, dtype=np.float32).reshape(tops["y"].shape)
        found.append([tops["y"].tobytes(), tops["mask"].tobytes(), net.backward(y=dy)["x"].tobytes()])
    assert found[0] == found[1]


def test_a_large_batch_is_unrolled_in_chunks() -> None:
    """Chunks change the order of sums in the weight gradient, nothing else."""
    param = 'num_output: 4 kernel_size: 5 weight_filler { type: "xavier" }'
    conv = f'type: "Convolution" bottom: "x" top: "y" convolution_param {{ {param} }}'
    x = np.random.default_rng(1).standard_normal((48, 8, 24, 24), np.float32)
    whole = layer_net(x.shape, conv)
    assert whole.layers[-1]._step < 48  # type: ignore[attr-defined]
    y = whole.forward(x=x)["y"]
    dx = whole.backward(y=y)["x"]
    gradients = np.zeros(whole.params["L"][0].shape, np.float64)
    single = layer_net((1, *x.shape[1:]), conv)
    for i in range(48):
        single.clear_param_diffs()
        assert error(single.forward(x=x[i : i + 1])["y"], y[i : i + 1]) < 1e-6
        assert error(single.backward(y=y[i : i + 1])["x"], dx[i : i + 1]) < 1e-6
        gradients += single.params["L"][0].diff
    assert error(whole.params["L"][0].diff, gradients) < 1e-5


@pytest.mark.oracle
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_convolution_as_torch(data: st.DataObject) -> None:
    torch = pytest.importorskip("torch")
    pick = data.draw
    group, n = pick(st.sampled_from([1, 2])), pick(st.integers(1, 3))
    channels, outputs = group * pick(st.integers(1, 3)), group * pick(st.integers(1, 3))
    kernel, stride, pad, dilation = ([pick(st.integers(low, 3)) for _ in "hw"] for low in (1, 1, 0, 1))
    size = [pick(st.integers(d * (k - 1) + 1, 11)) for d, k in zip(dilation, kernel, strict=True)]
    each = " ".join(
        f"{field}: {value}"
        for field, values in (("kernel_size", kernel), ("stride", stride), ("pad", pad), ("dilation", dilation))
        for value in values
    )
    rng = np.random.default_rng(pick(st.integers(0, 99)))
    x = rng.standard_normal((n, channels, *size), np.float32)
    weight = rng.standard_normal((outputs, channels // group, *kernel), np.float32)
    bias = rng.standard_normal(outputs, np.float32)
    net = layer_net(
        x.shape,
        f'type: "Convolution" bottom: "x" top: "y" convolution_param {{ num_output: {outputs} group: {group} {each} }}',
        backend=BACKENDS[pick(st.sampled_from(sorted(BACKENDS)))],
    )
    net.params["L"][0].data[...], net.params["L"][1].data[...] = weight, bias
    tx, tw, tb = (torch.tensor(array, requires_grad=True) for array in (x, weight, bias))
    ty = torch.nn.functional.conv2d(tx, tw, tb, stride, pad, dilation, group)
    y = net.forward(x=x)["y"]
    dy = rng.standard_normal(y.shape, np.float32)
    ty.backward(torch.tensor(dy))
    dx = net.backward(y=dy)["x"]
    assert error(y, ty.detach().numpy()) < 1e-5
    for have, want in ((dx, tx), (net.params["L"][0].diff, tw), (net.params["L"][1].diff, tb)):
        np.testing.assert_allclose(have, want.grad.numpy(), rtol=1e-4, atol=1e-4)


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 5), size=st.integers(1, 300), add=st.booleans(), seed=st.integers(0, 2**31))
def test_sums_of_rows_against_float64(rows: int, size: int, add: bool, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((rows, size), np.float32)
    found = np.full(rows, 7, np.float32)
    kernels.row_sums(values, found, add)
    wanted = values.sum(1, dtype=np.float64) + 7 * add
    np.testing.assert_allclose(found, wanted, atol=1e-6 * (7 + np.abs(values).sum(1).max()))
