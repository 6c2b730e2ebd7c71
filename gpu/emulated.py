"""An accelerator that is not there: nominal compute time, and a copy engine with a bandwidth and a delay.

Overlap of copies with compute, copy races and accelerator utilisation behave as on a real device, on any machine.
The copy really happens, and at the *end* of its time: whoever refills a host slot before ``Upload.done`` sees the
damage in the numbers, as it would be with DMA.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import numpy as np

from gpu.backend import Backend
from gpu.device import STAGING, Device, Upload
from profiler.errors import StallscopeError
from profiler.events import Flag, Kind, Stage
from profiler.recorder import NULL

_SPIN_NS = 300_000
"""How long before a deadline coarse sleeping ends: above the usual timer slack and wake-up delay of Linux."""
_JOIN_S = 3.0


def sleep_until(deadline_ns: int) -> None:
    """Return as close after ``time.monotonic_ns() == deadline_ns`` as the scheduler allows.

    The end is spun, giving the processor away in each turn, since one long sleep would overshoot by its wake-up delay.
    """
    while (left := deadline_ns - time.monotonic_ns()) > 0:
        time.sleep((left - _SPIN_NS) / 1e9 if left > _SPIN_NS else 0)


class EmulatedDevice(Device):
    """NumPy's numbers with an accelerator's timing; see :func:`gpu.open_device` for the parameters."""

    def __init__(
        self,
        backend: Backend,
        *,
        step_ms: float = 0.0,
        h2d_gbps: float = 0.0,
        h2d_delay_ms: float = 0.0,
        staging: int = STAGING,
        recorder: Any = NULL,
    ) -> None:
        super().__init__(backend, recorder, staging)
        self.step_ns = round(step_ms * 1e6)
        self.delay_ns = round(h2d_delay_ms * 1e6)
        self.ns_per_byte = 1.0 / h2d_gbps if h2d_gbps else 0.0
        self.copy_ns = 0
        """Time the copy engine was busy so far."""
        self._memcpy_ns_per_byte = 0.0  # as measured at the copy before
        self._closing = threading.Event()
        self._jobs: queue.SimpleQueue[tuple[Upload, dict[str, np.ndarray]] | None] = queue.SimpleQueue()
        # Daemon: a process that forgets to close the device must still be able to end.
        self._engine = threading.Thread(target=self._copy_engine, name="copy-engine", daemon=True)
        self._engine.start()

    def copy_time_ns(self, nbytes: int) -> int:
        """Nominal time of one copy: delay plus size over bandwidth."""
        return self.delay_ns + round(nbytes * self.ns_per_byte)

    def _start(self, upload: Upload, sources: dict[str, np.ndarray]) -> None:
        self._jobs.put((upload, sources))

    def _settle(self, upload: Upload) -> None:
        upload._copied.wait()

    def _copy_engine(self) -> None:
        while (job := self._jobs.get()) is not None:
            upload, sources = job
            began = time.monotonic_ns()
            try:
                self._copy(upload, sources, began)
            except BaseException as error:  # whatever it was belongs to the thread that waits for this copy
                upload._error = error.with_traceback(None)  # whose frames hold the host arrays
            ended = time.monotonic_ns()
            self.copy_ns += ended - began
            self.recorder.add(
                Kind.SPAN,
                Stage.COPY,
                began,
                ended,
                step=upload.step,
                epoch=upload.epoch,
                slot=upload.slot,
                nbytes=upload.nbytes,
                flags=Flag.EMULATED,
            )
            del job, sources  # no reference to the host arrays may outlive the copy: their owner may want to unmap them
            upload._finish()

    def _copy(self, upload: Upload, sources: dict[str, np.ndarray], began: int) -> None:
        nominal = self.copy_time_ns(upload.nbytes)
        # The host's own copy is part of the nominal time where it fits: start it that much before the end.
        start = began + max(0, nominal - round(upload.nbytes * self._memcpy_ns_per_byte))
        self._closing.wait(
            max(0, start - time.monotonic_ns() - _SPIN_NS) / 1e9
        )  # a device that is closed waits for none
        if self._closing.is_set():
            raise StallscopeError("the device was closed first")
        sleep_until(start)
        for name, source in sources.items():
            np.copyto(upload._arrays[name], source)
        if upload.nbytes:
            self._memcpy_ns_per_byte = (time.monotonic_ns() - start) / upload.nbytes
        sleep_until(began + nominal)

    def _finish_compute(self, began_ns: int, step: int, epoch: int) -> None:
        # The device is busy for its nominal time or for the real compute, whichever is longer, and not for what the
        # sleep below overshoots: that is the host's fault.
        ended = max(time.monotonic_ns(), began_ns + self.step_ns)
        sleep_until(ended)
        self.nominal_ns += self.step_ns
        self._record_busy(began_ns, ended, step, epoch, Flag.EMULATED)

    def _shut_down(self) -> None:
        self._closing.set()
        self._jobs.put(None)
        self._engine.join(_JOIN_S)
