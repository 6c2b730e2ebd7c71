"""What must hold for the file of an LMDB, whatever was written over its pages, as one function.

An input is a list of changes of 7 bytes: which file, page, kind of place, place inside it (u16), new byte, how often.
"""

from __future__ import annotations

import functools
import os
import tempfile
import warnings
from pathlib import Path

import lmdb

from datasets import lmdb_locate, lmdb_source, lmdb_walk, raw
from datasets.errors import SourceError
from datasets.raw import Stored
from datasets.source import open_source

PAGE = 4096
CHANGE = 7
_MOST = 24  # changes


@functools.cache
def files() -> list[tuple[str | None, bytes]]:
    """Small databases of each shape: name of the database inside, content of the file."""
    made: list[tuple[str | None, bytes]] = []
    shapes = [
        (None, [b"%08d" % place for place in range(600)], [20]),  # padded numbers: no index
        (None, [b"%d" % place for place in range(600)], [20, 0, 60]),
        (None, [b"%d" % place + b"k" * 480 for place in range(60)], [5]),  # seven to a leaf, and two branches deep
        (None, [b"a/%d.jpg" % place for place in range(40)], [0, 2500, 4080, 4081, 9000]),  # pages of their own
        ("inner", [b"%08d" % place for place in range(90)], [700]),
    ]
    for db, keys, sizes in shapes:
        with tempfile.TemporaryDirectory() as place:
            with lmdb.open(place, map_size=16 << 20, max_dbs=1, lock=False) as env:
                handle = env.open_db(db.encode() if db else None)
                with env.begin(write=True, db=handle) as txn:
                    for number, key in enumerate(keys):
                        txn.put(key, bytes([number % 251]) * sizes[number % len(sizes)])
            made.append((db, (Path(place) / "data.mdb").read_bytes()))
    return made


def changed(data: bytes) -> tuple[str | None, bytes]:
    """The file that an input describes."""
    db, content = files()[data[0] % len(files()) if data else 0]
    made = bytearray(content)
    for at in range(0, min(len(data), _MOST * CHANGE) - CHANGE + 1, CHANGE):
        page, kind, low, high, new, count = data[at + 1 : at + CHANGE]
        base, inside = page % (len(made) // PAGE) * PAGE, low | high << 8
        nodes = max((min(int.from_bytes(made[base + 12 : base + 14], "little"), PAGE) - 16) // 2, 1)
        node = int.from_bytes(made[base + 16 + 2 * (inside % nodes) :][:2], "little")
        place = (
            base + [inside % 24, 16 + inside % 136, 16 + 2 * (inside % nodes), node + high % 8, inside % PAGE][kind % 5]
        )
        size = min(1 + count % 8, len(made) - place)
        made[place : place + size] = bytes([new]) * max(size, 0)
    return db, bytes(made[: int.from_bytes(data[-2:], "little") * 16] if len(data) % CHANGE == 2 else made)


@functools.cache
def compiled() -> object:
    """The look-up, loaded: then it reads whatever it can."""
    return lmdb_walk.find.dispatcher


def one_input(data: bytes) -> None:
    """Read the file in every way. A SourceError is a right answer; whatever else escapes is none."""
    db, content = changed(data)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        (Path(folder) / "data.mdb").write_bytes(content)
        before = lmdb_source._SCAN_LIMIT, lmdb_locate.PLAIN
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                # With the keys gone through when it is opened, and with records looked up, compiled and not.
                for lmdb_source._SCAN_LIMIT, lmdb_locate.PLAIN in ((1 << 18, 0), (0, 0), (0, 1 << 20)):
                    lmdb_walk.find._natives = []
                    lmdb_walk.find._dispatcher = None if lmdb_locate.PLAIN else compiled()
                    as_source(folder, db, len(content))
                stored = as_pages(folder, db)
            finally:
                lmdb_source._SCAN_LIMIT, lmdb_locate.PLAIN = before
                lmdb_walk.find._dispatcher = compiled()
        assert stored <= len(content) // 10


def as_source(folder: str, db: str | None, size: int) -> None:
    """Each record alone and all together: what comes out is inside the file."""
    try:
        source = open_source(folder, db=db)
        records = len(source)
    except SourceError as error:
        check_error(error, folder)
        return
    with source:
        # A look-up believes the count of the tree; what is asked for beyond what is there is an error of its own.
        for asked in (list(range(min(records, 700))), [min(records, 1 << 40) - 1] * (records > 0)):
            try:
                for record in source.read_many(asked[::-1]):
                    assert len(record.value) <= size
                    assert len(record.key) <= size
                for index in asked[:3]:
                    source.key(index)
            except SourceError as error:
                check_error(error, folder)


def as_pages(folder: str, db: str | None) -> int:
    """Through ``raw``, as verify and salvage read: it goes on behind damage, and ends."""
    try:
        items = list(raw.open_raw(folder, db=db).scan())
    except SourceError as error:
        check_error(error, folder)
        return 0
    return sum(isinstance(item, Stored) for item in items)


def check_error(error: SourceError, folder: str) -> None:
    """An error names the data set, and is short whatever its pages hold."""
    assert folder in str(error)
    assert len(str(error)) < 4000
