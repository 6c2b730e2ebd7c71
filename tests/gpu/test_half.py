"""Casts to float16 and back: every half, every tie, and random bits, against NumPy's conversion; what they count."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpu import half

HALVES = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(np.float16)
NANS = np.isnan(HALVES)


def counted() -> np.ndarray:
    return np.zeros(half.COLUMNS, np.int64)


def expected(values: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """NumPy's conversion, and what was lost, by definition."""
    with np.errstate(over="ignore", invalid="ignore"):
        halves = values.astype(np.float16)
    finite = np.isfinite(values)
    size = np.abs(halves.astype(np.float64))
    lost = [
        np.isinf(halves) & finite,
        (halves == 0) & (values != 0),
        (size > 0) & (size < 2.0**-14),
        finite & (values != 0),
    ]
    return halves, [int(np.count_nonzero(each)) for each in lost]


def check(values: np.ndarray) -> None:
    values = np.ascontiguousarray(values, np.float32)
    wanted, lost = expected(values)
    halves, counts, nan = np.empty(values.shape, np.float16), counted(), np.isnan(values)
    half.encode(values, halves, counts)
    assert np.array_equal(halves.view(np.uint16)[~nan], wanted.view(np.uint16)[~nan])
    assert np.array_equal(np.isnan(halves), nan)
    assert counts.tolist() == lost
    out, again = np.empty_like(values), counted()
    half.rounded(values, out, again)
    assert again.tolist() == lost
    assert np.array_equal(out.view(np.uint32)[~nan], wanted.astype(np.float32).view(np.uint32)[~nan])
    assert np.isnan(out[nan]).all()


def test_every_half_is_kept() -> None:
    singles = np.empty(HALVES.shape, np.float32)
    half.decode(HALVES, singles)
    assert np.array_equal(singles.view(np.uint32)[~NANS], HALVES.astype(np.float32).view(np.uint32)[~NANS])
    assert np.isnan(singles[NANS]).all()
    check(singles)


def test_ties_and_their_neighbours() -> None:
    grid = np.unique(HALVES[np.isfinite(HALVES)].astype(np.float64))
    ties = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)  # exact: 12 bits
    up, down = np.float32(np.inf), np.float32(-np.inf)
    check(np.concatenate([ties, np.nextafter(ties, up), np.nextafter(ties, down)]))


def test_the_ends_of_the_range() -> None:
    most, least = np.float32(65520), np.float32(2**-25)
    near = [np.nextafter(x, np.float32(to)) for x in (most, least) for to in (-np.inf, np.inf)]
    ends = np.array([most, least, *near, 65504, 65536, 3e38, 1e-45, 2**-14, 2**-24, 0, np.inf, np.nan], np.float32)
    check(np.concatenate([ends, -ends]))
    counts, out = counted(), np.empty(2, np.float16)
    half.encode(np.array([most, np.inf], np.float32), out, counts)
    assert counts[half.OVERFLOW] == 1  # what was infinite already did not overflow here


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_any_bits(bits: list[int]) -> None:
    check(np.array(bits, np.uint32).view(np.float32))


@given(st.lists(st.floats(-70000, 70000, width=32) | st.floats(-(2**-13), 2**-13, width=32), min_size=1, max_size=64))
def test_numbers_in_and_about_the_range(numbers: list[float]) -> None:
    check(np.array(numbers, np.float32))


def test_counts_add_up_and_shapes_are_kept() -> None:
    values = np.array([[1e6, 1e-9], [1.0, 0.0]], np.float32)
    counts, out = counted(), np.empty((2, 2), np.float16)
    for _ in range(3):
        half.encode(values, out, counts)
    assert counts.tolist() == [3, 3, 0, 9]
    assert np.isinf(out[0, 0])
    assert out[0, 1] == 0


def test_arrays_of_several_blocks() -> None:
    check(np.random.default_rng(0).integers(0, 2**32, 3 * 4096 + 5, np.uint32).view(np.float32))


def test_finite() -> None:
    assert half.all_finite(np.array([0, -3e38, 1e-45], np.float32))
    for bad in (np.nan, np.inf, -np.inf):
        assert not half.all_finite(np.array([[0, 1], [bad, 2]], np.float32))
