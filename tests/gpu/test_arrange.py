"""Reduction, ArgMax, Crop, Tile, Parameter, Im2col and SPP: float64, plain loops, PyTorch, and what does not fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.layers.base import LayerError
from gpu.net import Net
from gpu.prototxt import PrototxtError
from gpu.solver import Solver
from tests.gpu.layer_checks import BACKENDS, check_against, largest_allocation, one_layer

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
seeds = st.integers(0, 99)


def backend(seed: int) -> object:
    return BACKENDS["portable" if seed % 2 else "compiled"]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=shapes, operation=st.sampled_from(["SUM", "ASUM", "SUMSQ", "MEAN"]), seed=seeds)
def test_reduction_as_float64(data: st.DataObject, shape: tuple[int, ...], operation: str, seed: int) -> None:
    axis, coeff = data.draw(st.integers(-len(shape), len(shape) - 1)), data.draw(st.sampled_from([1.0, -0.5, 3.0]))
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    param = f"operation: {operation} axis: {axis} coeff: {coeff}"
    net = one_layer(
        f'type: "Reduction" bottom: "x" top: "y" reduction_param {{ {param} }}', {"x": shape}, backend=backend(seed)
    )
    first = axis % len(shape)
    function = {"SUM": np.sum, "ASUM": lambda v, axis: np.abs(v).sum(axis=axis), "MEAN": np.mean}.get(
        operation, lambda v, axis: (v * v).sum(axis=axis)
    )
    check_against(
        lambda v: {"y": coeff * function(v["x"].reshape(*shape[:first], -1), axis=-1)}, net, {"x": x}, seed, ["x"]
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=shapes, values=st.booleans(), seed=seeds)
def test_argmax_as_a_sort_of_pairs(data: st.DataObject, shape: tuple[int, ...], values: bool, seed: int) -> None:
    """Caffe sorts pairs of value and place, largest first; whole numbers make for ties."""
    axis = data.draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    x = np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)
    moved = x.reshape(shape[0], -1) if axis is None else np.moveaxis(x, axis, -1)
    k = data.draw(st.integers(1, moved.shape[-1]))
    param = f"top_k: {k} out_max_val: {str(values).lower()}" + ("" if axis is None else f" axis: {axis}")
    layer = f'type: "ArgMax" bottom: "x" top: "y" argmax_param {{ {param} }}'
    net = one_layer(layer, {"x": shape}, backend=backend(seed))
    best = np.array(
        [sorted(((v, i) for i, v in enumerate(row)), reverse=True)[:k] for row in moved.reshape(-1, moved.shape[-1])]
    )
    if axis is None:
        wanted = best[:, :, ::-1].swapaxes(1, 2) if values else best[:, None, :, 1]
        wanted = wanted.reshape(*wanted.shape, *[1] * (len(shape) - 3))
    else:
        wanted = np.moveaxis(best[:, :, 0 if values else 1].reshape(*moved.shape[:-1], k), -1, axis)
    found = net.forward(x=x)["y"]
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found, wanted)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.integers(1, 40), axis=st.sampled_from(["", "axis: 1"]), values=st.booleans())
def test_argmax_compiled_has_the_bits_of_a_stable_sort(data: st.DataObject, size: int, axis: str, values: bool) -> None:
    """With NaN, infinities and zeros of both signs among them."""
    few = [0.0, -0.0, 1.5, -1.5, 1e-45, -1e-45, np.inf, -np.inf, np.nan, -np.nan]
    x = np.array(data.draw(st.lists(st.sampled_from(few), min_size=2 * size, max_size=2 * size)), np.float32)
    k = data.draw(st.integers(1, size))
    param = f"top_k: {k} out_max_val: {str(values).lower()} {axis}"
    layer = f'type: "ArgMax" bottom: "x" top: "y" argmax_param {{ {param} }}'
    one, other = (one_layer(layer, {"x": (2, size, 1)}, backend=each) for each in BACKENDS.values())
    assert one.forward(x=x.reshape(2, size, 1))["y"].tobytes() == other.forward(x=x.reshape(2, size, 1))["y"].tobytes()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shape=shapes, seed=seeds)
def test_crop_and_tile_as_float64(data: st.DataObject, shape: tuple[int, ...], seed: int) -> None:
    pick = data.draw
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    axis, tiles = pick(st.integers(-len(shape), len(shape) - 1)), pick(st.integers(1, 3))
    tile = one_layer(
        f'type: "Tile" bottom: "x" top: "y" tile_param {{ axis: {axis} tiles: {tiles} }}',
        {"x": shape},
        backend=backend(seed),
    )
    check_against(lambda v: {"y": np.concatenate([v["x"]] * tiles, axis=axis)}, tile, {"x": x}, seed, ["x"])
    first = axis % len(shape)
    size = tuple(pick(st.integers(1, n)) for n in shape)
    room = [n - s for n, s in zip(shape[first:], size[first:], strict=True)]
    each = [pick(st.integers(0, r)) for r in room]
    if pick(st.booleans()):
        each = [min(each)] * len(each)
        text = f"offset: {each[0]}"
    else:
        text = " ".join(f"offset: {o}" for o in each)
    crop = one_layer(
        f'type: "Crop" bottom: "x" bottom: "like" top: "y" crop_param {{ axis: {axis} {text} }}',
        {"x": shape, "like": size},
    )
    cut = (slice(None),) * first + tuple(slice(o, o + s) for o, s in zip(each, size[first:], strict=True))
    arrays = {"x": x, "like": np.zeros(size, np.float32)}
    check_against(lambda v: {"y": v["x"][cut]}, crop, arrays, seed, ["x"])


def test_crop_gives_no_gradient_to_its_pattern_and_looks_at_its_first_axes_only() -> None:
    net = one_layer('type: "Crop" bottom: "x" bottom: "like" top: "y"', {"x": (2, 3, 5, 5), "like": (9, 9, 3, 2)})
    assert net.blobs["y"].shape == (2, 3, 3, 2)
    net.forward()
    assert not net.backward(y=np.ones((2, 3, 3, 2)))["like"].any()


def test_a_parameter_is_learned() -> None:
    solver = Solver(
        'base_lr: 0.5 lr_policy: "fixed"\n',
        net="""layer { name: "t" type: "Input" top: "t" input_param { shape { dim: 1 dim: 3 } } }
        layer { name: "w" type: "Parameter" top: "w" parameter_param { shape { dim: 1 dim: 3 } } }
        layer { name: "loss" type: "EuclideanLoss" bottom: "w" bottom: "t" top: "loss" }""",
    )
    assert not solver.net.params["w"][0].data.any()
    for _ in range(30):
        solver.step_on({"t": np.float32([[1, 2, 3]])})
    np.testing.assert_allclose(solver.net.params["w"][0].data, [[1, 2, 3]], rtol=1e-6)


def spp_level(x: np.ndarray, bins: int, method: str) -> np.ndarray:
    """One level by plain loops over Caffe's windows, flat per image."""
    n, channels, *size = x.shape
    spans = []
    for length in size:
        kernel = -(-length // bins)
        pad = (kernel * bins - length + 1) // 2
        spans.append([(i * kernel - pad, i * kernel - pad + kernel, length, pad) for i in range(bins)])
    out = np.zeros((n, channels, bins, bins))
    for i, (y0, y1, height, pad_h) in enumerate(spans[0]):
        for j, (x0, x1, width, pad_w) in enumerate(spans[1]):
            window = x[:, :, max(y0, 0) : min(y1, height), max(x0, 0) : min(x1, width)]
            area = (min(y1, height + pad_h) - y0) * (min(x1, width + pad_w) - x0)
            out[:, :, i, j] = window.max(axis=(2, 3)) if method == "MAX" else window.sum(axis=(2, 3)) / area
    return out.reshape(n, -1)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 2),
    channels=st.integers(1, 3),
    size=st.tuples(st.sampled_from([4, 7, 8, 9, 12]), st.sampled_from([4, 6, 7, 8, 13])),
    height=st.integers(1, 3),
    method=st.sampled_from(["MAX", "AVE"]),
    seed=seeds,
)
def test_spp_as_loops(n: int, channels: int, size: tuple[int, int], height: int, method: str, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((n, channels, *size)).astype(np.float32)
    kernels = [(-(-length // 2**level), length, 2**level) for level in range(height) for length in size]
    if any((k * bins - length + 1) // 2 >= k for k, length, bins in kernels):
        with pytest.raises(LayerError, match="does not fit"):
            spp(x.shape, height, method, seed)
        return

    def reference(v: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        flat = np.concatenate([spp_level(v["x"], 2**level, method) for level in range(height)], axis=1)
        return {"y": flat.reshape(n, channels, 1, 1) if height == 1 else flat}

    check_against(reference, spp(x.shape, height, method, seed), {"x": x}, seed, ["x"])


def spp(shape: tuple[int, ...], height: int, method: str, seed: int) -> Net:
    return one_layer(
        f'type: "SPP" bottom: "x" top: "y" spp_param {{ pyramid_height: {height} pool: {method} }}',
        {"x": shape},
        backend=backend(seed),
    )


@pytest.mark.oracle
@settings(max_examples=25, deadline=None)
@given(
    kernel=st.integers(1, 3), stride=st.integers(1, 3), pad=st.integers(0, 2), dilation=st.integers(1, 2), seed=seeds
)
def test_im2col_as_torch(kernel: int, stride: int, pad: int, dilation: int, seed: int) -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(seed).standard_normal((2, 3, 6, 7), np.float32)
    param = f"kernel_size: {kernel} stride: {stride} pad: {pad} dilation: {dilation}"
    net = one_layer(
        f'type: "Im2col" bottom: "x" top: "y" convolution_param {{ {param} }}', {"x": x.shape}, backend=backend(seed)
    )
    tx = torch.tensor(x, requires_grad=True)
    ty = torch.nn.functional.unfold(tx, kernel, dilation, pad, stride)
    y = net.forward(x=x)["y"]
    np.testing.assert_array_equal(y.reshape(ty.shape), ty.detach().numpy())
    dy = np.random.default_rng(seed + 1).standard_normal(y.shape, np.float32)
    ty.backward(torch.tensor(dy).reshape(ty.shape))
    np.testing.assert_allclose(net.backward(y=dy)["x"], tx.grad.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_im2col_of_other_axes_is_that_of_each_part(name: str) -> None:
    """With axis 2 everything before it counts as images; a blob of three axes has one spatial axis."""
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5, 6), np.float32)
    param = "kernel_size: 2 pad: 1"
    deep = one_layer(
        f'type: "Im2col" bottom: "x" top: "y" convolution_param {{ {param} axis: 2 }}',
        {"x": x.shape},
        backend=BACKENDS[name],
    )
    flat = one_layer(
        f'type: "Im2col" bottom: "x" top: "y" convolution_param {{ {param} }}',
        {"x": (6, 4, 5, 6)},
        backend=BACKENDS[name],
    )
    y = deep.forward(x=x)["y"]
    assert y.shape == (2, 3, 16, 6, 7)
    np.testing.assert_array_equal(y.reshape(6, 16, 6, 7), flat.forward(x=x.reshape(6, 4, 5, 6))["y"])
    dx = deep.backward(y=y)["x"]
    np.testing.assert_array_equal(dx.reshape(6, 4, 5, 6), flat.backward(y=y.reshape(6, 16, 6, 7))["x"])
    line = one_layer(f'type: "Im2col" bottom: "x" top: "y" convolution_param {{ {param} }}', {"x": (2, 3, 5)})
    assert line.blobs["y"].shape == (2, 6, 6)


@pytest.mark.parametrize(
    "layer",
    [
        'type: "Reduction" bottom: "x" top: "y" reduction_param { axis: 1 operation: SUMSQ }',
        'type: "Tile" bottom: "x" top: "y" tile_param { tiles: 2 }',
        'type: "Crop" bottom: "x" bottom: "like" top: "y"',
        'type: "Im2col" bottom: "x" top: "y" convolution_param { kernel_size: 2 }',
        'type: "SPP" bottom: "x" top: "y" spp_param { pyramid_height: 3 }',
    ],
)
def test_nothing_is_allocated_in_passing(layer: str) -> None:
    net = one_layer(layer, {"x": (8, 8, 32, 32), "like": (8, 8, 16, 16)})
    assert largest_allocation(net) < 8 * 8 * 32 * 32  # a quarter of the input


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ('type: "ArgMax" bottom: "x" top: "y" argmax_param { top_k: 4 axis: 1 }', "top_k"),
        ('type: "ArgMax" bottom: "x" top: "y" argmax_param { axis: 4 }', "axis"),
        ('type: "Reduction" bottom: "x" top: "y" reduction_param { axis: 4 }', "axis"),
        ('type: "Crop" bottom: "x" bottom: "like" top: "y" crop_param { offset: 4 }', "leaves the input on axis 2"),
        ('type: "Crop" bottom: "x" bottom: "like" top: "y" crop_param { offset: [1, 1, 1] }', "once per axis"),
        ('type: "Crop" bottom: "x" bottom: "flat" top: "y"', "too few axes"),
        ('type: "Tile" bottom: "x" top: "y"', "tiles"),
        ('type: "Im2col" bottom: "x" top: "y"', "kernel_size"),
        ('type: "Im2col" bottom: "x" top: "y" convolution_param { kernel_size: 9 }', "padded input"),
        ('type: "SPP" bottom: "x" top: "y"', "pyramid_height"),
        ('type: "SPP" bottom: "flat" top: "y" spp_param { pyramid_height: 2 }', "channels, height, width"),
        ('type: "SPP" bottom: "x" top: "y" spp_param { pyramid_height: 4 }', "smaller pyramid|does not fit"),
    ],
)
def test_what_does_not_fit(layer: str, message: str) -> None:
    with pytest.raises(LayerError, match=f"'L'.*({message})"):
        one_layer(layer, {"x": (2, 3, 5, 5), "like": (2, 3, 2, 2), "flat": (2, 3)})


def test_a_loss_on_places_is_refused() -> None:
    with pytest.raises((LayerError, PrototxtError), match="no gradient"):
        one_layer('type: "ArgMax" bottom: "x" top: "y" loss_weight: 1', {"x": (2, 3)})
