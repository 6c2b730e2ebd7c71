"""Service times: how long each batch needed in each stage, and what the trainer did before and after taking it.

The replay (:mod:`profiler.replay`) is driven by these numbers, and blame is given to what owns them. A *cause* is a
column of every matrix here. Most have the name of a place in ``events.WHERE``; three are not services of a stage:
``startup`` (workers not ready when the loop began), ``fault`` (time lost with a worker) and ``handoff`` (a slot was
free, or a batch ready, and the other side had not noticed yet). Three more keep the trainer's own time apart from
the feed's: ``unattributed``, ``trainer_gc`` and ``profiler`` (fingerprints); ``PLACE`` says where reports put them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler.copies import Copies, copies
from profiler.events import Flag, Kind, Stage
from profiler.timeline import PART, Nesting, Timeline, is_span, nest, resolve_open

CAUSES = (
    "storage", "read", "decode", "augment", "function", "collate", "transfer", "h2d", "sync", "cpu_contention",
    "gc", "alloc", "host", "checkpoint", "unknown", "startup", "fault", "handoff", "unattributed", "trainer_gc",
    "profiler",
)  # fmt: skip
CAUSE = {name: index for index, name in enumerate(CAUSES)}
PLACE = {"unattributed": "unknown", "trainer_gc": "gc", "profiler": "host"}
SIDE = {
    **dict.fromkeys(("sync", "alloc", "host", "checkpoint", "unattributed", "trainer_gc"), "loop"),
    "profiler": "profiler",
}
"""Whose time a cause takes: the loop's own or the profiler's in it; all others are waiting for data ("data")."""
FEED_CAUSES = ("storage", "read", "decode", "augment", "function", "collate", "transfer")
_OF_STAGE = {
    Stage.READ: "read", Stage.DECODE: "decode", Stage.AUGMENT: "augment", Stage.FUNCTION: "function",
    Stage.COLLATE: "collate", Stage.TRANSFER: "transfer", Stage.GC: "gc", Stage.BATCH: "unknown",
}  # fmt: skip
_OF_PART = {
    "h2d": "h2d", "sync": "sync", "host": "host", "checkpoint": "checkpoint", "alloc": "alloc", "gc": "trainer_gc",
    "unattributed": "unattributed",
}  # fmt: skip
_MAKING = (Stage.READ, Stage.DECODE, Stage.AUGMENT, Stage.FUNCTION, Stage.COLLATE)
BLOCK = 512
"""Bytes of a block as ``ru_inblock`` counts them."""
_LATE_NS = 1_000_000  # a batch "ready" up to this much after it was taken is a clock reading, not another batch
_BIG = 1 << 62


@dataclass(frozen=True)
class Batches:
    """All training batches found in the record, in order of claim: one entry a batch.

    ``service_ns``: float64[m, len(CAUSES)], adds up to ``ready_ns - claim_ns``; ``tail_ns``: worker busy after ready.
    ``inblock``, ``faults``: blocks that reading took from storage, and pages that had to come from there in any stage
    (-1: no reading). ``outages``: int64[r, 2], from the loss of a worker to its replacement; ``cpu_share`` of the
    making.
    """

    step: np.ndarray
    actor: np.ndarray
    claim_ns: np.ndarray
    ready_ns: np.ndarray
    tail_ns: np.ndarray
    done: np.ndarray
    redo: np.ndarray
    inline: np.ndarray
    service_ns: np.ndarray
    inblock: np.ndarray
    faults: np.ndarray
    read_cpu_ns: np.ndarray
    slot: np.ndarray
    outages: np.ndarray
    cpu_share: float | None
    coverage: dict[str, float]

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class Model:
    """One uninterrupted part of a run, ready to be replayed. Times are float64 ns; matrices are [n, len(CAUSES)].

    A step of the replay: a worker claims (``gap`` after it could), makes (``make``), the trainer does ``pre``, waits,
    takes (``take``), works until it gives the slot back (``mid``) and until the step ends (``post``). With ``copies``
    a batch's copy runs beside that, ``mid`` ends where its arrays must have arrived, and the slot is free when the copy
    is over. The ``fixed`` vectors are compute and test: never zeroed. ``start_ns``: when each worker could first claim,
    from the first step's begin. ``serial``: the trainer makes each batch itself when it asks for it.
    ``known``: bool[n], batch in the record; ``redone``: bool[n], made again after a worker was lost. ``claims``:
    int64[n], the rows in the order in which their batches were claimed, where the trainer took them as they became
    ready; then ``epoch``: int64[n], of each row: none is taken before all of the one before. None: in order.
    """

    rows: np.ndarray
    gap: np.ndarray
    make: np.ndarray
    tail: np.ndarray
    pre: np.ndarray
    take: np.ndarray
    mid: np.ndarray
    post: np.ndarray
    fixed_pre: np.ndarray
    fixed_mid: np.ndarray
    fixed_post: np.ndarray
    lag: np.ndarray
    start_ns: np.ndarray
    depth: int
    serial: bool
    known: np.ndarray
    redone: np.ndarray
    batch: np.ndarray
    measured_ns: float
    copies: Copies | None = None
    claims: np.ndarray | None = None
    epoch: np.ndarray | None = None

    @property
    def workers(self) -> int:
        return len(self.start_ns)

    def per_step_ns(self) -> np.ndarray:
        """float64[n, len(CAUSES)]: service time of each step; a worker's start counts for the batch it began with."""
        service = self.gap + self.make + self.pre + self.take + self.mid + self.post
        if self.copies is not None:
            service[:, CAUSE["h2d"]] += self.copies.length
        first = np.minimum(np.arange(self.workers), len(service) - 1)
        np.add.at(service[:, CAUSE["startup"]], first, np.maximum(self.start_ns, 0))
        return service

    def total_ns(self) -> np.ndarray:
        """float64[len(CAUSES)]: all service time per cause."""
        return self.per_step_ns().sum(axis=0)


def batches(events: np.ndarray, timeline: Timeline) -> Batches:
    """Find the training batches and split the making of each by cause. ``events``: EVENT[n] of all processes."""
    events = resolve_open(events)
    pieces = []
    worker = events[(events["actor"] > 0) & is_span(events) & (events["stage"] < Stage.COPY)]
    for actor in np.unique(worker["actor"]).tolist():
        tree = nest(worker[worker["actor"] == actor])
        pieces.append(_of_thread(tree, np.ones(len(tree.events), bool)))
    inline = timeline.span_part == PART["feed_wait"]
    if (timeline.nesting.events["stage"][inline] == Stage.BATCH).any():
        pieces.append(_of_thread(timeline.nesting, inline | (timeline.nesting.events["stage"] == Stage.GC)))
    columns = [np.concatenate(column) for column in zip(*pieces, strict=True)] if pieces else None
    if columns is None or not len(columns[0]):
        empty = np.zeros(0, np.int64)
        none = np.zeros(0, bool)
        return Batches(empty, empty, empty, empty, empty, none, none, none, np.zeros((0, len(CAUSES))), empty, empty,
                       empty, empty, np.zeros((0, 2), np.int64), None, {})  # fmt: skip
    step, actor, t0, t1, kind, flags, slot, service, inblock, faults, cpu, whole_cpu = columns
    read = (whole_cpu >= 0) & (t1 > t0)
    used = [whole_cpu[read].sum() / (t1 - t0)[read].sum()] if read.any() else []
    ready = _ready(step, actor, t0, t1, events[events["stage"] == Stage.READY])
    # What is done between the mark and the end of the span keeps the worker busy, but the batch waits for it no more.
    service[:, CAUSE["unknown"]] += ready - t1
    short = np.minimum(service[:, CAUSE["unknown"]], 0)
    service[:, CAUSE["unknown"]] -= short
    service *= ((ready - t0) / np.maximum(service.sum(axis=1), 1))[:, None]
    order = np.argsort(t0, kind="stable")
    inner = [int(stage) for stage in _OF_STAGE if stage not in (Stage.GC, Stage.BATCH)]
    stage_spans = worker[np.isin(worker["stage"], inner)]
    if not len(stage_spans):
        own = timeline.nesting.events[inline]
        stage_spans = own[np.isin(own["stage"], inner)]
    coverage = (
        {n: float((stage_spans[n] >= 0).mean()) for n in ("cpu_ns", "runq_ns", "inblock", "major_faults")}
        if len(stage_spans)
        else {}
    )
    inside = ((flags & Flag.INLINE) > 0) | (actor == 0)
    gone = events[(events["stage"] == Stage.RESTART) & is_span(events)]
    return Batches(
        step[order], actor[order], t0[order], ready[order], np.maximum(t1 - ready, 0)[order],
        (kind == Kind.SPAN)[order], ((flags & Flag.REDO) > 0)[order], inside[order],
        service[order], inblock[order], faults[order], cpu[order], slot[order],
        np.stack([gone["t0_ns"], gone["t1_ns"]], axis=1), float(used[0]) if len(used) else None, coverage,
    )  # fmt: skip


def making(made: Batches) -> dict[str, Any]:
    """What making a batch took on average, hidden behind the steps or not: waiting for storage apart from the rest.

    ``ms_per_batch``: by cause; ``page_faults``, ``storage_bytes``: of all batches, None without a reading;
    ``reason``: why waiting for storage could not be told from reading.
    """
    if not len(made):
        return {"batches": 0, "ms_per_batch": {}, "reason": "no stage inside the feed was recorded"}
    mean = made.service_ns.mean(axis=0) / 1e6
    names = (*FEED_CAUSES, "cpu_contention", "gc", "unknown")
    told = made.coverage.get("cpu_ns")
    return {
        "batches": len(made),
        "ms_per_batch": {name: float(mean[CAUSE[name]]) for name in names},
        "page_faults": int(made.faults[made.faults >= 0].sum()) if (made.faults >= 0).any() else None,
        "storage_bytes": BLOCK * int(made.inblock[made.inblock >= 0].sum()) if (made.inblock >= 0).any() else None,
        "reason": None if told else "no CPU times were read, so waiting for storage is part of reading",
    }


def _of_thread(tree: Nesting, use: np.ndarray) -> tuple[np.ndarray, ...]:
    events = tree.events
    is_batch = (events["stage"] == Stage.BATCH) & use
    number = np.full(len(events), -1, np.int64)
    number[is_batch] = np.arange(is_batch.sum())
    for i, up in enumerate(tree.parent.tolist()):
        if number[i] < 0 and up >= 0:
            number[i] = number[up]
    rows = events[is_batch]
    m = len(rows)
    tests = np.zeros(m, bool)  # a test's batch: its span or any span inside says so
    tests[number[(number >= 0) & (events["flags"] & Flag.TEST_PHASE > 0)]] = True
    service = np.zeros((m, len(CAUSES)))
    waited = np.zeros(m, np.int64)
    inblock = np.full(m, -1, np.int64)
    faults = np.full(m, -1, np.int64)
    cpu = np.full(m, -1, np.int64)
    inside = (number >= 0) & use
    for stage, cause in _OF_STAGE.items():
        at = np.flatnonzero(inside & (events["stage"] == stage))
        own = tree.own_ns[at].astype(float)
        queued = np.clip(tree.own_runq_ns[at], 0, own)  # a missing reading (-1) takes nothing out
        np.add.at(service[:, CAUSE["cpu_contention"]], number[at], queued)
        rest = own - queued
        if stage in _MAKING:
            blocked = _storage_wait(tree, at, rest, reading=stage == Stage.READ)
            np.add.at(service[:, CAUSE["storage"]], number[at], blocked)
            rest = rest - blocked
            _add_reading(faults, number[at], tree.own_faults[at])
        if stage == Stage.READ:
            _add_reading(inblock, number[at], events["inblock"][at])
            _add_reading(cpu, number[at], tree.own_cpu_ns[at])
        np.add.at(service[:, CAUSE[cause]], number[at], rest)
    for stage in (Stage.SLOT_WAIT, Stage.LEASE_WAIT):  # waiting is no service, wherever the span was opened
        at = np.flatnonzero(inside & (events["stage"] == stage))
        np.add.at(waited, number[at], tree.own_ns[at])
    columns = (
        rows["step"], rows["actor"], rows["t0_ns"] + waited, rows["t1_ns"], rows["kind"], rows["flags"], rows["slot"],
        service, inblock, faults, cpu, rows["cpu_ns"],
    )  # fmt: skip
    return tuple(column[~tests] for column in columns)


def _storage_wait(tree: Nesting, at: np.ndarray, rest: np.ndarray, *, reading: bool) -> np.ndarray:
    """float64[len(at)], ns: how long the thread was blocked on storage in spans of a stage of the making.

    ``rest`` is their own time less what was spent ready to run; what is neither that nor CPU time, the thread was
    blocked. While records are read it waits for nothing but storage, whether a mapped page is missing, a read call
    does not return or a file system counts neither; there must be a sign of waiting, since a hypervisor takes time
    away too, and where a user's code reads, blocks or faults. In other stages (a user's function may sleep) only page
    faults are: their share of all waits. A missing reading takes nothing out.
    """
    events, busy, waits, faults = tree.events[at], tree.own_cpu_ns[at], tree.own_waits[at], tree.own_faults[at]
    blocked = np.where(busy >= 0, np.clip(rest - busy, 0, None), 0.0)
    if not reading:
        return blocked * np.clip(faults / np.maximum(waits, 1), 0, 1) * (waits > 0)
    told = (tree.own_runq_ns[at] >= 0) & (waits > 0) & (events["flags"] & Flag.OWN_CODE == 0)
    return np.where((events["inblock"] > 0) | (faults > 0) | told, blocked, 0.0)


def _add_reading(total: np.ndarray, where: np.ndarray, values: np.ndarray) -> None:
    known = values >= 0
    total[np.unique(where[known])] = np.maximum(total[np.unique(where[known])], 0)
    np.add.at(total, where[known], values[known])


def _ready(step: np.ndarray, actor: np.ndarray, t0: np.ndarray, t1: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """int64[m]: the READY mark that lies in the batch's span; the span's end where there is none."""
    ready = t1.copy()
    order = np.lexsort((marks["t0_ns"], marks["step"]))
    marks = marks[order]
    low = np.searchsorted(marks["step"], step, side="left")
    high = np.searchsorted(marks["step"], step, side="right")
    for i in np.flatnonzero(high > low):
        same = marks[low[i] : high[i]]
        times = same["t0_ns"]
        hit = times[(same["actor"] == actor[i]) & (times >= t0[i]) & (times <= t1[i])]
        if len(hit):
            ready[i] = hit[-1]
    return ready


def models(
    timeline: Timeline, made: Batches, *, depth: int | None = None, lost_steps: Collection[int] = (),
    ahead: int | None = None,
) -> list[Model]:  # fmt: skip
    """One model per segment. ``depth``: ring depth of the configuration (None: as many slots as were seen); ``ahead``:
    how many batches are copied ahead of their steps (None: as many as were seen)."""
    seen = int(made.slot.max()) + 1 if len(made) and made.slot.max() >= 0 else 1
    deep = max(depth or 0, seen, 1)
    first_by_step: dict[int, list[int]] = {}
    for index, step in enumerate(made.step.tolist()):
        first_by_step.setdefault(step, []).append(index)
    result = []
    previous_end = -_BIG
    for segment in np.unique(timeline.segment).tolist():
        rows = np.flatnonzero(timeline.segment == segment)
        copied = copies(timeline, rows, ahead)
        result.append(_model(timeline, made, rows, deep, set(lost_steps), first_by_step, previous_end, copied))
        previous_end = int(timeline.t1_ns[rows[-1]])
    return result


def _model(
    timeline: Timeline, made: Batches, rows: np.ndarray, depth: int, lost_steps: set[int],
    by_step: dict[int, list[int]], not_before: int, copied: Copies | None,
) -> Model:  # fmt: skip
    n, k = len(rows), len(CAUSES)
    origin = timeline.t0_ns[rows[0]]
    wait0, wait1 = timeline.wait_t0_ns[rows], timeline.wait_t1_ns[rows]
    t0, t1 = timeline.t0_ns[rows], timeline.t1_ns[rows]
    batch, earlier = np.full(n, -1, np.int64), np.full(n, _BIG, np.int64)
    for i, step in enumerate(timeline.batch[rows].tolist()):
        for j in by_step.get(step, ()):
            if made.claim_ns[j] < not_before:
                continue
            if made.done[j] and made.ready_ns[j] <= wait1[i] + _LATE_NS:
                batch[i] = j
            earlier[i] = min(earlier[i], made.claim_ns[j])
    known = batch >= 0
    redone = np.isin(timeline.batch[rows], list(lost_steps))
    redone[known] |= made.redo[batch[known]] | (earlier[known] < made.claim_ns[batch[known]])
    serial = bool(known.any() and made.inline[batch[known]].mean() > 0.5)
    gap, make, take = np.zeros((n, k)), np.zeros((n, k)), np.zeros((n, k))
    make[known] = made.service_ns[batch[known]]
    tail = np.where(known, made.tail_ns[batch], 0).astype(float) if len(made) else np.zeros(n)
    pre, mid, post, fixed, lag = _trainer_parts(timeline, rows, copied)
    claims = np.argsort(timeline.batch[rows], kind="stable")
    arrival = bool((claims != np.arange(n)).any())
    if not known.any():  # nothing is known about the feed: the wait is one service of unknown origin
        serial = True
        make[:, CAUSE["unknown"]] = wait1 - wait0
        start = np.zeros(1)
    elif serial:
        make[~known] = 0
        take[:, CAUSE["unknown"]] = np.maximum(wait1 - wait0 - make.sum(axis=1), 0)
        start = np.zeros(1)
    else:
        start = _hand_offs(timeline, made, rows, batch, claims, redone, depth, gap, make, take, tail)
    return Model(
        rows=rows, gap=gap, make=make, tail=tail, pre=pre, take=take, mid=mid, post=post,
        fixed_pre=fixed[0], fixed_mid=fixed[1], fixed_post=fixed[2], lag=lag,
        start_ns=start - (0 if serial else origin), depth=depth, serial=serial, known=known, redone=redone, batch=batch,
        measured_ns=float(t1[-1] - t0[0]), copies=copied, claims=claims if arrival and not serial else None,
        epoch=timeline.epoch[rows],
    )  # fmt: skip


def _hand_offs(
    timeline: Timeline, made: Batches, rows: np.ndarray, batch: np.ndarray, claims: np.ndarray, redone: np.ndarray,
    depth: int, gap: np.ndarray, make: np.ndarray, take: np.ndarray, tail: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Fill ``gap`` and ``take`` from the record; returns float64[workers], the moment each could first claim.

    A batch whose process died before it could write its events is filled in: made just in time, by unknown means.
    """
    known = np.flatnonzero(batch >= 0)
    wait0, wait1 = timeline.wait_t0_ns[rows], timeline.wait_t1_ns[rows]
    release = timeline.release_ns[rows]
    typical = np.median(made.service_ns[batch[known]].sum(axis=1))
    missing = np.flatnonzero(batch < 0)
    make[missing, CAUSE["unknown"]] = typical
    ready = np.where(batch >= 0, made.ready_ns[batch], wait1)
    claim = np.where(batch >= 0, made.claim_ns[batch], ready - typical).astype(float)
    workers = _pool_size(made, batch[known])
    actors = made.actor[batch[known]]
    firsts = np.sort(np.array([made.claim_ns[batch[known]][actors == a].min() for a in np.unique(actors)], float))
    start = np.concatenate([firsts[:workers], np.full(max(0, workers - len(firsts)), firsts[-1])])
    free = start.copy()
    for place, i in enumerate(claims.tolist()):
        w = int(free.argmin())
        could = max(free[w], float(release[place - depth]) if place >= depth else -np.inf)
        late = max(claim[i] - could, 0.0)
        # While a worker was away, the others' batches were late for want of it.
        away = late if redone[i] else min(late, _overlap(made.outages, could, claim[i]))
        gap[i, CAUSE["fault"]] = away
        gap[i, CAUSE["handoff"]] = late - away
        free[w] = max(could, claim[i]) + make[i].sum() + tail[i]
        if wait1[i] > wait0[i]:
            take[i, CAUSE["handoff"]] = max(float(wait1[i]) - max(float(wait0[i]), float(ready[i])), 0.0)
    return start


def _overlap(spans: np.ndarray, begin: float, end: float) -> float:
    """ns of [begin, end] inside any of the spans (which may overlap one another: two workers lost at once)."""
    covered = begin
    total = 0.0
    for low, high in spans[np.argsort(spans[:, 0], kind="stable")].tolist():
        low, high = max(low, covered), min(high, end)
        if high > low:
            total += high - low
            covered = high
    return total


def _pool_size(made: Batches, chosen: np.ndarray) -> int:
    """How many workers were at work at once: the most lives (first claim to last end) that overlap."""
    actors, first = made.actor[chosen], made.claim_ns[chosen]
    last = made.ready_ns[chosen]
    lives = [(int(first[actors == a].min()), int(last[actors == a].max())) for a in np.unique(actors)]
    return max(1, max(sum(b <= begin < e for b, e in lives) for begin, _ in lives))


def _trainer_parts(
    timeline: Timeline, rows: np.ndarray, copied: Copies | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What the trainer did before the batch was taken, until the slot's release (with copies: until its arrays were
    there, less the wait for them), and after: [n, causes] each.

    The fourth result is the fixed part (compute and test) of the three phases, float64[3, n]; the fifth is how long
    after the end of its step a slot was given back.
    """
    n, k = len(rows), len(CAUSES)
    place = np.full(int(rows[-1]) + 1, -1, np.int64)
    place[rows] = np.arange(n)
    got, begin, end = timeline.wait_t1_ns[rows], timeline.t0_ns[rows], timeline.t1_ns[rows]
    border = timeline.release_ns[rows] if copied is None else copied.arrived
    release = np.clip(border, got, end)
    lag = np.maximum(timeline.release_ns[rows] - end, 0).astype(float)
    phases = np.zeros((3, n, k))
    fixed = np.zeros((3, n))
    tree = timeline.nesting
    row_of = timeline.row
    at = np.flatnonzero((row_of >= rows[0]) & (row_of <= rows[-1]) & (tree.events["stage"] != Stage.STEP))
    # What happens during the wait (a collection, the stages of the inline engine) is in the wait already.
    during = (tree.events["t0_ns"][at] >= timeline.wait_t0_ns[row_of[at]]) & (
        tree.events["t1_ns"][at] <= timeline.wait_t1_ns[row_of[at]]
    )
    at = at[~during]
    if copied is not None:  # follows in the replay, whether it is long or hidden
        at = at[(timeline.span_part[at] != PART["h2d"]) | (timeline.copy_t1_ns[row_of[at]] < 0)]
    i = place[row_of[at]]
    own = tree.own_ns[at].astype(float)
    a, b = tree.events["t0_ns"][at], tree.events["t1_ns"][at]
    after = np.clip((b - np.maximum(release[i], a)) / np.maximum(b - a, 1), 0.0, 1.0)
    before = b <= got[i]
    weight = np.stack([before, (~before) * (1 - after), (~before) * after])
    parts = timeline.span_part[at]
    profiler = (tree.events["flags"][at] & Flag.PROFILER) > 0
    for name, column in PART.items():
        if name == "feed_wait":
            continue
        at_part = parts == column
        if name in _OF_PART:
            cause = np.where(profiler & (name == "host"), CAUSE["profiler"], CAUSE[_OF_PART[name]])[at_part]
            for phase in range(3):
                np.add.at(phases[phase], (i[at_part], cause), own[at_part] * weight[phase][at_part])
        else:
            for phase in range(3):
                np.add.at(fixed[phase], i[at_part], own[at_part] * weight[phase][at_part])
    # What no span covers: the difference to each phase's length. Time the device spent under a wait is compute.
    waits = timeline.wait_t1_ns[rows] - timeline.wait_t0_ns[rows]
    length = np.stack([got - begin - waits, release - got, end - release]).astype(float)
    if copied is not None:
        length[1] -= copied.waited
        length[2] += copied.late
        phases[2, :, CAUSE["h2d"]] += copied.late
    missing = length - phases.sum(axis=2) - fixed
    unattributed = timeline.parts_ns[rows, PART["unattributed"]].astype(float)
    hidden = np.minimum(np.maximum(missing[0] - unattributed, 0), timeline.parts_ns[rows, PART["compute"]])
    fixed[0] += hidden
    missing[0] -= hidden
    phases[:, :, CAUSE["unattributed"]] += missing
    for phase in range(3):  # a span across a border is split by proportion, so a remainder may be negative
        negative = np.minimum(phases[phase][:, CAUSE["unattributed"]], 0)
        phases[phase][:, CAUSE["unattributed"]] -= negative
        fixed[phase] += np.maximum(negative, -fixed[phase])
    return phases[0], phases[1], phases[2], fixed, lag
