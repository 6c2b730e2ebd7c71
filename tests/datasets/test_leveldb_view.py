"""The private folder in which LevelDB's own library may work: for verify and salvage."""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from datasets.leveldb_raw import LevelDbReader
from datasets.leveldb_view import PrivateView
from datasets.raw import Stored
from tests.datasets import golden
from tests.datasets.damage import write_leveldb


@pytest.fixture(autouse=True)
def views(tmp_path_factory, monkeypatch):
    """A temporary folder of our own, on which every test must leave nothing."""
    folder = tmp_path_factory.mktemp("views")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def tables(tmp_path):
    """2000 records of 2 kB in several tables and a log."""
    draw = random.Random(1)
    records = {b"%08d" % i: draw.randbytes(2000) for i in range(2000)}
    return write_leveldb(tmp_path / "db", records, write_buffer_size=1 << 19, compression=None)


HOLDER = (
    "import sys; from datasets.leveldb_view import PrivateView; v = PrivateView(sys.argv[1], 'x')\n"
    "import plyvel; d = plyvel.DB(v.path); print('read', flush=True); sys.stdin.readline(); d.close()"
)


def sound(folder):
    return [found for found in LevelDbReader(str(folder)).scan() if isinstance(found, Stored)]


def test_tables_are_linked_and_the_rest_is_copied(tables, views):
    view = PrivateView(str(tables), "x")
    (place,) = views.iterdir()
    assert view.path == str(place)
    assert place.stat().st_mode & 0o077 == 0
    kinds = set()
    for name, size in view.files.items():
        original, taken = (tables / name).stat(), (place / name).stat()
        assert original.st_size == taken.st_size == size
        assert (original.st_ino == taken.st_ino) == name.endswith(".ldb")
        kinds.add(Path(name).suffix)
    assert kinds == {".ldb", ".log"}
    view.remove()
    view.remove()


@pytest.mark.parametrize("refused", [("link",), ("link", "symlink")])
def test_without_hard_links_other_ways_are_found(tables, monkeypatch, refused):
    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    for name in refused:
        monkeypatch.setattr(os, name, refuse)
    before = golden.snapshot(tables)
    assert len(sound(tables)) == 2000
    assert golden.snapshot(tables) == before


def test_a_table_no_manifest_names_is_not_overwritten(tables):
    # The number that LevelDB will give to the next table it writes, which happens when it replays the log.
    for number in range(1, 60):
        orphan = tables / f"{number:06d}.ldb"
        if not orphan.exists():
            orphan.write_bytes(b"precious")
    before = golden.snapshot(tables)
    assert len(sound(tables)) == 2000
    assert golden.snapshot(tables) == before


def test_a_view_forgotten_is_removed(tables, views):
    PrivateView(str(tables), "x")
    assert list(views.iterdir()) == []


def environment(views):
    return os.environ | {"TMPDIR": str(views), "PYTHONPATH": str(golden.DB.parents[2])}


def test_a_process_that_ends_removes_its_view(tables, views):
    run = subprocess.run(
        [sys.executable, "-c", HOLDER, tables], env=environment(views), check=True, capture_output=True, text=True,
        input="\n",
    )  # fmt: skip
    assert (run.stdout, run.stderr) == ("read\n", "")
    assert list(views.iterdir()) == []


def test_the_view_of_a_killed_process_is_removed_by_a_later_one(tables, views):
    def killed():
        view = PrivateView(str(tables), "x")
        os.kill(os.getpid(), 9)
        view.remove()

    assert golden.in_child(killed) == -9
    (left,) = views.iterdir()
    PrivateView(str(tables), "x").remove()
    assert left.exists()  # young: its process may be about to open it
    long_ago = time.time() - 3600
    os.utime(left, (long_ago, long_ago))
    PrivateView(str(tables), "x").remove()
    assert not left.exists()


def test_the_old_view_of_a_living_process_stays(tables, views):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, tables], env=environment(views), text=True, **pipes) as reader:
        assert reader.stdout.readline() == "read\n"
        (view,) = views.iterdir()
        long_ago = time.time() - 3600
        os.utime(view, (long_ago, long_ago))
        mine = PrivateView(str(tables), "x")
        assert view.exists()
        os.utime(mine.path, (long_ago, long_ago))
        PrivateView(str(tables), "x").remove()
        assert Path(mine.path).exists()
        mine.remove()
        reader.communicate("\n")
        assert reader.returncode == 0
