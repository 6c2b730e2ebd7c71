"""Small databases to damage, and the check of what is left of them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import lmdb
import plyvel

from datasets import datum, manifest, raw, verify

Records = dict[bytes, bytes]
PAGE = 4096


def raw_records(count: int, big_every: int = 3, key: str = "%08d") -> Records:
    """Raw Datum records; every ``big_every``-th has a value on overflow pages of its own."""
    draw = random.Random(1)
    made = {}
    for index in range(count):
        shape = (3, 30, 31) if index % big_every == 0 else (1, 7, 9)
        data = draw.randbytes(shape[0] * shape[1] * shape[2])
        channels, height, width = shape
        made[(key % index).encode()] = datum.serialize(
            channels=channels, height=height, width=width, data=data, label=index % 10
        )
    return made


def write_lmdb(folder: Path, records: Records, db: bytes | None = None) -> Path:
    with lmdb.open(str(folder), map_size=64 << 20, lock=False, max_dbs=4) as env:
        handle = env.open_db(db)
        with env.begin(db=handle, write=True) as txn:
            for key, value in records.items():
                txn.put(key, value)
    return folder


def write_leveldb(folder: Path, records: Records, **options: object) -> Path:
    with plyvel.DB(str(folder), create_if_missing=True, **options) as db:
        for key, value in records.items():
            db.put(key, value)
    for name in ("LOCK", "LOG"):
        (folder / name).unlink()
    return folder


def write_manifest(folder: Path, records: Records, backend: str = "lmdb") -> None:
    tally = manifest.Tally()
    for key, value in sorted(records.items()):
        tally.add(key, value, (1, 1, 1), 0, False)
    manifest.write_manifest(folder, tally.manifest(backend=backend), tally.crcs)


def examine(folder: Path, sound: Records | None = None) -> dict:
    def keep(seen: verify.Seen) -> None:
        if sound is not None:
            sound[seen.item.key] = seen.item.value

    document = verify.examine(raw.open_raw(str(folder)), keep)
    json.dumps(document, allow_nan=False)
    return document


def change(folder: Path, at: int, new: bytes) -> None:
    file = folder / "data.mdb" if folder.is_dir() else folder
    content = bytearray(file.read_bytes())
    content[at : at + len(new)] = new
    file.write_bytes(content)


def pages(folder: Path, kind: int) -> list[int]:
    """Numbers of the pages with this flag (1 branch, 2 leaf, 4 overflow) on which the newer tree stands."""
    content = (folder / "data.mdb").read_bytes()
    found, number = [], 2
    while number < len(content) // PAGE:
        flags = int.from_bytes(content[number * PAGE + 10 : number * PAGE + 12], "little")
        if flags == kind:
            found.append(number)
        count = int.from_bytes(content[number * PAGE + 12 : number * PAGE + 16], "little") if flags == 4 else 1
        number += count
    return found


def relocate(file: Path, pages: int) -> None:
    """Move all pages but the meta pages of an LMDB ``pages`` further out, over a hole in the file. Free pages are
    forgotten."""
    content = bytearray(file.read_bytes())

    def add(at: int, size: int) -> None:
        number = int.from_bytes(content[at : at + size], "little")
        if number != 2 ** (8 * size) - 1:  # no page
            content[at : at + size] = (number + pages).to_bytes(size, "little")

    number = 2
    while number < len(content) // PAGE:
        base = number * PAGE
        add(base, 8)
        flags = int.from_bytes(content[base + 10 : base + 12], "little")
        if flags & 4:
            number += int.from_bytes(content[base + 12 : base + 16], "little")
            continue
        lower = int.from_bytes(content[base + 12 : base + 14], "little")
        for slot in range(16, lower, 2):
            node = base + int.from_bytes(content[base + slot : base + slot + 2], "little")
            key_size = int.from_bytes(content[node + 6 : node + 8], "little")
            if flags & 1:
                add(node, 6)
            elif content[node + 4] & 1:
                add(node + 8 + key_size, 8)
        number += 1
    for meta in (0, PAGE):
        content[meta + 80 : meta + 88] = b"\xff" * 8  # root of the free list
        content[meta + 56 : meta + 80] = bytes(24)
        content[meta + 48 : meta + 56] = bytes(8)
        add(meta + 128, 8)
        add(meta + 136, 8)
        content[meta + 32 : meta + 40] = ((pages * PAGE) + (64 << 20)).to_bytes(8, "little")
    with open(file, "r+b") as out:
        out.write(content[: 2 * PAGE])
        out.seek((pages + 2) * PAGE)
        out.write(content[2 * PAGE :])
        out.seek(2 * PAGE)
        out.write(bytes(min(len(content) - 2 * PAGE, pages * PAGE)))
