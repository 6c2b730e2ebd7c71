"""One feed in a process of its own: open it, check what it delivers, time it, weigh it; one line of JSON.

python -m benchmarks.feeds.child FEED CASE --folder F [--variant V] [--seconds S] [--read-all] [--prepare]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_NS = "FEED_START_NS"
"""The variable with the monotonic time at which this process was started."""
_LEAST_BATCHES = 4


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("feed")
    parser.add_argument("case")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--variant", default="")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--warm", type=float, default=0.7)
    parser.add_argument("--read-all", action="store_true", help="the consumer reads every byte of a batch")
    parser.add_argument("--fingerprints", action="store_true", help="of our own feed")
    parser.add_argument("--prepare", action="store_true", help="make the peer's own format of the records instead")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    try:
        result = prepare(given) if given.prepare else run(given)
    except Exception as error:  # whatever a peer may raise is its result
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0 if "error" not in result else 1)  # some peers' threads never end


def prepare(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.feeds.cases import case_named

    case = case_named(given.case, given.quick)
    began = time.perf_counter()
    make = getattr(importlib.import_module(f"benchmarks.feeds.feed_{given.feed}"), "prepare", None)
    if make is not None:
        make(case, given.folder / case.data.folder)
    return {"seconds": round(time.perf_counter() - began, 2)}


def run(given: argparse.Namespace) -> dict[str, Any]:
    started_s = int(os.environ.get(START_NS, time.monotonic_ns())) / 1e9
    from benchmarks.feeds.cases import case_named

    case = case_named(given.case, given.quick)
    module = importlib.import_module(f"benchmarks.feeds.feed_{given.feed}")
    options = {"fingerprints": True} if given.fingerprints else {}
    imported_s = time.monotonic()
    with module.open_feed(case, given.folder / case.data.folder, given.variant, **options) as batches:
        ready_s = getattr(module, "ready_s", lambda: None)()
        samples, labels = next(batches)
        touch(samples, given.read_all)
        first_s = time.monotonic()
        return {
            "first_s": round(first_s - started_s, 4),
            "first_after_imports_s": round(first_s - imported_s, 4),
            "first_after_workers_s": round(first_s - ready_s, 4) if ready_s is not None else None,
            **check(case, samples, labels, batches),
            **measure(batches, given.warm, given.seconds, given.read_all),
        }


def check(case: Any, samples: Any, labels: Any, batches: Iterator[Any]) -> dict[str, Any]:
    from benchmarks.feeds.checking import Check

    checked = Check(case)
    checked.batch(samples, labels)
    for _ in range(3):
        checked.batch(*next(batches))
    return {"order": checked.order()}


def measure(batches: Iterator[Any], warm_s: float, seconds: float, read_all: bool) -> dict[str, Any]:
    from benchmarks.feeds.processes import usage

    me, weights = os.getpid(), []
    _consume(batches, warm_s, read_all)
    weights.append(usage(me))
    _consume(batches, warm_s / 4, read_all)  # full queues again
    before = usage(me, memory=False)
    count, elapsed = _consume(batches, seconds, read_all)
    cpu_s = usage(me, memory=False).cpu_since(before)
    for _ in range(2):
        _consume(batches, warm_s / 4, read_all)
        weights.append(usage(me))
    heaviest = max(weights, key=lambda weight: weight.pss)
    return {
        "samples_per_s": round(count / elapsed, 1),
        "cpu_us_per_sample": round(cpu_s / count * 1e6, 2),
        "pss_mb": round(heaviest.pss / 1e6, 1),
        "anon_shmem_mb": round(max(weight.anon_shmem for weight in weights) / 1e6, 1),
        "ray_pss_mb": round(heaviest.ray_pss / 1e6, 1) if heaviest.ray_pss else None,
        "processes": int(statistics.median(weight.processes for weight in weights)),
        "samples": count,
    }


def _consume(batches: Iterator[Any], seconds: float, read_all: bool) -> tuple[int, float]:
    began = time.perf_counter()
    count = done = 0
    while done < _LEAST_BATCHES or time.perf_counter() - began < seconds:
        samples, labels = next(batches)
        touch(samples, read_all)
        done, count = done + 1, count + len(labels)
    return count, time.perf_counter() - began


def touch(samples: Any, all_of_it: bool) -> int:
    """What a consumer does with a batch: read one element, or all bytes."""
    if not all_of_it:
        return int(samples[0, 0, 0, 0])
    import numpy as np

    flat = np.ascontiguousarray(samples).reshape(-1).view(np.uint8)
    return int(np.bitwise_xor.reduce(flat[: len(flat) // 8 * 8].view(np.uint64)))


if __name__ == "__main__":
    main()
