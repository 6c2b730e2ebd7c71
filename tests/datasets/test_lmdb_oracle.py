"""The plain reading of an LMDB against its library: whatever the library wrote, both read alike, record by record."""

from __future__ import annotations

import lzma
import shutil
import tempfile
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datasets import lmdb_locate, lmdb_source, lmdb_walk, raw
from datasets.errors import NotADataset
from datasets.lmdb_file import LmdbFile
from datasets.source import open_source
from tests.datasets.damage import relocate, write_lmdb

PAGE = 4096
SIZED = Path(__file__).parents[1] / "data" / "lmdb_page_sizes"
LARGEST_INSIDE = (PAGE - 16) // 2 // 2 * 2 - 2  # bytes of a node, header and key in it, that stays on a leaf
KEYS = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.integers(0, 10**8 - 1).map(lambda number: b"%08d" % number),
    st.integers(0, 400).map(lambda number: b"%d" % number),
    st.tuples(st.integers(0, 3), st.sampled_from([200, 510, 511])).map(lambda of: bytes([65 + of[0]]) * of[1]),
)
SIZES = st.one_of(
    st.integers(0, 40),
    st.integers(0, 3 * PAGE),
    st.tuples(st.integers(1, 5), st.integers(-18, 2)).map(lambda of: of[0] * PAGE + of[1]),  # where pages end
    st.integers(LARGEST_INSIDE - 30, LARGEST_INSIDE + 4),  # the last that stays on its leaf, the first that does not
)
CHANGES = st.lists(st.tuples(KEYS, st.none() | SIZES), min_size=0, max_size=60)  # None deletes


def value_of(key: bytes, size: int, turn: int) -> bytes:
    return (
        np.random.Philox(key=[int.from_bytes(key[:8], "big"), size * 64 + turn])
        .random_raw(size // 8 + 1)
        .tobytes()[:size]
    )


def library(folder: Path, db: bytes | None) -> list[tuple[bytes, bytes]]:
    """All records, as the library reads them."""
    size = (folder / "data.mdb").stat().st_size + (64 << 20)
    with (
        lmdb.open(str(folder), readonly=True, lock=False, max_dbs=8, map_size=size) as env,
        env.begin(db=env.open_db(db, create=False) if db else None) as txn,
    ):
        return list(txn.cursor())


def check(folder: Path, db: bytes | None = None) -> int:
    """Compare every way of reading with the library; the number of records."""
    told = library(folder, db)
    name = db.decode() if db else None
    for order in (list(range(len(told))), list(range(len(told)))[::-1], [0, len(told) - 1] * bool(told)):
        with open_source(folder, db=name) as source:
            assert len(source) == len(told)
            assert [(record.key, record.value) for record in source.read_many(order)] == [told[at] for at in order]
            assert [source.key(at) for at in order[:20]] == [told[at][0] for at in order[:20]]
    stored = list(raw.open_raw(str(folder), db=name).scan())
    assert [(item.key, item.value, item.doubt) for item in stored] == [(*record, "") for record in told]
    return len(told)


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Once it is loaded, the compiled code reads whatever it can."""
    with open_source(write_lmdb(tmp_path_factory.mktemp("first") / "db", {b"0": b"v"})) as source:
        source.locate(np.zeros(1, np.int64))


@pytest.fixture(params=["gone through", "looked up", "forgotten", "not compiled"])
def scanned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where places are not taken over from the scan, each record is found by its key; forgotten, each time."""
    monkeypatch.setattr(lmdb_source, "_SCAN_LIMIT", 1 << 18 if request.param == "gone through" else 0)
    if request.param == "forgotten":
        monkeypatch.setattr(lmdb_locate, "MOST_CELLS", 0)
    if request.param == "not compiled":
        monkeypatch.setattr(lmdb_locate, "PLAIN", 1 << 20)
        monkeypatch.setattr(lmdb_walk.find, "_dispatcher", None)
        monkeypatch.setattr(lmdb_walk.find, "_natives", [])


@pytest.mark.usefixtures("scanned")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(CHANGES, min_size=1, max_size=5),
    writemap=st.booleans(),
    db=st.sampled_from([None, b"inner"]),
    compact=st.booleans(),
)
def test_what_the_library_wrote_is_read_as_it_reads_it(
    turns: list[list[tuple[bytes, int | None]]], writemap: bool, db: bytes | None, compact: bool
) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "db"
        options = {"map_size": 64 << 20, "max_dbs": 8, "lock": False, "writemap": writemap}
        with lmdb.open(str(folder), **options) as env:
            handle = env.open_db(db)
            if db:
                with env.begin(write=True) as txn:
                    txn.put(b"about", b"a record beside the named database")
            for turn, changes in enumerate(turns):  # each a commit: pages are freed, and used again
                with env.begin(write=True, db=handle) as txn:
                    for key, size in changes:
                        if db is None and key == b"inner":
                            continue
                        txn.delete(key) if size is None else txn.put(key, value_of(key, size, turn))
            if compact:
                (Path(place) / "copy").mkdir()
                env.copy(str(Path(place) / "copy"), compact=True)
        check(folder, db)
        if compact:
            check(Path(place) / "copy", db)


def test_many_records_come_and_go(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    folder = tmp_path / "db"
    with lmdb.open(str(folder), map_size=256 << 20, lock=False) as env:
        for turn in range(12):
            with env.begin(write=True) as txn:
                for number in draw.integers(0, 3000, 1500).tolist():
                    key = b"%d" % (number * 7919)
                    if number % 3 == turn % 3:
                        txn.delete(key)
                    else:
                        txn.put(key, value_of(key, int(draw.choice([0, 9, 2000, 4080, 4081, 9000])), turn))
    assert check(folder) > 500


@pytest.mark.parametrize("far", [1 << 31, 1 << 32, 1 << 40], ids=["2 GiB", "4 GiB", "1 TiB"])
@pytest.mark.usefixtures("scanned")
def test_pages_far_out_in_a_file_are_found(tmp_path: Path, far: int) -> None:
    folder = tmp_path / "db"
    with lmdb.open(str(folder), map_size=64 << 20, lock=False) as env, env.begin(write=True) as txn:
        for number in range(400):
            txn.put(b"key %d" % number, value_of(b"%d" % number, number * 37 % 9000, 0))
    relocate(folder / "data.mdb", far // PAGE)
    assert check(folder) == 400
    status = Path("/proc/self/statm")
    before = int(status.read_text().split()[1])
    with open_source(folder) as source:
        source.read_many(range(400))
        taken = (int(status.read_text().split()[1]) - before) * PAGE
    assert taken < 32 << 20, "memory for what is there, and not for the size of the file"
    shutil.rmtree(folder)


@pytest.mark.parametrize("size", [8192, 16384, 32768])
@pytest.mark.usefixtures("scanned")
def test_pages_of_other_sizes(tmp_path: Path, size: int) -> None:
    """Of machines whose memory has larger pages: written by the library where ``sysconf`` told it such a size."""
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "data.mdb").write_bytes(lzma.decompress((SIZED / f"{size}.mdb.xz").read_bytes()))
    with LmdbFile(str(tmp_path / "db"), "it") as file:
        assert file.meta().page_size == size
    assert check(tmp_path / "db") == 798


@pytest.mark.parametrize("flag", [2, 4, 8, 20], ids=["reversekey", "dupsort", "integerkey", "dupfixed"])
@pytest.mark.parametrize("db", [None, b"inner"])
def test_databases_of_another_order_are_refused_by_name(tmp_path: Path, flag: int, db: bytes | None) -> None:
    """py-lmdb makes some of these only as named databases, and others not at all: the flags are written by hand."""
    folder = write_lmdb(tmp_path / "db", {b"%08d" % number: b"v" for number in range(3)}, db)
    content = bytearray((folder / "data.mdb").read_bytes())
    if db is None:
        content[92] = content[PAGE + 92] = flag
    else:
        at = content.index(b"inner")
        while at >= 0:
            content[at + len(b"inner") + 4] = flag
            at = content.find(b"inner", at + 1)
    (folder / "data.mdb").write_bytes(content)
    word = {2: "MDB_REVERSEKEY", 8: "MDB_INTEGERKEY"}.get(flag, "several values per key")
    for way in (open_source, raw.open_raw):
        with pytest.raises(NotADataset, match=word):
            len(way(str(folder), db=db.decode() if db else None))  # type: ignore[arg-type]
