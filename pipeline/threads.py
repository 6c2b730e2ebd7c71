"""Threads that make batches ahead in the consumer's own process: a crew without processes, Ray or a second start.

What they do runs beside the consumer as far as it needs no interpreter: reading and making raw records in one compiled
call, decoding images, resizing. A user's function in Python takes turns with the consumer; processes do not.
Each thread has a reader and a maker of its own, and claims steps from the ring as a worker process does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import cast

from pipeline.crew import FeedError
from pipeline.maker import BatchMaker, LocalReader, Probe
from pipeline.process import Process
from pipeline.ring import Blocked, Claim, Ring
from pipeline.spec import FeedSpec
from pipeline.tracebacks import forget_arrays
from pipeline.worker import open_data
from profiler.errors import StallscopeError
from profiler.events import Flag, Kind, Stage
from profiler.recorder import NULL, Recorder

_END_S = 5.0  # how long the end of the feed waits for what is being made


class _Here:
    """This process, where :meth:`Ring.wait_free` wants to know whether the consumer lives."""

    alive = True

    @staticmethod
    def fileno() -> int:
        return -1


_HERE = cast(Process, _Here())


class ThreadCrew:
    """Looks to an engine like :class:`pipeline.crew.Crew`. An error is raised when its step is asked for."""

    restarts = 0
    pids: list[int] = []  # noqa: RUF012  # never changed
    fds: tuple[int, ...] = ()

    def __init__(self, ring: Ring, spec: FeedSpec, probed: Probe, threads: int, recorder: Recorder) -> None:
        self.ring, self.spec, self.probe, self.recorder = ring, spec, probed, recorder
        self._threads: dict[int, threading.Thread] = {}
        self._leaving: dict[int, threading.Thread] = {}
        self._started: set[int] = set()  # rows that make batches
        self._errors: dict[int, BaseException] = {}  # by the step that failed, -1: before any step
        self._rows = 0
        self.resize(threads)

    @property
    def size(self) -> int:
        """Threads that make batches, or will."""
        return len(self._threads)

    @property
    def all_started(self) -> bool:
        """Whether all of them are at work."""
        return self._started.issuperset(self._threads)

    def resize(self, threads: int) -> None:
        """Have so many threads: start some, or tell the newest to end when they have made what they are making."""
        for _ in range(threads - len(self._threads)):
            row, self._rows = self._rows, self._rows + 1
            thread = threading.Thread(target=self._run, args=(row,), name=f"stallscope-feed-{row + 1}", daemon=True)
            self._threads[row] = thread
            thread.start()
        for row in list(self._threads)[threads:]:
            self.ring.retire(row)
            self._leaving[row] = self._threads.pop(row)

    def notice(self) -> None:
        """Threads are not lost."""

    def watch(self, step: int, waited_s: float) -> None:
        """Raise the error of the thread that failed to make ``step``."""
        failed = self._errors.get(step) or self._errors.get(-1)
        if failed is None and not any(thread.is_alive() for thread in self._threads.values()):
            if self.ring.is_ready(step):
                return
            failed = self._errors[min(self._errors)] if self._errors else None
            if failed is None:
                raise FeedError(f"all threads have ended and none has made step {step}", found=str(self.ring.counts()))
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Wait until all threads have ended. The ring must have been stopped.

        One that does not end (a user's function that hangs) is left behind, with a note: its slot stays mapped for it.
        """
        deadline = time.monotonic() + _END_S
        for row, thread in (self._leaving | self._threads).items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self.recorder.note("feed_thread_left", thread=row + 1, waited_s=_END_S)
        self._threads.clear()
        self._leaving.clear()

    # -- in the threads --------------------------------------------------------------------------------------

    def _run(self, row: int) -> None:
        step = -1
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self._started.discard, row)
                recorder = stack.enter_context(contextlib.closing(self._recorder(row)))
                source = stack.enter_context(contextlib.closing(open_data(self.spec)))
                with recorder.span(Stage.START):
                    maker = BatchMaker(self.spec, self.probe, LocalReader(source), recorder)
                    maker.warm_up()
                self.ring.enter(row)
                stack.callback(self.ring.leave, row)
                self._started.add(row)
                while (claim := self._next(row, recorder)) is not None:
                    step = claim.step
                    self._make(row, claim, maker, recorder)
                    step = -1
        except BaseException as error:  # SystemExit of a user's function too: nobody else would hear of it
            forget_arrays(error)
            self._errors[step] = error if isinstance(error, StallscopeError) else _named(error)
            self.recorder.note("worker_error", worker=self.spec.first_actor + row, step=step, error=str(error))

    def _make(self, row: int, claim: Claim, maker: BatchMaker, recorder: Recorder) -> None:
        # What it waits for besides storage is the interpreter's lock: such a wait says nothing about the data.
        flags = Flag.OWN_CODE | (Flag.REDO if claim.redo else 0)
        slot = self.probe.layout.views(self.ring.payload(claim.slot))
        with recorder.span(Stage.BATCH, step=claim.step, slot=claim.slot, flags=flags) as span:
            made = maker.make(claim.step, slot, index=claim.slot, flags=flags)
            span.epoch, span.items = made.epoch, made.items
            at = self.ring.ready(row, claim, items=made.items, epoch=made.epoch, hashes=made.hashes)
        recorder.add(Kind.MARK, Stage.READY, at, at, step=claim.step, epoch=made.epoch, slot=claim.slot, flags=flags)

    def _next(self, row: int, recorder: Recorder) -> Claim | None:
        found = self.ring.claim(row)
        while isinstance(found, Blocked):
            if found in (Blocked.DONE, Blocked.STOP):
                return None
            with recorder.span(Stage.SLOT_WAIT if found is Blocked.SLOT else Stage.LEASE_WAIT):
                reason = found
                while found is reason:
                    self.ring.wait_free(_HERE)
                    found = self.ring.claim(row)
        return found

    def _recorder(self, row: int) -> Recorder:
        spec = self.spec
        if spec.recorder_folder is None or spec.detail == "off":
            return NULL
        return Recorder.open(
            spec.recorder_folder, f"thread-{row + 1}", "worker", spec.first_actor + row, detail=spec.detail,
            fingerprints=spec.fingerprints,
        )  # fmt: skip


def _named(error: BaseException) -> StallscopeError:
    wrapped = StallscopeError(
        f"a thread of the feed failed: {type(error).__name__}: {error}", hint="--feed.threads 0 shows it where it is"
    )
    wrapped.__cause__ = error
    return wrapped
