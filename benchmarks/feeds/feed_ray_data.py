"""Ray Data: whole batches made by two tasks at a time, streamed."""

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
_BATCHES, _BATCHES_A_BLOCK = 40_000, 32
"""More than is measured."""


def make(places: dict[str, Any], records: reading.Records) -> dict[str, Any]:
    """One batch of records drawn at random; a worker's process keeps its database open."""
    case, count = records.case, len(places["id"])
    rng = np.random.default_rng(int(places["id"][0]))
    samples, labels = np.empty((count, *case.shape[1:]), case.dtype), np.empty(count, np.int32)
    numbers = rng.integers(0, len(records), count).tolist()
    reading.fill(_opened(case, os.path.dirname(records.path)), numbers, rng, samples, labels)
    return {"samples": samples, "labels": labels}


@functools.cache
def _opened(case: Case, folder: str) -> reading.Records:
    return reading.Records(case, Path(folder))


class Make:
    def __init__(self, records: reading.Records) -> None:
        self.records = records

    def __call__(self, places: dict[str, Any]) -> dict[str, Any]:
        return make(places, self.records)


@contextlib.contextmanager
def open_feed(case: Case, folder: Path, variant: str) -> Iterator[Iterator[tuple[Any, Any]]]:
    start()
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    records = reading.Records(case, folder)
    places = ray.data.range(_BATCHES * case.batch, override_num_blocks=_BATCHES // _BATCHES_A_BLOCK)
    if variant == "2 tasks":
        made = places.map_batches(make, fn_kwargs={"records": records}, batch_size=case.batch, concurrency=2)
    else:
        made = places.map_batches(Make, fn_constructor_args=(records,), batch_size=case.batch, concurrency=2)

    def batches() -> Iterator[tuple[Any, Any]]:
        for batch in made.iter_batches(batch_size=case.batch, batch_format="numpy", prefetch_batches=2):
            yield batch["samples"], batch["labels"]

    yield batches()
    ray.shutdown()
