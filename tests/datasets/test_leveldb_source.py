import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import plyvel
import pytest

from datasets import leveldb_library, leveldb_log, leveldb_source, open_source
from datasets.crc32c import crc32c, masked
from datasets.errors import (
    DatasetChanged,
    DatasetCorrupt,
    DatasetTruncated,
    DatasetWarning,
    NotADataset,
    SourceClosed,
    SourceError,
)
from datasets.key_index import DenseKeys
from tests.datasets import golden


@pytest.fixture(autouse=True)
def views(tmp_path_factory, monkeypatch):
    """A temporary folder of our own, in which no test may leave anything."""
    folder = tmp_path_factory.mktemp("views")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def make(folder, items, **options):
    db = plyvel.DB(str(folder), create_if_missing=True, **options)
    for key, value in items:
        db.put(key, value)
    db.close()
    for name in ("LOCK", "LOG", "LOG.old"):
        (folder / name).unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    draw = random.Random(1)
    items = [(b"%08d" % i, draw.randbytes(2000)) for i in range(2000)]
    folder = make(tmp_path_factory.mktemp("made") / "db", items, write_buffer_size=1 << 19, compression=None)
    assert len(list(folder.glob("*.ldb"))) >= 2
    assert any(log.stat().st_size for log in folder.glob("*.log"))
    return folder


@pytest.fixture
def tables(tmp_path, made):
    """2000 records of 2 kB in several tables and a log."""
    shutil.copytree(made, tmp_path / "db")
    return tmp_path / "db"


@pytest.mark.parametrize("name", golden.LEVELDBS)
def test_reading_leaves_the_folder_alone(tmp_path, name):
    folder = golden.copy(name, tmp_path)
    before = golden.snapshot(tmp_path)
    with open_source(folder) as source:
        source.read_many([0, len(source) - 1])
        source.identity()
        assert golden.snapshot(tmp_path) == before
    assert golden.snapshot(tmp_path) == before


@pytest.mark.skipif(os.getuid() != 0, reason="changes its user")
@pytest.mark.parametrize("name", ["crops96_raw_40x48_leveldb", "mnist_test_leveldb"])
def test_a_folder_that_may_only_be_read_is_enough(name):
    with golden.public_folder() as place:
        folder = golden.copy(name, place)
        for file in folder.iterdir():
            file.chmod(0o444)
        folder.chmod(0o555)
        before = golden.snapshot(folder)
        own = place / "views"
        own.mkdir()
        own.chmod(0o777)

        def read():
            tempfile.tempdir = str(own)
            os.setgroups([])
            os.setgid(golden.UNPRIVILEGED)
            os.setuid(golden.UNPRIVILEGED)
            assert not os.access(folder, os.W_OK)
            with open_source(folder) as source:
                assert len(source.read_many(range(96))) == 96

        assert golden.in_child(read) == 0
        assert golden.snapshot(folder) == before
        assert list(own.iterdir()) == []


def test_dense_and_other_keys(tables, tmp_path):
    with open_source(tables) as source:
        assert source._index == DenseKeys(8, 0, 2000)
        assert source.read(1234).key == b"00001234"
    keys = sorted(b"%d/x" % i for i in range(100))
    folder = make(tmp_path / "other", [(key, b"<" + key) for key in keys])
    with open_source(folder) as source:
        assert [record.value for record in source.read_many(range(100))] == [b"<" + key for key in keys]


def test_large_sets_of_dense_numbers_are_not_scanned(tables, monkeypatch):
    monkeypatch.setattr(leveldb_source, "_SCAN_LIMIT", 100)
    monkeypatch.setattr(leveldb_source.key_index, "build", lambda *_: pytest.fail("scanned"))
    with open_source(tables) as source:
        assert len(source) == 2000


def test_a_gap_in_unscanned_numbers_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(leveldb_source, "_SCAN_LIMIT", 10)
    folder = make(tmp_path / "db", [(b"%04d" % i, b"x") for i in range(50) if i != 20])
    with open_source(folder) as source:
        source.read(19)
        with pytest.raises(DatasetCorrupt, match="'0020' of record 20 is missing"):
            source.read(20)


def test_an_empty_database_opens_with_no_records(tmp_path):
    with open_source(make(tmp_path / "db", [])) as source:
        assert len(source) == 0


def test_two_sources_in_one_process_and_a_closed_one(tables):
    with open_source(tables) as first, open_source(tables) as second:
        assert first.read(5) == second.read(5)
        first.close()
        first.close()
        assert second.read(6).key == b"00000006"
        with pytest.raises(SourceClosed):
            first.read(5)


def test_both_sides_of_a_fork_read(tables):
    with open_source(tables) as source:
        expected = source.read(7)

        def child():
            assert source.read(7) == expected
            source.close()

        assert golden.in_child(child) == 0
        assert source.read(8).key == b"00000008"


def test_a_database_held_open_elsewhere_reads_with_a_warning(tables):
    writer = "import sys, plyvel; db = plyvel.DB(sys.argv[1]); print('open', flush=True); input(); db.close()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", writer, tables], text=True, **pipes) as holder:
        assert holder.stdout.readline() == "open\n"
        with pytest.warns(DatasetWarning, match=f"held open by process {holder.pid}"), open_source(tables) as source:
            assert len(source) == 2000
        holder.communicate("\n")
        assert holder.returncode == 0


def test_a_stale_lock_file_is_no_error(tables):
    (tables / "LOCK").touch()
    with open_source(tables) as source:
        assert source.read(0).index == 0


def test_a_change_since_pickling_is_noticed(tables):
    with open_source(tables) as source:
        source.read(0)
        identity = source.identity()
        pickled = pickle.dumps(source)
    db = plyvel.DB(str(tables))
    db.put(b"zzz", b"new")
    db.close()
    with pytest.raises(DatasetChanged, match="written to"), pickle.loads(pickled) as copy:
        copy.read(0)
    with open_source(tables) as source:
        assert source.identity() != identity


# damage ---------------------------------------------------------------------------------------------------------------


def test_flipped_bytes_are_noticed_by_checksum(tables):
    table = sorted(tables.glob("*.ldb"))[0]
    content = bytearray(table.read_bytes())
    middle = len(content) // 3
    for place in range(middle, middle + 8):
        content[place] ^= 0xFF
    table.write_bytes(content)
    with pytest.raises(DatasetCorrupt, match="intact LevelDB") as caught, open_source(tables) as source:
        source.read_many(range(2000))
    assert str(tables) in str(caught.value)
    assert "stallscope-leveldb" not in str(caught.value)


def test_a_cut_table_is_named_with_its_sizes(tables):
    table = sorted(tables.glob("*.ldb"))[0]
    size = table.stat().st_size
    os.truncate(table, size // 2)
    with pytest.raises(DatasetTruncated) as caught:
        open_source(tables)
    for part in (table.name, f"{size} bytes", f"{size // 2} bytes"):
        assert part in str(caught.value)


def test_a_missing_table_is_named(tables):
    table = sorted(tables.glob("*.ldb"))[0]
    table.unlink()
    with pytest.raises(DatasetCorrupt, match=f"{table.name}, which its manifest names, is missing"):
        open_source(tables)


def test_a_missing_manifest_is_named(tables):
    next(tables.glob("MANIFEST-*")).unlink()
    with pytest.raises(DatasetCorrupt, match="CURRENT names MANIFEST"):
        open_source(tables)


@pytest.mark.parametrize("content", [b"", b"rubbish", b"../../etc/passwd\n"])
def test_a_damaged_current_is_named(tables, content):
    (tables / "CURRENT").write_bytes(content)
    with pytest.raises(DatasetCorrupt, match="CURRENT names no manifest"):
        open_source(tables)


def test_damaged_manifests_raise_nothing_but_source_errors(tables):
    manifest = next(tables.glob("MANIFEST-*"))
    whole = manifest.read_bytes()
    draw = random.Random(2)
    refused = []
    for _ in range(40):
        content = bytearray(whole)
        for _ in range(3):
            content[draw.randrange(len(content))] = draw.randrange(256)
        manifest.write_bytes(content[: draw.choice([len(content), draw.randrange(len(content))])])
        try:
            open_source(tables).close()
        except SourceError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert all(str(tables) in text for text in refused)


def manifest_of(edit):
    crc = masked(crc32c(np.frombuffer(b"\x01" + edit, np.uint8)))
    return crc.to_bytes(4, "little") + len(edit).to_bytes(2, "little") + b"\x01" + edit


@pytest.mark.parametrize(
    ("edit", "told"), [(b"\x01\x0aRocksThing", "RocksThing"), (b"\xc8\x01\x00", "RocksDB")], ids=["order", "field"]
)
def test_a_manifest_of_another_database_kind_is_refused(tmp_path, edit, told):
    folder = tmp_path / "db"
    folder.mkdir()
    (folder / "CURRENT").write_bytes(b"MANIFEST-000001\n")
    (folder / "MANIFEST-000001").write_bytes(manifest_of(edit))
    with pytest.raises(NotADataset, match=told):
        open_source(folder)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no log number and no next file number and no last sequence number"),
        (manifest_of(b"\x02\x00\x03\x05"), "no last sequence number"),
        (b"\0" + manifest_of(b"\x02\x00\x03\x05\x04\x07")[1:], "checksum mismatch at byte 0"),
    ],
    ids=["empty", "short", "checksum"],
)
def test_a_damaged_manifest_is_told_apart(tmp_path, content, told):
    folder = tmp_path / "db"
    folder.mkdir()
    (folder / "CURRENT").write_bytes(b"MANIFEST-000001\n")
    (folder / "MANIFEST-000001").write_bytes(content)
    with pytest.raises(DatasetCorrupt, match="MANIFEST-000001 is damaged") as caught:
        open_source(folder)
    assert told in str(caught.value)


def test_manifests_longer_than_a_block_are_understood(tmp_path):
    # Long keys make table descriptions that span the 32 kB blocks of the manifest.
    folder = tmp_path / "db"
    db = plyvel.DB(str(folder), create_if_missing=True, write_buffer_size=1 << 16)
    for i in range(40):
        db.put(b"%08d" % i + b"k" * 30_000, os.urandom(40_000))
    db.close()
    manifest = (folder / "CURRENT").read_text().strip()
    assert (folder / manifest).stat().st_size > 3 * 32768
    live = leveldb_log.live_files((folder / manifest).read_bytes(), manifest, "x")
    on_disk = {table.name: table.stat().st_size for table in folder.glob("*.ldb")}  # and perhaps one not yet entered
    assert len(live.tables) > 20
    assert {f"{number:06d}.ldb": table.nbytes for number, table in live.tables.items()}.items() <= on_disk.items()
    with open_source(folder) as source:
        assert len(source) == 40


def test_reading_needs_no_plyvel(monkeypatch):
    monkeypatch.setitem(sys.modules, "plyvel", None)
    with open_source(golden.DB / "mnist_test_leveldb") as source:
        assert len(source.read_many(range(1000))) == 1000


@pytest.mark.parametrize(("limit", "most"), [(64, 16), (1024, 896), (1_000_000, 1000), (resource.RLIM_INFINITY, 1000)])
def test_open_tables_leave_room_under_the_limit_of_open_files(monkeypatch, limit, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert leveldb_library.open_files_limit() == most
