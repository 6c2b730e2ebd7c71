"""The report as one HTML page that needs nothing else: no request to anywhere, opens from a disk or an e-mail.

All text that comes from a run (notes, configuration, names) is escaped, by the template's autoescape and, for the data
of the charts, by writing ``<`` as an escape in JSON. The page carries a policy that forbids it to load anything.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.advice import label
from profiler.events import PARTITION, Flag, Kind, Stage
from profiler.memory import FIGURES
from profiler.terminal import COLOURS
from profiler.timeline import Timeline, resolve_open

if TYPE_CHECKING:
    from profiler.report import Analysis

TEMPLATES = Path(__file__).with_name("templates")
MAX_GROUPS = 4_000
"""Steps drawn one by one up to here; longer runs are drawn in groups of equally many steps, and the page says so."""
MAX_SPANS = 3_000
"""Spans drawn per window of the lanes."""
_SAMPLES = 500
STAGE_COLOURS = {
    "feed_wait": COLOURS["feed_wait"], "h2d": COLOURS["h2d"], "forward": COLOURS["compute"],
    "backward": "#004d7a", "update": "#5aa9d6", "compute": COLOURS["compute"], "sync": COLOURS["sync"],
    "host": COLOURS["host"], "test": COLOURS["test"], "checkpoint": COLOURS["checkpoint"], "alloc": COLOURS["alloc"],
    "gc": COLOURS["gc"], "batch": "#8a8a8a", "read": "#117733", "decode": "#aa4499", "augment": "#ddb310",
    "function": "#ff7f50", "collate": "#44aa99", "transfer": "#882255", "slot_wait": "#bdbdbd", "lease_wait": "#d9d9d9",
    "copy": COLOURS["h2d"], "device": COLOURS["compute"], "start": "#555555", "restart": "#a50026",
}  # fmt: skip
CAUSE_COLOURS = {
    **STAGE_COLOURS, "storage": "#0b4f24", "cpu_contention": "#b23a48", "unknown": COLOURS["unattributed"],
}  # fmt: skip
PART_TEXT = {
    "compute": "forward, backward and update: what the accelerator is there for",
    "h2d": "waiting for a copy to the device that compute did not hide",
    "feed_wait": "the loop asked for a batch that was not ready",
    "sync": "waiting for other trainers",
    "host": "other work of the loop: display, fingerprints",
    "test": "test passes during training",
    "checkpoint": "writing snapshots",
    "alloc": "allocating memory",
    "gc": "garbage collection of the trainer",
    "unattributed": "covered by no span",
}
_HOST_METRICS = {
    "cpu_share": ("CPU of the host", "%", 100.0),
    "psi_cpu_some": ("tasks waiting for a CPU (PSI)", "%", 100.0),
    "psi_io_some": ("tasks waiting for I/O (PSI)", "%", 100.0),
    "psi_memory_some": ("tasks waiting for memory (PSI)", "%", 100.0),
    "memory_available": ("memory available", "GB", 1e-9),
}


def page(analysis: Analysis) -> str:
    """The whole page as text (UTF-8)."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["words"] = lambda name: str(name).replace("_", " ")
    environment.filters["seconds"] = _seconds
    # A number and its unit stay on one line.
    environment.filters["together"] = lambda text: re.sub(r"(?<=\d) (?=%|ms\b|s\b)", "\u00a0", text)
    environment.globals["label"] = label
    report = analysis.report
    manifest = analysis.run.manifest
    total = sum(report.partition.values())
    return environment.get_template("report.html.j2").render(
        report=report,
        title=Path(report.run).resolve().name,
        parts=[(name, s, s / total if total else 0.0) for name, s in report.partition.items()],
        warm=[cause for cause in report.stalls if cause.why != "cold_start"],
        cold=[cause for cause in report.stalls if cause.why == "cold_start"],
        part_text=PART_TEXT,
        colours=COLOURS,
        cause_colours=CAUSE_COLOURS,
        stage_colours=STAGE_COLOURS,
        scale=max((c.ci95_s[1] if c.ci95_s else c.seconds for c in report.stalls), default=1.0) or 1.0,
        environment=_flat(manifest.get("environment") or {}),
        config=_flat(manifest.get("config") or {}),
        others=_flat({k: v for k, v in manifest.items() if k not in ("environment", "config", "kind", "schema")}),
        payload=_embed(_payload(analysis)),
        grouped=max(1, -(-len(analysis.timeline) // MAX_GROUPS)),
    )


def _seconds(value: float | None) -> str:
    """A length of time with a unit that suits its size."""
    if value is None:
        return "n/a"
    if abs(value) >= 100:
        return f"{value:.0f} s"
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{1e3 * value:.3g} ms" if abs(value) >= 1e-6 else "0 ms"


def _embed(payload: dict[str, Any]) -> str:
    """JSON that cannot end the script element it is put into, whatever text it holds."""
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _flat(document: Any, prefix: str = "") -> list[tuple[str, str]]:
    """A nested document as rows of (dotted key, text)."""
    if isinstance(document, dict) and document:
        return [
            row for key, value in document.items() for row in _flat(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(document, list) and any(isinstance(item, dict) for item in document):
        return [row for i, item in enumerate(document) for row in _flat(item, f"{prefix}[{i}]")]
    if isinstance(document, list):
        document = ", ".join(map(str, document))
    return [(prefix, "" if document is None else str(document))] if prefix else []


def _payload(analysis: Analysis) -> dict[str, Any]:
    timeline = analysis.timeline
    if not len(timeline):
        return {"steps": None, "windows": [], "samples": []}
    origin = int(timeline.t0_ns[0])
    return {
        "steps": _steps(timeline, origin),
        "windows": _windows(analysis, origin),
        "samples": _samples(analysis, origin),
        "colours": {"parts": COLOURS, "stages": STAGE_COLOURS},
    }


def _round(values: np.ndarray, digits: int = 3) -> list[float]:
    return np.round(np.asarray(values, float), digits).tolist()


def _steps(timeline: Timeline, origin: int) -> dict[str, Any]:
    n = len(timeline)
    size = max(1, -(-n // MAX_GROUPS))
    starts = np.arange(0, n, size)
    count = np.diff(np.append(starts, n))
    parts = np.add.reduceat(timeline.parts_ns, starts, axis=0) / count[:, None] / 1e6
    used = [i for i in range(len(PARTITION)) if parts[:, i].max() > 0]
    return {
        "first": timeline.step[starts].tolist(),
        "count": count.tolist(),
        "t0": _round((timeline.t0_ns[starts] - origin) / 1e9, 6),
        "t1": _round((timeline.t1_ns[starts + count - 1] - origin) / 1e9, 6),
        "max": _round(np.maximum.reduceat(timeline.wall_ns, starts) / 1e6),
        "names": [PARTITION[i] for i in used],
        "parts": [_round(parts[:, i]) for i in used],
    }


def _windows(analysis: Analysis, origin: int) -> list[dict[str, Any]]:
    """Stretches of a few steps to look at span by span: a typical one, the worst ones, the start."""
    timeline = analysis.timeline
    steady = np.flatnonzero(timeline.steady)
    stall = timeline.stall_ns
    wanted: list[tuple[str, int]] = []
    if len(steady):
        middle = steady[np.argsort(stall[steady], kind="stable")[len(steady) // 2]]
        wanted.append(("a typical stretch", int(middle)))
        worst = int(steady[np.argmax(stall[steady])])
        wanted.append((f"the longest stall (step {timeline.step[worst]})", worst))
    for finding in analysis.report.findings:
        numbers = timeline.batch if finding.kind.startswith("worker") else timeline.step
        rows = np.flatnonzero(numbers == (-1 if finding.step is None else finding.step))
        if finding.level == "fault" and len(rows):
            wanted.append((f"the fault at step {finding.step}", int(rows[-1])))
            break
    wanted.append(("the start", 0))
    if len(timeline) > 1:
        wanted.append(("the end", len(timeline) - 1))
    events = resolve_open(analysis.events)
    events = events[(events["kind"] != Kind.MARK) & (events["stage"] != Stage.STEP)]
    return [_window(analysis, events, title, row, origin) for title, row in wanted]


def _window(analysis: Analysis, events: np.ndarray, title: str, row: int, origin: int) -> dict[str, Any]:
    timeline = analysis.timeline
    low, high = max(0, row - 4), min(len(timeline), row + 5)
    begin, end = int(timeline.t0_ns[low]), int(timeline.t1_ns[high - 1])
    inside = events[(events["t1_ns"] > begin) & (events["t0_ns"] < end)]
    left_out = max(0, len(inside) - MAX_SPANS)
    inside = inside[np.argsort(inside["t0_ns"] - inside["t1_ns"], kind="stable")][:MAX_SPANS]  # longest first
    device = np.isin(inside["stage"], (Stage.COPY, Stage.DEVICE))
    key = np.where(device, -inside["stage"].astype(np.int64), inside["actor"].astype(np.int64))
    order = sorted(set(key.tolist()), key=lambda k: (0 if k == 0 else 1 if k < 0 else 2, abs(k)))
    names = {-int(Stage.COPY): "device: copies", -int(Stage.DEVICE): "device: compute"}
    place = {k: i for i, k in enumerate(order)}
    spans = [
        [
            place[k], round((int(e["t0_ns"]) - origin) / 1e6, 4), round((int(e["t1_ns"]) - origin) / 1e6, 4),
            Stage(int(e["stage"])).name.lower(), int(e["step"]), int(e["kind"] == Kind.OPEN),
            int(bool(e["flags"] & Flag.TEST_PHASE)),
        ]
        for e, k in zip(inside, key.tolist(), strict=True)
    ]  # fmt: skip
    return {
        "title": title,
        "lanes": [names.get(k) or analysis.lanes.get(k, f"process {k}") for k in order],
        "steps": [[int(timeline.step[i]), round((int(timeline.t0_ns[i]) - origin) / 1e6, 4)] for i in range(low, high)],
        "t0": round((begin - origin) / 1e6, 4),
        "t1": round((end - origin) / 1e6, 4),
        "spans": spans,
        "left_out": left_out,
    }


def _samples(analysis: Analysis, origin: int) -> list[dict[str, Any]]:
    """Readings of the samplers as lines over time (s since the first step), at most ``_SAMPLES`` points each."""
    table = analysis.run.samples
    if not table.num_rows:
        return _nets(analysis, origin)
    metric = np.asarray(table.column("metric").to_pylist())
    pid = table.column("pid").to_numpy()
    time = (table.column("t_ns").to_numpy() - origin) / 1e9
    value = table.column("value").to_numpy()
    wanted: list[tuple[str, str, np.ndarray, float]] = []
    for name, (title, unit, factor) in _HOST_METRICS.items():
        wanted.append((title, unit, (metric == name) & (pid == 0), factor))
    for name in sorted({m for m in set(metric.tolist()) if m.startswith("gpu")}):
        title = f"{name} (share of time with any kernel resident, not how busy)" if "util" in name else name
        wanted.append((title, "", metric == name, 1.0))
    trainers = {int(p["pid"]) for p in analysis.run.processes.values() if p.get("role") == "trainer"}
    wanted.append(("CPUs used by the trainer", "cores", (metric == "cpu_cores") & np.isin(pid, list(trainers)), 1.0))
    lines = []
    for title, unit, mask, factor in wanted:
        if not mask.any() or ("PSI" in title and value[mask].max() < 0.01):
            continue  # nothing waited for this: a flat line says less than its absence
        lines.append(_line(title, unit, time[mask], value[mask] * factor))
    return lines + _nets(analysis, origin)


def _nets(analysis: Analysis, origin: int) -> list[dict[str, Any]]:
    """What the nets of each process used after every step, as lines."""
    table = analysis.run.memory
    if not table.num_rows:
        return []
    process = np.asarray(table.column("process").to_pylist())
    time = (table.column("t_ns").to_numpy() - origin) / 1e9
    several = len(set(process.tolist())) > 1
    lines = []
    for who in sorted(set(process.tolist())):
        for name in FIGURES:
            values = table.column(name).to_numpy()[process == who]
            if (values >= 0).all():
                unit, factor = ("blobs", 1.0) if name == "live_blobs" else ("MB", 1e-6)
                title = f"nets: {name.replace('_', ' ')}" + (f" ({who})" if several else "")
                lines.append(_line(title, unit, time[process == who], values * factor))
    return lines


def _line(title: str, unit: str, time: np.ndarray, value: np.ndarray) -> dict[str, Any]:
    order = np.argsort(time, kind="stable")
    groups = np.arange(0, len(time), max(1, -(-len(time) // _SAMPLES)))
    size = np.diff(np.append(groups, len(time)))
    t, v = (np.add.reduceat(column[order], groups) / size for column in (time, value))
    finite = np.isfinite(v)
    return {"title": title, "unit": unit, "t": _round(t[finite]), "v": _round(v[finite])}
