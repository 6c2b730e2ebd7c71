"""Ray Data: numbers of records, whole batches made by tasks, streamed."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.feeds import reading
from benchmarks.feeds.cases import Case
from benchmarks.feeds.feed_ray_actors import start

PACKAGES = ("ray",)
VARIANTS = ("2 tasks", "2 actors")
_LARGEST = 1 << 24


def make(numbers: dict[str, Any], records: reading.Records) -> dict[str, Any]:
    """One batch; a worker's process keeps its database open."""
    mine = _opened(records.case, os.path.dirname(records.path))
    chosen = numbers["item"] if "item" in numbers else numbers["id"]
    rng = np.random.default_rng(int(chosen[0]))
    count = len(chosen)
    samples, labels = np.empty((count, *records.case.shape[1:]), records.case.dtype), np.empty(count, np.int32)
    reading.fill(mine, (chosen % len(records)).tolist(), rng, samples, labels)
    return {"samples": samples, "labels": labels}


@functools.cache
def _opened(case: Case, folder: str) -> reading.Records:
    return reading.Records(case, Path(folder))


class Make:
    def __init__(self, records: reading.Records) -> None:
        self.records = records

    def __call__(self, numbers: dict[str, Any]) -> dict[str, Any]:
        return make(numbers, self.records)


@contextlib.contextmanager
def open_feed(case: Case, folder: Path, variant: str) -> Iterator[Iterator[tuple[Any, Any]]]:
    start()
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    records = reading.Records(case, folder)
    # Epochs for far longer than is measured, in an order of its own: a prime step walks through all of the numbers.
    blocks = _LARGEST // case.batch // 64
    numbers = ray.data.range(min(_LARGEST, 20_000 * case.batch), override_num_blocks=min(blocks, 2000))
    numbers = numbers.map_batches(functools.partial(scatter, count=len(records)), batch_size=None)
    if variant == "2 tasks":
        made = numbers.map_batches(make, fn_kwargs={"records": records}, batch_size=case.batch, concurrency=2)
    else:
        made = numbers.map_batches(Make, fn_constructor_args=(records,), batch_size=case.batch, concurrency=2)

    def batches() -> Iterator[tuple[Any, Any]]:
        for batch in made.iter_batches(batch_size=case.batch, batch_format="numpy", prefetch_batches=2):
            yield batch["samples"], batch["labels"]

    yield batches()
    ray.shutdown()


def scatter(numbers: dict[str, Any], count: int) -> dict[str, Any]:
    """Numbers of records in a random-looking order: what a shuffle of numbers gives, at no cost to Ray Data."""
    rng = np.random.default_rng(int(numbers["id"][0]))
    return {"id": rng.integers(0, count, len(numbers["id"]))}
