"""Uploads, pinning and training on a CUDA device."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest

from gpu.backend import probe_cupy
from gpu.device import Device, open_device
from gpu.solver import Solver
from tests.gpu.test_solver import MLP, SGD, mlp_batch

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> Iterator[Device]:
    probe = probe_cupy()
    if probe.module is None:
        pytest.skip(f"cupy is not usable: {probe.problem}")
    with open_device("cupy") as opened:
        yield opened


@pytest.mark.parametrize("pin", [False, True])
def test_batches_arrive_whole_while_slots_are_refilled(device: Device, pin: bool) -> None:
    size = 1 << 22
    ring = np.frombuffer(mmap.mmap(-1, 2 * size), np.uint8)
    if pin:
        assert device.register(ring)
    slots = ring.reshape(2, size)
    uploads = [None, None]
    for step in range(100):
        slot = step % 2
        while uploads[slot] is not None and not uploads[slot].done:
            pass
        slots[slot][:] = step
        uploads[slot] = device.upload({"data": slots[slot]}, step=step)
        if step:
            data = uploads[1 - slot].wait().arrays["data"]
            with device.compute(step=step):
                assert int(data.min()) == int(data.max()) == step - 1
    device.unregister(ring)


def test_training_agrees_with_the_host(device: Device) -> None:
    there, here = Solver(SGD, net=MLP, backend=device.backend), Solver(SGD, net=MLP, backend="numpy")
    for step in range(10):
        arrays = device.upload(mlp_batch(step), step=step).wait().arrays
        with device.compute(step=step):
            loss = there.step_on(arrays)
        assert loss == pytest.approx(here.step_on(mlp_batch(step)), rel=1e-4)
