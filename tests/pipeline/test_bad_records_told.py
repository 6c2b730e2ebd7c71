"""Bad records counted: the cap, what a resume remembers, what notes and report list, and what damage costs."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets import datum
from datasets.errors import DatasetCorrupt
from datasets.lmdb_source import LmdbSource
from datasets.source import Record, Source
from pipeline.bad_records import ENTRY, Found, Reason, Tally, TooManyBadRecords, read_rows
from pipeline.config import validate
from pipeline.feed import Feed
from pipeline.maker import BatchMaker, LocalReader, probe
from pipeline.spec import FeedSpec, feed_spec
from profiler import store
from profiler.errors import StallscopeError
from profiler.recorder import NULL, Recorder
from tests.pipeline.bad_sets import SHAPE, sound, spec, values
from tests.pipeline.build import picture, raw, write_lmdb


def test_above_the_cap_the_consumer_stops_with_the_keys(sets: dict[str, str]) -> None:
    """103 records: 0.04 allows four; the fifth that is met ends it, at the same step for everybody."""
    with Feed.from_spec(spec(sets["lmdb"], "skip", bad_record_cap=0.04)) as feed:
        delivered = []
        with pytest.raises(TooManyBadRecords) as caught:
            delivered.extend(batch.step for batch in feed)
        with pytest.raises(TooManyBadRecords):  # again, and not a wait for ever
            next(feed)
    text = str(caught.value)
    assert "5 of the 103 records" in text
    assert "at most 4 (data.bad_record_cap: 0.04)" in text
    assert len([bad for bad in values() if f"record {bad} (key '{bad:08d}_img'" in text]) == 5
    assert sets["lmdb"] in text
    assert f"step {len(delivered)}" in text


@pytest.mark.parametrize(("cap", "limit"), [(0.0, 0), (0.001, 1), (0.02, 2), (1.0, 103)])
def test_the_cap_allows_one_record_at_least_unless_it_is_zero(sets: dict[str, str], cap: float, limit: int) -> None:
    with Feed.from_spec(spec(sets["lmdb"], "skip", bad_record_cap=cap)) as feed:
        assert feed.stats()["bad_records"]["limit"] == limit


def test_a_bad_record_0_does_not_decide_the_shapes(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [values()[17], values()[5], *(sound(i) for i in range(2, 9))])
    with pytest.raises(StallscopeError, match="record 0 "):
        Feed.from_spec(FeedSpec(path, 3))
    with Feed.from_spec(FeedSpec(path, 3, on_bad_record="skip", bad_record_cap=0.3, stop_step=3)) as feed:
        assert feed.shape == (3, *SHAPE)
        assert len(list(feed)) == 3
        assert feed.stats()["bad_records"]["records"] == 2


def test_a_resume_remembers_what_was_bad(sets: dict[str, str]) -> None:
    asked = spec(sets["lmdb"], "skip")
    with Feed.from_spec(asked) as feed:
        for _ in range(10):
            next(feed)
        state = feed.state_dict()
    assert json.loads(json.dumps(state)) == state
    resumed = Feed.from_spec(asked)
    resumed.load_state_dict(state)
    with resumed, Feed.from_spec(asked) as whole:
        list(whole)
        list(resumed)
        assert resumed.stats()["bad_records"]["records"] == whole.stats()["bad_records"]["records"] == 7
    with pytest.raises(StallscopeError, match="on_bad_record differs"):
        Feed.from_spec(replace(asked, on_bad_record="zero")).load_state_dict(state)


def test_notes_and_report_list_the_keys_and_the_epochs(sets: dict[str, str], tmp_path: Path) -> None:
    from profiler import report

    with (
        Recorder.open(tmp_path, "trainer", "trainer") as recorder,
        Feed.from_spec(spec(sets["lmdb"], "skip"), recorder) as feed,
    ):
        list(feed)
        stats = feed.stats()["bad_records"]
    run = store.load_run(tmp_path)
    notes = [note for note in run.notes if note["note"] == "bad_record"]
    assert sorted(note["record"] for note in notes) == sorted(values())
    reasons = {note["record"]: note["reason"] for note in notes}
    expected = {5: "image", 17: "image", 40: "datum", 41: "shape", 60: "label", 77: "shape", 98: "image"}
    assert reasons == expected
    (finding,) = (finding for finding in report.build(run).findings if finding.kind == "bad_records")
    assert f"{len(notes)} records of the TRAIN set could not be used" in finding.text
    for number in reasons:
        assert f"'{number:08d}_img'" in finding.text
    assert len(stats["items_by_epoch"]) == 3
    for epoch, items in stats["items_by_epoch"].items():
        assert f"epoch {epoch}: {items}" in finding.text


def test_rows_keep_long_and_strange_keys_readable() -> None:
    rows, count = np.zeros(2, ENTRY), np.zeros(1, np.int64)
    found = Found(rows, count)
    found.add(0, 1, 2, b"\xff\x00" + b"k" * 300, StallscopeError("what " * 100))
    found.add(1, 1, 3, b"", StallscopeError("short"))
    found.settle(0, 9)
    assert rows["used"].tolist() == [9, 3]
    assert rows["key"][1] == b"?"
    assert rows["key"][0].startswith(rb"'\\xff")
    with pytest.raises(TooManyBadRecords, match="than a batch may"):
        found.add(1, 1, 4, b"", StallscopeError("third"))


def test_reasons_by_kind_of_error() -> None:
    assert Reason.of(DatasetCorrupt("x")) is Reason.READ
    assert Reason.of(datum.DatumSizeMismatch("x")) is Reason.DATUM


def test_the_configuration_decides() -> None:
    document = {
        "net": "x", "data": {"train": {"source": "a", "batch": 1}, "on_bad_record": "skip", "bad_record_cap": 0.25}
    }  # fmt: skip
    asked = feed_spec(validate(document))
    assert (asked.on_bad_record, asked.bad_record_cap) == ("skip", 0.25)
    assert validate({}).data.bad_record_cap == 0.001


class Torn(Source):
    """A database with a damaged block: some records cannot be read, whoever asks."""

    backend, path = "memory", "memory:torn"

    def __init__(self, records: list[bytes], torn: set[int]) -> None:
        self.records, self.torn = records, torn

    def __len__(self) -> int:
        return len(self.records)

    def key(self, index: int) -> bytes:
        return b"key-%d" % index

    def read(self, index: int) -> Record:
        if index in self.torn:
            raise DatasetCorrupt(f"{self.name} cannot be read at record {index}", found="block checksum mismatch")
        return Record(int(index), self.key(index), self.records[index], self.name)

    def identity(self) -> dict[str, Any]:
        return {"records": len(self)}

    def close(self) -> None:
        """Nothing is open."""


def test_a_record_that_the_database_cannot_give_out_is_a_bad_record() -> None:
    source = Torn([raw(picture(i, SHAPE), i) for i in range(8)], {2, 5})
    for policy in ("stop", "skip", "zero"):
        asked = FeedSpec("memory:torn", 8, on_bad_record=policy)  # type: ignore[arg-type]
        probed = probe(asked, source)
        slot = probed.layout.views(np.zeros(probed.layout.nbytes, np.uint8))
        maker = BatchMaker(asked, probed, LocalReader(source))
        if policy != "skip":  # zero keeps labels, and here there is none to keep
            with pytest.raises(DatasetCorrupt, match=r"record [25]"):
                maker.make(0, slot)
            continue
        maker.make(0, slot)
        assert not {2, 5} & set(slot.ids.tolist())
        assert slot.bad is not None
        assert slot.bad_count is not None
        found = read_rows(slot.bad, slot.bad_count)
        assert {(bad.record, bad.reason, bad.key) for bad in found} == {(2, "read", "'key-2'"), (5, "read", "'key-5'")}


@pytest.mark.parametrize("keys", ["%08d", "%08d_cat.jpg"])
def test_scribbled_pages_of_an_lmdb_cost_their_records_and_no_other(tmp_path: Path, keys: str) -> None:
    """Where keys are numbers, a record behind the damage can still be found; else the database is refused as ever."""
    names = [(keys % i).encode() for i in range(600)]
    path = write_lmdb(tmp_path / "db", [raw(picture(i, (1, 12, 12)), i % 7) for i in range(600)], names)
    file = Path(path) / "data.mdb"
    content = bytearray(file.read_bytes())
    leaves = [at for at in range(2 * 4096, len(content), 4096) if content[at + 10] == 2]
    leaves = [at for at in leaves if not any(key in content[at : at + 4096] for key in (names[0], names[-1]))]
    with LmdbSource(path) as source:
        on_page = source.locate(np.arange(600)).key_offsets // 4096 * 4096
    chosen = random.Random(1).sample(leaves, 5)
    lost = set(np.flatnonzero(np.isin(on_page, chosen)).tolist())
    for at in chosen:
        content[at : at + 16] = b"\xee" * 16
    file.write_bytes(content)
    asked = FeedSpec(path, 20, on_bad_record="skip", bad_record_cap=1.0, stop_step=30)
    with pytest.raises(DatasetCorrupt, match="is damaged"):
        Feed.from_spec(replace(asked, on_bad_record="stop"))
    if "jpg" in keys:
        with pytest.raises(DatasetCorrupt, match="--salvage OUT saves what is sound"):
            Feed.from_spec(asked)
        return
    with Feed.from_spec(asked) as feed:
        delivered = [int(record) for batch in feed for record in batch.ids]
        listed, told = feed.state_dict()["bad_records"], feed.stats()["bad_records"]["records"]
    assert len(delivered) == 600
    assert 20 < len(lost) < 200
    assert set(delivered) == set(range(600)) - lost
    assert listed == sorted(lost)
    assert told == len(lost)


def test_records_known_from_an_earlier_part_are_counted_in_words() -> None:
    tally = Tally("skip", 0.01, 100, "a set", "train", NULL, known=[1, 2, 3])
    with pytest.raises(TooManyBadRecords) as caught:
        tally.take(40, 1, [])
    assert caught.value.found == "known before: records 1, 2, 3"
