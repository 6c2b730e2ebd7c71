"""Words and numbers beside a cause: what it means, what shows it, and which configuration key helps.

Nothing is advised that the run could not take: no worker more than its cores hold, no key to a loop that has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from profiler.services import CAUSE, FEED_CAUSES, Batches, Model
from profiler.timeline import Timeline

WHERE_TEXT = {
    "storage": "waiting for storage: pages and reads that were not in memory",
    "read": "reading: look-up and parsing of records, or a Python data layer's read()",
    "decode": "decoding of images",
    "augment": "augmentation: crop, mirror, mean and scale",
    "function": "your own function in the transform (data.transform.python)",
    "collate": "collating samples into the batch",
    "transfer": "moving records or batches between processes",
    "h2d": "host-to-device copy that compute did not hide",
    "compute": "compute",
    "sync": "waiting for other trainers",
    "cpu_contention": "processes ready to run that got no CPU",
    "gc": "garbage collection",
    "alloc": "memory allocation",
    "host": "the loop's own host work",
    "checkpoint": "writing snapshots",
    "unknown": "time that no recorded stage covers",
}
WHY_TEXT = {
    "throughput": "all workers were busy and still too slow",
    "straggler": "single slow batches held up finished later ones",
    "cold_start": "the feed was starting up",
    "backpressure": "no free slot: workers could not work ahead",
    "scheduling": "the work was there, but the process that should go on noticed late",
    "fault": "a worker was lost and its batch had to be made again",
    "spill": "Ray's object store was full, and Ray wrote objects to disk",
}
_UNKNOWN = "look at the lanes of the HTML report: it lies between the recorded stages"
_UNSEEN = "its processes are not seen per batch"
_TRAINER = ("h2d", "sync", "alloc", "host", "checkpoint")
_PROFILER_TEXT = "the profiler's own work in the loop: fingerprints and record numbers"
_MAX_RECORDS = 100  # listed of one step
WORKER_CPUS, TRAINER_CPUS, TEST_CPUS, OWNER_CPUS = 0.75, 0.25, 0.1, 0.1
"""CPUs that processes reserve: each worker, the trainer, the worker of the test, the reader of a split topology."""


class Key(NamedTuple):
    """What one cause is told apart from others by; ``side`` as in :class:`profiler.finding.StallCause`."""

    where: str
    why: str
    side: str = "data"


@dataclass(frozen=True)
class Setting:
    """What advice has to fit. ``loop``: a foreign loop, which has no configuration; ``cores`` of the host (None: not
    known); ``owner``: a process reads for the workers; ``fingerprints``: they were recorded;
    ``recording_s``: what recording cost the trainer in all (None: not known);
    ``records``: gives the record numbers of steps, where the run folder has them."""

    loop: bool = False
    cores: int | None = None
    owner: bool = False
    fingerprints: bool = False
    recording_s: float | None = None
    records: Callable[[Collection[int]], dict[int, list[int]]] | None = None

    @property
    def most_workers(self) -> int | None:
        """How many workers the host's CPUs hold; None where it is not known how many CPUs there are."""
        if self.cores is None:
            return None
        others = TRAINER_CPUS + TEST_CPUS + (OWNER_CPUS if self.owner else 0.0)
        return max(0, int((self.cores - others) / WORKER_CPUS + 1e-9))


def label(where: str, why: str, side: str = "data") -> str:
    """A short name for people: the place, or what happened where no place is known."""
    if side == "profiler":
        return "profiler's fingerprints"
    if side == "loop" and where in ("unknown", "gc"):
        return {"unknown": "unattributed", "gc": "gc of the loop"}[where]
    if where == "unknown" and why in ("fault", "cold_start", "scheduling"):
        return {"fault": "a lost worker", "cold_start": "start-up", "scheduling": "late hand-offs"}[why]
    return "own function" if where == "function" else where.replace("_", " ")


def text(key: Key, setting: Setting) -> str:
    """One sentence for a cause."""
    where, why, side = key
    if side == "profiler":
        return _PROFILER_TEXT
    if where == "unknown" and why != "throughput":
        return WHY_TEXT[why]
    if side == "loop" and why == "cold_start":
        return f"{WHERE_TEXT[where]}, in the first step"
    if where == "collate" and setting.fingerprints:
        return f"{WHERE_TEXT[where]} and hashing them for the fingerprints; {WHY_TEXT[why]}"
    if why == "throughput" and (where in _TRAINER or where == "unknown" or side == "loop"):
        if where == "unknown" and side == "data" and setting.loop:
            return "waiting for the loader, whose processes are not seen per batch"
        return WHERE_TEXT[where]
    return f"{WHERE_TEXT[where]}; {WHY_TEXT[why]}"


def evidence(
    key: Key, column: np.ndarray, timeline: Timeline, parts: list[Model], made: Batches, setting: Setting
) -> dict[str, Any]:
    """Which steps, batches and workers, and what the operating system read. A missing reading is None with a reason."""
    where, why, side = key
    worst = [int(i) for i in np.argsort(-column, kind="stable")[:3] if column[i] > 0.01 * column.max()]
    out: dict[str, Any] = {
        "steps": int(np.count_nonzero(column > 0)),
        "worst_steps": [{"step": int(timeline.step[i]), "ms": float(column[i]) / 1e6} for i in worst],
        "ms_per_step": float(column.sum() / max(np.count_nonzero(column > 0), 1)) / 1e6,
    }
    if why == "straggler" and setting.records is not None:
        numbers = setting.records([int(timeline.batch[i]) for i in worst])
        for entry, i in zip(out["worst_steps"], worst, strict=True):
            if found := numbers.get(int(timeline.batch[i])):
                entry |= {"records": found[:_MAX_RECORDS], "record_count": len(found)}
    if where == "host":
        out["work"] = _host_work(side, parts, setting)
    if where in CAUSE and side == "data" and (where in FEED_CAUSES or where in ("cpu_contention", "gc")) and len(made):
        service = np.concatenate([model.make[model.known, CAUSE[where]] for model in parts])
        if len(service):
            middle, high = np.quantile(service, [0.5, 0.95])
            out["service_ms_per_batch"] = {"p50": middle / 1e6, "p95": high / 1e6, "max": float(service.max()) / 1e6}
        out["workers"] = sorted({int(made.actor[b]) for m in parts for b in m.batch[m.known]})
    if where in ("read", "storage") and len(made):
        out["blocks_read"] = int(made.inblock[made.inblock >= 0].sum()) if (made.inblock >= 0).any() else None
        if out["blocks_read"] is None:
            out["blocks_read_reason"] = "the system gave no reading, so read and storage cannot be told apart"
        out["page_faults"] = int(made.faults[made.faults >= 0].sum()) if (made.faults >= 0).any() else None
        if where == "storage":
            out["seen"] = _storage_seen(out["blocks_read"], out["page_faults"])
        if (made.read_cpu_ns >= 0).any():
            out["read_cpu_ms_per_batch"] = float(made.read_cpu_ns[made.read_cpu_ns >= 0].mean()) / 1e6
    if where == "cpu_contention" and len(made):
        out["run_queue_coverage"] = made.coverage.get("runq_ns")
    return out


def _storage_seen(blocks: int | None, faults: int | None) -> str:
    """How the system showed that storage was waited for."""
    if faults:
        return f"{faults:,} page faults had to wait for storage" + (f", {blocks:,} blocks were read" if blocks else "")
    if blocks:
        return f"{blocks:,} blocks were read by read calls"
    return (
        "the reader was blocked, and the system counted no blocks: a network file system, or pages that another "
        "process had asked for"
    )


def workers_needed(parts: list[Model], timeline: Timeline) -> tuple[int, float]:
    """(workers so that making keeps up with the step without its stall, ms a batch takes to make)."""
    make = np.concatenate([model.make.sum(axis=1) for model in parts])
    steady = timeline.steady
    busy = (timeline.wall_ns - timeline.stall_ns)[steady]
    step = float(busy.mean()) if len(busy) else 0.0
    return (math.ceil(1.1 * float(make.mean()) / step) if step > 0 else 0), float(make.mean()) / 1e6


def _host_work(side: str, parts: list[Model], setting: Setting) -> str:
    """What the host time of a cause is made of, as far as the record tells it apart."""
    if side == "profiler":
        return "fingerprints and record numbers"
    told = any(part.per_step_ns()[:, CAUSE["profiler"]].any() for part in parts)
    return "fingerprints and display" if setting.fingerprints and not told else "display and other work of the loop"


def remedy(key: Key, parts: list[Model], timeline: Timeline, found: dict[str, Any], setting: Setting) -> str:
    """What to try next, naming configuration keys; for a foreign loop, in terms of that loop."""
    where, why, side = key
    model = max(parts, key=lambda part: len(part.rows))
    if why == "cold_start":
        return "one-off: it weighs less the longer the run; nothing to change unless runs are very short"
    if setting.loop:
        return _for_loop(key, found)
    if why == "spill":
        mib = found.get("spilled_mib")
        return (
            "give Ray's object store more room (ray start --object-store-memory), or fill it less: fewer "
            "feed.remote_workers, a smaller data.train.batch, feed.pixels: uint8; ray memory shows what lies in it"
            + (f" ({mib:,} MiB were written to disk)" if mib else "")
        )
    if why == "fault":
        return "find out what ended the worker (see the faults); feed.max_restarts bounds how often one is replaced"
    if why == "backpressure":
        return f"raise feed.depth (now {model.depth}) to {max(2 * model.depth, model.workers + 2, 4)}"
    if why == "straggler" and where != "cpu_contention":
        return f"{_records(found)}; a deeper feed.depth hides rare slow batches"
    if why == "scheduling":
        return "leave a core for the trainer: fewer feed.workers than cores, device.blas_threads 1"
    if side == "profiler":
        return "profile.fingerprints: off saves it, but then the run cannot be compared with another bit for bit"
    if side == "loop" and where == "unknown":
        return _UNKNOWN
    if where == "host" and found.get("work", "").startswith("fingerprints"):
        return "profile.fingerprints: off, and a larger display in the solver's prototxt"
    return _for_place(where, model, parts, timeline, setting)


def _records(found: dict[str, Any]) -> str:
    """Which records to look at for slow batches."""
    worst = found["worst_steps"]
    steps = ", ".join(str(entry["step"]) for entry in worst)
    listed = [entry for entry in worst if "records" in entry]
    if not listed:
        return f"look at the batches of steps {steps}; RUN/records/ names the record numbers of each step"
    first = listed[0]
    numbers = ", ".join(map(str, first["records"][:4])) + (", ..." if first["record_count"] > 4 else "")
    return (
        f"look at the records of steps {steps} (step {first['step']}: {numbers}; "
        f"all are in the JSON report and in RUN/records/)"
    )


def _for_loop(key: Key, found: dict[str, Any]) -> str:
    """Advice for a loop that profiler.watch looked at: it has no configuration of ours."""
    where, why, side = key
    if why == "spill":
        return "give Ray's object store more room (ray start --object-store-memory), or keep fewer objects in it"
    if side == "loop" and where == "unknown":
        return "record spans in the loop's body (recorder.span), or name what it is: profiler.watch(..., body=...)"
    if why == "straggler":
        steps = ", ".join(str(entry["step"]) for entry in found["worst_steps"])
        return f"let the loader fetch further ahead; why steps {steps} waited cannot be told: {_UNSEEN}"
    return {
        "h2d": "copy ahead of the step, from pinned memory, or copy less",
        "cpu_contention": "leave cores free: fewer workers of the loader, a quiet host",
        "gc": "keep less alive per step; gc.freeze() after start",
        "alloc": "allocate before the loop; steady state should allocate nothing",
        "host": "do this work less often, or outside of the loop",
        "checkpoint": "write snapshots less often",
        "sync": "look at the slowest trainer",
    }.get(
        where, f"give the loader more workers, or make its items cheaper; which stage is slow cannot be told: {_UNSEEN}"
    )


def _more(model: Model, parts: list[Model], timeline: Timeline, setting: Setting) -> tuple[str | None, str | None]:
    """(how to make batches by more hands, None where the host holds no more; why that is all)."""
    most = setting.most_workers
    if model.serial:
        if most is not None and most < 1:
            return None, "one core holds no worker beside the trainer"
        return "use feed.engine: ray, so that batches are made while the step computes", None
    wanted = max(workers_needed(parts, timeline)[0], model.workers + 1)
    if most is None:
        return (
            f"raise feed.workers to {wanted} (now {model.workers}) if the host has the cores, which is not known",
            None,
        )
    if most <= model.workers:
        return None, f"{setting.cores} cores hold no more feed.workers than the {model.workers} there are"
    limit = f"the most that {setting.cores} cores hold" if wanted > most else None
    return f"raise feed.workers to {min(wanted, most)} (now {model.workers})", limit


def _for_place(where: str, model: Model, parts: list[Model], timeline: Timeline, setting: Setting) -> str:
    cheaper = {
        "storage": "keep the data in memory or on a faster disk, set data.order.shuffle: block",
        "read": "make records smaller (datasets.convert --resize, --encode-type jpg), or a data layer's read() cheaper",
        "decode": "store images decoded if they are not (datasets.convert without --encoded)",
        "augment": "use a smaller data.transform.crop, or feed.pixels: uint8: mean and scale are left to the device",
        "function": "make your function (data.transform.python) cheaper: one call of NumPy for a batch "
        "(pipeline.per_batch) costs less than one for each image",
        "collate": "use a smaller data.train.batch or data.transform.crop",
        "transfer": "convert to LMDB (datasets.convert --backend lmdb), which each worker reads for itself",
    }
    if where in cheaper and where != "transfer":
        more, limit = _more(model, parts, timeline, setting)
        if more is None:
            return f"{cheaper[where]}; {limit}"
        if limit is not None:
            return f"{more}, {limit}; beyond that {cheaper[where]}"
        return more if where == "read" else f"{cheaper[where]}, or {more}"
    fewer = "fewer feed.workers, " if model.workers > 1 and not model.serial else ""
    return {
        **cheaper,
        "h2d": "copy less: a smaller data.transform.crop or data.train.batch; the copy must fit under the compute",
        "cpu_contention": f"leave cores free: {fewer}device.blas_threads 1, a quiet host",
        "gc": "keep less alive per step; gc.freeze() after start",
        "alloc": "allocate before the loop; steady state should allocate nothing",
        "host": "show the loss less often: a larger display in the solver's prototxt",
        "checkpoint": "raise run.checkpoint_every",
        "sync": "look at the slowest trainer",
    }.get(where, _unknown(model, parts, timeline, setting))


def _unknown(model: Model, parts: list[Model], timeline: Timeline, setting: Setting) -> str:
    """What to do about time of the feed that no stage covers."""
    if not model.known.any():
        return "set profile.detail: full, which records the stages of the feed"
    if not model.serial:
        return _UNKNOWN
    # The trainer makes the batches: its spans are most of what recording costs, and a worker would hide both.
    said = [_more(model, parts, timeline, setting)[0] or _UNKNOWN]
    if setting.recording_s:
        said.append(f"what recording costs, {setting.recording_s:.2g} s in all, falls there too")
    return "; ".join(said)
