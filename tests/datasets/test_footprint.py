import os

import lmdb
import pytest

from datasets import datum, inspect, open_source
from datasets.footprint import footprint
from profiler import osread
from profiler.osread import Missing
from tests.datasets import golden

VALUE = datum.serialize(channels=1, height=20, width=50, data=bytes(1000), label=0)


def build(folder, records, names=(None,), delete=0):
    with lmdb.open(str(folder), map_size=64 << 20, max_dbs=8) as env:
        for name in names:
            table = env.open_db(name)
            with env.begin(write=True, db=table) as txn:
                for i in range(records):
                    txn.put(b"%08d" % i, VALUE)
            with env.begin(write=True, db=table) as txn:
                for i in range(delete):
                    txn.delete(b"%08d" % i)
    return folder


def look(path, db=None):
    with open_source(path, db=db) as source:
        return footprint(source)


def test_files_and_their_sizes(tmp_path):
    folder = build(tmp_path / "db", 100)
    seen = look(folder)
    files = list(folder.iterdir())
    assert seen.files == len(files)
    assert seen.nbytes == sum(place.stat().st_size for place in files)
    assert seen.allocated == sum(place.stat().st_blocks * 512 for place in files)
    assert seen.pages.unused == 0
    assert look(folder / "data.mdb").nbytes >= (folder / "data.mdb").stat().st_size
    leveldb = look(golden.DB / "mnist_test_leveldb")
    assert leveldb.files > 1
    assert leveldb.pages is None
    assert look("memory:records=3") is None


def test_a_hole_is_not_allocated(tmp_path):
    folder = build(tmp_path / "db", 10)
    os.truncate(folder / "data.mdb", 50 << 20)
    seen = look(folder)
    assert seen.nbytes >= 50 << 20
    assert seen.allocated < 10 << 20
    with open_source(folder) as source:
        storage = inspect.examine(source)["storage"]
    assert "the rest is a hole" in inspect.words.disk_text(storage)


def test_pages_that_hold_nothing_are_counted_and_warned_of(tmp_path):
    full = look(build(tmp_path / "full", 3000)).pages
    dead = build(tmp_path / "dead", 3000, delete=2000)
    pages = look(dead).pages
    assert pages.total >= full.total
    assert 0.5 < pages.unused / pages.total < 0.8
    with open_source(dead) as source:
        document = inspect.examine(source)
    assert document["records"] == 1000
    (warning,) = document["warnings"]
    assert f"{pages.unused:,} of {pages.total:,} pages" in warning
    assert "mdb_copy -c" in warning
    compact = tmp_path / "compact"
    compact.mkdir()
    with lmdb.open(str(dead)) as env:
        env.copy(str(compact), compact=True)
    assert look(compact).pages.unused < 4


def test_named_databases_are_not_taken_for_dead_pages(tmp_path):
    folder = build(tmp_path / "db", 1000, names=(b"train", b"test"))
    for name in ("train", "test"):
        assert look(folder, db=name).pages.unused < 0.02 * look(folder, db=name).pages.total


# residency ------------------------------------------------------------------------------------------------------------


def test_what_was_never_read_is_not_resident(tmp_path):
    place = tmp_path / "sparse"
    with open(place, "wb") as file:
        file.truncate(64 << 20)
        file.seek(32 << 20)
        file.write(b"x" * (1 << 20))
    if isinstance(osread.resident_bytes(place), Missing):
        pytest.skip(osread.resident_bytes(place).reason)
    assert 1 << 20 <= osread.resident_bytes(place) < 2 << 20
    with open(place, "rb") as file:
        file.read(8 << 20)
    assert 9 << 20 <= osread.resident_bytes(place) < 48 << 20  # read-ahead goes further


def test_files_smaller_than_a_page_empty_or_missing(tmp_path):
    place = tmp_path / "small"
    place.write_bytes(b"abc")
    assert osread.resident_bytes(place) in (0, 3) or isinstance(osread.resident_bytes(place), Missing)
    place.write_bytes(b"")
    assert osread.resident_bytes(place) == 0 or isinstance(osread.resident_bytes(place), Missing)
    assert "No such file" in osread.resident_bytes(tmp_path / "none").reason


def test_a_file_larger_than_the_window_is_looked_at_in_parts(tmp_path, monkeypatch):
    place = tmp_path / "file"
    place.write_bytes(bytes(5 << 20))
    whole = osread.resident_bytes(place)
    monkeypatch.setattr(osread, "_WINDOW", 1 << 20)
    assert osread.resident_bytes(place) == whole


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_users_file_is_not_called_resident():
    with golden.public_folder() as folder:
        place = folder / "data.mdb"
        place.write_bytes(bytes(1 << 20))
        place.chmod(0o444)

        def read():
            os.setuid(golden.UNPRIVILEGED)
            told = osread.resident_bytes(place)
            assert isinstance(told, Missing)
            assert "owner" in told.reason

        assert golden.in_child(read) == 0


def test_a_system_that_calls_everything_resident_is_not_believed(tmp_path, monkeypatch):
    place = tmp_path / "db"
    build(place, 10)
    monkeypatch.setattr(osread, "_resident_pages", lambda nbytes, fd, offset: nbytes // 4096)
    osread._mincore_tells.cache_clear()
    try:
        with open_source(place) as source:
            storage = inspect.examine(source)["storage"]
    finally:
        monkeypatch.undo()
        osread._mincore_tells.cache_clear()
    assert storage["resident"] is None
    assert "untouched memory" in storage["resident_missing"]
    assert inspect.words.resident_text(storage).startswith("n/a: ")
