"""What the memory of each process of a run is made of: its own, page cache of mapped files, shared memory. And what its
nets used of it, step by step.

A mapped database counts as resident memory of everybody who reads it and looks like a leak until all of it has been
read once. The kernel takes such pages back whenever it needs them; only anonymous memory can leak.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from profiler.growth import classify
from profiler.store import Run

KINDS = ("anonymous", "file", "shared")
TEXT = (
    "File-backed memory is page cache of mapped files, such as the database: the kernel takes it back when it is "
    "needed, so it is no leak, however large. A leak would show as anonymous memory that keeps growing."
)
FIGURES = ("used", "reserved", "largest_free", "live_blobs")
_POINTS = 200
_ORDER = ("trainer", "worker", "owner")


def split(run: Run) -> dict[str, Any]:
    """Memory of a run by process, from its samples: bytes, ``peak`` (of each kind by itself) and ``last``.

    ``processes``: those that recorded, trainer first, with None and a ``reason`` where there is no reading; ``others``:
    what else the job started (Ray's own processes), summed up; ``reason``: why there is nothing at all; ``nets``: see
    :func:`nets`.
    """
    readings = _readings(run)
    if not readings:
        reason = "no memory was sampled: " + (
            "profile.samplers_hz is 0, or the run was too short" if not run.samples.num_rows
            else "the system does not split it by kind (/proc/PID/status)"
        )  # fmt: skip
        return {"processes": [], "others": None, "text": TEXT, "reason": reason, "nets": nets(run)}
    rows, known = [], set()
    for process, said in sorted(run.processes.items(), key=lambda item: _place(item[1])):
        where = (str(said.get("host")), int(said.get("pid") or 0))
        if where in known:
            continue  # a thread that records for itself: the memory is its process's
        known.add(where)
        row = {"process": process, "name": said.get("name"), "role": said.get("role"), "pid": said.get("pid")}
        found = readings.get(where)
        if found is None:
            untold = "it was not sampled: it ran on another host, or for less than half a second"
            rows.append({**row, "peak": None, "last": None, "reason": untold})
        else:
            rows.append({**row, **_figures(found), "reason": None})
    rest = [_figures(found)["peak"] for where, found in sorted(readings.items()) if where not in known]
    others = {"count": len(rest), "peak": {kind: sum(peak[kind] for peak in rest) for kind in KINDS}} if rest else None
    return {"processes": rows, "others": others, "text": TEXT, "reason": None, "nets": nets(run)}


def nets(run: Run) -> list[dict[str, Any]]:
    """Of each process what its nets used after every step, and what that looks like (:mod:`profiler.growth`).

    ``figures``: of ``used``, ``reserved``, ``largest_free`` (bytes; None where the library does not tell) and
    ``live_blobs``, the ``first``, ``last`` and ``peak``. ``series``: the same by ``step``, at most ``_POINTS`` of them
    (each step is in the run's folder memory/). ``verdict``, ``reason``, ``evidence``, ``remedy``: what it looks like.
    """
    table, found = run.memory, []
    process = np.asarray(table.column("process").to_pylist()) if table.num_rows else np.array([])
    for who in sorted(set(process.tolist())):
        mine = {name: table.column(name).to_numpy()[process == who] for name in ("step", *FIGURES)}
        known = {name: None if (mine[name] < 0).any() else mine[name] for name in FIGURES}
        judged = classify(mine["step"], mine["used"], mine["reserved"], known["largest_free"], known["live_blobs"])
        some = np.unique(np.linspace(0, len(mine["step"]) - 1, _POINTS).astype(int))
        found.append({
            "process": who,
            "steps": len(mine["step"]),
            "figures": {
                name: None if values is None
                else {"first": int(values[0]), "last": int(values[-1]), "peak": int(values.max())}
                for name, values in known.items()
            },
            "series": {"step": mine["step"][some].tolist()}
            | {name: values[some].tolist() for name, values in known.items() if values is not None},
            "verdict": judged.verdict, "reason": judged.reason, "evidence": judged.evidence, "remedy": judged.remedy,
        })  # fmt: skip
    return found


def _readings(run: Run) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """bytes over time by (host, pid) and kind."""
    table = run.samples
    if not table.num_rows:
        return {}
    metric = table.column("metric").to_numpy(zero_copy_only=False).astype(str)
    chosen = np.isin(metric, [f"rss_{kind}" for kind in KINDS])
    metric, host = metric[chosen], table.column("host").to_numpy(zero_copy_only=False).astype(str)[chosen]
    pid, at, value = (table.column(name).to_numpy()[chosen] for name in ("pid", "t_ns", "value"))
    order = np.argsort(at, kind="stable")
    found: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    for where in sorted(set(zip(host.tolist(), pid.tolist(), strict=True))):
        mine = order[(host[order] == where[0]) & (pid[order] == where[1])]
        found[where] = {kind: value[mine][metric[mine] == f"rss_{kind}"] for kind in KINDS}
    return found


def _figures(found: dict[str, np.ndarray]) -> dict[str, dict[str, int]]:
    return {
        "peak": {kind: int(values.max()) for kind, values in found.items()},
        "last": {kind: int(values[-1]) for kind, values in found.items()},
    }


def _place(said: dict[str, Any]) -> tuple[int, int, int]:
    role = str(said.get("role"))
    return (_ORDER.index(role) if role in _ORDER else len(_ORDER), int(said.get("actor") or 0), int(said["pid"]))
