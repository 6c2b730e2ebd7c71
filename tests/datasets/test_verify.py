"""The check of whole data sets on healthy databases and on every kind of damage."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import plyvel
import pytest
from PIL import Image

from datasets import datum, manifest, raw, threads, verify
from datasets.errors import (
    CodecMissing,
    DatasetChanged,
    ManifestMismatch,
    NotADataset,
    SourceMissing,
    WrongBackend,
)
from datasets.source import open_source
from profiler.errors import UsageError
from tests.datasets import golden
from tests.datasets.damage import (
    PAGE,
    Records,
    change,
    examine,
    pages,
    raw_records,
    write_leveldb,
    write_lmdb,
    write_manifest,
)


@pytest.mark.parametrize("name", golden.LMDBS + golden.LEVELDBS)
def test_golden_databases_are_sound_and_left_alone(tmp_path: Path, name: str) -> None:
    folder = golden.copy(name, tmp_path)
    before = golden.snapshot(tmp_path)
    sound: Records = {}
    document = examine(folder, sound)
    assert verify.fine(document)
    assert document["records"] == document["sound"] == golden.manifest()[name]["n"]
    assert document["schema"] == 1
    assert document["backend"] == name.rsplit("_", 1)[1]
    with open_source(folder) as source:
        assert sound == {record.key: record.value for record in source.read_many(range(len(source)))}
    assert golden.snapshot(tmp_path) == before


def test_pages_give_what_lmdb_gives(tmp_path: Path) -> None:
    draw = random.Random(3)
    made = {
        draw.randbytes(draw.randrange(1, 500)): draw.randbytes(draw.choice([0, 1, 900, 3000, 9000]))
        for _ in range(3000)
    }
    folder = write_lmdb(tmp_path / "db", made)
    with lmdb.open(str(folder), lock=False, map_size=64 << 20) as env, env.begin(write=True) as txn:
        assert env.stat()["depth"] >= 3
        for key in sorted(made)[::3]:  # free pages and half-empty ones
            txn.delete(key)
            del made[key]
    read = list(raw.open_raw(str(folder)).scan())
    assert [(item.key, item.value, item.doubt) for item in read] == [(key, made[key], "") for key in sorted(made)]


def test_a_single_file_a_named_database_and_an_empty_one(tmp_path: Path, records: Records) -> None:
    write_lmdb(tmp_path / "named", records, db=b"train")
    reader = raw.open_raw(str(tmp_path / "named"), db="train")
    assert len(verify.examine(reader)["bad"]) == 0
    assert reader.expected == 2000
    document = examine(tmp_path / "named")
    assert [(entry["key"], "name it with --db" in entry["reason"]) for entry in document["bad"]] == [("train", True)]
    with pytest.raises(NotADataset, match=r"holds no database named 'test'(.|\n)*'train'"):
        raw.open_raw(str(tmp_path / "named"), db="test")
    os.rename(write_lmdb(tmp_path / "db", records) / "data.mdb", tmp_path / "single")
    assert examine(tmp_path / "single")["sound"] == 2000
    document = examine(write_lmdb(tmp_path / "empty", {}))
    assert (document["records"], verify.fine(document), document["warnings"]) == (0, True, ["there are no records"])


def test_memory_is_verified_too() -> None:
    document = verify.examine(raw.open_raw("memory:records=70,shape=3x8x8,encoding=jpeg"))
    assert (document["sound"], document["warnings"]) == (70, [])


# Damage to an LMDB -------------------------------------------------------------------------------------------------


def test_scribbles_on_page_headers_lose_those_pages_and_no_more(lmdb_folder: Path, records: Records) -> None:
    draw = random.Random(1)
    hit = draw.sample(pages(lmdb_folder, 2), 20)
    for page in hit:
        change(lmdb_folder, page * PAGE, draw.randbytes(16))
    sound: Records = {}
    document = examine(lmdb_folder, sound)
    assert {entry["place"] for entry in document["damage"]} == {f"page {page}" for page in hit}
    assert 0 < document["sound"] == document["records"] < document["expected"] == 2000
    assert sound == {key: records[key] for key in sound}
    kept = sorted(sound)
    assert all(entry["after"] is None or entry["after"].encode() in kept for entry in document["damage"])


def test_scribbles_inside_raw_pixels_are_seen_only_with_a_manifest(lmdb_folder: Path, records: Records) -> None:
    draw = random.Random(1)
    for page in draw.sample(pages(lmdb_folder, 4), 20):
        change(lmdb_folder, page * PAGE + 1000, draw.randbytes(8))
    unchecked = examine(lmdb_folder)
    assert verify.fine(unchecked)
    assert any("changed pixel" in warning for warning in unchecked["warnings"])
    write_manifest(lmdb_folder, records)
    sound: Records = {}
    document = examine(lmdb_folder, sound)
    assert (document["manifest"], document["sound"], len(document["bad"])) == (True, 1980, 20)
    assert all("CRC-32" in entry["reason"] and entry["index"] == int(entry["key"]) for entry in document["bad"])
    assert all(records[key] == value for key, value in sound.items())


def test_scribbles_inside_jpeg_files_are_seen_where_the_decoder_can(tmp_path: Path) -> None:
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 255, (60, 60, 3), np.uint8))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=90)
    value = datum.serialize(data=buffer.getvalue(), label=1, encoded=True)
    folder = write_lmdb(tmp_path / "db", {b"%08d" % index: value for index in range(30)})
    for page in pages(folder, 4)[:10]:
        change(folder, page * PAGE + 16 + len(value) // 2, b"\xff\xd9")  # an early end
    document = examine(folder)
    assert [entry["key"] for entry in document["bad"]] == [f"{index:08d}" for index in range(10)]
    assert all("JPEG" in entry["reason"] for entry in document["bad"])


@pytest.mark.parametrize("with_manifest", [False, True])
def test_a_damaged_header_of_an_overflow_page_puts_its_value_in_doubt(
    lmdb_folder: Path, records: Records, with_manifest: bool
) -> None:
    page = pages(lmdb_folder, 4)[5]
    change(lmdb_folder, page * PAGE, b"\x99" * 8)
    if with_manifest:  # the checksum proves the value
        write_manifest(lmdb_folder, records)
    document = examine(lmdb_folder)
    (damage,) = document["damage"]
    assert damage["reason"] == f"overflow page {page} has a damaged header"
    assert document["sound"] == (2000 if with_manifest else 1999)
    assert [entry["key"] for entry in document["bad"]] == ([] if with_manifest else ["00000015"])


def test_a_changed_key_is_noticed(lmdb_folder: Path, records: Records) -> None:
    content = (lmdb_folder / "data.mdb").read_bytes()
    change(lmdb_folder, content.index(b"00000100\x08"), b"99")  # the key, and the first byte of its Datum
    document = examine(lmdb_folder)
    (entry,) = document["bad"]
    assert (entry["key"], "not in order" in entry["reason"]) == ("99000100", True)
    assert document["sound"] == 1999
    write_manifest(lmdb_folder, records)
    document = examine(lmdb_folder)
    assert [(entry["key"], entry["index"]) for entry in document["bad"]] == [("99000100", 100)]


def test_a_branch_that_leads_astray(lmdb_folder: Path) -> None:
    (root,) = pages(lmdb_folder, 1)
    content = (lmdb_folder / "data.mdb").read_bytes()[root * PAGE : (root + 1) * PAGE]
    nodes = struct.unpack_from("<9H", content, 16)
    change(lmdb_folder, root * PAGE + nodes[3], (2**20).to_bytes(6, "little"))  # beyond the file
    change(lmdb_folder, root * PAGE + nodes[5], content[nodes[4] : nodes[4] + 6])  # to the page before
    change(lmdb_folder, root * PAGE + nodes[8] + 8, b"\0")  # the key that divides
    document = examine(lmdb_folder)
    reasons = " ".join(entry["reason"] for entry in document["damage"])
    assert "is not one of the pages 2 to" in reasons
    assert "is referenced twice" in reasons
    assert "keys that divide the pages below it are not in order" in reasons
    assert 1000 < document["sound"] < 2000
    assert document["bad"] == []


@pytest.mark.parametrize("share", [0.95, 0.5, 0.1])
def test_a_truncated_lmdb_is_read_up_to_where_it_goes(lmdb_folder: Path, records: Records, share: float) -> None:
    file = lmdb_folder / "data.mdb"
    os.truncate(file, int(file.stat().st_size * share) // PAGE * PAGE)
    sound: Records = {}
    document = examine(lmdb_folder, sound)
    assert not verify.fine(document)
    assert document["damage"][0]["place"] == "the file"
    assert "cut off" in document["damage"][0]["reason"]
    assert 0 < document["sound"] < 2000 * share + 100
    assert sound == {key: records[key] for key in sound}
    write_manifest(lmdb_folder, records)
    document = examine(lmdb_folder)
    assert document["sound"] + len(document["bad"]) == 2000
    assert [entry["index"] for entry in document["bad"]] == [int(entry["key"]) for entry in document["bad"]]
    assert document["bad"][-1]["reason"] == "missing: the manifest counts it"


def test_random_damage_never_ends_a_check_and_never_passes(tmp_path: Path, records: Records) -> None:
    content = write_lmdb(tmp_path / "db", records).joinpath("data.mdb").read_bytes()
    write_manifest(tmp_path / "db", records)
    for seed in range(25):
        draw = random.Random(seed)
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 5, 20])):
            at = draw.randrange(2 * PAGE, len(damaged))
            at = at // PAGE * PAGE + (draw.randrange(300) if seed % 2 else 0)
            damaged[at : at + 12] = draw.randbytes(12)[: len(damaged) - at]
        (tmp_path / "db" / "data.mdb").write_bytes(
            damaged[: draw.randrange(3 * PAGE, len(damaged))] if seed % 5 == 0 else damaged
        )
        sound: Records = {}
        document = examine(tmp_path / "db", sound)
        assert all(records[key] == value for key, value in sound.items())
        assert len(sound) == document["sound"]
        assert document["sound"] + len(document["bad"]) >= 2000
        assert document["sound"] == 2000 or not verify.fine(document)


def test_one_meta_page_is_enough_and_none_is_refused(lmdb_folder: Path) -> None:
    change(lmdb_folder, 0, b"\x55" * PAGE)  # opened as Caffe would: data.mdb in a folder
    document = examine(lmdb_folder)
    assert (document["sound"], document["records"]) in {(2000, 2000), (0, 0)}  # the newer or the older of the two
    assert not verify.fine(document), "what the last commit wrote may be missing"
    assert "meta page 0" in json.dumps(document["damage"])
    change(lmdb_folder, PAGE, b"\x55" * PAGE)
    with pytest.raises(NotADataset, match="no readable meta page"):
        examine(lmdb_folder)


def test_a_writer_at_work_is_noticed(lmdb_folder: Path) -> None:
    reader = raw.open_raw(str(lmdb_folder))
    items = reader.scan()
    next(items)
    write_lmdb(lmdb_folder, {b"new": b"1"})
    with pytest.raises(DatasetChanged, match="was written to while it was read"):
        list(items)


def test_several_values_a_key_are_refused(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "db"), lock=False, max_dbs=1) as env:
        env.open_db(b"twice", dupsort=True)
    with pytest.raises(NotADataset, match="several values per key"):
        raw.open_raw(str(tmp_path / "db"), db="twice")


# Damage to a LevelDB -----------------------------------------------------------------------------------------------


@pytest.fixture(params=[None, "snappy"])
def leveldb_folder(tmp_path: Path, records: Records, request: pytest.FixtureRequest) -> Path:
    return write_leveldb(tmp_path / "db", records, compression=request.param, write_buffer_size=1 << 18)


def test_a_changed_block_is_named_and_the_others_are_read(leveldb_folder: Path, records: Records) -> None:
    table = sorted(leveldb_folder.glob("*.ldb"))[1]
    at = table.stat().st_size // 3
    change(table, at, bytes(byte ^ 0xFF for byte in table.read_bytes()[at : at + 8]))
    before = golden.snapshot(leveldb_folder)
    sound: Records = {}
    document = examine(leveldb_folder, sound)
    (damage,) = document["damage"]
    assert damage["place"].startswith(f"{table.name}, byte ")
    assert "block checksum mismatch" in damage["reason"]
    gone = sorted(set(records) - set(sound))
    assert 0 < len(gone) < 20
    assert int(damage["after"]) + 1 == int(gone[0])  # the last good key
    assert sound == {key: records[key] for key in sound}
    assert golden.snapshot(leveldb_folder) == before
    write_manifest(leveldb_folder, records, "leveldb")
    assert [entry["key"].encode() for entry in examine(leveldb_folder)["bad"]] == gone


def test_a_table_without_its_end_or_gone_costs_that_table(leveldb_folder: Path, records: Records) -> None:
    tables = sorted(leveldb_folder.glob("*.ldb"))
    size = tables[0].stat().st_size
    os.truncate(tables[0], size // 2)
    tables[2].unlink()
    index_of_4 = tables[4].stat().st_size - 100
    change(tables[4], index_of_4, b"\0\1\2\3")
    sound: Records = {}
    document = examine(leveldb_folder, sound)
    told = "\n".join(f"{entry['place']}: {entry['reason']}" for entry in document["damage"])
    assert f"{tables[0].name} has not the size" in told
    assert f"{size // 2} bytes of {size} bytes" in told
    assert f"{tables[2].name}, which its manifest names, is missing" in told
    assert f"{tables[4].name}, byte" in told
    assert "(keys '0" in told  # of a table of which nothing is left
    assert 500 < document["sound"] < 2000
    assert sound == {key: records[key] for key in sound}


@pytest.mark.parametrize("with_manifest", [False, True])
def test_a_cut_log_is_no_silent_loss(tmp_path: Path, records: Records, with_manifest: bool) -> None:
    folder = write_leveldb(tmp_path / "db", records)
    (log,) = folder.glob("*.log")
    os.truncate(log, log.stat().st_size // 2)
    if with_manifest:
        write_manifest(folder, records, "leveldb")
    document = examine(folder)
    (damage,) = document["damage"]
    assert damage["place"].startswith(log.name)
    assert "ends inside a record" in damage["reason"]
    read = document["records"]
    assert 500 < read < 1500
    assert damage["after"] == f"{read - 1:08d}"
    assert len(document["bad"]) == (2000 - read if with_manifest else 0)


def test_a_changed_log_loses_what_fails_its_checksum(tmp_path: Path, records: Records) -> None:
    folder = write_leveldb(tmp_path / "db", records)
    (log,) = folder.glob("*.log")
    change(log, log.stat().st_size // 2, b"scribble")
    sound: Records = {}
    document = examine(folder, sound)
    assert any("checksum mismatch in the write-ahead log" in entry["reason"] for entry in document["damage"])
    assert 500 < document["sound"] < 2000
    assert sound == {key: records[key] for key in sound}


def test_a_build_without_snappy_is_not_taken_for_damage(tmp_path: Path, records: Records, monkeypatch) -> None:
    folder = write_leveldb(tmp_path / "db", records, compression="snappy", write_buffer_size=1 << 18)

    def fail(*arguments: object, **options: object) -> object:
        raise plyvel.CorruptionError(b"Corruption: corrupted compressed block contents")

    monkeypatch.setattr("datasets.leveldb_raw._records", fail)
    monkeypatch.setattr("datasets.leveldb_library.has_snappy", lambda: False)
    with pytest.raises(CodecMissing, match=r"this build of plyvel lacks Snappy(.|\n)*checksum is right"):
        examine(folder)
    # And where the first look saw no such block.
    monkeypatch.setattr("datasets.leveldb_raw.refuse_without_codec", lambda name, tables: None)
    with pytest.raises(CodecMissing, match=r"is sound, but this build of plyvel lacks Snappy(.|\n)*checksum is right"):
        examine(folder)


# Records -----------------------------------------------------------------------------------------------------------


def file(kind: str, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 20, 3), np.uint8)).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def test_every_kind_of_bad_record_is_told_apart(tmp_path: Path) -> None:
    jpeg, png = file("JPEG"), file("PNG")
    rotten = bytearray(png)
    rotten[60] ^= 1
    items = {
        b"00 raw": datum.serialize(channels=1, height=2, width=2, data=b"abcd", label=1, encoded=False),
        b"01 jpeg": datum.serialize(data=jpeg, label=1, encoded=True),
        b"02 jpeg without its flag": datum.serialize(data=jpeg, label=1),
        b"03 raw with the flag": datum.serialize(channels=1, height=2, width=2, data=b"abcd", label=1, encoded=True),
        b"04 cut jpeg": datum.serialize(data=jpeg[: len(jpeg) // 2], label=1, encoded=True),
        b"05 text": datum.serialize(data=b"404 not found", label=1, encoded=True),
        b"06 palette": datum.serialize(data=file("PNG", "P"), label=1, encoded=True),
        b"07 rotten png": datum.serialize(data=bytes(rotten), label=1, encoded=True),
        b"08 too few bytes": datum.serialize(channels=3, height=4, width=5, data=b"0123456789", label=1),
        b"09 not a datum": b"\x22\x7fshort",
        b"10 nothing": b"",
        b"11 png named jpg": datum.serialize(data=png, label=1, encoded=True),
        b"12 16 bit": datum.serialize(data=file16(), label=1, encoded=True),
        b"13 no label": datum.serialize(data=png, encoded=True),
    }
    document = examine(write_lmdb(tmp_path / "db", items))
    told = {entry["key"]: entry["reason"] for entry in document["bad"]}
    assert {key[:2] for key in told} == {"03", "04", "05", "07", "08", "09", "10", "12"}
    assert "exactly the 1x2x2 raw pixels" in told["03 raw with the flag"]
    assert "JPEG" in told["04 cut jpeg"]
    assert "beginning 34 30 34" in told["05 text"]
    assert "PNG" in told["07 rotten png"]
    assert "expected 60 bytes for channels 3 x height 4 x width 5; found 10 bytes" in told["08 too few bytes"]
    assert "malformed" in told["09 not a datum"]
    assert "neither data nor float_data" in told["10 nothing"]
    assert "not an 8-bit image" in told["12 16 bit"]
    assert all(not reason.startswith("the record") for reason in told.values())
    assert [entry["index"] for entry in document["bad"]] == [3, 4, 5, 7, 8, 9, 10, 12]
    warnings = " ".join(document["warnings"])
    for part in ("1 image files of mode P", "1 records hold image files but lack the flag", "1 records have no label"):
        assert part in warnings


def file16() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20)).save(buffer, "PNG")
    return buffer.getvalue()


def test_records_that_came_or_went_since_the_manifest(tmp_path: Path) -> None:
    told = raw_records(30, key="%08d_a.png")
    there = dict(told)
    del there[b"00000003_a.png"], there[b"00000029_a.png"]
    there[b"00000010_x.png"] = there[b"00000011_a.png"]
    folder = write_lmdb(tmp_path / "db", there)
    write_manifest(folder, told)
    document = examine(folder)
    assert document["sound"] == 28
    assert [(entry["key"], entry["index"]) for entry in document["bad"]] == [
        (None, 3), ("00000010_x.png", 11), (None, 29),
    ]  # fmt: skip
    write_manifest(folder, raw_records(5, key="%04d"))
    assert "not one record matches the manifest" in " ".join(examine(folder)["warnings"])


def test_a_manifest_that_cannot_be_used(lmdb_folder: Path, records: Records) -> None:
    write_manifest(lmdb_folder, records)
    place = manifest.checksum_path(lmdb_folder)
    place.write_bytes(place.read_bytes()[:-4])
    with pytest.raises(ManifestMismatch, match="does not fit"):
        examine(lmdb_folder)
    place.unlink()  # the count alone is of use
    document = examine(lmdb_folder)
    assert (document["manifest"], document["expected"], verify.fine(document)) == (False, 2000, True)


# The command -------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "datasets.verify", *map(str, arguments)]
    return subprocess.run(command, cwd=golden.DB.parents[2], capture_output=True, text=True, check=False)


def test_the_command_line(tmp_path: Path) -> None:
    done = run(golden.DB / "mnist_test_lmdb", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["records"] == 1000
    items = raw_records(40)
    items[b"00000007"] = b"\xff[/red]"
    folder = write_lmdb(tmp_path / "db", items)
    done = run(folder, "--salvage", tmp_path / "out", "--salvage-backend", "leveldb")
    assert (done.returncode, done.stderr) == (1, "")
    for part in ("record 7 (key '00000007'): not a Datum", "40 records read, 39 sound", "39 records:", "1 lost"):
        assert part in done.stdout
    assert "leveldb" in done.stdout


def test_a_warning_is_words_for_a_person(tmp_path: Path) -> None:
    with plyvel.DB(str(tmp_path / "db"), create_if_missing=True) as db:
        db.put(b"0", next(iter(raw_records(1).values())))
        done = run(tmp_path / "db")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"warning: LevelDB {tmp_path / 'db'} is held open by process {os.getpid()}")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (["/no/such/place"], SourceMissing, "there is no data set at /no/such/place"),
        ([golden.DB / "mnist_test_lmdb", "--backend", "leveldb"], WrongBackend, "the folder holds LMDB"),
        ([golden.DB / "mnist_test_leveldb", "--db", "x"], UsageError, "has no named databases"),
        ([golden.DB / "mnist_test_lmdb", "--force"], None, "need --salvage OUT"),
    ],
)
def test_wrong_use_ends_with_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[object], error: type[Exception] | None, text: str
) -> None:
    with pytest.raises(error or SystemExit) as caught:
        verify.main([*map(str, arguments)])
    assert text in (str(caught.value) if error else capsys.readouterr().err)


def test_results_of_threads_come_in_order_and_errors_in_their_place() -> None:
    assert list(threads.in_order(lambda item: item * 2, range(1000), batch=7)) == list(range(0, 2000, 2))

    def divide(item: int) -> float:
        return 1 / item

    results = threads.in_order(divide, [4, 2, 0, 1], batch=1)
    assert [next(results), next(results)] == [0.25, 0.5]
    with pytest.raises(ZeroDivisionError):
        next(results)
