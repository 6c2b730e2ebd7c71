"""From measurements to medians, ratios and tables."""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

from benchmarks.feeds.rounds import PEERS

TARGETS: dict[str, tuple[float, float | None]] = {
    "small-u8": (5.0, 0.6),
    "small-f32": (5.0, 0.6),
    "raw-u8": (2.5, 0.75),
    "raw-f32": (3.0, 0.8),
    "jpeg-u8": (1.2, 0.9),
    "jpeg-region": (1.5, None),
}
"""At least so many times the best peer, and so much of the limit, through Ray from the LMDB."""
WHILE_TRAINING = 0.9
"""Of what the costs of feed and net allow together (:mod:`benchmarks.feeds.training`)."""
FIRST_BATCH_S = {"ray, after workers are up": 1.0, "ray, from process start": 6.0, "inline, after imports": 0.3}
SUBJECT = ("ours", "ray, lmdb")
_FIGURES = (
    "samples_per_s", "cpu_us_per_sample", "pss_mb", "anon_shmem_mb", "ray_pss_mb", "first_s", "first_after_imports_s",
    "first_after_workers_s", "share", "allowed_samples_per_s", "net_ms", "feed_ms", "feed_cpu_ms",
)  # fmt: skip


def summarise(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each case, feed and way of using it: medians, with the range of samples/s, or the error."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in results:
        groups.setdefault((row["case"], row["feed"], row["variant"], row["read_all"]), []).append(row)
    rows = []
    for (case, feed, variant, read_all), found in groups.items():
        sound = [row for row in found if "error" not in row]
        row: dict[str, Any] = {"case": case, "feed": feed, "variant": variant, "read_all": read_all}
        row["rounds"] = len(sound)
        if len(sound) < len(found):
            row["error"] = next(one["error"] for one in found if "error" in one)
        for figure in _FIGURES:
            values = [one[figure] for one in sound if one.get(figure) is not None]
            if values:
                row[figure] = round(statistics.median(values), 4)
        if sound:
            rates = [one["samples_per_s"] for one in sound]
            row["samples_per_s_range"] = [min(rates), max(rates)]
            row["order"] = sound[0].get("order")
            if "ways" in sound[0]:
                ways = sound[0]["ways"]
                row["ways"] = {way: round(statistics.median(one["ways"][way] for one in sound), 1) for way in ways}
        rows.append(row)
    return sorted(rows, key=lambda row: (row["case"], row["read_all"], -row.get("samples_per_s", 0)))


def verdicts(results: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each target with what was reached; ``found`` is None where something needed was not measured, and why."""
    found: list[dict[str, Any]] = []
    for case, (times_peer, of_limit) in TARGETS.items():
        ours = _row(rows, case, *SUBJECT)
        if not any(row["case"] == case for row in rows):
            continue
        rivals = [row for row in _sound(rows, "jpeg-u8" if case == "jpeg-region" else case) if row["feed"] in PEERS]
        best = max(rivals, key=lambda row: row["samples_per_s"], default=None)
        limit = _row(rows, case, "limit", "")
        found.append(_ratio(results, f"{case}: times the best peer", times_peer, ours, best))
        if of_limit is not None:
            found.append(_ratio(results, f"{case}: of the limit", of_limit, ours, limit))
        together = _row(rows, case, "training", "")
        if together is not None:
            found.append(_at_least(f"{case}: while a net trains, of what both allow", WHILE_TRAINING, together))
        fastest = sorted(rivals, key=lambda row: -row["samples_per_s"])[:3]
        if len(fastest) == 3:
            leanest = min(fastest, key=lambda row: row["anon_shmem_mb"])
            value = ours.get("anon_shmem_mb") if ours else None
            found.append(
                _at_most(f"{case}: anonymous and shared MB ({_name(leanest)})", leanest["anon_shmem_mb"], value)
            )
    for name, figure, variant in (
        ("ray, after workers are up", "first_after_workers_s", "ray, lmdb"),
        ("ray, from process start", "first_s", "ray, lmdb"),
        ("inline, after imports", "first_after_imports_s", "inline, lmdb"),
    ):
        values = [
            row[figure]
            for row in rows
            if row["feed"] == "ours" and row["variant"] == variant and not row["read_all"] and figure in row
        ]
        if any(row["feed"] == "ours" for row in rows):
            found.append(
                _at_most(f"first batch, {name}, slowest case, s", FIRST_BATCH_S[name], max(values, default=None))
            )
    return found


def _row(rows: list[dict[str, Any]], case: str, feed: str, variant: str) -> dict[str, Any] | None:
    wanted = (case, feed, variant, False)
    return next((row for row in rows if (row["case"], row["feed"], row["variant"], row["read_all"]) == wanted), None)


def _sound(rows: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["case"] == case and not row["read_all"] and "samples_per_s" in row]


def _name(row: dict[str, Any]) -> str:
    return f"{row['feed']}, {row['variant']}" if row["variant"] else row["feed"]


def _ratio(
    results: list[dict[str, Any]], what: str, target: float, ours: dict[str, Any] | None, other: dict[str, Any] | None
) -> dict[str, Any]:
    """The median of the ratios of the rounds in which both were measured, with their range."""
    row: dict[str, Any] = {"what": what, "target": target, "against": _name(other) if other else None}
    if ours is None or "samples_per_s" not in ours:
        return row | {"found": None, "reason": (ours or {}).get("error", "ours was not measured")}
    if other is None or "samples_per_s" not in other:
        return row | {"found": None, "reason": (other or {}).get("error", "nothing to compare with was measured")}
    mine, theirs = (_by_round(results, one) for one in (ours, other))
    pairs = [mine[number] / theirs[number] for number in mine if number in theirs]
    pairs = pairs or [ours["samples_per_s"] / other["samples_per_s"]]
    value = statistics.median(pairs)
    row["range"] = [round(min(pairs), 3), round(max(pairs), 3)]
    return row | {"found": round(value, 3), "reached": value >= target}


def _by_round(results: list[dict[str, Any]], row: dict[str, Any]) -> dict[int, float]:
    same = ("case", "feed", "variant", "read_all")
    return {
        one["round"]: one["samples_per_s"]
        for one in results
        if all(one[name] == row[name] for name in same) and "samples_per_s" in one
    }


def _at_least(what: str, target: float, measured: dict[str, Any]) -> dict[str, Any]:
    value = measured.get("share")
    row: dict[str, Any] = {"what": what, "target": target, "found": value}
    return row | ({"reason": measured.get("error")} if value is None else {"reached": value >= target})


def _at_most(what: str, target: float, value: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"what": what, "target": target, "at_most": True, "found": value}
    return row | ({"reason": "ours was not measured"} if value is None else {"reached": value <= target})


def table_of(case: str, rows: list[dict[str, Any]], read_all: bool) -> Table:
    """What was measured of one case, the fastest first."""
    title = f"{case}{': fingerprints on, the consumer reads all' if read_all else ''}"
    table = Table(title=title, title_justify="left")
    table.add_column("feed")
    for heading in ("samples/s", "range", "CPU µs", "PSS MB", "own MB", "Ray MB", "first s", "after imports"):
        table.add_column(heading, justify="right")
    table.add_column("order")
    for row in rows:
        if row["case"] != case or row["read_all"] != read_all:
            continue
        if "samples_per_s" not in row:
            table.add_row(_name(row), "n/a", *[""] * 7, row.get("error", ""))
            continue
        low, high = row["samples_per_s_range"]
        shown = [_number(row.get(figure)) for figure in _FIGURES[1:7]]
        table.add_row(
            _name(row), _number(row["samples_per_s"]), f"{_number(low)}–{_number(high)}", *shown, row["order"]
        )
        for way, rate in row.get("ways", {}).items():
            table.add_row(f"  {way}", _number(rate))
    return table


def verdict_table(found: list[dict[str, Any]]) -> Table:
    table = Table(title="Targets", title_justify="left")
    for heading in ("what", "target", "found", "range", "", "against"):
        table.add_column(heading)
    for row in found:
        sign = "≤" if row.get("at_most") else "≥"
        low_high = " – ".join(f"{value:g}" for value in row.get("range", []))
        said = "n/a" if row["found"] is None else "reached" if row["reached"] else "missed"
        shown = "" if row["found"] is None else f"{row['found']:g}"
        table.add_row(
            row["what"],
            f"{sign} {row['target']:g}",
            shown,
            low_high,
            said,
            row.get("reason") or row.get("against") or "",
        )
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
