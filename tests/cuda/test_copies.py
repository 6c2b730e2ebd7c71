"""Pinned memory and copies beside compute, on the device."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from benchmarks.gpu_nets import Amount
from benchmarks.gpu_speed import overlap
from gpu.backend import Backend
from gpu.device import open_device
from gpu.pinned import process_ranges
from profiler.errors import StallscopeError

pytestmark = pytest.mark.gpu


def test_copies_run_beside_compute(cuda: Backend) -> None:
    found = overlap(cuda, Amount(scale=0.5))
    assert found["ok"], found
    assert found["pinned_bytes_per_s"] > found["pageable_bytes_per_s"]


def test_a_range_is_registered_once_and_given_back(cuda: Backend) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    ranges = process_ranges(cuda.xp)
    before = ranges.nbytes
    with open_device(cuda) as first, open_device(cuda) as second:
        assert first.register(memory)
        assert second.register(memory)
        assert ranges.nbytes == before + (1 << 20)
        first.unregister(memory)
        assert ranges.covers(memory)
        second.unregister(memory)
        assert ranges.nbytes == before
        with pytest.warns(RuntimeWarning, match="not page-aligned"):
            assert not first.register(memory[1:])
        # A refused range is still copied from, as it is.
        upload = first.upload({"data": memory[1:]}).wait()
        assert cuda.to_numpy(upload.arrays["data"]).tobytes() == memory[1:].tobytes()


def test_compute_on_another_stream_is_refused(cuda: Backend) -> None:
    with open_device(cuda) as device:
        with device.compute():
            pass
        other = cuda.xp.cuda.Stream(non_blocking=True)
        with other, pytest.raises(StallscopeError, match="moved to another stream"), device.compute():
            pass
