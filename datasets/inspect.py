"""Look into a data set: ``python -m datasets.inspect DB [--json] [--html F] [--limit N]``.

Reads all records (or a part that is spread evenly, with ``--limit``), decodes a few, and leaves the data set as it was.

The JSON document::

    schema, path, backend, db, records
    data_sets   {name: shape of a row} of HDF5 files, else null; the records hold the first one, their labels the others
    looked_at   {records, stretches}           how many records were read, in how many stretches of neighbours
    shapes      {"CxHxW": records}             image files: the size in the file's header; the 1000 most frequent
    encodings   {"raw" | "float" | "jpeg" | …: records}
    modes       {"L" | "RGB" | "P" | …: records}, image files only
    labels      {present, absent, vectors, min, max, classes, counts, runs, expected_runs, longest_run,
                 shuffled_longest_run {typical, at_most}}: what a shuffled set would show, and once in a million times
    key_order   {order, first, last, numeric, padded, dense}
    record_bytes   {min, p5, p50, p95, max, mean, total} of the stored values
    channel_mean   of channel_mean_of records (at most 64) spread over the data set, as decoded (B, G, R); null where
                   their channels differ
    storage     {files, nbytes, allocated, resident, resident_missing, page_bytes, pages, unused_pages}; null in memory
    bad         [{index, key, reason, problem}], the first 20 records that cannot be understood (problem: the reason
                without the record's name); bad_records: how many there are
    warnings    [text]
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from datasets import datum, decode, words
from datasets.datum import DatumError
from datasets.errors import DatasetWarning
from datasets.findings import warnings_of
from datasets.footprint import Footprint
from datasets.image_file import Color
from datasets.source import EVERY_TOP, Record, Source, open_source
from datasets.survey import Keys, Labels, Survey, survey
from datasets.targets import check_apart
from profiler import cli
from profiler.errors import UsageError
from profiler.osread import Missing

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

SCHEMA = 1
_MEAN_OF = 64
_MOST_COUNTS = 1000


def examine(
    source: Source,
    progress: Callable[[int], None] = lambda done: None,
    *,
    limit: int | None = None,
    max_pixels: int | None = None,
) -> dict[str, Any]:
    """Describe the records of ``source`` as plain JSON values; see the module's text.

    Parameters
    ----------
    progress: called now and then with the number of records read.
    limit, max_pixels: see :func:`datasets.survey.survey`.
    """
    return describe(source, survey(source, limit, progress, max_pixels), max_pixels)


def describe(source: Source, found: Survey, max_pixels: int | None = None) -> dict[str, Any]:
    """The JSON document of a finished survey of ``source``."""
    return {
        "schema": SCHEMA,
        "path": source.path,
        "backend": source.backend,
        "db": source.db,
        "records": found.records,
        "looked_at": {"records": found.looked_at, "stretches": found.stretches},
        "data_sets": {top: list(shape) for top, shape in zip(source.tops, source.blobs, strict=True)} or None,
        "shapes": dict(found.shapes.most_common(_MOST_COUNTS)),
        "encodings": dict(found.encodings.most_common()),
        "modes": dict(found.modes.most_common()),
        "labels": _labels(found.labels),
        "key_order": _keys(found.keys),
        "record_bytes": _sizes(found),
        "channel_mean": channel_mean(source, max_pixels),
        "channel_mean_of": min(len(source), _MEAN_OF),
        "storage": None if found.on_disk is None else _storage(found.on_disk),
        "bad": found.bad,
        "bad_records": found.bad_records,
        "warnings": [*source.notes, *warnings_of(found)],
    }


def channel_mean(source: Source, max_pixels: int | None = None) -> list[float | None] | None:
    """Mean of each channel (B, G, R) over up to 64 records, each counting the same; None where the channels differ."""
    total = len(source)
    chosen = np.unique(np.linspace(0, max(total - 1, 0), min(total, _MEAN_OF)).astype(np.int64))
    means = []
    for record in source.read_many(chosen):
        image = picture(record, max_pixels)
        if isinstance(image, DatumError):
            continue
        means.append(image.reshape(len(image), -1).mean(axis=1, dtype=np.float64))
    if not means or len({len(mean) for mean in means}) > 1:
        return None
    return cli.finite([round(float(value), 4) for value in np.mean(means, axis=0)])


def picture(record: Record, max_pixels: int | None, color: Color | None = None) -> NDArray[Any] | DatumError:
    """The image of a record, or what is wrong with it. Says nothing of missing flags: the survey counts them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DatasetWarning)
        try:
            return decode.to_image(datum.parse(record.value, record), record, color, max_pixels=max_pixels)
        except DatumError as error:
            return error


def _labels(labels: Labels) -> dict[str, Any]:
    few = len(labels.counts) <= _MOST_COUNTS
    shuffled = {"typical": labels.shuffled_longest(0.5), "at_most": labels.shuffled_most}
    return {
        "present": labels.present,
        "absent": labels.absent,
        "vectors": labels.vectors,
        "min": min(labels.counts, default=None),
        "max": max(labels.counts, default=None),
        "classes": len(labels.counts),
        "counts": {str(label): count for label, count in sorted(labels.counts.items())} if few else None,
        "runs": labels.runs,
        "expected_runs": labels.expected_runs,
        "longest_run": labels.longest,
        "shuffled_longest_run": shuffled if shuffled["typical"] is not None else None,
    }


def _keys(keys: Keys) -> dict[str, Any]:
    def text(key: bytes) -> str:
        return key.decode("utf-8", "backslashreplace")

    return {
        "order": "bytes",
        "first": text(keys.first) if keys.records else None,
        "last": text(keys.last) if keys.records else None,
        "numeric": keys.numeric,
        "padded": keys.padded,
        "dense": keys.padded and keys.dense,
    }


def _sizes(found: Survey) -> dict[str, float] | None:
    if not found.sizes:
        return None
    sizes = np.frombuffer(found.sizes, np.uint32)
    least, p5, p50, p95, most = (int(q) for q in np.percentile(sizes, (0, 5, 50, 95, 100), method="nearest"))
    total = int(sizes.sum(dtype=np.int64))
    mean = round(total / len(sizes), 1)
    return {"min": least, "p5": p5, "p50": p50, "p95": p95, "max": most, "mean": mean, "total": total}


def _storage(on_disk: Footprint) -> dict[str, Any]:
    missing, pages = isinstance(on_disk.resident, Missing), on_disk.pages
    return {
        "files": on_disk.files,
        "nbytes": on_disk.nbytes,
        "allocated": on_disk.allocated,
        "resident": None if missing else on_disk.resident,
        "resident_missing": on_disk.resident.reason if isinstance(on_disk.resident, Missing) else None,
        "page_bytes": pages.size if pages else None,
        "pages": pages.total if pages else None,
        "unused_pages": pages.unused if pages else None,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns 0, or 1 when there are records that cannot be understood."""
    parser = cli.Parser(prog="python -m datasets.inspect", description="Say what a data set holds.")
    parser.add_argument("path", metavar="DB", help="folder of an LMDB or LevelDB, single-file LMDB, or memory:…")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of tables")
    parser.add_argument("--html", metavar="F", help="write a page with thumbnails that needs nothing else")
    parser.add_argument("--limit", type=int, metavar="N", help="read N records, spread evenly (default: all)")
    parser.add_argument("--max-pixels", type=int, metavar="N", help="refuse larger image files without decoding them")
    parser.add_argument("--backend", help="lmdb or leveldb; by default what lies there decides")
    parser.add_argument("--db", help="named sub-database (LMDB)")
    arguments = parser.parse_args(argv)
    for name in ("limit", "max_pixels"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is out of range", expected="1 or more", found=value)
    if arguments.html:
        check_apart(arguments.html, arguments.path)
    cli.warn_if_shadowed()
    with open_source(arguments.path, backend=arguments.backend, db=arguments.db, tops=EVERY_TOP) as source:
        found = _with_progress(source, arguments.limit, arguments.max_pixels)
        document = describe(source, found, arguments.max_pixels)
        if arguments.html:
            from datasets import contact_sheet

            page = contact_sheet.page(source, found, document, arguments.max_pixels)
            _write(Path(arguments.html), page)
    if arguments.json:
        sys.stdout.write(cli.dumps(document) + "\n")
    else:
        from rich.console import Console

        render(document, Console())
    return cli.EXIT_NOT_FINE if document["bad_records"] else cli.EXIT_OK


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"the page cannot be written to {path}: {error.strerror}") from error


def _with_progress(source: Source, limit: int | None, max_pixels: int | None) -> Survey:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    total = len(source) if limit is None else min(limit, len(source))
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading records", total=total)
        return survey(source, limit, lambda done: bar.update(task, completed=done), max_pixels)


def render(document: dict[str, Any], console: Console) -> None:
    """Show an inspection as tables."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in words.rows(document):
        table.add_row(name, escape(text))
    console.print(table)
    for line in words.bad_lines(document):
        console.print(f"[red]bad[/red]      {escape(line)}", highlight=False)
    for warning in document["warnings"]:
        console.print(f"[yellow]warning[/yellow]  {escape(warning)}", highlight=False)


if __name__ == "__main__":
    cli.run(main)
