"""Writers when the disk or the address space ends, and when a library is missing."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from datasets import publish, writer
from profiler.errors import StallscopeError, UsageError
from tests.datasets import golden

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_a_full_disk_ends_with_a_message_and_leaves_nothing(tmp_path: Path, backend: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3000, 20, 20), np.uint8)
    np.savez(tmp_path / "in.npz", images=images, labels=np.zeros(3000, np.int32))
    (tmp_path / "target").mkdir()
    out = tmp_path / "target" / "out"
    # A limit on the size of files stands in for a full disk.
    script = f"ulimit -f 200; exec {sys.executable} -m datasets.convert npz ../in.npz out --backend {backend}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=out.parent, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 2, done.stderr
    assert "is the disk full?" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(out.parent.iterdir()) == []


def test_ten_thousand_records_go_into_a_map_of_one_megabyte(tmp_path: Path) -> None:
    generator = np.random.default_rng(7)
    values = [generator.bytes(3000) for _ in range(100)]
    target = writer.LmdbWriter(tmp_path, map_size=1 << 20)
    for index in range(10_000):
        target.put(b"%08d" % index, values[index % 100])
    target.close()
    assert target.doublings >= 5
    with lmdb.open(str(tmp_path), readonly=True, lock=False) as env, env.begin() as transaction:
        for index, (key, value) in enumerate(transaction.cursor()):
            assert (key, value) == (b"%08d" % index, values[index % 100])
        assert index == 9999


def test_where_address_space_is_limited_it_starts_small_and_ends_with_a_message(tmp_path: Path) -> None:
    """A map of a terabyte would be refused here from the start; ours grows until it is refused, and says so."""

    def limited() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        target = writer.LmdbWriter(tmp_path, map_size=1 << 20)
        limit = pages * resource.getpagesize() + (100 << 20)
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
        (tmp_path / "huge").mkdir()
        with pytest.raises(lmdb.Error):
            lmdb.open(str(tmp_path / "huge"), map_size=1 << 40)

        def fill() -> None:
            for index in range(60_000):
                target.put(b"%08d" % index, bytes(3000))

        with pytest.raises(StallscopeError, match=r"the LMDB's map cannot grow to \d+ MiB(.|\n)*ulimit -v"):
            fill()
        target.abandon()
        resource.setrlimit(resource.RLIMIT_AS, before)
        assert target.committed >= 5000
        later = writer.LmdbWriter(tmp_path)
        assert sum(1 for _ in later.records()) == target.committed

    assert golden.in_child(limited) == 0


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_a_disk_that_is_nearly_full_is_told_before_a_transaction(tmp_path: Path, monkeypatch, backend: str) -> None:
    target = writer.WRITERS[backend](tmp_path)
    target.put(b"00000000", bytes(1000))
    target.commit()
    usage = writer.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage._replace(free=writer.RESERVE_BYTES + 1999))
    target.put(b"00000001", bytes(1000))
    with pytest.raises(
        writer.DiskFull, match=r"has no room for the next records(.|\n)*16.0 MiB free(.|\n)*another disk"
    ):
        target.close()
    assert [key for key, _ in target.records()] == [b"00000000"]
    target.abandon()


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_a_second_writer_goes_on_after_the_records_of_the_first(tmp_path: Path, backend: str) -> None:
    for part in range(2):
        target = writer.WRITERS[backend](tmp_path)
        assert [key for key, _ in target.records()] == [b"%08d" % index for index in range(part * 5)]
        for index in range(5):
            target.put(b"%08d" % (part * 5 + index), bytes(200_000))
        target.close()
    target = writer.WRITERS[backend](tmp_path)
    assert len(list(target.records())) == 10
    target.abandon()


def test_a_map_that_cannot_grow_is_told(tmp_path: Path) -> None:
    class Stuck:
        """An environment whose map cannot grow: what a limit on address space does."""

        def __init__(self, env: Any) -> None:
            self.begin, self.close = env.begin, env.close

        def set_mapsize(self, size: int) -> None:
            raise lmdb.MemoryError("mdb_env_set_mapsize: Cannot allocate memory")

    target = writer.LmdbWriter(tmp_path, map_size=64 << 10)
    target._env = Stuck(target._env)
    target.put(b"0", bytes(100_000))
    with pytest.raises(StallscopeError, match="cannot grow"):
        target.close()
    target.abandon()


def test_a_pending_transaction_is_replayed_whole(tmp_path: Path) -> None:
    target = writer.LmdbWriter(tmp_path, map_size=64 << 10)
    for index in range(999):  # fewer than a commit: all in one transaction, far larger than the map
        target.put(b"%08d" % index, bytes([index % 256]) * 500)
    assert target.doublings == 0
    target.close()
    assert target.doublings >= 4
    with lmdb.open(str(tmp_path), readonly=True, lock=False) as env, env.begin() as transaction:
        assert [value[0] for _, value in transaction.cursor()] == [index % 256 for index in range(999)]
        assert transaction.stat()["entries"] == 999


def test_the_same_key_twice_is_an_error(tmp_path: Path) -> None:
    target = writer.LmdbWriter(tmp_path)
    target.put(b"1", b"a")
    target.put(b"1", b"b")
    with pytest.raises(StallscopeError, match=r"already in the database|writing the LMDB failed"):
        target.close()
    target.abandon()


def test_without_plyvel_the_message_says_what_to_do(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "plyvel", None)
    with pytest.raises(StallscopeError, match=r"plyvel(.|\n)*--backend lmdb"):
        writer.LevelDbWriter(tmp_path / "db")


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path, monkeypatch) -> None:
    mine, other = (tmp_path / f".out.part-{publish.socket.gethostname()}-{pid}" for pid in (1, 2**30))
    foreign = tmp_path / ".out.part-elsewhere-1073741824"
    for folder in (mine, other, foreign):
        folder.mkdir()
    with publish.new_folder(tmp_path / "out") as folder:
        (folder / "data.mdb").write_bytes(b"x")
    assert mine.exists()  # process 1 is alive
    assert foreign.exists()  # nobody here knows whether that process is alive
    assert not other.exists()
    assert (tmp_path / "out" / "data.mdb").read_bytes() == b"x"


def test_a_database_moved_aside_is_kept_until_there_is_a_new_one(tmp_path: Path) -> None:
    aside = tmp_path / f".out.old-{publish.socket.gethostname()}-{2**30}"
    aside.mkdir()
    with pytest.raises(ValueError, match="stop"), publish.new_folder(tmp_path / "out"):
        raise ValueError("stop")
    assert aside.exists()
    (tmp_path / "out").mkdir()
    with publish.new_folder(tmp_path / "out"):
        pass
    assert not aside.exists()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch) -> None:
    def refuse(self: Path, *arguments: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(writer.Path, "mkdir", refuse)
    with (
        pytest.raises(UsageError, match=r"nothing can be written in .*Permission denied"),
        publish.new_folder(tmp_path / "x"),
    ):
        pass


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_records_that_come_slowly_are_committed_after_some_seconds(tmp_path: Path, monkeypatch, backend: str) -> None:
    now = 100.0
    monkeypatch.setattr(writer.time, "monotonic", lambda: now)
    target = writer.WRITERS[backend](tmp_path)
    counts = []
    for index in range(9):
        now += 2.0
        target.put(b"%08d" % index, b"x")
        counts.append(sum(1 for _ in target.records()))
    target.abandon()
    assert counts == [0, 0, 3, 3, 3, 6, 6, 6, 9]


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
@pytest.mark.parametrize("ended", [False, True])
def test_what_is_pending_is_kept_when_ctrl_c_comes_before_or_after_a_transaction(
    tmp_path: Path, monkeypatch, backend: str, ended: bool
) -> None:
    target = writer.WRITERS[backend](tmp_path)
    write = target._write

    def interrupted(records: list[tuple[bytes, bytes]]) -> None:
        if ended:
            write(records)
        raise KeyboardInterrupt

    for index in range(5):
        target.put(b"%08d" % index, b"x")
    with monkeypatch.context() as patch:
        patch.setattr(target, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            target.commit()
    target.keep()
    target.keep()
    assert target.committed == 5
    assert len(list(target.records())) == 5
    target.abandon()


def test_after_a_failed_write_nothing_is_tried_again(tmp_path: Path, monkeypatch) -> None:
    target = writer.LmdbWriter(tmp_path)
    target.put(b"0", b"x")

    def fail(records: list[tuple[bytes, bytes]]) -> None:
        raise StallscopeError("writing failed")

    with monkeypatch.context() as patch:
        patch.setattr(target, "_write", fail)
        with pytest.raises(StallscopeError, match="writing failed"):
            target.commit()
    target.keep()
    assert target.committed == 0
    target.abandon()


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_behind_whoever_puts_the_same_records_are_written_in_order(tmp_path: Path, monkeypatch, backend: str) -> None:
    monkeypatch.setattr(writer, "COMMIT_RECORDS", 10)
    target = writer.WRITERS[backend](tmp_path)
    target.behind = True
    write, threads, under_way = target._write, set(), []

    def slow(records: list[tuple[bytes, bytes]]) -> None:
        threads.add(threading.current_thread().name)
        under_way.append(len(records))
        time.sleep(0.01)
        write(records)

    monkeypatch.setattr(target, "_write", slow)
    for index in range(95):
        target.put(b"%08d" % index, bytes([index]) * 5000)
        assert index + 1 - target.committed <= 30, "no more than a transaction under way and one that fills up"
    target.close()
    assert target.committed == 95
    assert under_way == [10] * 9 + [5]
    assert threads == {"commit", "MainThread"}
    again = writer.WRITERS[backend](tmp_path)
    assert [(key, value[0]) for key, value in again.records()] == [(b"%08d" % index, index) for index in range(95)]
    again.abandon()


def test_what_fails_behind_is_raised_by_the_next_call_and_nothing_later_is_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(writer, "COMMIT_RECORDS", 10)
    target = writer.LmdbWriter(tmp_path)
    target.behind = True
    write = target._write

    def fail_second(records: list[tuple[bytes, bytes]]) -> None:
        if records[0][0] == b"00000010":
            raise StallscopeError("writing failed")
        write(records)

    monkeypatch.setattr(target, "_write", fail_second)
    put: list[int] = []

    def fill() -> None:
        for index in range(100):
            put.append(index)
            target.put(b"%08d" % index, b"x")

    with pytest.raises(StallscopeError, match="writing failed"):
        fill()
    assert put[-1] == 29
    target.keep()
    assert target.committed == 10
    assert len(list(target.records())) == 10
    target.abandon()


def test_giving_up_waits_for_the_transaction_under_way(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(writer, "COMMIT_RECORDS", 10)
    target = writer.LmdbWriter(tmp_path)
    target.behind = True
    write = target._write
    monkeypatch.setattr(target, "_write", lambda records: (time.sleep(0.2), write(records)))
    for index in range(10):
        target.put(b"%08d" % index, b"x")
    target.abandon()  # closing the environment under it would crash
    later = writer.LmdbWriter(tmp_path)
    assert len(list(later.records())) == 10
    later.abandon()


@pytest.mark.parametrize("moment", ["before it starts", "while it is waited for"])
def test_ctrl_c_round_a_transaction_behind_loses_nothing(tmp_path: Path, monkeypatch, moment: str) -> None:
    monkeypatch.setattr(writer, "COMMIT_RECORDS", 10)
    target = writer.LmdbWriter(tmp_path)
    target.behind = True

    def interrupt(*about: Any) -> None:
        raise KeyboardInterrupt

    def fill(first: int, end: int) -> None:
        for index in range(first, end):
            target.put(b"%08d" % index, b"x")

    fill(0, 15)
    with monkeypatch.context() as patch:
        patch.setattr(writer._Flying, "start" if moment == "before it starts" else "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fill(15, 20)
    target.keep()
    target.keep()
    assert target.committed == 20
    assert [key for key, _ in target.records()] == [b"%08d" % index for index in range(20)]
    target.abandon()
