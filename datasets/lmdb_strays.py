"""Records on pages that nothing leads to any more: what is left of an LMDB whose upper pages are cut off or damaged.

LMDB writes a page anew instead of changing it. So the root of a database that was built in many transactions lies near
the end of its file, where a cut takes it first; and old versions of pages stay in the file until their place is needed.
Which of two versions was in use cannot be told from the pages: where they differ, the record is lost. Where there is
only one, it may be older than the last commit, and a large value may lie on pages that were given to another since.
Both take records that were deleted or overwritten, which converters never do.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterator
from itertools import pairwise

from datasets.lmdb_file import BIGDATA, HEADER, KINDS, LEAF, OVERFLOW, SUBDATA, Meta, Tree
from datasets.lmdb_pages import Leaf, Pages, nodes
from datasets.raw import Lost, Stored

_Node = tuple[bytes, int, bytes, int]  # key, number of the page, the page, place of the node on it


class Strays:
    """The records of pages that no page of a damaged tree leads to, keys ascending, taken piece by piece.

    Empty where the tree is whole, and where a file holds several databases: whose a page was cannot be told then.
    """

    def __init__(self, pages: Pages, meta: Meta, tree: Tree) -> None:
        """``pages``: nothing of them was taken yet; they serve for looking round alone."""
        self._pages = Pages(pages.file, meta)
        self._ahead = 0
        self._heap: list[tuple[bytes, int, int, Leaf]] = []
        damaged, several = False, False
        for item in pages.leaves(tree):
            if isinstance(item, Lost):
                damaged = True
            else:
                several |= any(item.page[place + 4] & SUBDATA for place in item.places)
        looked_for = (damaged or pages.cut) and not several and tree == meta.main
        self._left = sorted(_left(pages)) if looked_for else []

    def before(self, key: bytes | None) -> Iterator[Stored | Lost]:
        """The records with smaller keys that were not taken yet; all that are left where ``key`` is None."""
        while (nodes := self._next(key)) is not None:
            yield from self._judge(nodes)

    def skip(self, key: bytes | None) -> None:
        """Leave out those with smaller keys: a page that is sound says what of them there was."""
        while self._next(key) is not None:
            pass

    def _next(self, key: bytes | None) -> list[_Node] | None:
        """All nodes of the smallest key, if it is smaller than ``key``."""
        while self._ahead < len(self._left) and (not self._heap or self._left[self._ahead][0] <= self._heap[0][0]):
            self._push(self._left[self._ahead][1])
            self._ahead += 1
        if not self._heap or (key is not None and self._heap[0][0] >= key):
            return None
        smallest = self._heap[0][0]
        taken: list[_Node] = []
        while self._heap and self._heap[0][0] == smallest:
            _, number, at, leaf = self._heap[0]
            taken.append((smallest, number, leaf.page, leaf.places[at]))
            if at + 1 < len(leaf.places):
                heapq.heapreplace(self._heap, (leaf.key(at + 1), number, at + 1, leaf))
            else:
                heapq.heappop(self._heap)
        return taken

    def _push(self, number: int) -> None:
        leaf = _leaf(self._pages, number)
        if leaf is not None:
            heapq.heappush(self._heap, (leaf.key(0), number, 0, leaf))

    def _judge(self, nodes: list[_Node]) -> Iterator[Stored | Lost]:
        key = nodes[0][0]
        values: dict[bytes, int] = {}
        problem = ""
        for number, page, place in {
            _told(page, place, key): (number, page, place) for _, number, page, place in nodes
        }.values():
            flags = int.from_bytes(page[place + 4 : place + 6], "little")
            value, wrong, doubt = self._pages.value(page, place, len(key), flags)
            if value is None or doubt:
                problem = f"page {number}, which nothing leads to: {wrong or doubt}"
            else:
                values.setdefault(value, number)
        if len(values) == 1:
            yield Stored(key, next(iter(values)), stray=True)
        elif values:
            numbers = " and ".join(map(str, sorted(values.values())))
            yield Lost(f"pages {numbers}", "nothing leads to them, and they hold different values of it", key)
        else:
            yield Lost("", problem, key)


def _left(pages: Pages) -> Iterator[tuple[bytes, int]]:
    """First key and number of each leaf that was not seen; pages of values are passed over."""
    size = pages.meta.page_size
    number, end = 2, min(pages.meta.last_page + 1, pages.file.size // size)
    while number < end:
        own, _, flags, count = struct.unpack("<QHHI", pages.file.read(number * size, HEADER))
        if own == number and flags & KINDS == OVERFLOW:
            number += max(1, count)
            continue
        if own == number and flags & KINDS == LEAF and not pages.seen[number]:
            leaf = _leaf(pages, number)
            if leaf is not None:
                yield leaf.key(0), number
        number += 1


def _leaf(pages: Pages, number: int) -> Leaf | None:
    """The leaf with this number, if it is a sound one of records."""
    page, problem = pages.page(number)
    if page is None or problem or not page[10] & LEAF:
        return None
    places, broken = nodes(page)
    leaf = Leaf(number, page, places, b"", None, "")
    sound = places and not broken and not any(_is_list(page, place) for place in places)
    return leaf if sound and all(first < second for first, second in pairwise(leaf.keys())) else None


def _is_list(page: bytes, place: int) -> bool:
    """Whether a node is one of the list of free pages: a transaction's number, then how many pages, and which."""
    low, high, flags, key_size = struct.unpack_from("<4H", page, place)
    size, start = low | high << 16, place + 16
    if key_size != 8 or flags & BIGDATA or size < 8 or size % 8:
        return False
    return int.from_bytes(page[start : start + 8], "little") == size // 8 - 1


def _told(page: bytes, place: int, key: bytes) -> bytes:
    """What a node says of its value: the same for two versions of a page that share it."""
    low, high, flags = struct.unpack_from("<3H", page, place)
    start = place + 8 + len(key)
    return page[place : place + 8] + page[start : start + (8 if flags & BIGDATA else low | high << 16)]
