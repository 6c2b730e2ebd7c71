import os
import pickle
import subprocess
import sys

import lmdb
import pytest

from datasets import open_source
from datasets.errors import (
    CurrentMissing,
    EmptyFolder,
    EmptyPath,
    ManifestMismatch,
    NotADataset,
    SourceMissing,
    WrongBackend,
)
from datasets.manifest import Tally, write_manifest
from datasets.source import Record, manifest_path
from profiler.errors import UsageError
from tests.datasets import golden


def test_importing_the_package_loads_no_database_library():
    code = (
        "import sys, datasets; bad = {'ray','cupy','lmdb','plyvel','numpy','google.protobuf'} & set(sys.modules); "
        "assert not bad, bad; assert 'open_source' in dir(datasets); datasets.open_source; "
        "assert not {'lmdb','plyvel'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import datasets

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = datasets.no_such_name


@pytest.mark.parametrize("name", golden.ALL)
def test_every_golden_record_is_read_as_caffe_wrote_it(name):
    with open_source(golden.DB / name) as source:
        assert source.backend == name.removesuffix("_reopened").rsplit("_", 1)[1]
        assert len(source) == golden.described(name)["n"]
        listed = golden.records(name)
        for record, (index, expected) in zip(source.read_many(listed), listed.items(), strict=True):
            assert record.index == index
            assert record.key.decode() == expected["key"] == source.key(index).decode()
            assert golden.md5(record.value) == expected["md5_value"]
        keys = [source.key(index) for index in range(len(source))]
        assert keys == sorted(keys)


@pytest.mark.parametrize("name", golden.ALL)
def test_any_order_of_reading_gives_the_same_records(name):
    with open_source(golden.DB / name) as source:
        total = min(len(source), 60)
        forward = [source.read(index) for index in range(total)]
        order = [(index * 37) % total for index in range(total)] + [5, 5, 0, total - 1]
        assert source.read_many(order) == [forward[index] for index in order]
        assert [source.read(index) for index in reversed(range(total))] == forward[::-1]


@pytest.mark.parametrize("name", ["crops96_raw_40x48_lmdb", "crops96_raw_40x48_leveldb"])
def test_pickling_drops_handles_and_the_copy_reads_the_same(name):
    with open_source(golden.DB / name) as source:
        pickled = pickle.dumps(source)
        expected = source.read_many([95, 0, 50])
        identity = source.identity()
    copy = pickle.loads(pickled)
    assert len(copy) == 96
    assert copy.read_many([95, 0, 50]) == expected
    assert copy.identity() == identity
    copy.close()
    copy.close()


@pytest.mark.parametrize("name", ["crops96_raw_40x48_lmdb", "crops96_raw_40x48_leveldb"])
def test_a_spawned_process_in_another_folder_can_read_the_pickled_copy(name, tmp_path, monkeypatch):
    monkeypatch.chdir(golden.DB)
    with open_source(name) as source:
        (tmp_path / "source.pickle").write_bytes(pickle.dumps(source))
        expected = golden.md5(source.read(42).value)
    code = (
        "import pickle, hashlib; s = pickle.load(open('source.pickle', 'rb')); "
        "print(hashlib.md5(s.read(42).value).hexdigest())"
    )
    environment = os.environ | {"PYTHONPATH": str(golden.DB.parents[2])}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert run.stdout.strip() == expected


@pytest.mark.parametrize("name", ["mnist_test_lmdb", "crops96_raw_40x48_lmdb", "mnist_test_leveldb"])
@pytest.mark.parametrize("index", [-1, 10**6])
def test_an_index_out_of_range_is_refused(name, index):
    with open_source(golden.DB / name) as source, pytest.raises(IndexError, match=r"records 0\.\."):
        source.read(index)


def test_records_and_descriptions_name_data_set_key_and_position():
    with open_source(golden.DB / "mnist_test_lmdb") as source:
        text = f"record 17 (key '00000017') of LMDB {golden.DB}/mnist_test_lmdb"
        assert source.describe(17) == text
        assert str(source.read(17)) == text
        assert source.describe(10**9).startswith("record 1000000000 of LMDB")
    assert str(Record(0, b"\xff\x00", b"", "X")) == "record 0 (key '\\\\xff\\x00') of X"


# what lies at a path --------------------------------------------------------------------------------------------------


def test_an_empty_path_is_named():
    with pytest.raises(EmptyPath, match="is empty"):
        open_source("")


def test_a_missing_path_says_how_far_the_path_exists(tmp_path, monkeypatch):
    with pytest.raises(SourceMissing) as caught:
        open_source(tmp_path / "a" / "b")
    assert f"exists up to {tmp_path}" in str(caught.value)
    assert not (tmp_path / "a").exists()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceMissing, match="relative to"):
        open_source("a/b")


def test_a_broken_link_is_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(SourceMissing, match="symbolic link"):
        open_source(tmp_path / "link")


def test_an_empty_folder_is_named_and_stays_empty(tmp_path):
    for backend in (None, "lmdb", "leveldb"):
        with pytest.raises(EmptyFolder, match="is empty"):
            open_source(tmp_path, backend=backend)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_says_what_it_holds_and_where_databases_lie(tmp_path):
    (tmp_path / "cat.jpg").write_bytes(b"\xff\xd8")
    with pytest.raises(NotADataset) as caught:
        open_source(tmp_path)
    assert "cat.jpg" in str(caught.value)
    golden.copy("lenet_ip2_float_lmdb", tmp_path)
    with pytest.raises(NotADataset, match="lenet_ip2_float_lmdb") as caught:
        open_source(tmp_path)
    assert "name a folder inside" in caught.value.hint


def test_a_lone_lock_file_is_explained(tmp_path):
    (tmp_path / "lock.mdb").write_bytes(b"")
    with pytest.raises(NotADataset, match=r"data\.mdb did not come along"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("content", "found"),
    [(b"", "an empty file"), (b"SQLite format 3\0" + bytes(50), "SQLite"), (b"hello", "68 65")],
)
def test_a_file_of_something_else_says_what_it_is(tmp_path, content, found):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(NotADataset, match=found):
        open_source(tmp_path / "x")


def test_three_layouts_of_an_lmdb_are_accepted(tmp_path):
    folder = golden.copy("lenet_ip2_float_lmdb", tmp_path)
    single = tmp_path / "single.mdb"
    single.write_bytes((folder / "data.mdb").read_bytes())
    with open_source(folder) as a, open_source(f"{folder}/") as b, open_source(folder / "data.mdb") as c:
        assert a.path == b.path == c.path == str(folder)
        expected = a.read(7)
        assert b.read(7) == c.read(7) == expected
    with open_source(single) as source:
        assert source.path == str(single)
        assert source.read(7).value == expected.value
    assert sorted(place.name for place in tmp_path.iterdir()) == ["lenet_ip2_float_lmdb", "single.mdb"]


@pytest.mark.parametrize(
    ("name", "wrong", "text"),
    [
        ("lenet_ip2_float_lmdb", "LEVELDB", "the folder holds LMDB, the configuration says LEVELDB"),
        ("crops24_gray_jpg_72_leveldb", "lmdb", "the folder holds LEVELDB, the configuration says LMDB"),
    ],
)
def test_a_wrong_backend_is_refused_and_leaves_nothing_behind(tmp_path, name, wrong, text):
    folder = golden.copy(name, tmp_path)
    before = golden.snapshot(tmp_path)
    with pytest.raises(WrongBackend, match=text):
        open_source(folder, backend=wrong)
    assert golden.snapshot(tmp_path) == before


def test_the_right_backend_in_any_letters_is_accepted():
    with open_source(golden.DB / "lenet_ip2_float_lmdb", backend="LMDB") as source:
        assert source.backend == "lmdb"


def test_an_unknown_backend_and_a_database_name_for_leveldb_are_refused():
    with pytest.raises(UsageError, match="lmdb, leveldb"):
        open_source(golden.DB / "mnist_test_lmdb", backend="rocksdb")
    with pytest.raises(UsageError, match="no named databases"):
        open_source(golden.DB / "mnist_test_leveldb", db="x")


def test_a_folder_with_both_kinds_needs_the_backend(tmp_path):
    folder = golden.copy("crops24_gray_jpg_72_leveldb", tmp_path)
    (folder / "data.mdb").write_bytes((golden.DB / "lenet_ip2_float_lmdb" / "data.mdb").read_bytes())
    with pytest.raises(NotADataset, match="both"):
        open_source(folder)
    with open_source(folder, backend="lmdb") as a, open_source(folder, backend="leveldb") as b:
        assert (len(a), len(b)) == (100, 24)


def test_tables_without_current_are_refused_and_kept(tmp_path):
    folder = golden.copy("crops96_raw_40x48_leveldb", tmp_path)
    (folder / "CURRENT").unlink()
    before = golden.snapshot(folder)
    with pytest.raises(CurrentMissing, match="do not open it with create_if_missing"):
        open_source(folder)
    assert golden.snapshot(folder) == before


# the manifest beside a data set ---------------------------------------------------------------------------------------


def _make(folder, keys):
    tally = Tally()
    with lmdb.open(str(folder), map_size=1 << 20) as env, env.begin(write=True) as txn:
        for key in keys:
            txn.put(key, b"value")
            tally.add(key, b"value", (1, 1, 1), 0, False)
    write_manifest(folder, tally.manifest(backend="lmdb"), tally.crcs)


def test_a_manifest_that_agrees_is_fine(tmp_path):
    _make(tmp_path / "db", [b"a", b"b", b"c"])
    assert manifest_path(tmp_path / "db").exists()
    assert manifest_path(tmp_path / "db" / "data.mdb") == manifest_path(tmp_path / "db")
    with open_source(tmp_path / "db") as source:
        assert len(source) == 3


def test_missing_records_are_noticed_by_the_manifest(tmp_path):
    _make(tmp_path / "db", [b"a", b"b", b"c"])
    with lmdb.open(str(tmp_path / "db")) as env, env.begin(write=True) as txn:
        txn.delete(b"b")
    with pytest.raises(ManifestMismatch) as caught:
        open_source(tmp_path / "db")
    assert "3 records" in str(caught.value)
    assert "2 records" in str(caught.value)
    with lmdb.open(str(tmp_path / "db")):
        pass  # and the refused source has given its environment back


def test_another_last_key_is_noticed_by_the_manifest(tmp_path):
    _make(tmp_path / "db", [b"a", b"b", b"c"])
    with lmdb.open(str(tmp_path / "db")) as env, env.begin(write=True) as txn:
        txn.delete(b"c")
        txn.put(b"d", b"value")
    with pytest.raises(ManifestMismatch, match="last key d"):
        open_source(tmp_path / "db")
