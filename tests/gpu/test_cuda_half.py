"""The casts to float16 as a device makes them, built for the host: the bits and the counts of ``gpu.half``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu import half as host_half
from gpu.cuda import half
from profiler.errors import StallscopeError
from tests.gpu.host_kernels import COMPILER, HostLauncher

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (g++ or clang++)")
GRIDS = st.sampled_from([(1, 1), (3, 2), (2, 5)])


def floats(seed: int, count: int) -> np.ndarray:
    """Random bits, and values about the halves: ties between two of them and their neighbours."""
    rng = np.random.default_rng(seed)
    halves = rng.integers(0, 0x7C00, count, np.uint16)
    tie = (halves.view(np.float16).astype(np.float32) + (halves + 1).astype(np.uint16).view(np.float16)) / 2
    tie = np.nextafter(tie, rng.choice(np.array([-np.inf, 0, np.inf], np.float32), count))
    any_bits = rng.integers(0, 2**32, count, np.uint32).view(np.float32)
    return np.where(rng.random(count) < 0.3, any_bits, np.where(rng.random(count) < 0.5, tie, -tie))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 99), st.integers(0, 1000), GRIDS, st.integers(1, 40))
def test_casts_to_float16_lose_what_the_hosts_do(seed: int, size: int, grid: Any, threads: int) -> None:
    values, own = floats(seed, size).astype(np.float32), HostLauncher(*grid)
    counts, wanted = np.full((2, 4), 3, np.int64), np.full((2, 4), 3, np.int64)
    stored, as_host = np.empty((2, size), np.float16)
    seen, as_seen = np.empty((2, size), np.float32)
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(half, "_THREADS", threads)
        half.encode(own, np, values, stored, counts[0])
        half.rounded(own, np, values, seen, counts[1])
    host_half.encode(values, as_host, wanted[0])
    host_half.rounded(values, as_seen, wanted[1])
    number = ~np.isnan(values)
    assert np.array_equal(np.isnan(stored), ~number)
    assert np.array_equal(np.isnan(seen), ~number)
    assert stored[number].tobytes() == as_host[number].tobytes()
    assert seen[number].tobytes() == as_seen[number].tobytes()
    assert counts.tolist() == wanted.tolist()


def test_every_half_comes_back_from_the_device() -> None:
    halves = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(np.float16)
    halves = halves[~np.isnan(halves)]
    back, stored, counts = halves.astype(np.float32), np.empty_like(halves), np.zeros(4, np.int64)
    half.encode(HostLauncher(), np, back, stored, counts)
    assert stored.tobytes() == halves.tobytes()
    again = np.empty_like(back)
    half.rounded(HostLauncher(), np, back, again, counts)
    assert again.tobytes() == back.tobytes()
    one = np.empty((), np.float16)
    half.encode(HostLauncher(), np, np.array(1 / 3, np.float32), one, counts)
    assert one == np.float16(1 / 3)


def test_casts_to_float16_refuse_what_they_would_round_into_a_copy() -> None:
    values, out = np.ones((4, 6), np.float32), np.empty((4, 6), np.float16)
    for wrong in ((values.T, out.T.copy()), (values, out.T), (values, values)):
        with pytest.raises(StallscopeError, match="half_encode was given an array it cannot read"):
            half.encode(HostLauncher(), np, *wrong, np.zeros(4, np.int64))
