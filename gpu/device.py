"""The device as the training loop sees it: uploads of batches and a bracket round the compute of a step.

    upload = device.upload(batch_arrays, step=17)     # starts the copy; the host arrays must stay as they are
    upload.wait()                                     # the loop's time from here on is exposed copy time (Stage.H2D)
    batch.release()                                   # allowed as soon as upload.done
    with device.compute(step=17):
        solver.step_on(upload.arrays)

Every device owns two sets of destination buffers and uses them in turn, so the arrays of one upload stay valid until
the second upload after it begins, and a steady loop allocates nothing.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpu.backend import Backend, select_backend
from profiler.errors import StallscopeError, UsageError
from profiler.events import Kind, Stage
from profiler.recorder import NULL

BUFFER_SETS = 2


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
        self._arrays: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._waited = False

    @property
    def done(self) -> bool:
        """True when the host arrays have been read to the end and may be overwritten."""
        return self._copied.is_set()

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

    def __init__(self, backend: Backend, recorder: Any = NULL) -> None:
        self.backend = backend
        self.recorder = recorder
        self.busy_ns = 0
        """Time the device spent in :meth:`compute` blocks so far (the emulated one: at least its nominal time)."""
        self.nominal_ns = 0
        """Sum of the nominal step times so far; 0 on real devices. AU = nominal_ns / wall time of the same steps."""
        self._uploads = 0
        self._in_set: list[Upload | None] = [None] * BUFFER_SETS
        self._memory: list[dict[str, Any]] = [{} for _ in range(BUFFER_SETS)]
        self._closed = False

    def upload(self, arrays: Mapping[str, np.ndarray], *, step: int = -1, epoch: int = -1, slot: int = -1) -> Upload:
        """Start copying C-contiguous host arrays to the device.

        Raises StallscopeError when both buffer sets are still in flight: the upload before last was never waited for.
        """
        if self._closed:
            raise StallscopeError("upload on a closed device")
        index = self._uploads % BUFFER_SETS
        last = self._in_set[index]
        if last is not None and not last._waited and last._error is None:
            raise StallscopeError(
                "too many uploads in flight",
                expected=f"at most {BUFFER_SETS} uploads that have not been waited for",
                found=f"the upload of step {last.step} is still pending",
                hint="call .wait() on uploads in the order they were made",
            )
        sources = {name: _contiguous(name, array) for name, array in arrays.items()}
        nbytes = sum(array.nbytes for array in sources.values())
        upload = self.upload_type(self, self._uploads, step, epoch, slot, nbytes)
        upload._arrays = {name: self._destination(index, name, array) for name, array in sources.items()}
        self._in_set[index] = upload
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
        for upload in self._in_set:
            if upload is not None:
                self._settle(upload)

    def close(self) -> None:
        """Stop the copy engine and free the buffers. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._shut_down()
        self._memory = [{} for _ in range(BUFFER_SETS)]
        self._in_set = [None] * BUFFER_SETS

    def register(self, memory: Any) -> bool:
        """Page-lock host memory that uploads will come from. False where the device has no use for it."""
        return False

    def unregister(self, memory: Any) -> None:  # noqa: B027 - most devices pin nothing
        """Undo :meth:`register`; must come before the memory is unmapped."""

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
        if self._in_set[upload.number % BUFFER_SETS] is not upload:
            raise StallscopeError(
                f"the arrays of step {upload.step} are gone: their buffers were reused by a later upload",
                expected=f"use before upload {upload.number + BUFFER_SETS}",
                found=f"{self._uploads} uploads so far",
            )

    def _destination(self, index: int, name: str, array: np.ndarray) -> Any:
        """A view, in the shape of ``array``, of the memory kept for ``name``; grows when a batch is larger."""
        memory = self._memory[index].get(name)
        if memory is None or memory.nbytes < array.nbytes:
            with self.recorder.span(Stage.ALLOC, nbytes=array.nbytes):
                memory = self._allocate(max(1, array.nbytes))
            self._memory[index][name] = memory
        return memory[: array.nbytes].view(array.dtype).reshape(array.shape)

    def _record_busy(self, began_ns: int, ended_ns: int, step: int, epoch: int, flags: int = 0) -> None:
        self.busy_ns += ended_ns - began_ns
        self.recorder.add(Kind.SPAN, Stage.DEVICE, began_ns, ended_ns, step=step, epoch=epoch, flags=flags)


class NumpyDevice(Device):
    """The host as its own device: the copy is blocking and real, so a slot is free again when upload returns."""

    def _start(self, upload: Upload, sources: dict[str, np.ndarray]) -> None:
        with self.recorder.span(
            Stage.H2D, step=upload.step, epoch=upload.epoch, slot=upload.slot, nbytes=upload.nbytes
        ):
            for name, source in sources.items():
                np.copyto(upload._arrays[name], source)
        upload._copied.set()

    def _settle(self, upload: Upload) -> None:
        """Nothing is ever pending here."""

    def _finish_compute(self, began_ns: int, step: int, epoch: int) -> None:
        self._record_busy(began_ns, time.monotonic_ns(), step, epoch)


def open_device(
    backend: Backend | str = "auto",
    *,
    step_ms: float = 0.0,
    h2d_gbps: float = 0.0,
    h2d_delay_ms: float = 0.0,
    recorder: Any = NULL,
) -> Device:
    """The device of a backend.

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
    if chosen.name == "emulated":
        from gpu.emulated import EmulatedDevice

        return EmulatedDevice(chosen, step_ms=step_ms, h2d_gbps=h2d_gbps, h2d_delay_ms=h2d_delay_ms, recorder=recorder)
    if chosen.name == "cupy":
        from gpu.copy import CupyDevice

        return CupyDevice(chosen, recorder=recorder)
    return NumpyDevice(chosen, recorder)


def _contiguous(name: str, array: np.ndarray) -> np.ndarray:
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        # A silent copy here would be a second, unrecorded pass over the batch, and would hide who owns the source.
        raise StallscopeError(
            f"upload of {name!r} needs a C-contiguous NumPy array",
            found=type(array).__name__ if not isinstance(array, np.ndarray) else f"strides {array.strides}",
        )
    return array
