from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import philox

U63 = st.integers(0, 2**63 - 1)


def oracle(seed: int, phase: int, stream: int, epoch: int, record: int) -> np.ndarray:
    key = np.array([seed, phase], np.uint64)
    counter = np.array([0, stream, epoch, record], np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(4)


@settings(max_examples=60, deadline=None)
@given(seed=U63, phase=st.integers(0, 1), stream=st.integers(0, 5), where=st.lists(st.tuples(U63, U63), min_size=1))
def test_first_block_is_numpys_bit_for_bit(seed: int, phase: int, stream: int, where: list[tuple[int, int]]) -> None:
    epochs = np.array([epoch for epoch, _ in where], np.int64)
    records = np.array([record for _, record in where], np.int64)
    expected = np.stack([oracle(seed, phase, stream, *pair) for pair in where])
    np.testing.assert_array_equal(philox.block_1(seed, phase, stream, epochs, records), expected)
    np.testing.assert_array_equal(philox.block_1_numpy(seed, phase, stream, epochs, records), expected)


def test_draws_follow_the_table_of_the_design() -> None:
    epochs, records = np.array([0, 0, 3]), np.array([5, 6, 5])
    spare = (np.array([16, 3, 0]), np.array([24, 0, 7]))
    draws = philox.draw(11, 0, epochs, records, spare, mirror=True, random_crop=True)
    for i in range(3):
        words = [int(word) for word in oracle(11, 0, 0, int(epochs[i]), int(records[i]))]
        assert draws.mirror[i] == words[0] & 1
        assert draws.h_off[i] == words[1] % (int(spare[0][i]) + 1)
        assert draws.w_off[i] == words[2] % (int(spare[1][i]) + 1)


def test_a_sample_draws_the_same_in_any_batch_and_something_else_in_another_epoch_or_phase() -> None:
    records = np.arange(200)
    spare = (np.full(200, 1000), np.full(200, 1000))

    def offsets(seed: int, phase: int, epoch: int, order: np.ndarray) -> np.ndarray:
        epochs = np.full(len(order), epoch)
        return philox.draw(seed, phase, epochs, order, spare, mirror=False, random_crop=True).h_off

    base = offsets(1, 0, 0, records)
    np.testing.assert_array_equal(offsets(1, 0, 0, records[::-1])[::-1], base)
    for other in (offsets(2, 0, 0, records), offsets(1, 1, 0, records), offsets(1, 0, 1, records)):
        assert (other != base).mean() > 0.9


def test_offsets_cover_their_whole_range_evenly() -> None:
    count = 20_000
    spare = (np.full(count, 4), np.full(count, 4))
    draws = philox.draw(3, 0, np.zeros(count, int), np.arange(count), spare, mirror=True, random_crop=True)
    for offsets in (draws.h_off, draws.w_off):
        share = np.bincount(offsets, minlength=5) / count
        assert share.shape == (5,)
        assert np.abs(share - 0.2).max() < 0.02
    assert abs(draws.mirror.mean() - 0.5) < 0.02


def test_central_crop_without_chance() -> None:
    spare = (np.array([5, 4]), np.array([1, 0]))
    draws = philox.draw(1, 1, np.zeros(2, int), np.arange(2), spare, mirror=False, random_crop=False)
    assert draws.h_off.tolist() == [2, 2]
    assert draws.w_off.tolist() == [0, 0]
    assert not draws.mirror.any()


@pytest.mark.parametrize(("epoch", "record"), [(0, 0), (4, 17)])
def test_users_generator_is_stream_one(epoch: int, record: int) -> None:
    rng = philox.generator(9, 1, epoch, record)
    assert rng.bit_generator.random_raw() == oracle(9, 1, 1, epoch, record)[0]


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("random_crop", [False, True])
def test_one_sample_draws_what_it_draws_in_a_batch(mirror: bool, random_crop: bool) -> None:
    records, epochs = np.arange(40) * 12_345, np.arange(40) // 3
    spare = (np.arange(40), 2 * np.arange(40))
    for seed, phase in ((2**63 + 5, 0), (0, 1)):
        draws = philox.draw(seed, phase, epochs, records, spare, mirror=mirror, random_crop=random_crop)
        for i in range(40):
            one = philox.draw_one(
                seed, phase, int(epochs[i]), int(records[i]), (i, 2 * i), mirror=mirror, random_crop=random_crop
            )
            assert one == (draws.h_off[i], draws.w_off[i], draws.mirror[i])
