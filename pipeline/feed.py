"""The consumer's side of the feed: batches in strict order, each a view of a slot of the ring.

    with Feed(config) as feed:
        for batch in feed:
            ...                      # batch.data, batch.labels, batch.ids: valid until the batch is given back

A batch is given back by ``batch.release()``, and in any case when the next one is asked for, unless ``batch.hold()``
was called: whoever holds must release. The position is one number, ``next_step``; it is all that a resume needs.
``peek()`` shows a batch that is ready before its turn, so that its copy to a device can begin; that moves no position.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from pipeline import bad_records
from pipeline.crew import FeedError
from pipeline.engines import Engine, engine_of, start_depth
from pipeline.maker import Slot, probe, stream_of
from pipeline.ring import Ready
from pipeline.spec import FeedSpec, Phase, feed_spec
from pipeline.transforms import Transform
from pipeline.worker import open_data
from profiler.errors import StallscopeError, UsageError
from profiler.events import Flag, Stage
from profiler.recorder import NULL, Recorder

if TYPE_CHECKING:
    from pipeline.config import Config


class Batch:
    """One batch, in its slot. Its arrays are views that end with :meth:`release`.

    Attributes
    ----------
    step, epoch: position in the stream; epoch is that of the first item.
    data: float32[B, C, H, W], or uint8 where the spec says so (``pixels``); labels: int32[B] or float32[B, K].
    ids, epochs: int64[B], record and epoch of each item.
    hashes: of ids, ids_set, raw, raw_set, fill (see docs/design.md); empty when fingerprints are off.
    """

    def __init__(self, feed: Feed, ready: Ready, slot: Slot) -> None:
        self._feed: Feed | None = feed
        self._slot: Slot | None = slot
        self._count = ready.items
        self._held = False
        self._bad: list[Any] = []
        if slot.bad is not None and slot.bad_count is not None and slot.bad_count[0]:
            self._bad = bad_records.read_rows(slot.bad, slot.bad_count)
        self._blobs = feed.probe.blobs
        self._ready = ready
        self.step, self.epoch, self.slot = ready.step, ready.epoch, ready.slot
        self.hashes = ready.hashes

    def __len__(self) -> int:
        return self._count

    @property
    def data(self) -> np.ndarray:
        return self._live().samples(self._count)

    @property
    def labels(self) -> np.ndarray:
        return self._live().labels[: self._count]

    @property
    def blobs(self) -> list[np.ndarray]:
        """The arrays as a net takes them: data and labels, or what a source with shapes of its own says."""
        shapes = self._blobs
        if not shapes:
            return [self.data, self.labels]
        arrays, at = [self.data.reshape(self._count, *shapes[0])], 0
        labels = self.labels.reshape(self._count, -1)
        for shape in shapes[1:]:
            part = np.ascontiguousarray(labels[:, at : at + math.prod(shape)])
            arrays.append(part.reshape(self._count, *shape))
            at += math.prod(shape)
        return arrays

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._live().ids[: self._count]

    @property
    def epochs(self) -> NDArray[np.int64]:
        return self._live().epochs[: self._count]

    def hold(self) -> Self:
        """Keep the batch beyond the next one; :meth:`release` must be called later."""
        self._held = True
        return self

    def release(self) -> None:
        """Give the slot back; it may be filled again at once. Idempotent.

        In the thread that takes the batches; of a batch that is held, in one other.
        """
        feed = self._feed
        self._forget()
        if feed is not None:
            feed._release(self)

    def _forget(self) -> None:
        """Refuse to be read from now on, and keep no memory of the ring."""
        self._feed = self._slot = None

    def _live(self) -> Slot:
        if self._slot is None:
            raise FeedError(
                f"the batch of step {self.step} was given back, its slot may hold another one by now",
                hint="copy what is needed before release(), or call batch.hold() before the next batch is asked for",
            )
        return self._slot


class Feed:
    """An iterable of :class:`Batch` in the order of steps; a context manager.

    Parameters
    ----------
    config: a job's configuration, or a :class:`FeedSpec`, which then decides everything.
    phase: which data set of the configuration.
    start_step, stop_step: first step, and first step that is not made; None: endless.
    recorder: records FEED_WAIT spans in the consumer's thread and notes about workers.
    cycle: of a TEST feed: step s stands for step s mod cycle. origin: the step that gets the stream's first batch.

    Record 0 is read here to settle the shapes; processes start at the first batch or at ``with``.
    """

    def __init__(
        self,
        config: Config | FeedSpec,
        phase: Phase = "TRAIN",
        start_step: int = 0,
        stop_step: int | None = None,
        recorder: Recorder = NULL,
        *,
        cycle: int | None = None,
        origin: int = 0,
    ) -> None:
        if isinstance(config, FeedSpec):
            self.spec = config
        else:
            self.spec = feed_spec(config, phase, start_step, stop_step, recorder, cycle, origin)
        self.recorder = recorder
        source = open_data(self.spec)
        try:
            self.probe = probe(self.spec, source)
            self._identity, name = source.identity(), source.name
        finally:
            source.close()
        self.spec = replace(self.spec, identity=self._identity)  # whoever else opens it must find the same
        self._stream = stream_of(self.spec, self.probe.records)
        self._next_step = self.spec.start_step
        self._engine: Engine | None = None
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
        return self._stream.steps_per_epoch

    @property
    def next_step(self) -> int:
        """The step of the batch that comes next."""
        return self._next_step

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._last is not None and not self._last._held:
            self._last.release()
        self._last = None
        step = self._next_step
        if self._failed is not None:
            raise self._failed
        if self.spec.stop_step is not None and step >= self.spec.stop_step:
            raise StopIteration
        flags = (Flag.FIRST if self._first else 0) | (Flag.TEST_PHASE if self.spec.phase == "TEST" else 0)
        began = time.monotonic_ns()
        with self.recorder.span(Stage.FEED_WAIT, step=step, flags=flags) as span:
            engine = self._started()
            batch = self._ahead.popleft() if self._ahead else self._leased(engine, engine.get(step))
            span.epoch, span.slot, span.items = batch.epoch, batch.slot, len(batch)
        self._count_time(engine, batch, began)
        if self._tally is not None:
            self._count_bad(self._tally, batch)
        self._first = False
        self._next_step = step + 1
        self._delivered += 1
        self._items += len(batch)
        self._last = batch
        return batch

    def peek(self, ahead: int = 0) -> Batch | None:
        """The batch that comes ``ahead`` places after the next one, if it is ready now; its turn stays its turn.

        The slot is leased from here on. None where the batch is not ready or there is none, and from an inline engine.
        """
        while len(self._ahead) <= ahead:
            step, stop = self._next_step + len(self._ahead), self.spec.stop_step
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
        while self._out:
            self._out.pop()._forget()
        if self._tally is not None:
            self._tally.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            self._restarts, self._tuning, self._depth = engine.restarts, engine.tuning(), engine.ring.depth
            engine.close()

    def _started(self) -> Engine:
        if self._closed:
            raise FeedError("this feed is closed", hint="open another one; state_dict() says where this one stood")
        if self._engine is None:
            self._engine = engine_of(self.spec, self.probe, self.recorder)
        return self._engine

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
        """Count what the batch says about bad records: here and not where it was made, so that the order is strict."""
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
        """Position, and all that gives it a meaning; plain JSON values."""
        spec = self.spec
        return {
            "next_step": self._next_step, "seed": spec.seed, "shuffle": spec.shuffle, "batch": spec.batch,
            "tail": spec.tail, "phase": spec.phase, "records": self.probe.records,
            "on_bad_record": spec.on_bad_record, "bad_records": sorted(self._tally.known) if self._tally else [],
            **({"origin": spec.origin} if spec.origin else {}),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another feed stood. Only before the first batch.

        Raises :class:`UsageError` where the state belongs to another stream.
        """
        if self._engine is not None or self._closed:
            raise UsageError("the position of a feed can only be set before it has started")
        mine = self.state_dict()
        for key in {**mine, "origin": None}:
            if key not in ("next_step", "bad_records") and state.get(key) != mine.get(key):
                raise UsageError(
                    f"the saved position belongs to another stream: {key} differs",
                    expected=mine.get(key),
                    found=state.get(key),
                    hint="resume with the same data set and data.* settings, or start anew",
                )
        self._next_step = int(state["next_step"])
        self.spec = self.spec.starting_at(self._next_step)
        self.remember_bad(state["bad_records"])

    def remember_bad(self, records: Iterable[int]) -> None:
        """Count these records as known to be bad: an earlier part of the run found them (``state_dict`` tells)."""
        if self._tally is not None:
            self._tally.known.update(records)

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
