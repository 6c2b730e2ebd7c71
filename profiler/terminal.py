"""The report on a terminal: one screen, the answer first."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from profiler.advice import label
from profiler.finding import Report, StallCause

COLOURS = {
    "compute": "#0072b2",
    "h2d": "#56b4e9",
    "feed_wait": "#d55e00",
    "sync": "#cc79a7",
    "host": "#e69f00",
    "test": "#009e73",
    "checkpoint": "#8b5a2b",
    "alloc": "#b79ad6",
    "gc": "#d4c000",
    "unattributed": "#8a8a8a",
}
"""Colour of each part, the same in every rendering: the Okabe-Ito palette (safe for the colour-blind) and more."""
_LEVEL = {"fault": "bold red", "warning": "yellow", "info": "dim"}
_WIDTH = 60
_PROCESSES = 4
"""Processes whose memory is listed one by one."""
_OF_NETS = ("used", "reserved", "largest_free")
_MAKING = {
    "storage": "storage wait", "read": "read", "decode": "decode", "augment": "augment",
    "function": "own function", "collate": "collate", "transfer": "transfer",
    "cpu_contention": "waiting for a CPU", "gc": "gc", "unknown": "other",
}  # fmt: skip


def show(report: Report | None, files: Mapping[str, Path] = {}, remarks: Mapping[str, str] = {}) -> None:
    """Print the report to standard output; without one, only where the files are."""
    console = Console(highlight=False)
    if report is not None:
        _render(console, report)
    _names(console, files, remarks)


def text(report: Report, files: Mapping[str, Path] = {}, width: int = 100) -> str:
    """The same as plain text of ``width`` columns."""
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    _render(console, report)
    _names(console, files, {})
    return console.file.getvalue()  # type: ignore[attr-defined]


def _render(console: Console, report: Report) -> None:
    console.print(Text(report.headline, style="bold"))
    console.print(Text(_numbers(report), style="dim"))
    if report.wall_s > 0:
        console.print()
        console.print(_bar(report))
        console.print(_legend(report))
    console.print()
    if first := report.first:
        console.print(_causes(report))
        what = f"{label(first.where, first.why, first.side)}: "
        console.print(Padding(Text.assemble(("try  ", "bold green"), (what, "dim"), first.remedy), (0, 0, 0, 2)))
    elif report.steps:
        console.print(Text("No stall."))
    if made := _making(report):
        console.print(Text(made, style="dim"))
    _memory(console, report)
    grave = [finding for finding in report.findings if finding.level != "info"]
    for finding in grave[:6]:
        console.print(Text.assemble((f"{finding.level:8}", _LEVEL[finding.level]), finding.text))
    if len(grave) > 6:
        console.print(Text(f"         and {len(grave) - 6} more (in the HTML and JSON reports)", style="dim"))


def _names(console: Console, files: Mapping[str, Path], remarks: Mapping[str, str]) -> None:
    for kind, path in files.items():
        remark = f"  ({remarks[kind]})" if remarks.get(kind) else ""
        console.print(Text(f"{kind:6} {path}{remark}"), soft_wrap=True)


def _numbers(report: Report) -> str:
    """The line of figures under the answer."""
    parts = [f"{report.run}: {report.steps} steps in {report.wall_s:.1f} s, {report.outcome}"]
    if report.step_ms["p50"] is not None:
        p50, p95, p99 = (report.step_ms[key] for key in ("p50", "p95", "p99"))
        parts.append(f"step p50 {p50:.1f}  p95 {p95:.1f}  p99 {p99:.1f} ms")
    if report.au is not None:
        parts.append(f"utilisation {100 * report.au:.1f} %")
    if report.replay_error is not None:
        parts.append(f"replay off by {100 * report.replay_error:.1f} %")
    if report.overhead["share"] is not None:
        hashing = report.overhead["fingerprints_share"]
        also = f" and fingerprints {100 * hashing:.1f} %" if hashing is not None else ""
        parts.append(f"profiler {100 * report.overhead['share']:.1f} %{also}")
    return " | ".join(parts)


def _bar(report: Report) -> Text:
    bar = Text()
    total = sum(report.partition.values())
    used, done = 0, 0.0
    for name, seconds in report.partition.items():
        done += seconds
        cells = round(_WIDTH * done / total) - used
        used += cells
        bar.append("█" * cells, style=COLOURS[name])
    return bar


def _legend(report: Report) -> Text:
    legend = Text()
    total = sum(report.partition.values())
    for name, seconds in report.partition.items():
        if seconds >= 0.001 * total:
            legend.append("■ ", style=COLOURS[name])
            legend.append(f"{name.replace('_', ' ')} {100 * seconds / total:.1f} %  ")
    return legend


def _making(report: Report) -> str:
    """What a batch takes to make, in a line: waiting for storage apart from decoding, also where it is hidden."""
    making = report.making
    if not making.get("batches"):
        return ""
    parts = [f"{_MAKING[name]} {ms:.2f}" for name, ms in making["ms_per_batch"].items() if ms >= 0.005]
    seen = [f"{making['page_faults']:,} page faults"] if making["page_faults"] else []
    seen += [f"{making['storage_bytes'] / 1e6:,.1f} MB from storage"] if making["storage_bytes"] else []
    more = f" ({', '.join(seen)} in all)" if seen else f" ({making['reason']})" if making["reason"] else ""
    return f"a batch takes, in ms: {', '.join(parts)}{more}"


def _memory(console: Console, report: Report) -> None:
    """Peak memory of each process by kind; what page cache is, said once; what the nets used."""
    _processes(console, report)
    for net in report.memory.get("nets", []):
        figures = net["figures"]
        told = [f"{name.replace('_', ' ')} {figures[name]['last'] / 1e6:,.1f} MB" for name in _OF_NETS if figures[name]]
        told.append(f"{figures['live_blobs']['last']:,} blobs")
        looks = f"{net['verdict'] or 'not judged'}: {net['reason']}"
        console.print(Text(f"nets of {net['process']}, last step: {', '.join(told)}; {looks}"))


def _processes(console: Console, report: Report) -> None:
    rows = [row for row in report.memory.get("processes", []) if row["peak"] is not None]
    if not rows:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("memory (peak MB)")
    for column in ("anonymous", "file-backed", "shared"):
        table.add_column(column, justify="right")
    shown = [(str(row["name"]), row["peak"]) for row in rows[:_PROCESSES]]
    if rest := rows[_PROCESSES:]:
        shown.append((f"{len(rest)} more", {kind: sum(row["peak"][kind] for row in rest) for kind in rest[0]["peak"]}))
    if others := report.memory["others"]:
        shown.append((f"{others['count']} others", others["peak"]))
    for name, peak in shown:
        table.add_row(name, *(f"{peak[kind] / 1e6:,.0f}" for kind in ("anonymous", "file", "shared")))
    console.print(table)
    console.print(Text("file-backed: page cache of mapped files, given back when needed; no leak", style="dim"))


def _causes(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("where", "why"):
        table.add_column(column)
    for column in ("stall", "of stall", "gain alone"):
        table.add_column(column, justify="right")
    table.add_column("")
    warm = _rows([cause for cause in report.stalls if cause.why != "cold_start"])
    cold = _rows([cause for cause in report.stalls if cause.why == "cold_start"])
    shown = [row for row in warm[:6] if row.share >= 0.01]
    for row in shown:
        table.add_row(
            row.label,
            row.why,
            f"{row.seconds:.2f} s",
            f"{100 * row.share:.0f} %",
            f"{row.gain_alone_s:.2f} s",
            Text("▇" * max(1, round(20 * row.share)), style=COLOURS["feed_wait"]),
        )
    for rest, what, why in ((warm[len(shown) :], "others", ""), (cold, "start-up", "cold_start")):
        seconds, share = sum(c.seconds for c in rest), sum(c.share for c in rest)
        if share >= 0.005:
            bar = Text("▇" * max(1, round(20 * share)), style="dim")
            table.add_row(what, why, f"{seconds:.2f} s", f"{100 * share:.0f} %", "", bar)
    return table


class _Row(NamedTuple):
    label: str
    why: str
    seconds: float
    share: float
    gain_alone_s: float


def _rows(causes: list[StallCause]) -> list[_Row]:
    """A row for each cause, the largest first; "unknown" for several reasons is one row, as it says one thing."""
    rows: list[_Row] = []
    unknown: list[StallCause] = []
    for cause in causes:
        name = label(cause.where, cause.why, cause.side)
        if name == "unknown":
            unknown.append(cause)
        else:
            rows.append(_Row(name, cause.why, cause.seconds, cause.share, cause.gain_alone_s))
    if unknown:
        sums = (sum(getattr(cause, name) for cause in unknown) for name in ("seconds", "share", "gain_alone_s"))
        rows.append(_Row("unknown", ", ".join(cause.why for cause in unknown), *sums))
    return sorted(rows, key=lambda row: -row.seconds)
