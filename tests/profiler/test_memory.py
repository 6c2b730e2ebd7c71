"""Memory of the processes of a run by kind: its own, page cache of mapped files, shared (case A11)."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from profiler import html, memory, osread, report, store, terminal
from profiler.osread import Missing, Resident
from profiler.recorder import Recorder
from profiler.sampler import SLOW_EVERY_S, Sampler
from tests.profiler.synthetic import Job, simulate, write_run
from tests.profiler.test_sampler import wait_until

MB = 1 << 20
CHILD = """
import mmap, os, sys
file = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, mmap.MAP_SHARED, mmap.PROT_READ)
read = sum(file[::4096])
own = bytearray(b"x" * (48 << 20))
fd = os.memfd_create("ring"); os.ftruncate(fd, 24 << 20)
ring = mmap.mmap(fd, 24 << 20); ring[:] = b"y" * (24 << 20)
print("there", flush=True)
sys.stdin.read()
"""


def mapped(folder: Path) -> Path:
    path = folder / "file"
    path.write_bytes(os.urandom(MB) * 64)
    return path


def test_the_three_kinds_are_told_apart(tmp_path: Path) -> None:
    """A process that maps a file of 64 MB, holds 48 MB of its own and a memfd of 24 MB."""
    path = mapped(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", CHILD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        found = osread.resident(child.pid)
        assert isinstance(found, Resident)
        assert 64 * MB <= found.file < 96 * MB
        assert 48 * MB <= found.anonymous < 80 * MB
        assert 24 * MB <= found.shared < 32 * MB
    finally:
        child.communicate()


def test_a_kernel_without_the_split_gives_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(osread, "_read", lambda path: "VmRSS:\t 10 kB\n")
    found = osread.resident()
    assert isinstance(found, Missing)
    assert "does not split" in found.reason


def test_a_mapped_file_is_no_leak_in_any_rendering(tmp_path: Path) -> None:
    """The trainer's mapping grows to 64 MB during the run, its own memory does not."""
    path = mapped(tmp_path)
    run = write_run(tmp_path / "run", simulate(Job(steps=30)), manifest={"outcome": {"state": "finished"}})
    with Recorder.open(run, "trainer", "trainer", 0), open(path, "rb") as file, Sampler(run, 50) as sampler:
        wait_until(lambda: bool(sampler._rows))
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            assert sum(view[::4096]) >= 0
            due = sampler._slow_due  # set when a round of slow readings begins: the second one is whole
            wait_until(lambda: sampler._slow_due > due + 1.5 * SLOW_EVERY_S * 1e9)
    analysis = report.analyse(store.load_run(run))
    document = json.loads(json.dumps(analysis.report.to_json()))["memory"]
    rows = {row["pid"]: row for row in document["processes"]}
    mine = rows[os.getpid()]
    assert mine["peak"]["file"] >= 64 * MB
    assert "page cache" in document["text"]
    assert "no leak" in document["text"]
    assert rows[1000]["peak"] is None  # of the simulated trainer there are no samples
    assert "not sampled" in rows[1000]["reason"]
    text = terminal.text(analysis.report)
    assert "file-backed" in text
    assert f"{mine['peak']['file'] / 1e6:,.0f}" in text
    assert "no leak" in text
    page = html.page(analysis)
    assert 'data-name="memory"' in page
    assert f"{mine['peak']['file'] / 1e6:,.1f} MB" in page


def test_whoever_records_into_the_folder_is_sampled(tmp_path: Path) -> None:
    """Workers of a cluster that was joined are no descendants of the trainer."""
    script = (
        "import sys\nfrom profiler.recorder import Recorder\nfrom profiler.events import Stage\n"
        "with Recorder.open(sys.argv[1], 'worker-1', 'worker', 1, flush_s=0.05) as rec:\n"
        "    with rec.span(Stage.START): pass\n    print('there', flush=True); sys.stdin.read()\n"
    )
    store.write_manifest(tmp_path, {})
    worker = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert worker.stdout is not None
        worker.stdout.readline()
        with Sampler(tmp_path, 50, lambda: [os.getpid()]) as sampler:
            wait_until(lambda: (worker.pid, "cpu_cores") in sampler._last)
    finally:
        worker.communicate()
    found = memory.split(store.load_run(tmp_path))
    assert [(row["name"], row["pid"]) for row in found["processes"]] == [("worker-1", worker.pid)]
    assert found["processes"][0]["peak"]["anonymous"] > MB
    assert found["others"]["count"] == 1  # this process, which records nothing


def test_nothing_sampled_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", simulate(Job(steps=5)))
    analysis = report.analyse(store.load_run(run))
    assert "samplers_hz" in analysis.report.memory["reason"]
    assert "n/a: no memory was sampled" in html.page(analysis)
    assert "anonymous" not in terminal.text(analysis.report)
