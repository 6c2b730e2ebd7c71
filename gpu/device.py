"""The device as the training loop sees it: uploads of batches and a bracket round the compute of a step.

    upload = device.upload(batch_arrays, step=17)     # starts the copy; the host arrays must stay as they are
    upload.when_done(batch.release)                   # called when they were read to the end, by whoever sees it first
    upload.wait()                                     # the loop's time from here on is exposed copy time (Stage.H2D)
    following = device.upload(...)                    # as many as device.ahead says may be begun before their step
    with device.compute(step=17):
        solver.take(upload.arrays)
        upload.taken()                                # their values are the net's own now
        solver.step_on()

A device owns ``staging`` buffers and uses them in turn, so the arrays of one upload stay valid until the
``staging``-th upload after it begins, and a steady loop allocates nothing. The host as its own device needs none: the
arrays are the source itself, which is done with when they were taken.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpu.backend import Backend, select_backend
from gpu.pinned import PinnedRanges
from profiler.errors import StallscopeError, UsageError
from profiler.events import Kind, Stage
from profiler.recorder import NULL

STAGING = 2
"""Staging buffers of a device: one that a step reads and one that the next batch is copied to."""
ALIGNMENT = 256
"""Bytes that arrays in a staging buffer start at a multiple of: what CUDA's own allocations guarantee."""


class Upload:
    """One batch on its way to the device."""

    def __init__(self, device: Device, number: int, step: int, epoch: int, slot: int, nbytes: int) -> None:
        self._device = device
        self.number = number
        self.step = step
        self.epoch = epoch
        self.slot = slot
        self.nbytes = nbytes
        self._copied = threading.Event()
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._arrays: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._waited = False

    @property
    def done(self) -> bool:
        """True when the host arrays have been read to the end and may be overwritten."""
        return self._copied.is_set()

    def when_done(self, call: Callable[[], object]) -> None:
        """Have ``call()`` made once when :attr:`done` turns true, perhaps by another thread; now if it is already."""
        with self._lock:
            if not self._copied.is_set():
                self._callbacks.append(call)
                return
        call()

    def taken(self) -> None:
        """The work submitted so far has what it needs of the arrays: they are not read by any that comes later."""

    def _finish(self) -> None:
        """The host arrays are free. For the device; idempotent."""
        with self._lock:
            self._copied.set()
            calls, self._callbacks = self._callbacks, []
        for call in calls:
            try:
                call()
            except BaseException as error:  # belongs to the thread that drives the device, not to one that copies
                self._device._failed = error

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays on the device, by name. Raises StallscopeError before :meth:`wait` and after they were reused."""
        if not self._waited:
            raise StallscopeError("the arrays of an upload were used before it was waited for", hint="upload.wait()")
        self._device._check_current(self)
        return self._arrays

    def wait(self) -> Upload:
        """Return when the arrays are on the device. Only time really spent waiting here is recorded as Stage.H2D.

        Raises StallscopeError where the copy failed, and where these buffers were given to a later upload.
        """
        self._device._check_current(self)
        if not self._waited:
            self._device._wait(self)
            if self._error is not None:
                raise StallscopeError(f"copy of step {self.step} to the device failed: {self._error}") from self._error
            self._waited = True
        return self


class Device(ABC):
    """Base of the NumPy, emulated and cupy devices. One thread drives it. Also a context manager that closes it."""

    upload_type: type[Upload] = Upload

    def __init__(self, backend: Backend, recorder: Any = NULL, staging: int = STAGING) -> None:
        self.backend = backend
        self.recorder = recorder
        self.staging = staging
        self.busy_ns = 0
        """Time the device spent in :meth:`compute` blocks so far (the emulated one: at least its nominal time)."""
        self.nominal_ns = 0
        """Sum of the nominal step times so far; 0 on real devices. AU = nominal_ns / wall time of the same steps."""
        self._uploads = 0
        self._in_buffer: list[Upload | None] = [None] * staging
        self._memory: list[Any] = [None] * staging
        self._failed: BaseException | None = None
        self._closed = False
        self._pinned: PinnedRanges | None = None
        self._registered: list[Any] = []

    @property
    def pins(self) -> bool:
        """Whether :meth:`register` page-locks anything: asking for memory to be registered may reserve it."""
        return self._pinned is not None

    @property
    def ahead(self) -> int:
        """How many uploads may be begun while the arrays of an earlier one are in use."""
        return self.staging - 1

    def reserve(self, arrays: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """Allocate the staging buffers for arrays of these (shape, dtype) now rather than at the first uploads."""
        nbytes = sum(_aligned(math.prod(shape) * np.dtype(dtype).itemsize) for shape, dtype in arrays.values())
        for index in range(self.staging):
            self._staged(index, nbytes)

    def upload(self, arrays: Mapping[str, np.ndarray], *, step: int = -1, epoch: int = -1, slot: int = -1) -> Upload:
        """Start copying C-contiguous host arrays to the device.

        Raises StallscopeError when all staging buffers are in flight: the upload that is to make room was never waited
        for.
        """
        if self._closed:
            raise StallscopeError("upload on a closed device")
        if self._failed is not None:
            raise self._failed
        index = self._uploads % self.staging
        last = self._in_buffer[index]
        if last is not None and not last._waited and last._error is None:
            raise StallscopeError(
                "too many uploads in flight",
                expected=f"at most {self.staging} uploads that have not been waited for",
                found=f"the upload of step {last.step} is still pending",
                hint="call .wait() on uploads in the order they were made",
            )
        if last is not None:
            last._arrays = {}  # a buffer that has to grow is free before its successor is allocated
        sources = {name: _contiguous(name, array) for name, array in arrays.items()}
        nbytes = sum(array.nbytes for array in sources.values())
        upload = self.upload_type(self, self._uploads, step, epoch, slot, nbytes)
        upload._arrays = self._destination(index, sources)
        self._in_buffer[index] = upload
        self._uploads += 1
        self._start(upload, sources)
        return upload

    @contextmanager
    def compute(self, *, step: int = -1, epoch: int = -1) -> Iterator[None]:
        """Bracket the compute of one step; the block ends when the device is done with it.

        Records the device's lane (Stage.DEVICE). The caller's own time is the caller's to record, as Stage.COMPUTE: the
        wait for the device at the end of the block belongs to it.
        """
        began = time.monotonic_ns()
        self._begin_compute()
        yield
        self._finish_compute(began, step, epoch)

    def synchronize(self) -> None:
        """Return when every upload so far is complete and the device is idle."""
        for upload in self._in_buffer:
            if upload is not None:
                self._settle(upload)

    def close(self) -> None:
        """Stop the copy engine and free the buffers. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._shut_down()
        if self._pinned is not None:
            for memory in self._registered:
                self._pinned.unregister(memory)
        self._registered.clear()
        self._memory = [None] * self.staging
        self._in_buffer = [None] * self.staging

    def register(self, memory: Any) -> bool:
        """Page-lock host memory that uploads will come from, until :meth:`unregister` or :meth:`close`.

        False where the device has no use for it, or where it was refused: then with a PinningWarning.
        """
        pinned = self._pinned is not None and self._pinned.register(memory)
        if pinned:
            self._registered.append(memory)
        return pinned

    def unregister(self, memory: Any) -> None:
        """Undo :meth:`register`; must come before the memory is unmapped."""
        held = [index for index, other in enumerate(self._registered) if other is memory]
        if held and self._pinned is not None:
            self.synchronize()  # a copy may still be reading from it
            del self._registered[held[0]]
            self._pinned.unregister(memory)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- what the kinds of device fill in ------------------------------------------------------------------------

    @abstractmethod
    def _start(self, upload: Upload, sources: dict[str, np.ndarray]) -> None:
        """Begin, or do, the copy of ``sources`` into ``upload._arrays``."""

    @abstractmethod
    def _settle(self, upload: Upload) -> None:
        """Block until the copy is complete; raises nothing for a failed one."""

    def _begin_compute(self) -> None:  # noqa: B027 - only CUDA has a clock of its own
        """Mark the start of a compute block on the device, where it keeps a clock of its own."""

    @abstractmethod
    def _finish_compute(self, began_ns: int, step: int, epoch: int) -> None:
        """End a compute block that began at ``began_ns``."""

    def _shut_down(self) -> None:  # noqa: B027 - the NumPy device holds nothing
        """Release what the device holds besides its buffers."""

    def _allocate(self, nbytes: int) -> Any:
        """Flat uint8 device memory."""
        return self.backend.xp.empty(nbytes, dtype=np.uint8)

    # -- shared ----------------------------------------------------------------------------------------------------

    def _wait(self, upload: Upload) -> None:
        if upload.done:
            return
        with self.recorder.span(
            Stage.H2D, step=upload.step, epoch=upload.epoch, slot=upload.slot, nbytes=upload.nbytes
        ):
            self._settle(upload)

    def _check_current(self, upload: Upload) -> None:
        if self._closed:
            raise StallscopeError(f"the upload of step {upload.step} was used after its device was closed")
        if self._in_buffer[upload.number % self.staging] is not upload:
            raise StallscopeError(
                f"the arrays of step {upload.step} are gone: their buffers were reused by a later upload",
                expected=f"use before upload {upload.number + self.staging}",
                found=f"{self._uploads} uploads so far",
            )

    def _destination(self, index: int, sources: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Views, in the shapes of ``sources``, of staging buffer ``index``."""
        buffer = self._staged(index, sum(_aligned(array.nbytes) for array in sources.values()))
        views, start = {}, 0
        for name, array in sources.items():
            views[name] = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            start += _aligned(array.nbytes)
        return views

    def _staged(self, index: int, nbytes: int) -> Any:
        """Staging buffer ``index``; larger than before where a batch is."""
        if self._memory[index] is None or self._memory[index].nbytes < nbytes:
            # What the buffer held was waited for before it is replaced, and compute that reads it comes first in the
            # order of the stream that the memory belongs to.
            self._memory[index] = None
            with self.recorder.span(Stage.ALLOC, nbytes=nbytes):
                self._memory[index] = self._allocate(max(1, nbytes))
        return self._memory[index]

    def _record_busy(self, began_ns: int, ended_ns: int, step: int, epoch: int, flags: int = 0) -> None:
        self.busy_ns += ended_ns - began_ns
        self.recorder.add(Kind.SPAN, Stage.DEVICE, began_ns, ended_ns, step=step, epoch=epoch, flags=flags)


class HostUpload(Upload):
    """Nothing is copied: the arrays are the source, which is in use until they were taken."""

    def taken(self) -> None:
        self._finish()


class NumpyDevice(Device):
    """The host as its own device: a batch is where it is needed already, and the net takes it from there."""

    upload_type = HostUpload

    @property
    def ahead(self) -> int:
        """None: there is no copy that could be begun early."""
        return 0

    def reserve(self, arrays: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """No staging buffers, nothing to allocate."""

    def _destination(self, index: int, sources: Mapping[str, np.ndarray]) -> dict[str, Any]:
        views = {name: array.view() for name, array in sources.items()}
        for view in views.values():
            view.flags.writeable = False
        return views

    def _start(self, upload: Upload, sources: dict[str, np.ndarray]) -> None:
        """Nothing to copy."""

    def _wait(self, upload: Upload) -> None:
        """Nothing to wait for."""

    def _settle(self, upload: Upload) -> None:
        """Nothing is ever pending here."""

    def _finish_compute(self, began_ns: int, step: int, epoch: int) -> None:
        self._record_busy(began_ns, time.monotonic_ns(), step, epoch)

    def _shut_down(self) -> None:
        for upload in self._in_buffer:
            if upload is not None:
                upload._finish()


def open_device(
    backend: Backend | str = "auto",
    *,
    step_ms: float = 0.0,
    h2d_gbps: float = 0.0,
    h2d_delay_ms: float = 0.0,
    staging: int = STAGING,
    recorder: Any = NULL,
) -> Device:
    """The device of a backend.

    ``staging``: staging buffers; with n of them up to n - 1 batches are copied ahead of their steps, with 1 none is.
    ``step_ms`` (ms), ``h2d_gbps`` (10^9 bytes/s, 0 = no limit) and ``h2d_delay_ms`` (ms) shape the emulated accelerator
    and are refused for the others, where they would silently mean nothing.
    """
    chosen = select_backend(backend)
    nominal = {"step_ms": step_ms, "h2d_gbps": h2d_gbps, "h2d_delay_ms": h2d_delay_ms}
    for name, value in nominal.items():
        if not 0 <= value < float("inf"):
            raise UsageError(f"device.{name} is out of range", expected="a finite number >= 0", found=value)
        if value and chosen.name != "emulated":
            raise UsageError(
                f"device.{name} is only for the emulated accelerator",
                expected="backend 'emulated'",
                found=f"backend {chosen.name!r} with {name}={value}",
            )
    if staging < 1:
        raise UsageError("device.staging is out of range", expected="an integer >= 1", found=staging)
    if chosen.name == "emulated":
        from gpu.emulated import EmulatedDevice

        return EmulatedDevice(chosen, **nominal, staging=staging, recorder=recorder)
    if chosen.name == "cupy":
        from gpu.copy import CupyDevice

        return CupyDevice(chosen, recorder, staging)
    return NumpyDevice(chosen, recorder, staging)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _contiguous(name: str, array: np.ndarray) -> np.ndarray:
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        # A silent copy here would be a second, unrecorded pass over the batch, and would hide who owns the source.
        raise StallscopeError(
            f"upload of {name!r} needs a C-contiguous NumPy array",
            found=type(array).__name__ if not isinstance(array, np.ndarray) else f"strides {array.strides}",
        )
    return array
