"""What is salvaged of a damaged database, and what is left alone meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from datasets import datum, manifest, raw, salvage, verify
from datasets.source import open_source
from profiler.errors import UsageError
from tests.datasets import golden
from tests.datasets.damage import (
    PAGE,
    Records,
    change,
    examine,
    pages,
    write_leveldb,
    write_lmdb,
    write_manifest,
)

# Salvage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_salvage_copies_what_is_sound(lmdb_folder: Path, records: Records, tmp_path: Path, backend: str) -> None:
    write_manifest(lmdb_folder, records)
    change(lmdb_folder, pages(lmdb_folder, 4)[7] * PAGE + 500, b"rot")
    change(lmdb_folder, pages(lmdb_folder, 2)[3] * PAGE, b"\0" * 16)
    before = golden.snapshot(lmdb_folder)
    out = tmp_path / "saved"
    document = salvage.salvage(raw.open_raw(str(lmdb_folder)), out, backend=backend)
    assert golden.snapshot(lmdb_folder) == before
    saved = document["salvaged"]
    assert (saved["path"], saved["backend"], saved["records"]) == (str(out), backend, document["sound"])
    assert saved["lost"] == 2000 - document["sound"] == len(document["bad"]) > 1
    with open_source(out) as source:
        kept = {record.key: record.value for record in source.read_many(range(len(source)))}
    lost = {entry["key"].encode() for entry in document["bad"]}
    assert kept == {key: value for key, value in records.items() if key not in lost}
    told = manifest.read_manifest(out)
    assert told is not None
    assert (told.records, told.skipped_count) == (document["sound"], saved["lost"])
    assert told.skipped[0].startswith("page ")
    assert any(line.startswith(document["bad"][0]["key"]) for line in told.skipped)
    assert told.shapes == {"1x7x9": told.shapes["1x7x9"], "3x30x31": told.shapes["3x30x31"]}
    assert verify.fine(examine(out))
    assert examine(out)["manifest"]


def test_salvage_of_a_truncated_lmdb_and_of_a_leveldb_with_a_bad_block(tmp_path: Path, records: Records) -> None:
    cut = write_lmdb(tmp_path / "cut", records)
    os.truncate(cut / "data.mdb", (cut / "data.mdb").stat().st_size // 2 // PAGE * PAGE)
    rotten = write_leveldb(tmp_path / "rotten", records, compression="snappy", write_buffer_size=1 << 18)
    table = sorted(rotten.glob("*.ldb"))[1]
    change(table, table.stat().st_size // 3, b"rot")
    for folder, least in ((cut, 500), (rotten, 1900)):
        before = golden.snapshot(folder)
        document = salvage.salvage(raw.open_raw(str(folder)), tmp_path / f"{folder.name}_saved")
        assert golden.snapshot(folder) == before
        with open_source(tmp_path / f"{folder.name}_saved") as source:
            kept = {record.key: record.value for record in source.read_many(range(len(source)))}
        assert least < len(kept) == document["salvaged"]["records"] < 2000
        assert kept == {key: records[key] for key in kept}
        told = manifest.read_manifest(tmp_path / f"{folder.name}_saved")
        assert told is not None
        assert told.skipped[0].startswith(document["damage"][0]["place"])
    assert document["backend"] == document["salvaged"]["backend"] == "leveldb"


def test_salvage_touches_neither_source_nor_strangers(lmdb_folder: Path, tmp_path: Path) -> None:
    reader = raw.open_raw(str(lmdb_folder))
    (tmp_path / "link").symlink_to(lmdb_folder)
    for out in (lmdb_folder, lmdb_folder / "inside", tmp_path / "link", tmp_path):
        with pytest.raises(UsageError, match="not apart"):
            salvage.salvage(reader, out, force=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="stays as it is"):
        salvage.salvage(reader, tmp_path / "other", force=True)
    salvage.salvage(reader, tmp_path / "saved")
    with pytest.raises(UsageError, match="exists already"):
        salvage.salvage(reader, tmp_path / "saved")
    assert salvage.salvage(reader, tmp_path / "saved", force=True)["salvaged"]["records"] == 2000


def test_nothing_sound_makes_no_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_lmdb(tmp_path / "db", {b"a": b"\xff", b"b": b"\xff"})
    assert verify.main([str(folder), "--salvage", str(tmp_path / "out")]) == 1
    assert "not one record is sound" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["db"]


def test_salvage_of_records_without_labels_and_numbers(tmp_path: Path) -> None:
    value = datum.serialize(channels=2, height=1, width=1, float_data=[1.5, 2.5])
    folder = write_lmdb(tmp_path / "db", {b"b/1": value, b"a/2": value, b"c": b"\xff"})
    document = salvage.salvage(raw.open_raw(str(folder)), tmp_path / "out")
    assert (document["salvaged"]["records"], document["salvaged"]["lost"]) == (2, 1)
    told = manifest.read_manifest(tmp_path / "out")
    assert told is not None
    assert (told.labels, told.label_range, told.key_order, told.first_key) == ({}, None, "bytes", "a/2")


def test_salvage_is_a_command_of_its_own(lmdb_folder: Path, tmp_path: Path, capsys) -> None:
    change(lmdb_folder, pages(lmdb_folder, 4)[7] * PAGE + 500, b"rot")
    assert salvage.main([str(lmdb_folder), str(tmp_path / "a")]) == verify.main(
        [str(lmdb_folder), "--salvage", str(tmp_path / "b")]
    )
    with open_source(tmp_path / "a") as one, open_source(tmp_path / "b") as other:
        assert len(one) == len(other) > 0
    with pytest.raises(UsageError, match="--force"):
        salvage.main([str(lmdb_folder), str(tmp_path / "a")])
    salvage.main([str(lmdb_folder), str(tmp_path / "a"), "--force", "--json"])
    capsys.readouterr()
    done = subprocess.run([sys.executable, "-m", "datasets.salvage", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "verify DB --salvage OUT" in " ".join(done.stdout.split())
