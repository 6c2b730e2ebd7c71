"""Orders and streams: permutations, their quality, and the literal numbers that pin the contract."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from datasets import order
from datasets.order import BLOCK, WINDOW, Order, Stream
from profiler.errors import UsageError

SIZES = st.integers(1, 400)
SHUFFLES = st.sampled_from(["none", "block", "full"])


def epoch_of(order: Order, epoch: int) -> np.ndarray:
    return order.records(epoch, np.arange(len(order)))


# The contract: these numbers change only together with docs/design.md and every golden hash of the project.
@pytest.mark.parametrize(
    ("order", "epoch", "expected"),
    [
        (Order(10, 1), 0, [6, 4, 1, 3, 7, 5, 8, 9, 0, 2]),
        (Order(10, 1), 1, [9, 0, 5, 2, 8, 3, 6, 7, 4, 1]),
        (Order(1000, 7), 0, [724, 272, 652, 546, 850, 573, 764, 273, 803, 356]),
        (Order(1000, 7), 1000, [941, 355, 122, 622, 871, 760, 8, 63, 203, 109]),
        (Order(10, 1, "block", block=4, window=5), 0, [6, 4, 8, 7, 5, 0, 3, 2, 9, 1]),
        (Order(1000, 7, "block"), 0, [446, 96, 339, 744, 412, 850, 824, 729, 681, 365]),
        (Order(1000, 7, "block"), 1, [136, 162, 958, 879, 872, 779, 446, 814, 75, 607]),
        (Order(10, 1, "none"), 5, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_pinned_orders(order: Order, epoch: int, expected: list[int]) -> None:
    assert order.records(epoch, np.arange(len(expected))).tolist() == expected


def test_pinned_orders_of_a_large_set() -> None:
    places = [0, 1, 2, 9_999_999]
    seed = 2**64 - 1
    assert Order(10_000_000, seed).records(3, places).tolist() == [1791623, 1380289, 9182553, 9568587]
    assert Order(10_000_000, seed, "block").records(3, places).tolist() == [8789751, 4494821, 3645713, 7711903]


def test_pinned_stream() -> None:
    items = Stream(Order(7, 5), 16).at(3)
    assert items.epochs.tolist() == [6, 7, 7, 7, 7, 7, 7, 7, 8, 8, 8, 8, 8, 8, 8, 9]
    assert items.records.tolist() == [0, 0, 3, 1, 4, 6, 5, 2, 4, 0, 6, 2, 5, 1, 3, 1]
    assert (items.epochs.dtype, items.records.dtype) == (np.int64, np.int64)


@given(size=st.integers(2, 2**62), seed=st.integers(0, 2**64 - 1), one=st.booleans())
def test_the_compiled_permutation_is_the_one_in_numpy(size: int, seed: int, one: bool) -> None:
    rng = np.random.default_rng(seed)
    places = rng.integers(0, size, 50).astype(np.uint64)
    keys = rng.integers(0, 2**64, 1 if one else 50, np.uint64)
    a = max(math.isqrt(size - 1) + 1, 8)
    sizes = np.array([a, max(-(-size // a), 8), size], np.uint64)
    compiled = np.empty_like(places)
    order._rounds_compiled(places, sizes, keys, compiled)
    assert np.array_equal(compiled, order._rounds_numpy(places, sizes, keys))
    assert compiled.max() < size


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_every_size_up_to_300_is_permuted(shuffle: str) -> None:
    for size in range(1, 301):
        order = Order(size, seed=size, shuffle=shuffle, block=7, window=20)  # type: ignore[arg-type]
        for epoch in (0, 1):
            assert np.array_equal(np.sort(epoch_of(order, epoch)), np.arange(size)), (size, epoch)


@pytest.mark.parametrize("size", [100_000, 131_072, 131_073])
@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_large_sizes_are_permuted(size: int, shuffle: str) -> None:
    records = epoch_of(Order(size, 2, shuffle), 4)  # type: ignore[arg-type]
    assert np.array_equal(np.sort(records), np.arange(size))


@pytest.mark.parametrize("size", [10**9 + 7, 2**40, 2**40 + 1, 2**62])
@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_huge_sizes_have_no_collision_in_a_sample(size: int, shuffle: str) -> None:
    places = np.unique(np.random.default_rng(0).integers(0, size, 5000))
    places = np.concatenate([places, np.arange(size - 5000, size)])
    records = Order(size, 3, shuffle).records(0, places)  # type: ignore[arg-type]
    assert records.min() >= 0
    assert records.max() < size
    assert len(np.unique(records)) == len(np.unique(places))


@given(SIZES, st.integers(0, 2**64 - 1), SHUFFLES, st.integers(1, 50), st.integers(1, 50), st.integers(0, 2**40))
def test_one_epoch_holds_each_record_once(size, seed, shuffle, block, window, epoch) -> None:
    order = Order(size, seed, shuffle, block=block, window=window)
    assert np.array_equal(np.sort(epoch_of(order, epoch)), np.arange(size))


@given(SIZES, SHUFFLES, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 10**9)), min_size=1, max_size=40))
def test_a_place_means_the_same_alone_and_in_company(size, shuffle, asked) -> None:
    order = Order(size, 9, shuffle, block=5, window=11)
    epochs = np.array([epoch for epoch, _ in asked])
    places = np.array([place % size for _, place in asked])
    together = order.records(epochs, places)
    alone = [int(order.records(epoch, place)[0]) for epoch, place in zip(epochs, places, strict=True)]
    assert together.tolist() == alone


def test_orders_differ_by_epoch_seed_and_size_and_repeat() -> None:
    first = epoch_of(Order(500, 1), 0)
    assert np.array_equal(first, epoch_of(Order(500, 1), 0))
    for other in (epoch_of(Order(500, 1), 1), epoch_of(Order(500, 2), 0), epoch_of(Order(501, 1), 0)[:500]):
        # Two independent permutations agree at one place on average; 12 or more is a chance of less than 1e-9.
        assert (first == other).sum() < 12


def test_block_order_stays_local_and_none_is_the_identity() -> None:
    size = 64 * WINDOW
    records = epoch_of(Order(size, 1, "block"), 0)
    touched = len(np.unique(records[:WINDOW] // BLOCK))
    assert touched <= WINDOW // BLOCK + 1
    assert not np.array_equal(records[:WINDOW], np.sort(records[:WINDOW]))
    assert np.array_equal(epoch_of(Order(size, 1, "none"), 3), np.arange(size))


@pytest.mark.parametrize("varied", ["epochs", "seeds"])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 37, 64])
def test_every_record_is_equally_likely_at_every_place(size: int, varied: str) -> None:
    draws = 4000
    if varied == "epochs":
        order = Order(size, 11)
        epochs = np.repeat(np.arange(draws), size)
        table = order.records(epochs, np.tile(np.arange(size), draws)).reshape(draws, size)
    else:
        draws = 500
        table = np.stack([epoch_of(Order(size, seed), 0) for seed in range(draws)])
    for place in range(size):
        # Nothing here is random: the contract pins the numbers, so the bound can neither flake nor hide a bias.
        assert chisquare(np.bincount(table[:, place], minlength=size)).pvalue > 1e-4
    follows = (table[:, 1] - table[:, 0]) % size
    if size > 2:
        assert chisquare(np.bincount(follows, minlength=size)[1:]).pvalue > 1e-4


@pytest.mark.parametrize("size", [3, 4, 5])
def test_every_permutation_of_a_tiny_set_is_equally_likely(size: int) -> None:
    draws = 6000
    epochs = np.repeat(np.arange(draws), size)
    table = Order(size, 1).records(epochs, np.tile(np.arange(size), draws)).reshape(draws, size)
    _, counts = np.unique(table @ size ** np.arange(size), return_counts=True)
    assert len(counts) == math.factorial(size)
    assert chisquare(counts).pvalue > 1e-4


def test_the_short_block_is_anywhere() -> None:
    order = Order(10, 1, "block", block=4, window=1)
    starts = {int(np.flatnonzero(epoch_of(order, epoch) == 8)[0]) for epoch in range(200)}
    assert starts == {0, 4, 8}


@given(SIZES, st.integers(1, 900), SHUFFLES, st.integers(0, 50))
def test_wrap_is_the_concatenation_of_the_epochs(size, batch, shuffle, step) -> None:
    order = Order(size, 4, shuffle)
    items = Stream(order, batch).at(step)
    cursor = step * batch + np.arange(batch)
    assert np.array_equal(items.epochs, cursor // size)
    assert np.array_equal(items.records, order.records(cursor // size, cursor % size))


@given(SIZES, st.integers(1, 500), SHUFFLES)
def test_wrap_shows_each_record_once_an_epoch(size, batch, shuffle) -> None:
    stream = Stream(Order(size, 4, shuffle), batch)
    steps = -(-3 * size // batch)
    items = [stream.at(step) for step in range(steps)]
    epochs = np.concatenate([item.epochs for item in items])
    records = np.concatenate([item.records for item in items])
    for epoch in range(3):
        assert np.array_equal(np.sort(records[epochs == epoch]), np.arange(size))


@given(SIZES, st.integers(1, 500), st.integers(0, 3))
def test_partial_ends_an_epoch_with_a_short_batch(size, batch, epoch) -> None:
    stream = Stream(Order(size, 4), batch, "partial")
    per_epoch = stream.steps_per_epoch
    assert per_epoch == -(-size // batch)
    items = [stream.at(epoch * per_epoch + number) for number in range(per_epoch)]
    assert all(len(item) == batch for item in items[:-1])
    assert len(items[-1]) == size - (per_epoch - 1) * batch
    assert all((item.epochs == epoch).all() for item in items)
    assert np.array_equal(np.concatenate([item.records for item in items]), epoch_of(stream.order, epoch))


@given(SIZES, st.integers(1, 400), st.integers(0, 3))
def test_drop_leaves_the_rest_of_the_order_out(size, batch, epoch) -> None:
    batch = min(batch, size)
    stream = Stream(Order(size, 4), batch, "drop")
    per_epoch = stream.steps_per_epoch
    assert per_epoch == size // batch
    items = [stream.at(epoch * per_epoch + number) for number in range(per_epoch)]
    assert all(len(item) == batch and (item.epochs == epoch).all() for item in items)
    assert np.array_equal(
        np.concatenate([item.records for item in items]), epoch_of(stream.order, epoch)[: per_epoch * batch]
    )


def test_readers_share_an_epoch_without_gaps_or_duplicates() -> None:
    # 103 records, 4 readers, batch 8: nothing divides anything.
    stream = Stream(Order(103, 1), 8)
    by_reader = [[stream.at(step) for step in range(reader, 104, 4)] for reader in range(4)]
    pairs = [
        (int(e), int(r))
        for items in by_reader
        for item in items
        for e, r in zip(item.epochs, item.records, strict=True)
    ]
    assert len(pairs) == len(set(pairs)) == 832
    assert {pair for pair in pairs if pair[0] < 8} == {(epoch, record) for epoch in range(8) for record in range(103)}


def test_items_compare_by_value() -> None:
    stream = Stream(Order(20, 1), 4)
    assert stream.at(3) == stream.at(3)
    assert stream.at(3) != stream.at(4)
    assert len(stream.at(0)) == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Order(0), "at least one record"),
        (lambda: Order(5, -1), "seed"),
        (lambda: Order(5, 2**64), "seed"),
        (lambda: Order(5, 1, "some"), "shuffling"),  # type: ignore[arg-type]
        (lambda: Order(5, 1, "block", block=0), "block and window"),
        (lambda: Order(5).records(0, [5]), "outside of the epoch"),
        (lambda: Order(5).records(0, [-1]), "outside of the epoch"),
        (lambda: Order(5).records(-1, [0]), "epoch is negative"),
        (lambda: Stream(Order(5), 0), "at least one record"),
        (lambda: Stream(Order(5), 6, "drop"), "larger than the data set"),
        (lambda: Stream(Order(5), 6, "cut"), "unknown way"),  # type: ignore[arg-type]
        (lambda: Stream(Order(5), 2).at(-1), "step is negative"),
    ],
)
def test_wrong_use_is_refused(make, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_nothing_asked_nothing_given() -> None:
    assert Order(5).records(0, []).shape == (0,)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 90), st.sampled_from(["none", "block", "full"]), st.integers(0, 200))
def test_a_batch_of_one_epoch_is_made_of_the_same_records_as_of_many(count, batch, shuffle, step):
    for tail in ("wrap", "partial"):
        items = Stream(Order(count, 3, shuffle), batch, tail).at(step)
        assert items.records.tolist() == Order(count, 3, shuffle).records(items.epochs, items.places).tolist()
        assert items.records.dtype == items.places.dtype == items.epochs.dtype == np.int64
