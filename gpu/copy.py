"""The CUDA device: batches go over on a stream of their own, ordered against compute by events.

    copy stream:     wait for the compute event of the step that last used the buffers → copies → copy event
    compute stream:  kernels of a step → compute event

The host blocks on the copy event in ``Upload.wait``, so that what is exposed of a copy is measured there and not
charged to whatever synchronises next, and on the compute event at the end of a compute block, for the same reason. A
step's kernels are thus never submitted before its copy is complete, while the copy of the next step runs beside them.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from gpu.backend import Backend
from gpu.device import Device, Upload
from gpu.pinned import PinnedRanges, process_ranges
from profiler.events import Kind, Stage
from profiler.recorder import NULL


class CupyUpload(Upload):
    """An upload whose end is a CUDA event; it holds its host arrays until then."""

    _begun: Any = None
    _ended: Any = None
    _sources: dict[str, np.ndarray] | None = None

    @property
    def done(self) -> bool:
        if not self._copied.is_set() and self._ended is not None and self._ended.done:
            self._device._settle(self)
        return self._copied.is_set()


class CupyDevice(Device):
    """One CUDA device (the current one), driven by one thread."""

    upload_type = CupyUpload

    def __init__(self, backend: Backend, recorder: Any = NULL) -> None:
        super().__init__(backend, recorder)
        self._cuda = backend.xp.cuda
        self._copy_stream = self._cuda.Stream(non_blocking=True)
        self._compute_done: Any = None
        self._compute_began: Any = None
        self._pinned: PinnedRanges = process_ranges(backend.xp)
        self._registered: list[Any] = []

    def register(self, memory: Any) -> bool:
        pinned = self._pinned.register(memory)
        if pinned:
            self._registered.append(memory)
        return pinned

    def unregister(self, memory: Any) -> None:
        held = [index for index, other in enumerate(self._registered) if other is memory]
        if held:
            self.synchronize()  # a copy may still be reading from it
            del self._registered[held[0]]
            self._pinned.unregister(memory)

    def _allocate(self, nbytes: int) -> Any:
        memory = super()._allocate(nbytes)
        # The pool may hand out a chunk that kernels submitted earlier still use: ordered on their stream, not on ours.
        self._cuda.get_current_stream().synchronize()
        return memory

    def _start(self, upload: Upload, sources: dict[str, np.ndarray]) -> None:
        assert isinstance(upload, CupyUpload)
        stream = self._copy_stream
        if self._compute_done is not None:
            # These buffers were last read by compute that was submitted before this upload.
            stream.wait_event(self._compute_done)
        upload._sources = sources
        upload._begun, upload._ended = self._cuda.Event(), self._cuda.Event()
        upload._begun.record(stream)
        for name, source in sources.items():
            # Straight from the slot: cupy's set() and asarray() may stage through a pinned buffer of their own. From
            # pageable memory CUDA stages the copy before it returns, which is slow and just as safe.
            upload._arrays[name].data.copy_from_host_async(source.ctypes.data, source.nbytes, stream)
        upload._ended.record(stream)

    def _settle(self, upload: Upload) -> None:
        assert isinstance(upload, CupyUpload)
        if upload._copied.is_set():
            return
        try:
            upload._ended.synchronize()
            took_ns = round(self._cuda.get_elapsed_time(upload._begun, upload._ended) * 1e6)
        except Exception as error:  # CUDARuntimeError; raised where the upload is waited for
            upload._error = error
        else:
            # Device and host clocks are not the same: the length is the device's, the end is when the host saw it.
            ended = time.monotonic_ns()
            self.recorder.add(
                Kind.SPAN,
                Stage.COPY,
                ended - took_ns,
                ended,
                step=upload.step,
                epoch=upload.epoch,
                slot=upload.slot,
                nbytes=upload.nbytes,
            )
        upload._sources = None
        upload._copied.set()

    def _begin_compute(self) -> None:
        self._compute_began = self._cuda.Event()
        self._compute_began.record(self._cuda.get_current_stream())

    def _finish_compute(self, began_ns: int, step: int, epoch: int) -> None:
        event = self._cuda.Event()
        event.record(self._cuda.get_current_stream())
        self._compute_done = event
        event.synchronize()
        took_ns = round(self._cuda.get_elapsed_time(self._compute_began, event) * 1e6)
        ended = time.monotonic_ns()
        self._record_busy(max(began_ns, ended - took_ns), ended, step, epoch)

    def synchronize(self) -> None:
        super().synchronize()
        self._cuda.get_current_stream().synchronize()

    def _shut_down(self) -> None:
        self.synchronize()
        for memory in self._registered:
            self._pinned.unregister(memory)
        self._registered.clear()
