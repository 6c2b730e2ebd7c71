"""The report of one run: ``python -m profiler.report RUN [--html F] [--json F] [--trace F]``.

A report is plain data (:class:`profiler.finding.Report`) made from the run folder alone; terminal, HTML and JSON only
write it down. The answer comes first, in one sentence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from profiler import advice, cli, correlate, findings, memory, store
from profiler.errors import StallscopeError
from profiler.events import PARTITION
from profiler.finding import NO_STALL, Report, StallCause
from profiler.services import making
from profiler.stalls import Attribution, attribute
from profiler.timeline import PART, Timeline, lanes
from profiler.timeline import build as build_timeline


@dataclass(frozen=True)
class Analysis:
    """Everything a rendering may draw: the run, its events (EVENT[n]), lane names, steps, blame and the report."""

    run: store.Run
    events: np.ndarray
    lanes: dict[int, str]
    timeline: Timeline
    attribution: Attribution
    report: Report


def analyse(run: store.Run) -> Analysis:
    """All of the analysis of a run, finished or not."""
    events, names = lanes(run.events, run.processes)
    timeline = build_timeline(events)
    config = run.manifest.get("config") or {}
    attribution = attribute(
        timeline, events, depth=_number(config, "feed", "depth"), lost_steps=findings.lost_steps(run.notes),
        setting=_setting(run, timeline), staging=_number(config, "device", "staging"),
    )  # fmt: skip
    return Analysis(run, events, names, timeline, attribution, _report(run, events, timeline, attribution, config))


def build(run: store.Run) -> Report:
    """The report of a loaded run."""
    return analyse(run).report


def summarise(folder: str | Path, outcome: Mapping[str, Any] | None = None) -> str:
    """The terminal report of a run folder as plain text (what a pipeline prints at its end).

    outcome: how the run ended, from one who knows: a full disk may have kept it out of the manifest.
    """
    from profiler import terminal

    return terminal.text(build(_load(folder, outcome)))


def write_default(folder: str | Path, outcome: Mapping[str, Any] | None = None) -> tuple[Report, dict[str, Path]]:
    """Write RUN/report.html and RUN/report.json; returns the report and the files by kind. outcome: as above."""
    analysis = analyse(_load(folder, outcome))
    files = {"html": Path(folder) / "report.html", "json": Path(folder) / "report.json"}
    _write(analysis, files)
    return analysis.report, files


def _load(folder: str | Path, outcome: Mapping[str, Any] | None) -> store.Run:
    run = store.load_run(folder)
    if outcome is not None:
        run.manifest["outcome"] = dict(outcome)
    return run


def _write(analysis: Analysis, files: dict[str, Path]) -> dict[str, str]:
    """Write the files asked for; returns remarks (what a size cap left out) by kind."""
    remarks: dict[str, str] = {}
    for kind, path in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "json":
                path.write_text(cli.dumps(analysis.report.to_json()) + "\n")
            elif kind == "html":
                from profiler import html

                path.write_text(html.page(analysis), encoding="utf-8")
            else:
                from profiler import chrome_trace

                remarks[kind] = chrome_trace.write(path, analysis.events, analysis.lanes).remark
        except OSError as error:
            raise StallscopeError(
                f"cannot write {path}: {error.strerror}", hint=f"another path for --{kind}"
            ) from error
    return remarks


def _setting(run: store.Run, timeline: Timeline) -> advice.Setting:
    """What advice for this run has to fit."""
    feed = (run.manifest.get("config") or {}).get("feed") or {}
    return advice.Setting(
        loop=(run.manifest.get("job") or {}).get("type") == "loop",
        cores=_number(run.manifest.get("environment") or {}, "cpu", "usable"),
        owner=feed.get("topology") == "split",
        fingerprints=bool(run.fingerprints.num_rows),
        recording_s=findings.overhead(run, timeline)["seconds"],
        records=lambda steps: _record_numbers(Path(run.folder), steps),
    )


def _record_numbers(folder: Path, steps: Collection[int]) -> dict[int, list[int]]:
    """The record numbers of some steps from RUN/records/, as far as they can be read."""
    import pyarrow as pa

    found: dict[int, list[int]] = {}
    for path in sorted((folder / "records").glob("ids-*.arrows")):
        try:
            with pa.memory_map(str(path)) as source:
                for batch in pa.ipc.open_stream(source):
                    for row in np.flatnonzero(np.isin(batch.column("step").to_numpy(), list(steps))).tolist():
                        found[int(batch.column("step")[row].as_py())] = batch.column("ids")[row].as_py()
        except (pa.ArrowException, OSError, ValueError, KeyError):
            continue  # torn by a kill: what came before the tear has been taken, the advice names the folder
    return found


def _number(document: dict[str, Any], *path: str) -> int | None:
    value: Any = document
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _report(
    run: store.Run, events: np.ndarray, timeline: Timeline, attribution: Attribution, config: dict[str, Any]
) -> Report:
    n = len(timeline)
    wall = timeline.wall_ns
    partition = {name: float(timeline.parts_ns[:, i].sum()) / 1e9 for i, name in enumerate(PARTITION)}
    steady = timeline.steady
    step_ms: dict[str, float | None] = {"p50": None, "p95": None, "p99": None}
    if n:
        values = np.quantile(wall[steady] / 1e6, [0.5, 0.95, 0.99])
        step_ms = dict(zip(step_ms, (float(v) for v in values), strict=True))
    au, kind = _utilisation(timeline, config)
    return Report(
        run=str(run.folder),
        headline=headline(timeline, attribution),
        outcome=findings.outcome(run),
        steps=n,
        cold_steps=int(timeline.first.sum()),
        wall_s=float(wall.sum()) / 1e9,
        step_ms=step_ms,
        au=au,
        au_kind=kind,
        partition=partition,
        stall_s=attribution.stall_s,
        stalls=attribution.causes,
        fix_together=attribution.fix_together,
        slack=attribution.slack,
        replay_error=attribution.replay_error,
        correlation=correlate.feed_and_steps(timeline, attribution.models),
        overhead=findings.overhead(run, timeline),
        coverage=_coverage(timeline, attribution),
        making=making(attribution.made),
        memory=memory.split(run),
        findings=findings.collect(run, events, timeline, attribution),
        faults=findings.fault_counts(run.notes),
    )


def _utilisation(timeline: Timeline, config: dict[str, Any]) -> tuple[float | None, str]:
    """(accelerator utilisation without cold steps, what it was made from)."""
    steady = timeline.steady
    wall = float(timeline.wall_ns[steady].sum()) if len(timeline) else 0.0
    if wall <= 0:
        return None, "n/a: no step was recorded"
    nominal = (config.get("device") or {}).get("step_ms")
    whole = steady & ~timeline.open
    if timeline.emulated.any() and isinstance(nominal, int | float):
        return min(1.0, float(nominal) * 1e6 * int(whole.sum()) / wall), "nominal compute / wall time (emulated)"
    if timeline.device_ns.any():
        return float(timeline.device_ns[steady].sum()) / wall, "device busy / wall time"
    return float(timeline.parts_ns[steady, PART["compute"]].sum()) / wall, "compute / wall time"


def _coverage(timeline: Timeline, attribution: Attribution) -> dict[str, Any]:
    """How much of what the answer rests on was really read; shares 0..1, None where nothing could be."""
    known = np.concatenate([m.known for m in attribution.models]) if attribution.models else np.zeros(0, bool)
    reading = attribution.made.coverage
    wall = float(timeline.wall_ns.sum())
    return {
        "batches": float(known.mean()) if len(known) else None,
        "cpu": reading.get("cpu_ns"),
        "run_queue": reading.get("runq_ns"),
        "blocks_read": reading.get("inblock"),
        "page_faults": reading.get("major_faults"),
        "unattributed": float(timeline.parts_ns[:, PART["unattributed"]].sum()) / wall if wall else None,
        "reason": None if len(known) and known.any() else "no stage inside the feed was recorded",
    }


def headline(timeline: Timeline, attribution: Attribution) -> str:
    """The answer in a sentence: whether steps waited for data and why; then what the loop itself cost, if it counts."""
    n = len(timeline)
    if not n:
        return "No training step was recorded, so there is nothing to say about stalls."
    rows = ~timeline.first & ~timeline.open
    if not rows.any():
        rows = np.ones(n, bool)
    wall = float(timeline.wall_ns[rows].mean()) / 1e6
    wait = float(timeline.parts_ns[rows][:, [PART["feed_wait"], PART["h2d"]]].sum(axis=1).mean()) / 1e6
    own = float(timeline.stall_ns[rows].mean()) / 1e6 - wait
    share = wait / wall if wall else 0.0
    warm = [cause for cause in attribution.causes if cause.why != "cold_start"] or list(attribution.causes)
    data = [cause for cause in warm if cause.side == "data"]
    if share >= NO_STALL:
        reason = _REASONS[data[0].why] if data else ""
        answer = f"Steps waited {wait:.1f} ms of {wall:.1f} ms for data{_made_of(data)}{reason}."
    else:
        said = f"{100 * share:.1f} %" if share >= 0.001 else "0.1 % or less"
        cold = float(timeline.stall_ns[timeline.first].sum()) / 1e9
        start = f"; only the start was slow ({cold:.1f} s in the first step)" if attribution.cold_stall else ""
        answer = f"The accelerator was never starved: {said} of the time was spent waiting for data{start}."
    if own < NO_STALL * wall:
        return answer
    if not timeline.parts_ns[rows, PART["compute"]].any():
        return f"{answer} What the loop did in the other {wall - wait:.1f} ms of {wall:.1f} ms a step is not recorded."
    causes = _made_of([cause for cause in warm if cause.side != "data"])
    return f"{answer} The loop itself cost {own:.1f} ms of {wall:.1f} ms a step{causes}."


def _made_of(causes: list[StallCause]) -> str:
    """``: name share, ...`` of the largest of these causes; empty without any."""
    places: dict[str, float] = {}
    for cause in causes:
        place = advice.label(cause.where, cause.why, cause.side)
        places[place] = places.get(place, 0.0) + cause.seconds
    total = sum(places.values())
    top = [item for item in sorted(places.items(), key=lambda item: -item[1])[:3] if item[1] >= 0.05 * total]
    if [name for name, _ in top] in ([], ["unknown"]):  # that alone says nothing
        return ""
    return ": " + ", ".join(f"{name} {100 * part / total:.0f} %" for name, part in top)


_REASONS = {
    "throughput": "",
    "straggler": "; single slow batches held the others up",
    "backpressure": "; the ring was too shallow to work ahead",
    "scheduling": "; hand-offs were noticed late",
    "fault": "",
    "cold_start": "; the feed was starting up",
    "spill": "; Ray wrote objects to disk",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Say where the time of a run went, and write the report where asked."""
    from profiler import terminal

    parser = cli.Parser(prog="python -m profiler.report", description=main.__doc__)
    parser.add_argument("run", metavar="RUN", help="run folder (finished, running or killed)")
    for kind, what in (
        ("html", "self-contained page"),
        ("json", "document, schema 1"),
        ("trace", "trace for Perfetto"),
    ):
        parser.add_argument(f"--{kind}", metavar="F", type=Path, help=f"write the report as a {what}")
    parser.add_argument("--quiet", action="store_true", help="write the files and print only where they are")
    arguments = parser.parse_args(argv)
    analysis = analyse(store.load_run(arguments.run))
    files = {kind: path for kind in ("html", "json", "trace") if (path := getattr(arguments, kind)) is not None}
    remarks = _write(analysis, files)
    terminal.show(None if arguments.quiet else analysis.report, files, remarks)
    return cli.EXIT_OK


__all__ = ["NO_STALL", "Analysis", "analyse", "build", "headline", "main", "summarise", "write_default"]

if __name__ == "__main__":
    cli.run(main)
