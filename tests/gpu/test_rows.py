"""Embed and BatchReindex: float64, PyTorch, the order of sums, and numbers that name no row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.layers.base import LayerError
from gpu.net import Net
from tests.gpu.layer_checks import BACKENDS, check_against, largest_allocation, one_layer


def embed(rows: int, size: int, shape: tuple[int, ...], text: str = "", backend: str = "compiled") -> Net:
    fillers = 'weight_filler { type: "uniform" min: -1 max: 1 } bias_filler { type: "uniform" min: -1 max: 1 }'
    param = f"embed_param {{ input_dim: {rows} num_output: {size} {text} {fillers} }}"
    return one_layer(f'type: "Embed" bottom: "x" top: "y" {param}', {"x": shape}, backend=BACKENDS[backend])


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@settings(max_examples=40, deadline=None)
@given(shape=shapes, rows=st.integers(1, 6), size=st.integers(1, 4), bias=st.booleans(), seed=st.integers(0, 99))
def test_embed_as_float64(shape: tuple[int, ...], rows: int, size: int, bias: bool, seed: int) -> None:
    x = np.random.default_rng(seed).integers(0, rows, shape).astype(np.float32)
    net = embed(rows, size, shape, f"bias_term: {str(bias).lower()}", "portable" if seed % 2 else "compiled")
    smooth = ["p0", "p1"] if bias else ["p0"]
    check_against(lambda v: {"y": v["p0"][v["x"].astype(int)] + (v["p1"] if bias else 0)}, net, {"x": x}, seed, smooth)


@settings(max_examples=40, deadline=None)
@given(shape=shapes, picks=st.integers(1, 9), seed=st.integers(0, 99))
def test_batch_reindex_as_float64(shape: tuple[int, ...], picks: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, index = rng.standard_normal(shape).astype(np.float32), rng.integers(0, shape[0], picks).astype(np.float32)
    net = one_layer(
        'type: "BatchReindex" bottom: "x" bottom: "i" top: "y"',
        {"x": shape, "i": (picks,)},
        backend=BACKENDS["portable" if seed % 2 else "compiled"],
    )
    check_against(lambda v: {"y": v["x"][v["i"].astype(int)]}, net, {"x": x, "i": index}, seed, ["x"])


@settings(max_examples=40, deadline=None)
@given(picks=st.integers(1, 200), rows=st.integers(1, 20), seed=st.integers(0, 999))
def test_sums_of_picks_with_values_that_must_stay_apart(picks: int, rows: int, seed: int) -> None:
    """Infinities and NaN of one row may not reach another, and whole numbers are added exactly, whatever the order."""
    rng = np.random.default_rng(seed)
    index = rng.integers(0, rows, picks)
    dy = rng.integers(-9, 10, (picks, 2)).astype(np.float32)
    dy[index == rng.integers(0, rows)] = [np.nan, np.inf]
    net = embed(rows, 2, (picks,))
    net.forward(x=index)
    net.backward(y=dy)
    wanted = np.zeros((rows, 2))
    np.add.at(wanted, index, dy)
    np.testing.assert_array_equal(net.params["L"][0].diff, wanted)


def test_a_repeated_row_is_summed_the_same_way_each_time() -> None:
    rng = np.random.default_rng(0)
    index, dy = rng.integers(0, 3, 999), rng.standard_normal((999, 8), np.float32)
    net = embed(3, 8, (999,))
    found = []
    for _ in range(3):
        net.clear_param_diffs()
        net.forward(x=index)
        net.backward(y=dy)
        found.append(net.params["L"][0].diff.copy())
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
    wanted = np.zeros((3, 8))
    np.add.at(wanted, index, dy.astype(np.float64))
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(picks=st.integers(1, 70), rows=st.integers(1, 9), same=st.booleans(), seed=st.integers(0, 999))
def test_compiled_sums_have_the_bits_of_array_arithmetic(picks: int, rows: int, same: bool, seed: int) -> None:
    """Those of zeros with a sign, too, alone in their row or last of it."""
    rng = np.random.default_rng(seed)
    index = np.full(picks, rows - 1) if same else rng.integers(0, rows, picks)
    dy = rng.standard_normal((picks, 3), np.float32)
    dy[rng.random((picks, 3)) < 0.4] = -0.0
    found = []
    for backend in BACKENDS:
        net = embed(rows, 3, (picks,), backend=backend)
        net.forward(x=index)
        net.backward(y=dy)
        found.append([blob.diff.tobytes() for blob in net.params["L"]])
    assert found[0] == found[1]


def test_only_row_numbers_are_allocated_in_passing_where_nothing_is_compiled() -> None:
    """test_steady counts none at all where it is."""
    net = embed(50, 256, (64, 8), backend="portable")
    assert largest_allocation(net) < 512 * 256 * 4 // 4  # a quarter of what is picked


@pytest.mark.parametrize("value", [-1, 5, 1.5, np.nan, np.inf])
def test_numbers_that_name_no_row(value: float) -> None:
    net = embed(5, 2, (3,))
    with pytest.raises(LayerError, match=r"'L' \(Embed\): value 1 of blob 'x' names no row") as caught:
        net.forward(x=np.float32([4, value, 0]))
    assert "0 to 4" in str(caught.value.expected)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ('type: "BatchReindex" bottom: "x" bottom: "x" top: "y"', "one axis"),
        ('type: "Embed" bottom: "x" top: "y" embed_param { num_output: 3 }', "input_dim"),
        ('type: "Embed" bottom: "x" top: "y" embed_param { input_dim: 3 }', "num_output"),
    ],
)
def test_what_does_not_fit(layer: str, message: str) -> None:
    with pytest.raises(LayerError, match=f"'L'.*{message}"):
        one_layer(layer, {"x": (4, 3)})
