"""SPDL: a pipeline of threads, whole batches, reused memory."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from spdl.pipeline import PipelineBuilder

from benchmarks.feeds import reading
from benchmarks.feeds.cases import Case

PACKAGES = ("spdl",)
VARIANTS = ("2 threads",)
_AHEAD = 3
_BUFFERS = 2 + _AHEAD + 2
"""Being made, waiting, with the consumer."""


@contextlib.contextmanager
def open_feed(case: Case, folder: Path, variant: str) -> Iterator[Iterator[tuple[Any, Any]]]:
    records = reading.Records(case, folder)
    records.value(0)
    own, free = threading.local(), queue.SimpleQueue()
    for _ in range(_BUFFERS):
        free.put(reading.empty(case))

    def make(numbers: list[int]) -> tuple[Any, Any]:
        if not hasattr(own, "rng"):
            own.rng = np.random.default_rng(threading.get_ident())
        samples, labels = free.get()
        reading.fill(records, numbers, own.rng, samples, labels)
        return samples, labels

    builder = PipelineBuilder().add_source(reading.shuffled(case)).pipe(make, concurrency=2, output_order="input")
    pipeline = builder.add_sink(_AHEAD).build(num_threads=2)
    with pipeline.auto_stop():
        try:
            yield given_back(pipeline, free)
        finally:
            for _ in range(4 * _BUFFERS):  # or its threads wait for memory for ever
                free.put(reading.empty(case))


def given_back(batches: Any, free: queue.SimpleQueue[Any]) -> Iterator[tuple[Any, Any]]:
    """The batches; the memory of each is free again when the next one is asked for."""
    for batch in batches:
        yield batch
        free.put(batch)
