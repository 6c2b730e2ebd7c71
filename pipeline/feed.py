"""The consumer's side of the feed: batches in order (``emit: arrival``: as they are ready), each a view of a slot.

    with Feed("data/train_lmdb", batch=64, shuffle=True) as feed:     # or Feed(config)
        for batch in feed.epoch():
            ...                      # batch.data, batch.labels, batch.ids: valid until the batch is given back

A batch is given back by ``batch.release()``, and in any case when the next one is asked for, unless ``batch.hold()``
was called: whoever holds must release. The position is one number, ``next_step`` (and with ``emit: arrival`` which
later steps were given out: :mod:`pipeline.emission`); it is all that a resume needs.
``peek()`` shows a batch that is ready before its turn, so that its copy to a device can begin; that moves no position.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from pipeline import bad_records, position
from pipeline.batch import Batch
from pipeline.content import content
from pipeline.crew import FeedError
from pipeline.emission import Given, Ranges
from pipeline.engines import Engine, engine_of, start_depth
from pipeline.feed_options import Wanted, spec_of
from pipeline.maker import probe, stream_of
from pipeline.ring import Ready
from pipeline.spec import FeedSpec, Phase
from pipeline.transforms import Transform
from pipeline.worker import open_data
from profiler.errors import StallscopeError, UsageError
from profiler.events import Flag, Stage
from profiler.recorder import NULL, Recorder

if TYPE_CHECKING:
    from datasets.source import Source

__all__ = ["Batch", "Feed"]


class Feed:
    """An iterable of :class:`Batch` in the order of steps; a context manager.

    Parameters
    ----------
    config: a job's configuration (``pipeline.load``), a :class:`FeedSpec`, or the path of a data set (or several).
    phase: which data set of the configuration.
    start_step, stop_step: first step, and first step that is not made; None: endless.
    recorder: records FEED_WAIT spans in the consumer's thread and notes about workers.
    epochs: end after so many epochs, counted from the first, whatever ``start_step`` is; in place of ``stop_step``.
    cycle: of a TEST feed: step s stands for step s mod cycle. origin: the step that gets the stream's first batch.
    options: beside a path: ``batch``, ``shuffle`` (True, or as in a configuration), ``seed``, ``tail`` or
        ``drop_last``, ``workers`` (processes, through Ray; without it batches are made in this process), ``crop``,
        ``mirror``, ``mean_value``, ``scale``, ``python``, and what else a FeedSpec and its TransformSpec know.

    Record 0 is read here to settle the shapes; processes start at the first batch or at ``with``. They end with
    :meth:`close`, at the end of ``with``, when nobody has the feed any more and when this process ends.
    """

    def __init__(
        self,
        config: Wanted,
        phase: Phase = "TRAIN",
        start_step: int = 0,
        stop_step: int | None = None,
        recorder: Recorder = NULL,
        *,
        epochs: int | None = None,
        cycle: int | None = None,
        origin: int = 0,
        **options: Any,
    ) -> None:
        self.spec = spec_of(config, phase, start_step, stop_step, recorder, cycle, origin, options)
        self.recorder = recorder
        source = open_data(self.spec)
        try:
            self.probe = probe(self.spec, source)
            self._identity, name = source.identity(), source.name
        except BaseException:
            source.close()
            raise
        self._source: Source | None = None
        if self.spec.engine == "inline" and not self.spec.threads:
            self._source = source  # its engine goes on with it
            self._unused = weakref.finalize(self, source.close)
        else:
            source.close()
        self.spec = replace(self.spec, identity=self._identity)  # whoever else opens it must find the same
        self._stream = stream_of(self.spec, self.probe.records)
        if epochs is not None:
            epochs, cycle = self._checked(epochs), self.spec.cycle
            last = epochs * cycle if cycle else self.spec.origin + self._stream.first_step(epochs)
            self.spec = replace(self.spec, stop_step=last)
        self._given = Given(self.spec.start_step, self.spec.given)
        self._next_step = self.spec.start_step
        self._engine: Engine | None = None
        self._end: weakref.finalize[Any, Any] | None = None  # closes the engine, once
        self._pid = os.getpid()
        self._last: Batch | None = None
        self._ahead: deque[Batch] = deque()  # leased before their turn
        self._out: set[Batch] = set()  # those that have not been given back
        self._first = True
        self._closed = False
        self._failed: BaseException | None = None
        self._depth = 0  # of the ring when it was closed
        self._tally: bad_records.Tally | None = None
        if self.spec.on_bad_record != "stop":
            self._tally = bad_records.Tally(
                self.spec.on_bad_record, self.spec.bad_record_cap, self.probe.records, name, self.spec.phase, recorder
            )
        self._delivered = self._items = self._wait_ns = self._restarts = self._took_ns = 0
        self._tuning: dict[str, Any] | None = None
        self.known_content: str | None = None
        """Of the data set: see :func:`pipeline.content.content`. Whoever knows it may say so before it is asked for."""

    @classmethod
    def from_spec(cls, spec: FeedSpec, recorder: Recorder = NULL) -> Feed:
        """A feed without a job's configuration."""
        return cls(spec, recorder=recorder)

    # -- what it delivers ------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, C, H, W) of a full batch; of the first one where :attr:`sizes_change`."""
        return (self.spec.batch, *self.probe.sample_shape)

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one sample."""
        return self.probe.sample_shape

    @property
    def mean(self) -> NDArray[np.float32]:
        """float32[C, 1, 1] or [C, H, W]: what is subtracted from pixels before they are scaled."""
        transform = Transform(self.spec.transform, self.spec.seed, self.spec.phase_number)
        transform.fit(self.probe.record_shape, self.probe.first)
        return transform.mean

    @property
    def sizes_change(self) -> bool:
        """Whether each sample has a size of its own: batch 1, no crop, and records of different sizes."""
        return self.probe.layout.room > 0

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Shape of the labels of a full batch: (B,) of int32, or (B, K) of float32."""
        width = self.probe.layout.label_width
        return (self.spec.batch, width) if width else (self.spec.batch,)

    @property
    def blob_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of :attr:`Batch.blobs` of a full batch."""
        if self.probe.blobs:
            return [(self.spec.batch, *shape) for shape in self.probe.blobs]
        return [self.shape, self.label_shape]

    @property
    def records(self) -> int:
        """Length of the data set."""
        return self.probe.records

    @property
    def steps_per_epoch(self) -> int:
        """Steps that an epoch takes; with ``tail: wrap`` the last of them may be shared with the next epoch."""
        return self._stream.steps_per_epoch

    def __len__(self) -> int:
        """Steps from the first to the last. Raises :class:`TypeError` for an endless feed, as its kind does."""
        if self.spec.stop_step is None:
            raise TypeError("a feed without epochs or stop_step has no end and no len(); see feed.steps_per_epoch")
        begin, stop = self.spec.start_step, self.spec.stop_step
        return max(0, stop - begin - sum(step < stop for step in Given(begin, self.spec.given).beyond))

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        spec, closed = self.spec, ", closed" if self._closed else ""
        source = spec.source if isinstance(spec.source, str) else ", ".join(spec.source)
        return (
            f"<Feed of {source}: {self.records} records, batch {spec.batch}, {spec.engine}, "
            f"next step {self._next_step}{closed}>"
        )

    def __reduce__(self) -> NoReturn:
        raise FeedError(
            "a feed cannot be sent to another process: it is tied to the one that reads its batches",
            hint="send feed.spec and feed.state_dict(), and make a Feed of them there",
        )

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to, with its first item; of a feed with ``cycle``, which round."""
        cycle = self.spec.cycle
        return step // cycle if cycle else self._stream.epoch_of(self.spec.place(step))

    def epoch(self) -> Iterator[Batch]:
        """The batches that are left of the epoch of the next step; the next call gives the next epoch.

        With ``tail: wrap`` a batch belongs to the epoch of its first item; of a feed with ``cycle``, a round is one.
        """
        now, stop = self.epoch_of(self._next_step), self.spec.stop_step
        while self.epoch_of(self._next_step) == now and (stop is None or self._next_step < stop):
            yield next(self)

    def _checked(self, epochs: Any) -> int:
        if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 0 or self.spec.stop_step is not None:
            raise UsageError(
                "epochs of a feed is out of range, or beside stop_step",
                expected="an integer, 0 or more, and no stop_step",
                found=f"epochs {epochs!r}, stop_step {self.spec.stop_step}",
            )
        return epochs

    @property
    def next_step(self) -> int:
        """The step of the batch that comes next; with ``emit: arrival`` the oldest that was not given out."""
        return self._next_step

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._last is not None and not self._last._held:
            self._last.release()
        self._last = None
        if self._failed is not None:
            raise self._failed
        if self.spec.stop_step is not None and self._next_step >= self.spec.stop_step:
            raise StopIteration
        turn = self._given.count
        flags = (Flag.FIRST if self._first else 0) | (Flag.TEST_PHASE if self.spec.phase == "TEST" else 0)
        began = time.monotonic_ns()
        with self.recorder.span(Stage.FEED_WAIT, step=turn, flags=flags) as span:
            engine = self._started()
            batch = self._ahead.popleft() if self._ahead else self._leased(engine, engine.get(self._next_step))
            span.epoch, span.slot, span.items = batch.epoch, batch.slot, len(batch)
        if batch.step != turn:
            self.recorder.mark(
                Stage.ORDER, step=turn, epoch=batch.epoch, slot=batch.slot, items=batch.step, flags=flags
            )
        self._count_time(engine, batch, began)
        if self._tally is not None:
            self._count_bad(self._tally, batch)
        self._first = False
        self._next_step = self._given.add(batch.step)
        self._delivered += 1
        self._items += len(batch)
        self._last = batch
        return batch

    def peek(self, ahead: int = 0) -> Batch | None:
        """The batch that comes ``ahead`` places after the next one, if it is ready now; its turn stays its turn.

        The slot is leased from here on. None where the batch is not ready or there is none, and from an inline engine.
        """
        self._check_process()
        while len(self._ahead) <= ahead:
            step, stop = self._given.missing(len(self._ahead)), self.spec.stop_step
            if self._failed is not None or self._engine is None or (stop is not None and step >= stop):
                return None
            ready = self._engine.get_ready(step)
            if ready is None:
                return None
            self._ahead.append(self._leased(self._engine, ready))
        return self._ahead[ahead]

    def _leased(self, engine: Engine, ready: Ready) -> Batch:
        batch = Batch(self, ready, engine.slots[ready.slot])
        self._out.add(batch)
        return batch

    # -- life cycle ------------------------------------------------------------------------------------------

    def warm_up(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Start, and wait until the next batch is ready: what a feed needs to start is no waiting for data.

        Ends after the spec's ``start_timeout_s`` and when ``cancelled`` says so, without an error; the inline engine,
        which makes a batch when it is asked for, has nothing to wait for. Raises whatever the batch would raise.
        """
        engine = self._started()
        if self.spec.stop_step is None or self._next_step < self.spec.stop_step:
            engine.warm_up(self._next_step, self.spec.start_timeout_s, cancelled)

    def __enter__(self) -> Self:
        try:
            self._started()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all workers and give the memory back. Idempotent. Batches still held are given back."""
        self._closed = True
        self._last = self._failed = None  # an error's traceback holds arrays of the ring
        self._ahead.clear()
        if (source := self._handed_over()) is not None:
            source.close()
        while self._out:
            self._out.pop()._forget()
        if self._tally is not None:
            self._tally.close()
        self._stop()

    def _stop(self) -> None:
        """End the engine, if there is one."""
        engine, self._engine = self._engine, None
        end, self._end = self._end, None
        if engine is not None and end is not None:
            self._restarts, self._tuning, self._depth = engine.restarts, engine.tuning(), engine.ring.depth
            atexit.unregister(end)
            end()

    def _started(self) -> Engine:
        if self._closed:
            raise FeedError("this feed is closed", hint="open another one; state_dict() says where this one stood")
        self._check_process()
        if self._engine is None:
            self._engine = engine_of(self.spec, self.probe, self.recorder, self._handed_over())
            self._pid = os.getpid()
            self._end = weakref.finalize(self, _close, self._engine, self._pid)
            # At the end of this process, and after the import of Ray: so before Ray's own farewell.
            self._end.atexit = False
            atexit.register(self._end)
        return self._engine

    def _handed_over(self) -> Source | None:
        """The data set as it was opened for the shapes, once."""
        source, self._source = self._source, None
        if source is not None:
            self._unused.detach()
        return source

    def _check_process(self) -> None:
        """Refuse to be used in a forked copy: what it would change is the memory of the feed that it is a copy of."""
        if self._engine is not None and os.getpid() != self._pid:
            raise FeedError(
                f"this feed was started by process {self._pid} and cannot be used in process {os.getpid()}",
                expected="a feed of its own for each process that reads batches",
                hint="start processes before the first batch is taken, or with the method 'spawn'; "
                "workers of a feed are told by feed.workers, not by a loader round it",
            )

    def _count_time(self, engine: Engine, batch: Batch, began_ns: int) -> None:
        """How long this batch was waited for, and what the consumer did before it."""
        now = time.monotonic_ns()
        self._wait_ns += now - began_ns
        if self._took_ns:
            step_ns = began_ns - self._took_ns
            engine.delivered(batch._ready, step_ns=step_ns, wait_ns=now - began_ns, held=len(self._out))
            now = time.monotonic_ns()
        self._took_ns = now

    def _count_bad(self, tally: bad_records.Tally, batch: Batch) -> None:
        """Count what the batch says about bad records: in the order in which they are given out, not made."""
        try:
            tally.take(batch.step, batch.epoch, batch._bad)
        except StallscopeError as error:
            self._failed = error  # the batch was taken: nobody can ask for it again
            raise

    def _release(self, batch: Batch) -> None:
        self._out.discard(batch)
        if self._engine is not None:
            self._engine.ring.release(batch.step)
            flags = Flag.TEST_PHASE if self.spec.phase == "TEST" else 0
            self.recorder.mark(Stage.RELEASE, step=batch.step, epoch=batch.epoch, slot=batch.slot, flags=flags)

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The bytes of all slots, page-aligned: what a device may page-lock. Must not be kept beyond :meth:`close`."""
        return self._started().ring.memory

    @property
    def memory_bytes(self) -> int:
        """What the slots take, or will; with ``depth: auto`` to begin with."""
        return self._depth_now() * self.probe.layout.nbytes

    def _depth_now(self) -> int:
        if self._engine is not None:
            return self._engine.ring.depth
        workers = self.spec.workers if self.spec.engine == "ray" else self.spec.threads
        return self._depth or start_depth(self.spec, 2 if workers == "auto" else workers)

    # -- position and figures --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Position, and all that gives it a meaning; plain JSON values.

        ``content`` tells the data set from others of its length, by 16 records that are read at the first call; None
        where it cannot be opened any more.
        """
        spec = self.spec
        return {
            "next_step": self._next_step, "seed": spec.seed, "shuffle": spec.shuffle, "batch": spec.batch,
            "tail": spec.tail, "phase": spec.phase, "records": self.probe.records,
            "content": self._content(),
            "on_bad_record": spec.on_bad_record, "bad_records": sorted(self._tally.known) if self._tally else [],
            **({"origin": spec.origin} if spec.origin else {}),
            **({"given": [list(run) for run in self._given.ranges()]} if self._given.beyond else {}),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another feed stood. Only before the first batch.

        Raises :class:`UsageError` where the state belongs to another stream.
        """
        if not self._first or self._ahead or self._closed:
            raise UsageError(
                "the position of a feed can only be set before it has started: a batch was taken, or it is closed",
                hint="make another Feed for the saved position",
            )
        step, given = position.read(state, self.state_dict, self.spec.source)
        self.begin_at(step, given, state.get("bad_records", ()))

    def begin_at(self, step: int, given: Ranges = (), bad_records: Iterable[int] = ()) -> None:
        """Go on at a step, without those of the later ones that were given out before. Only before the first batch.

        bad_records: those that an earlier part of the run found, which count as known.
        """
        self._stop()  # `with` has started it already, at another step
        self._next_step, self._given = step, Given(step, given)
        self.spec = self.spec.starting_at(step, given)
        if self._tally is not None:
            self._tally.known.update(bad_records)

    def _content(self) -> str | None:
        if self.known_content is None:
            # Without its slot of readers: this one reads and is gone.
            with contextlib.suppress(StallscopeError, OSError), open_data(replace(self.spec, lock=False)) as source:
                self.known_content = content(source, tolerant=True)
        return self.known_content

    def identity(self) -> dict[str, Any]:
        """What the data set is (path, backend, records, and what changes with its content)."""
        return dict(self._identity)

    def stats(self) -> dict[str, Any]:
        """Figures so far: batches and items delivered, nanoseconds waited, lost workers, slots in each state, and the
        records that could not be used (None with ``on_bad_record: stop``, which ends at the first).

        ``slots["ready"]`` near the depth: the consumer is the slower side; near 0: the workers are. ``tuning``: with
        ``auto``, whether workers and depth are settled, and each decision with its step and reason.
        """
        engine = self._engine
        return {
            "engine": self.spec.engine,
            "batches": self._delivered,
            "items": self._items,
            "wait_ns": self._wait_ns,
            "restarts": engine.restarts if engine else self._restarts,
            "workers": engine.pids if engine else [],
            "depth": self._depth_now(),
            "tuning": engine.tuning() if engine else self._tuning,
            "slots": engine.ring.counts() if engine else {},
            "slot_bytes": self.probe.layout.nbytes,
            "bad_records": self._tally.stats() if self._tally else None,
        }


def _close(engine: Engine, pid: int) -> None:
    """End what a feed has started, where it was started: a forked copy must not end its parent's workers."""
    if os.getpid() == pid:
        engine.close()
