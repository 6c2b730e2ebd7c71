"""What verifying a LevelDB's checksums costs is measured beside the reading and told to the recorder."""

import random

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


def test_medians_are_told_at_8_16_32_samples(notes):
    cost = ChecksumCost("LevelDB /x")
    for number in range(40):
        cost.sample(100 + number % 3, 300 + number % 3)
    assert [note["samples"] for note in notes.taken] == [8, 16, 32]
    for note in notes.taken:
        assert (note["note"], note["data_set"]) == ("checksums", "LevelDB /x")
        assert (note["plain_ns"], note["verified_ns"]) == (101, 301)


def test_the_second_read_and_every_64th_from_there_are_measured():
    cost = ChecksumCost("x")
    assert [number for number in range(300) if cost.due()] == [1 + EVERY * turn for turn in range(5)]


@pytest.mark.parametrize("keys", ["%08d", "%d/x"], ids=["numbers", "names"])
def test_what_is_read_stays_the_same_and_large_records_show_the_cost(tmp_path, notes, keys):
    draw = random.Random(5)  # what cannot be compressed: or decompressing would take most of the time
    stored = {(keys % index).encode(): draw.randbytes(200_000) for index in range(40)}
    with plyvel.DB(str(tmp_path / "db"), create_if_missing=True, compression=None) as db:
        for key, value in stored.items():
            db.put(key, value)
    plyvel.DB(str(tmp_path / "db"), compression=None).close()  # the log becomes a table
    with open_source(tmp_path / "db") as source:
        for _ in range(8 * EVERY // 40 + 1):
            for record in source.read_many(range(40)):
                assert record.value == stored[record.key]
    (told,) = notes.taken
    assert told["samples"] == 8
    assert told["verified_ns"] > told["plain_ns"], "a checksum of 200 kB is no small thing"
