"""From events to a table of steps: how long each took and what its time went to.

The partition is exact by construction: in the trainer's thread spans are nested or disjoint, a span's *own* time is its
length less that of the spans inside it, and what no span covers is ``unattributed``. Integer nanoseconds throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler.events import EVENT, PART_OF_STAGE, PARTITION, Flag, Kind, Stage

PART = {name: index for index, name in enumerate(PARTITION)}
NO_PART = -1
_DEVICE_STAGES = (Stage.COPY, Stage.DEVICE)
_LIFE_STAGES = (Stage.START, Stage.RESTART, Stage.READY, Stage.RELEASE, Stage.ORDER, Stage.SPILL)


@dataclass(frozen=True)
class Nesting:
    """Spans of one thread in order of time, cut so that they nest.

    ``events``: EVENT[n] with t0/t1 clipped to the parent; ``parent``: int64[n], -1 for none; ``own_ns``,
    ``own_cpu_ns``, ``own_runq_ns``, ``own_faults``, ``own_waits``: int64[n], the span's figures less those of its
    children (MISSING stays -1).
    """

    events: np.ndarray
    parent: np.ndarray
    own_ns: np.ndarray
    own_cpu_ns: np.ndarray
    own_runq_ns: np.ndarray
    own_faults: np.ndarray
    own_waits: np.ndarray


@dataclass(frozen=True)
class Timeline:
    """One row per step that the trainer took, in order of time; a step number may appear twice after a resume.

    ``batch``: which batch of the stream the step got: the step's number, but with ``emit: arrival``.
    Shapes: n steps. ``parts_ns``: int64[n, len(PARTITION)], each row adds up to ``wall_ns``. ``segment``: number of the
    uninterrupted sequence a row belongs to. ``first``: cold steps (the first of each segment). ``open``: the step never
    ended in the record. ``wait_t0_ns``/``wait_t1_ns``: begin and end of the wait for the batch (both the step's begin
    where there was none); ``release_ns``: when the slot was given back (the step's end where no mark tells), which may
    be before the step began; ``copy_t0_ns``/``copy_t1_ns``: its batch's time on the copy engine, likewise (-1: none).
    ``nesting``, ``row``: the trainer's spans and the row of each (-1 outside steps); ``span_part``: index in PARTITION.
    """

    step: np.ndarray
    batch: np.ndarray
    epoch: np.ndarray
    t0_ns: np.ndarray
    t1_ns: np.ndarray
    parts_ns: np.ndarray
    segment: np.ndarray
    first: np.ndarray
    open: np.ndarray
    emulated: np.ndarray
    wait_t0_ns: np.ndarray
    wait_t1_ns: np.ndarray
    release_ns: np.ndarray
    copy_t0_ns: np.ndarray
    copy_t1_ns: np.ndarray
    device_ns: np.ndarray
    nesting: Nesting
    row: np.ndarray
    span_part: np.ndarray

    def __len__(self) -> int:
        return len(self.step)

    @property
    def wall_ns(self) -> np.ndarray:
        return self.t1_ns - self.t0_ns

    @property
    def steady(self) -> np.ndarray:
        """bool[n]: neither cold nor unfinished; what percentiles are made of. All rows if nothing else is left."""
        mask = ~(self.first | self.open)
        return mask if mask.any() else np.ones(len(self), bool)

    @property
    def stall_ns(self) -> np.ndarray:
        """int64[n]: time of the step in which neither training compute nor a test was going on."""
        return self.wall_ns - self.parts_ns[:, PART["compute"]] - self.parts_ns[:, PART["test"]]


def as_events(source: Any) -> np.ndarray:
    """EVENT[n] from an EVENT array or a pyarrow table with the columns of EVENT (others are ignored)."""
    if isinstance(source, np.ndarray):
        return source
    events = np.zeros(source.num_rows, EVENT)
    for name in EVENT.names or ():
        events[name] = source.column(name).to_numpy()
    return events


def lanes(table: Any, processes: Mapping[str, Mapping[str, Any]]) -> tuple[np.ndarray, dict[int, str]]:
    """Events of a run with one actor number per process, and the name of each number: (EVENT[n], {actor: name}).

    Several processes may carry one number (a worker and its replacement, the workers of two feeds): all but the first
    get a new one, since spans of different processes never nest. Actor 0 stays the trainer's, also after a resume; what
    the trainer writes into the lanes of others (RESTART) stays there.

    ``processes`` as in ``Run.processes``. A run resumed after a reboot has two monotonic clocks: the later part is
    moved behind the earlier one by wall time, which only sets the order of the parts; no duration spans the two.
    """
    events = as_events(table)
    process = table.column("process").to_numpy(zero_copy_only=False)
    trainer = table.column("role").to_numpy(zero_copy_only=False) == "trainer"
    order, first = np.unique(process.astype(str), return_index=True)
    names: dict[int, str] = {}
    spare = int(events["actor"].max(initial=0)) + 1
    actors = events["actor"].copy()
    for name, _at in sorted(zip(order.tolist(), first.tolist(), strict=True), key=lambda item: item[1]):
        mine = (process == name) & ~(trainer & (events["actor"] != 0))
        for actor in np.unique(events["actor"][mine]).tolist():
            if actor not in names or actor == 0:
                names.setdefault(actor, name)
                continue
            actors[mine & (events["actor"] == actor)] = spare
            names[spare] = name
            spare += 1
    events["actor"] = actors
    for name, shift in _boot_shifts(processes).items():
        mine = process == name
        events["t0_ns"][mine] += shift
        events["t1_ns"][mine] += shift
    return events, names


def _boot_shifts(processes: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """ns to add to the times of each process of a boot other than that of the first trainer."""
    trainers = sorted(
        (p for p in processes.values() if p.get("role") == "trainer"), key=lambda p: int(p.get("wall_ns") or 0)
    )
    if not trainers:
        return {}
    base: dict[Any, int] = {}
    for trainer in trainers:
        base.setdefault(trainer.get("boot_id"), int(trainer["wall_ns"]) - int(trainer["monotonic_ns"]))
    first = trainers[0].get("boot_id")
    return {
        name: base[process.get("boot_id")] - base[first]
        for name, process in processes.items()
        if process.get("boot_id") != first and process.get("boot_id") in base
    }


def resolve_open(events: np.ndarray) -> np.ndarray:
    """Drop every OPEN row that a later row of the same span replaces; the result is sorted by t0 (longest first)."""
    order = np.lexsort(
        (-events["t1_ns"], events["kind"], events["t0_ns"], events["step"], events["stage"], events["actor"])
    )
    ranked = events[order]
    same = np.ones(max(len(ranked) - 1, 0), bool)
    for name in ("actor", "stage", "step", "t0_ns"):
        same &= ranked[name][1:] == ranked[name][:-1]
    drop = np.zeros(len(ranked), bool)
    drop[1:] = same & (ranked["kind"][1:] == Kind.OPEN)
    kept = ranked[~drop]
    return kept[np.lexsort((-kept["t1_ns"], kept["t0_ns"]))]


def is_span(events: np.ndarray) -> np.ndarray:
    """bool[n]: rows with a length (finished or still open)."""
    return (events["kind"] == Kind.SPAN) | (events["kind"] == Kind.OPEN)


def nest(events: np.ndarray, roots: tuple[int, ...] = ()) -> Nesting:
    """Nest the spans of one thread (sorted by t0, longest first). A span of a stage in ``roots`` never has a parent.

    Where two spans overlap without nesting (a collection that began in another thread) the later one is cut to what
    lies after the earlier one, so no instant is counted twice.
    """
    n = len(events)
    out = events.copy()
    t0, t1 = out["t0_ns"].tolist(), out["t1_ns"].tolist()
    stages = out["stage"].tolist()
    parent = [-1] * n
    own = [0] * n
    stack: list[int] = []
    last_root_end = -(1 << 62)
    for i in range(n):
        begin, end = t0[i], t1[i]
        if stages[i] in roots:
            stack.clear()
            begin = max(begin, last_root_end)
            end = max(end, begin)
            last_root_end = end
        else:
            while stack and t1[stack[-1]] <= begin:
                stack.pop()
            while stack and t1[stack[-1]] < end and stages[stack[-1]] not in roots:
                begin = max(begin, t1[stack.pop()])
            if stack:
                begin = max(begin, t0[stack[-1]])
                end = min(end, t1[stack[-1]])
                parent[i] = stack[-1]
            end = max(end, begin)
        t0[i], t1[i] = begin, end
        own[i] += end - begin
        if parent[i] >= 0:
            own[parent[i]] -= end - begin
        stack.append(i)
    out["t0_ns"], out["t1_ns"] = t0, t1
    parents = np.asarray(parent, np.int64)
    return Nesting(
        out,
        parents,
        np.asarray(own, np.int64),
        _own_reading(out["cpu_ns"], parents),
        _own_reading(out["runq_ns"], parents),
        _own_reading(out["major_faults"], parents),
        _own_reading(out["waits"], parents),
    )


def _own_reading(values: np.ndarray, parents: np.ndarray) -> np.ndarray:
    own = values.copy()
    known = (values >= 0) & (parents >= 0)
    np.subtract.at(own, parents[known], values[known])
    return np.where(values < 0, -1, np.maximum(own, 0))


def build(source: Any) -> Timeline:
    """The timeline of a run from its events (EVENT[n] or the table of :func:`profiler.store.load_run`)."""
    events = resolve_open(as_events(source))
    mine = events["actor"] == 0
    lanes = np.isin(events["stage"], _DEVICE_STAGES + _LIFE_STAGES)
    spans = _joined(_with_unfinished_step(events[mine & is_span(events) & ~lanes]))
    tree = nest(spans, roots=(int(Stage.STEP),))
    row, part, steps = _rows_and_parts(tree)
    n = len(steps)
    parts = np.zeros((n, len(PARTITION)), np.int64)
    inside = row >= 0
    np.add.at(parts, (row[inside], part[inside]), tree.own_ns[inside])

    wait_t0, wait_t1 = _waits(tree, row, part, steps)
    device = events[(events["stage"] == Stage.DEVICE) & is_span(events) & (events["flags"] & Flag.TEST_PHASE == 0)]
    busy = union(device)
    device_ns = np.array([overlap(busy, a, b) for a, b in zip(steps["t0_ns"], steps["t1_ns"], strict=True)], np.int64)
    if len(device):
        wait_t0 = _charge_device(tree, row, part, busy, parts, wait_t0, wait_t1)
    segment = np.cumsum(_starts(steps)) - 1
    first = np.concatenate(([True], np.diff(segment) > 0))[:n] if n else np.zeros(0, bool)
    begun = steps["t0_ns"][np.maximum.accumulate(np.where(first, np.arange(n), 0))] if n else steps["t0_ns"]
    batch = _batches(events, steps, begun)
    copied = _copied(events, batch, begun)
    emulated = np.zeros(n, bool)
    nominal = inside & (tree.events["flags"] & Flag.EMULATED > 0)
    emulated[row[nominal]] = True
    return Timeline(
        step=steps["step"].copy(),
        batch=batch,
        epoch=steps["epoch"].copy(),
        t0_ns=steps["t0_ns"].copy(),
        t1_ns=steps["t1_ns"].copy(),
        parts_ns=parts,
        segment=segment.astype(np.int64),
        first=first,
        open=steps["kind"] == Kind.OPEN,
        emulated=emulated,
        wait_t0_ns=wait_t0,
        wait_t1_ns=wait_t1,
        release_ns=_releases(events, batch, steps["t1_ns"], begun),
        copy_t0_ns=copied[0],
        copy_t1_ns=copied[1],
        device_ns=device_ns,
        nesting=tree,
        row=row,
        span_part=part,
    )


def _with_unfinished_step(spans: np.ndarray) -> np.ndarray:
    """Add an open STEP round trailing open spans of a killed run whose step itself was not written yet."""
    steps = spans[spans["stage"] == Stage.STEP]
    end = steps["t1_ns"].max() if len(steps) else np.iinfo(np.int64).min
    tail = spans[(spans["t0_ns"] >= end) & (spans["stage"] != Stage.STEP)]
    live = tail[(tail["kind"] == Kind.OPEN) & (tail["step"] >= 0) & (tail["flags"] & Flag.TEST_PHASE == 0)]
    if not len(live):
        return spans
    step = live[-1:].copy()
    step["stage"], step["kind"], step["flags"] = Stage.STEP, Kind.OPEN, 0
    same = tail[tail["step"] == step["step"][0]]
    step["t0_ns"] = end if len(steps) and end >= same["t0_ns"].min() - 1_000_000_000 else same["t0_ns"].min()
    step["t1_ns"] = live["t1_ns"].max()
    joined = np.concatenate([spans, step])
    return joined[np.lexsort((-joined["t1_ns"], joined["t0_ns"]))]


def _starts(steps: np.ndarray) -> np.ndarray:
    """bool[n]: steps that begin a new segment: marked as the first of a (resumed) run, or not after the one before."""
    starts = (steps["flags"] & Flag.FIRST) > 0
    starts[:1] = True
    starts[1:] |= np.diff(steps["step"]) <= 0
    return starts


def _joined(spans: np.ndarray) -> np.ndarray:
    """A step lasts from the end of the one before: what the loop does between two step spans belongs to the later."""
    spans = spans.copy()
    at = np.flatnonzero(spans["stage"] == Stage.STEP)
    follows = ~_starts(spans[at])
    before = np.concatenate([[0], spans["t1_ns"][at][:-1]])
    spans["t0_ns"][at] = np.where(follows, np.minimum(before, spans["t0_ns"][at]), spans["t0_ns"][at])
    return spans[np.lexsort((-spans["t1_ns"], spans["t0_ns"]))]


def _rows_and_parts(tree: Nesting) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per span: the row of its step (-1 outside) and its part; and the STEP events themselves."""
    part_of = {int(stage): PART[name] for stage, name in PART_OF_STAGE.items()}
    stages, flags, parents = (tree.events["stage"].tolist(), tree.events["flags"].tolist(), tree.parent.tolist())
    n = len(stages)
    row, part = [-1] * n, [NO_PART] * n
    test, unattributed = PART["test"], PART["unattributed"]
    count = 0
    for i in range(n):
        up = parents[i]
        if stages[i] == Stage.STEP:
            row[i], part[i] = count, unattributed
            count += 1
            continue
        above = part[up] if up >= 0 else unattributed
        row[i] = row[up] if up >= 0 else -1
        if above == test or flags[i] & Flag.TEST_PHASE:
            part[i] = test  # the test loop waits and computes too; none of that is the training step's
        else:
            part[i] = part_of.get(stages[i], above)
    steps = tree.events[tree.events["stage"] == Stage.STEP]
    return np.asarray(row, np.int64), np.asarray(part, np.int64), steps


def _waits(tree: Nesting, row: np.ndarray, part: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    begin, end = steps["t0_ns"].copy(), steps["t0_ns"].copy()
    waits = np.flatnonzero((tree.events["stage"] == Stage.FEED_WAIT) & (row >= 0) & (part == PART["feed_wait"]))
    rows, first = np.unique(row[waits], return_index=True)
    begin[rows] = tree.events["t0_ns"][waits[first]]
    last = len(waits) - 1 - np.unique(row[waits][::-1], return_index=True)[1]
    end[rows] = tree.events["t1_ns"][waits[last]]
    return begin, end


def _batches(events: np.ndarray, steps: np.ndarray, begun_ns: np.ndarray) -> np.ndarray:
    """int64[n]: the step's number, or what the ORDER mark of the row says."""
    marks = events[(events["stage"] == Stage.ORDER) & (events["flags"] & Flag.TEST_PHASE == 0)]
    if not len(marks):
        return steps["step"].copy()
    at = _first_since(marks, steps["step"], begun_ns)
    # A part that was done again after a kill may have other marks than the first time: each lies in its own step.
    return np.where((at >= 0) & (marks["t0_ns"][at] <= steps["t1_ns"]), marks["items"][at], steps["step"])


def _releases(events: np.ndarray, batch: np.ndarray, ends_ns: np.ndarray, begun_ns: np.ndarray) -> np.ndarray:
    """int64[n]: the first RELEASE mark of the row's batch since its segment began; else the step's end."""
    marks = events[(events["stage"] == Stage.RELEASE) & (events["flags"] & Flag.TEST_PHASE == 0)]
    at = _first_since(marks, batch, begun_ns)
    return np.where(at >= 0, marks["t0_ns"][at] if len(marks) else 0, ends_ns)


def _copied(events: np.ndarray, batch: np.ndarray, begun_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64[n] each: begin and end of the copy of the row's batch, -1 where there is none."""
    spans = events[
        (events["stage"] == Stage.COPY) & (events["kind"] == Kind.SPAN) & (events["flags"] & Flag.TEST_PHASE == 0)
    ]
    at = _first_since(spans, batch, begun_ns)
    begin, end = (np.where(at >= 0, spans[name][at] if len(spans) else 0, -1) for name in ("t0_ns", "t1_ns"))
    return begin, end


def _first_since(events: np.ndarray, steps: np.ndarray, since_ns: np.ndarray) -> np.ndarray:
    """int64[n]: index of the first of the events (sorted by t0) of each row's number since then, -1 for none.

    What belongs to a step may come before it, but not before its uninterrupted sequence of steps.
    """
    by_step: dict[int, list[int]] = {}
    for index, step in enumerate(events["step"].tolist()):
        by_step.setdefault(step, []).append(index)
    moments = events["t0_ns"].tolist()
    return np.array(
        [
            next((index for index in by_step.get(step, ()) if moments[index] >= since), -1)
            for step, since in zip(steps.tolist(), since_ns.tolist(), strict=True)
        ],
        np.int64,
    )


def union(spans: np.ndarray) -> np.ndarray:
    """int64[m, 2]: the union of the spans as disjoint intervals in order of time."""
    merged: list[list[int]] = []
    for begin, end in zip(spans["t0_ns"].tolist(), spans["t1_ns"].tolist(), strict=True):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return np.asarray(merged, np.int64).reshape(-1, 2)


def overlap(busy: np.ndarray, begin: int, end: int) -> int:
    lo = np.searchsorted(busy[:, 1], begin, side="right")
    hi = np.searchsorted(busy[:, 0], end, side="left")
    piece = busy[lo:hi]
    return int(np.maximum(np.minimum(piece[:, 1], end) - np.maximum(piece[:, 0], begin), 0).sum())


def _charge_device(
    tree: Nesting, row: np.ndarray, part: np.ndarray, busy: np.ndarray,
    parts: np.ndarray, wait_t0: np.ndarray, wait_t1: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Move waits during which the device was still computing from feed_wait to compute; returns the waits' new begins.

    Launches return at once, so the host may already wait for the next batch while the device works: no starvation.
    """
    begin = wait_t0.copy()
    for r in np.flatnonzero(wait_t1 > wait_t0):
        hidden = min(overlap(busy, int(wait_t0[r]), int(wait_t1[r])), int(parts[r, PART["feed_wait"]]))
        parts[r, PART["feed_wait"]] -= hidden
        parts[r, PART["compute"]] += hidden
        begin[r] += hidden
    copies = (part == PART["h2d"]) & (row >= 0)
    for i in np.flatnonzero(copies):
        hidden = min(overlap(busy, int(tree.events["t0_ns"][i]), int(tree.events["t1_ns"][i])), int(tree.own_ns[i]))
        parts[row[i], PART["h2d"]] -= hidden
        parts[row[i], PART["compute"]] += hidden
    return begin
