"""Batches made on another node: a maker there, and a carrier here that copies them into the ring.

The carrier is a worker of the ring like any other, so leases, restarts and errors are those of workers: for each step
it claims it asks its maker, gets the batch as one Ray object and copies it into the slot, once. A maker belongs to its
carrier and ends with it. It keeps no position: the same step asked twice gives the same bytes.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.maker import BatchMaker, LocalReader, Made, Probe, Slot
from pipeline.spec import FeedSpec
from pipeline.spill import store_full
from pipeline.worker import open_data
from profiler.errors import StallscopeError
from profiler.events import Kind, Stage
from profiler.recorder import Detail, Kept, Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Parcel:
    """A batch on its way: the bytes of a slot, what was made, and the events of making it, by the maker's clock."""

    payload: NDArray[np.uint8]
    made: Made
    events: Sequence[tuple[int, ...]]
    t0_ns: int
    t1_ns: int


class MakerActor:
    """Makes batches on its node. What is wrong when it opens the data set is told to whoever asks for a batch."""

    def __init__(self, spec: FeedSpec, probed: Probe, detail: Detail) -> None:
        import threadpoolctl

        self._closing = contextlib.ExitStack()
        self._closing.enter_context(threadpoolctl.threadpool_limits(1))
        self._recorder = Kept(detail)
        self._failure: StallscopeError | None = None
        self._payload = np.zeros(probed.layout.nbytes, np.uint8)
        self._slot = probed.layout.views(self._payload)
        try:
            source = self._closing.enter_context(contextlib.closing(open_data(spec)))
            self._maker = BatchMaker(spec, probed, LocalReader(source), self._recorder)
            self._maker.warm_up()
        except StallscopeError as error:
            self._failure = error

    def ready(self) -> None:
        """Raise what went wrong in the beginning."""
        if self._failure is not None:
            raise self._failure

    def make(self, step: int, index: int, flags: int) -> Parcel:
        """The batch of a step. The array in it is copied into Ray's object store when this returns."""
        self.ready()
        self._recorder.take()
        began = time.monotonic_ns()
        made = self._maker.make(step, self._slot, index=index, flags=flags)
        return Parcel(self._payload, made, self._recorder.take(), began, time.monotonic_ns())


class Carried:
    """Stands where a worker's BatchMaker does, and has its batches made by an actor."""

    def __init__(self, maker: Any, probed: Probe, recorder: Recorder) -> None:
        self._maker, self._probe, self._recorder = maker, probed, recorder

    def warm_up(self) -> None:
        """Wait until the maker has opened the data set."""
        self._ask(self._maker.ready.remote())

    def make(self, step: int, slot: Slot, *, index: int = -1, flags: int = 0) -> Made:
        """See :meth:`pipeline.maker.BatchMaker.make`."""
        called = time.monotonic_ns()
        parcel: Parcel = self._ask(self._maker.make.remote(step, index, flags))
        came = time.monotonic_ns()
        for mine, theirs in zip(_arrays(slot), _arrays(self._probe.layout.views(parcel.payload)), strict=True):
            np.copyto(mine, theirs)
        self._record(parcel, called, came)
        return parcel.made

    def _record(self, parcel: Parcel, called: int, came: int) -> None:
        """The maker's events as if they had begun with the call, then TRANSFER: all that was not making.

        The clocks of two nodes have nothing to do with one another; lengths are what is known.
        """
        recorder = self._recorder
        shift = called - parcel.t0_ns
        for (
            kind,
            stage,
            flags,
            _,
            epoch,
            slot,
            step,
            t0,
            t1,
            cpu,
            runq,
            inblock,
            items,
            nbytes,
            faults,
            waits,
        ) in parcel.events:
            recorder.add(
                kind, stage, t0 + shift, t1 + shift, step=step, epoch=epoch, slot=slot, cpu_ns=cpu, runq_ns=runq,
                inblock=inblock, items=items, nbytes=nbytes, flags=flags, major_faults=faults, waits=waits,
            )  # fmt: skip
        made = min(came, parcel.t1_ns + shift)
        recorder.add(
            Kind.SPAN, Stage.TRANSFER, made, time.monotonic_ns(), step=parcel.made.step, epoch=parcel.made.epoch,
            items=parcel.made.items, nbytes=parcel.payload.nbytes,
        )  # fmt: skip

    @staticmethod
    def _ask(call: Any) -> Any:
        import ray

        try:
            return ray.get(call)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, StallscopeError):  # what is wrong with the data, and not Ray's wrapping of it
                raise error.cause from None
            if full := store_full(error, "from another node to the trainer's"):
                raise full from None
            raise
        except ray.exceptions.RayError as error:
            if full := store_full(error, "from another node to the trainer's"):
                raise full from None
            raise


def _arrays(slot: Slot) -> list[np.ndarray]:
    return [array for array in (slot.data, slot.labels, slot.ids, slot.epochs, slot.bad, slot.bad_count, slot.shape)
            if array is not None]  # fmt: skip
