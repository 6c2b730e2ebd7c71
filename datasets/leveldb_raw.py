"""What a LevelDB still holds: read with every checksum verified, on a private view, going on behind the damage.

A healthy one is read as it is. Where LevelDB stops, the tables and logs are looked through for the place, and LevelDB's
own repair, run on the view, gathers the blocks that are sound; reading goes on behind the last key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets.errors import DatasetCorrupt, SourceError
from datasets.leveldb_library import codec_missing, error_text, import_plyvel, open_files_limit, refuse_without_codec
from datasets.leveldb_tables import BadBlock, bad_blocks, bad_log
from datasets.leveldb_view import PrivateView
from datasets.raw import Lost, RawReader, Stored
from datasets.source import show_key


class LevelDbReader(RawReader):
    """Reads the records of a LevelDB; see the module's text. The data set's folder is left alone."""

    backend = "leveldb"

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        import_plyvel(self.name)

    def scan(self) -> Iterator[Stored | Lost]:
        plyvel = import_plyvel(self.name)
        problems: list[SourceError] = []
        view = PrivateView(self.path, self.name, problems)
        try:
            refuse_without_codec(self.name, [Path(view.path, table) for table in view.ranges])
            yield from (_lost(problem, self.name) for problem in problems)
            # Before LevelDB opens the view: it replays the logs and then deletes them.
            bad = [bad for name in view.files if name.endswith(".log") for bad in bad_log(Path(self.path, name))]
            last: bytes | None = None
            gaps: list[BadBlock] = []
            blamed = False
            for attempt in ("as it is", "without damaged logs", "repaired"):
                if attempt == "without damaged logs" and last is not None:
                    continue  # the logs were not the trouble
                try:
                    if attempt == "repaired":
                        plyvel.repair_db(view.path, paranoid_checks=True)
                    for key, value in _records(plyvel, view.path, last, paranoid=attempt == "as it is"):
                        while gaps and gaps[-1].upto < key:
                            yield Lost(gaps[-1].place, gaps.pop().reason, None, last)
                        last = key
                        yield Stored(key, value)
                    break
                except plyvel.Error as error:
                    failure = error_text(error).replace(view.path, self.path)
                    if not blamed:
                        found = self._blocks(view, failure, bool(bad or problems))
                        yield from (_whole(block, view) for block in found if not block.upto)
                        # Told where reading passes them, with the key before them.
                        gaps = sorted((block for block in found if block.upto), key=lambda block: block.upto)[::-1]
                        blamed = True
            else:
                raise DatasetCorrupt(
                    f"{self.name} cannot be read, not even repaired",
                    found=failure,
                    hint="copy it again from where it was made",
                )
            yield from (Lost(block.place, block.reason, None, last) for block in [*gaps[::-1], *bad])
        finally:
            view.remove()

    def _blocks(self, view: PrivateView, failure: str, explained: bool) -> list[BadBlock]:
        """Where the tables are damaged."""
        names = [name for name in view.files if not name.endswith(".log")]
        found = [block for name in names for block in bad_blocks(Path(self.path, name))]
        missing = None if found else codec_missing(self.name, failure)
        if missing is not None:
            raise missing
        if not found and not explained:
            found = [BadBlock("the database", failure)]
        return found


def _records(plyvel: Any, path: str, last: bytes | None, paranoid: bool) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values behind ``last``."""
    db = plyvel.DB(path, create_if_missing=False, paranoid_checks=paranoid, max_open_files=open_files_limit())
    try:
        start = None if last is None else last + b"\0"
        with db.iterator(start=start, verify_checksums=True, fill_cache=False) as records:
            yield from records
    finally:
        db.close()


def _whole(block: BadBlock, view: PrivateView) -> Lost:
    """A table of which nothing can be found, with the keys it should hold."""
    first, last = view.ranges.get(block.place.split(",")[0], (b"", b""))
    keys = f" (keys {show_key(first)} to {show_key(last)})" if last else ""
    return Lost(block.place, block.reason + keys)


def _lost(problem: SourceError, name: str) -> Lost:
    what = problem.what.removeprefix(f"{name}: ")
    sizes = f" ({problem.found} of {problem.expected})" if problem.found else ""
    return Lost("the folder", what + sizes)
