"""What lies at a path: told by names and first bytes, without a database library and without a trace."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from datasets.errors import CurrentMissing, EmptyFolder, EmptyPath, NotADataset, SourceError, SourceMissing

_LMDB_MAGIC = (0xBEEFC0DE).to_bytes(4, "little")
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_LINE_OF_LIST = re.compile(rb"\S.*[ \t][+-]?\d+")
_SIGNATURES = {b"SQLite format 3": "SQLite", b"PK\x03\x04": "zip", b"\x1f\x8b": "gzip"}


def sniff(path: str, wanted: str | None = None) -> tuple[str, str]:
    """Absolute path and kind (``lmdb``, ``leveldb``, ``list``, ``hdf5``) of what lies at ``path``.

    Told by names and first bytes only; ``wanted`` decides where a folder holds both kinds of database, and which of the
    two lists a file of text is. ``list``: image files and their labels; ``hdf5``: a file, or a list of files.
    """
    if not path.strip():
        raise EmptyPath(
            "the path of the data set is empty",
            expected="a folder or a file",
            found=repr(path),
            hint="fill in data.<phase>.source, or data_param { source: … } of the net",
        )
    place = Path(os.path.abspath(path))
    try:
        if place.is_dir():
            return str(place), _sniff_folder(place, wanted)
        if place.is_file():
            return _sniff_file(place, wanted)
    except PermissionError as error:
        raise SourceError(
            f"no permission to read {error.filename or place}", hint="check its mode and those of the folders above it"
        ) from error
    if place.is_symlink():
        raise SourceMissing(f"{place} is a symbolic link to {os.readlink(place)}, where nothing lies")
    if place.exists():
        raise NotADataset(f"{place} is neither a folder nor a regular file")
    parent = place.parent
    while not parent.exists():
        parent = parent.parent
    raise SourceMissing(
        f"there is no data set at {place}",
        expected="a folder or file",
        found=f"nothing; the path exists up to {parent}",
        hint=None if os.path.isabs(path) else f"'{path}' is relative to {os.getcwd()}",
    )


def _sniff_folder(folder: Path, wanted: str | None) -> str:
    names = sorted(os.listdir(folder))
    has_lmdb, has_leveldb = "data.mdb" in names, "CURRENT" in names
    if has_lmdb and has_leveldb:
        if wanted:
            return wanted
        raise NotADataset(
            f"{folder} holds both an LMDB (data.mdb) and a LevelDB (CURRENT)",
            hint="name the backend; an empty LevelDB appears where an LMDB was opened as LEVELDB with 'create'",
        )
    if has_lmdb:
        return "lmdb"
    if has_leveldb:
        return "leveldb"
    if any(name.endswith((".ldb", ".sst")) or name.startswith("MANIFEST-") for name in names):
        raise CurrentMissing(
            f"{folder} holds tables of a LevelDB but not its file CURRENT",
            expected="a file CURRENT that names the MANIFEST",
            found=", ".join(names[:8]) + (" …" if len(names) > 8 else ""),
            hint="do not open it with create_if_missing: that deletes the tables. " + restore(folder),
        )
    if not names:
        raise EmptyFolder(f"the folder {folder} is empty", expected="data.mdb (LMDB) or CURRENT (LevelDB)")
    inner = [
        name for name in names[:200] if (folder / name / "data.mdb").is_file() or (folder / name / "CURRENT").is_file()
    ]
    raise NotADataset(
        f"the folder {folder} holds neither an LMDB nor a LevelDB",
        expected="data.mdb (LMDB) or CURRENT (LevelDB)",
        found=", ".join(names[:8]) + (" …" if len(names) > 8 else ""),
        hint=f"name a folder inside it: {', '.join(inner[:4])}" if inner else _hint_for(names),
    )


def restore(folder: Path) -> str:
    """What to do about a LevelDB that lacks its CURRENT or its manifest, step by step."""
    place, copy = shlex.quote(str(folder)), shlex.quote(f"{folder}.copy")
    return (
        "Copy what is missing from where the folder came from; where that is gone, repair a copy: "
        f"cp -r {place} {copy} && python -c 'import plyvel, sys; plyvel.repair_db(sys.argv[1])' {copy}, "
        f"then python -m datasets.verify {copy} says how many records came back"
    )


def _hint_for(names: list[str]) -> str:
    if "lock.mdb" in names:
        return "lock.mdb alone holds no records: data.mdb did not come along with it"
    return "make a database from images, lists or arrays with python -m datasets.convert"


def _sniff_file(place: Path, wanted: str | None) -> tuple[str, str]:
    with open(place, "rb") as file:
        head = file.read(4096)
    if place.name == "data.mdb":
        return str(place.parent), "lmdb"
    # An LMDB begins with a page header (16 bytes, of 32-bit programs 12) and then the magic number of the meta page.
    if {head[12:16], head[16:20]} & {_LMDB_MAGIC, _LMDB_MAGIC[::-1]}:  # other machines' are refused by name later
        return str(place), "lmdb"
    if head.startswith(HDF5_MAGIC):
        return str(place), "hdf5"
    if wanted in ("list", "hdf5"):
        return str(place), wanted
    if told := _kind_of_list(place, head):
        return str(place), told
    kind = next((name for magic, name in _SIGNATURES.items() if head.startswith(magic)), None)
    if not head:
        found = "an empty file"
    elif kind:
        found = f"a file of the kind {kind}"
    else:
        found = f"a file that begins with {head[:8].hex(' ')}"
    raise NotADataset(
        f"{place} is not a data set",
        expected="an LMDB (folder or single file), the folder of a LevelDB, a list of image files, or HDF5",
        found=found,
        hint="for a LevelDB name its folder" if place.name in ("CURRENT", "LOG", "LOCK") else None,
    )


def _kind_of_list(place: Path, head: bytes) -> str | None:
    """Which kind of list a file of text is, by its first line: a file's name that ends like HDF5's, or a path and a
    number; None for neither."""
    line = next((line.strip() for line in head.removeprefix(b"\xef\xbb\xbf").splitlines() if line.strip()), b"")
    if b"\0" in head:
        return None
    if line.lower().endswith((b".h5", b".hdf5", b".hdf")):
        return "hdf5"
    return "list" if _LINE_OF_LIST.fullmatch(line) else None
