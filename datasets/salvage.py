"""Copy the sound records of a damaged data set to a new database, keys and values unchanged.

``python -m datasets.salvage DB OUT`` is ``python -m datasets.verify DB --salvage OUT``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import publish, verify, writer
from datasets.manifest import Tally, read_manifest, remove_manifest, write_manifest
from datasets.raw import RawReader
from datasets.targets import check_apart, check_target
from datasets.verify import Seen, examine
from profiler import cli
from profiler.errors import UsageError

_LISTED = 100


class _NothingSound(Exception):
    """There is nothing to copy: the temporary database goes."""


def salvage(
    reader: RawReader,
    out: str | os.PathLike[str],
    *,
    backend: str | None = None,
    force: bool = False,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, Any]:
    """Check everything, copy what is sound to ``out``, with a manifest beside it that lists what was lost.

    Parameters
    ----------
    backend: ``lmdb`` or ``leveldb``; None for that of the source. force: replace a database at ``out``.

    Returns the document of :func:`datasets.verify.examine` with ``salvaged`` filled in: {path, backend, records, lost};
    ``lost`` is a lower bound where the source does not say how many records it held.

    Raises :class:`UsageError` for a wrong target. The source is only read.
    """
    if reader.backend == "hdf5":
        raise UsageError(f"{reader.name} cannot be salvaged: what is written holds no labels of HDF5 files")
    target_path = Path(os.path.abspath(out))
    if reader.backend != "memory":
        check_apart(target_path, reader.path)
    check_target(target_path, force)
    kind = backend or (reader.backend if reader.backend in writer.WRITERS else "lmdb")
    before = None if reader.backend == "memory" else read_manifest(reader.path)
    tally = Tally()
    document: dict[str, Any] = {}
    try:
        with publish.new_folder(target_path) as folder:
            target = writer.WRITERS[kind](folder)

            def keep(seen: Seen) -> None:
                target.put(seen.item.key, seen.item.value)
                tally.add(seen.item.key, seen.item.value, seen.shape, seen.label, seen.encoded)

            try:
                document = examine(reader, keep, progress)
                if not tally.records:
                    raise _NothingSound
                target.close()
            finally:
                target.abandon()
            remove_manifest(target_path)
    except _NothingSound:
        document["salvaged"] = {"path": None, "backend": kind, "records": 0, "lost": _lost(document)}
        return document
    reasons = [f"{entry['place']}: {entry['reason']}" for entry in document["damage"]]
    reasons += [f"{entry['key']}: {entry['reason']}" for entry in document["bad"]]
    manifest = tally.manifest(
        backend=kind,
        classes=before.classes if before else None,
        source=reader.path,
        options={"kind": "salvage", "db": reader.db},
        shuffle_seed=before.shuffle_seed if before else None,
        skipped=reasons[:_LISTED],
        skipped_count=_lost(document),
    )
    write_manifest(target_path, manifest, tally.crcs)
    lost = _lost(document)
    document["salvaged"] = {"path": str(target_path), "backend": kind, "records": tally.records, "lost": lost}
    return document


def _lost(document: dict[str, Any]) -> int:
    """Records known to be lost: a lower bound where the source does not say how many it held."""
    known = len(document["bad"])
    if document["expected"] is None:
        return known
    return max(known, document["expected"] - document["sound"])


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns what :func:`datasets.verify.main` returns: 0 if all was sound, else 1."""
    parser = cli.Parser(
        prog="python -m datasets.salvage",
        description="Copy the sound records of a data set to a new database; the data set stays as it is. "
        "The same as python -m datasets.verify DB --salvage OUT, which tells more options.",
    )
    parser.add_argument("path", metavar="DB", help="folder of an LMDB or LevelDB, or single-file LMDB")
    parser.add_argument("out", metavar="OUT", help="folder of the new database; its manifest goes beside it")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is there already")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of text")
    arguments = parser.parse_args(argv)
    flags = [f"--{name}" for name in ("force", "json") if getattr(arguments, name)]
    return verify.main([*flags, "--salvage", arguments.out, "--", arguments.path])


if __name__ == "__main__":
    cli.run(main)
