"""``python -m gpu.lint NET.prototxt [--solver S] [--data INSPECT.json] [--json]``: what is probably not meant.

The JSON document::

    schema, net, solver, data [path]
    findings  [{rule, severity: error | warning | note, layer, what, why, do, phases}], worst first
    counts    {error, warning, note}
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpu.lint import inspected
from gpu.lint.check import check
from gpu.lint.finding import SEVERITIES, Finding
from profiler import cli

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns 1 where there is an error or a warning, else 0."""
    parser = cli.Parser(prog="python -m gpu.lint", description="Say what is probably not meant in a net.")
    parser.add_argument("net", metavar="NET.prototxt")
    parser.add_argument("--solver", metavar="S", help="solver prototxt")
    parser.add_argument(
        "--data",
        metavar="INSPECT.json",
        action="append",
        default=[],
        help="what python -m datasets.inspect DB --json wrote; may be given for each database",
    )
    parser.add_argument("--stage", action="append", default=[], help="stage of the net's state; may be given again")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of a table")
    arguments = parser.parse_args(argv)
    inspections = [inspected.load(path) for path in arguments.data]
    found = check(arguments.net, arguments.solver, inspections, arguments.stage)
    counts = Counter(finding.severity for finding in found)
    if arguments.json:
        document = {
            "schema": SCHEMA,
            "net": arguments.net,
            "solver": arguments.solver,
            "data": arguments.data,
            "findings": [dataclasses.asdict(finding) for finding in found],
            "counts": {severity: counts[severity] for severity in SEVERITIES},
        }
        sys.stdout.write(cli.dumps(document) + "\n")
    else:
        render(found, cli.console())
    return cli.EXIT_NOT_FINE if counts["error"] or counts["warning"] else cli.EXIT_OK


def render(found: Sequence[Finding], console: Console) -> None:
    """Show findings as a table, and how many there are."""
    from rich.markup import escape
    from rich.table import Table

    if not found:
        console.print("nothing found", highlight=False)
        return
    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 1, 0))
    for name in ("", "layer", "what, why, and what to do"):
        table.add_column(name, overflow="fold")
    for finding in found:
        colour = _COLOURS[finding.severity]
        where = escape(finding.layer or "-")
        if len(finding.phases) == 1:
            where += f"\n[dim]{finding.phases[0]}[/dim]"
        text = f"{escape(finding.what)}\n[dim]{escape(finding.why)} {escape(finding.do)}[/dim]"
        table.add_row(f"[{colour}]{finding.severity}[/{colour}]\n[dim]{finding.rule}[/dim]", where, text)
    console.print(table)
    counts = Counter(finding.severity for finding in found)
    summary = [f"{counts[name]} {name}{'s' if counts[name] > 1 else ''}" for name in SEVERITIES if counts[name]]
    console.print(", ".join(summary), highlight=False)


if __name__ == "__main__":
    cli.run(main)
