from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import feed_threads


@pytest.mark.long
def test_inline_feeds_are_measured_with_and_without_threads(tmp_path: Path) -> None:
    feeds = feed_threads.build(tmp_path, 2)
    assert list(feeds) == ["small", "raw", "jpeg"]
    for threads in (0, 1):
        row = feed_threads.inline(feeds["jpeg"], threads, 0.0, 0.01)
        assert row["batches_per_s"] > 0
        assert row["cpu_ms"] > 0


@pytest.mark.long  # processes that load numba
def test_all_ways_are_in_the_results(tmp_path: Path) -> None:
    feeds = {"small": feed_threads.build(tmp_path, 20)["small"]}
    results = feed_threads.run(feeds, 1, 0.05)
    assert list(results["small"]["workers"]) == ["2 x 1", "1 x 2", "1 x 1"]
    assert list(results["small"]["inline"]) == ["0", "1", "2"]
    assert all(row["anonymous_mib"] > 1 for row in results["small"]["workers"].values())
