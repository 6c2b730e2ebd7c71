"""Check a data set record by record: ``python -m datasets.verify DB [--salvage OUT] [--json]``.

Every record is read (an LMDB page by page, a LevelDB with its checksums), parsed, and its image decoded; where a
manifest lies beside the data set, every record is compared with its CRC-32. Raw pixels and floats carry no checksum of
their own: without a manifest, a changed pixel cannot be seen. ``--salvage`` copies what is sound to a new database.

The JSON document::

    schema, path, backend, db
    records    how many could be read
    sound      how many of them are sound
    expected   how many there should be, by the manifest, else by the database's own count; null where neither tells
    manifest   whether checksums of a manifest were compared
    bad        [{key, index, reason}], in key order; index: place in the manifest's order, else among the readable keys
    damage     [{place, reason, after}]: pages, blocks and files that cannot be read; after: last key read before
    warnings   [text]: what is sound, and still needs a person's eye
    salvaged   {path, backend, records, lost} or null
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from datasets import datum, decode, terminal
from datasets.crc_match import CrcMatcher, Gap, Suspect
from datasets.datum import DatumError
from datasets.errors import ManifestMismatch
from datasets.manifest import checksum_path, key_text, read_checksums, read_manifest, record_crc
from datasets.raw import Lost, RawReader, Stored, open_raw
from datasets.source import manifest_path, show_key, show_text
from datasets.threads import in_order
from profiler import cli

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
_TOLD_EVERY = 32
_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Seen:
    """A record that was looked at. ``shape`` is (channels, height, width) after decoding; ``problem`` is "" if none."""

    item: Stored
    crc: int
    problem: str = ""
    shape: tuple[int, int, int] = (0, 0, 0)
    label: int | None = None
    encoded: bool = False
    mode: str = ""
    flagged: bool = True
    finite: bool = True

    @property
    def labelled(self) -> bool:
        return self.label is not None or self.item.labels is not None


Sink = Callable[[Seen], None]


class _Report:
    """Adds up what is found, in key order."""

    def __init__(self, reader: RawReader) -> None:
        self.reader = reader
        self.records = self.sound = self.entries = 0
        self.bad: list[dict[str, Any]] = []
        self.damage: list[dict[str, Any]] = []
        self.modes: Counter[str] = Counter()
        self.unflagged = self.unlabelled = self.not_finite = self.strays = 0
        self.first_not_finite = b""
        self.last_key: bytes | None = None
        self._suspects: list[tuple[dict[str, Any], Suspect]] = []
        self.expected, self.matcher = _checksums(reader)
        if self.expected is None:
            self.expected = reader.expected

    def add(self, seen: Seen, sink: Sink | None) -> None:
        """Judge a record; a sound one goes to ``sink``."""
        item = seen.item
        self.records += 1
        place = self.entries
        problem = seen.problem
        doubt = item.doubt
        if self.matcher is not None:
            match = self.matcher.match(seen.crc)
            if match is None:
                changed = "its bytes are not those that were written (CRC-32 of the manifest)"
                problem = f"{changed}; {problem}" if problem else changed
            else:
                place, gap = match
                self._missing(gap)
                doubt = ""
        if self.last_key is not None and item.key <= self.last_key:
            doubt = doubt or "its key is not in order"
            problem = problem or doubt
        problem = problem or doubt
        if problem:
            self._bad(item.key, problem, place)
            return
        self.entries += 1
        self.sound += 1
        self.last_key = item.key
        if seen.mode and seen.mode not in ("L", "RGB"):
            self.modes[seen.mode] += 1
        self.unflagged += not seen.flagged
        self.unlabelled += not seen.labelled
        self.strays += item.stray and self.matcher is None  # a checksum tells that it is none of an older state
        if not seen.finite:
            self.first_not_finite = self.first_not_finite or item.key
            self.not_finite += 1
        if sink is not None:
            sink(seen)

    def lose(self, lost: Lost) -> None:
        """Note something that cannot be read."""
        if lost.key is not None:
            self._bad(lost.key, f"{lost.place}: {lost.reason}" if lost.place else lost.reason, self.entries)
        else:
            after = None if lost.after is None else key_text(lost.after)
            self.damage.append({"place": lost.place, "reason": lost.reason, "after": after})

    def document(self) -> dict[str, Any]:
        if self.matcher is not None:
            self._missing(self.matcher.finish())
            for entry, suspect in self._suspects:
                entry["index"] = suspect.place
        elif not self.damage and not self.bad and self.expected is not None and self.records != self.expected:
            reason = f"{self.records} records can be read; its own count says {self.expected}"
            self.damage.append({"place": "the database", "reason": reason, "after": None})
        self.bad.sort(key=lambda entry: entry["index"])
        self.damage.sort(key=lambda entry: entry["place"] != "the file")  # what explains the rest comes first
        return {
            "schema": SCHEMA,
            "path": self.reader.path,
            "backend": self.reader.backend,
            "db": self.reader.db,
            "records": self.records,
            "sound": self.sound,
            "expected": self.expected,
            "manifest": self.matcher is not None,
            "bad": self.bad,
            "damage": self.damage,
            "warnings": self._warnings(),
            "salvaged": None,
        }

    def _bad(self, key: bytes, reason: str, place: int) -> None:
        entry = {"key": key_text(key), "index": place, "reason": reason}
        self.entries += 1
        self.bad.append(entry)
        if self.matcher is not None:
            self._suspects.append((entry, self.matcher.suspect(key)))

    def _missing(self, gap: Gap) -> None:
        assert self.matcher is not None
        for place in gap.missing:
            self.bad.append(
                {"key": self.matcher.key(place), "index": place, "reason": "missing: the manifest counts it"}
            )

    def _warnings(self) -> list[str]:
        found = list(self.reader.notes)
        if self.records == 0:
            if not self.bad and not self.damage:
                found.append("there are no records")
        elif self.matcher is None and self.reader.backend != "memory":
            found.append("no manifest with checksums beside it: a changed pixel of a raw record cannot be seen")
        elif self.matcher is not None and self.sound == 0:
            found.append("not one record matches the manifest: it may describe another database")
        for mode, count in self.modes.most_common():
            found.append(f"{count} image files of mode {mode}: not decoded without force_color or force_gray")
        if self.unflagged:
            found.append(f"{self.unflagged} records hold image files but lack the flag 'encoded'")
        if self.unlabelled:
            found.append(f"{self.unlabelled} records have no label")
        if self.strays:
            found.append(
                f"{self.strays} records lie on pages that nothing leads to any more: if records were deleted or "
                "overwritten after the database was made, some may be of an older state or hold another's value"
            )
        if self.not_finite:
            found.append(
                f"{self.not_finite} records hold NaN or infinity, the first has key {show_key(self.first_not_finite)}"
            )
        return found


def examine(
    reader: RawReader, sink: Sink | None = None, progress: Callable[[int], object] = lambda done: None
) -> dict[str, Any]:
    """Check everything ``reader`` can read; see the module's text for the document.

    Parameters
    ----------
    sink: takes the sound records, keys ascending.
    progress: called now and then with the number of records read.

    Raises
    ------
    ManifestMismatch: manifest or checksums cannot be understood. What :meth:`RawReader.scan` raises.
    """
    report = _Report(reader)
    for found in in_order(_look, reader.scan()):
        if isinstance(found, Lost):
            report.lose(found)
            continue
        report.add(found, sink)
        if report.records % _TOLD_EVERY == 0:
            progress(report.records)
    progress(report.records)
    return report.document()


def _checksums(reader: RawReader) -> tuple[int | None, CrcMatcher | None]:
    if reader.backend == "memory" or reader.db is not None:  # a manifest speaks of the unnamed database
        return None, None
    manifest = read_manifest(reader.path)
    if manifest is None:
        return None, None
    crcs = read_checksums(reader.path)
    if crcs is None:
        return manifest.records, None
    if len(crcs) != manifest.records:
        raise ManifestMismatch(
            f"{checksum_path(reader.path)} does not fit to {manifest_path(reader.path)}",
            expected=f"{manifest.records} checksums",
            found=len(crcs),
            hint="copy both again, or remove both to verify without them",
        )
    return manifest.records, CrcMatcher(crcs, manifest.first_key, manifest.last_key)


def _look(item: Stored | Lost) -> Seen | Lost:
    if isinstance(item, Lost):
        return item
    crc = record_crc(item.key, item.value)
    try:
        # The report names the record: only what is said after it is of use here.
        parsed = datum.parse(item.value, _HERE)
        seen = decode.probe(parsed, _HERE)
        if not seen.flagged:
            parsed = replace(parsed, encoded=True)
        channels, height, width = seen.channels, seen.height, seen.width
        if seen.mode:  # an image file: only decoding it shows that it is whole
            # Colour modes that need a decision are no damage: decoded with one, and counted.
            odd = seen.mode not in ("L", "RGB")
            channels, height, width = decode.to_image(parsed, _HERE, "color" if odd else None).shape
    except DatumError as error:
        return Seen(item, crc, _brief(error))
    finite = parsed.finite and (item.labels is None or bool(np.isfinite(item.labels).all()))
    return Seen(item, crc, "", (channels, height, width), parsed.label, parsed.encoded, seen.mode, seen.flagged, finite)


_HERE = "the record"


def _brief(error: DatumError) -> str:
    """An error on one line, without the name of the record."""
    text = error.what.removeprefix(f"{_HERE}: ")
    if error.expected is not None:
        text += f"; expected {error.expected}"
    return text + (f"; found {error.found}" if error.found is not None else "")


def fine(document: dict[str, Any]) -> bool:
    """Whether nothing is bad and nothing damaged."""
    return not document["bad"] and not document["damage"]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns 0 if all is sound, else 1."""
    parser = cli.Parser(
        prog="python -m datasets.verify",
        description="Check every record of a data set; exit code 1 and a list if any is bad.",
    )
    parser.add_argument("path", metavar="DB", help="folder of an LMDB or LevelDB, single-file LMDB, or memory:…")
    parser.add_argument("--salvage", metavar="OUT", help="copy what is sound to a new database; DB stays as it is")
    parser.add_argument("--salvage-backend", choices=("lmdb", "leveldb"), help="kind of OUT; default: that of DB")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is there already")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")
    parser.add_argument("--backend", help="lmdb or leveldb; by default what lies there decides")
    parser.add_argument("--db", help="named sub-database (LMDB)")
    arguments = parser.parse_args(argv)
    if not arguments.salvage and (arguments.salvage_backend or arguments.force):
        parser.error("--salvage-backend and --force need --salvage OUT")
    cli.warn_if_shadowed()
    reader = open_raw(arguments.path, backend=arguments.backend, db=arguments.db)
    with terminal.progress("checking records", reader.expected) as progress:
        if arguments.salvage:
            from datasets.salvage import salvage

            document = salvage(
                reader, arguments.salvage, backend=arguments.salvage_backend, force=arguments.force, progress=progress
            )
        else:
            document = examine(reader, progress=progress)
    if arguments.json:
        sys.stdout.write(cli.dumps(document) + "\n")
    else:
        from rich.console import Console

        render(document, Console())
    return cli.EXIT_OK if fine(document) else cli.EXIT_NOT_FINE


def render(document: dict[str, Any], console: Console) -> None:
    """Show the outcome: what is bad first, what it comes to last."""
    from rich.markup import escape

    def show(style: str, word: str, text: str) -> None:
        console.print(f"[{style}]{word:<8}[/{style}] {escape(text)}", highlight=False, soft_wrap=True)

    name = f"{document['path']} ({document['backend']})"
    for entry in document["damage"][:_MOST_SHOWN]:
        after = "" if entry["after"] is None else f" (last key before it: '{show_text(entry['after'])}')"
        joint = " " if entry["reason"].startswith(("is ", "has ")) else ": "
        show("red", "damaged", f"{entry['place']}{joint}{entry['reason']}{after}")
    for entry in document["bad"][:_MOST_SHOWN]:
        key = "key unknown" if entry["key"] is None else f"key '{show_text(entry['key'])}'"
        show("red", "bad", f"record {entry['index']} ({key}): {entry['reason']}")
    for kind in ("damage", "bad"):
        if len(document[kind]) > _MOST_SHOWN:
            show("red", "", f"and {len(document[kind]) - _MOST_SHOWN} more {kind} entries: --json lists all")
    for warning in document["warnings"]:
        show("yellow", "warning", warning)
    against = ", compared with the manifest's checksums" if document["manifest"] else ""
    of = f" of {document['expected']:,}" if document["expected"] not in (None, document["records"]) else ""
    if fine(document):
        show("green", "fine", f"{name}: {document['records']:,} records, all sound{against}")
    else:
        show(
            "red", "NOT FINE", f"{name}: {document['records']:,}{of} records read, {document['sound']:,} sound{against}"
        )
    saved = document["salvaged"]
    if saved is not None and saved["records"]:
        show(
            "bold",
            "salvaged",
            f"{saved['records']:,} records: {saved['path']} ({saved['backend']}); {_lost_text(document)}",
        )
    elif saved is not None:
        show("red", "nothing", "was salvaged: not one record is sound, and no database was made")
    elif not fine(document) and document["sound"] and document["backend"] != "hdf5":
        show("bold", "try", "--salvage OUT copies the sound records to a new database")


def _lost_text(document: dict[str, Any]) -> str:
    lost = document["salvaged"]["lost"]
    if document["expected"] is None and document["damage"]:
        return f"at least {lost:,} lost: the database does not say how many records its damaged places held"
    return f"{lost:,} lost"


if __name__ == "__main__":
    cli.run(main)
