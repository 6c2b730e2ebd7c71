"""The contract of uploads and compute blocks, the same for the NumPy device and the emulated one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpu.device import STAGING, Device, NumpyDevice, open_device
from profiler.errors import StallscopeError, UsageError
from profiler.events import Flag, Stage
from tests.gpu.recording import ListRecorder


def batch(value: int, items: int = 4) -> dict[str, np.ndarray]:
    return {"data": np.full((items, 3, 2), value, np.float32), "label": np.full(items, value, np.int32)}


@pytest.fixture(params=["numpy", "emulated"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with open_device(request.param, recorder=ListRecorder()) as opened:
        yield opened


@pytest.fixture
def copying() -> Iterator[Device]:
    """A device with staging buffers."""
    with open_device("emulated", recorder=ListRecorder()) as opened:
        yield opened


def test_an_upload_has_same_shapes_types_and_values(device: Device) -> None:
    source = batch(7)
    arrays = device.upload(source, step=3).wait().arrays
    assert set(arrays) == {"data", "label"}
    for name, array in arrays.items():
        assert array.dtype == source[name].dtype
        np.testing.assert_array_equal(array, source[name])


def test_a_copy_is_apart_from_its_source(copying: Device) -> None:
    source = batch(7)
    upload = copying.upload(source).wait()
    assert upload.done
    source["data"][:] = 99
    assert (upload.arrays["data"] == 7).all()


def test_the_callback_comes_once_when_the_source_is_free(device: Device) -> None:
    calls: list[int] = []
    upload = device.upload(batch(1))
    upload.when_done(lambda: calls.append(1))
    upload.wait()
    upload.taken()
    device.synchronize()
    deadline = time.monotonic() + 10
    while not calls and time.monotonic() < deadline:
        time.sleep(0.001)  # the copy engine's thread calls it
    upload.when_done(lambda: calls.append(2))
    upload.taken()
    assert calls == [1, 2]


def test_a_callback_that_fails_is_raised_at_the_next_upload(device: Device) -> None:
    upload = device.upload(batch(1))
    upload.when_done(lambda: 1 / 0)
    upload.wait()
    upload.taken()
    deadline = time.monotonic() + 10
    while device._failed is None and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(ZeroDivisionError):
        device.upload(batch(2))


def test_arrays_live_until_the_second_upload_after(copying: Device) -> None:
    first = copying.upload(batch(1)).wait()
    second = copying.upload(batch(2)).wait()
    assert (first.arrays["data"] == 1).all()
    assert (second.arrays["data"] == 2).all()
    copying.upload(batch(3), step=3).wait()
    with pytest.raises(StallscopeError, match="reused by a later upload"):
        _ = first.arrays
    with pytest.raises(StallscopeError, match="reused by a later upload"):
        first.wait()
    assert (second.arrays["data"] == 2).all()


@pytest.mark.parametrize("staging", [1, 2, 3])
def test_steady_state_reuses_its_buffers(staging: int) -> None:
    with open_device("emulated", staging=staging, recorder=ListRecorder()) as device:
        assert device.ahead == staging - 1
        device.reserve({"data": ((4, 3, 2), np.float32), "label": ((4,), np.int32)})
        assert len(device.recorder.of(Stage.ALLOC)) == staging
        addresses = set()
        for step in range(10):
            arrays = device.upload(batch(step), step=step).wait().arrays
            addresses.add((arrays["data"].ctypes.data, arrays["label"].ctypes.data))
        assert len(addresses) == staging
        assert len(device.recorder.of(Stage.ALLOC)) == staging


def test_a_short_batch_fits_in_the_same_buffers_and_a_longer_one_grows_them(copying: Device) -> None:
    for items in (4, 4, 2, 4, 4):
        arrays = copying.upload(batch(items, items)).wait().arrays
        assert arrays["data"].shape == (items, 3, 2)
        assert (arrays["data"] == items).all()
    assert len(copying.recorder.of(Stage.ALLOC)) == STAGING
    assert copying.upload(batch(9, items=40)).wait().arrays["data"].shape == (40, 3, 2)
    assert len(copying.recorder.of(Stage.ALLOC)) == STAGING + 1


def test_staging_takes_what_a_batch_takes_and_not_the_next_power_of_two(copying: Device) -> None:
    """Pools that round a request up would take 2 MiB for this batch, of 1.1 MiB; and no more in 1000 other ones."""
    size = int(1.1 * (1 << 20))
    copying.reserve({"data": ((size,), np.uint8)})
    source = np.zeros(size, np.uint8)
    for step in range(1000):
        copying.upload({"data": source[: 1 + step * 37 % 5000]}).wait()
    taken = [row.fields["nbytes"] for row in copying.recorder.of(Stage.ALLOC)]
    assert len(taken) == STAGING
    assert max(taken) < 1.001 * size


def test_arrays_before_wait_are_refused(device: Device) -> None:
    upload = device.upload(batch(1))
    with pytest.raises(StallscopeError, match="before it was waited for"):
        _ = upload.arrays
    upload.wait()


@pytest.mark.parametrize("staging", [1, 2, 3])
def test_an_upload_more_than_there_are_buffers_is_refused(staging: int) -> None:
    with open_device("emulated", staging=staging) as device:
        for step in range(1, staging + 1):
            device.upload(batch(step), step=step)
        with pytest.raises(StallscopeError, match="the upload of step 1 is still pending"):
            device.upload(batch(9), step=9)


def test_strided_and_foreign_sources_are_refused(device: Device) -> None:
    with pytest.raises(StallscopeError, match="C-contiguous"):
        device.upload({"data": np.zeros((4, 4), np.float32).T[1:]})
    with pytest.raises(StallscopeError, match="found:    list"):
        device.upload({"data": [1.0, 2.0]})  # type: ignore[dict-item]


def test_empty_arrays_and_scalars_pass(device: Device) -> None:
    arrays = device.upload({"none": np.empty((0, 5), np.float32), "one": np.float32([3]).reshape(())}).wait().arrays
    assert arrays["none"].shape == (0, 5)
    assert arrays["one"].shape == ()
    assert arrays["one"] == 3


def test_compute_adds_up_busy_time_and_records_it(device: Device) -> None:
    for step in range(3):
        with device.compute(step=step, epoch=1):
            sum(range(1000))
    rows = device.recorder.of(Stage.DEVICE)
    assert [row.fields["step"] for row in rows] == [0, 1, 2]
    assert device.busy_ns == sum(row.t1_ns - row.t0_ns for row in rows) > 0
    assert {bool(row.fields["flags"] & Flag.EMULATED) for row in rows} == {device.backend.name == "emulated"}


def test_an_error_in_the_compute_block_passes_through(device: Device) -> None:
    with pytest.raises(ZeroDivisionError), device.compute():
        _ = 1 / 0
    assert device.busy_ns == 0


def test_close_twice_then_use_is_an_error(device: Device) -> None:
    upload = device.upload(batch(1)).wait()
    device.close()
    device.close()
    with pytest.raises(StallscopeError, match="closed"):
        device.upload(batch(2))
    with pytest.raises(StallscopeError, match="closed"):
        _ = upload.arrays


def test_host_devices_pin_nothing(device: Device) -> None:
    memory = np.zeros(4096, np.uint8)
    assert device.register(memory) is False
    device.unregister(memory)


def test_the_numpy_device_copies_nothing() -> None:
    recorder = ListRecorder()
    with open_device("numpy", recorder=recorder) as device:
        assert isinstance(device, NumpyDevice)
        assert device.ahead == 0
        source = batch(1)
        upload = device.upload(source, step=5, epoch=2, slot=1)
        array = upload.wait().arrays["data"]
        assert np.shares_memory(array, source["data"])
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0
        assert not upload.done, "the arrays are the source: it is in use until they were taken"
        upload.taken()
        assert upload.done
        assert device.nominal_ns == 0
    assert recorder.of(Stage.H2D) == recorder.of(Stage.ALLOC) == []


@pytest.mark.parametrize(
    ("backend", "settings", "words"),
    [
        ("numpy", {"step_ms": 20}, "only for the emulated accelerator"),
        ("numpy", {"h2d_gbps": 12}, "only for the emulated accelerator"),
        ("emulated", {"step_ms": -1}, "out of range"),
        ("numpy", {"staging": 0}, "out of range"),
        ("emulated", {"h2d_delay_ms": float("nan")}, "out of range"),
        ("emulated", {"h2d_gbps": float("inf")}, "out of range"),
    ],
)
def test_settings_that_would_mean_nothing_are_refused(backend: str, settings: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        open_device(backend, **settings)
