"""The files of a LevelDB folder that matter: what its manifest names, and whether it is there in full."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from datasets.errors import DatasetCorrupt, DatasetTruncated, SourceError
from datasets.leveldb_log import Table, live_files
from datasets.sniff import restore


@dataclass(frozen=True)
class Listing:
    """What a folder holds.

    Attributes
    ----------
    manifest: name of the manifest. content: what it held when it was read.
    tables: file names of the tables that are there, with what the manifest says of each.
    logs: names of the logs that are still to be replayed, the oldest first.
    """

    manifest: str
    content: bytes
    tables: dict[str, Table]
    logs: tuple[str, ...]


def listing(folder: Path, name: str, complain: Callable[[SourceError], None] | None = None) -> Listing:
    """Read CURRENT and the manifest, and look for the tables.

    Parameters
    ----------
    name: of the data set, for errors.
    complain: called for each table that is missing or cut, and a manifest with wrong checksums is believed as far as
        it can be understood; None: all of that is raised.

    Raises :class:`DatasetCorrupt`, :class:`DatasetTruncated`; FileNotFoundError where a file vanishes meanwhile.
    """
    manifest = (folder / "CURRENT").read_bytes().decode("ascii", "replace").strip()
    if not re.fullmatch(r"MANIFEST-\d+", manifest):
        raise DatasetCorrupt(f"{name}: CURRENT names no manifest", expected="MANIFEST-<number>", found=repr(manifest))
    if not (folder / manifest).exists():
        raise DatasetCorrupt(
            f"{name}: CURRENT names {manifest}, which is missing",
            hint=f"an interrupted copy, most likely. {restore(folder)}",
        )
    content = (folder / manifest).read_bytes()
    state = live_files(content, manifest, name, strict=complain is None)
    tables: dict[str, Table] = {}
    for number, table in sorted(state.tables.items()):
        file = next((f for ending in (".ldb", ".sst") if (f := folder / f"{number:06d}{ending}").exists()), None)
        problem = _problem(table, file, name)
        if problem is not None:
            if complain is None:
                raise problem
            complain(problem)
        if file is not None:
            tables[file.name] = table
    logs = sorted(
        (log for log in folder.glob("*.log") if log.stem.isdigit()), key=lambda log: int(log.stem)
    )  # fmt: skip
    live = (log.name for log in logs if int(log.stem) >= state.log or int(log.stem) == state.previous_log)
    return Listing(manifest, content, tables, tuple(live))


def _problem(table: Table, file: Path | None, name: str) -> SourceError | None:
    if file is None:
        return DatasetCorrupt(
            f"{name}: table {table.number:06d}.ldb, which its manifest names, is missing",
            hint="an interrupted copy, most likely: copy it again",
        )
    have = file.stat().st_size
    if have == table.nbytes:
        return None
    return DatasetTruncated(
        f"{name}: the table {file.name} has not the size its manifest gives",
        expected=f"{table.nbytes} bytes",
        found=f"{have} bytes",
        hint="an interrupted copy, most likely: copy it again",
    )
