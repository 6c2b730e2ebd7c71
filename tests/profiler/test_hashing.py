"""Hashes: pinned values, the same bits from every path, and every kind of small change seen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler import hashing
from profiler.errors import StallscopeError
from profiler.hashing import Stats, multiset, ordered, ordered_parts, stats

RNG = np.random.default_rng(0)
MASK = (1 << 64) - 1


def by_the_formula(data: bytes) -> int:
    """The docstring's formula, one word at a time in plain integers."""

    def mix(x: int) -> int:
        x = (x ^ x >> 32) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ x >> 29) * 0x94D049BB133111EB & MASK
        return x ^ x >> 32

    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    total = sum(mix(word ^ (i + 1) * 0xD6E8FEB86659FD93 & MASK) for i, word in enumerate(words))
    length = 0x2545F4914F6CDD1D
    return mix((total + mix(len(data) ^ length) & MASK) ^ length)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0xC2D27D6D990630A4),
        (b"abc", 0x14CBC0C5413C9C09),
        (bytes(8), 0x6CF8706FFA0BC729),
        (bytes(range(256)), 0xBD1F6015EC7AE8FF),
        (np.arange(100_000, dtype="<f4"), 0x579C1E8AC291D9A4),
    ],
)
def test_ordered_values_are_a_contract(data: Any, value: int) -> None:
    assert ordered(data) == value


def test_multiset_and_parts_values_are_a_contract() -> None:
    assert multiset(np.arange(12, dtype="<i8")) == 0xBC7ABF74F5F963D4
    assert multiset(np.arange(12, dtype="<i4").reshape(4, 3)) == 0x9B498C3829428835
    assert ordered_parts([b"ab", b"c"]) == 0xFE73A32E0A54455F


@given(st.binary(max_size=200))
def test_both_paths_follow_the_formula(data: bytes) -> None:
    view = hashing.as_bytes(data)
    expected = by_the_formula(data)
    for use_numba in (False, True):
        assert hashing.finish(hashing._sum_of_words(view, use_numba=use_numba), len(data)) == expected


@pytest.mark.parametrize("nbytes", [8 * hashing._BLOCK - 8, 8 * hashing._BLOCK, 8 * hashing._BLOCK + 8, 300_003])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_both_paths_agree_across_blocks_and_in_unaligned_memory(nbytes: int, offset: int) -> None:
    memory = RNG.integers(0, 256, nbytes + offset, dtype=np.uint8)
    data = hashing.as_bytes(memory[offset:])
    aligned = hashing.as_bytes(memory[offset:].copy())
    sums = {hashing._sum_of_words(view, use_numba=path) for view in (data, aligned) for path in (False, True)}
    assert len(sums) == 1


@pytest.mark.parametrize("shape", [(1, 8), (5, 16), (7, 13), (300, 1), (3, 70_000), (3, 70_001)])
def test_row_sums_agree_with_hashes_of_single_rows(shape: tuple[int, int]) -> None:
    rows = RNG.integers(0, 256, shape, dtype=np.uint8)
    expected = sum(by_the_formula(row.tobytes()) if row.size < 1000 else ordered(row) for row in rows) & MASK
    assert multiset(rows) == multiset(list(rows)) == multiset([row.tobytes() for row in rows]) == expected
    for use_numba in (False, True):
        assert hashing._sum_of_rows(hashing.as_bytes(rows).reshape(shape), use_numba=use_numba) == expected


def test_every_form_of_the_same_bytes_hashes_alike_without_copying_or_changing_it() -> None:
    array = RNG.standard_normal((6, 8)).astype(np.float32)
    expected = ordered(array.tobytes())
    frozen = array.copy()
    frozen.flags.writeable = False
    for form in (array, frozen, memoryview(array), bytearray(array.tobytes()), array.reshape(-1), array.view(np.uint8)):
        assert ordered(form) == expected
    assert ordered(np.asfortranarray(array)) == expected
    assert ordered(memoryview(array.tobytes() * 2)[::1][: array.nbytes]) == expected
    assert ordered(np.repeat(array, 2, axis=0)[::2]) == expected
    assert array.flags.writeable
    assert np.shares_memory(hashing.as_bytes(array), array)
    scalar = np.float32(3)
    assert ordered(scalar) == ordered(np.array(scalar)) == ordered(scalar.tobytes())


BASE = RNG.standard_normal((64, 24)).astype(np.float32)


def ulp(x: np.ndarray) -> None:
    x[40, 5] = np.nextafter(x[40, 5], np.float32(np.inf))


def swap_rows(x: np.ndarray) -> None:
    x[[3, 50]] = x[[50, 3]]


def swap_neighbours(x: np.ndarray) -> None:
    x[10, [4, 5]] = x[10, [5, 4]]


def flip_one_pair(x: np.ndarray) -> None:
    x[8, [0, 1]] *= -1


def flip_pairs_apart(x: np.ndarray) -> None:
    x[[8, 40], [0, 6]] *= -1


def flip_all(x: np.ndarray) -> None:
    np.negative(x, out=x)


def overwrite_row(x: np.ndarray) -> None:
    x[20] = x[21]


def shift(x: np.ndarray) -> None:
    x.reshape(-1)[1:] = x.reshape(-1)[:-1].copy()


def move_mass(x: np.ndarray) -> None:
    words = x.reshape(-1).view(np.uint64)
    words[5] += np.uint64(1)
    words[6] -= np.uint64(1)


def signed_zero(x: np.ndarray) -> None:
    x[0, 0] = -x[0, 0] * 0


CHANGES = [
    ulp, swap_rows, swap_neighbours, flip_one_pair, flip_pairs_apart, flip_all, overwrite_row, shift, move_mass,
    signed_zero,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_small_changes_are_seen(change: Callable[[np.ndarray], None]) -> None:
    changed = BASE.copy()
    change(changed)
    assert ordered(changed) != ordered(BASE)


def test_every_pair_of_sign_flips_gives_another_hash() -> None:
    base = RNG.standard_normal(64).astype(np.float32)
    seen = {ordered(base)}
    pairs = list(itertools.combinations(range(64), 2))
    for pair in pairs:
        changed = base.copy()
        changed[list(pair)] *= -1
        seen.add(ordered(changed))
    assert len(seen) == len(pairs) + 1


def test_every_single_bit_and_every_length_of_zeros_gives_another_hash() -> None:
    base = bytes(64)
    seen = {ordered(base)}
    for bit in range(512):
        changed = bytearray(base)
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(ordered(changed))
    assert len(seen) == 513
    assert len({ordered(bytes(n)) for n in range(100)}) == 100


def test_half_the_bits_change() -> None:
    base = RNG.integers(0, 256, 4096, dtype=np.uint8)
    flips = []
    for _ in range(300):
        changed = base.copy()
        changed[RNG.integers(4096)] ^= 1 << RNG.integers(8)
        flips.append((ordered(changed) ^ ordered(base)).bit_count())
    assert 30 < np.mean(flips) < 34


@settings(max_examples=50)
@given(st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=8), st.randoms())
def test_multiset_sees_what_and_how_many_but_no_order(rows: list[bytes], dice: Any) -> None:
    shuffled = rows[:]
    dice.shuffle(shuffled)
    assert multiset(shuffled) == multiset(rows)
    assert multiset([*rows, rows[0]]) != multiset(rows)
    assert multiset(rows[1:]) != multiset(rows)
    assert multiset([rows[0] + b"x", *rows[1:]]) != multiset(rows)
    assert (multiset(rows[:1]) + multiset(rows[1:])) & MASK == multiset(rows)


def test_multiset_tells_multiplicities_apart() -> None:
    assert multiset(np.array([1, 1, 2])) != multiset(np.array([1, 2, 2]))
    assert multiset(np.array([0, 3])) != multiset(np.array([1, 2]))
    assert multiset(np.array([], np.int64)) == 0
    assert multiset(np.empty((3, 0))) == 3 * ordered(b"") & MASK


def test_parts_count_their_order_and_borders() -> None:
    assert ordered_parts([b"ab", b"c"]) != ordered_parts([b"a", b"bc"])
    assert ordered_parts([b"ab", b"c"]) != ordered_parts([b"c", b"ab"])
    assert ordered_parts([]) != ordered_parts([b""])


def test_what_has_no_plain_bytes_is_refused() -> None:
    with pytest.raises(StallscopeError, match="only plain values"):
        ordered(np.array([object()]))
    with pytest.raises(StallscopeError, match="first axis"):
        multiset(np.array(3))
    with pytest.raises(StallscopeError, match="real numbers"):
        stats(np.array([1j]))


SPECIAL = [0.0, -0.0, 3.0, -4.0, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize(("dtype", "tiny"), [(np.float16, 6e-8), (np.float32, 1e-40), (np.float64, 1e-310)])
def test_stats_count_special_values(dtype: type, tiny: float) -> None:
    found = stats(np.array([*SPECIAL, tiny, -tiny], dtype))
    assert found.max_abs == 4
    assert found.l2 == pytest.approx(5)
    assert (found.zeros, found.subnormals, found.infs, found.nans) == (2, 2, 2, 1)


def test_stats_of_integers_bools_nothing_and_huge_values() -> None:
    assert stats(np.array([-3, 0, 4])) == Stats(4, 5, 1, 0, 0, 0)
    assert stats(np.array([True, False])) == Stats(1, 1, 1, 0, 0, 0)
    assert stats(np.array([], np.float32)) == Stats(0, 0, 0, 0, 0, 0)
    assert stats(np.array([math.nan])) == Stats(0, 0, 0, 0, 0, 1)
    assert stats(np.array([1e200, 1e200])).l2 == math.inf


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 5001])
def test_compiled_stats_have_the_bits_of_the_reference(dtype: type, size: int) -> None:
    values = (RNG.standard_normal(size) * 10.0 ** RNG.integers(-44, 38, size)).astype(dtype)
    if size > 8:
        values[:7] = SPECIAL
    flat = hashing._frozen(values)
    tiny = flat.dtype.type(np.finfo(dtype).tiny)
    reference = hashing._as_stats(*hashing._stats_numpy(flat, tiny))
    assert hashing._as_stats(*hashing._stats_compiled(flat, tiny)) == reference
