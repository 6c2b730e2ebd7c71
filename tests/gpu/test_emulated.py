"""The emulated accelerator: nominal times, real and late copies, and what overlap does to them."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest

from gpu.device import open_device
from gpu.emulated import EmulatedDevice, sleep_until
from profiler.errors import StallscopeError
from profiler.events import Flag, Stage
from tests.gpu.recording import ListRecorder

pytestmark = pytest.mark.alone


def opened(**settings: float) -> tuple[EmulatedDevice, ListRecorder]:
    recorder = ListRecorder()
    device = open_device("emulated", recorder=recorder, **settings)
    assert isinstance(device, EmulatedDevice)
    return device, recorder


def run_ring(device: EmulatedDevice, steps: int, *, early: bool) -> list[int]:
    """Two slots, refilled with the step's number as soon as ``Upload.done`` (or at once, if ``early``).

    Returns the steps whose device arrays did not hold their own number in every byte.
    """
    slots = [np.zeros(1 << 14, np.uint8) for _ in range(2)]
    uploads = [None, None]
    damaged = []
    for step in range(steps + 1):
        if step < steps:
            slot = step % 2
            if not early:
                while uploads[slot] is not None and not uploads[slot].done:
                    time.sleep(0.0002)
            slots[slot][:] = step % 251
            uploads[slot] = device.upload({"data": slots[slot]}, step=step)
            if early:
                slots[slot][: 1 << 13] = 255  # the next batch, written while the copy is still to come
        if step:
            data = uploads[(step - 1) % 2].wait().arrays["data"]
            with device.compute(step=step - 1):
                if not (data == (step - 1) % 251).all():
                    damaged.append(step - 1)
    return damaged


def test_a_slot_refilled_after_done_never_mixes_batches() -> None:
    device, _ = opened(h2d_delay_ms=1)
    with device:
        assert run_ring(device, 200, early=False) == []


def test_a_slot_refilled_too_early_shows() -> None:
    device, _ = opened(h2d_delay_ms=5)
    with device:
        assert len(run_ring(device, 20, early=True)) > 10


def test_the_source_is_not_done_before_the_copy_has_happened() -> None:
    device, _ = opened(h2d_delay_ms=150)
    with device:
        upload = device.upload({"data": np.ones(8, np.float32)})
        assert not upload.done
        assert upload.wait().done


def test_copy_time_is_delay_plus_size_over_bandwidth_and_only_the_exposed_part_is_h2d() -> None:
    source = {"data": np.zeros(2_000_000, np.uint8)}
    device, recorder = opened(h2d_gbps=0.2, h2d_delay_ms=5)
    with device:
        assert device.copy_time_ns(2_000_000) == 15_000_000
        hidden = device.upload(source, step=0, slot=1)
        while not hidden.done:
            time.sleep(0.001)
        hidden.wait()
        assert recorder.of(Stage.H2D) == []
        device.upload(source, step=1, slot=0).wait()
    copies = recorder.of(Stage.COPY)
    assert [(row.fields["step"], row.fields["slot"], row.fields["nbytes"]) for row in copies] == [
        (0, 1, 2_000_000),
        (1, 0, 2_000_000),
    ]
    assert all(row.fields["flags"] & Flag.EMULATED for row in copies)
    assert min(row.ms for row in copies) >= 15
    assert device.copy_ns == sum(row.t1_ns - row.t0_ns for row in copies)
    (exposed,) = recorder.of(Stage.H2D)
    assert exposed.fields["step"] == 1
    assert exposed.t0_ns < copies[1].t1_ns <= exposed.t1_ns


def test_copies_share_one_engine_in_order() -> None:
    device, recorder = opened(h2d_delay_ms=5)
    with device:
        first = device.upload({"data": np.zeros(1)}, step=0)
        second = device.upload({"data": np.zeros(1)}, step=1)
        second.wait()
        assert first.done
    one, two = recorder.of(Stage.COPY)
    assert two.t0_ns >= one.t1_ns


def test_compute_lasts_its_nominal_time_or_the_real_one() -> None:
    device, recorder = opened(step_ms=20)
    with device:
        overshoot = []
        for step in range(9):
            began = time.monotonic_ns()
            with device.compute(step=step):
                pass
            overshoot.append((time.monotonic_ns() - began) / 20e6)
        assert min(overshoot) >= 1
        # A ratio of medians, not a bound on one sleep: other processes may hold the processors for a while.
        assert sorted(overshoot)[4] < 1.25
        assert device.busy_ns == device.nominal_ns == 9 * 20_000_000
        with device.compute(step=9):
            sleep_until(time.monotonic_ns() + 40_000_000)
        assert recorder.of(Stage.DEVICE)[-1].ms >= 40
        assert device.nominal_ns == 10 * 20_000_000
    nominal = recorder.of(Stage.DEVICE)[:9]
    assert {row.t1_ns - row.t0_ns for row in nominal} == {20_000_000}
    assert all(row.fields["flags"] & Flag.EMULATED for row in nominal)


def test_a_copy_runs_beside_compute() -> None:
    device, recorder = opened(step_ms=100, h2d_delay_ms=5)
    with device:
        upload = device.upload({"data": np.zeros(4)}, step=1)
        with device.compute(step=0):
            pass
        assert upload.done
        upload.wait()
    (copy,) = recorder.of(Stage.COPY)
    (compute,) = recorder.of(Stage.DEVICE)
    assert copy.t0_ns < compute.t1_ns
    assert recorder.of(Stage.H2D) == []


def test_a_failed_copy_is_raised_where_it_is_waited_for() -> None:
    device, _ = opened()
    with device:
        upload = device.upload({"data": np.zeros(4, np.float32)}, step=9)
        upload.wait()
        broken = device.upload({"data": np.zeros(4, np.float32)}, step=10)
        broken._arrays = {}  # not reachable from outside: stands for any failure on the engine
        broken._copied.clear()
        broken._waited = False
        device._start(broken, {"data": np.zeros(4, np.float32)})
        with pytest.raises(StallscopeError, match="copy of step 10"):
            broken.wait()
        device.synchronize()
        assert (device.upload({"data": np.ones(2)}, step=11).wait().arrays["data"] == 1).all()


def test_closing_drops_pending_copies_and_ends_the_thread() -> None:
    device, _ = opened(h2d_delay_ms=100)
    device.upload({"data": np.zeros(4)})
    pending = device.upload({"data": np.zeros(4)})
    device.close()
    assert "copy-engine" not in {thread.name for thread in threading.enumerate()}
    assert pending._error is not None


def test_nothing_holds_the_host_arrays_after_the_copy() -> None:
    device, _ = opened()
    with device:
        source = np.zeros(16, np.uint8)
        watch = weakref.ref(source)
        device.upload({"data": source}).wait()
        del source
        deadline = time.monotonic() + 5
        while watch() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.001)
        assert watch() is None
