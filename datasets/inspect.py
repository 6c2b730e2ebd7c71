"""Look into a data set: ``python -m datasets.inspect DB [--json]``. Reads all records, decodes a few, writes nothing.

The JSON document::

    schema, path, backend, db, records
    shapes      {"CxHxW": records}             image files: the size in the file's header
    encodings   {"raw" | "float" | "jpeg" | …: records}
    modes       {"L" | "RGB" | "P" | …: records}, image files only
    labels      {present, absent, min, max, classes, counts, runs, expected_runs, longest_run}
    key_order   {order, first, last, numeric, padded, dense}
    channel_mean   of up to 64 records spread over the data set, as decoded (B, G, R); null where their channels differ
    bad         [{index, key, reason}], the first 20 records that cannot be understood; bad_records: how many there are
    warnings    [text]
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from datasets import datum, decode
from datasets.datum import DatumError
from datasets.source import Source, open_source, show_key
from profiler import cli

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
_MEAN_OF = 64
_MOST_BAD = 20
_MOST_COUNTS = 1000
_CHUNK = 64
_FEWEST_FOR_RUNS = 20


class _Labels:
    """Label statistics in one pass."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.absent = 0
        self.runs = 0
        self.longest = 0
        self._last: int | None = None
        self._length = 0

    def add(self, label: int | None) -> None:
        if label is None:
            self.absent += 1
            return
        self.counts[label] += 1
        if label != self._last or self.runs == 0:
            self.runs += 1
            self._length = 0
        self._last = label
        self._length += 1
        self.longest = max(self.longest, self._length)

    def document(self) -> dict[str, Any]:
        present = self.counts.total()
        expected = None
        if present:
            # Mean number of runs of equal labels in a random order (the multinomial form of the Wald–Wolfowitz test).
            expected = present + 1 - sum(count * count for count in self.counts.values()) / present
        few = len(self.counts) <= _MOST_COUNTS
        return {
            "present": present,
            "absent": self.absent,
            "min": min(self.counts, default=None),
            "max": max(self.counts, default=None),
            "classes": len(self.counts),
            "counts": {str(label): count for label, count in sorted(self.counts.items())} if few else None,
            "runs": self.runs,
            "expected_runs": expected,
            "longest_run": self.longest,
        }

    @property
    def grouped(self) -> bool:
        present = self.counts.total()
        if present < _FEWEST_FOR_RUNS or len(self.counts) < 2:
            return False
        return self.runs < self.document()["expected_runs"] / 2


class _Keys:
    """Key statistics in one pass."""

    def __init__(self) -> None:
        self.first = self.last = b""
        self.records = 0
        self.all_digits = True
        self.dense = True
        self._widths: set[int] = set()
        self._numeric_order = True
        self._last_number = -1

    def add(self, key: bytes) -> None:
        if self.records == 0:
            self.first = key
        self.last = key
        self.records += 1
        if self.all_digits and key.isdigit():
            number = int(key)
            self._widths.add(len(key))
            if self.records > 1:
                self.dense &= number == self._last_number + 1
                self._numeric_order &= number > self._last_number
            self._last_number = number
        else:
            self.all_digits = False

    @property
    def numeric(self) -> bool:
        return self.all_digits and self.records > 0

    @property
    def padded(self) -> bool:
        return self.numeric and len(self._widths) == 1

    @property
    def misleading(self) -> bool:
        """Numbers without padding: byte order is not the order a person expects."""
        return self.numeric and (not self._numeric_order or len(self._widths) > 1)

    def document(self) -> dict[str, Any]:
        def text(key: bytes) -> str:
            return key.decode("utf-8", "backslashreplace")

        return {
            "order": "bytes",
            "first": text(self.first) if self.records else None,
            "last": text(self.last) if self.records else None,
            "numeric": self.numeric,
            "padded": self.padded,
            "dense": self.padded and self.dense,
        }


def examine(source: Source, progress: Callable[[int], None] = lambda done: None) -> dict[str, Any]:
    """Read every record of ``source`` and describe them, as plain JSON values; see the module's text.

    Parameters
    ----------
    progress: called now and then with the number of records read.
    """
    shapes: Counter[str] = Counter()
    encodings: Counter[str] = Counter()
    modes: Counter[str] = Counter()
    labels, keys = _Labels(), _Keys()
    bad: list[dict[str, Any]] = []
    bad_records = unflagged = 0
    total = len(source)
    for start in range(0, total, _CHUNK):
        for record in source.read_many(range(start, min(start + _CHUNK, total))):
            keys.add(record.key)
            try:
                parsed = datum.parse(record.value, record)
                seen = decode.probe(parsed, record)
            except DatumError as error:
                bad_records += 1
                if len(bad) < _MOST_BAD:
                    bad.append({"index": record.index, "key": show_key(record.key)[1:-1], "reason": str(error)})
                continue
            shapes[f"{seen.channels}x{seen.height}x{seen.width}"] += 1
            encodings[seen.encoding] += 1
            if seen.mode:
                modes[seen.mode] += 1
            unflagged += not seen.flagged
            labels.add(parsed.label)
        progress(min(start + _CHUNK, total))
    return {
        "schema": SCHEMA,
        "path": source.path,
        "backend": source.backend,
        "db": source.db,
        "records": total,
        "shapes": dict(shapes.most_common()),
        "encodings": dict(encodings.most_common()),
        "modes": dict(modes.most_common()),
        "labels": labels.document(),
        "key_order": keys.document(),
        "channel_mean": _channel_mean(source),
        "bad": bad,
        "bad_records": bad_records,
        "warnings": _warnings(total, shapes, encodings, modes, labels, keys, unflagged, bad_records),
    }


def _channel_mean(source: Source) -> list[float] | None:
    """Mean of each channel over some records, each record counting the same."""
    total = len(source)
    chosen = np.unique(np.linspace(0, max(total - 1, 0), min(total, _MEAN_OF)).astype(np.int64))
    means = []
    for record in source.read_many(chosen):
        try:
            image = decode.to_image(datum.parse(record.value, record), record)
        except DatumError:
            continue
        means.append(image.reshape(len(image), -1).mean(axis=1, dtype=np.float64))
    if not means or len({len(mean) for mean in means}) > 1:
        return None
    return [round(float(value), 4) for value in np.mean(means, axis=0)]


def _warnings(
    total: int,
    shapes: Counter[str],
    encodings: Counter[str],
    modes: Counter[str],
    labels: _Labels,
    keys: _Keys,
    unflagged: int,
    bad_records: int,
) -> list[str]:
    found = []
    if total == 0:
        found.append("there are no records")
    if bad_records:
        found.append(f"{bad_records} of {total} records cannot be understood as Caffe's Datum")
    if keys.misleading:
        found.append(
            "keys look like un-padded integers: iteration order ≠ numeric order "
            f"(from {show_key(keys.first)} to {show_key(keys.last)}); write them padded to 8 digits"
        )
    if labels.grouped:
        told = labels.document()
        found.append(
            f"records are grouped by label: {told['runs']} runs of equal labels, the longest {labels.longest} records, "
            f"where a random order has about {told['expected_runs']:.0f}; train with order.shuffle: full"
        )
    if labels.absent and labels.counts:
        found.append(f"{labels.absent} records have no label; training needs one in each")
    if len(shapes) > 1:
        found.append(f"{len(shapes)} different shapes: a batch needs a crop (or batch 1)")
    if len({name.split("x")[0] for name in shapes}) > 1:
        found.append("the number of channels differs between records: set force_color or force_gray")
    if len(encodings) > 1 and ("raw" in encodings or "float" in encodings):
        found.append(f"different kinds of records are mixed: {', '.join(encodings)}")
    odd = [mode for mode in modes if mode not in ("L", "RGB")]
    if odd:
        found.append(f"image files of mode {', '.join(odd)}: not decoded without force_color or force_gray")
    if unflagged:
        found.append(f"{unflagged} records hold image files but lack the flag 'encoded'; they are decoded all the same")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns 0, or 1 when there are records that cannot be understood."""
    parser = cli.Parser(prog="python -m datasets.inspect", description="Say what a data set holds.")
    parser.add_argument("path", metavar="DB", help="folder of an LMDB or LevelDB, single-file LMDB, or memory:…")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of tables")
    parser.add_argument("--backend", help="lmdb or leveldb; by default what lies there decides")
    parser.add_argument("--db", help="named sub-database (LMDB)")
    arguments = parser.parse_args(argv)
    cli.warn_if_shadowed()
    with open_source(arguments.path, backend=arguments.backend, db=arguments.db) as source:
        document = _with_progress(source)
    if arguments.json:
        sys.stdout.write(cli.dumps(document) + "\n")
    else:
        from rich.console import Console

        render(document, Console())
    return cli.EXIT_NOT_FINE if document["bad_records"] else cli.EXIT_OK


def _with_progress(source: Source) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading records", total=len(source))
        return examine(source, lambda done: bar.update(task, completed=done))


def render(document: dict[str, Any], console: Console) -> None:
    """Show an inspection as tables."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, text: str) -> None:
        table.add_row(name, escape(text))

    row("data set", f"{document['path']}" + (f" (database '{document['db']}')" if document["db"] is not None else ""))
    row("backend", document["backend"])
    row("records", f"{document['records']:,}")
    for name in ("shapes", "encodings", "modes"):
        if document[name]:
            row(name, _histogram(document[name]))
    labels = document["labels"]
    if labels["present"]:
        counts = f": {_histogram(labels['counts'])}" if labels["counts"] and len(labels["counts"]) <= 20 else ""
        row("labels", f"{labels['min']} to {labels['max']}, {labels['classes']} different{counts}")
        row(
            "label runs",
            f"{labels['runs']:,}, longest {labels['longest_run']:,} (random: {labels['expected_runs']:,.0f} runs)",
        )
    else:
        row("labels", "none")
    keys = document["key_order"]
    if keys["first"] is not None:
        kind = "padded numbers" if keys["padded"] else "numbers without padding" if keys["numeric"] else "names"
        row("keys", f"{keys['first']} to {keys['last']}, {kind}, in byte order")
    if document["channel_mean"] is not None:
        row("channel mean", ", ".join(f"{value:.2f}" for value in document["channel_mean"]))
    console.print(table)
    for entry in document["bad"]:
        console.print(f"[red]bad[/red]      {escape(entry['reason'])}", highlight=False)
    for warning in document["warnings"]:
        console.print(f"[yellow]warning[/yellow]  {escape(warning)}", highlight=False)


def _histogram(counts: dict[str, int], most: int = 12) -> str:
    shown = [f"{name} ({count:,})" for name, count in list(counts.items())[:most]]
    if len(counts) > most:
        shown.append(f"and {len(counts) - most} more")
    return ", ".join(shown)


if __name__ == "__main__":
    cli.run(main)
