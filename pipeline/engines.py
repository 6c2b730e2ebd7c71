"""What fills the ring: the consumer's own thread, or worker actors. Both use the same ring and the same BatchMaker."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from pipeline import adaptive
from pipeline.crew import Crew, FeedError, Launcher
from pipeline.emission import OVERTAKE
from pipeline.maker import BatchMaker, LocalReader, Probe, Slot, stream_of
from pipeline.ring import POLL_S, Blocked, Claim, Ready, Ring
from pipeline.ring_arrival import ArrivalRing
from pipeline.shared import RingError
from pipeline.spec import FeedSpec
from pipeline.threads import ThreadCrew
from pipeline.tracebacks import forget_arrays
from pipeline.worker import open_data
from profiler.events import Flag, Kind, Stage
from profiler.osread import available_memory, usable_cpus
from profiler.recorder import Recorder

if TYPE_CHECKING:
    from datasets.source import Source


_LOOK_S = 0.2  # between two looks at workers whose batches come in time


class Engine(Protocol):
    """A ring, and something that fills it."""

    ring: Ring
    slots: list[Slot]

    @property
    def restarts(self) -> int: ...

    @property
    def pids(self) -> list[int]: ...

    def get(self, step: int) -> Ready:
        """Wait for the batch of a step and lease it; steps come in order. With ``emit: arrival`` step is the oldest
        that was not leased, and another batch of its epoch may be ready before."""
        ...

    def get_ready(self, step: int) -> Ready | None:
        """:meth:`get` where the batch is ready now, else None; also for steps after the next."""
        ...

    def warm_up(self, step: int, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Wait until the batch of ``step`` is ready, for at most ``timeout_s`` or until ``cancelled``."""
        ...

    def delivered(self, ready: Ready, *, step_ns: int, wait_ns: int, held: int) -> None:
        """The consumer has taken a batch: what it did before, how long it waited, and how many it now holds."""
        ...

    def tuning(self) -> dict[str, Any] | None:
        """What was decided about workers and depth so far; None where the user said all."""
        ...

    def close(self) -> None:
        """End all that was started; idempotent."""
        ...


def start_depth(spec: FeedSpec, workers: int) -> int:
    """Slots of a feed's ring to begin with; ``workers``: 0 where the consumer makes its batches itself."""
    return adaptive.start_depth(workers) if spec.depth == "auto" else spec.depth


def _ring(spec: FeedSpec, probed: Probe, workers: int) -> tuple[Ring, list[Slot]]:
    nbytes, depth = probed.layout.nbytes, start_depth(spec, workers)
    most = adaptive.most_depth(depth, nbytes, available_memory()) if spec.depth == "auto" else depth
    kind = ArrivalRing if spec.emit == "arrival" and workers else Ring  # one maker makes them in order
    ring = kind.create(
        depth, nbytes, most=most, start_step=spec.start_step, stop_step=spec.stop_step, poison=spec.poison,
        given=spec.given,
    )  # fmt: skip
    if isinstance(ring, ArrivalRing):
        stream = stream_of(spec, probed.records)
        ring.epoch_end = lambda step: spec.origin + stream.first_step(stream.epoch_of(spec.place(step)) + 1)
    return ring, [probed.layout.views(ring.payload(index)) for index in range(ring.capacity)]


def _not_held(ring: Ring, step: int) -> None:
    """See to it that the consumer does not wait for a slot that it keeps itself: it would wait for ever.

    Takes slots that were not in use yet, where there are some; raises :class:`FeedError` where there are none.
    """
    if ring.is_leased(step):
        for depth in range(ring.depth + 1, ring.capacity + 1):
            if ring.arrival or step % depth >= ring.depth:
                ring.grow(depth)
                return
        raise FeedError(
            f"step {step} needs {'a slot' if ring.arrival else f'the slot of step {step - ring.depth}'}, "
            "which the consumer still holds",
            expected=f"a feed.depth larger than the {ring.counts()['leased']} batches held",
            found=f"feed.depth {ring.depth}",
            hint="release held batches earlier, or a larger feed.depth",
        )


class InlineEngine:
    """Each batch is made by the consumer's thread when it asks for it. No other process, no Ray."""

    restarts = 0
    pids: list[int] = []  # noqa: RUF012  # never changed

    def __init__(self, spec: FeedSpec, probed: Probe, recorder: Recorder, source: Source | None = None) -> None:
        self._recorder = recorder
        self._source = open_data(spec) if source is None else source
        self._maker = BatchMaker(spec, probed, LocalReader(self._source), recorder)
        self._maker.warm_up()
        self._as_in_a_worker = _one_blas_thread(spec, self._source)
        self._unfinished: Claim | None = None
        self.ring, self.slots = _ring(spec, probed, 0)
        self.ring.enter(0)

    def get(self, step: int) -> Ready:
        _not_held(self.ring, step)
        claim = self._unfinished or self.ring.claim(0)
        if isinstance(claim, Blocked) or claim.step != step:
            raise FeedError(f"step {step} cannot be made now", found=str(claim))
        self._unfinished = claim  # an error or an interrupt leaves it so, and the step is made anew when asked for
        recorder, flags = self._recorder, Flag.INLINE
        with recorder.span(Stage.BATCH, step=step, slot=claim.slot, flags=flags) as span:
            try:
                with self._as_in_a_worker():
                    made = self._maker.make(step, self.slots[claim.slot], index=claim.slot, flags=flags)
            except BaseException as error:
                forget_arrays(error)
                raise
            span.epoch, span.items = made.epoch, made.items
            at = self.ring.ready(0, claim, items=made.items, epoch=made.epoch, hashes=made.hashes)
            self._unfinished = None
        recorder.add(Kind.MARK, Stage.READY, at, at, step=step, epoch=made.epoch, slot=claim.slot, flags=flags)
        return self.ring.lease(step)

    def get_ready(self, step: int) -> None:
        """Nothing is made before it is asked for."""

    def warm_up(self, step: int, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Nothing to wait for: batches are made when they are asked for."""

    def delivered(self, ready: Ready, *, step_ns: int, wait_ns: int, held: int) -> None:
        """Nothing to decide: more slots than are held serve nobody."""

    def tuning(self) -> None:
        """Nothing was decided."""

    def close(self) -> None:
        self.slots = []
        self.ring.close()
        self._source.close()


def _one_blas_thread(spec: FeedSpec, source: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """While a batch is made, the one BLAS thread that a worker has: the bits of a product, which the user's code may
    ask for, depend on the number."""
    if not spec.transform.python and source.backend != "python":
        return contextlib.nullcontext
    import threadpoolctl

    found = threadpoolctl.ThreadpoolController()
    return lambda: found.limit(limits=1, user_api="blas")


class AheadEngine:
    """A crew fills the ring; the consumer waits, and looks after it while it does.

    Parameters
    ----------
    gather: makes the crew for the ring that was made here.
    workers: to begin with; most: how many there may come to be.
    """

    def __init__(
        self, spec: FeedSpec, probed: Probe, recorder: Recorder, gather: Callable[[Ring], Any], workers: int, most: int
    ) -> None:
        self._recorder, self._phase = recorder, spec.phase
        self._looked_s = 0.0
        with contextlib.ExitStack() as stack:
            self.ring, self.slots = _ring(spec, probed, workers)
            stack.callback(self.ring.close)
            self._crew = gather(self.ring)
            fewest = workers if most <= workers else 1
            self._tuner = adaptive.Tuner(
                adaptive.Limits((fewest, max(most, workers)), (self.ring.depth, self.ring.capacity))
            )
            self._tuner.wait(2 * self.ring.depth)
            if self.ring.arrival:
                most_ahead = OVERTAKE * self.ring.depth
                recorder.note("emission", emit="arrival", phase=spec.phase, most_ahead=most_ahead)
            stack.pop_all()

    @property
    def restarts(self) -> int:
        return self._crew.restarts

    @property
    def pids(self) -> list[int]:
        return self._crew.pids

    def get(self, step: int) -> Ready:
        return self.ring.lease(self._wait(step, lambda: False))

    def get_ready(self, step: int) -> Ready | None:
        self._look()
        turn = self.ring.turn(step)
        return self.ring.lease(turn) if turn >= 0 else None

    def warm_up(self, step: int, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        self._wait(step, lambda: cancelled() or time.monotonic() > deadline)

    def delivered(self, ready: Ready, *, step_ns: int, wait_ns: int, held: int) -> None:
        tuner, crew = self._tuner, self._crew
        if tuner.settled:
            return
        if not crew.all_started:  # what is measured now says nothing of what they will do together
            tuner.wait(self.ring.depth)
            return
        decision = tuner.delivered(
            ready.step, crew.size, self.ring.depth, make_ns=ready.making_ns, step_ns=step_ns, wait_ns=wait_ns, held=held
        )
        if decision is None:
            return
        if decision.depth > self.ring.depth:
            try:
                self.ring.grow(decision.depth)
            except RingError as error:  # it goes on with the slots that it has
                tuner.refused(workers=decision.workers, depth=self.ring.depth, why=error.what)
        crew.resize(decision.workers)
        made = tuner.decisions[-1]
        settings = f"{made['workers']} workers and {made['depth']} slots"
        text = f"From step {made['step']} on the {self._phase} feed has {settings}"
        text += f" ({'final' if made['final'] else 'before: {workers} and {depth}'.format(**made['before'])})"
        self._recorder.note("feed_tuned", phase=self._phase, text=f"{text}: {made['reason']}.", **made)

    def tuning(self) -> dict[str, Any] | None:
        tuner = self._tuner
        return {"settled": tuner.settled, "decisions": list(tuner.decisions)} if tuner.decides else None

    def _look(self) -> None:
        """Look after the workers, and what runs them, while batches are ready: now and then, for it costs calls."""
        now = time.monotonic()
        if now - self._looked_s >= _LOOK_S:
            self._looked_s = now
            self._check()
            self._crew.notice()

    def _wait(self, step: int, enough: Callable[[], bool]) -> int:
        """The step to lease, -1 after ``enough``."""
        self._look()
        waited_s = 0.0
        while (turn := self.ring.turn(step)) < 0 and not enough():
            _not_held(self.ring, step)
            before = time.monotonic()
            self.ring.wait_ready(POLL_S, also=self._crew.fds)
            if (turn := self.ring.turn(step)) >= 0:
                return turn
            self._check()
            waited_s += min(time.monotonic() - before, 5 * POLL_S)  # a pause of the whole job is no waiting
            self._crew.watch(step, waited_s)
        return turn

    def _check(self) -> None:
        """Raise what is wrong with the system that runs the workers."""

    def close(self) -> None:
        self.slots = []
        with contextlib.ExitStack() as stack:
            stack.callback(self.ring.close)
            self.ring.stop()
            self._crew.close()


class CrewEngine(AheadEngine):
    """Worker processes fill the ring. ``launch`` makes the launcher for the ring's address."""

    def __init__(
        self, spec: FeedSpec, probed: Probe, recorder: Recorder, launch: Any, workers: int, most: int = 0
    ) -> None:
        stream = stream_of(spec, probed.records)

        def batch_of(step: int) -> dict[str, Any]:
            items = stream.at(spec.place(step))
            return {"epoch": int(items.epochs[0]), "records": [int(items.records[0]), int(items.records[-1])]}

        def gather(ring: Ring) -> Crew:
            with contextlib.ExitStack() as stack:
                launcher: Launcher = launch(ring.address)
                stack.callback(launcher.close)
                crew = Crew(ring, spec, launcher, workers, recorder, batch_of)
                stack.pop_all()
            return crew

        super().__init__(spec, probed, recorder, gather, workers, most if spec.workers == "auto" else workers)


class ThreadEngine(AheadEngine):
    """Threads of this process fill the ring."""

    def __init__(self, spec: FeedSpec, probed: Probe, recorder: Recorder) -> None:
        most = usable_cpus() if spec.threads == "auto" else spec.threads
        begin = 1 if spec.threads == "auto" else spec.threads
        super().__init__(
            spec, probed, recorder, lambda ring: ThreadCrew(ring, spec, probed, begin, recorder), begin, most
        )


def engine_of(spec: FeedSpec, probed: Probe, recorder: Recorder, source: Source | None = None) -> Engine:
    """The engine that a feed asks for. ``source``: its data set, where it is open already; an inline one takes it."""
    if spec.engine == "ray":
        return RayEngine(spec, probed, recorder)
    return ThreadEngine(spec, probed, recorder) if spec.threads else InlineEngine(spec, probed, recorder, source)


class RayEngine(CrewEngine):
    """Workers are Ray actors on this node. Starts a Ray of its own where none is up, and stops that one again."""

    def __init__(self, spec: FeedSpec, probed: Probe, recorder: Recorder) -> None:
        from pipeline import actors, elsewhere, placement, ray_runtime

        with contextlib.ExitStack() as stack:
            stack.enter_context(ray_runtime.running())
            plan = placement.plan(spec, actors.node_cpus(), owner=spec.topology == "split")
            elsewhere.prepare(spec, probed, recorder, stack)
            super().__init__(
                spec, probed, recorder, lambda address: actors.RayLauncher(spec, probed, address, plan),
                plan.carriers + plan.workers, plan.carriers + plan.most,
            )  # fmt: skip
            self._runtime = stack.pop_all()
        self._check = ray_runtime.check  # type: ignore[method-assign]

    def close(self) -> None:
        with self._runtime:
            super().close()
