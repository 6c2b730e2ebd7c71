"""What a data set takes: bytes on disk, how much of them is in memory, and pages that hold nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass

from datasets.source import Source
from profiler import osread
from profiler.osread import Missing


@dataclass(frozen=True)
class Pages:
    """Pages of an LMDB: all that the file's count says, and those of them that no database uses."""

    size: int
    total: int
    unused: int


@dataclass(frozen=True)
class Footprint:
    """The files of a data set.

    Attributes
    ----------
    files: how many. nbytes: their apparent size. allocated: what they take on disk, less where they are sparse.
    resident: bytes in the page cache, or why that is not known.
    pages: of an LMDB, else None.
    """

    files: int
    nbytes: int
    allocated: int
    resident: int | Missing
    pages: Pages | None = None


def footprint(source: Source) -> Footprint | None:
    """The footprint of a data set that lies in files; None for one in memory."""
    if not os.path.exists(source.path):
        return None
    if os.path.isdir(source.path):
        files = [entry.path for entry in os.scandir(source.path) if entry.is_file()]
    else:
        files = [source.path]
    status = [os.stat(file) for file in files]
    told = [osread.resident_bytes(file) for file in files]
    missing = next((one for one in told if isinstance(one, Missing)), None)
    resident = sum(one for one in told if not isinstance(one, Missing)) if missing is None else missing
    return Footprint(
        len(files),
        sum(one.st_size for one in status),
        sum(one.st_blocks * 512 for one in status),
        resident,
        _pages(source) if source.backend == "lmdb" else None,
    )


def _pages(source: Source) -> Pages:
    from datasets import lmdb_pages
    from datasets.lmdb_file import LmdbFile
    from datasets.raw import Lost

    with LmdbFile(source.path, source.name) as file:
        meta = file.meta()
        used = meta.main.pages
        for found in lmdb_pages.databases(lmdb_pages.Pages(file, meta), only=source.db is None):
            if not isinstance(found, Lost):
                used += found[1].pages
        total = meta.last_page + 1
        # Two meta pages; the list of free pages is not told apart from what it lists.
        return Pages(meta.page_size, total, max(0, total - used - 2))
