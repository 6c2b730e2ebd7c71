"""A file that is cut at any moment, thousands of times, while a process reads it: errors, and never a signal."""

import faulthandler
import os
import random
import signal
import time

import lmdb
import numpy as np
import pytest

from datasets import key_cache, lmdb_locate, lmdb_source, open_source
from datasets.errors import DatasetChanged, DatasetCorrupt, DatasetTruncated, NotADataset
from tests.datasets import golden

CUTS = 2000
EXPECTED = (DatasetTruncated, DatasetCorrupt, DatasetChanged, NotADataset)


def value(index):
    return b"v%07d" % index * (40 if index % 3 else 700)  # on the leaf, and on pages of its own


@pytest.mark.parametrize(
    ("scanned", "keys"),
    [
        pytest.param(True, b"%08d", id="scanned-numbers"),
        pytest.param(False, b"%08d.jpg", id="looked up-names"),
        pytest.param(True, b"%08d.jpg", id="scanned-names", marks=pytest.mark.long),
        pytest.param(False, b"%08d", id="looked up-numbers", marks=pytest.mark.long),
    ],
)
def test_no_moment_of_a_cut_kills_the_reader(tmp_path, monkeypatch, keys, scanned):
    monkeypatch.setattr(key_cache, "cache_root", lambda: tmp_path / "cache")  # of keys: compiled code may stay
    if not scanned:
        monkeypatch.setattr(lmdb_source, "_SCAN_LIMIT", 10)
        monkeypatch.setattr(lmdb_source, "_KEEP_FROM", 10)
        monkeypatch.setattr(lmdb_locate, "PLAIN", 0)
    folder = tmp_path / "db"
    with lmdb.open(str(folder), map_size=64 << 20, lock=False) as env, env.begin(write=True) as txn:
        for index in range(400):
            txn.put(keys % index, value(index))
    whole = (folder / "data.mdb").read_bytes()
    with open_source(folder) as source:  # compiles what the child needs, and keeps the index
        source.read_many(range(400))
        source.locate(np.arange(400))
    stop = tmp_path / "stop"

    def read():
        draw = random.Random(4)
        seen = dict.fromkeys(("read", "refused"), 0)
        while not stop.exists():
            try:
                with open_source(folder) as source:
                    for _ in range(50):
                        for record in source.read_many([draw.randrange(400) for _ in range(40)]):
                            assert record.value == value(record.index)
                        source.key(draw.randrange(400))
                        seen["read"] += 1
            except EXPECTED:
                seen["refused"] += 1
        assert min(seen.values()) > 0, seen

    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            read()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    draw = random.Random(5)
    try:
        with open(folder / "data.mdb", "r+b", buffering=0) as file:
            for number in range(CUTS):
                at = draw.choice([0, 100, 4096, 8192, draw.randrange(len(whole)), draw.randrange(len(whole))])
                file.truncate(at)
                os.pwrite(file.fileno(), whole[at:], at)
                time.sleep(draw.random() * 0.002)
                if number % 100 == 0:
                    assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the reader has ended"
    finally:
        stop.touch()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_cut_between_the_look_at_the_size_and_the_reading_names_the_record(tmp_path, monkeypatch):
    """The very moment that used to end the process."""
    folder = tmp_path / "db"
    with lmdb.open(str(folder), map_size=64 << 20, lock=False) as env, env.begin(write=True) as txn:
        for index in range(400):
            txn.put(b"%08d" % index, value(index))
    with open_source(folder) as source:
        real = source._read_part
        monkeypatch.setattr(source, "_read_part", lambda *given: (os.truncate(folder / "data.mdb", 8192), real(*given)))
        with pytest.raises(DatasetTruncated, match=r"record 399 \(key '00000399'\)") as caught:
            source.read_many([399])
        assert "8192 bytes" in str(caught.value)


def test_a_map_of_the_same_file_would_have_been_the_end(tmp_path):
    """What is avoided: the library's own reading of the same cut file."""
    folder = tmp_path / "db"
    with lmdb.open(str(folder), map_size=64 << 20, lock=False) as env, env.begin(write=True) as txn:
        for index in range(400):
            txn.put(b"%08d" % index, value(index))

    def read():
        faulthandler.disable()
        with lmdb.open(str(folder), readonly=True, lock=False) as env, env.begin() as txn:
            os.truncate(folder / "data.mdb", 8192)
            list(txn.cursor())

    assert golden.in_child(read) == -signal.SIGBUS
