"""Runs of equal labels: how many there are, and how long the longest is, where the order of the records is random."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence


def expected_runs(counts: Iterable[int], stretches: Sequence[int]) -> float:
    """Mean number of runs of equal labels in a random order.

    Parameters
    ----------
    counts: records of each label.
    stretches: lengths of the stretches that were looked at; a run ends where its stretch ends. Their sum is that of
        ``counts``. With one stretch this is the multinomial form of the Wald-Wolfowitz test.
    """
    counts = list(counts)
    total = sum(counts)
    if total < 2:
        return float(total)
    alike = sum(count * (count - 1) for count in counts) / (total * (total - 1))
    return len(stretches) + (total - len(stretches)) * (1 - alike)


def longest_run(counts: Iterable[int], stretches: Sequence[int], chance: float) -> int:
    """The longest run that a random order reaches with at least this chance; arguments as in :func:`expected_runs`.

    The number of runs of k or more is taken for Poisson distributed, with its exact mean.
    """
    groups = Counter(count for count in counts if count)
    total = sum(size * many for size, many in groups.items())
    lengths = Counter(stretches)
    # P(at least one) >= chance where the mean number is at least this.
    needed = -math.log1p(-chance)
    low, high = min(1, total), max(groups, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if _mean_runs(groups, lengths, total, middle) >= needed:
            low = middle
        else:
            high = middle - 1
    return low


def _mean_runs(groups: Counter[int], lengths: Counter[int], total: int, run: int) -> float:
    """Mean number of places where a run of ``run`` or more begins: at a stretch's start, or after another label."""
    starts = sum(many for length, many in lengths.items() if length >= run)
    inside = sum((length - run) * many for length, many in lengths.items() if length > run)
    mean = 0.0
    for size, many in groups.items():
        if size < run:
            continue
        alike = math.exp(_log_falling(size, run) - _log_falling(total, run))
        after_another = (total - size) / (total - run) if total > run else 0.0
        mean += many * alike * (starts + inside * after_another)
    return mean


def _log_falling(number: int, factors: int) -> float:
    return math.lgamma(number + 1) - math.lgamma(number - factors + 1)
