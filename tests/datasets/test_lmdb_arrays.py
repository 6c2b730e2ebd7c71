"""What is read from a page by whole arrays is what a loop over its nodes reads, whatever lies on the page."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from datasets import lmdb_locate, lmdb_pages
from datasets.lmdb_file import LmdbFile
from datasets.lmdb_locate import cells_of
from datasets.lmdb_pages import Leaf, Pages, nodes
from tests.datasets.damage import write_lmdb


def both(monkeypatch: pytest.MonkeyPatch, call: object) -> list[object]:
    """What a call gives by a loop, and by arrays."""
    found = []
    for worth in (1 << 30, 1):
        monkeypatch.setattr(lmdb_pages, "WORTH_ARRAYS", worth)
        monkeypatch.setattr(lmdb_locate, "WORTH_ARRAYS", worth)
        found.append(call())  # type: ignore[operator]
    return found


def test_nodes_and_keys_of_pages_of_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    counted = 0
    for _ in range(400):
        count, width, page = rng.randrange(1, 60), rng.randrange(12), bytearray(rng.randbytes(4096))
        offsets = [rng.choice((rng.randrange(4200), rng.randrange(3000, 4096))) for _ in range(count)]
        for at in offsets:
            if at + 8 <= len(page) and rng.random() < 0.97:
                page[at + 6 : at + 8] = width, 0
        struct.pack_into("<HH", page, 12, 16 + 2 * count, rng.randrange(3500))
        struct.pack_into(f"<{count}H", page, 16, *offsets)
        content = bytes(page)
        one, other = both(monkeypatch, lambda content=content: nodes(content))
        assert one == other
        leaf = Leaf(3, content, one[0], b"", None, "")  # type: ignore[index]
        if leaf.places:
            counted += len(leaf.places)
            one, other = both(monkeypatch, leaf.keys)
            assert one == other
    assert counted > 2000


@pytest.mark.parametrize("size", [20, 3000], ids=["on leaves", "on pages of their own"])
def test_places_of_records_of_damaged_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int) -> None:
    folder = write_lmdb(tmp_path / "db", {b"%08d" % number: bytes(size) for number in range(700)})
    file = LmdbFile(str(folder), "db")
    meta = file.meta()
    pages, rng = Pages(file, meta), random.Random(size)
    from datasets.lmdb_tree import chosen

    leaves = [leaf for leaf in Pages(file, meta).leaves(chosen(pages, None, str(folder), "db")) if type(leaf) is Leaf]
    file.close()
    zeros = 0
    assert len(leaves) > 2
    for leaf in leaves * 20:
        page = bytearray(leaf.page)
        for _ in range(rng.randrange(12)):
            page[min(rng.choice(leaf.places) + rng.randrange(20), len(page) - 1)] = rng.randrange(256)
        there = [at for at in leaf.places if at + 8 + (page[at + 6] | page[at + 7] << 8) <= len(page)]
        changed = replace(leaf, page=bytes(page), places=there)
        one, other = both(monkeypatch, lambda changed=changed: list(cells_of(changed, meta)))
        assert one == other
        zeros += one.count(0)  # type: ignore[attr-defined]
    assert zeros > 10
