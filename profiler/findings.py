"""What happened to the run besides its timing: faults, restarts, a bad end, damaged files, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from profiler.finding import Finding
from profiler.stalls import Attribution
from profiler.store import Run
from profiler.timeline import PART, Timeline

_LOST = "worker_lost"
_BACK = ("worker_restarted", "worker_started", "worker_replaced")
_QUIET = ("closed", "gc_short", *_BACK)
_SELF = ("note", "t_ns", "wall_ns", "process", "name", "role", "actor", "pid")
_MANY = 20


def lost_steps(notes: Iterable[dict[str, Any]]) -> set[int]:
    """Steps that a lost worker was making."""
    return {int(note["step"]) for note in notes if note.get("note") == _LOST and isinstance(note.get("step"), int)}


def fault_counts(notes: Iterable[dict[str, Any]]) -> dict[str, int]:
    """How often each kind of fault was noted."""
    counts: dict[str, int] = {}
    for note in notes:
        if note.get("note") == _LOST:
            counts[_LOST] = counts.get(_LOST, 0) + 1
    return counts


def overhead(notes: Iterable[dict[str, Any]], wall_s: float) -> dict[str, Any]:
    """What recording cost the trainer: seconds and share of the steps' time; None with a reason if it never said."""
    closed = [note for note in notes if note.get("note") == "closed" and note.get("actor") in (0, "0")]
    if not closed:
        return {"seconds": None, "share": None, "reason": "the trainer's recorder was not closed"}
    seconds = sum(float(note.get("overhead_ns", 0)) for note in closed) / 1e9
    return {"seconds": seconds, "share": seconds / wall_s if wall_s else None, "reason": None}


def outcome(run: Run) -> str:
    """How the run ended: what its manifest says, or "unfinished" where the end was never written."""
    said = run.manifest.get("outcome")
    if isinstance(said, dict):
        said = said.get("status") or said.get("state") or said.get("result")
    return str(said) if said and said != "running" else "unfinished"


def collect(run: Run, timeline: Timeline, attribution: Attribution) -> tuple[Finding, ...]:
    """All findings of a run, the gravest first."""
    found = [*_end(run, timeline), *_faults(run), *_notes(run), *_record(run, timeline, attribution)]
    rank = {"fault": 0, "warning": 1, "info": 2}
    return tuple(sorted(found, key=lambda finding: rank[finding.level]))


def _end(run: Run, timeline: Timeline) -> list[Finding]:
    found = []
    if outcome(run) == "unfinished":
        at = f" in step {int(timeline.step[-1])}" if len(timeline) else " before its first step"
        text = f"The record ends{at}: the run was killed or is still going. What was written until then is reported."
        found.append(Finding("unfinished", "fault", text))
    elif outcome(run) not in ("ok", "finished", "complete", "completed", "done"):
        found.append(Finding("outcome", "warning", f"The run ended early: {outcome(run)}."))
    error = run.manifest.get("outcome")
    if isinstance(error, dict) and error.get("error"):
        found.append(Finding("error", "fault", str(error["error"])))
    for segment in range(1, int(timeline.segment.max(initial=0)) + 1):
        row = int(np.flatnonzero(timeline.segment == segment)[0])
        before, after = int(timeline.step[row - 1]), int(timeline.step[row])
        again = f"; steps {after} to {before} were done again" if after <= before else ""
        found.append(Finding("resumed", "info", f"The run was resumed at step {after}{again}.", after))
    return found


def _faults(run: Run) -> list[Finding]:
    found = []
    for note in run.notes:
        if note.get("note") != _LOST:
            continue
        step = note.get("step") if isinstance(note.get("step"), int) else None
        who = note.get("worker_name") or note.get("worker") or note.get("lost") or "a worker"
        who = f"worker {who}" if isinstance(who, int) else str(who)
        how = note.get("signal") or (
            f"exit status {note['exit_status']}" if note.get("exit_status") is not None else None
        )
        text = f"{who[:1].upper()}{who[1:]} was lost{f' at step {step}' if step is not None else ''}"
        text += f" ({how})" if how else ""
        after = note.get("replaced_s")
        text += f"; replaced after {after:.1f} s" if isinstance(after, int | float) else "; it was replaced"
        text += ", its batch was made again, no record was lost or repeated."
        found.append(Finding(_LOST, "fault", text, step))
    return found[:_MANY]


def _notes(run: Run) -> list[Finding]:
    found = []
    for note in run.notes:
        kind = str(note.get("note", ""))
        if kind == _LOST or kind in _QUIET:
            continue
        fields = ", ".join(f"{key} {value}" for key, value in note.items() if key not in _SELF)
        grave = any(word in kind for word in ("error", "lost", "bad", "fail", "timeout"))
        who = note.get("process") or note.get("name") or "?"
        text = f"{kind.replace('_', ' ')} ({who}){': ' + fields if fields else ''}"
        step = note.get("step")
        found.append(Finding(kind, "warning" if grave else "info", text, step if isinstance(step, int) else None))
    if len(found) > _MANY:
        rest = len(found) - _MANY
        found = [*found[:_MANY], Finding("more", "info", f"{rest} more notes are in events/*.jsonl.")]
    return found


def _record(run: Run, timeline: Timeline, attribution: Attribution) -> list[Finding]:
    # A run that was killed closed none of its files; that is said once, in its outcome.
    known = "not closed" if outcome(run) == "unfinished" else None
    problems = [problem for problem in run.problems if known is None or known not in problem]
    found = [Finding("record", "warning", f"Damaged or missing: {problem}.") for problem in problems[:_MANY]]
    dropped = sum(int(note.get("lost", 0)) for note in run.notes if note.get("note") == "closed")
    if dropped:
        found.append(Finding("dropped", "warning", f"{dropped} events could not be written and are missing."))
    hosts = {process.get("boot_id") for process in run.processes.values()}
    if len(hosts) > 1:
        text = f"The processes ran under {len(hosts)} clocks (hosts or boots), which are not compared exactly."
        found.append(Finding("clocks", "warning", text))
    wall = float(timeline.wall_ns.sum())
    gap = float(timeline.parts_ns[:, PART["unattributed"]].sum())
    if wall and gap > 0.02 * wall:
        found.append(
            Finding("unattributed", "warning", f"{100 * gap / wall:.1f} % of step time is covered by no span.")
        )
    if attribution.replay_error is not None and attribution.replay_error > 0.05:
        off = f"{100 * attribution.replay_error:.1f} %"
        found.append(Finding("replay", "warning", f"The replay is {off} off the measured run: take shares with care."))
    if attribution.merged:
        names = ", ".join(attribution.merged)
        found.append(Finding("merged", "info", f"Small causes were judged together: {names}."))
    if run.fingerprints.num_rows:
        steps = len(set(run.fingerprints.column("step").to_pylist()))
        kinds = sorted(map(str, set(run.fingerprints.column("name").to_pylist())))
        text = f"Fingerprints of {steps} steps were recorded: {', '.join(kinds[:8])}."
        found.append(Finding("fingerprints", "info", text))
    else:
        found.append(
            Finding("fingerprints", "info", "No fingerprints were recorded: two runs cannot be compared bit for bit.")
        )
    return found
