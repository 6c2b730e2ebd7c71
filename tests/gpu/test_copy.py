"""The CUDA device against a stand-in for cupy whose copies happen only when somebody waits for them."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpu import pinned
from gpu.backend import Backend
from gpu.copy import CupyDevice
from profiler.errors import StallscopeError
from profiler.events import Stage
from tests.gpu.recording import ListRecorder


def watching() -> bool:
    """Whether the device's own thread asks, which waits for ends and brings none about."""
    return threading.current_thread().name == "copy-watcher"


class FakeStream:
    """Work in order, each piece done at the first wait (but the watcher's) for an event behind it."""

    def __init__(self, non_blocking: bool = False) -> None:
        self.work: list[Callable[[], None]] = []

    def run(self, until: int) -> None:
        while watching() and self.done < until:
            time.sleep(0.0005)
        while self.done < until:
            self.work[self.done]()
            self.work[self.done] = lambda: None  # done work keeps nothing alive
            self.done += 1

    done = 0
    ptr = property(id)

    def wait_event(self, event: FakeEvent) -> None:
        self.work.append(event.synchronize)

    def synchronize(self) -> None:
        self.run(len(self.work))


class FakeEvent:
    def __init__(self, block: bool = False) -> None:
        self.block = block

    def record(self, stream: FakeStream) -> None:
        self.stream, self.at = stream, len(stream.work)

    @property
    def done(self) -> bool:
        return self.stream.done >= self.at

    def synchronize(self) -> None:
        self.stream.run(self.at)


class FakeArray(np.ndarray):
    """A NumPy array whose ``data`` is a device pointer that takes asynchronous copies."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(copy_from_host_async=self._copy)

    def _copy(self, source: int, nbytes: int, stream: FakeStream) -> None:
        if not nbytes:
            return
        stream.work.append(lambda: ctypes.memmove(self.ctypes.data, source, nbytes) and None)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    current = FakeStream()
    registered: list[tuple[str, int]] = []
    runtime = types.SimpleNamespace(
        hostRegister=lambda address, nbytes, flags: registered.append(("register", address)),
        hostUnregister=lambda address: registered.append(("unregister", address)),
    )
    module = types.ModuleType("cupy")
    module.empty = lambda count, dtype: np.empty(count, dtype).view(FakeArray)
    module.cuda = types.SimpleNamespace(
        Stream=FakeStream,
        Device=lambda number=0: types.SimpleNamespace(id=number, use=lambda: None),
        Event=FakeEvent,
        get_current_stream=lambda: current,
        get_elapsed_time=lambda begun, ended: 0.25,
        runtime=runtime,
    )
    module.registered = registered
    module.current = current
    monkeypatch.setattr(pinned, "_process_ranges", None)
    return module


@pytest.fixture
def device(cupy: Any) -> Iterator[CupyDevice]:
    with CupyDevice(Backend("cupy", cupy, "test"), ListRecorder()) as opened:
        yield opened


def test_the_source_is_read_when_the_copy_runs_and_not_before(device: CupyDevice) -> None:
    source = np.full(100, 1, np.float32)
    upload = device.upload({"data": source}, step=4)
    assert not upload.done
    source[:] = 2  # too early: shows
    assert (upload.wait().arrays["data"] == 2).all()
    assert upload.done
    source[:] = 3
    assert (upload.arrays["data"] == 2).all()
    (copy,) = device.recorder.of(Stage.COPY)
    assert (copy.t1_ns - copy.t0_ns, copy.fields["step"], copy.fields["nbytes"]) == (250_000, 4, 400)
    assert len(device.recorder.of(Stage.H2D)) == 1


def test_done_alone_is_enough_to_settle_a_copy(device: CupyDevice, cupy: Any) -> None:
    upload = device.upload({"data": np.ones(3, np.float32)})
    device._copy_stream.synchronize()
    assert upload.done
    upload.wait()
    assert device.recorder.of(Stage.H2D) == []
    assert len(device.recorder.of(Stage.COPY)) == 1


def test_a_copy_waits_for_the_compute_that_used_its_buffers(device: CupyDevice, cupy: Any) -> None:
    seen: list[float] = []
    for step in range(4):
        arrays = device.upload({"data": np.full(4, step, np.float32)}, step=step).wait().arrays
        with device.compute(step=step):
            cupy.current.work.append(lambda array=arrays["data"]: seen.append(float(array[0])))
    assert seen == [0, 1, 2, 3]
    assert [row.fields["step"] for row in device.recorder.of(Stage.DEVICE)] == [0, 1, 2, 3]
    assert device.busy_ns > 0


def test_the_next_copy_is_not_awaited_by_this_steps_compute(device: CupyDevice) -> None:
    device.upload({"data": np.zeros(4, np.float32)}, step=0).wait()
    following = device.upload({"data": np.ones(4, np.float32)}, step=1)
    with device.compute(step=0):
        pass
    assert not following.done


def test_a_failed_copy_is_raised_by_wait(device: CupyDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = device.upload({"data": np.zeros(4, np.float32)}, step=6)

    def fail(self: FakeEvent) -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(FakeEvent, "synchronize", fail)
    with pytest.raises(StallscopeError, match="step 6 to the device failed: cudaErrorIllegalAddress"):
        upload.wait()
    monkeypatch.undo()


def test_slots_are_pinned_once_and_released_before_they_go(cupy: Any) -> None:
    slot = np.frombuffer(mmap.mmap(-1, 4 * pinned.PAGE), np.uint8)
    address = slot.ctypes.data
    device = CupyDevice(Backend("cupy", cupy, "test"), ListRecorder())
    assert device.register(slot)
    assert device.register(slot)
    device.unregister(slot)
    assert cupy.registered == [("register", address)]
    upload = device.upload({"data": slot})
    device.unregister(slot)
    assert upload.done, "memory was given back while a copy could still read it"
    assert cupy.registered == [("register", address), ("unregister", address)]
    assert device.register(slot)
    device.close()
    assert cupy.registered[-1] == ("unregister", address)


def test_two_devices_of_a_process_register_a_slot_once(cupy: Any) -> None:
    slot = np.frombuffer(mmap.mmap(-1, 4 * pinned.PAGE), np.uint8)
    first, second = (CupyDevice(Backend("cupy", cupy, "test"), ListRecorder()) for _ in range(2))
    assert first.register(slot)
    assert second.register(slot)
    assert [what for what, _ in cupy.registered] == ["register"]
    first.close()
    assert [what for what, _ in cupy.registered] == ["register"], "the other one still copies from it"
    second.close()
    assert [what for what, _ in cupy.registered] == ["register", "unregister"]


def test_what_cannot_be_pinned_is_copied_all_the_same(cupy: Any) -> None:
    def refuse(address: int, nbytes: int, flags: int) -> None:
        raise RuntimeError("cudaErrorMemoryAllocation: out of memory")

    cupy.cuda.runtime.hostRegister = refuse
    slot = np.frombuffer(mmap.mmap(-1, 4 * pinned.PAGE), np.uint8)
    with CupyDevice(Backend("cupy", cupy, "test"), ListRecorder()) as device:
        with pytest.warns(RuntimeWarning, match="stays pageable.*CUDA refused: cudaErrorMemoryAllocation"):
            assert not device.register(slot)
        for step in range(6):
            slot[:] = step
            with device.compute(step=step):
                assert (device.upload({"data": slot}, step=step).wait().arrays["data"] == step).all()
        device.unregister(slot)
    assert cupy.registered == []


def test_the_callback_comes_with_the_end_of_the_copy_and_not_before(device: CupyDevice) -> None:
    calls: list[str] = []
    upload = device.upload({"data": np.ones(3, np.float32)})
    upload.when_done(lambda: calls.append(threading.current_thread().name))
    time.sleep(0.02)
    assert calls == []
    device._copy_stream.synchronize()
    deadline = time.monotonic() + 10
    while not calls and time.monotonic() < deadline:
        time.sleep(0.001)
    assert calls == ["copy-watcher"], "nobody had to ask"
    assert len(device.recorder.of(Stage.COPY)) == 1


def test_a_device_buffer_that_grows_outlives_the_work_of_both_streams_on_it(device: CupyDevice, cupy: Any) -> None:
    """A pool keeps memory per stream and knows nothing of others: what a copy still writes to must not go back."""
    streams = (device._copy_stream, cupy.current)
    freed_with_work_left: list[bool] = []

    def watch(memory: Any) -> None:
        marks = [len(stream.work) for stream in streams]
        weakref.finalize(
            memory,
            lambda: freed_with_work_left.append(
                any(stream.done < mark for stream, mark in zip(streams, marks, strict=True))
            ),
        )

    for step in range(8):
        upload = device.upload({"data": np.full(100 * (step + 1), step, np.float32)}, step=step)
        array = upload.wait().arrays["data"]
        with device.compute(step=step):
            cupy.current.work.append(lambda array=array, step=step: np.testing.assert_array_equal(array, step))
            watch(device._memory[step % device.staging])
        del array, upload
        gc.collect()
    assert freed_with_work_left == [False] * (8 - device.staging)


def test_host_arrays_are_held_until_the_copy_is_over(device: CupyDevice) -> None:
    source = np.ones(50, np.float32)
    alive = weakref.ref(source)
    upload = device.upload({"data": source})
    del source
    gc.collect()
    assert alive() is not None
    upload.wait()
    gc.collect()
    assert alive() is None
    assert (upload.arrays["data"] == 1).all()


def test_pinned_and_device_memory_stay_flat_over_a_thousand_batches_of_changing_size(cupy: Any) -> None:
    size = int(1.1 * 2**16)  # a pool of powers of two would take nearly twice as much
    ring = np.frombuffer(mmap.mmap(-1, 4 * -(-size // pinned.PAGE) * pinned.PAGE), np.uint8)
    recorder = ListRecorder()
    with CupyDevice(Backend("cupy", cupy, "test"), recorder) as device:
        assert device.register(ring)
        device.reserve({"data": ((size,), np.uint8)})
        for step in range(1000):
            slot = ring[step % 4 * size :][: 1 + step * 7919 % size]
            slot[:] = step % 251
            with device.compute(step=step):
                assert int(device.upload({"data": slot}, step=step).wait().arrays["data"][-1]) == step % 251
            assert device._pinned.nbytes == ring.nbytes
    assert [what for what, _ in cupy.registered] == ["register", "unregister"]
    allocated = [row.fields["nbytes"] for row in recorder.of(Stage.ALLOC)]
    assert len(allocated) == device.staging
    assert max(allocated) < size + 256
    assert device._pinned.nbytes == 0


@pytest.mark.parametrize("deterministic", [True, False])
def test_compute_on_a_second_stream_is_refused_where_bits_must_repeat(cupy: Any, deterministic: bool) -> None:
    with CupyDevice(Backend("cupy", cupy, "test", deterministic), ListRecorder()) as device:
        for _ in range(2):
            with device.compute():
                pass
        other = FakeStream()
        cupy.cuda.get_current_stream = lambda: other
        if deterministic:
            with pytest.raises(StallscopeError, match="moved to another stream"), device.compute():
                pass
        else:
            with device.compute():
                pass
