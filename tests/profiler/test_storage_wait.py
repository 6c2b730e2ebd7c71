"""Waiting for storage is told from the work of the stage that met it, however the reader reads (case A11)."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from profiler import html, report, store, streams, terminal
from profiler.events import EVENT, LATER, MISSING, Kind, Stage
from profiler.osread import resident_bytes
from profiler.recorder import Recorder
from profiler.services import CAUSE, Batches, batches
from profiler.timeline import as_events, build
from tests.profiler.synthetic import MS, Job, Log, simulate, write_run

T0 = 1_000_000 * MS


def made_of(stage: Stage, **readings: int) -> Batches:
    """One batch of 10 ms, all of it in ``stage``."""
    log = Log()
    log.add(Kind.SPAN, stage, 0, 10, 0, actor=1, slot=0, **readings)
    log.add(Kind.SPAN, Stage.BATCH, 0, 10, 0, actor=1, slot=0)
    log.add(Kind.SPAN, Stage.STEP, 0, 20, 0)
    events = log.events()
    return batches(events, build(events))


def ms(made: Batches, cause: str) -> float:
    return float(made.service_ns[0, CAUSE[cause]]) / MS


@pytest.mark.parametrize(
    ("readings", "storage", "left"),
    [
        ({"cpu": 2, "runq": 1, "inblock": 40, "faults": 3, "waits": 3}, 7, 2),  # a mapped file
        ({"cpu": 2, "runq": 1, "inblock": 40, "faults": 0, "waits": 3}, 7, 2),  # read calls
        ({"cpu": 2, "runq": 1, "inblock": 0, "faults": 0, "waits": 3}, 7, 2),  # a network file system counts no blocks
        ({"cpu": 2, "runq": 1, "inblock": 0, "faults": 2, "waits": 2}, 7, 2),  # another process had asked for the pages
        ({"cpu": 2, "runq": 1, "inblock": 0, "faults": 0, "waits": 0}, 0, 9),  # a hypervisor took the CPU away
        ({"cpu": 2, "inblock": 0, "faults": 0, "waits": 3}, 0, 10),  # it may have been ready to run: not known
        ({"inblock": 40, "faults": 3, "waits": 3}, 0, 10),
        ({}, 0, 10),
    ],
)
def test_a_read_that_is_blocked_waits_for_storage(readings: dict[str, int], storage: float, left: float) -> None:
    made = made_of(Stage.READ, **readings)
    assert ms(made, "storage") == pytest.approx(storage)
    assert ms(made, "read") == pytest.approx(left)
    assert made.service_ns.sum() == pytest.approx(10 * MS)


@pytest.mark.parametrize("stage", [Stage.DECODE, Stage.AUGMENT, Stage.COLLATE])
def test_page_faults_of_another_stage_are_storage_and_its_own_waits_are_not(stage: Stage) -> None:
    name = stage.name.lower()
    fault = made_of(stage, cpu=2, runq=0, inblock=8, faults=4, waits=4)
    assert (ms(fault, "storage"), ms(fault, name)) == (8, 2)
    sleeps = made_of(stage, cpu=2, runq=0, inblock=0, faults=0, waits=64)
    assert (ms(sleeps, "storage"), ms(sleeps, name)) == (0, 10)
    both = made_of(stage, cpu=2, runq=0, inblock=8, faults=16, waits=64)
    assert (ms(both, "storage"), ms(both, name)) == (2, 8)
    unread = made_of(stage, cpu=2, runq=0, inblock=8)
    assert (ms(unread, "storage"), ms(unread, name)) == (0, 10)


def pages_through_a_map(fd: int) -> int:
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as view:
        view.madvise(mmap.MADV_RANDOM)
        return sum(view[::65_536])


def pages_through_reads(fd: int) -> int:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return sum(os.pread(fd, 1, place)[0] for place in range(0, os.fstat(fd).st_size, 65_536))


@pytest.mark.parametrize("read", [pages_through_a_map, pages_through_reads])
def test_a_cold_file_is_seen_both_ways(tmp_path: Path, read: Callable[[int], int]) -> None:
    path = tmp_path / "cold"
    path.write_bytes(os.urandom(1 << 20) * 16)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if not isinstance(resident_bytes(path), int) or resident_bytes(path):
        os.close(fd)
        pytest.skip("this file system keeps its pages in memory")
    run = tmp_path / "run"
    store.write_manifest(run, {})
    with Recorder.open(run, "trainer", "trainer", 0) as recorder:
        for step in range(2):  # cold, then warm
            with contextlib.ExitStack() as spans:
                for stage in (Stage.STEP, Stage.FEED_WAIT, Stage.BATCH, Stage.READ):
                    spans.enter_context(recorder.span(stage, step=step))
                read(fd)
    os.close(fd)
    events = as_events(store.load_run(run).events)
    made = batches(events, build(events))
    assert made.inblock[0] > 0
    assert made.inblock[1] == 0
    assert bool(made.faults[0] > 0) is (read is pages_through_a_map)
    assert made.faults[1] == 0
    cold, warm = made.service_ns[:, CAUSE["storage"]].tolist()
    assert cold > warm
    assert cold > 0


def test_every_rendering_shows_storage_apart_from_decode(tmp_path: Path) -> None:
    """Also where the steps hide it: 6 ms of waiting and 4 ms of decoding behind 20 ms of compute."""
    run = write_run(tmp_path / "run", simulate(Job(steps=40, read=6, decode=4, blocked=True)))
    analysis = report.analyse(store.load_run(run))
    made = analysis.report.to_json()["making"]
    assert made["batches"] == 40
    assert made["ms_per_batch"]["storage"] == pytest.approx(5.4, rel=0.01)
    assert made["ms_per_batch"]["decode"] == pytest.approx(4, rel=0.01)
    assert made["ms_per_batch"]["read"] == pytest.approx(0.6, rel=0.01)
    assert made["storage_bytes"] == 40 * 40 * 512
    text = " ".join(terminal.text(analysis.report).split())
    assert "storage wait 5.40, read 0.60, decode 4.00" in text
    page = " ".join(html.page(analysis).split())
    assert 'storage wait</th><td class="n">5.40 ms' in page
    assert 'decode</th><td class="n">4.00 ms' in page


def test_without_readings_that_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", simulate(Job(steps=10, read=6, blocked=True, readings=False)))
    analysis = report.analyse(store.load_run(run))
    assert analysis.report.making["page_faults"] is None
    assert "waiting for storage is part of reading" in " ".join(terminal.text(analysis.report).split())
    assert "aiting for storage is part of reading" in html.page(analysis)


def test_a_run_of_an_older_version_is_read(tmp_path: Path) -> None:
    """Its events lack the newer columns, in streams and in the merged file; a new process may have gone on with it."""
    older = pa.schema([field for field in streams.EVENTS if field.name not in LATER])
    events = simulate(Job(steps=10, read=6, blocked=True)).events()
    identity = {
        "name": "trainer", "role": "trainer", "actor": "0", "pid": "1", "host": "h", "boot_id": "b",
        "monotonic_ns": str(T0), "wall_ns": str(T0), "detail": "full",
    }  # fmt: skip
    store.write_manifest(tmp_path, {})
    stream = streams.StreamFile(tmp_path / "events", "trainer-1", older, identity)
    stream.append_events(events.tobytes())
    stream.close()
    run = store.load_run(tmp_path)
    assert run.problems == []
    assert run.events.num_rows == len(events)
    assert set(run.events["major_faults"].to_pylist()) == {MISSING}
    assert report.build(run).making["ms_per_batch"]["storage"] == pytest.approx(5.4, rel=0.01)
    with Recorder.open(tmp_path, "trainer", "trainer", 0) as recorder, recorder.span(Stage.HOST):
        time.sleep(0)
    store.compact(tmp_path)
    again = store.load_run(tmp_path)
    assert again.problems == []
    assert again.events.num_rows == len(events) + 1
    assert again.events.column_names == [*(EVENT.names or ()), "process", "name", "role", "pid"]
    # and the file that an older version merged
    merged = tmp_path / "events" / "events.parquet"
    pq.write_table(pq.read_table(merged).drop_columns(list(LATER)), merged)
    assert store.load_run(tmp_path).events.num_rows == len(events) + 1


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_missing_readings_at_the_end_of_a_stream_are_not_taken_for_its_end(tmp_path: Path, rows: int) -> None:
    """A killed process: its last row is an open span. -1 in 32 bits and padding are Arrow's end mark."""
    log = Log()
    for step in range(rows):
        log.add(Kind.OPEN, Stage.STEP, step, step + 1, step)
    run = write_run(tmp_path, log, closed=False)
    assert any("not closed" in problem for problem in store.load_run(run).problems)
