"""The contract of uploads and compute blocks, the same for the NumPy device and the emulated one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpu.device import BUFFER_SETS, Device, NumpyDevice, open_device
from profiler.errors import StallscopeError, UsageError
from profiler.events import Flag, Stage
from tests.gpu.recording import ListRecorder


def batch(value: int, items: int = 4) -> dict[str, np.ndarray]:
    return {"data": np.full((items, 3, 2), value, np.float32), "label": np.full(items, value, np.int32)}


@pytest.fixture(params=["numpy", "emulated"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with open_device(request.param, recorder=ListRecorder()) as opened:
        yield opened


def test_an_upload_is_a_copy_of_same_shape_and_type(device: Device) -> None:
    source = batch(7)
    upload = device.upload(source, step=3)
    arrays = upload.wait().arrays
    assert upload.done
    assert set(arrays) == {"data", "label"}
    for name, array in arrays.items():
        assert array.dtype == source[name].dtype
        np.testing.assert_array_equal(array, source[name])
        assert not np.shares_memory(array, source[name])
    source["data"][:] = 99
    assert (arrays["data"] == 7).all()


def test_arrays_live_until_the_second_upload_after(device: Device) -> None:
    first = device.upload(batch(1)).wait()
    second = device.upload(batch(2)).wait()
    assert (first.arrays["data"] == 1).all()
    assert (second.arrays["data"] == 2).all()
    device.upload(batch(3), step=3).wait()
    with pytest.raises(StallscopeError, match="reused by a later upload"):
        _ = first.arrays
    with pytest.raises(StallscopeError, match="reused by a later upload"):
        first.wait()
    assert (second.arrays["data"] == 2).all()


def test_steady_state_reuses_its_buffers(device: Device) -> None:
    addresses = set()
    for step in range(10):
        arrays = device.upload(batch(step), step=step).wait().arrays
        addresses.add((arrays["data"].ctypes.data, arrays["label"].ctypes.data))
    assert len(addresses) == BUFFER_SETS
    assert len(device.recorder.of(Stage.ALLOC)) == 2 * BUFFER_SETS


def test_a_short_batch_fits_in_the_same_buffers_and_a_longer_one_grows_them(device: Device) -> None:
    for items in (4, 4, 2, 4, 4):
        arrays = device.upload(batch(items, items)).wait().arrays
        assert arrays["data"].shape == (items, 3, 2)
        assert (arrays["data"] == items).all()
    assert len(device.recorder.of(Stage.ALLOC)) == 2 * BUFFER_SETS
    assert device.upload(batch(9, items=40)).wait().arrays["data"].shape == (40, 3, 2)
    assert len(device.recorder.of(Stage.ALLOC)) == 2 * BUFFER_SETS + 2


def test_arrays_before_wait_are_refused(device: Device) -> None:
    upload = device.upload(batch(1))
    with pytest.raises(StallscopeError, match="before it was waited for"):
        _ = upload.arrays
    upload.wait()


def test_a_third_upload_in_flight_is_refused(device: Device) -> None:
    device.upload(batch(1), step=1)
    device.upload(batch(2), step=2)
    with pytest.raises(StallscopeError, match="the upload of step 1 is still pending"):
        device.upload(batch(3), step=3)


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


def test_the_numpy_device_copies_at_once_and_records_all_of_it() -> None:
    recorder = ListRecorder()
    with open_device("numpy", recorder=recorder) as device:
        assert isinstance(device, NumpyDevice)
        source = batch(1)
        upload = device.upload(source, step=5, epoch=2, slot=1)
        assert upload.done
        source["data"][:] = 2  # the slot is free
        assert (upload.wait().arrays["data"] == 1).all()
        assert device.nominal_ns == 0
    (row,) = recorder.of(Stage.H2D)
    assert row.fields == {"step": 5, "epoch": 2, "slot": 1, "nbytes": 4 * 6 * 4 + 4 * 4}


@pytest.mark.parametrize(
    ("backend", "settings", "words"),
    [
        ("numpy", {"step_ms": 20}, "only for the emulated accelerator"),
        ("numpy", {"h2d_gbps": 12}, "only for the emulated accelerator"),
        ("emulated", {"step_ms": -1}, "out of range"),
        ("emulated", {"h2d_delay_ms": float("nan")}, "out of range"),
        ("emulated", {"h2d_gbps": float("inf")}, "out of range"),
    ],
)
def test_settings_that_would_mean_nothing_are_refused(backend: str, settings: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        open_device(backend, **settings)
