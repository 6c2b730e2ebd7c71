"""Damaged pages of an LMDB are refused before its library, which would end the process, gets to see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from datasets import datum
from datasets.errors import DatasetCorrupt
from datasets.lmdb_pages import LmdbReader
from datasets.raw import Lost
from datasets.source import open_source
from tests.datasets import golden
from tests.datasets.damage import PAGE, change, pages, write_lmdb

VALUE = datum.serialize(channels=1, height=10, width=10, data=bytes(100), label=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_lmdb(tmp_path / "db", {b"%08d" % place: VALUE for place in range(1000)})


@pytest.mark.parametrize("kind", ["leaf", "branch"])
@pytest.mark.parametrize("header", [bytes(16), b"\xff" * 16], ids=["zeros", "ones"])
def test_a_page_without_its_header_is_refused_and_ends_no_process(folder: Path, header: bytes, kind: str) -> None:
    page = pages(folder, 2)[5] if kind == "leaf" else pages(folder, 1)[0]
    change(folder, page * PAGE, header)

    def read() -> None:
        # Without the check: Assertion 'IS_LEAF(mp)' failed in mdb_cursor_next(), and SIGABRT.
        with pytest.raises(DatasetCorrupt) as caught:
            open_source(folder)
        told = str(caught.value)
        assert "datasets.verify" in told
        if kind == "leaf":
            assert f"page {page} is marked" in told
            assert "records before the damage, the last with the key '000" in told

    assert golden.in_child(read) == 0


def test_the_last_good_key_and_the_records_before_it(folder: Path) -> None:
    third = pages(folder, 2)[3]
    change(folder, third * PAGE + 12, b"\xff\xff")
    damage = LmdbReader(str(folder)).first_damage()
    assert damage is not None
    lost, records = damage
    assert (lost.place, lost.after) == (f"page {third}", b"%08d" % (records - 1))
    assert 0 < records < 1000


@pytest.mark.parametrize("name", golden.LMDBS)
def test_healthy_databases_pass(name: str) -> None:
    reader = LmdbReader(str(golden.DB / name))
    assert reader.first_damage() is None
    assert reader.expected == golden.manifest()[name]["n"]


def test_a_value_on_the_later_pages_of_another_is_told(tmp_path: Path) -> None:
    """Every overflow page is one record's, not the first alone."""
    folder = write_lmdb(tmp_path / "db", {b"a": b"x" * 20000, b"b": b"y" * 2500, b"c": b"z"})
    (leaf,) = pages(folder, 2)
    first, second = pages(folder, 4)
    content = (folder / "data.mdb").read_bytes()
    at = content.index(second.to_bytes(8, "little"), leaf * PAGE, (leaf + 1) * PAGE)
    change(folder, at, (first + 2).to_bytes(8, "little"))
    # It looks like an overflow page of its own, so that nothing but the sharing tells.
    change(folder, (first + 2) * PAGE, (first + 2).to_bytes(8, "little") + b"\0\0\4\0" + (1).to_bytes(4, "little"))
    told = [item for item in LmdbReader(str(folder)).scan() if isinstance(item, Lost)]
    assert [(item.key, item.reason) for item in told] == [
        (b"b", f"its value lies on page {first + 2}, which is another's")
    ]
