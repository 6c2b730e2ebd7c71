"""The determinism contract: the same bytes, whatever makes them, wherever they come from, however often it stopped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import threadpoolctl

from pipeline import ray_runtime
from pipeline.feed import Feed
from tests.pipeline import golden

GOLDEN = golden.load()
NAMES = list(GOLDEN)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with ray_runtime.running(num_cpus=2):
        yield


def test_all_sets_and_shuffles_are_pinned_and_differ() -> None:
    assert sorted(NAMES) == sorted(f"{name}/{shuffle}" for name in golden.SETS for shuffle in ("none", "block", "full"))
    fills = [step["fill"] for steps in GOLDEN.values() for step in steps]
    assert len(set(fills)) == len(NAMES) * golden.STEPS


@pytest.mark.parametrize("blas_threads", [1, 2])
@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
@pytest.mark.parametrize("name", NAMES)
def test_inline(name: str, backend: str, blas_threads: int) -> None:
    spec = golden.spec(*name.split("/"), backend=backend)
    with threadpoolctl.threadpool_limits(blas_threads):
        assert golden.hashes(spec) == GOLDEN[name]


@pytest.mark.parametrize("start", [1, 6, 13])
@pytest.mark.parametrize("name", NAMES)
def test_any_point_of_resume(name: str, start: int) -> None:
    assert golden.hashes(replace(golden.spec(*name.split("/")), start_step=start)) == GOLDEN[name][start:]


@pytest.mark.parametrize("depth", [1, 2, 14])
def test_any_depth(depth: int) -> None:
    assert golden.hashes(replace(golden.spec("crops", "full"), depth=depth)) == GOLDEN["crops/full"]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "backend", "workers"),
    [
        ("mnist/full", "lmdb", 2),
        ("crops/block", "leveldb", 2),
        *(
            pytest.param(name, backend, workers, marks=pytest.mark.long)
            for name, backend, workers in [
                ("mnist/full", "lmdb", 1), ("mnist/full", "leveldb", 1), ("mnist/full", "leveldb", 2),
                ("crops/block", "lmdb", 1), ("crops/block", "lmdb", 2), ("crops/block", "leveldb", 1),
            ]
        ),
    ],
)  # fmt: skip
def test_ray(local_ray: None, name: str, backend: str, workers: int) -> None:
    spec = replace(golden.spec(*name.split("/"), backend=backend), engine="ray", workers=workers)
    assert golden.hashes(spec) == GOLDEN[name]


@pytest.mark.ray
def test_ray_from_a_point_of_resume(local_ray: None) -> None:
    spec = replace(golden.spec("mnist", "block", "leveldb"), engine="ray", workers=2, start_step=5)
    assert golden.hashes(spec) == GOLDEN["mnist/block"][5:]


def test_another_seed_changes_the_order_and_nothing_else() -> None:
    spec = replace(golden.spec("crops", "full"), seed=21)
    other = golden.hashes(spec)
    assert not {step["ids"] for step in other} & {step["ids"] for step in GOLDEN["crops/full"]}


def test_the_hashes_are_of_the_bytes_that_are_delivered() -> None:
    from pipeline.maker import fill_hash

    with Feed.from_spec(golden.spec("crops", "full")) as feed:
        for batch, pinned in zip(feed, GOLDEN["crops/full"], strict=True):
            arrays: Any = (np.array(batch.data), np.array(batch.labels))
            assert fill_hash(*arrays) == pinned["fill"]
