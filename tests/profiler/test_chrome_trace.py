"""The trace: valid JSON that names its lanes, keeps to its size, and says what it left out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from profiler import chrome_trace
from profiler.events import EVENT, Kind, Stage
from tests.profiler.synthetic import Job, simulate

LANES = {0: "trainer-1", 1: 'worker "1"</script>'}


def test_every_event_is_in_it(tmp_path: Path) -> None:
    events = simulate(Job(steps=20, read=5)).events()
    path = tmp_path / "trace.json"
    written = chrome_trace.write(path, events, LANES)
    document = json.loads(path.read_text())
    assert (written.events, written.dropped, written.remark) == (len(events), 0, "")
    assert written.nbytes == path.stat().st_size
    rows = document["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert names == LANES
    spans = [row for row in rows if row["ph"] == "X"]
    assert len(spans) == (events["kind"] == Kind.SPAN).sum()
    assert min(row["ts"] for row in spans) == 0
    assert all(row["dur"] >= 0 for row in spans)
    reads = [row for row in spans if row["name"] == "read"]
    assert [row["args"]["step"] for row in reads] == list(range(20))
    assert reads[0]["dur"] == pytest.approx(5000)
    marks = [row for row in rows if row["ph"] == "i"]
    assert {row["name"] for row in marks} == {"ready", "release"}


def test_open_spans_and_device_lanes(tmp_path: Path) -> None:
    events = np.zeros(2, EVENT)
    events["kind"] = [Kind.OPEN, Kind.SPAN]
    events["stage"] = [Stage.FEED_WAIT, Stage.COPY]
    events["t1_ns"] = 1000
    events["cpu_ns"] = events["runq_ns"] = events["inblock"] = -1
    path = tmp_path / "trace.json"
    chrome_trace.write(path, events, LANES)
    rows = {row["name"]: row for row in json.loads(path.read_text())["traceEvents"] if row["ph"] == "X"}
    assert rows["feed_wait"]["args"]["open"] is True
    assert rows["copy"]["tid"] != rows["feed_wait"]["tid"]
    assert "cpu_us" not in rows["copy"]["args"]


def test_a_trace_too_big_is_cut_and_says_so(tmp_path: Path) -> None:
    events = simulate(Job(steps=400)).events()
    path = tmp_path / "trace.json"
    written = chrome_trace.write(path, events, LANES, max_bytes=100_000)
    document = json.loads(path.read_text())
    assert path.stat().st_size <= 100_000
    assert written.dropped > 0
    assert written.events + written.dropped == len(events)
    assert str(written.dropped) in document["otherData"]["remark"]
    assert document["traceEvents"][-1]["args"]["name"] == written.remark


def test_no_event_at_all(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert chrome_trace.write(path, np.zeros(0, EVENT), {}).events == 0
    assert json.loads(path.read_text())["otherData"]["dropped"] == 0
