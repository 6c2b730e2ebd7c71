import multiprocessing
import os
import pickle
import time
from pathlib import Path

import lmdb
import plyvel
import pytest

from datasets import key_cache, key_index, leveldb_source, lmdb_source, open_source
from datasets.errors import DatasetWarning
from datasets.key_index import DenseKeys, KeyList

KEYS = [b"%06d/x" % number for number in range(3000)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(key_cache, "cache_root", lambda: tmp_path / "cache")  # of keys: compiled code may stay
    monkeypatch.setattr(lmdb_source, "_KEEP_FROM", 1000)
    monkeypatch.setattr(leveldb_source, "_KEEP_FROM", 1000)
    return tmp_path / "cache" / "keys"


@pytest.fixture
def scans(monkeypatch):
    """Counts the scans of keys."""
    made = []
    real = key_index.build
    monkeypatch.setattr(key_index, "build", lambda *arguments, **options: made.append(1) or real(*arguments, **options))
    return made


def make(folder, backend, keys=KEYS):
    if backend == "lmdb":
        with lmdb.open(str(folder), map_size=64 << 20, lock=False) as env, env.begin(write=True) as txn:
            for key in keys:
                txn.put(key, b"<" + key + b">")
    else:
        db = plyvel.DB(str(folder), create_if_missing=True)
        for key in keys:
            db.put(key, b"<" + key + b">")
        db.close()
    return folder


def check(source, keys=KEYS):
    assert len(source) == len(keys)
    for record in source.read_many([*range(0, len(keys), 7), len(keys) - 1, 5]):
        assert (record.key, record.value) == (keys[record.index], b"<" + keys[record.index] + b">")


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_keys_are_scanned_once_and_then_found(tmp_path, cache, scans, backend):
    folder = make(tmp_path / "db", backend)
    for _ in range(3):
        with open_source(folder) as source:
            check(source)
            assert isinstance(source._index.blocks, memoryview), "mapped, so that processes share it"
    assert len(scans) == 1
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    assert sorted(place.name for place in tmp_path.iterdir()) == ["cache", "db"]


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_a_database_that_changed_is_scanned_again_and_the_old_index_goes(tmp_path, cache, scans, backend):
    folder = make(tmp_path / "db", backend)
    open_source(folder).close()
    (old,) = cache.iterdir()
    keys = sorted([*KEYS, b"000001/y"])
    make(folder, backend, [b"000001/y"])
    with open_source(folder) as source:
        check(source, keys)
    (new,) = cache.iterdir()
    assert new != old
    assert len(scans) == 2


def test_another_database_of_the_same_size_and_transaction_is_not_taken_for_the_first(tmp_path, cache, scans):
    make(tmp_path / "db", "lmdb")
    size = (tmp_path / "db" / "data.mdb").stat().st_size
    open_source(tmp_path / "db").close()
    keys = [key.replace(b"/x", b"/y") for key in KEYS]
    (tmp_path / "db").rename(tmp_path / "old")
    make(tmp_path / "db", "lmdb", keys)
    assert (tmp_path / "db" / "data.mdb").stat().st_size == size
    with open_source(tmp_path / "db") as source:
        check(source, keys)
    assert len(scans) == 2


def test_dense_numbers_and_small_databases_keep_nothing(tmp_path, cache, monkeypatch):
    make(tmp_path / "dense", "lmdb", [b"%08d" % number for number in range(3000)])
    with open_source(tmp_path / "dense") as source:
        assert isinstance(source._index, DenseKeys)
    monkeypatch.setattr(lmdb_source, "_KEEP_FROM", 5000)
    make(tmp_path / "small", "lmdb")
    with open_source(tmp_path / "small") as source:
        assert isinstance(source._index, KeyList)
    assert not list(cache.glob("*.keys"))


def test_dense_numbers_of_a_leveldb_are_found_once_in_a_process(tmp_path, cache, scans, monkeypatch):
    keys = [b"%08d" % number for number in range(3000)]
    monkeypatch.setattr(key_cache, "_MOST_DENSE", 2)
    for name in ("one", "two"):
        make(tmp_path / name, "leveldb", keys)
    for name in ("one", "two", "one", "two"):
        with open_source(tmp_path / name) as source:
            check(source, keys)
            assert isinstance(source._index, DenseKeys)
    assert len(scans) == 2
    make(tmp_path / "one", "leveldb", [b"00003000"])
    with open_source(tmp_path / "one") as source:
        check(source, [*keys, b"00003000"])
    assert len(scans) == 3
    assert len(key_cache._dense) <= 2
    assert not list(cache.glob("*.keys"))


@pytest.mark.parametrize("harm", ["cut", "flipped", "empty", "other"])
def test_a_damaged_index_is_made_again(tmp_path, cache, scans, harm):
    folder = make(tmp_path / "db", "lmdb")
    open_source(folder).close()
    (file,) = cache.iterdir()
    content = bytearray(file.read_bytes())
    if harm == "cut":
        content = content[: len(content) // 2]
    elif harm == "flipped":
        content[-20] ^= 1
    file.write_bytes({"empty": b"", "other": b"x" * 5000}.get(harm, bytes(content)))
    with open_source(folder) as source:
        check(source)
    assert len(scans) == 2
    with open_source(folder) as source:
        check(source)
    assert len(scans) == 2


def test_a_cache_that_cannot_be_written_costs_a_warning_and_a_scan(tmp_path, monkeypatch, scans):
    monkeypatch.setattr(lmdb_source, "_KEEP_FROM", 1000)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("STALLSCOPE_CACHE", str(tmp_path / "file"))
    folder = make(tmp_path / "db", "lmdb")
    for _ in range(2):
        with pytest.warns(DatasetWarning, match="STALLSCOPE_CACHE"):
            source = open_source(folder)
        with source:
            check(source)
    assert len(scans) == 2


def test_a_full_disk_leaves_no_torn_index(tmp_path, cache, monkeypatch, scans):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    folder = make(tmp_path / "db", "lmdb")
    with pytest.warns(DatasetWarning, match="No space left"):
        source = open_source(folder)
    with source:
        check(source)
    assert list(cache.iterdir()) == []


def _open(folder, marks, cache):
    real = key_index.build

    def slow(*arguments, **options):
        Path(marks, str(os.getpid())).touch()
        time.sleep(0.5)
        return real(*arguments, **options)

    key_index.build = slow
    key_cache.cache_root = lambda: cache
    lmdb_source._KEEP_FROM = 1000
    with open_source(folder) as source:
        check(source)


@pytest.mark.parametrize("killed", [False, True])
def test_of_several_processes_one_scans_and_the_others_wait(tmp_path, cache, killed):
    folder = make(tmp_path / "db", "lmdb")
    marks = tmp_path / "marks"
    marks.mkdir()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_open, args=(folder, marks, cache.parent)) for _ in range(3)]
    for process in processes:
        process.start()
    if killed:  # the one that scans: its lock goes with it, and the next one takes over
        deadline = time.monotonic() + 60
        while not list(marks.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        scanning = int(next(marks.iterdir()).name)
        next(process for process in processes if process.pid == scanning).kill()
    for process in processes:
        process.join(60)
    assert sorted(process.exitcode for process in processes) == ([-9, 0, 0] if killed else [0, 0, 0])
    assert len(list(marks.iterdir())) == (2 if killed else 1)
    assert [place.suffix for place in cache.iterdir()] == [".keys"]


def test_waiting_for_another_process_has_an_end(tmp_path, cache, monkeypatch, scans):
    """A process that holds the lock and does not go on (stopped, for example) holds up nobody for ever."""
    monkeypatch.setattr(key_cache, "_PATIENCE_S", 0.2)
    real, held = key_cache._lock, []

    def second(part):
        held.append(real(part))  # the other process
        return real(part)

    monkeypatch.setattr(key_cache, "_lock", second)
    folder = make(tmp_path / "db", "lmdb")
    with open_source(folder) as source:
        check(source)
    assert len(scans) == 1
    assert not list(cache.glob("*.keys"))
    os.close(held[0])


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_a_pickled_source_takes_no_keys_along(tmp_path, cache, scans, backend):
    folder = make(tmp_path / "db", backend)
    with open_source(folder) as source:
        source.read(0)
        stored = pickle.dumps(source)
    assert len(stored) < 2000
    with pickle.loads(stored) as copy:
        check(copy)
    assert len(scans) == 1


def test_where_caches_lie(monkeypatch):
    monkeypatch.delenv("STALLSCOPE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert key_cache.cache_root() == Path("/x/stallscope")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert key_cache.cache_root() == Path("/h/.cache/stallscope")


def test_thin_lists_of_a_leveldb_are_stepped_over(tmp_path, monkeypatch):
    monkeypatch.setattr(key_index, "_CHUNK", 64)
    monkeypatch.setattr(key_index, "MOST_BYTES", 2)
    keys = sorted(os.urandom(12) for _ in range(500))
    make(tmp_path / "db", "leveldb", keys)
    with open_source(tmp_path / "db") as source:
        assert source._index.stride > 1
        check(source, keys)
        assert [source.key(index) for index in range(500)] == keys
