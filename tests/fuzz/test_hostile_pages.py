"""Pages of an LMDB with anything written over them: named errors or records, never a crash, a hang or much memory."""

from __future__ import annotations

import resource
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.datasets.golden import in_child
from tests.fuzz import pages

BYTE = st.integers(0, 255)
CHANGES = st.tuples(BYTE, BYTE, BYTE, BYTE, BYTE, st.sampled_from([0, 1, 2, 127, 255]) | BYTE, BYTE)


@settings(max_examples=60, deadline=None)
@given(st.lists(CHANGES, max_size=12).map(lambda changes: bytes(sum(changes, ()))), st.binary(max_size=2))
def test_whatever_was_written_over_its_pages(data: bytes, cut: bytes) -> None:
    pages.one_input(data + (cut if len(cut) == 2 else b""))


@pytest.mark.long
@pytest.mark.parametrize("number", range(5))
def test_each_byte_of_headers_and_pointers_with_the_values_that_hurt(number: int) -> None:
    """Of the first pages all that is not a record, one byte after another, in a child with bounded memory."""

    def all_of_them() -> None:
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for page in range(8):
            for kind, places in ((0, 24), (2, 3), (3, 8)):
                for place in range(places):
                    for new in (0, 1, 127, 255):
                        low, high = (place, 0) if kind != 3 else (0, place)
                        pages.one_input(bytes([number, page, kind, low, high, new, 0]))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - taken < 256 << 10, "kilobytes"

    assert in_child(all_of_them) == 0


def test_the_files_are_sound_before_they_are_changed() -> None:
    for number, (db, content) in enumerate(pages.files()):
        assert pages.changed(bytes([number])) == (db, content)
        pages.one_input(bytes([number]))


def _numbers_of_pages(content: bytes) -> list[int]:
    """Where page numbers of 64 bits lie: roots in both meta pages, and those of values on pages of their own."""
    found = [128, pages.PAGE + 128]
    for base in range(2 * pages.PAGE, len(content), pages.PAGE):
        own, _, flags, lower = struct.unpack_from("<QHHH", content, base)
        leaf = own == base // pages.PAGE and flags == 2
        for pointer in range(base + 16, base + lower, 2) if leaf else ():
            node = base + int.from_bytes(content[pointer : pointer + 2], "little")
            if content[node + 4] & 1:
                found.append(node + 8 + int.from_bytes(content[node + 6 : node + 8], "little"))
    return found


@pytest.mark.parametrize("page", [1 << 31, (1 << 51) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("number", range(5))
def test_numbers_of_pages_that_no_offset_can_hold(number: int, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    db, content = pages.files()[number]
    places = _numbers_of_pages(content)
    for last in (None, (1 << 64) - 1):  # the last page that the index knows, as it is and damaged too
        for place in {places[0], places[1], *places[2:6]}:
            made = bytearray(content)
            for at in (place, *(() if last is None else (136, pages.PAGE + 136))):
                made[at : at + 8] = (page if at == place else last).to_bytes(8, "little")
            monkeypatch.setattr(pages, "changed", lambda _, made=bytes(made): (db, made))
            pages.one_input(b"")
