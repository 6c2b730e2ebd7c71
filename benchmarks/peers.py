"""Our feed beside other libraries' and beside what the machine can do at all, doing the same work.

    python -m benchmarks.peers --folder /big/disk/peers            all of it; three rounds, about 20 minutes
    python -m benchmarks.peers --folder DIR --only ours limit spdl --cases raw-u8 --rounds 2
    python -m benchmarks.peers --quick                             does it work? ours and the limit, tiny

Three data sets (1.5 GB with the formats of the peers) are built in ``--folder`` and stay there, as does an environment
with the peers (about 6 GB). Each measurement is a fresh process on a warm page cache. In the first round every peer is
tried in several ways; later rounds repeat ours, the limit and each peer within half of the best, in its best way.
The same command with the same code goes on where it was stopped. See docs/benchmarks.md for what the columns mean.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from benchmarks.feeds import rounds
from benchmarks.feeds.cases import CASES, case_named
from benchmarks.feeds.data import build, warm
from benchmarks.feeds.environment import Peers
from benchmarks.feeds.rounds import Entry, Settings
from benchmarks.feeds.table import summarise, table_of, verdict_table, verdicts
from benchmarks.machine import machine

NAMES = (*rounds.ALWAYS, *rounds.PEERS)


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    with tempfile.TemporaryDirectory(prefix="stallscope-peers-") as temporary:
        folder = given.folder or Path(temporary)
        settings = Settings(folder, given.seconds, given.seconds / 3, given.quick)
        if given.quick:
            settings = Settings(folder, 0.1, 0.03, True)
        results, peers = _measure_all(given, settings, console)
    rows = summarise(results)
    document = {
        "schema": 1,
        "machine": machine("numpy", "numba", "lmdb", "plyvel", "simplejpeg", "ray"),
        "seed": given.seed,
        "seconds": settings.seconds,
        "quick": given.quick,
        "peers": peers.outcome,
        "rows": rows,
        "targets": verdicts(results, rows),
    }
    _show(console, document)
    if given.out:
        given.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        console.print(f"written to {given.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="data sets, environment and results; left out: temporary")
    parser.add_argument("--environment", type=Path, help="the peers' environment; left out: FOLDER/environment")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=None, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=None, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.2, help="length of one measurement")
    parser.add_argument("--seed", type=int, default=1, help="of the order of measurements")
    parser.add_argument("--quick", action="store_true", help="one round of ours and the limit with tiny data sets")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier, stopped run has measured")
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    return parser


def _measure_all(given: argparse.Namespace, settings: Settings, console: Console) -> tuple[list[dict[str, Any]], Peers]:
    feeds = given.only or (["ours", "limit"] if given.quick else list(NAMES))
    cases = given.cases or (["small-f32"] if given.quick else list(CASES))
    began = time.perf_counter()
    for case in cases:
        size = warm(build(settings.folder, case_named(case, given.quick).data))
        console.print(f"{case}: {size / 1e6:,.0f} MB of records, {time.perf_counter() - began:.0f} s so far")
    peers = Peers(given.environment or settings.folder / "environment")
    peers.install([feed for feed in feeds if feed in rounds.PEERS], say=console.print)
    wanted = rounds.entries(cases, feeds, given.quick)
    formats = {(CASES[entry.case].data.name, entry.feed): entry for entry in wanted if entry.feed in rounds.OWN_FORMAT}
    for (name, feed), entry in formats.items():
        if peers.outcome[feed]["installed"]:
            _tell(console, f"{name} for {feed}", rounds.prepare(entry, settings, peers))
    for case in cases:
        warm(settings.folder / case_named(case, given.quick).data.folder)
    if "ours" in feeds and not given.quick:  # compile once, where that is not measured
        for case, database in itertools.product(cases, ("lmdb", "leveldb")):
            entry = Entry(case, "ours", f"inline, {database}")
            _tell(
                console,
                f"{case}, {database}, kernels",
                rounds.measure(entry, replace(settings, seconds=0.1, warm_s=0.0), peers),
            )
    kept = settings.folder / f"results-{rounds.key(settings, given.seed)}.jsonl"
    if given.fresh:
        kept.unlink(missing_ok=True)
    return _rounds(wanted, 1 if given.quick else given.rounds, given.seed, settings, peers, kept, console), peers


def _rounds(
    wanted: list[Entry], count: int, seed: int, settings: Settings, peers: Peers, kept: Path, console: Console
) -> list[dict[str, Any]]:
    """All measurements of all rounds; each is kept in a file as soon as it is made, and not made again."""
    results = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
    done = {_key(row): row for row in results if "error" not in row}
    console.print(f"seed {seed}; {len(done)} measurements of an earlier run in {kept.name}")
    mine: list[dict[str, Any]] = []
    for number in range(1, count + 1):
        now = wanted if number == 1 else rounds.worth_repeating(wanted, mine)
        if number == count > 1:
            now = now + _readers(wanted, mine)
        now = rounds.in_turns(now, seed, number)
        for place, entry in enumerate(now, 1):
            row = {"round": number, **vars(entry)}
            if _key(row) not in done:
                row |= rounds.measure(entry, settings, peers)
                if "limit" in row:
                    row["samples_per_s"] = row.pop("limit")
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                done[_key(row)] = row
            what = f"round {number}/{count} {place}/{len(now)} {entry.case} {entry.name}{' read all' * entry.read_all}"
            _tell(console, what, done[_key(row)])
            mine.append(done[_key(row)])
    return mine


def _readers(wanted: list[Entry], results: list[dict[str, Any]]) -> list[Entry]:
    """For the second table: ours through Ray and inline, and the best peer of each case."""
    found = [
        Entry(entry.case, "ours", entry.variant, True)
        for entry in wanted
        if entry.feed == "ours" and "lmdb" in entry.variant
    ]
    for case in {entry.case for entry in wanted}:
        rivals = [row for row in results if row["case"] == case and row["feed"] in rounds.PEERS]
        rivals = [row for row in rivals if "samples_per_s" in row and row["round"] == 1]
        if rivals:
            best = max(rivals, key=lambda row: row["samples_per_s"])
            found.append(Entry(case, best["feed"], best["variant"], True))
    return found


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("round", "case", "feed", "variant", "read_all"))


def _tell(console: Console, what: str, row: dict[str, Any]) -> None:
    said = row.get("error") or (f"{row['samples_per_s']:,.0f} samples/s" if "samples_per_s" in row else "ready")
    console.print(f"{what}: {said}", markup=False, highlight=False)


def _show(console: Console, document: dict[str, Any]) -> None:
    rows = document["rows"]
    for case, read_all in dict.fromkeys((row["case"], row["read_all"]) for row in rows):
        console.print(table_of(case, rows, read_all))
    for peer, outcome in document["peers"].items():
        if not outcome["installed"]:
            console.print(f"{peer} was not measured, it does not install here: {outcome['reason']}", markup=False)
    console.print(verdict_table(document["targets"]))
    console.print("own MB: anonymous and shared memory of all processes, Ray's own apart; first s: from process start")


if __name__ == "__main__":
    raise SystemExit(main())
