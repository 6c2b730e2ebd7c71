"""A transform of one's own that multiplies: the same bytes whatever number of BLAS threads the trainer has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import threadpoolctl

from gpu.backend import blas_pools
from pipeline.feed import Feed
from pipeline.spec import FeedSpec, TransformSpec

SIDE = 256
seen: list[set[int]] = []


def multiplies(image: np.ndarray, label: Any, rng: np.random.Generator) -> tuple[np.ndarray, Any]:
    """The bytes of a product, so that its last bits show."""
    seen.append({pool.threads for pool in blas_pools()})
    matrix = rng.standard_normal((SIDE, SIDE), np.float32)
    product = np.ascontiguousarray((image[0].astype(np.float32) / 255) @ matrix)
    return product.view(np.uint8)[None], label


def batches(threads: int) -> list[bytes]:
    spec = FeedSpec(
        f"memory:records=8,shape=1x{SIDE}x{SIDE}", 2, seed=3, stop_step=3,
        transform=TransformSpec(python=f"{__name__}:multiplies"),
    )  # fmt: skip
    seen.clear()
    with threadpoolctl.threadpool_limits(threads, user_api="blas"), Feed(spec) as feed:
        found = [batch.data.tobytes() for batch in feed]
        assert {pool.threads for pool in blas_pools()} == {threads}, "the trainer's own number is put back"
    return found


def test_products_of_a_transform_have_the_bits_of_a_worker() -> None:
    matrix = np.random.default_rng(0).standard_normal((SIDE, SIDE), np.float32)
    with threadpoolctl.threadpool_limits(1):
        one = matrix @ matrix
    with threadpoolctl.threadpool_limits(2):
        if (matrix @ matrix).tobytes() == one.tobytes():
            pytest.skip("this BLAS has the same bits with two threads")
    wanted = batches(1)
    assert len(wanted) == 3
    assert batches(2) == wanted
    assert {1} in seen
