"""Whose file it is: other machines' and other versions' LMDBs by name, and what becomes of one without a meta page."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from datasets import raw, verify
from datasets.errors import DatasetCorrupt, NotADataset
from datasets.lmdb_file import LmdbFile
from datasets.source import open_source
from tests.datasets.damage import PAGE, change, write_lmdb

MARK = struct.pack("<I", 0xBEEFC0DE)


def commits(folder: Path, count: int) -> Path:
    for turn in range(count):
        write_lmdb(folder, {b"%08d" % (turn * 50 + place): b"v" * 100 for place in range(50)})
    return folder


@pytest.mark.parametrize("field", [(0, PAGE), (16, 4), (20, 4)], ids=["whole page", "mark", "version"])
@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_without_one_of_its_meta_pages_a_database_is_refused_not_read_as_it_once_was(
    tmp_path: Path, field: tuple[int, int], page: int, count: int
) -> None:
    """The other page is a commit older half of the time: after the first commit, that is an empty database."""
    folder = commits(tmp_path / "db", count)
    change(folder, page * PAGE + field[0], bytes(field[1]))
    with pytest.raises(lmdb.Error):
        lmdb.open(str(folder), readonly=True, lock=False)
    with pytest.raises(DatasetCorrupt, match=f"meta page {page} cannot be read") as caught:
        len(open_source(folder))
    assert "datasets.verify" in str(caught.value)
    document = verify.examine(raw.open_raw(str(folder)))
    assert document["records"] in {50 * (count - 1), 50 * count}
    assert not verify.fine(document)


def on_32_bits(content: bytes) -> bytes:
    """The meta page as a 32-bit program lays it out: page numbers and sizes of 4 bytes."""
    return struct.pack("<IHHHH", 0, 0, 8, 0, 0) + content[16:] + bytes(4)


def turned(content: bytes) -> bytes:
    return content[:16] + content[16:20][::-1] + content[20:24][::-1] + content[24:]


def of_version(number: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:20] + struct.pack("<I", number) + content[24:]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (on_32_bits, "32-bit"),
        (turned, "big-endian"),
        (lambda content: on_32_bits(content)[:12] + MARK[::-1] + content[16:], "32-bit"),
        (of_version(2), "format of another LMDB"),
        (of_version(999), "format of another LMDB"),
    ],
    ids=["32 bits", "big-endian", "big-endian of 32 bits", "LMDB 1.0", "a developer's"],
)
@pytest.mark.parametrize("layout", ["folder", "data.mdb", "single file"])
def test_files_of_other_machines_and_versions_are_refused_by_name(
    tmp_path: Path, make: Callable[[bytes], bytes], told: str, layout: str
) -> None:
    folder = commits(tmp_path / "db", 2)
    file = folder / "data.mdb"
    content = file.read_bytes()
    file.write_bytes(make(content[:PAGE]) + make(content[PAGE : 2 * PAGE]) + content[2 * PAGE :])
    if layout == "single file":
        file = file.rename(tmp_path / "single.mdb")
    path = folder if layout == "folder" else file
    for way in (open_source, raw.open_raw):
        with pytest.raises(NotADataset, match=told) as caught:
            len(way(str(path)))  # type: ignore[arg-type]
        assert str(path if layout == "single file" else folder) in str(caught.value)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "socket"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path: Path, kind: str) -> None:
    import socket

    (tmp_path / "db").mkdir()
    file = tmp_path / "db" / "data.mdb"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            here = os.getcwd()
            os.chdir(tmp_path / "db")  # the name of a socket is short
            listener.bind("data.mdb")
            os.chdir(here)
    for way in (open_source, raw.open_raw, lambda path: LmdbFile(path, "it")):
        with pytest.raises(NotADataset):
            len(way(str(tmp_path / "db")))  # type: ignore[arg-type]
