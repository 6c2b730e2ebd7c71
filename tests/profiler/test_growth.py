"""Leak, fragmentation and cache on made-up services whose allocators are simulated block by block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from profiler import growth, html, report, store, terminal
from profiler.growth import MIB, classify
from profiler.store import Run
from profiler.streams import MEMORY, StreamFile
from tests.profiler.synthetic import Job, simulate, write_run

Rows = list[tuple[int, int, int, int]]
STEPS = 300


class Heap:
    """First fit in one growing address range; what is freed joins its neighbours."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self.end = 0

    def gaps(self) -> list[tuple[int, int]]:
        found, at = [], 0
        for start, size in sorted(self.blocks.items()):
            if start > at:
                found.append((at, start - at))
            at = start + size
        return [*found, (at, self.end - at)] if self.end > at else found

    def take(self, size: int) -> int:
        for start, room in self.gaps():
            if room >= size:
                self.blocks[start] = size
                return start
        start = max((s + n for s, n in self.blocks.items()), default=0)
        self.blocks[start] = size
        self.end = max(self.end, start + size)
        return start

    def free(self, start: int) -> None:
        del self.blocks[start]

    def reading(self) -> tuple[int, int, int, int]:
        largest = max((room for _, room in self.gaps()), default=0)
        return sum(self.blocks.values()), self.end, largest, len(self.blocks)


def steady(rng: np.random.Generator) -> Rows:
    heap, rows = Heap(), []
    heap.take(40 * MIB)
    for _ in range(STEPS):
        work = heap.take(int(rng.integers(1, 4)) * MIB)
        rows.append(heap.reading())
        heap.free(work)
    return rows


def cache(rng: np.random.Generator) -> Rows:
    """A table of results by key that fills up: 120 keys, drawn at random."""
    heap, rows, known = Heap(), [], set()
    heap.take(40 * MIB)
    for _ in range(3 * STEPS):
        key = int(rng.integers(0, 120))
        if key not in known:
            known.add(key)
            heap.take(MIB // 2)
        rows.append(heap.reading())
    return rows


def leak(rng: np.random.Generator) -> Rows:
    """Each step keeps one small blob among its work."""
    heap, rows = Heap(), []
    heap.take(40 * MIB)
    for _ in range(STEPS):
        work = [heap.take(int(rng.integers(1, 5)) * MIB) for _ in range(2)]
        heap.take(64 << 10)
        rows.append(heap.reading())
        for start in work:
            heap.free(start)
    return rows


def growing_leak(rng: np.random.Generator) -> Rows:
    """One list that gets longer: no more blobs, larger ones."""
    return [(40 * MIB + i * 40_000, 60 * MIB + i * 40_000, MIB, 30) for i in range(STEPS)]


def fragmentation(rng: np.random.Generator) -> Rows:
    """Work in eight pieces that get a little larger each step, with a small block that stays behind each of them."""
    heap, rows = Heap(), []
    heap.take(40 * MIB)
    pins: list[int] = []
    for step in range(STEPS):
        work = []
        for _ in range(8):
            work.append(heap.take(MIB // 4 + step * 2048 + int(rng.integers(0, 512))))
            pins.append(heap.take(16 << 10))
        for start in work:
            heap.free(start)
        while len(pins) > 96:
            heap.free(pins.pop(0))
        rows.append(heap.reading())  # after the step, as the trainer reads: what it worked in is free again
    return rows


def kept_block(rng: np.random.Generator) -> Rows:
    """An allocator that keeps the largest block it ever needed, for inputs that get larger."""
    return [(40 * MIB, 40 * MIB + i * 100_000, i * 100_000, 30) for i in range(STEPS)]


SERVICES: list[tuple[Callable[[np.random.Generator], Rows], str]] = [
    (steady, "steady"),
    (cache, "cache"),
    (leak, "leak"),
    (growing_leak, "leak"),
    (fragmentation, "fragmentation"),
    (kept_block, "cache"),
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("service", "verdict"), SERVICES, ids=[service.__name__ for service, _ in SERVICES])
def test_services_are_told_apart(service: Callable[[np.random.Generator], Rows], verdict: str, seed: int) -> None:
    rows = service(np.random.default_rng(seed))
    found = classify(range(len(rows)), *map(list, zip(*rows, strict=True)))
    assert found.verdict == verdict, found
    assert found.reason
    assert bool(found.remedy) == (verdict != "steady")
    # Spikes (a test phase, a snapshot) in one reading out of 25 change nothing.
    spiked = [(u + 30 * MIB * (i % 25 == 3), r + 30 * MIB * (i % 25 == 3), f, n) for i, (u, r, f, n) in enumerate(rows)]
    assert classify(range(len(rows)), *map(list, zip(*spiked, strict=True))).verdict == verdict


def test_a_leak_of_many_blobs_says_so() -> None:
    rows = leak(np.random.default_rng(0))
    found = classify(range(len(rows)), *map(list, zip(*rows, strict=True)))
    assert "blobs more" in found.reason
    assert found.evidence["used_per_step_late"] == pytest.approx(64 << 10, rel=0.2)
    grown = growing_leak(np.random.default_rng(0))
    assert "as many blobs as before" in classify(range(STEPS), *map(list, zip(*grown, strict=True))).reason


LEVEL = [100.0 * MIB] * 100


def line(start: float, rise: float, count: int = 100) -> list[float]:
    """MiB, rising from the end of the warm-up to the last reading."""
    warm = count // 5
    return [MIB * (start + rise * max(0, i - warm) / (count - 1 - warm)) for i in range(count)]


@pytest.mark.parametrize(
    ("level", "rise", "grows"),
    [(100, 1.8, False), (100, 2.4, True), (10, 0.9, False), (10, 1.2, True), (1000, 18, False), (1000, 24, True)],
)
def test_the_edges_of_growth_are_two_percent_and_a_mebibyte(level: float, rise: float, grows: bool) -> None:
    flat = [level * float(MIB)] * 100
    found = classify(range(100), flat, line(level, rise), flat)
    assert found.verdict == ("cache" if grows else "steady"), found
    assert classify(range(100), line(level, rise), line(2 * level, 0), flat).verdict == ("leak" if grows else "steady")


@pytest.mark.parametrize(("share", "verdict"), [(0.45, "fragmentation"), (0.55, "cache")])
def test_the_edges_of_fragmentation_is_half_of_what_is_free(share: float, verdict: str) -> None:
    reserved = line(100, 50)
    largest = [share * (total - used) for total, used in zip(reserved, LEVEL, strict=True)]
    assert classify(range(100), LEVEL, reserved, largest).verdict == verdict


@pytest.mark.parametrize(("late", "verdict"), [(0.15, "cache"), (0.4, "leak")])
def test_the_edges_of_levelling_off_is_a_quarter_of_the_slope(late: float, verdict: str) -> None:
    """The last third of the judged readings rises by that share of what the others do."""
    rises = [1.0 if i < 20 + 2 * 240 // 3 else late for i in range(260)]
    used = [MIB * (100 + each) for each in np.cumsum(rises)]
    assert classify(range(260), used, used, LEVEL[:1] * 260).verdict == verdict


def test_the_edges_of_what_is_judged() -> None:
    """A fifth is warm-up, and 20 readings are enough."""
    used = [MIB * (100 + 2 * min(i, 15)) for i in range(100)]
    assert classify(range(100), used, used, LEVEL).verdict == "steady"
    assert classify(range(19), LEVEL[:19], LEVEL[:19]).verdict is None
    assert classify(range(20), LEVEL[:20], LEVEL[:20]).verdict == "steady"


def test_the_edges_of_single_readings_and_of_curves_that_level_off() -> None:
    """A spike decides nothing, wherever it is; what levels off early or grows by next to nothing late is a cache."""
    spike = [*LEVEL[:98], 1100.0 * MIB, LEVEL[0]]
    assert classify(range(100), spike, spike, LEVEL).verdict == "steady"
    late = [MIB * (100.0 + 30 * (i > 1200 and i % 10 == 5)) for i in range(2400)]
    assert classify(range(2400), late, late, late).verdict == "steady"
    early = [MIB * (100.0 + 2 * min(max(i - 20, 0), 15)) for i in range(100)]
    assert classify(range(100), early, early, LEVEL).verdict == "cache"
    rises = np.cumsum([1.0 if i < 180 else 0.3 for i in range(260)])
    slight = [MIB * (10 + 1.2 * max(0.0, (each - 20) / (rises[-1] - 20))) for each in rises]
    assert classify(range(260), slight, slight, LEVEL[:1] * 260).verdict == "cache"


def test_what_is_not_known_is_not_judged() -> None:
    assert classify(range(5), [1] * 5, [1] * 5).verdict is None
    rising = [MIB * i for i in range(STEPS)]
    found = classify(range(STEPS), [40 * MIB] * STEPS, rising)
    assert found.verdict is None
    assert "not known" in found.reason


def recorded(folder: Path, rows: Rows) -> Run:
    """A run whose trainer had these readings, a row a step."""
    write_run(folder, simulate(Job(steps=30)))
    identity = {"name": "trainer", "role": "trainer", "actor": "0", "pid": "1", "host": "h", "boot_id": "b",
                "monotonic_ns": "0", "wall_ns": "0"}  # fmt: skip
    file = StreamFile(folder / "memory", "trainer-1", MEMORY, identity)
    file.append_rows([(step, step * 1000, *row) for step, row in enumerate(rows)])
    file.close()
    return store.load_run(folder)


@pytest.mark.parametrize(("service", "level"), [(leak, "warning"), (fragmentation, "warning"), (steady, None)])
def test_the_report_says_it(tmp_path: Path, service: Callable[[np.random.Generator], Rows], level: str | None) -> None:
    run = recorded(tmp_path, service(np.random.default_rng(1)))
    found = [f for f in report.build(run).findings if f.kind == "memory_growth"]
    if level is None:
        assert found == []
        return
    (finding,) = found
    assert finding.level == level
    assert service.__name__ in finding.text
    assert "MiB" in finding.text
    assert growth.REMEDY[service.__name__] in finding.text


@pytest.mark.parametrize("known", [True, False])
def test_what_the_nets_used_is_reported_step_by_step(tmp_path: Path, known: bool) -> None:
    rows = [(40 * MIB + step, 50 * MIB, (7 * MIB if known else -1), 9 + step) for step in range(STEPS)]
    run = recorded(tmp_path, rows)
    built = report.build(run)
    (net,) = built.memory["nets"]
    assert (net["steps"], net["verdict"]) == (STEPS, "steady")
    assert net["figures"]["used"] == {"first": rows[0][0], "last": rows[-1][0], "peak": rows[-1][0]}
    assert net["figures"]["live_blobs"]["last"] == 9 + STEPS - 1
    assert (net["figures"]["largest_free"] is None) == (not known)
    series = net["series"]
    assert (series["step"][0], series["step"][-1]) == (0, STEPS - 1)
    assert [rows[step][0] for step in series["step"]] == series["used"]
    assert ("largest_free" in series) == known
    shown = " ".join(terminal.text(built).split())
    assert ("largest free 7.3 MB" in shown) == known
    free = "largest free 7.3 MB, " if known else ""
    assert f"used 41.9 MB, reserved 52.4 MB, {free}{9 + STEPS - 1} blobs; steady" in shown
    page = html.page(report.analyse(run))
    assert ("nets: largest free" in page) == known
    assert "nets: live blobs" in page
