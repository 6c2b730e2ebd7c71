"""SPDL: a pipeline of threads, whole batches, reused memory."""

from __future__ import annotations

import contextlib
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


@contextlib.contextmanager
def open_feed(case: Case, folder: Path, variant: str) -> Iterator[Iterator[tuple[Any, Any]]]:
    records = reading.Records(case, folder)
    records.value(0)
    # Two being made, some waiting in the queues, one with the consumer.
    memory, own = reading.in_turn(case, 2 + 2 * _AHEAD + 2), threading.local()

    def make(numbers: list[int]) -> tuple[Any, Any]:
        if not hasattr(own, "rng"):
            own.rng = np.random.default_rng(threading.get_ident())
        samples, labels = memory()
        reading.fill(records, numbers, own.rng, samples, labels)
        return samples, labels

    builder = PipelineBuilder().add_source(reading.shuffled(case)).pipe(make, concurrency=2, output_order="input")
    pipeline = builder.add_sink(_AHEAD).build(num_threads=2)
    with pipeline.auto_stop():
        yield iter(pipeline)
