"""Ray without more: two actors that return whole batches as objects, two calls ahead for each."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.feeds import reading
from benchmarks.feeds.cases import Case

PACKAGES = ("ray",)
VARIANTS = ("2 actors",)
_ACTORS, _AHEAD = 2, 2


class Maker:
    def __init__(self, case: Case, folder: Path, seed: int) -> None:
        self.records, self.rng = reading.Records(case, folder), np.random.default_rng(seed)
        self.own = reading.empty(case)

    def make(self, numbers: list[int]) -> tuple[Any, Any]:
        reading.fill(self.records, numbers, self.rng, *self.own)  # Ray copies it
        return self.own


def start() -> None:
    import logging

    # More CPUs than there are, or actors that hold one each leave none for what Ray Data wants to run.
    ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False,
             object_store_memory=1 << 30)  # fmt: skip


@contextlib.contextmanager
def open_feed(case: Case, folder: Path, variant: str) -> Iterator[Iterator[tuple[Any, Any]]]:
    start()
    actors = [ray.remote(Maker).remote(case, folder, seed) for seed in range(_ACTORS)]

    def batches() -> Iterator[tuple[Any, Any]]:
        waiting: deque[Any] = deque()
        for turn, numbers in enumerate(reading.shuffled(case)):
            waiting.append(actors[turn % _ACTORS].make.remote(numbers))
            if len(waiting) > _ACTORS * _AHEAD:
                yield ray.get(waiting.popleft())

    yield batches()
    ray.shutdown()
