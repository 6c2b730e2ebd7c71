"""Which of the databases in the file of an LMDB is read: the main one, or one of those that it lists by name."""

from __future__ import annotations

from datasets.errors import DatasetCorrupt, NotADataset
from datasets.lmdb_file import Tree
from datasets.lmdb_pages import MAX_NAMED, Pages, databases
from datasets.raw import Lost
from datasets.source import show_key


def chosen(pages: Pages, db: str | None, path: str, name: str) -> Tree:
    """The database ``db``; None is the main one. ``path`` and ``name``: as errors show them.

    Raises
    ------
    NotADataset: there is none of this name, or the main one only lists others.
    DatasetCorrupt: the list of them cannot be read.
    """
    names: list[bytes] = []
    for found in databases(pages, only=db is None):
        if isinstance(found, Lost):
            if names:
                continue
            raise corrupt(path, name, "cannot be read", f"{found.place} {found.reason or 'lies beyond the end'}")
        if db is not None and found[0] == db.encode():
            return found[1]
        names.append(found[0])
        if db is None and len(names) == MAX_NAMED:
            break
    main = pages.meta.main
    if db is not None:
        raise NotADataset(
            f"{path} holds no database named '{db}'",
            expected="one of: " + _listed(names) if names else "no name: it has none but the main database",
            found=f"db '{db}'",
        )
    if names and len(names) >= min(main.entries, MAX_NAMED):
        raise NotADataset(
            f"{path} holds named databases and no records of its own",
            expected="records in the main database, or the name of another",
            found=_listed(names),
            hint=f"name one: --db {names[0].decode('utf-8', 'backslashreplace')} on the command line, "
            "data.<phase>.db in a job, db= in open_source",
        )
    return main


def corrupt(path: str, name: str, what: str, found: str) -> DatasetCorrupt:
    """The error for pages that are not what they should be."""
    return DatasetCorrupt(
        f"{name} {what}",
        expected="an intact LMDB",
        found=found,
        hint="copy it again from where it was made, and compare checksums; "
        f"python -m datasets.verify {path} lists what is damaged and saves what is sound",
    )


def _listed(names: list[bytes]) -> str:
    return ", ".join(show_key(name) for name in names[:16]) + (" …" if len(names) > 16 else "")
