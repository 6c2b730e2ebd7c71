"""LMDB as the world leaves it: one test for each thing that has gone wrong for somebody, on an input built for it.

What other files cover: files cut before they are opened, flags of damaged pages and forks in ``test_lmdb_source``; who
writes now in ``test_writers``; layouts, empty and missing paths in ``test_source``; a map that is full or cannot grow
in ``test_convert`` and ``test_writer``; keys in string order and labels in blocks in ``test_inspect``; damage that LMDB
cannot see, and what is saved from it, in ``test_manifest`` and ``test_verify``; a feed whose data set is cut or written
to in ``tests/pipeline/test_data_changes``; reading ahead as a job asks for it in ``tests/pipeline/test_backend_named``.
"""

import gc
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import lmdb
import pytest

from datasets import lmdb_file, lmdb_source, open_source, patience
from datasets.errors import (
    DatasetChanged,
    DatasetCorrupt,
    DatasetTruncated,
    EmptyFolder,
    EmptyPath,
    NotADataset,
    SourceError,
    SourceMissing,
)
from tests.datasets import golden

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


def make(folder, items, **options):
    with (
        lmdb.open(str(folder), map_size=256 << 20, lock=False, sync=False, **options) as env,
        env.begin(write=True) as txn,
    ):
        for key, value in items:
            txn.put(key, value)
    return folder


@pytest.fixture
def plain(tmp_path):
    return make(tmp_path / "db", [(b"%08d" % i, b"v%d" % i * 600) for i in range(500)])


# files that are cut ---------------------------------------------------------------------------------------------------


def test_a_file_cut_at_any_moment_of_a_run_is_an_error_in_the_next_batch(plain):
    """Cut in place by another process while batches are read; nobody dies of SIGBUS."""
    size = (plain / "data.mdb").stat().st_size

    def child():
        with open_source(plain) as source:
            for start in range(0, 256, 64):
                assert len(source.read_many(range(start, start + 64))) == 64
            os.truncate(plain / "data.mdb", size // 2 // 4096 * 4096)
            for read in (lambda: source.read_many(range(256, 500)), lambda: source.read(499), lambda: source.key(499)):
                with pytest.raises(DatasetTruncated, match="became shorter while it was being read") as caught:
                    read()
            assert f"{size} bytes" in str(caught.value)

    assert golden.in_child(child) == 0


def test_a_cut_in_the_middle_of_a_batch_is_noticed_within_a_few_records(plain):
    """The last pages are cut off, and what is asked for lies before them: the next look at the size tells."""
    size = (plain / "data.mdb").stat().st_size
    asked = []

    def indices():
        for number in range(256):
            if number == 100:
                os.truncate(plain / "data.mdb", size - 2 * 4096)
            asked.append(number)
            yield number % 4

    def child():
        with open_source(plain) as source, pytest.raises(DatasetTruncated, match="became shorter"):
            source.read_many(indices())
        assert 100 <= asked[-1] <= 100 + 32

    assert golden.in_child(child) == 0


def test_a_file_that_is_cut_after_its_name_was_given_to_another_is_noticed(plain, tmp_path):
    """The size that counts is that of the mapped file, not of what its name leads to now."""
    other = make(tmp_path / "other", [(b"%08d" % i, b"w" * 2000) for i in range(500)])

    def child():
        with open_source(plain) as source:
            source.read(0)
            os.rename(plain / "data.mdb", tmp_path / "moved")
            os.rename(other / "data.mdb", plain / "data.mdb")
            assert source.read(499).value == b"v499" * 600
            os.truncate(tmp_path / "moved", 40960)
            with pytest.raises(DatasetTruncated):
                source.read(499)

    assert golden.in_child(child) == 0


def test_every_length_of_a_cut_file_is_refused_or_whole(plain):
    file = plain / "data.mdb"
    size, draw = file.stat().st_size, random.Random(3)
    lengths = sorted({draw.randrange(size) for _ in range(12)} | {size - 1, size - 4096, 8192}, reverse=True)

    def child():
        for length in lengths:
            os.truncate(file, length)
            with pytest.raises(DatasetTruncated):
                open_source(plain)

    assert golden.in_child(child) == 0


# forks and many processes ---------------------------------------------------------------------------------------------


def test_fifty_processes_open_and_close_in_a_loop_while_the_parent_reads(plain):
    with open_source(plain) as source, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        source.read(0)

        def child(seed):
            draw = random.Random(seed)
            assert source.read(7).value == b"v7" * 600  # opened before the fork
            for _ in range(4):
                with open_source(plain) as own:
                    index = draw.randrange(500)
                    assert own.read(index).value == b"v%d" % index * 600
                source.read(draw.randrange(500))

        pids = []
        for seed in range(50):
            pid = os.fork()
            if pid == 0:
                try:
                    child(seed)
                except BaseException:
                    os._exit(1)
                os._exit(0)
            pids.append(pid)
            source.read(seed)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 50
        assert source.read(499).value == b"v499" * 600
    assert sorted(place.name for place in plain.iterdir()) == ["data.mdb"]


def test_a_child_that_ends_without_closing_harms_nobody(plain):
    with open_source(plain) as source:
        source.read(0)

        def child():
            source.read(1)
            gc.collect()

        assert golden.in_child(child) == 0
        assert golden.in_child(lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL
        assert source.read(2).value == b"v2" * 600


# locks ----------------------------------------------------------------------------------------------------------------


def test_no_reader_slot_is_used_by_any_number_of_readers(plain):
    """200 open sources and 3 killed ones, with a table of 2 slots fixed by somebody else: no slot is taken."""
    holder = (
        "import lmdb, sys; env = lmdb.open(sys.argv[1], readonly=True, max_readers=2); txn = env.begin();"
        "print('open', flush=True); sys.stdin.readline(); print(env.readers().count('\\n'), flush=True);"
        "sys.stdin.readline()"
    )
    with subprocess.Popen([sys.executable, "-c", holder, plain], **PIPES) as process:
        assert process.stdout.readline() == "open\n"
        lock = (plain / "lock.mdb").read_bytes()
        sources = [open_source(plain) for _ in range(200)]
        assert [source.read(3).index for source in sources] == [3] * 200

        def killed():
            open_source(plain).read(0)
            os.kill(os.getpid(), signal.SIGKILL)

        assert [golden.in_child(killed) for _ in range(3)] == [-signal.SIGKILL] * 3
        assert (plain / "lock.mdb").read_bytes() == lock
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "2\n", "a line of names and the holder's own transaction"
        for source in sources:
            source.close()
        process.communicate("\n")


@pytest.mark.skipif(os.getuid() != 0, reason="changes its user")
def test_a_read_only_folder_with_a_lock_file_of_somebody_else():
    with golden.public_folder() as place:
        folder = golden.copy("lenet_ip2_float_lmdb", place)
        with lmdb.open(str(folder)) as env, env.begin():
            pass
        for file in folder.iterdir():
            file.chmod(0o444)
        folder.chmod(0o555)
        before = golden.snapshot(folder)
        assert (folder / "lock.mdb").exists()

        def read():
            os.setgroups([])
            os.setgid(golden.UNPRIVILEGED)
            os.setuid(golden.UNPRIVILEGED)
            with pytest.raises(lmdb.ReadonlyError):
                lmdb.open(str(folder), readonly=True, create=False)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with open_source(folder) as source:
                    assert len(source.read_many(range(100))) == 100

        assert golden.in_child(read) == 0
        assert golden.snapshot(folder) == before


MOUNTED = """
import os, sys, warnings
from datasets import open_source
assert os.statvfs(sys.argv[1]).f_flag & os.ST_RDONLY
warnings.simplefilter("error")
with open_source(sys.argv[1]) as source:
    print(len(source.read_many(range(len(source)))))
"""


@pytest.mark.parametrize("name", ["lenet_ip2_float_lmdb", "crops24_gray_jpg_72_leveldb"])
def test_a_mount_that_may_only_be_read(tmp_path, name):
    folder = golden.copy(name, tmp_path)
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("may not mount here")
    script = (
        f'mount --bind {folder} {folder} && mount -o remount,bind,ro {folder} && exec {sys.executable} -c "$0" {folder}'
    )
    environment = os.environ | {"PYTHONPATH": str(golden.DB.parents[2])}
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script, MOUNTED], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{golden.described(name)['n']}\n"), done.stderr


@pytest.mark.parametrize("call", ["stat", "listdir", "open", "pread"])
def test_a_file_system_that_hangs_is_told_with_the_call(plain, monkeypatch, call):
    hang = threading.Event()
    real = getattr(os, call)

    def stuck(*arguments, **options):
        if threading.current_thread().name == "first-look":
            hang.wait(30)
        return real(*arguments, **options)

    monkeypatch.setattr(os, call, stuck)
    monkeypatch.setattr(patience, "OPEN_TIMEOUT_S", 0.2)
    named = {"listdir": "list", "pread": "read"}.get(call, call)
    with pytest.raises(SourceError, match=f"stuck in: {named} {plain}"):
        open_source(plain)
    hang.set()


def test_a_pipe_named_data_mdb_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "data.mdb")
    with pytest.raises(NotADataset, match="not a regular file"):
        open_source(tmp_path)


# a writer during the run ----------------------------------------------------------------------------------------------


def commit(folder, times=1):
    def write():
        with lmdb.open(str(folder), map_size=256 << 20, lock=False) as env:
            for number in range(times):
                with env.begin(write=True) as txn:
                    txn.put(b"%08d" % number, b"other" * 200)

    assert golden.in_child(write) == 0


@pytest.mark.parametrize("times", [1, 5])
def test_commits_between_batches_are_noticed_before_a_record_is_handed_out(plain, times):
    with open_source(plain) as source:
        source.read_many(range(100))
        commit(plain, times)
        for read in (lambda: source.read_many(range(100)), lambda: source.read(3), source.identity):
            with pytest.raises(DatasetChanged, match="written to while it was in use") as caught:
                read()
        assert "let the writer finish" in str(caught.value)


def test_commits_in_the_middle_of_a_batch_are_noticed_before_it_is_handed_out(plain):
    """The second commit may overwrite pages that a reader without a slot is looking at."""

    def indices():
        for index in range(200):
            if index == 150:
                commit(plain, 3)
            yield index

    with open_source(plain) as source, pytest.raises(DatasetChanged):
        source.read_many(indices())


# keys and layouts -----------------------------------------------------------------------------------------------------


def test_unpadded_numbers_come_in_the_order_of_their_bytes_with_their_own_records(tmp_path):
    folder = make(tmp_path / "db", [(b"%d" % i, b"label %d" % i) for i in range(12)])
    with open_source(folder) as source:
        records = source.read_many(range(12))
    assert [record.key for record in records[:4]] == [b"0", b"1", b"10", b"11"]
    assert all(record.value == b"label " + record.key for record in records)


def test_no_layout_of_a_path_creates_anything(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    for path, error in (
        ("", EmptyPath),
        ("  ", EmptyPath),
        (tmp_path / "missing", SourceMissing),
        (tmp_path / "missing" / "data.mdb", SourceMissing),
        (tmp_path / "empty", EmptyFolder),
        (tmp_path / "empty" / "data.mdb", SourceMissing),
        (tmp_path / "other", NotADataset),
    ):
        for backend in (None, "lmdb"):
            with pytest.raises(error):
                open_source(path, backend=backend)
    names = sorted(str(place.relative_to(tmp_path)) for place in tmp_path.rglob("*"))
    assert names == ["empty", "other", "other/notes.txt"]


def test_an_environment_of_named_databases_lists_them(tmp_path):
    folder = tmp_path / "db"
    with lmdb.open(str(folder), map_size=1 << 20, max_dbs=4) as env:
        for name in (b"images", b"labels"):
            db = env.open_db(name)
            with env.begin(write=True, db=db) as txn:
                txn.put(b"00000000", name)
    with pytest.raises(NotADataset, match="holds named databases") as caught:
        open_source(folder)
    assert "'images', 'labels'" in str(caught.value)
    assert "--db images" in str(caught.value)
    with open_source(folder, db="labels") as source:
        assert source.read(0).value == b"labels"
    with pytest.raises(NotADataset, match="one of: 'images', 'labels'"):
        open_source(folder, db="mages")
    with open_source(folder / "data.mdb", db="images") as source:
        assert source.identity()["db"] == "images"


def test_a_record_is_no_database_and_a_plain_environment_says_it_has_none(tmp_path):
    folder = make(tmp_path / "db", [(b"%d" % i, bytes(48)) for i in range(5)])
    with open_source(folder) as source:
        assert len(source) == 5
    with pytest.raises(NotADataset, match="it has none but the main database"):
        open_source(folder, db="0")


# damage ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scribbled(tmp_path):
    """2000 records, with 20 pages in the second half of the file whose headers were written over."""
    folder = make(tmp_path / "db", [(b"%08d" % i, bytes([i % 256]) * 700) for i in range(2000)])
    draw = random.Random(1)
    with open(folder / "data.mdb", "r+b") as file:
        pages = (folder / "data.mdb").stat().st_size // 4096
        for page in draw.sample(range(pages // 2, pages), 20):
            file.seek(page * 4096 + 10)
            file.write(draw.randbytes(2))
    return folder


def test_damage_that_the_scan_meets_is_told_with_the_last_good_key(scribbled):
    def child():
        with pytest.raises(DatasetCorrupt) as caught:
            open_source(scribbled)
        text = str(caught.value)
        count, key = re.search(r"(\d+) records before the damage, the last with the key '(\d+)'", text).groups()
        assert int(count) == int(key) + 1 > 500
        assert str(scribbled) in text
        assert "datasets.verify" in text

    assert golden.in_child(child) == 0


def test_damage_that_a_read_meets_is_told_with_the_record_and_the_others_are_right(scribbled, monkeypatch):
    monkeypatch.setattr(lmdb_source, "_SCAN_LIMIT", 100)  # as in a large database, whose keys are not scanned

    def child():
        told = {}
        with open_source(scribbled) as source:
            for index in range(2000):
                try:
                    assert source.read(index).value == bytes([index % 256]) * 700
                except DatasetCorrupt as error:
                    told[index] = str(error)
        assert 20 <= len(told) < 200
        assert all(f"record {index} of 2000" in text and "datasets.verify" in text for index, text in told.items())

    assert golden.in_child(child) == 0


# memory and reading ahead ---------------------------------------------------------------------------------------------


def test_reading_ahead_is_on_unless_turned_off_and_survives_pickling(plain, monkeypatch):
    told = []
    real = os.posix_fadvise
    monkeypatch.setattr(lmdb_file.os, "posix_fadvise", lambda fd, *advice: told.append(advice) or real(fd, *advice))
    with open_source(plain) as source:
        source.read(0)
    with open_source(plain, readahead=False) as source:
        pickled = pickle.dumps(source)
    with pickle.loads(pickled) as copy:
        copy.read(0)
    off = (0, 0, os.POSIX_FADV_RANDOM)
    assert told == [(0, 0, os.POSIX_FADV_NORMAL), off, off]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_nothing_of_a_database_is_ever_mapped(plain):
    with open_source(plain) as source:
        source.read_many(range(500))
        assert str(plain) not in Path("/proc/self/maps").read_text()


def test_a_batch_outlives_its_source_and_its_file(plain):
    """No view into a buffer that is used again was handed out."""
    with open_source(plain) as source:
        batch = source.read_many(range(0, 500, 3))
        keys = [source.key(index) for index in range(0, 500, 3)]
    os.truncate(plain / "data.mdb", 0)
    assert [record.value for record in batch] == [b"v%d" % i * 600 for i in range(0, 500, 3)]
    assert [record.key for record in batch] == keys
    assert {type(part) for record in batch for part in (record.key, record.value)} == {bytes}


def test_no_descriptor_stays_open(plain):
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        open_source(plain).close()
        with pytest.raises(SourceMissing):
            open_source(plain / "missing")
    with pytest.raises(NotADataset):
        open_source(plain, db="none")
    assert set(os.listdir("/proc/self/fd")) == before
