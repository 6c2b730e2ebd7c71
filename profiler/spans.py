"""A stretch of time being recorded, and what its thread used meanwhile. The hot path: a few microseconds in all."""

from __future__ import annotations

import resource
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from profiler.events import MISSING, Kind
from profiler.osread import SchedFile

if TYPE_CHECKING:
    from profiler.recorder import Recorder

_now = time.monotonic_ns
_cpu = time.thread_time_ns
_rusage = resource.getrusage
_THREAD = getattr(resource, "RUSAGE_THREAD", None)
_local = threading.local()


def forget_threads() -> None:
    """In a forked child: the open scheduler files are those of the parent's threads."""
    global _local
    _local = threading.local()


class Span:
    """A stretch of time being recorded; a context manager made by :meth:`Recorder.span`.

    ``items``, ``nbytes``, ``flags``, ``step``, ``epoch`` and ``slot`` may be set until it ends.
    """

    __slots__ = (
        "_cpu0", "_parts", "_recorder", "_sched", "_sched0", "_usage0", "epoch", "flags", "items", "nbytes", "slot",
        "stage", "step", "t0_ns",
    )  # fmt: skip

    def __init__(
        self, recorder: Recorder, stage: int, step: int, epoch: int, slot: int, items: int, nbytes: int, flags: int
    ) -> None:
        self._recorder = recorder
        self.stage = stage
        self.step = step
        self.epoch = epoch
        self.slot = slot
        self.items = items
        self.nbytes = nbytes
        self.flags = flags
        self.t0_ns = 0
        self._parts: tuple[tuple[int, int], ...] = ()

    def __enter__(self) -> Span:
        recorder = self._recorder
        entered = _now()
        if recorder._readings:
            try:
                self._sched = _local.sched
            except AttributeError:
                self._sched = _local.sched = SchedFile()
            self._usage0 = _rusage(_THREAD) if _THREAD is not None else None
            self._sched0 = self._sched.raw()
            self._cpu0 = _cpu()
        recorder._open[id(self)] = self
        self.t0_ns = started = _now()
        recorder._overhead_ns += started - entered
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.t0_ns:
            return
        ended = t1 = _now()
        recorder = self._recorder
        cpu = runq = inblock = faults = waits = MISSING
        if recorder._readings:
            cpu = _cpu() - self._cpu0
            text = self._sched.raw()
            if text and self._sched0:
                # Mostly the thread never left its CPU, the text is the same and needs no parsing.
                runq = 0 if text == self._sched0 else int(text.split()[1]) - int(self._sched0.split()[1])
            before = self._usage0
            if _THREAD is not None and before is not None:
                usage = _rusage(_THREAD)
                inblock = usage.ru_inblock - before.ru_inblock
                faults = usage.ru_majflt - before.ru_majflt
                waits = usage.ru_nvcsw - before.ru_nvcsw
        recorder._open.pop(id(self), None)
        if self._parts:
            t1, cpu, runq = self._put_parts(t1, cpu, runq)
        recorder.add(
            Kind.SPAN, self.stage, self.t0_ns, t1, step=self.step, epoch=self.epoch, slot=self.slot, cpu_ns=cpu,
            runq_ns=runq, inblock=inblock, items=self.items, nbytes=self.nbytes, flags=self.flags, major_faults=faults,
            waits=waits,
        )  # fmt: skip
        recorder._overhead_ns += _now() - ended

    def divide(self, *parts: tuple[int, int]) -> None:
        """Record the end of this span as spans of other stages, one after the other: (stage, nanoseconds) each.

        For one compiled call that does the work of several stages in turns and has measured them inside. They get a
        share of the run-queue wait by their time, and count as computing for the rest of it: what else the thread
        waited for, and what it read, belongs to this span.
        """
        self._parts = parts

    def _put_parts(self, t1: int, cpu: int, runq: int) -> tuple[int, int, int]:
        """Record the parts; returns end, CPU time and run-queue wait that are left for the span itself."""
        whole = max(1, t1 - self.t0_ns)
        left = whole
        ends: list[tuple[int, int]] = []
        for stage, length in self._parts:
            ends.append((stage, min(max(0, length), left)))
            left -= ends[-1][1]
        start = self.t0_ns + left
        cpu_left, runq_left = cpu, runq
        for stage, length in ends:
            queued = MISSING if runq == MISSING else min(length, runq * length // whole)  # of another clock than whole
            used = MISSING if cpu == MISSING else max(0, min(cpu_left, length - max(0, queued)))
            self._recorder.add(
                Kind.SPAN, stage, start, start + length, step=self.step, epoch=self.epoch, slot=self.slot, cpu_ns=used,
                runq_ns=queued, inblock=0, items=self.items, nbytes=self.nbytes, flags=self.flags, major_faults=0,
                waits=0,
            )  # fmt: skip
            start += length
            cpu_left -= max(0, used)
            runq_left -= max(0, queued)
        return self.t0_ns + left, max(cpu_left, min(cpu, 0)), runq_left

    def drop(self) -> None:
        """Forget a span that has begun: its end records nothing."""
        self._recorder._open.pop(id(self), None)
        self.t0_ns = 0

    def so_far(self, now: int, actor: int) -> tuple[int, ...]:
        """The row of a span still in progress; called from the flush thread, so CPU time comes from the scheduler."""
        cpu = runq = MISSING
        if self._recorder._readings and self._sched0:
            text = self._sched.raw()
            if text:
                before, reading = SchedFile.sched_of(self._sched0), SchedFile.sched_of(text)
                cpu, runq = reading.cpu_ns - before.cpu_ns, reading.runq_ns - before.runq_ns
        return (
            Kind.OPEN, self.stage, self.flags, actor, self.epoch, self.slot, self.step, self.t0_ns,
            max(now, self.t0_ns), cpu, runq, MISSING, self.items, self.nbytes, MISSING, MISSING,
        )  # fmt: skip


class NullSpan(Span):
    """Same methods, no effect."""

    __slots__ = ()

    def drop(self) -> None:
        return None

    def divide(self, *parts: tuple[int, int]) -> None:
        return None

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
