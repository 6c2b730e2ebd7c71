"""Pages of an LMDB with anything written over them: named errors or records, never a crash, a hang or much memory."""

from __future__ import annotations

import resource

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
