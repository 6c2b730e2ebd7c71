"""Layers that treat values one by one, move them, or combine them, against PyTorch: random shapes and settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpu.layers import REGISTRY
from gpu.net import Net
from tests.gpu.nets import inputs, layer
from tests.gpu.test_layers_oracle_losses import CASES as LOSSES
from tests.gpu.torch_checks import Case, Pick, as_torch, backends, distinct, precisions

pytestmark = pytest.mark.oracle
sizes = st.integers(1, 4)
shapes = st.lists(sizes, min_size=1, max_size=4).map(tuple)
seeds = st.integers(0, 2**31)


def real(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=16)


# -- one by one -------------------------------------------------------------------------------------------------------


def simple(kind: str, function: Callable[..., Any], settings: str = "", **options: Any) -> Callable[[Pick], Case]:
    return lambda pick: Case(kind, settings, {"x": pick(shapes)}, function, **options)


def relu(pick: Pick) -> Case:
    slope = pick(st.sampled_from([0.0, 0.0, 0.25, -0.5]))
    return Case("ReLU", f"relu_param {{ negative_slope: {slope} }}", {"x": pick(shapes)},
                lambda torch, x: torch.nn.functional.leaky_relu(x, slope))  # fmt: skip


def elu(pick: Pick) -> Case:
    alpha = pick(real(0.25, 2))
    return Case("ELU", f"elu_param {{ alpha: {alpha} }}", {"x": pick(shapes)},
                lambda torch, x: torch.nn.functional.elu(x, alpha))  # fmt: skip


def prelu(pick: Pick) -> Case:
    shared, shape = pick(st.booleans()), (pick(sizes), *pick(shapes))
    return Case("PReLU", f"prelu_param {{ channel_shared: {str(shared).lower()} }}", {"x": shape},
                lambda torch, x, slope: torch.nn.functional.prelu(x, slope))  # fmt: skip


def clip(pick: Pick) -> Case:
    low, width = pick(real(-2, 1)), pick(real(0.125, 2))
    return Case("Clip", f"clip_param {{ min: {low} max: {low + width} }}", {"x": pick(shapes)},
                lambda torch, x: x.clamp(low, low + width))  # fmt: skip


def exp(pick: Pick) -> Case:
    base, scale, shift = pick(st.sampled_from([-1.0, 2.0, 0.5])), pick(real(-1, 1)), pick(real(-1, 1))
    return Case("Exp", f"exp_param {{ base: {base} scale: {scale} shift: {shift} }}", {"x": pick(shapes)},
                lambda torch, x: (math.e if base < 0 else base) ** (shift + scale * x))  # fmt: skip


def log(pick: Pick) -> Case:
    base, scale = pick(st.sampled_from([-1.0, 2.0, 10.0])), pick(real(0.125, 1))
    return Case("Log", f"log_param {{ base: {base} scale: {scale} shift: 8 }}", {"x": pick(shapes)},
                lambda torch, x: torch.log(8 + scale * x) / (1 if base < 0 else math.log(base)))  # fmt: skip


def swish(pick: Pick) -> Case:
    beta = pick(real(-2, 2))
    return Case("Swish", f"swish_param {{ beta: {beta} }}", {"x": pick(shapes)},
                lambda torch, x: x * torch.sigmoid(beta * x))  # fmt: skip


def power(pick: Pick) -> Case:
    exponent, scale = pick(st.sampled_from([0.0, 1.0, 2.0, 3.0, 0.5, -1.0])), pick(real(0.125, 1))
    # Powers that are no whole numbers, and roots of few digits in float16, want a base above 0.
    shift = 8.0 if exponent in (0.5, -1.0) else pick(real(-1, 1))
    return Case("Power", f"power_param {{ power: {exponent} scale: {scale} shift: {shift} }}", {"x": pick(shapes)},
                lambda torch, x: (shift + scale * x) ** exponent)  # fmt: skip


def threshold(pick: Pick) -> Case:
    limit = pick(real(-1, 1))
    return Case("Threshold", f"threshold_param {{ threshold: {limit} }}", {"x": pick(shapes)},
                lambda torch, x: (x > limit).double(), smooth=False)  # fmt: skip


# -- moved ------------------------------------------------------------------------------------------------------------


def flatten(pick: Pick) -> Case:
    shape = pick(shapes)
    first = pick(st.integers(0, len(shape) - 1))
    last = pick(st.integers(first, len(shape) - 1))
    return Case("Flatten", f"flatten_param {{ axis: {first} end_axis: {last - len(shape)} }}", {"x": shape},
                lambda torch, x: x.flatten(first, last))  # fmt: skip


def reshape(pick: Pick) -> Case:
    n, *rest = pick(shapes)
    wanted = pick(st.permutations(rest))
    dims = " ".join(f"dim: {size}" for size in (0, *wanted, -1))
    return Case("Reshape", f"reshape_param {{ shape {{ {dims} }} }}", {"x": (n, *rest, 2)},
                lambda torch, x: x.reshape(n, *wanted, -1))  # fmt: skip


def split(pick: Pick) -> Case:
    tops = pick(st.integers(1, 3))
    return Case("Split", "", {"x": pick(shapes)}, lambda torch, x: (x,) * tops, tops=tops)


def concat(pick: Pick) -> Case:
    shape = pick(shapes)
    axis, widths = pick(st.integers(0, len(shape) - 1)), pick(st.lists(sizes, min_size=1, max_size=3))
    bottoms = {f"x{i}": (*shape[:axis], width, *shape[axis + 1 :]) for i, width in enumerate(widths)}
    return Case("Concat", f"concat_param {{ axis: {axis - len(shape)} }}", bottoms,
                lambda torch, *x: torch.cat(x, axis))  # fmt: skip


def cut(pick: Pick) -> Case:
    shape = pick(shapes)
    axis, widths = pick(st.integers(0, len(shape) - 1)), pick(st.lists(sizes, min_size=2, max_size=3))
    points = "".join(f" slice_point: {edge}" for edge in np.cumsum(widths)[:-1])
    return Case("Slice", f"slice_param {{ axis: {axis}{points} }}",
                {"x": (*shape[:axis], sum(widths), *shape[axis + 1 :])},
                lambda torch, x: torch.split(x, widths, axis), tops=len(widths))  # fmt: skip


def crop(pick: Pick) -> Case:
    shape = pick(shapes)
    axis = pick(st.integers(0, len(shape) - 1))
    offsets, after = ([pick(st.integers(0, 2)) for _ in shape[axis:]] for _ in range(2))
    large = (*shape[:axis], *[size + a + b for size, a, b in zip(shape[axis:], offsets, after, strict=True)])

    def wanted(torch: Any, x: Any, like: Any) -> Any:
        for i, offset in enumerate(offsets, axis):
            x = x.narrow(i, offset, like.shape[i])
        return x

    fields = " ".join(f"offset: {offset}" for offset in offsets)
    like = {"like": np.ones(shape, np.float32)}
    return Case("Crop", f"crop_param {{ axis: {axis} {fields} }}", {"x": large, **like}, wanted, constant=("like",))


def tile(pick: Pick) -> Case:
    shape, count = pick(shapes), pick(sizes)
    axis = pick(st.integers(0, len(shape) - 1))
    return Case("Tile", f"tile_param {{ axis: {axis} tiles: {count} }}", {"x": shape},
                lambda torch, x: x.repeat(*[count if i == axis else 1 for i in range(len(shape))]))  # fmt: skip


def parameter(pick: Pick) -> Case:
    shape = pick(shapes)
    dims = " ".join(f"dim: {size}" for size in shape)
    return Case("Parameter", f"parameter_param {{ shape {{ {dims} }} }}", {}, lambda torch, p: p * 1)


def batch_reindex(pick: Pick) -> Case:
    shape = pick(shapes)
    index = np.array(pick(st.lists(st.integers(0, shape[0] - 1), min_size=1, max_size=6)))
    return Case("BatchReindex", "", {"x": shape, "i": index}, lambda torch, x, i: x[i])


def embed(pick: Pick) -> Case:
    rows, bias = pick(sizes), pick(st.booleans())
    index = np.random.default_rng(pick(seeds)).integers(0, rows, pick(shapes))
    fields = f"num_output: {pick(sizes)} input_dim: {rows} bias_term: {str(bias).lower()}"
    return Case("Embed", f"embed_param {{ {fields} }}",
                {"i": index}, lambda torch, i, w, *b: torch.nn.functional.embedding(i, w) + sum(b))  # fmt: skip


def chosen(pick: Pick) -> Case:
    n, *rest = pick(shapes)
    keep = np.array([1, *pick(st.lists(st.integers(0, 1), min_size=n - 1, max_size=n - 1))])
    return Case("Filter", "", {"a": (n, *rest), "b": (n, 2), "s": keep},
                lambda torch, a, b, s: (a[s > 0], b[s > 0]), tops=2, smooth=bool(keep.all()))  # fmt: skip


# -- combined ---------------------------------------------------------------------------------------------------------


def eltwise(pick: Pick) -> Case:
    operation, count, shape = pick(st.sampled_from(["SUM", "PROD", "MAX"])), pick(st.integers(2, 4)), pick(shapes)
    coefficients = pick(st.lists(real(-2, 2), min_size=count, max_size=count) | st.just([]))
    if operation != "SUM":
        coefficients = []
    names = [f"x{i}" for i in range(count)]
    arrays: Any = [shape] * count
    if operation == "MAX":
        arrays = distinct(np.random.default_rng(pick(seeds)), *[shape] * count) if math.prod(shape) < 200 else arrays

    def wanted(torch: Any, *x: Any) -> Any:
        both = torch.stack(x)
        if operation == "MAX":
            return both.amax(0)
        if operation == "PROD":
            return both.prod(0)
        return torch.tensordot(torch.tensor(coefficients or [1.0] * count).double(), both, 1)

    fields = " ".join([f"operation: {operation}", *(f"coeff: {value}" for value in coefficients)])
    return Case("Eltwise", f"eltwise_param {{ {fields} }}", dict(zip(names, arrays, strict=True)), wanted)


def spread(kind: str) -> Callable[[Pick], Case]:
    """Scale and Bias: learned, or a second bottom, on some of the axes."""

    def make(pick: Pick) -> Case:
        shape = pick(shapes)
        axis = pick(st.integers(0, len(shape) - 1))
        count = pick(st.integers(0, len(shape) - axis))
        learned, bias = pick(st.booleans()), kind == "Scale" and pick(st.booleans())
        if not learned:
            count = max(count, 1)
        inner = shape[axis : axis + count]
        wide = (*inner, *[1] * (len(shape) - axis - count))

        def wanted(torch: Any, x: Any, operand: Any, *more: Any) -> Any:
            y = x * operand.reshape(wide) if kind == "Scale" else x + operand.reshape(wide)
            return y + more[0].reshape(wide) if more else y

        fields = f"axis: {axis}" + f" num_axes: {count}" * learned + " bias_term: true" * bias
        bottoms = {"x": shape} if learned else {"x": shape, "s": inner}
        return Case(kind, f"{kind.lower()}_param {{ {fields} }}", bottoms, wanted)

    return make


def reduction(pick: Pick) -> Case:
    shape, operation = pick(shapes), pick(st.sampled_from(["SUM", "ASUM", "SUMSQ", "MEAN"]))
    axis, coeff = pick(st.integers(0, len(shape) - 1)), pick(real(-2, 2))

    def wanted(torch: Any, x: Any) -> Any:
        flat = x.reshape(*shape[:axis], -1)
        values = {"ASUM": flat.abs(), "SUMSQ": flat**2}.get(operation, flat)
        return coeff * (values.mean(-1) if operation == "MEAN" else values.sum(-1))

    return Case("Reduction", f"reduction_param {{ operation: {operation} axis: {axis} coeff: {coeff} }}",
                {"x": shape}, wanted)  # fmt: skip


def softmax(pick: Pick) -> Case:
    shape = pick(shapes)
    axis = pick(st.integers(0, len(shape) - 1))
    return Case("Softmax", f"softmax_param {{ axis: {axis} }}", {"x": shape},
                lambda torch, x: torch.softmax(x, axis))  # fmt: skip


def argmax(pick: Pick) -> Case:
    shape = pick(shapes)
    axis, values = pick(st.integers(0, len(shape) - 1)), pick(st.booleans())
    k = pick(st.integers(1, shape[axis]))
    (x,) = distinct(np.random.default_rng(pick(seeds)), shape)
    fields = f"axis: {axis} top_k: {k} out_max_val: {str(values).lower()}"
    return Case("ArgMax", f"argmax_param {{ {fields} }}", {"x": x},
                lambda torch, x: x.topk(k, axis)[0 if values else 1].double(), smooth=False)  # fmt: skip


def mvn(pick: Pick) -> Case:
    across, variance = pick(st.booleans()), pick(st.booleans())
    shape = (pick(sizes), pick(sizes), pick(st.integers(3, 5)), pick(st.integers(2, 4)))

    def wanted(torch: Any, x: Any) -> Any:
        axes = (1, 2, 3) if across else (2, 3)
        y = x - x.mean(axes, keepdim=True)
        return y / (y.pow(2).mean(axes, keepdim=True).sqrt() + 1e-9) if variance else y

    fields = f"across_channels: {str(across).lower()} normalize_variance: {str(variance).lower()}"
    return Case("MVN", f"mvn_param {{ {fields} }}", {"x": shape}, wanted)


def global_batch_norm(pick: Pick) -> Case:
    shape, eps = (pick(sizes), pick(sizes), *pick(st.just(()) | st.tuples(sizes, sizes))), pick(real(0.0009765625, 1))
    rng, total = np.random.default_rng(pick(seeds)), pick(st.sampled_from([1.0, 2.0, 0.5]))
    mean, variance = rng.standard_normal(shape[1]), rng.uniform(0.25, 2, shape[1])
    params = [array.astype(np.float32) for array in (mean, variance, np.array([total]))]
    # Statistics are never rounded, so float16 sees the same ones: they are given as values of it.
    params = [array.astype(np.float16).astype(np.float32) for array in params]
    return Case("BatchNorm", f"batch_norm_param {{ eps: {eps} }}", {"x": shape},
                lambda torch, x, m, v, t: torch.nn.functional.batch_norm(x, m / t, v / t, eps=eps),
                phase="TEST", params=params)  # fmt: skip


def lstm_unit(pick: Pick) -> Case:
    streams, size = pick(sizes), pick(sizes)
    cont = np.array([pick(st.lists(st.integers(0, 1), min_size=streams, max_size=streams))])

    def wanted(torch: Any, c: Any, gates: Any, cont: Any) -> Any:
        i, f, o, g = gates.chunk(4, -1)
        cell = cont[..., None] * torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return cell, torch.sigmoid(o) * torch.tanh(cell)

    return Case("LSTMUnit", "", {"c": (1, streams, size), "g": (1, streams, 4 * size), "cont": cont}, wanted, tops=2)


def spp(pick: Pick) -> Case:
    """Caffe pads by half of what the windows lack, on all sides; PyTorch allows half a window at most."""
    height, method = pick(st.integers(1, 3)), pick(st.sampled_from(["MAX", "AVE"]))
    shape = (pick(sizes), pick(sizes), pick(st.integers(4, 9)), pick(st.integers(4, 9)))
    levels = []
    for bins in (2**level for level in range(height)):
        kernel = [-(-size // bins) for size in shape[2:]]
        pad = [(k * bins - size + 1) // 2 for k, size in zip(kernel, shape[2:], strict=True)]
        assume(all(2 * p <= k for p, k in zip(pad, kernel, strict=True)))
        levels.append((kernel, pad))

    def wanted(torch: Any, x: Any) -> Any:
        pool = torch.max_pool2d if method == "MAX" else torch.nn.functional.avg_pool2d
        maps = [pool(x, kernel, kernel, pad, ceil_mode=True) for kernel, pad in levels]
        return maps[0] if height == 1 else torch.cat([each.flatten(1) for each in maps], 1)

    (x,) = distinct(np.random.default_rng(pick(seeds)), shape)
    return Case("SPP", f"spp_param {{ pyramid_height: {height} pool: {method} }}", {"x": x}, wanted)


CASES: dict[str, Callable[[Pick], Case]] = {
    "AbsVal": simple("AbsVal", lambda torch, x: x.abs()),
    "BNLL": simple("BNLL", lambda torch, x: torch.nn.functional.softplus(x)),
    "Sigmoid": simple("Sigmoid", lambda torch, x: torch.sigmoid(x)),
    "TanH": simple("TanH", lambda torch, x: torch.tanh(x)),
    "Dropout": simple("Dropout", lambda torch, x: x, phase="TEST"),  # TRAIN: below
    "ReLU": relu, "ELU": elu, "PReLU": prelu, "Clip": clip, "Exp": exp, "Log": log, "Swish": swish, "Power": power,
    "Threshold": threshold, "Flatten": flatten, "Reshape": reshape, "Split": split, "Concat": concat, "Slice": cut,
    "Crop": crop, "Tile": tile, "Parameter": parameter, "BatchReindex": batch_reindex, "Embed": embed,
    "Filter": chosen, "Eltwise": eltwise, "Scale": spread("Scale"), "Bias": spread("Bias"), "Reduction": reduction,
    "Softmax": softmax, "ArgMax": argmax, "MVN": mvn, "BatchNorm": global_batch_norm, "LSTMUnit": lstm_unit,
    "SPP": spp,
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
@settings(max_examples=12, deadline=None)
@given(data=st.data(), backend=backends, precision=precisions, seed=st.integers(0, 99))
def test_as_torch(kind: str, data: st.DataObject, backend: str, precision: str, seed: int) -> None:
    as_torch(CASES[kind](data.draw), backend, precision, seed)


@settings(max_examples=12, deadline=None)
@given(ratio=st.sampled_from([0.25, 0.5]), shape=shapes, backend=backends, precision=precisions, seed=seeds)
def test_dropout_in_train(ratio: float, shape: tuple[int, ...], backend: str, precision: str, seed: int) -> None:
    """With the mask that the forward pass shows, as PyTorch draws another one."""
    text = inputs(x=shape) + layer("Dropout", "L", ["x"], ["y0"], f"dropout_param {{ dropout_ratio: {ratio} }}")
    x = np.ones(shape, np.float32)
    mask = Net(text, "TRAIN", seed=None).forward(x=x)["y0"]
    assert set(mask.ravel()) <= {np.float32(0), np.float32(1 / (1 - ratio))}
    as_torch(
        Case("Dropout", f"dropout_param {{ dropout_ratio: {ratio} }}", {"x": shape},
             lambda torch, x: x * torch.tensor(mask.astype(np.float64))),
        backend, precision, seed,
    )  # fmt: skip


ELSEWHERE = {
    **dict.fromkeys(
        ["Convolution", "Deconvolution", "Pooling", "LRN", "BatchNorm", "InnerProduct"], "test_layers_oracle"
    ),
    **dict.fromkeys(["LSTM", "RNN"], "test_recurrent"),
    "Im2col": "test_arrange",
}
NOTHING_COMPUTED = {"Input", "Data", "MemoryData", "DummyData", "ImageData", "HDF5Data", "Silence", "Python"}


def test_no_type_of_layer_is_left_out() -> None:
    built_in = {name for name, cls in REGISTRY.items() if cls.__module__.startswith("gpu.")}
    assert built_in == set(CASES) | set(LOSSES) | set(ELSEWHERE) | NOTHING_COMPUTED
