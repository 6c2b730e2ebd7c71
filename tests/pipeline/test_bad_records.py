"""``data.on_bad_record``: which bytes come instead, that they are the same for everybody, the cap, and the lists."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets import datum
from datasets.errors import DatasetCorrupt
from datasets.lmdb_source import LmdbSource
from datasets.order import Order
from datasets.source import Record, Source
from pipeline import ray_runtime
from pipeline.bad_records import ATTEMPTS, ENTRY, Found, Reason, Tally, TooManyBadRecords, read_rows
from pipeline.config import validate
from pipeline.feed import Feed
from pipeline.maker import BatchMaker, LocalReader, probe
from pipeline.run import run
from pipeline.settings import load
from pipeline.spec import FeedSpec, TransformSpec, feed_spec
from profiler import store
from profiler.errors import StallscopeError, UsageError
from profiler.recorder import NULL, Recorder
from tests.pipeline.build import encoded, image_file, picture, raw, write_leveldb, write_lmdb

RECORDS, BATCH, STEPS = 103, 8, 30
SHAPE = (3, 20, 24)
PINNED = Path("tests/data/golden_bad_records.json")


def values() -> dict[int, bytes]:
    """Case C15 and its relatives: the bad records by number. All but 60 have a label that can be read."""
    photo, drawing = image_file(picture(7, SHAPE)), image_file(picture(11, SHAPE), "PNG")
    return {
        5: datum.serialize(data=photo[: len(photo) // 2], label=1, encoded=True),
        17: datum.serialize(data=b"not an image, but a text file\n", label=2, encoded=True),
        40: datum.serialize(channels=3, height=4, width=5, data=b"ten bytes.", label=3),
        41: raw(picture(9, (3, 19, 24)), 4),
        60: raw(picture(8, SHAPE), None),
        77: encoded(picture(10, (1, 20, 24)), 6),
        98: datum.serialize(data=drawing[: len(drawing) // 2], label=7, encoded=True),
    }


def sound(number: int) -> bytes:
    image = picture(100 + number, SHAPE)
    if number % 3 == 0:
        return encoded(image, number % 10, "PNG")  # some photos are .png under a .jpg name: only the bytes count
    return raw(image, number % 10)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, bad = tmp_path_factory.mktemp("sets"), values()
    records = [bad.get(i) or sound(i) for i in range(RECORDS)]
    return {"lmdb": write_lmdb(folder / "lmdb", records), "leveldb": write_leveldb(folder / "leveldb", records)}


def spec(path: str, policy: str, **more: Any) -> FeedSpec:
    settings: dict[str, Any] = {"stop_step": STEPS, "depth": 4, "bad_record_cap": 0.1, **more}
    return FeedSpec(
        path, BATCH, seed=3, shuffle="full", fingerprints="step", poison=True, on_bad_record=policy,  # type: ignore[arg-type]
        transform=TransformSpec(crop=20, mirror=True, mean_value=(100.0,), scale=0.5), **settings,
    )  # fmt: skip


def zeroable(folder: Path) -> str:
    """The set without the one record that has no label: a copy."""
    bad = values()
    del bad[60]
    return write_lmdb(folder, [bad.get(i) or sound(i) for i in range(RECORDS)])


def hashes(asked: FeedSpec) -> list[dict[str, int]]:
    with Feed.from_spec(asked) as feed:
        return [batch.hashes for batch in feed]


# -- stop --------------------------------------------------------------------------------------------------------------


def test_stop_names_data_set_key_record_expected_found_and_what_to_try(sets: dict[str, str]) -> None:
    with Feed.from_spec(spec(sets["lmdb"], "stop")) as feed, pytest.raises(StallscopeError) as caught:
        list(feed)
    text = str(caught.value)
    assert sets["lmdb"] in text
    assert "_img'" in text
    assert "record " in text
    assert caught.value.hint


@pytest.mark.parametrize("bad", sorted(values()))
def test_stop_ends_at_every_kind_of_bad_record(tmp_path: Path, bad: int) -> None:
    path = write_lmdb(tmp_path / "db", [sound(0), sound(1), values()[bad], sound(3)])
    asked = FeedSpec(path, 2, stop_step=2)
    with Feed.from_spec(asked) as feed:
        assert len(next(feed)) == 2
        with pytest.raises(StallscopeError, match="record 2 ") as caught:
            next(feed)
    assert "00000002_img" in str(caught.value)
    assert caught.value.hint


# -- skip --------------------------------------------------------------------------------------------------------------


def test_a_stand_in_is_the_record_of_another_permutation_at_the_same_place(sets: dict[str, str]) -> None:
    order, bad = Order(RECORDS, seed=3), set(values())
    with Feed.from_spec(spec(sets["lmdb"], "skip")) as feed:
        for batch in feed:
            assert len(batch) == BATCH
            for i, record in enumerate(batch.ids.tolist()):
                epoch, place = divmod(batch.step * BATCH + i, RECORDS)
                wanted = int(order.records([epoch], [place])[0])
                attempts = iter(range(ATTEMPTS))
                while wanted in bad:
                    wanted = int(order.replacements(np.array([epoch]), np.array([place]), next(attempts))[0])
                assert record == wanted
                assert batch.labels[i] == record % 10
                assert int(batch.epochs[i]) == epoch


def test_stand_ins_are_made_like_any_other_sample(sets: dict[str, str]) -> None:
    """With the draws of their own number: the same record in the same epoch gives the same bytes wherever it stands."""
    seen: dict[tuple[int, int], bytes] = {}
    again = 0
    with Feed.from_spec(spec(sets["lmdb"], "skip", stop_step=60)) as feed:
        for batch in feed:
            for i in range(len(batch)):
                at = (int(batch.epochs[i]), int(batch.ids[i]))
                again += at in seen
                assert seen.setdefault(at, batch.data[i].tobytes()) == batch.data[i].tobytes()
    assert again > 5


def test_records_of_other_places_are_not_moved(sets: dict[str, str]) -> None:
    with Feed.from_spec(spec(sets["lmdb"], "skip")) as feed:
        ids = np.concatenate([batch.ids.copy() for batch in feed])
    plain = Order(RECORDS, seed=3).records(*np.divmod(np.arange(STEPS * BATCH), RECORDS))
    moved = ids != plain
    assert set(plain[moved]) == set(values())
    assert not set(ids) & set(values())


def test_the_permutations_of_stand_ins_are_pinned() -> None:
    order, places = Order(10, seed=1), np.arange(10)
    zeros = np.zeros(10, np.int64)
    table = [order.replacements(zeros + epoch, places, attempt).tolist() for epoch in (0, 1) for attempt in (0, 1)]
    assert table == json.loads(PINNED.read_text())["order"]
    assert all(sorted(row) == list(range(10)) for row in table)
    whole = Order(10, seed=1, shuffle="none")
    assert whole.replacements(zeros, places, 0).tolist() == table[0]


def test_no_stand_in_at_all_is_an_error_and_not_a_loop(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [sound(0), *(values()[17] for _ in range(30))])
    asked = FeedSpec(path, 16, stop_step=1, on_bad_record="skip", bad_record_cap=1.0)
    with Feed.from_spec(asked) as feed, pytest.raises(TooManyBadRecords) as caught:
        next(feed)
    assert "record " in str(caught.value)


# -- zero --------------------------------------------------------------------------------------------------------------


def test_zero_keeps_record_and_label_and_blanks_the_sample(tmp_path: Path) -> None:
    path = zeroable(tmp_path / "db")
    blank, bad = 0, set(values()) - {60}
    with Feed.from_spec(spec(path, "zero")) as feed:
        order = Order(RECORDS, seed=3)
        for batch in feed:
            items = np.arange(batch.step * BATCH, batch.step * BATCH + BATCH)
            assert batch.ids.tolist() == order.records(*np.divmod(items, RECORDS)).tolist()
            for i, record in enumerate(batch.ids.tolist()):
                if record in bad:
                    blank += 1
                    assert not batch.data[i].any()
                    assert batch.labels[i] == datum.parse(values()[record]).label
                else:
                    assert batch.data[i].any()
        stats = feed.stats()["bad_records"]
    assert sum(stats["items_by_epoch"].values()) == blank
    assert stats["records"] == 6


def test_zero_without_a_label_stops_and_says_why(sets: dict[str, str]) -> None:
    with Feed.from_spec(spec(sets["lmdb"], "zero")) as feed, pytest.raises(StallscopeError) as caught:
        list(feed)
    assert "record 60 (key '00000060_img')" in str(caught.value)
    assert "on_bad_record: zero" in str(caught.value)


def test_a_users_function_is_not_called_for_a_blank_sample(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [sound(1), values()[17], sound(2)])
    asked = FeedSpec(
        path, 3, stop_step=1, on_bad_record="zero", transform=TransformSpec(python="tests.pipeline.functions:halves")
    )
    with Feed.from_spec(asked) as feed:
        batch = next(feed)
        assert batch.data.shape == (3, 3, 10, 12)
        assert [bool(sample.any()) for sample in batch.data] == [True, False, True]
        assert batch.labels.tolist() == [1, 2, 2]


def test_a_failing_function_is_code_and_always_stops(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [raw(picture(i, SHAPE), i) for i in range(10)])
    asked = FeedSpec(
        path, 10, stop_step=1, on_bad_record="skip", bad_record_cap=1.0,
        transform=TransformSpec(python="tests.pipeline.functions:breaks_on_label_7"),
    )  # fmt: skip
    with Feed.from_spec(asked) as feed, pytest.raises(StallscopeError, match="seven is right out"):
        next(feed)


# -- the same for everybody --------------------------------------------------------------------------------------------


def pinned(policy: str) -> list[dict[str, int]]:
    return [{key: int(value, 16) for key, value in step.items()} for step in json.loads(PINNED.read_text())[policy]]


def stable(found: list[dict[str, int]]) -> list[dict[str, int]]:
    """The hashes that do not depend on what the image library of the day writes."""
    return [{key: step[key] for key in ("ids", "ids_set", "fill")} for step in found]


def source_for(policy: str, backend: str, sets: dict[str, str], folder: Path) -> str:
    return sets[backend] if policy == "skip" else zeroable(folder / "zero")


@pytest.mark.parametrize("policy", ["skip", "zero"])
@pytest.mark.parametrize("start", [0, 7])
def test_inline_gives_the_pinned_hashes_from_any_step(
    sets: dict[str, str], tmp_path: Path, policy: str, start: int
) -> None:
    asked = spec(source_for(policy, "lmdb", sets, tmp_path), policy, start_step=start)
    assert stable(hashes(asked)) == pinned(policy)[start:]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with ray_runtime.running(num_cpus=2):
        yield


@pytest.mark.ray
@pytest.mark.parametrize(
    ("policy", "backend", "workers"),
    [("skip", "lmdb", 1), ("skip", "lmdb", 2), ("skip", "leveldb", 2), ("zero", "lmdb", 1), ("zero", "lmdb", 2)],
)
def test_ray_gives_the_pinned_hashes(
    local_ray: None, sets: dict[str, str], tmp_path: Path, policy: str, backend: str, workers: int
) -> None:
    asked = spec(source_for(policy, backend, sets, tmp_path), policy, engine="ray", workers=workers)
    with Feed.from_spec(asked) as feed:
        found = [batch.hashes for batch in feed]
        stats = feed.stats()["bad_records"]
    assert stable(found) == pinned(policy)
    with Feed.from_spec(replace(asked, engine="inline")) as feed:
        assert [batch.hashes for batch in feed] == found
        assert feed.stats()["bad_records"] == stats


# -- the cap and the lists ---------------------------------------------------------------------------------------------


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


@pytest.mark.ray
def test_the_cap_is_judged_in_strict_order_whoever_made_the_batches(local_ray: None, sets: dict[str, str]) -> None:
    texts = []
    for engine in ("inline", "ray"):
        asked = spec(sets["lmdb"], "skip", bad_record_cap=0.04, engine=engine, workers=2)
        with Feed.from_spec(asked) as feed, pytest.raises(TooManyBadRecords) as caught:
            list(feed)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


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


# -- a whole job -------------------------------------------------------------------------------------------------------

_NET = """
layer {{ name: "d" type: "Data" top: "data" top: "label" data_param {{ source: "{path}" batch_size: 8 backend: LMDB }}
  transform_param {{ crop_size: 20 mirror: true scale: 0.004 }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param {{ num_output: 10 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }}
"""


def test_a_job_that_skips_resumes_to_the_same_bits_and_reports_the_keys(sets: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "net.prototxt").write_text(_NET.format(path=sets["lmdb"]))
    (tmp_path / "solver.prototxt").write_text('net: "net.prototxt" base_lr: 0.001 lr_policy: "fixed" random_seed: 1\n')

    def train(folder: str, iterations: int, **more: str) -> store.Run:
        flags = {
            "solver": str(tmp_path / "solver.prototxt"), "run.folder": str(tmp_path / folder), "feed.engine": "inline",
            "run.iterations": str(iterations), "run.log_level": "error", "profile.samplers_hz": "0",
            "device.backend": "numpy", "data.on_bad_record": "skip", "data.bad_record_cap": "0.1", **more,
        }  # fmt: skip
        assert run(load(None, [f"--{key}={value}" for key, value in flags.items()])) == 0
        return store.load_run(tmp_path / folder)

    whole = train("whole", 20)
    train("parts", 10)
    parts = train("parts", 20, **{"run.if_exists": "resume"})
    weights = [(tmp_path / name / "snapshots" / "iter_20.caffemodel").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]
    assert parts.manifest["feed"]["bad_records"]["records"] == whole.manifest["feed"]["bad_records"]["records"] == 7
    for done in (whole, parts):
        notes = [note["record"] for note in done.notes if note["note"] == "bad_record"]
        assert sorted(notes) == sorted(values())  # once each, also where a resume went on
    text = json.loads((tmp_path / "whole" / "report.json").read_text())["findings"]
    assert any("7 records of the TRAIN set could not be used" in finding["text"] for finding in text)
    assert "00000017_img" in (tmp_path / "whole" / "report.html").read_text()
    with pytest.raises(UsageError, match="on_bad_record"):
        train("parts", 30, **{"run.if_exists": "resume", "data.on_bad_record": "stop"})


def test_records_known_from_an_earlier_part_are_counted_in_words() -> None:
    tally = Tally("skip", 0.01, 100, "a set", "train", NULL, known=[1, 2, 3])
    with pytest.raises(TooManyBadRecords) as caught:
        tally.take(40, 1, [])
    assert caught.value.found == "known before: records 1, 2, 3"
