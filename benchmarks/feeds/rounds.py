"""Which measurements a run consists of, and one measurement: a fresh process on a warm page cache."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.feeds.cases import CASES
from benchmarks.feeds.child import START_NS
from benchmarks.feeds.environment import Peers, variables

ROOT = Path(__file__).resolve().parents[2]
OURS = ("ray, lmdb", "ray, leveldb", "inline, lmdb", "inline, leveldb")
ALWAYS = ("ours", "limit", "training")
TRAINING_CASES = ("small-f32", "raw-f32")
QUICK_OURS = ("ray, lmdb", "inline, leveldb")
PEERS: dict[str, tuple[str, ...]] = {
    "torch": ("2 workers, samples", "2 workers, whole batches", "no workers"),
    "ray_actors": ("2 actors",),
    "ray_data": ("2 tasks",),
    "spdl": ("2 threads",),
    "dali": ("2 threads",),
    "tensorpack": ("sequential order", "whole batches, sequential order"),
    "grain": ("2 processes",),
    "tf": ("2 threads",),
    "webdataset": ("2 workers",),
    "mosaic": ("2 workers",),
}
"""Peers, and the ways of using them that are tried: each comes in its best."""
OWN_FORMAT = ("tf", "webdataset", "mosaic")
"""Peers that cannot read Caffe's databases."""
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Entry:
    """One thing to measure. ``read_all``: fingerprints on (ours) and a consumer that reads every byte."""

    case: str
    feed: str
    variant: str = ""
    read_all: bool = False

    @property
    def name(self) -> str:
        return f"{self.feed}, {self.variant}" if self.variant else self.feed


@dataclass(frozen=True)
class Settings:
    folder: Path
    seconds: float
    warm_s: float
    quick: bool = False
    timeout_s: float = TIMEOUT_S


def entries(cases: Iterable[str], feeds: Iterable[str], quick: bool = False) -> list[Entry]:
    """All there is to measure. A peer has no region decode to be told to use: that case is ours alone."""
    found = []
    for case in cases:
        for feed in feeds:
            if feed == "ours":
                found += [Entry(case, feed, variant) for variant in (QUICK_OURS if quick else OURS)]
            elif feed == "training":
                found += [Entry(case, feed)] if case in TRAINING_CASES else []
            elif CASES[case].decode == "full":
                found += [Entry(case, feed, variant) for variant in PEERS.get(feed, ("",))]
    return found


def in_turns(wanted: list[Entry], seed: int, number: int) -> list[Entry]:
    """The entries of a round: cases one after the other, in an order of the round's own, as are the feeds in each."""
    rng = random.Random(f"{seed}/{number}")
    cases = sorted({entry.case for entry in wanted})
    rng.shuffle(cases)
    mixed = sorted(wanted, key=lambda entry: (entry.case, entry.name, entry.read_all))
    rng.shuffle(mixed)
    return sorted(mixed, key=lambda entry: cases.index(entry.case))


def worth_repeating(wanted: list[Entry], results: list[dict[str, Any]], share: float = 0.5) -> list[Entry]:
    """After the first round: ours, the limit, and each peer within ``share`` of the best, in its best way."""
    rate = {_entry(row): row["samples_per_s"] for row in results if row.get("samples_per_s") and row["round"] == 1}
    kept = []
    for entry in wanted:
        if entry.feed in ALWAYS:
            kept.append(entry)
            continue
        rivals = {
            other: value
            for other, value in rate.items()
            if other.case == entry.case and other.read_all == entry.read_all and other.feed in PEERS
        }
        own = [value for other, value in rivals.items() if other.feed == entry.feed]
        if entry in rivals and rivals[entry] == max(own) and rivals[entry] >= share * max(rivals.values()):
            kept.append(entry)
    return kept


def _entry(row: dict[str, Any]) -> Entry:
    return Entry(row["case"], row["feed"], row["variant"], row["read_all"])


def measure(entry: Entry, settings: Settings, peers: Peers) -> dict[str, Any]:
    """What the process of one entry says, or the reason why it says nothing."""
    if entry.feed in PEERS:
        outcome = peers.outcome.get(entry.feed, {"installed": False, "reason": "not installed"})
        if not outcome["installed"]:
            return {"error": f"not installed: {outcome['reason']}"}
    python = str(peers.python) if entry.feed in PEERS else sys.executable
    seconds = settings.seconds / (2 if entry.feed == "limit" else 1)  # it goes many ways, each of them steady
    options = ["--folder", str(settings.folder), "--seconds", str(seconds)]
    options += ["--quick"] if settings.quick else []
    if entry.feed in ("limit", "training"):
        return _run([python, "-m", f"benchmarks.feeds.{entry.feed}", entry.case, *options], settings.timeout_s)
    options += ["--variant", entry.variant, "--warm", str(settings.warm_s)]
    options += ["--read-all"] if entry.read_all else []
    options += ["--fingerprints"] if entry.read_all and entry.feed == "ours" else []
    return _run([python, "-m", "benchmarks.feeds.child", entry.feed, entry.case, *options], settings.timeout_s)


def prepare(entry: Entry, settings: Settings, peers: Peers) -> dict[str, Any]:
    """Have a peer make its own format of the records."""
    command = [str(peers.python), "-m", "benchmarks.feeds.child", entry.feed, entry.case, "--prepare"]
    command += ["--folder", str(settings.folder), *(["--quick"] if settings.quick else [])]
    return _run(command, 600)


def _run(command: list[str], timeout_s: float) -> dict[str, Any]:
    """The last line of JSON that a process prints. Nothing that it started outlives it."""
    environment = {**variables(ROOT), START_NS: str(time.monotonic_ns())}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    started: dict[int, psutil.Process] = {}
    watched = psutil.Process(process.pid)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            started |= {child.pid: child for child in _children(watched)}
            try:
                said, complained = process.communicate(timeout=min(2.0, max(0.1, deadline - time.monotonic())))
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    return {"error": f"nothing after {timeout_s:g} s"}
    finally:
        started |= {child.pid: child for child in _children(watched)}
        process.kill()
        process.wait()
        _end([*started.values(), *_of_session(process.pid)])
        for pipe in (process.stdout, process.stderr):
            pipe.close()
    for line in reversed(said.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    lines = [line for line in complained.splitlines() if line.strip()]
    return {"error": f"ended with {process.returncode}: {lines[-1][:200] if lines else 'no word'}"}


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _of_session(leader: int) -> list[psutil.Process]:
    """What a process left behind that was ended before anybody saw its children."""
    found = []
    for pid in psutil.pids():
        try:
            if pid != leader and os.getsid(pid) == leader:
                found.append(psutil.Process(pid))
        except (OSError, psutil.Error):
            continue
    return found


def _end(processes: list[psutil.Process]) -> None:
    """Kill what is left: Ray's daemons outlive a driver that left by ``_exit``, and would take a core from the next."""
    for process in processes:
        try:
            if process.is_running():
                process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(processes, timeout=5)


def key(settings: Settings, seed: int) -> str:
    """Results of other settings, or of another state of the code, are other results."""
    sources = hashlib.sha256()
    for package in ("benchmarks", "datasets", "gpu", "pipeline", "profiler"):
        for file in sorted((ROOT / package).rglob("*.py")):
            sources.update(file.read_bytes())
    chosen = f"{seed}-{settings.seconds:g}{'-quick' if settings.quick else ''}"
    return f"{chosen}-{sources.hexdigest()[:12]}"
