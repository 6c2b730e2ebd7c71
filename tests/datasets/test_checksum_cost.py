"""What verifying a LevelDB's checksums costs is measured beside the reading and told to the recorder."""

import random
import time

import plyvel
import pytest

from datasets import open_source
from datasets.checksum_cost import EVERY, ChecksumCost
from profiler import recorder


class Notes:
    """Stands where the process's recorder does."""

    def __init__(self):
        self.taken = []

    def note(self, kind, **fields):
        self.taken.append({"note": kind, **fields})


@pytest.fixture
def notes(monkeypatch):
    notes = Notes()
    monkeypatch.setattr(recorder, "current", lambda: notes)
    return notes


class Slow:
    """A database whose checksums take three times as long as all the rest."""

    def get(self, key, verify_checksums, fill_cache):
        assert not fill_cache
        until = time.thread_time_ns() + (2_000_000 if verify_checksums else 500_000)
        while time.thread_time_ns() < until:
            pass


def test_the_difference_of_two_reads_is_the_cost_and_is_told_at_8_16_32_samples(notes):
    cost = ChecksumCost("LevelDB /x")
    for _ in range(40):
        cost.sample(Slow(), b"key")
    assert [note["samples"] for note in notes.taken] == [8, 16, 32]
    for note in notes.taken:
        assert (note["note"], note["data_set"]) == ("checksums", "LevelDB /x")
        assert note["verified_ns"] > 2 * note["plain_ns"]


def test_the_first_read_and_every_64th_are_sampled():
    cost = ChecksumCost("x")
    assert [number for number in range(300) if cost.due()] == [0, EVERY, 2 * EVERY, 3 * EVERY, 4 * EVERY]


@pytest.mark.parametrize("keys", ["%08d", "%d/x"], ids=["numbers", "names"])
def test_what_is_read_stays_the_same_and_large_records_show_the_cost(tmp_path, notes, keys):
    draw = random.Random(5)  # what cannot be compressed: or decompressing would take most of the time
    stored = {(keys % index).encode(): draw.randbytes(200_000) for index in range(40)}
    with plyvel.DB(str(tmp_path / "db"), create_if_missing=True, compression=None) as db:
        for key, value in stored.items():
            db.put(key, value)
    with open_source(tmp_path / "db") as source:
        for _ in range(8 * EVERY // 40 + 2):
            for record in source.read_many(range(40)):
                assert record.value == stored[record.key]
    (told,) = notes.taken
    assert told["samples"] == 8
    assert told["verified_ns"] > told["plain_ns"], "a checksum of 200 kB is no small thing"
