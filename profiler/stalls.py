"""Who is to blame for the time the accelerator waited.

v(S) is how much shorter the replayed run gets when the services of the causes in S are zero; a cause's blame is its
Shapley value of v, so the shares add up to the stall and nothing is blamed twice. *Where* comes from the services,
*why* from what the feed's workers were doing. The answer is to "what is this stall made of", not to "what changed".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiler import advice, spills
from profiler.finding import NO_STALL, StallCause
from profiler.replay import Variants, recorded, removed_alone, replay, subsets
from profiler.services import CAUSE, CAUSES, FEED_CAUSES, PLACE, SIDE, Batches, Model, batches, models
from profiler.timeline import Timeline

MAX_CAUSES = 10
_SMALL = 0.01  # of the stall: causes below are folded into others
_STRAGGLER = 2.0  # times the median
_STRAGGLERS_AT_MOST = 0.1  # of all batches: what happens more often is the feed's ordinary speed
_FOLLOW_FEED = (*FEED_CAUSES, "cpu_contention", "gc", "unknown", "handoff")


@dataclass(frozen=True)
class Attribution:
    """Result of :func:`attribute`. Seconds. ``stall_s``: stall of all steps; of the cold ones alone
    where the others have none (see NO_STALL); ``models``: what was
    replayed; ``per_step_ms``: float64[n, len(CAUSES)] blame per step, for drawing."""

    stall_s: float
    causes: tuple[StallCause, ...]
    fix_together: tuple[dict[str, Any], ...]
    slack: dict[str, Any]
    replay_error: float | None
    models: tuple[Model, ...]
    made: Batches
    per_step_ms: np.ndarray
    steady_stall: bool = False
    cold_stall: bool = False
    merged: tuple[str, ...] = field(default=())


def shapley_weights(k: int) -> np.ndarray:
    """float64[2^k, k]: column j turns v over all subsets (bit mask order) into the Shapley value of player j."""
    numbers = np.arange(1 << k)
    size = np.array([int(i).bit_count() for i in numbers])
    factor = np.array([math.factorial(s) * math.factorial(k - s - 1) / math.factorial(k) for s in range(k)] + [0.0])
    weights = np.empty((1 << k, k))
    for j in range(k):
        has = (numbers >> j) & 1 == 1
        weights[:, j] = np.where(has, factor[size - 1], -factor[size])
    return weights


def attribute(
    timeline: Timeline, events: np.ndarray, *, depth: int | None = None, lost_steps: Collection[int] = (),
    setting: advice.Setting | None = None, staging: int | None = None,
) -> Attribution:  # fmt: skip
    """Blame every stalled second of a run.

    ``events``: EVENT[n] of all processes; ``depth``: the ring's; ``lost_steps``: steps whose worker died while making
    them; ``setting``: what the advice has to fit; ``staging``: buffers that batches are copied to on the device.
    """
    made = batches(events, timeline)
    n = len(timeline)
    if n == 0:
        return Attribution(0.0, (), (), {}, None, (), made, np.zeros((0, len(CAUSES))))
    parts = models(timeline, made, depth=depth, lost_steps=lost_steps, ahead=staging and staging - 1)
    players, groups = _players(parts, float(timeline.wall_ns.sum()))
    blame = np.zeros((n, len(CAUSES)))
    totals = np.zeros(1 << len(groups))
    alone = np.zeros(len(players) + 1)
    variants = subsets(groups)
    # A lost worker is no service: it is blamed for what repairing it gains, the services for what is left then.
    variants.keep[:, CAUSE["fault"]] = 0.0
    weights = -shapley_weights(len(groups))
    for model in parts:
        lengths, ends = replay(model, variants, weights)
        totals += ends
        blame[model.rows] = _spread(lengths, groups, model.per_step_ns())
        lengths, ends = replay(model, removed_alone(["fault", *players]))
        alone += ends[[0, *range(2, len(players) + 2)]]
        blame[model.rows, CAUSE["fault"]] = lengths[:, 0] - lengths[:, 1]
    measured = sum(model.measured_ns for model in parts)
    error = abs(float(alone[0]) - measured) / measured if measured else None

    cold = timeline.first
    stall = timeline.stall_ns.astype(float)
    keep_cold = bool(stall[cold].sum() >= NO_STALL * timeline.wall_ns.sum())
    keep_steady = bool(stall[~cold].sum() >= NO_STALL * max(timeline.wall_ns[~cold].sum(), 1))
    blame = _normalise(blame, stall, cold, keep_cold or keep_steady, keep_steady)
    why = _why(timeline, parts, made, blame)
    gains = {name: max(0.0, float(alone[0] - total)) / 1e9 for name, total in zip(players, alone[1:], strict=True)}
    spilled = spills.look(events, timeline, parts, made)
    causes = _causes(timeline, parts, made, blame, why, gains, setting or advice.Setting(), spilled)
    return Attribution(
        stall_s=float(blame.sum()) / 1e9, causes=causes,
        fix_together=_together(totals, groups, float(blame.sum()), float(measured)),
        slack=_slack(timeline, parts, blame), replay_error=error, models=tuple(parts), made=made,
        per_step_ms=blame / 1e6, steady_stall=keep_steady, cold_stall=keep_cold,
        merged=tuple(groups[-1]) if groups and len(groups[-1]) > 1 else (),
    )  # fmt: skip


def _players(parts: list[Model], wall_ns: float) -> tuple[list[str], list[list[str]]]:
    """The causes present, largest first, and the groups that are zeroed together: small ones share the last group."""
    total = np.sum([model.total_ns() for model in parts], axis=0)
    present = [CAUSES[c] for c in np.argsort(-total, kind="stable") if total[c] > 0]
    # 2^k replays: fewer causes are told apart in very long runs, so that the work stays bounded.
    steps = sum(len(model.rows) for model in parts)
    limit = max(4, min(MAX_CAUSES, int(math.log2(20_000_000 / steps))))
    large = [name for name in present if name != "fault" and total[CAUSE[name]] >= 0.001 * wall_ns][: limit - 1]
    small = [name for name in present if name not in (*large, "fault")]
    return present, [[name] for name in large] + ([small] if small else [])


def _spread(values: np.ndarray, groups: list[list[str]], service_ns: np.ndarray) -> np.ndarray:
    """Blame per step and group -> per cause; inside a group in proportion to the step's own services of its causes.

    A step that is late for what an earlier one did has no such services: its blame is booked at that earlier step.
    """
    out = np.zeros((len(values), len(CAUSES)))
    for j, group in enumerate(groups):
        columns = [CAUSE[name] for name in group]
        size = service_ns[:, columns]
        total = size.sum(axis=1)
        busy = np.flatnonzero(total > 0)
        if len(group) == 1 or not len(busy):
            out[:, columns] = values[:, [j]] / len(group)
            continue
        home = busy[np.maximum(np.searchsorted(busy, np.arange(len(values)), side="right") - 1, 0)]
        booked = np.zeros(len(values))
        np.add.at(booked, home, values[:, j])
        out[:, columns] = (booked / np.where(total > 0, total, 1))[:, None] * size
    return out


def _normalise(
    blame: np.ndarray, stall: np.ndarray, cold: np.ndarray, keep_cold: bool, keep_steady: bool
) -> np.ndarray:
    """Scale so that the blame of the cold steps, and of the others, adds up to their measured stall; 0 if not kept."""
    out = np.zeros_like(blame)
    for mask, keep in ((cold, keep_cold), (~cold, keep_steady)):
        measured = stall[mask].sum()
        if not keep or measured <= 0:
            continue
        piece = blame[mask]
        total = piece.sum(axis=0)
        positive = np.maximum(total, 0.0)  # greedy workers can make a removal hurt by a hair; that is no negative cause
        if positive.sum() <= 0:
            piece = np.zeros_like(piece)
            piece[:, CAUSE["unknown"]] = stall[mask]
        else:
            factor = np.divide(positive, total, out=np.zeros_like(total), where=total > 0)
            piece = piece * factor * (measured / positive.sum())
        out[mask] = piece
    return out


def _together(
    totals: np.ndarray, groups: list[list[str]], stall_ns: float, wall_ns: float
) -> tuple[dict[str, Any], ...]:
    """Pairs whose removal together gains clearly more than the sum of the two alone."""
    pairs: list[dict[str, Any]] = []
    for a in range(len(groups)):
        for b in range(a + 1, len(groups)):
            alone = [float(totals[0] - totals[1 << j]) for j in (a, b)]
            both = float(totals[0] - totals[(1 << a) | (1 << b)])
            if both - sum(alone) > max(0.1 * stall_ns, NO_STALL * wall_ns) > 0:
                names = [group[0] for group in (groups[a], groups[b])]
                pairs.append({"where": names, "gain": both / 1e9, "gain_alone": [x / 1e9 for x in alone]})
    return tuple(sorted(pairs, key=lambda pair: -float(pair["gain"]))[:5])


def _why(timeline: Timeline, parts: list[Model], made: Batches, blame: np.ndarray) -> dict[str, np.ndarray]:
    """Per reason the fraction of each step's feed blame that belongs to it: float64[n] each, adding up to 1."""
    n = len(timeline)
    out = {name: np.zeros(n) for name in ("cold_start", "fault", "straggler", "backpressure")}
    taken = timeline.first.copy()
    out["cold_start"][taken] = 1.0
    for model in parts:
        rows = model.rows
        total = model.make.sum(axis=1)
        actors = np.where(model.known, made.actor[model.batch], -1) if len(made) else np.full(len(rows), -1)
        ready = np.where(model.known, made.ready_ns[model.batch], 0) if len(made) else np.zeros(len(rows))
        # The first batch of every worker pays for opening the database; it is cold if the loop had to wait for it.
        first = np.zeros(len(rows), bool)
        first[np.unique(actors, return_index=True)[1]] = True
        waited = timeline.wait_t1_ns[rows] > timeline.wait_t0_ns[rows]
        early = first & waited & (actors >= 0) & (np.arange(len(rows)) < 2 * model.workers)
        out["cold_start"][rows[early & ~taken[rows]]] = 1.0
        taken[rows[early]] = True
        fault = model.redone & ~taken[rows]
        out["fault"][rows[fault]] = 1.0
        taken[rows[fault]] = True
        later_ready = np.concatenate([np.minimum.accumulate(ready[::-1])[::-1][1:], [np.inf]])
        slow = (total > _STRAGGLER * np.median(total)) & ((model.workers == 1) | (later_ready < ready))
        if 0 < slow.mean() <= _STRAGGLERS_AT_MOST:
            slow &= ~taken[rows]
            out["straggler"][rows[slow]] = 1.0
            taken[rows[slow]] = True
        if not model.serial:
            deep = max(2 * model.depth, model.workers + 2, 4)
            now = replay(model, recorded())[0][:, 0]
            repaired = replay(model, Variants(np.ones((1, len(CAUSES))), depth=deep))[0][:, 0]
            rest = ~taken[rows]
            of = blame[rows][:, [CAUSE[name] for name in _FOLLOW_FEED]].sum(axis=1)[rest].sum()
            if of > 0:
                fraction = float(np.clip((now - repaired)[rest].sum() / of, 0.0, 1.0))
                out["backpressure"][rows[rest]] = fraction if fraction >= 0.05 else 0.0
    out["throughput"] = 1.0 - np.sum(list(out.values()), axis=0)
    return out


def _causes(
    timeline: Timeline, parts: list[Model], made: Batches, blame: np.ndarray, why: dict[str, np.ndarray],
    gains: dict[str, float], setting: advice.Setting, spilled: spills.Spilled,
) -> tuple[StallCause, ...]:  # fmt: skip
    total = blame.sum()
    if total <= 0:
        return ()
    columns: dict[advice.Key, np.ndarray] = {}
    gain: dict[advice.Key, float] = {}

    def put(where: str, why: str, column: np.ndarray, alone: float) -> None:
        key = advice.Key(where, why, side)
        columns[key] = columns.get(key, 0.0) + column
        gain[key] = gain.get(key, 0.0) + alone

    queued = sum(float(model.make[:, CAUSE["cpu_contention"]].sum()) for model in parts)
    busy = sum(float(model.make.sum()) for model in parts)
    for name in CAUSES:
        column = blame[:, CAUSE[name]]
        if column.sum() <= 0:
            continue
        alone, side = gains.get(name, 0.0), SIDE.get(name, "data")
        if name == "startup":
            put("unknown", "cold_start", column, alone)
        elif name == "fault":
            put("unknown", "fault", column, alone)
        elif name == "handoff":
            contended = queued > 0.05 * busy
            cold = timeline.first
            put("cpu_contention" if contended else "unknown", "scheduling", np.where(cold, 0, column), alone)
            put("unknown", "cold_start", np.where(cold, column, 0), 0.0)
        elif name in _FOLLOW_FEED:
            whole = column.sum()
            if name == "transfer":
                piece = np.minimum(column, spilled.extra_ns)
                put(name, "spill", piece, alone * piece.sum() / whole)
                column = column - piece
            for reason, fraction in why.items():
                piece = column * fraction
                if piece.sum() > 0:
                    put(name, reason, piece, alone * piece.sum() / whole)
        else:  # the trainer's own thread: no worker had a hand in it
            cold, where = timeline.first, PLACE.get(name, name)
            put(where, "throughput", np.where(cold, 0, column), alone * column[~cold].sum() / column.sum())
            put(where, "cold_start", np.where(cold, column, 0), alone * column[cold].sum() / column.sum())
    _fold(columns, gain, total)
    result = []
    # What a longer run would go on suffering from comes first, the one-off start last.
    for key, column in sorted(columns.items(), key=lambda item: (item[0].why == "cold_start", -item[1].sum())):
        seconds = float(column.sum()) / 1e9
        if seconds <= 0:
            continue
        evidence = advice.evidence(key, column, timeline, parts, made, setting)
        if key.why == "spill":
            evidence |= spilled.evidence
        result.append(
            StallCause(
                where=key.where, why=key.why, side=key.side, seconds=seconds, share=float(column.sum() / total),
                ci95_s=_interval(column), gain_alone_s=gain[key], evidence=evidence,
                remedy=advice.remedy(key, parts, timeline, evidence, setting),
                text=advice.text(key, setting),
            )
        )  # fmt: skip
    return tuple(result)


def _fold(columns: dict[advice.Key, np.ndarray], gain: dict[advice.Key, float], total: float) -> None:
    """Fold entries too small to act on into another of the same place and side: never into one they are not of."""
    for key in sorted(columns, key=lambda key: columns[key].sum()):
        same = [other for other in columns if other != key and (other.where, other.side) == (key.where, key.side)]
        if columns[key].sum() >= _SMALL * total or not same:
            continue
        home = max(same, key=lambda other: columns[other].sum())
        columns[home] = columns[home] + columns.pop(key)
        gain[home] += gain.pop(key)


def _interval(column: np.ndarray, draws: int = 400) -> tuple[float, float] | None:
    """95 % interval of the column's sum in seconds: circular block bootstrap over steps, with a fixed seed."""
    n = len(column)
    # A sum made of one or two events has no spread that resampling could show.
    effective = column.sum() ** 2 / max(float((column**2).sum()), 1e-30)
    if n < 20 or effective < 4:
        return None
    block = max(1, min(50, n // 10))
    running = np.concatenate([[0.0], np.cumsum(np.concatenate([column, column[:block]]))])
    starts = np.random.default_rng(12345).integers(0, n, size=(draws, math.ceil(n / block)))
    sums = (running[starts + block] - running[starts]).sum(axis=1) * (n / (block * starts.shape[1]))
    low, high = np.quantile(sums, [0.025, 0.975]) / 1e9
    return max(0.0, float(low)), float(high)


def _slack(timeline: Timeline, parts: list[Model], blame: np.ndarray) -> dict[str, Any]:
    """How many ms each hidden stage could grow per batch before the run gets 1 % longer."""
    result: dict[str, Any] = {}
    model = max(parts, key=lambda part: len(part.rows))
    feed = blame[:, [CAUSE[name] for name in FEED_CAUSES]].sum()
    # A feed that holds the steps up has no slack, whatever single stage of it one looks at.
    if not model.serial and len(model.rows) >= 5 and feed < NO_STALL * timeline.wall_ns.sum():
        limit = _room(model, lambda grid: Variants(_ones(grid), extra_make_ns=grid), 4 * model.workers)
        stall = max(blame.sum(), 1.0)
        for name in FEED_CAUSES:
            service = model.make[:, CAUSE[name]]
            if service.sum() > 0 and blame[:, CAUSE[name]].sum() / max(timeline.wall_ns.sum(), 1) < 0.02:
                result[name] = {
                    "service_ms": float(np.median(service)) / 1e6,
                    "slack_ms": float(limit) / 1e6,
                    "share": float(blame[:, CAUSE[name]].sum() / stall),
                }

    exposed = blame[:, CAUSE["h2d"]].sum() / max(timeline.wall_ns.sum(), 1)
    if model.copies is not None and len(model.rows) >= 5 and exposed < NO_STALL:
        result["h2d"] = {
            "service_ms": float(np.median(model.copies.length)) / 1e6,
            "slack_ms": _room(model, lambda grid: Variants(_ones(grid), extra_copy_ns=grid), 4) / 1e6,
            "share": float(blame[:, CAUSE["h2d"]].sum() / max(blame.sum(), 1.0)),
        }
    return result


def _ones(grid: np.ndarray) -> np.ndarray:
    return np.ones((len(grid), len(CAUSES)))


def _room(model: Model, grown: Callable[[np.ndarray], Variants], periods: float) -> float:
    """ns that a service of every batch could grow by before the run gets 1 % longer; looked for up to ``periods``."""
    period = model.measured_ns / len(model.rows)
    grid = np.concatenate([[0.0], np.geomspace(period / 100, period * periods, 40)])
    for _ in range(2):  # coarse, then fine round the place
        totals = replay(model, grown(grid))[1]
        over = np.flatnonzero(totals > 1.01 * totals[0])
        if not len(over):
            return float(grid[-1])
        low, high = float(grid[over[0] - 1]), float(grid[over[0]])
        grid = np.concatenate([[0.0], np.linspace(low, high, 20)])
    return low
