"""Reading with locking asked for: one slot a process, given back whatever becomes of its owner."""

import os
import shutil
import signal
import subprocess
import sys
import time

import lmdb
import pytest

from datasets import lmdb_slot, open_source
from datasets.errors import EnvUsedAfterFork, LockRefused, ReadersFull
from profiler.errors import UsageError
from tests.datasets import golden

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
HOLDER = """
import lmdb, sys
env = lmdb.open(sys.argv[1], readonly=True, max_readers=int(sys.argv[2]))
held = [env.begin() for _ in range(int(sys.argv[3]))]
print("open", flush=True); sys.stdin.readline()
"""


@pytest.fixture
def plain(tmp_path):
    with lmdb.open(str(tmp_path / "db"), map_size=64 << 20) as env, env.begin(write=True) as txn:
        for i in range(100):
            txn.put(b"%08d" % i, b"v%d" % i)
    (tmp_path / "db" / "lock.mdb").unlink()  # or its size would be that of the table to come
    return tmp_path / "db"


def holder(folder, readers, held):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, folder, str(readers), str(held)], **PIPES)
    assert process.stdout.readline() == "open\n"
    return process


def taken(folder):
    with lmdb.open(str(folder), readonly=True) as env:
        env.reader_check()
        return len(env.readers().splitlines()[1:]) if "no active" not in env.readers() else 0


def test_three_hundred_sources_take_one_slot_of_a_table_fixed_by_another(plain):
    with holder(plain, 8, 1) as process:
        sources = [open_source(plain, lock=True) for _ in range(300)]
        assert {source.max_readers for source in sources} == {8}, "the limit in force, not the one asked for"
        assert [source.read(3).value for source in sources] == [b"v3"] * 300
        assert len({source._slot.pid for source in sources}) == 1
        for source in sources:
            source.close()
        process.communicate("\n")


def test_slots_of_killed_readers_are_given_back_before_one_is_taken(plain):
    with holder(plain, 6, 2) as process:
        dead = [holder(plain, 1000, 1) for _ in range(3)]
        for reader in dead:
            reader.kill()
            reader.communicate()
        with open_source(plain, lock=True) as source:
            assert (source._slot.freed, source.max_readers) == (3, 6)
            assert source.read(1).value == b"v1"
        process.communicate("\n")


def test_a_full_table_is_told_with_who_holds_it(plain):
    with holder(plain, 5, 5) as process:
        with pytest.raises(ReadersFull, match="another process fixed the table at 5") as caught:
            open_source(plain, lock=True)
        assert f"processes {process.pid}" in str(caught.value)
        process.communicate("\n")


def test_a_table_full_of_the_dead_says_so(plain):
    with holder(plain, 5, 2) as process:
        dead = [holder(plain, 1000, 1) for _ in range(3)]
        for reader in dead:
            reader.kill()
            reader.communicate()
        with pytest.raises(ReadersFull, match="mdb_stat -rr") as caught:
            open_source(plain, lock=True)
        assert f"processes {process.pid}, and by " in str(caught.value)
        assert all(str(reader.pid) in str(caught.value) for reader in dead)
        process.communicate("\n")


def test_alone_the_table_is_as_large_as_asked_for_and_the_slot_goes_with_a_killed_owner(plain):
    def killed():
        source = open_source(plain, lock=True)
        assert source.max_readers == lmdb_slot.MAX_READERS
        os.kill(os.getpid(), signal.SIGKILL)

    assert golden.in_child(killed) == -signal.SIGKILL
    until = time.monotonic() + 30
    while taken(plain) and time.monotonic() < until:
        time.sleep(0.05)
    assert taken(plain) == 0


def test_a_fork_takes_a_slot_of_its_own_and_may_not_use_its_parents(plain):
    with open_source(plain, lock=True) as source:
        source.read(0)
        slot = source._slot

        def child():
            with pytest.raises(EnvUsedAfterFork) as caught:
                slot.check()
            assert (caught.value.opened_in, caught.value.used_in) == (os.getppid(), os.getpid())
            assert source.read(5).value == b"v5"
            assert source._slot.pid != slot.pid
            source.close()

        assert [golden.in_child(child) for _ in range(2)] == [0, 0]
        slot.check()
        assert source.read(6).value == b"v6"


def test_the_process_that_holds_the_slot_is_missed(plain):
    with open_source(plain, lock=True) as source:
        os.kill(source._slot.pid, signal.SIGKILL)
        source._slot._process.wait()
        with pytest.raises(LockRefused, match="held the reader slot has ended"):
            source.read(0)


AS_SOMEBODY = """
import os, sys
from datasets import open_source
from datasets.errors import LockRefused
assert os.getuid() == int(sys.argv[2]) and not os.access(sys.argv[1], os.W_OK)
try:
    open_source(sys.argv[1], lock=True)
except LockRefused as error:
    print(error)
with open_source(sys.argv[1]) as source:
    print(len(source.read_many(range(len(source)))), "records")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="changes its user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
def test_locking_where_nothing_may_be_written_is_refused_by_name():
    """As another user, who may read everything, the interpreter in somebody's home included, and write nothing."""
    with golden.public_folder() as place:
        folder = golden.copy("lenet_ip2_float_lmdb", place)
        folder.chmod(0o555)
        before = golden.snapshot(folder)
        user = golden.UNPRIVILEGED
        command = [
            "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=+dac_read_search",
            "--ambient-caps=+dac_read_search", sys.executable, "-c", AS_SOMEBODY, folder, str(user),
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": str(golden.DB.parents[2])}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "cannot be read with locking" in done.stdout
        assert "Permission denied" in done.stdout
        assert done.stdout.endswith("100 records\n")
        assert golden.snapshot(folder) == before


def test_a_lock_file_that_cannot_be_one_is_refused_by_name(plain):
    (plain / "lock.mdb").mkdir()
    with pytest.raises(LockRefused, match="cannot be read with locking") as caught:
        open_source(plain, lock=True)
    assert "directory" in str(caught.value)


def test_what_has_no_lock_table_refuses_locking(tmp_path):
    folder = golden.copy("crops24_gray_jpg_72_leveldb", tmp_path)
    with pytest.raises(UsageError, match="no LMDB"):
        open_source(folder, lock=True)
