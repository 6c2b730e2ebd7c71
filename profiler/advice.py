"""Words and numbers beside a cause: what it means, what shows it, and which configuration key helps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from profiler.services import CAUSE, FEED_CAUSES, Batches, Model
from profiler.timeline import Timeline

WHERE_TEXT = {
    "storage": "blocked on storage while reading",
    "read": "reading: look-up and parsing of records",
    "decode": "decoding of images",
    "augment": "augmentation (crop, mirror, own transform)",
    "collate": "collating samples into the batch",
    "transfer": "moving records or batches between processes",
    "h2d": "host-to-device copy that compute did not hide",
    "compute": "compute",
    "sync": "waiting for other trainers",
    "cpu_contention": "processes ready to run that got no CPU",
    "gc": "garbage collection",
    "alloc": "memory allocation",
    "host": "the loop's own host work (display, fingerprints)",
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
}
_UNKNOWN = "look at the lanes of the HTML report: it lies between the recorded stages"
_TRAINER = ("h2d", "sync", "alloc", "host", "checkpoint")


def label(where: str, why: str) -> str:
    """A short name for people: the place, or what happened where no place is known."""
    if where == "unknown" and why in ("fault", "cold_start", "scheduling"):
        return {"fault": "a lost worker", "cold_start": "start-up", "scheduling": "late hand-offs"}[why]
    return where.replace("_", " ")


def text(key: tuple[str, str]) -> str:
    """One sentence for a (where, why)."""
    where, why = key
    if where == "unknown" and why != "throughput":
        return WHY_TEXT[why]
    if why == "throughput" and (where in _TRAINER or where == "unknown"):
        return WHERE_TEXT[where]
    return f"{WHERE_TEXT[where]}; {WHY_TEXT[why]}"


def evidence(
    key: tuple[str, str], column: np.ndarray, timeline: Timeline, parts: list[Model], made: Batches
) -> dict[str, Any]:
    """Which steps, batches and workers, and what the operating system read. A missing reading is None with a reason."""
    where, _why = key
    worst = [int(i) for i in np.argsort(-column, kind="stable")[:3] if column[i] > 0.01 * column.max()]
    out: dict[str, Any] = {
        "steps": int(np.count_nonzero(column > 0)),
        "worst_steps": [{"step": int(timeline.step[i]), "ms": float(column[i]) / 1e6} for i in worst],
        "ms_per_step": float(column.sum() / max(np.count_nonzero(column > 0), 1)) / 1e6,
    }
    if where in CAUSE and (where in FEED_CAUSES or where in ("cpu_contention", "gc")) and len(made):
        service = np.concatenate([model.make[model.known, CAUSE[where]] for model in parts])
        if len(service):
            middle, high = np.quantile(service, [0.5, 0.95])
            out["service_ms_per_batch"] = {"p50": middle / 1e6, "p95": high / 1e6, "max": float(service.max()) / 1e6}
        out["workers"] = sorted({int(made.actor[b]) for m in parts for b in m.batch[m.known]})
    if where in ("read", "storage") and len(made):
        out["blocks_read"] = int(made.inblock[made.inblock >= 0].sum()) if (made.inblock >= 0).any() else None
        if out["blocks_read"] is None:
            out["blocks_read_reason"] = "the system gave no reading, so read and storage cannot be told apart"
        if (made.read_cpu_ns >= 0).any():
            out["read_cpu_ms_per_batch"] = float(made.read_cpu_ns[made.read_cpu_ns >= 0].mean()) / 1e6
    if where == "cpu_contention" and len(made):
        out["run_queue_coverage"] = made.coverage.get("runq_ns")
    return out


def workers_needed(parts: list[Model], timeline: Timeline) -> tuple[int, float]:
    """(workers so that making keeps up with the step without its stall, ms a batch takes to make)."""
    make = np.concatenate([model.make.sum(axis=1) for model in parts])
    steady = timeline.steady
    busy = (timeline.wall_ns - timeline.stall_ns)[steady]
    step = float(busy.mean()) if len(busy) else 0.0
    return (math.ceil(1.1 * float(make.mean()) / step) if step > 0 else 0), float(make.mean()) / 1e6


def remedy(
    key: tuple[str, str], parts: list[Model], timeline: Timeline, found: dict[str, Any], cores: int | None
) -> str:
    """What to try next, naming configuration keys."""
    where, why = key
    model = max(parts, key=lambda part: len(part.rows))
    if why == "cold_start":
        return "one-off: it weighs less the longer the run; nothing to change unless runs are very short"
    if why == "fault":
        return "find out what ended the worker (see the faults); feed.max_restarts bounds how often one is replaced"
    if why == "backpressure":
        return f"raise feed.depth (now {model.depth}) to {max(2 * model.depth, model.workers + 2, 4)}"
    if why == "straggler" and where != "cpu_contention":
        steps = ", ".join(str(worst["step"]) for worst in found["worst_steps"])
        return f"look at the records of steps {steps} (datasets.inspect); a deeper feed.depth hides rare slow batches"
    if why == "scheduling":
        return "leave a core for the trainer: fewer feed.workers than cores, device.blas_threads 1"
    return _for_place(where, model, parts, timeline, cores)


def _for_place(where: str, model: Model, parts: list[Model], timeline: Timeline, cores: int | None) -> str:
    needed, _ms = workers_needed(parts, timeline)
    if model.serial:
        more = "use feed.engine: ray, so that batches are made while the step computes"
    else:
        wanted = max(needed, model.workers + 1)
        more = f"raise feed.workers to {wanted} (now {model.workers})"
        if cores is not None and wanted > cores:
            more += f"; this host has {cores} cores, so make the stage itself cheaper first"
    return {
        "storage": f"keep the data in memory or on a faster disk, set data.order.shuffle: block, or {more}",
        "read": more,
        "decode": f"store decoded images (datasets.convert without --encoded), or {more}",
        "augment": f"make the transform cheaper (data.transform.python), or {more}",
        "collate": f"use a smaller data.train.batch or data.transform.crop, or {more}",
        "transfer": "convert to LMDB (datasets.convert --backend lmdb), which each worker reads for itself",
        "h2d": "copy less: a smaller data.transform.crop or data.train.batch; the copy must fit under the compute",
        "cpu_contention": "leave cores free: fewer feed.workers, device.blas_threads 1, a quiet host",
        "gc": "keep less alive per step; gc.freeze() after start",
        "alloc": "allocate before the loop; steady state should allocate nothing",
        "host": "set profile.fingerprints: off, and show the loss less often",
        "checkpoint": "raise run.checkpoint_every",
        "sync": "look at the slowest trainer",
    }.get(where, _UNKNOWN if model.known.any() else "set profile.detail: full, which records the stages of the feed")
