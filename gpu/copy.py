"""The CUDA device: batches go over on a stream of their own, ordered against compute by events.

    copy stream:     wait for the compute event of the step that last used the buffers → copies → copy event
    compute stream:  kernels of a step → compute event

The host blocks on the copy event in ``Upload.wait``, so that what is exposed of a copy is measured there and not
charged to whatever synchronises next, and on the compute event at the end of a compute block, for the same reason. A
step's kernels are thus never submitted before its copy is complete, while the copy of the next step runs beside them.

A thread waits for each copy's end, so that a slot is given back then and not when the loop comes by, and the record
says when the copy was over.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import numpy as np

from gpu.backend import Backend
from gpu.determinism import OneStream
from gpu.device import STAGING, Device, Upload
from gpu.pinned import process_ranges
from profiler.events import Kind, Stage
from profiler.recorder import NULL

_JOIN_S = 3.0


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

    def __init__(self, backend: Backend, recorder: Any = NULL, staging: int = STAGING) -> None:
        super().__init__(backend, recorder, staging)
        self._cuda = backend.xp.cuda
        self._number = self._cuda.Device().id
        self._copy_stream = self._cuda.Stream(non_blocking=True)
        self._compute_done: Any = None
        self._compute_began: Any = None
        self._one_stream = OneStream()
        self._pinned = process_ranges(backend.xp)
        self._settling = threading.Lock()
        self._begun: queue.SimpleQueue[CupyUpload | None] = queue.SimpleQueue()
        self._watcher = threading.Thread(target=self._watch, name="copy-watcher", daemon=True)
        self._watcher.start()

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
        # The watcher sleeps on the second one; an event that does not block keeps a core busy instead.
        upload._begun, upload._ended = self._cuda.Event(), self._cuda.Event(block=True)
        upload._begun.record(stream)
        for name, source in sources.items():
            # Straight from the slot: cupy's set() and asarray() may stage through a pinned buffer of their own. From
            # pageable memory CUDA stages the copy before it returns, which is slow and just as safe.
            upload._arrays[name].data.copy_from_host_async(source.ctypes.data, source.nbytes, stream)
        upload._ended.record(stream)
        self._begun.put(upload)

    def _watch(self) -> None:
        self._cuda.Device(self._number).use()  # a thread starts on device 0
        while (upload := self._begun.get()) is not None:
            self._settle(upload)
            del upload  # it may hold host arrays whose owner wants to unmap them

    def _settle(self, upload: Upload) -> None:
        assert isinstance(upload, CupyUpload)
        failed: BaseException | None = None
        try:
            upload._ended.synchronize()
        except Exception as error:  # CUDARuntimeError; raised where the upload is waited for
            failed = error.with_traceback(None)
        with self._settling:
            if not upload._copied.is_set():
                self._note_end(upload, failed)
        upload._finish()

    def _note_end(self, upload: CupyUpload, failed: BaseException | None) -> None:
        try:
            if failed is not None:
                raise failed
            took_ns = round(self._cuda.get_elapsed_time(upload._begun, upload._ended) * 1e6)
        except Exception as error:
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
        upload._copied.set()  # under the lock: two threads may have seen the end, one of them writes it down

    def _begin_compute(self) -> None:
        stream = self._cuda.get_current_stream()
        if self.backend.deterministic:
            self._one_stream.check(stream)
        self._compute_began = self._cuda.Event()
        self._compute_began.record(stream)

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
        self._begun.put(None)
        self._watcher.join(_JOIN_S)
