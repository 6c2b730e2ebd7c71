"""What a worker process does: claim a step, make its batch in place, say it is ready; until there is nothing left.

Knows nothing of Ray, so that tests run it in plain processes too.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from pipeline import last_record
from pipeline.maker import BatchMaker, LocalReader, Made, Probe, Reader, Slot
from pipeline.process import Process
from pipeline.remarks import noted
from pipeline.ring import Blocked, Claim, Ring, RingAddress
from pipeline.ring_arrival import attach
from pipeline.spec import FeedSpec, TransformSpec
from profiler.errors import UsageError
from profiler.events import Flag, Kind, Stage
from profiler.recorder import NULL, Recorder, set_current

if TYPE_CHECKING:
    from datasets.source import Source

_UNCHANGED = TransformSpec()


class Maker(Protocol):
    """What makes batches: a BatchMaker, or what asks another node for them."""

    def warm_up(self) -> None: ...

    def make(self, step: int, slot: Slot, *, index: int = -1, flags: int = 0) -> Made: ...


def work(
    address: RingAddress, spec: FeedSpec, probed: Probe, row: int, reader: Reader | None = None,
    asks: Callable[[Recorder], Maker] | None = None,
) -> int:  # fmt: skip
    """Fill slots of the ring at ``address`` as worker ``row``; returns how many batches were made.

    It makes them itself, from a data set that it opens or through ``reader``, or asks what ``asks`` gives for them.

    Ends when every step is made, when the ring is closed or when the trainer's process is gone. An error of a record
    leaves as the exception it is; the steps before it are in the ring and are not lost.
    """
    import threadpoolctl

    trainer = Process(address.pid)
    ring = attach(address)
    with contextlib.ExitStack() as stack:
        stack.callback(trainer.close)
        stack.callback(ring.close)
        stack.enter_context(threadpoolctl.threadpool_limits(1))
        recorder = stack.enter_context(recording(spec, row))
        if reader is None and asks is None:
            reader = LocalReader(stack.enter_context(contextlib.closing(open_data(spec))))
        with recorder.span(Stage.START):
            maker: Maker
            if asks is not None:
                maker = asks(recorder)
            else:
                assert reader is not None
                maker = BatchMaker(spec, probed, reader, recorder)
                maker.begin = lambda record: last_record.begin(ring, row, record.index, record.key)
            maker.warm_up()
            slots = [probed.layout.views(ring.payload(index)) for index in range(ring.capacity)]
        ring.enter(row)
        stack.callback(slots.clear)
        stack.callback(ring.leave, row)
        made = 0
        while (claim := _next(ring, row, trainer, recorder)) is not None:
            flags = Flag.REDO if claim.redo else 0
            with recorder.span(Stage.BATCH, step=claim.step, slot=claim.slot, flags=flags) as span:
                batch = maker.make(claim.step, slots[claim.slot], index=claim.slot, flags=flags)
                span.epoch, span.items = batch.epoch, batch.items
                at = ring.ready(row, claim, items=batch.items, epoch=batch.epoch, hashes=batch.hashes)
            recorder.add(
                Kind.MARK, Stage.READY, at, at, step=claim.step, epoch=batch.epoch, slot=claim.slot, flags=flags
            )
            made += 1
        return made


def _next(ring: Ring, row: int, trainer: Process, recorder: Recorder) -> Claim | None:
    """Wait for something to make; None when this worker's life is over."""
    if not trainer.alive:
        return None
    found = ring.claim(row)
    while isinstance(found, Blocked):
        if found in (Blocked.DONE, Blocked.STOP):
            return None
        reason = found
        with recorder.span(Stage.SLOT_WAIT if reason is Blocked.SLOT else Stage.LEASE_WAIT):
            while found is reason:
                if not ring.wait_free(trainer):
                    return None
                found = ring.claim(row)
    return found


def open_data(spec: FeedSpec) -> Source:
    """The data set of a feed: one source, or several one after the other, with its labels where they lie apart."""
    from datasets.concat import ConcatSource
    from datasets.paired import PairedSource
    from datasets.source import open_source

    paths = (spec.source,) if isinstance(spec.source, str) else spec.source
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(contextlib.closing(_open_part(spec, path))) for path in paths]
        _check_parts(spec, opened)
        source = opened[0] if isinstance(spec.source, str) else ConcatSource(opened)
        if spec.labels is not None:
            source = PairedSource(
                source,
                stack.enter_context(
                    contextlib.closing(open_source(spec.labels, readahead=spec.reads_ahead, lock=spec.lock))
                ),
            )
        _check_identity(spec, source)
        stack.pop_all()
    return source


def _open_part(spec: FeedSpec, path: str) -> Source:
    if path.startswith("python:"):
        from pipeline.python_source import PythonSource

        return PythonSource(path, spec.param, spec.phase)
    from datasets.source import open_source

    source = open_source(
        path, backend=spec.backend, db=spec.db, readahead=spec.reads_ahead, lock=spec.lock, root=spec.root,
        tops=spec.tops, tolerant=spec.on_bad_record != "stop",
    )  # fmt: skip
    if spec.identity is None:  # who opens it first says so, not every worker again
        from datasets.errors import DatasetWarning

        for note in source.notes:
            warnings.warn(f"{source.name}: {note}", DatasetWarning, stacklevel=2)
    return source


def _check_parts(spec: FeedSpec, parts: list[Source]) -> None:
    """Refuse what cannot be done with records that are not a picture and a label."""
    for part in parts:
        if part.blobs and (len(parts) > 1 or spec.labels is not None):
            raise UsageError(
                f"{part.name} is one of several sources, and its records are not a picture and a label",
                expected="one source, without data.<phase>.labels",
                hint="name several HDF5 files in one list; labels are data sets of the same files",
            )
        set_anyway = [name for name, value in asdict(spec.transform).items() if value != getattr(_UNCHANGED, name)]
        if part.blobs and set_anyway:
            raise UsageError(
                f"data.transform.{set_anyway[0]} is set, and the records of {part.name} are not transformed",
                expected="no transform: the values go into the net as they are",
                found=", ".join(set_anyway),
                hint="store them as they shall be, or scale them with a Power or Scale layer in the net",
            )


def _check_identity(spec: FeedSpec, source: Source) -> None:
    """A worker that starts later, or anew, must not read a data set that was written to in between."""
    if spec.identity is None:
        return
    found = source.identity()
    if _without_paths(found) != _without_paths(spec.identity):
        from datasets.errors import DatasetChanged

        raise DatasetChanged(
            f"{source.name} was written to while this job was using it",
            expected=f"{_without_paths(spec.identity)}",
            found=f"{_without_paths(found)}",
            hint="let the writer finish, then start again",
        )


def _without_paths(value: Any) -> Any:
    """An identity without its paths, which may be another's in another process."""
    if isinstance(value, dict):
        return {key: _without_paths(part) for key, part in value.items() if key != "path"}
    return [_without_paths(part) for part in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def recording(spec: FeedSpec, row: int, role: str = "worker") -> Iterator[Recorder]:
    """This process's recorder, as the feed asks for it."""
    if spec.recorder_folder is None or spec.detail == "off":
        yield NULL
        return
    prefix = "test-" if spec.phase == "TEST" else ""
    name = f"{prefix}{role}-{row + 1}" if role == "worker" else f"{prefix}{role}"
    with Recorder.open(
        spec.recorder_folder, name, role, spec.first_actor + row, detail=spec.detail, fingerprints=spec.fingerprints
    ) as recorder:
        set_current(recorder)
        recorder.watch_gc()
        try:
            with noted(recorder):
                yield recorder
        finally:
            set_current(NULL)
