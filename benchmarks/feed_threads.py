"""Threads beside processes: what a second core costs as a thread of a worker, and what threads give an inline feed.

    python -m benchmarks.feed_threads                     about 2 minutes, on a machine with nothing else running
    python -m benchmarks.feed_threads --quick             does it work

Three data sets are built in a temporary folder: 3x32x32 raw, 3x256x256 raw, JPEG of 500x375.

*workers*: the same work by 2 processes of one thread, 1 process of two, and 1 of one, without Ray; CPU us a sample of
all processes, samples/s, and what the workers hold in memory of their own (anonymous, MiB).
*inline*: a consumer that waits as long for its device as a batch takes to make; batches/s with ``feed.threads`` 0, 1
and 2, and the CPU time of a batch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine
from pipeline.feed import Feed
from pipeline.maker import Probe, probe
from pipeline.ring import POLL_S, Ring, RingAddress
from pipeline.spec import FeedSpec, TransformSpec
from pipeline.worker import open_data, work

WAYS = ((2, 1), (1, 2), (1, 1))
"""Processes, and threads in each."""
_SPAWN = multiprocessing.get_context("spawn")


def build(folder: Path, records: int) -> dict[str, FeedSpec]:
    """The data sets, and the feed of each."""
    import lmdb
    import simplejpeg

    from datasets import datum

    rng = np.random.default_rng(1)

    def raw(side: int) -> bytes:
        return datum.serialize(channels=3, height=side, width=side, data=rng.bytes(3 * side * side), label=1)

    def jpeg() -> bytes:
        coarse = np.kron(rng.integers(0, 236, (47, 63, 3)), np.ones((8, 8, 1)))[:375, :500]
        picture = (coarse + rng.integers(0, 20, (375, 500, 3))).astype(np.uint8)
        file = simplejpeg.encode_jpeg(np.ascontiguousarray(picture), quality=90, colorspace="BGR")
        return datum.serialize(data=file, label=1, encoded=True)

    makers = {
        "small": (lambda: raw(32), 20, 28, 256),
        "raw": (lambda: raw(256), 2, 227, 64),
        "jpeg": (jpeg, 1, 224, 16),
    }
    feeds = {}
    for name, (make, times, crop, batch) in makers.items():
        with lmdb.open(str(folder / name), map_size=4 << 30, lock=False) as env, env.begin(write=True) as txn:
            for number in range(records * times):
                txn.put(b"%08d" % number, make())
        transform = TransformSpec(crop=crop, mirror=True, mean_value=(100.0,))
        feeds[name] = FeedSpec(str(folder / name), batch, shuffle="full", seed=1, transform=transform)
    return feeds


def _threads(address: RingAddress, spec: FeedSpec, probed: Probe, first: int, count: int) -> None:
    each = [threading.Thread(target=work, args=(address, spec, probed, first + i)) for i in range(count)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()


def workers(spec: FeedSpec, processes: int, threads: int, seconds: float) -> dict[str, Any]:
    """One measurement in the steady state."""
    with open_data(spec) as source:
        probed = probe(spec, source)
    ring = Ring.create(8, probed.layout.nbytes)
    started = [
        _SPAWN.Process(target=_threads, args=(ring.address, spec, probed, i * threads, threads), daemon=True)
        for i in range(processes)
    ]
    for process in started:
        process.start()
    taken = _take(ring)
    while not all(ring.worker(row)[0] for row in range(processes * threads)):
        next(taken)
    for _ in range(3 * ring.depth):
        next(taken)
    pids = [process.pid for process in started if process.pid]
    cpu, begun, first = _cpu_s([*pids, os.getpid()]), time.perf_counter(), next(taken)
    step = first
    while time.perf_counter() - begun < seconds:
        step = next(taken)
    took, samples = time.perf_counter() - begun, max(1, step - first) * spec.batch
    cpu = _cpu_s([*pids, os.getpid()]) - cpu
    anonymous = sum(_anonymous_mib(pid) for pid in pids)
    ring.stop()
    for process in started:
        process.join()
    taken.close()
    ring.close()
    return {"samples_per_s": samples / took, "cpu_us": cpu / samples * 1e6, "anonymous_mib": anonymous}


def _take(ring: Ring) -> Generator[int, None, None]:
    step = 0
    while True:
        while not ring.is_ready(step):
            ring.wait_ready(POLL_S)
        ring.lease(step)
        ring.release(step)
        yield step
        step += 1


def _cpu_s(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _anonymous_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def inline(spec: FeedSpec, threads: int, wait_s: float, seconds: float) -> dict[str, float]:
    """A feed without processes, whose consumer sleeps for ``wait_s`` with each batch."""
    with Feed.from_spec(replace(spec, threads=threads, depth=4)) as feed:
        for _ in range(6):
            next(feed)
        begun, cpu, batches = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - begun < seconds or not batches:
            next(feed)
            time.sleep(wait_s)
            batches += 1
        took = time.perf_counter() - begun
        return {"batches_per_s": batches / took, "cpu_ms": (time.process_time() - cpu) / batches * 1e3}


def run(feeds: dict[str, FeedSpec], rounds: int, seconds: float) -> dict[str, Any]:
    """Medians of interleaved rounds; what is compared is measured one after the other."""
    found: dict[str, dict[str, dict[str, list[dict[str, float]]]]] = {}
    for _ in range(rounds):
        for name, spec in feeds.items():
            mine = found.setdefault(name, {"workers": {}, "inline": {}})
            for processes, threads in WAYS:
                row = workers(spec, processes, threads, seconds)
                mine["workers"].setdefault(f"{processes} x {threads}", []).append(row)
            make_s = 1 / inline(spec, 0, 0.0, seconds / 2)["batches_per_s"]
            for threads in (0, 1, 2):
                mine["inline"].setdefault(str(threads), []).append(inline(spec, threads, make_s, seconds))
    return {
        name: {
            part: {
                way: {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}
                for way, rows in ways.items()
            }
            for part, ways in parts.items()
        }
        for name, parts in found.items()
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round of small data sets; writes no file")
    parser.add_argument("--out", default=str(Path(__file__).with_suffix(".json")), help="file for the results")
    given = parser.parse_args(arguments)
    rounds, seconds, records = (1, 0.3, 64) if given.quick else (given.rounds, given.seconds, 500)
    about = {"machine": machine("numpy", "numba"), "rounds": rounds, "seconds": seconds}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="stallscope-threads-"))
        results = about | run(build(Path(folder), records), rounds, seconds)
    text = json.dumps(results, indent=1) + "\n"
    sys.stdout.write(text)
    if not given.quick:
        Path(given.out).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
