"""Grain: records of the LMDB as a random-access source, shuffled, mapped and batched by two processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain.python as grain
import numpy as np

from benchmarks.feeds import reading
from benchmarks.feeds.cases import Case

PACKAGES = ("grain",)
VARIANTS = ("2 processes", "2 processes, whole batches", "threads")


class Stored:
    """What Grain asks of a source."""

    def __init__(self, records: reading.Records) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> tuple[bytes, int]:
        stored, label = self.records.sample(number)
        return stored, label


class Sample:
    def __init__(self, case: Case) -> None:
        self.case = case

    def __call__(self, point: tuple[Any, int], rng: np.random.Generator) -> tuple[Any, Any]:
        return reading.one(self.case, point[0], rng), np.int32(point[1])


class Whole:
    """A batch from the numbers of its records."""

    def __init__(self, records: reading.Records) -> None:
        self.records = records

    def __call__(self, numbers: Any, rng: np.random.Generator) -> tuple[Any, Any]:
        samples, labels = reading.empty(self.records.case)
        reading.fill(self.records, numbers.tolist(), rng, samples, labels)
        return samples, labels


@contextlib.contextmanager
def open_feed(case: Case, folder: Path, variant: str) -> Iterator[Iterator[tuple[Any, Any]]]:
    import absl.flags

    if not absl.flags.FLAGS.is_parsed():  # workers of Grain insist
        absl.flags.FLAGS(["peers"], known_only=True)
    records = reading.Records(case, folder)
    if "whole" in variant:
        numbers = grain.MapDataset.range(len(records)).seed(1).shuffle().repeat().batch(case.batch)
        made = numbers.random_map(Whole(records)).to_iter_dataset()
    else:
        made = grain.MapDataset.source(Stored(records)).seed(1).shuffle().repeat().random_map(Sample(case))
        made = made.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4 * case.batch))
        made = made.batch(case.batch)
    if "processes" in variant:
        made = made.mp_prefetch(grain.MultiprocessingOptions(num_workers=2, per_worker_buffer_size=2))
    yield iter(made)
