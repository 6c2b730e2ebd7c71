"""The manifest beside a database, and what it catches."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

import lmdb
import numpy as np
import pytest

from datasets import manifest
from datasets.errors import ManifestMismatch
from datasets.source import open_source
from profiler.errors import StallscopeError

RECORDS = [(f"{index:08d}".encode(), bytes([index]) * (index + 1)) for index in range(20)]


def tally_of(records: list[tuple[bytes, bytes]]) -> manifest.Tally:
    tally = manifest.Tally()
    for index, (key, value) in enumerate(records):
        tally.add(key, value, (1, 2, 3 + index % 2), index % 5 - 1, index == 3)
    return tally


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "set_lmdb"
    write(path, RECORDS)
    tally = tally_of(RECORDS)
    manifest.write_manifest(path, tally.manifest(backend="lmdb", shuffle_seed=7), tally.crcs)
    return path


def write(path: Path, records: list[tuple[bytes, bytes]]) -> None:
    with lmdb.open(str(path), map_size=1 << 20, lock=False) as env, env.begin(write=True) as transaction:
        for key, value in records:
            transaction.put(key, value)


def test_what_a_manifest_says(database: Path) -> None:
    told = manifest.read_manifest(database)
    assert told is not None
    assert (told.records, told.first_key, told.last_key) == (20, "00000000", "00000019")
    assert (told.shapes, told.encoded) == ({"1x2x3": 10, "1x2x4": 10}, 1)
    assert told.labels == {"-1": 4, "0": 4, "1": 4, "2": 4, "3": 4}
    assert (told.label_range, told.shuffle_seed, told.schema) == ((-1, 3), 7, 1)
    content = b"".join(
        len(key).to_bytes(4, "little") + key + len(value).to_bytes(4, "little") + value for key, value in RECORDS
    )
    assert told.content_sha256 == hashlib.sha256(content).hexdigest()


def test_files_lie_beside_the_database_and_nothing_else_is_left(database: Path) -> None:
    names = sorted(path.name for path in database.parent.iterdir())
    assert names == ["set_lmdb", "set_lmdb.crc32", "set_lmdb.manifest.json"]
    assert [path.name for path in database.iterdir()] == ["data.mdb"]
    stored = np.frombuffer((database.parent / "set_lmdb.crc32").read_bytes(), "<u4")
    assert stored.tolist() == [zlib.crc32(key + value) for key, value in RECORDS]
    assert manifest.read_manifest(database / "data.mdb") == manifest.read_manifest(database)


def test_no_manifest_is_none(tmp_path: Path) -> None:
    assert manifest.read_manifest(tmp_path / "nothing") is None
    assert manifest.read_checksums(tmp_path / "nothing") is None


def test_open_source_refuses_what_lost_records(database: Path) -> None:
    with open_source(database) as source:
        assert len(source) == 20
    with lmdb.open(str(database), map_size=1 << 20, lock=False) as env, env.begin(write=True) as transaction:
        transaction.delete(RECORDS[-1][0])
    with pytest.raises(ManifestMismatch, match="20 records"):
        open_source(database)


def test_checksums_that_are_cut_are_refused(database: Path) -> None:
    manifest.checksum_path(database).write_bytes(b"abc")
    with pytest.raises(ManifestMismatch, match="cut"):
        manifest.read_checksums(database)


@pytest.mark.parametrize("text", ["", "[1]", '{"records": 3}', '{"schema": 1, "records": 3}'])
def test_other_files_are_no_manifest(database: Path, text: str) -> None:
    manifest.manifest_path(database).write_text(text)
    with pytest.raises(ManifestMismatch, match="not a manifest"):
        manifest.read_manifest(database)


def test_a_newer_schema_is_refused_and_unknown_fields_are_not(database: Path) -> None:
    place = manifest.manifest_path(database)
    document = json.loads(place.read_text())
    place.write_text(json.dumps({**document, "colour": "blue"}))
    told = manifest.read_manifest(database)
    assert told is not None
    assert told.records == 20
    place.write_text(json.dumps({**document, "schema": 2}))
    with pytest.raises(ManifestMismatch, match="newer version"):
        manifest.read_manifest(database)


def test_many_labels_keep_their_range_only() -> None:
    tally = manifest.Tally()
    for label in range(1001):
        tally.add(f"{label:08d}".encode(), b"", (1, 1, 1), label, False)
    told = tally.manifest(backend="lmdb")
    assert (told.labels, told.label_range) == (None, (0, 1000))


def test_keys_must_ascend() -> None:
    tally = tally_of(RECORDS)
    with pytest.raises(ValueError, match="must ascend"):
        tally.add(RECORDS[-1][0], b"", (1, 1, 1), 0, False)


def test_a_failed_write_leaves_the_old_manifest(database: Path, monkeypatch) -> None:
    before = manifest.manifest_path(database).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest.os, "fsync", full)
    tally = tally_of(RECORDS[:3])
    with pytest.raises(StallscopeError, match="No space"):
        manifest.write_manifest(database, tally.manifest(backend="lmdb"), tally.crcs)
    assert manifest.manifest_path(database).read_bytes() == before
    assert len(list(database.parent.iterdir())) == 3
