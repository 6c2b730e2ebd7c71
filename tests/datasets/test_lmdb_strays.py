"""What is saved of an LMDB whose upper pages are gone: no value that its key never had, and told for what it is."""

import os
import random
from pathlib import Path

import lmdb
import pytest

from datasets import datum
from datasets.lmdb_pages import LmdbReader
from datasets.manifest import Tally, write_manifest
from datasets.raw import Lost, Stored
from datasets.salvage import salvage
from datasets.source import open_source
from datasets.verify import examine

PAGE = 4096
Records = dict[bytes, bytes]


def value(number: int, size: int) -> bytes:
    data = random.Random(number).randbytes(size)
    return datum.serialize(channels=1, height=1, width=size, data=data, label=number % 10)


def build(folder: Path, records: Records, a_transaction: int = 50) -> Path:
    """Written as converters do: in the order of the keys, in many transactions."""
    items = sorted(records.items())
    with lmdb.open(str(folder), map_size=1 << 28) as env:
        for start in range(0, len(items), a_transaction):
            with env.begin(write=True) as transaction:
                for key, stored in items[start : start + a_transaction]:
                    transaction.put(key, stored, append=True)
    (folder / "lock.mdb").unlink()
    return folder


def cut(folder: Path, share: float) -> None:
    file = folder / "data.mdb"
    os.truncate(file, max(2, int(file.stat().st_size * share) // PAGE) * PAGE)


def scribble(folder: Path, number: int) -> None:
    with open(folder / "data.mdb", "r+b") as file:
        file.seek(number * PAGE)
        file.write(b"\xee" * 16)


def root_of(folder: Path) -> int:
    return LmdbReader(str(folder))._tree.root


def scan(folder: Path) -> tuple[list[Stored], list[Lost]]:
    found = list(LmdbReader(str(folder)).scan())
    return [item for item in found if isinstance(item, Stored)], [item for item in found if isinstance(item, Lost)]


@pytest.mark.parametrize("size", [300, 6000])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_what_lies_before_the_cut_is_saved_though_its_root_is_gone(tmp_path: Path, share: float, size: int) -> None:
    records = {b"%08d" % i: value(i, size) for i in range(600)}
    folder = build(tmp_path / "db", records)
    cut(folder, share)
    saved = salvage(LmdbReader(str(folder)), tmp_path / "out")
    with open_source(tmp_path / "out") as source:
        read = {record.key: record.value for record in source.read_many(range(len(source)))}
    assert read.items() <= records.items()
    assert len(read) > 600 * (share - 0.12)
    assert "cut off" in saved["damage"][0]["reason"]
    assert saved["salvaged"]["lost"] == 600 - len(read)
    strays = sum(item.stray for item in scan(folder)[0])
    told = f"{strays} records lie on pages that nothing leads to any more"
    assert [line.startswith(told) for line in saved["warnings"][1:]] == [True] * (strays > 0)


def test_a_manifest_tells_that_nothing_is_of_an_older_state(tmp_path: Path) -> None:
    records = {b"%08d" % i: value(i, 300) for i in range(600)}
    folder = build(tmp_path / "db", records)
    tally = Tally()
    for key, stored in records.items():
        tally.add(key, stored, (1, 1, 300), 0, False)
    write_manifest(folder, tally.manifest(backend="lmdb"), tally.crcs)
    cut(folder, 0.5)
    document = examine(LmdbReader(str(folder)))
    assert 200 < document["sound"] < 400
    assert len(document["bad"]) == 600 - document["sound"]
    assert document["warnings"] == []


def test_a_root_that_is_damaged_costs_nothing_but_trust(tmp_path: Path) -> None:
    records = {b"%08d" % i: value(i, 700) for i in range(400)}
    folder = build(tmp_path / "db", records)
    scribble(folder, root_of(folder))
    stored, lost = scan(folder)
    assert {item.key: item.value for item in stored} == records
    assert [item.key for item in stored] == sorted(records)
    assert all(item.stray and not item.doubt for item in stored)
    assert [item.place for item in lost] == [f"page {root_of(folder)}"]


@pytest.mark.parametrize("seed", range(12))
def test_a_value_is_one_that_its_key_had_and_keys_of_sound_pages_do_not_come_back(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    history: dict[bytes, set[bytes]] = {}
    now: Records = {}
    with lmdb.open(str(tmp_path), map_size=1 << 28) as env:
        for turn in range(30):
            with env.begin(write=True) as transaction:
                for _ in range(chance.randrange(1, 40)):
                    key = b"%04d" % chance.randrange(400)
                    if chance.random() < 0.2:
                        transaction.delete(key)
                        now.pop(key, None)
                    else:
                        stored = value(turn * 1000 + int(key), chance.choice((10, 500, 5000)))
                        transaction.put(key, stored)
                        history.setdefault(key, set()).add(stored)
                        now[key] = stored
    assert {item.key: item.value for item in scan(tmp_path)[0]} == now
    if seed % 2:
        cut(tmp_path, chance.uniform(0.1, 0.95))
    else:
        scribble(tmp_path, root_of(tmp_path))
    stored, lost = scan(tmp_path)
    keys = [item.key for item in stored]
    assert keys == sorted(set(keys))
    for item in stored:
        if item.stray:
            # A database that was rewritten uses the pages of large values anew: the warning says so.
            assert item.value in (history[item.key] if len(item.value) < 2000 else set().union(*history.values()))
        elif not item.doubt:
            assert now[item.key] == item.value
    if set(now) - set(keys):
        assert lost


def test_files_of_several_databases_are_left_to_what_leads_to_them(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), map_size=1 << 26, max_dbs=2) as env:
        for name in (b"one", b"two"):
            database = env.open_db(name)
            for start in range(0, 200, 20):
                with env.begin(write=True, db=database) as transaction:
                    for i in range(start, start + 20):
                        transaction.put(b"%08d" % i, value(i, 300))
    reader = LmdbReader(str(tmp_path), "one")
    scribble(tmp_path, reader._tree.root)
    found = list(reader.scan())
    assert not any(isinstance(item, Stored) for item in found)
    assert any(isinstance(item, Lost) for item in found)


def test_a_sound_database_has_no_strays(tmp_path: Path) -> None:
    folder = build(tmp_path / "db", {b"%08d" % i: value(i, 300) for i in range(200)})
    stored, lost = scan(folder)
    assert len(stored) == 200
    assert lost == []
    assert not any(item.stray for item in stored)
