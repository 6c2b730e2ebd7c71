from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import feed_cost
from pipeline.crew import Crew
from pipeline.ring import POLL_S, Ring
from pipeline.spec import FeedSpec
from profiler.recorder import NULL
from tests.pipeline.spawned import FillingLauncher

TINY = replace(feed_cost.SPEC, source="memory:records=40,shape=1x8x8", batch=2, depth=3, engine="inline")


def test_every_sweep_gives_a_row_for_each_of_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_cost, "SAMPLE_MS", 0.0)
    sweeps = {"batch": [{"batch": 1}, {"batch": 4}], "records": [{"source": "memory:records=1000,shape=1x8x8"}]}
    results = feed_cost.run(sweeps, TINY, 0.01)
    assert json.loads(json.dumps(results)) == results
    (full,) = results.pop("ring full")
    assert full["batches"] >= 1
    assert full["coordinator_us"] > 0
    for row in results.pop("bare"):
        assert row["coordinator_us"] > row["in_a_row_us"] > 0
    assert [len(rows) for rows in results.values()] == [2, 1, 1]
    for row in (row for rows in results.values() for row in rows):
        assert row["batches"] >= 1
        assert row["ray_calls"] == 0
        assert 1 <= row["locks"] <= 8
        assert row["coordinator_us"] > 0
        assert row["batches_per_s"] > 0
    assert [row["batch"] for row in results["batch"]] == [1, 4]
    assert results["batch"][0]["share"] == 1.0
    assert results["records"][0]["records"] == 1000


def test_what_counts_is_taken_back() -> None:
    from pipeline import ring, shared

    before = ring.wake, shared.RecordLock.__enter__
    with feed_cost.counted() as counts:
        made = Ring.create(1, 8)
        made.enter(0)
        made.close()
    assert counts.locks == 1
    assert (ring.wake, shared.RecordLock.__enter__) == before


@pytest.mark.parametrize(("workers", "slot_bytes"), [(1, 100), (4, 100), (4, 100_000)])
def test_control_messages_a_batch_do_not_grow(workers: int, slot_bytes: int) -> None:
    """Counts, no times: a lease and a release are two turns at the lock and one wake-up, whatever the feed is like, and
    nobody is asked for news of a worker that makes its batches."""
    ring = Ring.create(8, slot_bytes)
    spec = FeedSpec("memory:records=9", 1, stall_timeout_s=600)
    launcher = FillingLauncher(ring.address)
    crew = Crew(ring, spec, launcher, workers, NULL, lambda step: {})
    try:
        deadline = time.monotonic() + 120
        while not crew.all_started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        steps = 250
        asked = sum(job.asked for job in launcher.jobs)
        with feed_cost.counted() as counts:
            for step in range(steps):
                while not ring.is_ready(step):
                    ring.wait_ready(POLL_S, also=crew.fds)
                    crew.watch(step, 0.0)
                crew.notice()
                ring.lease(step)
                ring.release(step)
        asked = sum(job.asked for job in launcher.jobs) - asked
        assert asked <= workers  # the first look at each
        assert counts.locks == 2 * steps
        assert counts.wakes == steps
    finally:
        ring.stop()
        crew.close()
        ring.close()


def test_the_results_name_the_machine_and_hold_what_was_promised() -> None:
    """Of the committed file: no control message grows, whatever the times are worth on another machine."""
    file = Path(feed_cost.__file__).with_suffix(".json")
    results = json.loads(file.read_text(encoding="utf-8"))
    assert results["machine"]["cores"] >= 1
    assert [row["workers"] for row in results["workers"]] == [1, 2, 4, 8]
    assert [row["records"] for row in results["records"]] == [10**4, 10**5, 10**6, 10**7]
    rows = [row for name in (*feed_cost.SWEEPS, "consumer is slower") for row in results[name]]
    assert max(row["ray_calls"] for row in rows) < 0.2
    assert {row["locks"] for row in rows} == {2.0}
    assert max(row["wakes"] for row in rows) <= 1.0
