"""Our feed while a net trains on the same cores: how much is left of what the costs of the two allow?

    python -m benchmarks.feeds.training CASE --folder F [--seconds S]

The net alone, with one thread, takes a step in t seconds. The feed alone, through Ray, takes c seconds of CPU a batch
and makes r batches a second. Together they could make min(1 / t, r, cores / (t + c)) steps a second. One line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.feeds import feed_ours, reading
from benchmarks.feeds.cases import Case, case_named
from benchmarks.feeds.processes import usage
from benchmarks.feeds.rounds import TRAINING_CASES

CLASSES = 10
_NET = """
layer {{ name: "data" type: "Input" top: "data" input_param {{ shape {{ {shape} }} }} }}
layer {{ name: "label" type: "Input" top: "label" input_param {{ shape {{ dim: {batch} }} }} }}
layer {{ name: "shrink" type: "Pooling" bottom: "data" top: "shrink"
  pooling_param {{ pool: AVE kernel_size: 4 stride: 4 }} }}
layer {{ name: "conv" type: "Convolution" bottom: "shrink" top: "conv"
  convolution_param {{ num_output: 8 kernel_size: 3 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "relu" type: "ReLU" bottom: "conv" top: "conv" }}
layer {{ name: "score" type: "InnerProduct" bottom: "conv" top: "score"
  inner_product_param {{ num_output: {classes} weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "score" bottom: "label" top: "loss" }}
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=TRAINING_CASES)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    case = case_named(given.case, given.quick)
    found = share(case, given.folder / case.data.folder, "ray, lmdb", given.seconds)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def share(case: Case, folder: Path, variant: str, seconds: float) -> dict[str, Any]:
    """``samples_per_s`` of both together, ``allowed_samples_per_s``, and what they are worked out from."""
    step = training_step(case)
    samples, labels = reading.empty(case)
    samples.fill(1)
    labels.fill(1)
    with feed_ours.open_feed(case, folder, variant) as batches:
        for _ in range(10):
            step(*next(batches))
        # The feed's ring is full while the net runs alone: its workers wait and take nothing.
        alone_s, _ = _per_turn(lambda: step(samples, labels), seconds)
        for _ in range(10):
            next(batches)
        feed_s, feed_cpu_s = _per_turn(lambda: next(batches), seconds)
        both_s, both_cpu_s = _per_turn(lambda: step(*next(batches)), seconds)
    cores = len(os.sched_getaffinity(0))
    allowed = allowed_rate(alone_s, feed_s, feed_cpu_s, cores)
    return {
        "samples_per_s": round(case.batch / both_s, 1),
        "allowed_samples_per_s": round(case.batch * allowed, 1),
        "share": round(1 / both_s / allowed, 3),
        "net_ms": round(alone_s * 1e3, 3),
        "feed_ms": round(feed_s * 1e3, 3),
        "feed_cpu_ms": round(feed_cpu_s * 1e3, 3),
        "cpu_us_per_sample": round(both_cpu_s / case.batch * 1e6, 2),
    }


def allowed_rate(net_s: float, feed_s: float, feed_cpu_s: float, cores: int) -> float:
    """Steps a second of a net of one thread and a feed, where neither costs the other more than a core's time."""
    return min(1 / net_s, 1 / feed_s, cores / (net_s + feed_cpu_s))


def training_step(case: Case) -> Callable[[Any, Any], None]:
    """Forward and backward of a net that costs about as much as the feed."""
    import gpu
    from gpu.backend import blas_threads

    dims = " ".join(f"dim: {size}" for size in case.shape)
    net = gpu.Net(_NET.format(shape=dims, batch=case.batch, classes=CLASSES), "TRAIN", seed=1)
    blas_threads(1)

    def step(samples: Any, labels: Any) -> None:
        net.blobs["data"].data = samples
        net.blobs["label"].data = np.remainder(labels, CLASSES)
        net.forward_only()
        net.clear_param_diffs()
        net.backward_only()

    return step


def _per_turn(turn: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """Seconds, and seconds of CPU of all processes, of one turn."""
    before, began, count = usage(os.getpid(), memory=False), time.perf_counter(), 0
    while count < 5 or time.perf_counter() - began < seconds:
        turn()
        count += 1
    elapsed = time.perf_counter() - began
    return elapsed / count, usage(os.getpid(), memory=False).cpu_since(before) / count


if __name__ == "__main__":
    main()
