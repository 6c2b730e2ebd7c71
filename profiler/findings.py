"""What happened to the run besides its timing: faults, restarts, a bad end, damaged files, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from profiler import memory, rounding
from profiler.events import Flag, Kind, Stage
from profiler.finding import Finding
from profiler.growth import MIB
from profiler.stalls import Attribution
from profiler.store import Run
from profiler.timeline import PART, Timeline

_LOST = "worker_lost"
_SILENT = "worker_silent"
_BAD = ("bad_record", "bad_records")
_WARNED = ("data_warning", "loss_saturated", "pinning_warning")
_SPILLED = "objects_spilled"
_CHECKED = "checksums"
_ORDER = "emission"
_QUIET = ("closed", "gc_short", "layer", _CHECKED, _ORDER, _SPILLED, *_WARNED, *_BAD, *rounding.NOTES)
_SELF = ("note", "t_ns", "wall_ns", "process", "name", "role", "actor", "pid")
_MANY = 20


def lost_steps(notes: Iterable[dict[str, Any]]) -> set[int]:
    """Steps that a lost worker was making."""
    return {int(note["step"]) for note in notes if note.get("note") == _LOST and isinstance(note.get("step"), int)}


def lost_figures(note: Mapping[str, Any]) -> str:
    """What memory a lost worker and its control group had, in words; empty where nothing is known."""
    said = []
    if "rss_mib" in note:
        own, before = note.get("own_mib"), note.get("seen_s_before")
        said.append(f"{note['rss_mib']} MiB resident, {own} of them its own ({before} s before)")
    if "group_used_mib" in note:
        of = f" of {note['group_limit_mib']}" if "group_limit_mib" in note else ""
        cache = f", {note['group_cache_mib']} of them page cache" if "group_cache_mib" in note else ""
        said.append(f"its control group {note['group_used_mib']}{of} MiB{cache}")
    if "oom_kills" in note:
        said.append(f"processes killed for memory there so far: {note['oom_kills']}")
    return "; ".join(said)


def fault_counts(notes: Iterable[dict[str, Any]]) -> dict[str, int]:
    """How often each kind of fault was noted."""
    counts: dict[str, int] = {}
    for note in notes:
        if note.get("note") == _LOST:
            counts[_LOST] = counts.get(_LOST, 0) + 1
    return counts


def overhead(run: Run, timeline: Timeline) -> dict[str, Any]:
    """What the profiler cost the trainer: seconds and share of the steps' time, each None with a reason if not told.

    ``seconds``, ``share``: recording itself; ``fingerprints_*``: making fingerprints between the steps' compute.
    """
    wall_s = float(timeline.wall_ns.sum()) / 1e9
    closed = [note for note in run.notes if note.get("note") == "closed" and note.get("actor") in (0, "0")]
    seconds = sum(float(note.get("overhead_ns", 0)) for note in closed) / 1e9 if closed else None
    tree = timeline.nesting
    own = (tree.events["flags"] & Flag.PROFILER > 0) & (timeline.row >= 0)
    hashing = float(tree.own_ns[own].sum()) / 1e9 if own.any() else None
    untold = "the record does not tell them from the loop's display" if run.fingerprints.num_rows else "there are none"
    share = [None if cost is None or not wall_s else cost / wall_s for cost in (seconds, hashing)]
    return {
        "seconds": seconds, "share": share[0],
        "reason": None if closed else "the trainer's recorder was not closed",
        "fingerprints_seconds": hashing, "fingerprints_share": share[1],
        "fingerprints_reason": None if own.any() else untold,
    }  # fmt: skip


def outcome(run: Run) -> str:
    """How the run ended: what its manifest says, or "unfinished" where the end was never written."""
    said = run.manifest.get("outcome")
    if isinstance(said, dict):
        said = said.get("state")
    return str(said) if said and said != "running" else "unfinished"


def collect(run: Run, events: np.ndarray, timeline: Timeline, attribution: Attribution) -> tuple[Finding, ...]:
    """All findings of a run, the gravest first. ``events``: EVENT[n] of all processes."""
    found = [
        *_end(run, timeline), *_faults(run, events), *_silent(run), *_order(run, timeline), *_bad_records(run),
        *_warnings(run), *_spilled(run, events), *_checksums(run), *_growth(run), *rounding.findings(run.notes),
        *_notes(run), *_record(run, timeline, attribution),
    ]  # fmt: skip
    rank = {"fault": 0, "warning": 1, "info": 2}
    return tuple(sorted(found, key=lambda finding: rank[finding.level]))


def _end(run: Run, timeline: Timeline) -> list[Finding]:
    found = []
    if outcome(run) == "unfinished":
        at = f" in step {int(timeline.step[-1])}" if len(timeline) else " before its first step"
        text = f"The record ends{at}: the run was killed or is still going. What was written until then is reported."
        found.append(Finding("unfinished", "fault", text))
    said = run.manifest.get("outcome")
    detail = said if isinstance(said, dict) else {}
    if outcome(run) == "interrupted":
        found.append(Finding("interrupted", "warning", f"The run was stopped by {detail.get('signal', 'a signal')}."))
    elif outcome(run) == "failed":
        found.append(Finding("failed", "fault", f"The run failed: {detail.get('error', 'no reason was written')}"))
    for segment in range(1, int(timeline.segment.max(initial=0)) + 1):
        row = int(np.flatnonzero(timeline.segment == segment)[0])
        before, after = int(timeline.step[row - 1]), int(timeline.step[row])
        again = f"; steps {after} to {before} were done again" if after <= before else ""
        found.append(Finding("resumed", "info", f"The run was resumed at step {after}{again}.", after))
    return found


def _faults(run: Run, events: np.ndarray) -> list[Finding]:
    restarts = events[(events["stage"] == Stage.RESTART) & (events["kind"] == Kind.SPAN)]
    found = []
    for note in run.notes:
        if note.get("note") != _LOST:
            continue
        step = note.get("step")
        step = step if isinstance(step, int) and step >= 0 else None
        who = note.get("worker")
        text = f"Worker {who} was lost" if who is not None else "A worker was lost"
        if note.get("lost_pid"):
            text = text.replace(" was lost", f" (process {note['lost_pid']}) was lost")
        if step is not None:
            text += f" while it made the batch of step {step}"
        how = [str(note[key]) for key in ("how", "exit", "meaning", "signal") if note.get(key)]
        text += f" ({', '.join(how)})" if how else ""
        if note.get("record") is not None:
            text += f"; it was at record {note['record']} (key {note.get('key')!r})"
        if said := lost_figures(note):
            text += f"; when last seen it had {said}"
        moment = int(note.get("t_ns") or 0)
        back = restarts[(restarts["t0_ns"] <= moment) & (restarts["t1_ns"] >= moment)]
        if len(back):
            text += f"; a new one was at work {(int(back['t1_ns'][0]) - moment) / 1e9:.1f} s later"
        done = step is None or _made_after(events, step, moment)
        text += ". Its batch was made again: no record was lost or repeated." if done and step is not None else "."
        found.append(Finding(_LOST, "fault", text, step))
    return found[:_MANY]


def _silent(run: Run) -> list[Finding]:
    """Workers that hung with nobody waiting for them: told at the end, when they did not end as they were asked to."""
    found = []
    for note in run.notes:
        if note.get("note") != _SILENT:
            continue
        step = note.get("step") if isinstance(note.get("step"), int) and note["step"] >= 0 else None
        silent = f"it had given no sign of life for {note.get('silent_s')} s"
        text = f"Worker {note.get('worker')} (process {note.get('pid')}) hung: at the end of the run {silent}"
        text += f" in the batch of step {step}, which nobody was waiting for" if step is not None else ""
        text += ", and it was killed. Its lane shows what it did last; storage that does not answer is the usual cause."
        found.append(Finding(_SILENT, "warning", text, step))
    return found[:_MANY]


def _order(run: Run, timeline: Timeline) -> list[Finding]:
    """That batches were taken as they became ready: whoever compares the run with another has to know it first."""
    notes = [note for note in run.notes if note.get("note") == _ORDER and note.get("emit") == "arrival"]
    if not notes:
        return []
    moved = int((timeline.batch != timeline.step).sum())
    text = (
        f"Batches were taken as they became ready (data.order.emit: arrival), {moved} of {len(timeline)} at another "
        "step than their own. Another run takes them in another order: where losses, weights or fingerprints of two "
        "runs differ step by step, this is the cause. The bytes of each batch do not depend on it: its fingerprints "
        "(ids, raw, fill, device) carry the batch's own number."
    )
    return [Finding("emission", "info", text)]


def _bad_records(run: Run) -> list[Finding]:
    """Records that the feed could not use and went on without, by phase and policy."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for note in run.notes:
        if note.get("note") in _BAD:
            groups.setdefault((str(note.get("phase", "TRAIN")), str(note.get("policy", "skip"))), []).append(note)
    found = []
    for (phase, policy), notes in sorted(groups.items(), reverse=True):
        # A step that was done again after a kill notes its records again.
        records = {note.get("record"): note for note in notes if note["note"] == "bad_record"}
        epochs = {int(note["epoch"]): int(note["items"]) for note in notes if note["note"] == "bad_records"}
        count = max([len(records), *(int(note["records"]) for note in notes if note["note"] == "bad_records")])
        done = {"skip": "skipped, others stood in for them", "zero": "taken as zeros with their labels"}[policy]
        listed = [f"{note.get('key')} ({note.get('reason')})" for note in list(records.values())[:_MANY]]
        text = f"{count} record{'s' if count != 1 else ''} of the {phase} set could not be used and "
        if count == 1:
            done = {"skip": "skipped, another stood in for it", "zero": "taken as zeros with its label"}[policy]
        text += ("was " if count == 1 else "were ") + done
        text += f": key{'s' if count != 1 else ''} {', '.join(listed)}" if listed else ""
        text += f" and {count - len(listed)} more" if count > len(listed) else ""
        if epochs:
            shown = ", ".join(f"epoch {epoch}: {items}" for epoch, items in sorted(epochs.items())[:_MANY])
            text += f". Samples concerned: {shown}" + (", ..." if len(epochs) > _MANY else "")
        first = next(iter(records.values()), {}).get("step")
        found.append(Finding("bad_records", "warning", text + ".", first if isinstance(first, int) else None))
    return found


def _warnings(run: Run) -> list[Finding]:
    """What was said in whole sentences, of the data sets for instance: once, whatever the number of who said it."""
    said = {str(note.get("text")): note for note in reversed(run.notes) if note.get("note") in _WARNED}
    steps = ((text, note, note.get("step")) for text, note in reversed(said.items()))
    return [
        Finding(str(note["note"]), "warning", text, step if isinstance(step, int) else None)
        for text, note, step in steps
    ][:_MANY]


def _spilled(run: Run, events: np.ndarray) -> list[Finding]:
    """That Ray wrote objects to disk, whether steps waited for it or not."""
    nodes = {str(note.get("node")): note.get("store_mib") for note in run.notes if note.get("note") == _SPILLED}
    seen = events[(events["stage"] == Stage.SPILL) & (events["kind"] == Kind.SPAN)]
    if not nodes or not len(seen):
        return []
    where = ", ".join(f"{node} ({mib} MiB)" for node, mib in sorted(nodes.items()))
    text = (
        f"Ray's object store was full on {where}: {int(seen['bytes'].sum()) >> 20:,} MiB of objects were written to "
        f"disk and {int(seen['items'].sum()) >> 20:,} MiB read back. Batches of remote workers wait meanwhile. A "
        "larger store (ray start --object-store-memory) or fewer objects in it (ray memory shows them) end that."
    )
    return [Finding(_SPILLED, "warning", text)]


def _checksums(run: Run) -> list[Finding]:
    """What verifying checksums takes of reading each LevelDB: of the last sample of every process."""
    last = {(note.get("data_set"), note.get("process")): note for note in run.notes if note.get("note") == _CHECKED}
    found = []
    for data_set in dict.fromkeys(name for name, _ in last):
        notes = [note for (name, _), note in last.items() if name == data_set]
        samples = sum(note["samples"] for note in notes)
        plain, verified = (
            sum(note["samples"] * note[key] for note in notes) / samples for key in ("plain_ns", "verified_ns")
        )
        cost = max(0, verified - plain)
        text = (
            f"Verifying the checksums of {data_set} takes {100 * cost / max(verified, 1):.0f} % of the CPU time of "
            f"looking a record up ({cost / 1e6:.3f} of {verified / 1e6:.3f} ms, by {samples} blocks)."
        )
        found.append(Finding(_CHECKED, "info", text))
    return found


def _growth(run: Run) -> list[Finding]:
    """Processes whose nets take more and more memory, with what that looks like."""
    found: list[Finding] = []
    for net in memory.nets(run):
        if net["verdict"] in (None, "steady"):
            continue
        seen = net["evidence"]
        figures = ", ".join(
            f"{name} {seen[f'{name}_first'] / MIB:,.1f} to {seen[f'{name}_last'] / MIB:,.1f} MiB"
            for name in ("used", "reserved")
        )
        looks = f"looks like {net['verdict']}: {net['reason']} ({figures})"
        text = f"Memory of {net['process']} grows, which {looks}. {net['remedy']}"
        level = "info" if net["verdict"] == "cache" else "warning"
        found.append(Finding("memory_growth", level, text))
    return found


def _made_after(events: np.ndarray, step: int, moment_ns: int) -> bool:
    """Whether the record shows that the batch of a step was finished after that moment."""
    made = (events["stage"] == Stage.BATCH) & (events["kind"] == Kind.SPAN) & (events["step"] == step)
    return bool((events["t1_ns"][made] > moment_ns).any())


def _notes(run: Run) -> list[Finding]:
    found = []
    for note in run.notes:
        kind = str(note.get("note", ""))
        if kind in (_LOST, _SILENT) or kind in _QUIET:
            continue
        fields = ", ".join(f"{key} {value}" for key, value in note.items() if key not in _SELF)
        grave = any(word in kind for word in ("error", "lost", "bad", "fail", "timeout"))
        who = note.get("process") or note.get("name") or "?"
        text = f"{kind.replace('_', ' ')} ({who}){': ' + fields if fields else ''}"
        if kind == "feed_tuned":
            text = str(note.get("text"))
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
        found.append(Finding("merged", "info", f"Too small to be told apart, so judged together: {names}."))
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
