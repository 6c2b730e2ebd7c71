"""tensorpack's dataflow: LMDBData, a map and a batch in one process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.modules.setdefault("tensorflow", None)  # its import takes seconds and serves nothing here

from tensorpack.dataflow import BatchData, DataFromGenerator, LMDBData, MapData, RepeatedData  # noqa: E402

from benchmarks.feeds import reading  # noqa: E402
from benchmarks.feeds.cases import Case  # noqa: E402

PACKAGES = ("tensorpack",)
VARIANTS = ("sequential order", "random order", "whole batches, sequential order")


@contextlib.contextmanager
def open_feed(case: Case, folder: Path, variant: str) -> Iterator[Iterator[tuple[Any, Any]]]:
    rng = np.random.default_rng(1)
    keys = [b"%08d" % number for number in range(case.data.records)]
    flow = LMDBData(str(folder / "lmdb"), shuffle=variant == "random order", keys=keys)
    flow = RepeatedData(flow, -1)

    def make(point: tuple[bytes, Any]) -> list[Any]:
        stored, label = reading.walk(memoryview(point[1]))
        return [reading.one(case, stored, rng), label]

    def batches() -> Iterator[list[Any]]:
        samples, labels = reading.empty(case)
        points = iter(flow)
        while True:
            chance = reading.draw(case, rng, case.batch)
            for place in range(case.batch):
                stored, labels[place] = reading.walk(memoryview(next(points)[1]))
                reading.put(case, reading.part(case, stored, chance, place), samples[place])
            yield [samples, labels]

    if "whole" in variant:
        flow.reset_state()
        made = DataFromGenerator(batches())
    else:
        made = BatchData(MapData(flow, make), case.batch)
        made.reset_state()
    yield ((samples, labels) for samples, labels in made)
