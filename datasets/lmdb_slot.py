"""A reader's place in the lock table of an LMDB, where locking is asked for: held by a small process of its own.

As long as it is held, no writer gives away the pages of the transaction that is read. The process does nothing else:
LMDB's library maps the file, and what it may die of (a file cut at the moment of the transaction's beginning) must not
be what a worker dies of. It ends when its owner does, however that ends, so no slot of a killed worker stays taken.
One process holds one slot of a database, whatever the number of its sources.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from typing import Any

from datasets.errors import DatasetChanged, EnvUsedAfterFork, LockRefused, ReadersFull, SourceError
from datasets.lmdb_file import LmdbFile, Meta
from datasets.writers import lock_file

MAX_READERS = 1000
"""Slots asked for; whoever opens the lock file first decides for all."""
_ANSWER_S = 60.0
_RENEWALS = 3
_SLOTS_AT, _SLOT = 128, 64  # of the lock file: transaction u64, process i32, thread u64, padding

# Run with -I -S, for a fast start: it gets the folder of the lmdb package with its arguments.
_KEEPER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import resource, lmdb
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
def tell(**what):
    sys.stdout.write(json.dumps(what) + "\\n")
    sys.stdout.flush()
def main(path, subdir, most):
    try:
        env = lmdb.open(path, subdir=subdir, readonly=True, lock=True, create=False, readahead=False, max_readers=most)
    except lmdb.ReadersFullError as error:  # the opening itself needs a slot for a moment
        return tell(error=str(error), kind="full")
    except lmdb.Error as error:
        return tell(error=str(error), kind=type(error).__name__)
    freed = env.reader_check()
    try:
        txn = env.begin()
    except lmdb.ReadersFullError as error:
        return tell(error=str(error), kind="full")
    except lmdb.Error as error:
        return tell(error=str(error), kind=type(error).__name__)
    tell(transaction=txn.id(), max_readers=env.info()["max_readers"], freed=freed)
    sys.stdin.read()
    txn.abort()
    env.close()
main(sys.argv[2], sys.argv[3] == "folder", int(sys.argv[4]))
"""


class ReaderSlot:
    """A slot that is held until :meth:`close`, for the process that took it and no other.

    Attributes
    ----------
    transaction: the one whose pages stay. max_readers: slots of the table, as whoever made it decided. freed: slots of
    dead processes that were given back to get this one. pid: the process in the table.
    """

    def __init__(self, path: str, name: str) -> None:
        self.path = path
        self.name = name
        self.opened_in = os.getpid()
        self.users = 0
        lmdb_home = os.path.dirname(os.path.dirname(_lmdb_package()))
        layout = "folder" if os.path.isdir(path) else "file"
        command = [sys.executable, "-I", "-S", "-c", _KEEPER, lmdb_home, path, layout, str(MAX_READERS)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.pid = self._process.pid
        timer = threading.Timer(_ANSWER_S, self._process.kill)
        timer.start()
        try:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            told: dict[str, Any] = json.loads(line) if line else {}
        finally:
            timer.cancel()
        if "transaction" not in told:
            self.close()
            raise self._refusal(told)
        self.transaction: int = told["transaction"]
        self.max_readers: int = told["max_readers"]
        self.freed: int = told["freed"]

    def check_owner(self) -> None:
        """Raise :class:`EnvUsedAfterFork` in a process that is not the one that took the slot."""
        if self.opened_in != os.getpid():
            raise EnvUsedAfterFork(self.name, self.opened_in, os.getpid())

    def check(self) -> None:
        """Raise :class:`EnvUsedAfterFork` in another process, :class:`LockRefused` once the slot is lost."""
        self.check_owner()
        if self._process.poll() is not None:
            raise LockRefused(
                f"{self.name}: the process {self.pid} that held the reader slot has ended",
                expected="a slot held as long as the data set is read",
                found=f"exit status {self._process.returncode}",
                hint="a file that was cut, or somebody who ended the process",
            )

    def close(self) -> None:
        """Give the slot back. Idempotent; in a forked child it lets go of the pipes and leaves the slot alone."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self.opened_in == os.getpid():
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        else:
            self._process.returncode = 0  # not a child of this process: nothing to wait for

    def _refusal(self, told: dict[str, Any]) -> SourceError:
        if told.get("kind") == "full":
            pids = readers(lock_file(self.path))
            most = len(pids)
            dead = sorted({pid for pid in pids if pid and not os.path.exists(f"/proc/{pid}")})
            alive = sorted({pid for pid in pids if pid} - set(dead))
            told_dead = ", and by " + ", ".join(map(str, dead)) + ", which are dead" if dead else ""
            fixed = f"; another process fixed the table at {most}" if most != MAX_READERS else ""
            return ReadersFull(
                f"{self.name}: all {most} reader slots are taken{fixed}",
                expected="a free slot",
                found="slots held by the processes " + ", ".join(map(str, alive)) + told_dead,
                hint=("mdb_stat -rr gives back those of dead processes; " if dead else "")
                + "end all that have the database open: then the next one to open it makes a table "
                f"of {MAX_READERS}; or read without locking, if nobody writes",
            )
        if not told:
            return LockRefused(
                f"{self.name}: LMDB's library died or gave no answer while it took a reader slot",
                found=f"exit status {self._process.returncode}",
                hint=f"python -m datasets.verify {self.path} says whether the file is whole",
            )
        return LockRefused(
            f"{self.name} cannot be read with locking",
            expected="a lock file that may be made and written beside the data",
            found=f"{told['kind']}: {told['error']}",
            hint="leave locking out, if nobody writes while it is read; or get write access to the folder",
        )


_slots: dict[str, ReaderSlot] = {}
_lock = threading.Lock()


def acquire(path: str, name: str, renew: bool = False) -> ReaderSlot:
    """This process's slot of the database at ``path``. ``renew``: one whose transaction begins now."""
    key = os.path.realpath(path)
    with _lock:
        slot = None if renew else _slots.get(key)
        if slot is None:
            slot = _slots[key] = ReaderSlot(key, name)
        slot.users += 1
        return slot


def held() -> list[ReaderSlot]:
    """The slots that this process holds now."""
    with _lock:
        return list(_slots.values())


def hold(file: LmdbFile) -> tuple[ReaderSlot, Meta]:
    """The last state of a database, and this process's slot that keeps it."""
    path = os.path.dirname(file.path) if file.folder else file.path
    for attempt in range(_RENEWALS):
        slot = acquire(path, file.name, renew=attempt > 0)
        meta = file.meta()
        if slot.transaction == meta.transaction:
            return slot, meta
        release(slot)  # older than the last commit
    raise DatasetChanged(
        f"{file.name} is being written to so often that its last state could not be held",
        expected="a moment without a commit",
        hint="let the writer finish, then start again",
    )


def release(slot: ReaderSlot) -> None:
    """Give a slot back; the last user closes it. Raises :class:`EnvUsedAfterFork` in a forked child."""
    slot.check_owner()
    with _lock:
        slot.users -= 1
        if slot.users == 0:
            if _slots.get(slot.path) is slot:
                del _slots[slot.path]
            slot.close()


def _forget_inherited() -> None:
    """In a forked child: let go of the pipes, or the slots would be held until this process has ended, too."""
    global _lock
    _lock = threading.Lock()
    for slot in _slots.values():
        slot.close()
    _slots.clear()


os.register_at_fork(after_in_child=_forget_inherited)


@atexit.register
def _close_all() -> None:
    for slot in list(_slots.values()):
        slot.close()


def readers(table: str) -> list[int]:
    """The process in each slot of a lock file, 0 where it is free. Not for a process that has it open itself: closing
    any descriptor of a file gives up all locks that a process has on it."""
    with open(table, "rb") as file:
        content = file.read()
    return [
        int.from_bytes(content[at + 8 : at + 12], "little") for at in range(_SLOTS_AT, len(content) - _SLOT + 1, _SLOT)
    ]


def _lmdb_package() -> str:
    import importlib.util

    found = importlib.util.find_spec("lmdb")
    if found is None or found.origin is None:
        raise LockRefused("reading with locking needs the lmdb package", hint="pip install lmdb")
    return found.origin
