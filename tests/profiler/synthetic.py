"""A small discrete-event simulation of a job, which writes the events a real one would: runs whose truth is known.

It works by an event queue (workers, slots, a consumer), unlike the replay's recurrence, so agreement means
something. Removing a fault here and simulating again gives the truth that an attribution is judged by.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from profiler.events import EVENT, LATER, Flag, Kind, Stage

MS = 1_000_000
T0 = 1_000_000 * MS
STAGES = (Stage.READ, Stage.DECODE, Stage.FUNCTION, Stage.AUGMENT, Stage.COLLATE)


@dataclass(frozen=True)
class Job:
    """What is simulated. Times in ms; a ``slow`` function maps a step to added ms per stage name."""

    steps: int = 200
    workers: int = 1
    depth: int = 8
    compute: float = 20.0
    read: float = 1.0
    decode: float = 1.0
    function: float = 0.0  # the user's own: few jobs have one
    augment: float = 0.2
    collate: float = 0.2
    h2d: float = 0.1  # of a device that copies when it is told to; with ``copy``, an engine does
    copy: float = 0.0
    staging: int = 2  # with ``copy``: buffers on the device, all but one for batches ahead of their steps
    host: float = 0.05
    profiler: float = 0.0  # of the loop: fingerprints
    gap: float = 0.02  # unattributed time of a step
    jitter: float = 0.0
    startup: float = 0.0
    inline: bool = False
    test_every: int = 0
    test: float = 50.0
    checkpoint_every: int = 0
    checkpoint: float = 100.0
    blocked: bool = False  # reads wait for storage: little CPU, blocks read
    runq: float = 0.0  # of each decode, ms that the thread was runnable but not running
    release_late: bool = False  # the slot is given back at the step's end instead of after the copy
    arrival: bool = False  # without ``copy``: the consumer takes what is ready first
    epoch_steps: int = 0  # with ``arrival``: steps of an epoch, all of which come before the next; 0: one epoch
    kill_worker_at: int = -1
    restart: float = 300.0
    stop_at: float | None = None  # the job is killed at this moment: spans in progress stay open
    readings: bool = True
    first_step: int = 0
    origin: int = T0
    slow: Callable[[int], dict[str, float]] | None = None
    seed: int = 0

    def without(self, **changes: Any) -> Job:
        return dataclasses.replace(self, **changes)


@dataclass
class Log:
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, kind: int, stage: int, t0: float, t1: float, step: int, *, actor: int = 0, flags: int = 0,
        slot: int = -1, cpu: float = -1, runq: float = -1, inblock: float = -1, origin: int = T0, faults: int = -1,
        waits: int = -1, items: int = 64, epoch: int = 0,
    ) -> None:  # fmt: skip
        """One event; times and readings in ms, -1 for a missing reading."""
        times = (origin + round(t0 * MS), origin + round(t1 * MS))
        readings = [round(ms * MS) if ms >= 0 else -1 for ms in (cpu, runq)]
        counts = (int(inblock), items, 0, faults, waits)
        self.rows.append((kind, stage, flags, actor, epoch, slot, step, *times, *readings, *counts))

    def events(self) -> np.ndarray:
        missing = (-1,) * len(LATER)
        return np.array([(*row, *missing)[: len(EVENT)] for row in self.rows], EVENT)


def simulate(job: Job) -> Log:
    """Run the job and return its events and notes."""
    return (_inline if job.inline else _fed)(job)


def wall_s(log: Log) -> float:
    """Total length of the steps, seconds."""
    events = log.events()
    steps = events[events["stage"] == Stage.STEP]
    return float((steps["t1_ns"] - steps["t0_ns"]).sum()) / 1e9


def stall_s(log: Log, job: Job) -> float:
    """Wall time less compute, seconds (for jobs without tests)."""
    return wall_s(log) - job.steps * job.compute / 1e3


def write_run(folder: Path, log: Log, *, manifest: dict[str, Any] | None = None, closed: bool = True) -> Path:
    """A run folder with one event stream per actor, as the recorder writes them."""
    import json

    from profiler import store, streams

    store.write_manifest(folder, manifest or {})
    events = log.events()
    for actor in np.unique(events["actor"]).tolist():
        name, pid = ("trainer", 1000) if actor == 0 else (f"worker-{actor}", 1000 + actor)
        identity = {
            "name": name, "role": name.split("-")[0], "actor": str(actor), "pid": str(pid), "host": "host",
            "boot_id": "boot", "monotonic_ns": str(T0), "wall_ns": str(T0), "detail": "full",
        }  # fmt: skip
        stream = streams.StreamFile(folder / "events", f"{name}-{pid}", streams.EVENTS, identity)
        stream.append_events(events[events["actor"] == actor].tobytes())
        if closed:
            stream.close()
    lines = "".join(json.dumps(note) + "\n" for note in log.notes)
    (folder / "events" / "trainer-1000.jsonl").write_text(lines)
    return folder


def _stage_ms(job: Job, step: int) -> dict[str, float]:
    """ms of each stage of a batch: a function of job and step alone."""
    rng = random.Random(job.seed * 1_000_003 + step)
    extra = job.slow(step) if job.slow else {}
    out = {}
    for stage in STAGES:
        name = stage.name.lower()
        if stage == Stage.FUNCTION and not job.function:
            continue
        ms = getattr(job, name) * (1 + job.jitter * rng.uniform(-1, 1))
        out[name] = max(0.0, ms + extra.get(name, 0.0))
    return out


def _make(log: Log, job: Job, step: int, at: float, actor: int, slot: int, flags: int = 0) -> float:
    """Write the spans of making one batch from ``at`` on; returns when it is ready."""
    begin, used = at, 0.0
    for stage in STAGES:
        ms = _stage_ms(job, step).get(stage.name.lower())
        if ms is None:
            continue
        runq = min(job.runq, ms) if stage == Stage.DECODE else 0.0
        blocked = job.blocked and stage == Stage.READ
        cpu = 0.1 * ms if blocked else ms - runq
        reading = {"cpu": cpu, "runq": runq, "inblock": 40 if blocked else 0} if job.readings else {}
        log.add(Kind.SPAN, stage, at, at + ms, step, actor=actor, slot=slot, flags=flags, origin=job.origin, **reading)
        at += ms
        used += cpu
    used = used if job.readings else -1
    log.add(Kind.SPAN, Stage.BATCH, begin, at, step, actor=actor, slot=slot, flags=flags, cpu=used, origin=job.origin)
    log.add(Kind.MARK, Stage.READY, at, at, step, actor=actor, slot=slot, flags=flags, origin=job.origin)
    return at


def _copy(log: Log, job: Job, step: int, at: float, slot: int, free: float) -> float:
    """A copy that is asked for at ``at`` from an engine that is free at ``free``; returns when it is over."""
    begin = max(at, free)
    log.add(Kind.SPAN, Stage.COPY, begin, begin + job.copy, step, slot=slot, flags=Flag.EMULATED, origin=job.origin)
    if not job.inline:
        log.add(Kind.MARK, Stage.RELEASE, begin + job.copy, begin + job.copy, step, slot=slot, origin=job.origin)
    return begin + job.copy


def _after_batch(
    log: Log, job: Job, step: int, begin: float, got: float, slot: int, arrived: float | None = None, batch: int = -1
) -> tuple[float, float]:
    """The step from the batch in hand to its end: returns (moment of the slot's release, end).

    ``arrived``: when an engine has copied it. ``batch``: its number, where that is not the step's.
    """
    batch = step if batch < 0 else batch
    add = lambda stage, a, b, flags=0: log.add(Kind.SPAN, stage, a, b, step, flags=flags, origin=job.origin)  # noqa: E731
    at = got
    wait = job.h2d if arrived is None else arrived - got
    if wait > 0:
        add(Stage.H2D, at, at + wait)
    at += wait
    release = at
    add(Stage.COMPUTE, at, at + job.compute, Flag.EMULATED)
    at += job.compute
    add(Stage.HOST, at, at + job.host)
    at += job.host
    if job.profiler:
        add(Stage.HOST, at, at + job.profiler, Flag.PROFILER)
        at += job.profiler
    if job.test_every and (step + 1) % job.test_every == 0:
        add(Stage.TEST, at, at + job.test)
        add(Stage.FEED_WAIT, at, at + job.test / 2, Flag.TEST_PHASE)
        add(Stage.FORWARD, at + job.test / 2, at + job.test, Flag.TEST_PHASE)
        at += job.test
    if job.checkpoint_every and (step + 1) % job.checkpoint_every == 0:
        add(Stage.CHECKPOINT, at, at + job.checkpoint)
        at += job.checkpoint
    at += job.gap
    if job.release_late:
        release = at
    if arrived is None:
        log.add(Kind.MARK, Stage.RELEASE, release, release, batch, slot=slot, origin=job.origin)
    epoch = batch // job.epoch_steps if job.epoch_steps else 0
    log.add(Kind.SPAN, Stage.STEP, begin, at, step, epoch=epoch, origin=job.origin)
    return release, at


def _inline(job: Job) -> Log:
    log, at = Log(), 0.0
    for step in range(job.first_step, job.first_step + job.steps):
        got = _make(log, job, step, at, 0, 0, Flag.INLINE) + 0.01
        log.add(Kind.SPAN, Stage.FEED_WAIT, at, got, step, origin=job.origin)
        arrived = _copy(log, job, step, got, 0, 0.0) if job.copy else None
        _, at = _after_batch(log, job, step, at, got, 0, arrived)
    return log


def _fed(job: Job) -> Log:
    """Event queue: ('worker', w) asks for work, ('ready', step), ('slot',) freed, ('consume',), ('arrived', step)."""
    log = Log()
    queue: list[tuple[float, int, str, int]] = []
    serial = 0

    def push(at: float, what: str, number: int) -> None:
        nonlocal serial
        serial += 1
        heapq.heappush(queue, (at, serial, what, number))

    last = job.first_step + job.steps
    next_step, wanted = job.first_step, job.first_step
    redo: list[int] = []
    free, idle, ready = list(range(job.depth)), [], {}
    slot_of: dict[int, int] = {}
    begin = waiting_since = taken = 0.0
    waiting = True
    engine, copied = 0.0, {}  # when the copy engine is free, and when each batch's copy is over
    worker_ids = {w: w + 1 for w in range(job.workers)}
    for w in range(job.workers):
        push(job.startup, "worker", w)
    while queue:
        at, _, what, number = heapq.heappop(queue)
        if what == "worker":
            idle.append(number)
        elif what == "slot":
            free.append(number)
            free.sort()
        elif what == "ready":
            ready[number] = at
        elif what == "consume":
            waiting, begin, waiting_since = True, at, at
        elif what == "arrived":
            for following in range(number + 1, number + job.staging):
                if following not in ready:
                    break
                if following not in copied:
                    engine = copied[following] = _copy(log, job, following, at, slot_of[following], engine)
                    push(engine, "slot", slot_of[following])
            _, end = _after_batch(log, job, number, begin, taken, slot_of[number], at)
            wanted = number + 1
            if wanted < last:
                push(end, "consume", 0)
        while idle and ((next_step < last and free) or redo):
            w = idle.pop(0)
            again = bool(redo)
            step = redo.pop(0) if again else next_step
            if not again:
                slot_of[step] = free.pop(0)
                next_step += 1
            if step == job.kill_worker_at and not again:
                # The worker dies 5 ms into the batch; its span stays open and a new process takes the step over.
                who = worker_ids[w]
                log.add(Kind.OPEN, Stage.BATCH, at, at + 5, step, actor=who, slot=slot_of[step], origin=job.origin)
                moment = job.origin + round((at + 5) * MS)
                note = {"note": "worker_lost", "step": step, "signal": "SIGKILL", "worker": who, "t_ns": moment}
                log.notes.append({**note, "wall_ns": 1})
                log.add(Kind.SPAN, Stage.RESTART, at + 5, at + 5 + job.restart, -1, actor=who + 100, origin=job.origin)
                worker_ids[w] += 100
                redo.append(step)
                push(at + 5 + job.restart, "worker", w)
                break
            flags = Flag.REDO if again else 0
            done = _make(log, job, step, at, worker_ids[w], slot_of[step], flags)
            push(done, "ready", step)
            push(done, "worker", w)
        its = wanted  # the batch of this turn
        if waiting and job.arrival:
            length = job.epoch_steps or 1 << 60
            left = [step for step in ready if step // length == wanted // length]
            its = min(left, key=lambda step: ready[step], default=-1)
        if waiting and its in ready:
            got = max(at, waiting_since) + 0.01
            waiting = False
            log.add(Kind.SPAN, Stage.FEED_WAIT, waiting_since, got, wanted, slot=slot_of[its], origin=job.origin)
            if job.arrival:
                del ready[its]
            if its != wanted:
                log.add(Kind.MARK, Stage.ORDER, got, got, wanted, slot=slot_of[its], items=its, origin=job.origin)
            if job.copy:
                taken = got
                if wanted not in copied:
                    engine = copied[wanted] = _copy(log, job, wanted, got, slot_of[wanted], engine)
                    push(engine, "slot", slot_of[wanted])
                push(max(got, copied[wanted]), "arrived", wanted)
                continue
            release, end = _after_batch(log, job, wanted, begin, got, slot_of[its], batch=its)
            push(release, "slot", slot_of[its])
            wanted += 1
            if wanted < last:
                push(end, "consume", 0)
    if job.stop_at is not None:
        _cut(log, job)
    return log


def _cut(log: Log, job: Job) -> None:
    """Kill everything at ``stop_at``: finished spans stay, spans in progress are open, later ones never were."""
    limit = job.origin + round((job.stop_at or 0) * MS)
    rows = []
    for row in log.rows:
        if row[8] <= limit:
            rows.append(row)
        elif row[7] < limit and row[0] == Kind.SPAN:
            rows.append((Kind.OPEN, *row[1:8], limit, -1, -1, -1, *row[12:]))
    log.rows[:] = rows
