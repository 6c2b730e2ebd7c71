"""Who is writing to an LMDB now: processes that hold it open, write, die and only read."""

import os
import subprocess
import sys

import lmdb
import pytest

from datasets import open_source
from datasets.errors import DatasetWarning

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


@pytest.fixture
def plain(tmp_path):
    folder = tmp_path / "db"
    with lmdb.open(str(folder), map_size=256 << 20, lock=False) as env, env.begin(write=True) as txn:
        for i in range(500):
            txn.put(b"%08d" % i, b"v%d" % i)
    return folder


WRITER = """
import lmdb, sys
env = lmdb.open(sys.argv[1], map_size=256 << 20, subdir=sys.argv[2] == "folder")
print("open", flush=True); sys.stdin.readline()
txn = env.begin(write=True); txn.put(b"zz", b"new"); print("writing", flush=True); sys.stdin.readline()
txn.commit(); print("committed", flush=True); sys.stdin.readline()
"""


@pytest.mark.parametrize("layout", ["folder", "file"])
def test_a_live_writer_is_named_and_a_dead_one_is_not(plain, tmp_path, layout):
    path = plain
    if layout == "file":
        path = tmp_path / "single.mdb"
        os.rename(plain / "data.mdb", path)
    with subprocess.Popen([sys.executable, "-c", WRITER, path, layout], **PIPES) as writer:

        def on(expected):
            assert writer.stdout.readline() == expected
            if expected == "committed\n":
                return
            doing = "holds it open for writing" if expected == "open\n" else "is in the middle of a write"
            with pytest.warns(DatasetWarning, match=f"process {writer.pid} {doing}"), open_source(path) as source:
                assert len(source) == 500
            writer.stdin.write("\n")
            writer.stdin.flush()

        on("open\n")
        on("writing\n")
        on("committed\n")
        writer.kill()
    assert list(path.parent.rglob("*lock*")), "what it left behind"
    with open_source(path) as source:  # no warning: warnings are errors in this suite
        assert len(source) == 501


def test_a_writer_that_died_in_a_transaction_is_nobody(plain):
    with subprocess.Popen([sys.executable, "-c", WRITER, plain, "folder"], **PIPES) as writer:
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert (writer.stdout.readline(), writer.stdout.readline()) == ("open\n", "writing\n")
        writer.kill()
    with open_source(plain) as source:
        assert len(source) == 500


def test_a_reader_that_uses_locks_is_no_writer(plain):
    reader = "import lmdb, sys; e = lmdb.open(sys.argv[1], readonly=True); t = e.begin(); print(1, flush=True); input()"
    with lmdb.open(str(plain)):
        pass  # makes lock.mdb
    with subprocess.Popen([sys.executable, "-c", reader, plain], **PIPES) as process:
        assert process.stdout.readline() == "1\n"
        with open_source(plain) as source:
            assert len(source) == 500
        process.communicate("\n")
