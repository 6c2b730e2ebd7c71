"""What the feed itself costs, and that it does not grow: with workers, ring depth, batch size and data-set size.

    python -m benchmarks.feed_cost                        about 3 minutes, on a machine with nothing else running
    python -m benchmarks.feed_cost --quick                under a minute: does it work

Decoding is emulated: each sample waits for ``--sample-ms``, so that more workers than cores do not stand in one
another's way. What is left is the feed's own: claims, the ring, waking, waiting. Told for each row:

per_worker          batches/s of each worker, and that as a share of the first row's of the same sweep
ray_calls           of the driver, a batch: control messages. Batches are handed over in the ring, without any
wakes, locks        of the driver, a batch: one-byte wake-ups without content, and turns at the ring's lock
coordinator_us      CPU time of the consumer's thread in ``next()`` and ``release()``, a batch
process_us          CPU time of the driver's whole process, a batch: Ray's own threads, which tick by the clock, too
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine
from pipeline.feed import Feed
from pipeline.shared import RecordLock, drain, wake, wake_pipe
from pipeline.spec import FeedSpec, TransformSpec

SAMPLE_MS = 2.0
SPEC = FeedSpec(
    "memory:records=10000,shape=1x8x8,seed=3", 16, shuffle="full", seed=1, engine="ray", workers=2, depth=16,
    worker_cpus=0.1, start_timeout_s=300, transform=TransformSpec(python="benchmarks.feed_cost:emulated_decode"),
)  # fmt: skip
SWEEPS: dict[str, list[dict[str, Any]]] = {
    "workers": [{"workers": n} for n in (1, 2, 4, 8)],
    "depth": [{"depth": n} for n in (6, 16, 64)],
    "batch": [{"batch": n} for n in (4, 16, 64)],
    "records": [{"source": f"memory:records={10**n},shape=1x8x8,seed=3"} for n in (4, 5, 6, 7)],
}


def emulated_decode(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    """A sample that takes time and no CPU."""
    time.sleep(SAMPLE_MS / 1e3)
    return image, label


@dataclass
class Counts:
    """What the driver did: see the top of the file."""

    ray_calls: int = 0
    wakes: int = 0
    locks: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count this process's calls of Ray, wake-ups and turns at the lock while the context lasts."""
    from pipeline import ring, shared

    counts = Counts()
    patched: list[tuple[Any, str, Any]] = []

    def patch(where: Any, name: str, field: str) -> None:
        before = getattr(where, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            setattr(counts, field, getattr(counts, field) + 1)
            return before(*args, **kwargs)

        patched.append((where, name, before))
        setattr(where, name, call)

    patch(ring, "wake", "wakes")
    patch(shared.RecordLock, "__enter__", "locks")
    if "ray" in sys.modules:
        import ray
        from ray.actor import ActorMethod

        for name in ("get", "wait", "put", "kill"):
            patch(ray, name, "ray_calls")
        patch(ActorMethod, "_remote", "ray_calls")
    try:
        yield counts
    finally:
        for where, name, before in reversed(patched):
            setattr(where, name, before)


def measure(spec: FeedSpec, seconds: float, consumer_ms: float = 0.0) -> dict[str, Any]:
    """Figures of one feed in its steady state: all workers up, the ring turned over once.

    ``consumer_ms``: the consumer waits so long with each batch; 0: it waits for the feed.
    """
    with Feed.from_spec(spec) as feed:
        _settle(feed, spec)
        begun, process = time.perf_counter(), time.process_time()
        batches, in_feed = _consume(feed, seconds, consumer_ms)
        took, process = time.perf_counter() - begun, time.process_time() - process
        with counted() as counts:  # in a part of its own: counting costs time
            more, _ = _consume(feed, seconds / 2, consumer_ms)
        made = {
            "workers": spec.workers, "depth": spec.depth, "batch": spec.batch, "records": feed.records,
            "consumer_ms": consumer_ms, "batches": batches,
        }  # fmt: skip
    each = {name: round(count / more, 4) for name, count in vars(counts).items()}
    workers = spec.workers if isinstance(spec.workers, int) and spec.engine == "ray" else 1
    return made | {
        "batches_per_s": round(batches / took, 2),
        "per_worker": round(batches / took / workers, 3),
        **each,
        "coordinator_us": round(in_feed / batches * 1e6, 1),
        "process_us": round(process / batches * 1e6, 1),
    }


def _settle(feed: Feed, spec: FeedSpec) -> None:
    workers = spec.workers if spec.engine == "ray" else 0
    while len(feed.stats()["workers"]) < workers:
        next(feed)
    for _ in range(2 * feed.stats()["depth"]):
        next(feed)


def _consume(feed: Feed, seconds: float, consumer_ms: float) -> tuple[int, float]:
    """Batches taken, and CPU seconds of this thread in the feed."""
    batches, spent, until = 0, 0.0, time.perf_counter() + seconds
    while time.perf_counter() < until or not batches:
        before = time.thread_time()
        batch = next(feed)
        spent += time.thread_time() - before
        if consumer_ms:
            time.sleep(consumer_ms / 1e3)
        before = time.thread_time()
        batch.release()
        spent += time.thread_time() - before
        batches += 1
    return batches, spent


def bursts(spec: FeedSpec, seconds: float) -> dict[str, Any]:
    """CPU time of a batch where many are taken at once: what the code costs, without what cold caches add to it."""
    with Feed.from_spec(spec) as feed:
        _settle(feed, spec)
        batches, spent, until = 0, 0.0, time.perf_counter() + seconds
        while time.perf_counter() < until or not batches:
            while feed.stats()["slots"]["ready"] < feed.stats()["depth"] - 1 and spec.engine == "ray":
                time.sleep(0.005)
            next(feed).release()  # the first of them warms the caches
            before = time.thread_time()
            for _ in range(feed.stats()["depth"] - 2):
                next(feed).release()
            spent += time.thread_time() - before
            batches += feed.stats()["depth"] - 2
    return {"workers": spec.workers, "depth": spec.depth, "batches": batches,
            "coordinator_us": round(spent / batches * 1e6, 1)}  # fmt: skip


def bare(pace_s: float, seconds: float) -> dict[str, Any]:
    """CPU time of what no consumer in Python can do without, at this pace: it sleeps on a pipe, is woken, takes two
    turns at a record lock and wakes another. And of the same many times in a row, while the caches are warm."""
    ready, free = wake_pipe(), wake_pipe()
    memory = os.memfd_create("bare")
    lock, poll = RecordLock(memory, patient=False), select.poll()
    poll.register(ready, select.POLLIN)
    wakes = f"while os.getppid() == {os.getpid()}: time.sleep({pace_s}); os.write({ready}, b'x')"
    waker = subprocess.Popen([sys.executable, "-c", f"import os, time\n{wakes}"], pass_fds=[ready])

    def once() -> float:
        before = time.thread_time()
        poll.poll()
        drain(ready)
        for _ in range(2):
            with lock:
                pass
        wake(free)
        return time.thread_time() - before

    try:
        paced, until = [], time.perf_counter() + seconds
        while time.perf_counter() < until:
            paced.append(once())
    finally:
        waker.kill()
        waker.wait()
    row = []
    for _ in range(500):
        wake(ready)
        row.append(once())
        drain(free)
    for fd in (ready, free, memory):
        os.close(fd)
    return {"batches_per_s": round(1 / pace_s, 1), "coordinator_us": round(statistics.mean(paced) * 1e6, 1),
            "in_a_row_us": round(statistics.mean(row) * 1e6, 1)}  # fmt: skip


def sweep(changes: list[dict[str, Any]], base: FeedSpec, seconds: float) -> list[dict[str, Any]]:
    """A row for each change of the base; ``share``: samples/s of a worker as a share of the first row's."""
    rows = [measure(replace(base, **change), seconds) for change in changes]
    first = rows[0]["per_worker"] * rows[0]["batch"]
    return [row | {"share": round(row["per_worker"] * row["batch"] / first, 3)} for row in rows]


def run(sweeps: dict[str, list[dict[str, Any]]], base: FeedSpec, seconds: float) -> dict[str, Any]:
    """All sweeps, a feed whose consumer is the slower side, one that takes a full ring at once, and no feed at all."""
    results = {name: sweep(changes, base, seconds) for name, changes in sweeps.items()}
    slowest = 2.5 * base.batch * SAMPLE_MS / (base.workers if isinstance(base.workers, int) else 1)
    results["consumer is slower"] = [measure(base, seconds, slowest)]
    results["ring full"] = [bursts(base, seconds)]
    results["bare"] = [bare(1 / rate, seconds) for rate in (25, 100)]
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements; writes no file")
    parser.add_argument("--out", default=str(Path(__file__).with_suffix(".json")), help="file for the results")
    given = parser.parse_args(arguments)
    from pipeline import ray_runtime

    sweeps, seconds = SWEEPS, given.seconds
    if given.quick:
        sweeps, seconds = {"workers": [{"workers": n} for n in (1, 4)]}, min(given.seconds, 1.5)
    about = {"machine": machine("ray", "numpy"), "sample_ms": SAMPLE_MS, "seconds": seconds}
    with ray_runtime.running(num_cpus=16):
        results = about | run(sweeps, SPEC, seconds)
    text = json.dumps(results, indent=1) + "\n"
    sys.stdout.write(text)
    if not given.quick:
        Path(given.out).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
