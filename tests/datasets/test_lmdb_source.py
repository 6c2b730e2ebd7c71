import os
import pickle
import shutil
import warnings

import lmdb
import pytest

from datasets import lmdb_source, open_source
from datasets.errors import (
    DatasetChanged,
    DatasetCorrupt,
    DatasetTruncated,
    NotADataset,
    SourceClosed,
    SourceError,
)
from datasets.key_index import DenseKeys, KeyList
from tests.datasets import golden


def make(folder, items, **options):
    with lmdb.open(str(folder), map_size=64 << 20, **options) as env, env.begin(write=True) as txn:
        for key, value in items:
            txn.put(key, value)
    lock = folder / "lock.mdb"
    if lock.exists():
        lock.unlink()
    return folder


@pytest.fixture
def plain(tmp_path):
    return make(tmp_path / "db", [(b"%08d" % i, b"v%d" % i * 400) for i in range(500)])


def test_reading_leaves_the_folder_alone(tmp_path):
    folder = golden.copy("mnist_test_lmdb", tmp_path)
    before = golden.snapshot(tmp_path)
    with open_source(folder) as source:
        for index in (0, 999, 500):
            source.read(index)
        source.identity()
        assert golden.snapshot(tmp_path) == before
    assert golden.snapshot(tmp_path) == before


@pytest.mark.skipif(os.getuid() != 0, reason="changes its user")
def test_a_folder_that_may_only_be_read_is_enough():
    with golden.public_folder() as place:
        folder = golden.copy("lenet_ip2_float_lmdb", place)
        (folder / "data.mdb").chmod(0o444)
        folder.chmod(0o555)
        before = golden.snapshot(folder)

        def read():
            os.setgroups([])
            os.setgid(golden.UNPRIVILEGED)
            os.setuid(golden.UNPRIVILEGED)
            assert not os.access(folder, os.W_OK)
            with open_source(folder) as source:
                assert len(source.read_many(range(100))) == 100

        assert golden.in_child(read) == 0
        assert golden.snapshot(folder) == before


@pytest.mark.skipif(os.getuid() != 0, reason="changes its user")
def test_a_folder_that_may_not_be_read_is_named():
    with golden.public_folder() as place:
        folder = golden.copy("lenet_ip2_float_lmdb", place)
        (folder / "data.mdb").chmod(0o000)

        def read():
            os.setuid(golden.UNPRIVILEGED)
            with pytest.raises(SourceError, match="cannot be read: Permission denied"):
                open_source(folder)

        assert golden.in_child(read) == 0


# keys -----------------------------------------------------------------------------------------------------------------


def test_dense_numbers_need_no_index(plain):
    with open_source(plain) as source:
        source.read(3)
        assert source._index == DenseKeys(8, 0, 500)
        assert source.read(499).value == b"v499" * 400


@pytest.mark.parametrize(
    "keys",
    [
        [b"%d" % i for i in range(300)],
        [b"%08d_%d/x.jpg" % (i, i % 7) for i in range(300)],
        [b"%08d" % (2 * i) for i in range(300)],
        [b"%08d" % i for i in range(300) if i != 5] + [b"00000005x"],
        [b"%08d" % i for i in range(1, 300)] + [b"\xff\x00"],
        [bytes([i]) for i in range(256)],
    ],
)
def test_other_keys_are_found_by_place_in_byte_order(tmp_path, keys):
    folder = make(tmp_path / "db", [(key, b"<" + key + b">") for key in keys])
    ordered = sorted(keys)
    with open_source(folder) as source:
        assert len(source) == len(keys)
        assert isinstance(source._index, KeyList)
        for index in [*range(len(keys)), *range(0, len(keys), 13), len(keys) - 1, 0]:
            record = source.read(index)
            assert (record.key, record.value) == (ordered[index], b"<" + ordered[index] + b">")
            assert source.key(index) == ordered[index]
        assert len(source._index.ends) <= len(keys) // 8 + 1


def test_large_sets_of_dense_numbers_are_not_scanned(plain, monkeypatch):
    monkeypatch.setattr(lmdb_source, "_SCAN_LIMIT", 100)
    monkeypatch.setattr(lmdb_source.key_index, "build", lambda *_: pytest.fail("scanned"))
    with open_source(plain) as source:
        assert source.read(77).key == b"00000077"


def test_a_gap_in_unscanned_numbers_is_an_error_not_another_record(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_source, "_SCAN_LIMIT", 100)
    keys = [b"%08d" % i for i in range(500) if i != 7] + [b"00000007x"]
    folder = make(tmp_path / "db", [(key, key) for key in keys])
    with open_source(folder) as source:
        assert source.read(8).key == b"00000008"
        with pytest.raises(DatasetCorrupt, match="'00000007' is missing"):
            source.read(7)


def test_an_empty_database_opens_with_no_records(tmp_path):
    folder = make(tmp_path / "db", [])
    with open_source(folder) as source:
        assert len(source) == 0
        with pytest.raises(IndexError):
            source.read(0)


def test_named_databases(tmp_path):
    folder = tmp_path / "db"
    with lmdb.open(str(folder), map_size=1 << 20, max_dbs=4) as env:
        for name in (b"left", b"right"):
            db = env.open_db(name)
            with env.begin(write=True, db=db) as txn:
                for i in range(3):
                    txn.put(b"%08d" % i, name + b"%d" % i)
    with open_source(folder, db="left") as left, open_source(folder, db="right") as right:
        assert [record.value for record in left.read_many([0, 2])] == [b"left0", b"left2"]
        assert right.read(1).value == b"right1"
        assert "database 'right'" in right.describe(1)
        with pickle.loads(pickle.dumps(left)) as copy:
            assert copy.read(1).value == b"left1"
    with pytest.raises(NotADataset, match="'left', 'right'"):
        open_source(folder, db="middle")


def test_several_values_per_key_are_refused(tmp_path):
    with lmdb.open(str(tmp_path / "db"), map_size=1 << 20, max_dbs=2) as env:
        db = env.open_db(b"many", dupsort=True)
        with env.begin(write=True, db=db) as txn:
            txn.put(b"a", b"1")
            txn.put(b"a", b"2")
    with pytest.raises(NotADataset, match="several values per key"):
        open_source(tmp_path / "db", db="many")


# one environment, several users, several processes ------------------------------------------------------------------


def test_sources_of_one_path_do_not_depend_on_each_other(plain, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(plain)
    first, second = open_source(plain), open_source(link)
    first.close()
    assert second.read(4).key == b"00000004"
    second.close()


def test_a_source_forgotten_closes_its_file(plain):
    before = set(os.listdir("/proc/self/fd"))
    open_source(plain)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_closed_source_says_so(plain):
    source = open_source(plain)
    source.read(0)
    source.close()
    source.close()
    with pytest.raises(SourceClosed, match="was closed"):
        source.read(0)


def test_records_outlive_the_source(plain):
    with open_source(plain) as source:
        records = source.read_many(range(500))
    assert [record.value for record in records] == [b"v%d" % i * 400 for i in range(500)]
    assert all(type(record.value) is bytes and type(record.key) is bytes for record in records)


def test_a_path_that_this_process_has_open_through_the_library_is_read_beside_it(plain):
    with lmdb.open(str(plain), readonly=True, lock=False) as env, env.begin() as txn:
        with open_source(plain) as source:
            assert source.read(7).value == b"v7" * 400
        assert txn.get(b"00000008") == b"v8" * 400


def test_both_sides_of_a_fork_read(plain):
    with open_source(plain) as source, open_source(plain) as other:
        source.read(1)

        def child():
            assert source.read(2).value == b"v2" * 400
            assert other.read_many([3])[0].value == b"v3" * 400
            source.close()
            with open_source(plain) as own:
                assert own.read(499).value == b"v499" * 400

        assert [golden.in_child(child) for _ in range(3)] == [0, 0, 0]
        assert source.read(4).value == b"v4" * 400
        assert other.read(5).value == b"v5" * 400


# damage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.95, 0.5, 0.1])
@pytest.mark.parametrize("whole_pages", [True, False])
def test_a_cut_file_is_an_error_and_kills_nobody(plain, keep, whole_pages):
    file = plain / "data.mdb"
    whole = file.stat().st_size
    size = int(whole * keep) // 4096 * 4096 + (0 if whole_pages else 100)
    os.truncate(file, size)

    def child():
        with pytest.raises(DatasetTruncated) as caught:
            open_source(plain)
        text = str(caught.value)
        assert f"{whole} bytes" in text
        assert f"{size} bytes" in text
        assert str(plain) in text

    assert golden.in_child(child) == 0


@pytest.mark.parametrize("size", [0, 10, 4096, 5000])
def test_a_file_cut_to_its_first_pages_is_an_error(plain, size):
    os.truncate(plain / "data.mdb", size)

    def child():
        with pytest.raises(DatasetTruncated, match=f"{size} bytes"):
            open_source(plain)

    assert golden.in_child(child) == 0


def test_a_short_file_whose_missing_pages_nobody_needs_is_fine(plain):
    # A large record is deleted, and later transactions move what lies behind it into the space it leaves.
    with lmdb.open(str(plain), map_size=64 << 20) as env:
        with env.begin(write=True) as txn:
            txn.put(b"zz", b"x" * 4_000_000)
        with env.begin(write=True) as txn:
            txn.delete(b"zz")
        for value in range(20):
            with env.begin(write=True) as txn:
                txn.put(b"zz", b"%d" % value)
    os.truncate(plain / "data.mdb", (plain / "data.mdb").stat().st_size - 500 * 4096)

    def child():
        with open_source(plain) as source:
            assert len(source.read_many(range(501))) == 501

    assert golden.in_child(child) == 0


def test_a_file_that_shrinks_while_it_is_read_is_noticed(plain):
    def child():
        with open_source(plain) as source:
            source.read(0)
            os.truncate(plain / "data.mdb", 40960)
            with pytest.raises(DatasetTruncated, match="became shorter"):
                source.read_many([499])

    assert golden.in_child(child) == 0


def test_a_file_replaced_while_it_is_read_keeps_its_content(plain, tmp_path):
    with open_source(plain) as source:
        source.read(0)
        shutil.rmtree(plain)
        assert source.read(499).value == b"v499" * 400


def test_a_writer_is_noticed(plain):
    with open_source(plain) as source:
        source.read(0)

        def write():
            with lmdb.open(str(plain), map_size=64 << 20) as env, env.begin(write=True) as txn:
                txn.put(b"00000001", b"other")

        assert golden.in_child(write) == 0
        with pytest.raises(DatasetChanged, match="written to"):
            source.read(1)
        pickled = pickle.dumps(source)
    with pytest.raises(DatasetChanged), pickle.loads(pickled) as copy:
        copy.read(1)


def test_a_damaged_page_is_an_error_with_the_record(plain):
    pages = (plain / "data.mdb").stat().st_size // 4096
    with open(plain / "data.mdb", "r+b") as file:
        for page in range(2, pages):
            file.seek(page * 4096 + 10)  # the flags of the page, which tell its type
            file.write(b"\x00\x00")

    def child():
        with pytest.raises(DatasetCorrupt, match="intact LMDB"), open_source(plain) as source:
            source.read_many(range(500))

    assert golden.in_child(child) == 0


def test_a_file_named_data_mdb_that_is_none(tmp_path):
    (tmp_path / "data.mdb").write_bytes(b"not a database" * 1000)
    with pytest.raises(NotADataset, match="the LMDB mark"):
        open_source(tmp_path)


def test_identity_changes_with_the_content(plain):
    with open_source(plain) as source:
        before = source.identity()
    assert before["records"] == 500
    with lmdb.open(str(plain), map_size=64 << 20) as env, env.begin(write=True) as txn:
        txn.put(b"00000001", b"other")
    with open_source(plain) as source:
        assert source.identity() != before


def test_many_processes_opening_and_closing_at_once(plain):
    def child():
        for _ in range(5):
            with open_source(plain) as source:
                source.read(250)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pids = []
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                try:
                    child()
                except BaseException:
                    os._exit(1)
                os._exit(0)
            pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 20
