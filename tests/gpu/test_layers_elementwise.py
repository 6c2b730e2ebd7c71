"""Activations, functions, biases, scales and MVN against float64 and its numeric gradients, over shapes and options."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.layers.base import LayerError
from gpu.net import Net
from tests.gpu.test_layers import BACKENDS, error

pytestmark = pytest.mark.filterwarnings("ignore::gpu.fields.FieldWarning")  # see test_fields

Function = Callable[..., np.ndarray]
SEEDS = st.integers(0, 999)
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
NAMES = st.sampled_from(sorted(BACKENDS))


def one_layer(layer: str, shapes: dict[str, tuple[int, ...]], in_place: bool, backend: str) -> Net:
    """Layer L on inputs of these shapes; in place it works on a copy of the first one, in that copy's memory."""
    text = "force_backward: true\n"
    for name, shape in shapes.items():
        dims = " ".join(f"dim: {size}" for size in shape)
        text += f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims} }} }} }}\n'
    first, *others = shapes
    bottoms = " ".join(f'bottom: "{name}"' for name in ["h" if in_place else first, *others])
    if in_place:
        text += f'layer {{ name: "copy" type: "Power" bottom: "{first}" top: "h" }}\n'
    top = "h" if in_place else "y"
    return Net(text + f'layer {{ name: "L" {layer} {bottoms} top: "{top}" }}', backend=BACKENDS[backend])


def values(seed: int, shape: tuple[int, ...], away: tuple[float, ...] = (0.0,)) -> np.ndarray:
    """Normal numbers, float32, none of them within 0.02 of a kink."""
    x = 1.5 * np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    for kink in away:
        x = np.where(abs(x - kink) < 0.02, np.float32(kink + 0.05), x)
    return x.astype(np.float32)


def check(
    layer: str,
    function: Function,
    inputs: dict[str, np.ndarray],
    *,
    params: list[np.ndarray] | None = None,
    in_place: bool = False,
    backend: str = "compiled",
    tolerance: float = 1e-5,
) -> None:
    """Output and all gradients are those of ``function`` in float64, the gradients by central differences."""
    net = one_layer(layer, {name: array.shape for name, array in inputs.items()}, in_place, backend)
    for blob, value in zip(net.params.get("L", []), params or [], strict=True):
        blob.data = value
    wide = [array.astype(np.float64) for array in (*inputs.values(), *(params or []))]
    want = function(*wide)
    top = "h" if in_place else "y"
    have = net.forward(**inputs)[top]
    assert have.shape == want.shape
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=2e-6)
    assert error(have, want) <= tolerance
    dy = np.random.default_rng(7).standard_normal(want.shape).astype(np.float32)
    found = net.backward(**{top: dy})
    gradients = [found[name] for name in inputs] + [blob.diff for blob in net.params.get("L", [])]
    for array, gradient in zip(wide, gradients, strict=True):
        slope = np.zeros(array.shape)
        for place in itertools.product(*map(range, array.shape)):
            kept = array[place]
            array[place] = kept + 1e-5
            above = function(*wide)
            array[place] = kept - 1e-5
            below = function(*wide)
            array[place] = kept
            slope[place] = ((above - below) * dy).sum() / 2e-5
        assert gradient.shape == slope.shape
        np.testing.assert_allclose(gradient, slope, rtol=2e-4, atol=2e-5)


POINTWISE: dict[str, tuple[str, Function, tuple[float, ...]]] = {
    "bnll": ('type: "BNLL"', lambda x: np.logaddexp(0, x), ()),
    "clip": ('type: "Clip" clip_param { min: -0.5 max: 1.25 }', lambda x: np.clip(x, -0.5, 1.25), (-0.5, 1.25)),
    "elu": ('type: "ELU"', lambda x: np.where(x > 0, x, np.expm1(x)), (0,)),
    "elu of a negative alpha": (
        'type: "ELU" elu_param { alpha: -0.5 }',
        lambda x: np.where(x > 0, x, -0.5 * np.expm1(x)),
        (0,),
    ),
    "exp": ('type: "Exp"', np.exp, ()),
    "exp of another base": (
        'type: "Exp" exp_param { base: 2 scale: -0.5 shift: 0.75 }',
        lambda x: 2 ** (0.75 - 0.5 * x),
        (),
    ),
    "exp of base 1": ('type: "Exp" exp_param { base: 1 shift: 3 }', np.ones_like, ()),
    "log": (
        'type: "Log" log_param { base: 0.5 scale: 0.25 shift: 4 }',
        lambda x: np.log(4 + 0.25 * x) / np.log(0.5),
        (),
    ),
    "swish": ('type: "Swish" swish_param { beta: -0.75 }', lambda x: x / (1 + np.exp(0.75 * x)), ()),
}


@pytest.mark.parametrize("name", POINTWISE)
@settings(max_examples=12, deadline=None)
@given(shape=SHAPES, seed=SEEDS, in_place=st.booleans(), backend=NAMES)
def test_functions_of_every_value(name: str, shape: tuple[int, ...], seed: int, in_place: bool, backend: str) -> None:
    layer, function, kinks = POINTWISE[name]
    check(layer, function, {"x": values(seed, shape, kinks)}, in_place=in_place, backend=backend)


@settings(max_examples=12, deadline=None)
@given(shape=SHAPES, seed=SEEDS, backend=NAMES)
def test_absolute_values_and_thresholds(shape: tuple[int, ...], seed: int, backend: str) -> None:
    x = values(seed, shape)
    check('type: "AbsVal"', np.abs, {"x": x}, backend=backend)
    for in_place in (False, True):
        net = one_layer('type: "Threshold" threshold_param { threshold: 0.25 }', {"x": shape}, in_place, backend)
        (y,) = net.forward(x=x).values()
        np.testing.assert_array_equal(y, x > 0.25)


@settings(max_examples=20, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple),
    shared=st.booleans(),
    in_place=st.booleans(),
    seed=SEEDS,
    backend=NAMES,
)
def test_prelu(shape: tuple[int, ...], shared: bool, in_place: bool, seed: int, backend: str) -> None:
    slopes = values(seed + 1, () if shared else shape[1:2])

    def function(x: np.ndarray, a: np.ndarray) -> np.ndarray:
        a = a.reshape(() if shared else (shape[1], *[1] * (len(shape) - 2)))
        return np.maximum(x, 0) + a * np.minimum(x, 0)

    layer = f'type: "PReLU" prelu_param {{ channel_shared: {str(shared).lower()} }}'
    net = one_layer(layer, {"x": shape}, in_place, backend)
    assert net.params["L"][0].shape == (() if shared else shape[1:2])
    assert (net.params["L"][0].data == 0.25).all()
    check(layer, function, {"x": values(seed, shape)}, params=[slopes], in_place=in_place, backend=backend)


@st.composite
def spread(draw: Any) -> tuple[tuple[int, ...], int, int]:
    """An input's shape, the first axis of an operand for it and the number of its axes."""
    shape = draw(SHAPES)
    axis = draw(st.integers(0, len(shape) - 1))
    return shape, axis, draw(st.integers(0, len(shape) - axis))


@pytest.mark.parametrize("kind", ["Bias", "Scale"])
@settings(max_examples=25, deadline=None)
@given(
    given_=spread(), learned=st.booleans(), minus=st.booleans(), in_place=st.booleans(), bias=st.booleans(),
    seed=SEEDS, backend=NAMES,
)  # fmt: skip
def test_operands_that_are_spread(
    kind: str,
    given_: tuple[tuple[int, ...], int, int],
    learned: bool,
    minus: bool,
    in_place: bool,
    bias: bool,
    seed: int,
    backend: str,
) -> None:
    shape, axis, axes = given_
    inner = shape[axis : axis + axes]
    wide = (*inner, *[1] * (len(shape) - axis - axes))
    bias = bias and kind == "Scale"

    def function(x: np.ndarray, *operands: np.ndarray) -> np.ndarray:
        first, *second = (operand.reshape(wide) for operand in operands)
        y = x * first if kind == "Scale" else x + first
        return y + second[0] if second else y

    told = -1 if axis + axes == len(shape) and minus else axes
    fields = f"axis: {axis - len(shape) if minus else axis}"
    if learned:
        fields += f" num_axes: {told}"
    if bias:
        fields += " bias_term: true"
    inputs = {"x": values(seed, shape)} | ({} if learned else {"b": values(seed + 1, inner)})
    params = [values(seed + 2 + i, inner) for i in range(learned + bias)]
    layer = f'type: "{kind}" {kind.lower()}_param {{ {fields} }}'
    check(layer, function, inputs, params=params, in_place=in_place, backend=backend)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.integers(1, 3), min_size=2, max_size=2),
    rest=st.lists(st.integers(2, 4), min_size=1, max_size=2),
    across=st.booleans(),
    variance=st.booleans(),
    in_place=st.booleans(),
    seed=SEEDS,
    backend=NAMES,
)
def test_mvn(
    rows: list[int], rest: list[int], across: bool, variance: bool, in_place: bool, seed: int, backend: str
) -> None:
    shape = (*rows, *rest)
    along = tuple(range(1 if across else 2, len(shape)))

    def function(x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(axis=along, keepdims=True)
        if not variance:
            return centred
        return centred / (np.sqrt((centred**2).mean(axis=along, keepdims=True)) + 1e-9)

    # No row of nearly equal values: its gradient is one divided by eps.
    slope = np.linspace(-2, 2, int(np.prod(rest)), dtype=np.float32).reshape(rest)
    x = values(seed, shape) / np.float32(8) + slope
    told = f"normalize_variance: {str(variance).lower()} across_channels: {str(across).lower()}"
    check(f'type: "MVN" mvn_param {{ {told} }}', function, {"x": x}, in_place=in_place, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mvn_with_a_large_eps_has_the_gradient_of_caffe(backend: str) -> None:
    """Caffe adds eps to the deviation, and in backward takes that sum for the deviation."""
    x, dy = values(1, (2, 3, 4, 2)), values(2, (2, 3, 4, 2))
    net = one_layer('type: "MVN" mvn_param { eps: 0.5 }', {"x": x.shape}, False, backend)
    y = net.forward(x=x)["y"]
    flat = x.reshape(6, 8).astype(np.float64)
    std = flat.std(axis=1, keepdims=True) + 0.5
    want = (flat - flat.mean(axis=1, keepdims=True)) / std
    assert error(y.reshape(6, 8), want) < 1e-6
    dx = net.backward(y=dy)["x"].reshape(6, 8)
    wide = dy.reshape(6, 8).astype(np.float64)
    slope = wide - wide.mean(axis=1, keepdims=True) - want * (wide * want).mean(axis=1, keepdims=True)
    assert error(dx, slope / std) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("layer", "wanted", "slopes"),
    [
        ('type: "BNLL"', [0, 0, 0.69314718, 100, np.inf], [0, 0, 0.5, 1, 1]),
        ('type: "ELU"', [-1, -1, 0, 100, np.inf], [0, 0, 1, 1, 1]),
        ('type: "Swish"', [0, -100 * np.exp(-100.0), 0, 100, 1e30], [0, 0, 0.5, 1, 1]),
        ('type: "Clip" clip_param { min: -1 max: 1 }', [-1, -1, 0, 1, 1], [0, 0, 1, 0, 0]),
    ],
)
def test_far_from_zero(layer: str, wanted: list[float], slopes: list[float], backend: str) -> None:
    """No overflow, no NaN: warnings are errors in the tests."""
    x = np.float32([-1e30, -100, 0, 100, 1e30 if "Swish" in layer else np.inf])
    net = one_layer(layer, {"x": (5,)}, False, backend)
    np.testing.assert_allclose(net.forward(x=x)["y"], wanted, rtol=1e-5, atol=1e-37)
    dx = net.backward(y=np.ones(5, np.float32))["x"]
    np.testing.assert_allclose(dx, slopes, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ('type: "Clip" bottom: "x" top: "y"', "min and max"),
        ('type: "Clip" bottom: "x" top: "y" clip_param { min: 0 }', "min and max"),
        ('type: "Clip" bottom: "x" top: "y" clip_param { min: 2 max: 1 }', "min is above max"),
        ('type: "Exp" bottom: "x" top: "y" exp_param { base: 0 }', "base is out of range"),
        ('type: "Exp" bottom: "x" top: "y" exp_param { base: -2 }', "base is out of range"),
        ('type: "Exp" bottom: "x" top: "y" exp_param { base: 10 shift: 39 }', "too large"),
        ('type: "Log" bottom: "x" top: "y" log_param { base: 1 }', "base is out of range"),
        ('type: "Log" bottom: "x" top: "y" log_param { base: nan }', "base is out of range"),
        ('type: "AbsVal" bottom: "x" top: "x"', "over its input"),
        ('type: "PReLU" bottom: "flat" top: "y"', "images, channels"),
        ('type: "Bias" bottom: "x" top: "y" bias_param { axis: 2 num_axes: 2 }', "num_axes"),
        ('type: "Bias" bottom: "x" top: "y" bias_param { num_axes: -2 }', "num_axes"),
        ('type: "Bias" bottom: "x" top: "y" bias_param { axis: 3 }', "axis is out of range"),
        ('type: "Bias" bottom: "x" bottom: "flat" top: "y"', "second input does not fit"),
        ('type: "Threshold" bottom: "x" top: "y" loss_weight: 1', "no gradient"),
    ],
)
def test_settings_that_make_no_sense(layer: str, message: str) -> None:
    with pytest.raises(LayerError, match=f"'L'.*{message}"):
        Net(
            f"""layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ dim: 2 dim: 3 dim: 4 }} }} }}
            layer {{ name: "flat" type: "Input" top: "flat" input_param {{ shape {{ dim: 6 }} }} }}
            layer {{ name: "L" {layer} }}"""
        )
