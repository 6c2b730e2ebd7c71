import itertools
from collections import Counter

import numpy as np
import pytest

from datasets import runs


def lengths(labels, stretches):
    """Lengths of the runs of equal labels; a run ends where its stretch ends."""
    found, start = [], 0
    for length in stretches:
        found += [len(list(group)) for _, group in itertools.groupby(labels[start : start + length])]
        start += length
    return found


@pytest.mark.parametrize(
    ("labels", "stretches"),
    [("aaabb", [5]), ("aabbc", [5]), ("aaab", [4]), ("abcde", [5]), ("aaabbb", [2, 4]), ("aabbcc", [3, 1, 2])],
)
def test_the_mean_number_of_runs_is_that_over_all_orders(labels, stretches):
    counts = Counter(labels).values()
    each = [len(lengths(order, stretches)) for order in itertools.permutations(labels)]
    assert runs.expected_runs(counts, stretches) == pytest.approx(np.mean(each))


@pytest.mark.parametrize(("labels", "stretches"), [("aaabbb", [6]), ("aabbcc", [6]), ("aaabb", [2, 3]), ("aaaab", [5])])
def test_the_mean_number_of_long_runs_is_that_over_all_orders(labels, stretches):
    groups, total = Counter(Counter(labels).values()), len(labels)
    orders = [lengths(order, stretches) for order in itertools.permutations(labels)]
    for run in range(1, 6):
        mean = np.mean([sum(length >= run for length in order) for order in orders])
        assert runs._mean_runs(groups, Counter(stretches), total, run) == pytest.approx(mean)


@pytest.mark.parametrize("counts", [[100] * 10, [500, 500], [900, 50, 50], [1] * 300])
@pytest.mark.parametrize("stretches", [[1000], [100] * 10])
def test_the_longest_run_is_what_drawn_orders_show(counts, stretches):
    if sum(counts) != 1000:
        stretches = [sum(counts)]
    labels = np.repeat(np.arange(len(counts)), counts)
    draw = np.random.default_rng(1)
    longest = np.sort([max(lengths(draw.permutation(labels).tolist(), stretches)) for _ in range(400)])
    typical = runs.longest_run(counts, stretches, 0.5)
    assert abs(typical - np.median(longest)) <= max(1, 0.05 * typical)
    # Hardly ever: none of 400 orders may show it.
    assert longest[-1] <= runs.longest_run(counts, stretches, 1e-6)


def test_the_ends():
    assert runs.expected_runs([], []) == 0
    assert runs.expected_runs([1], [1]) == 1
    assert runs.longest_run([], [], 0.5) == 0
    assert runs.longest_run([5], [5], 0.5) == 5
    assert runs.longest_run([1, 1], [2], 0.5) == 1
    million = runs.longest_run([10_000] * 1000, [10_000_000], 0.5)
    assert 2 <= million <= 3
