"""The pages of an LMDB, followed by plain reads and checked one by one.

LMDB keeps no checksums and trusts what it maps: a damaged page shows as ``MDB_CORRUPTED``, as a crash, or not at all.
Here each page must carry its own number and kind, lie inside the file, be referenced once, and hold keys that ascend
between those of the page above it. What fails is reported and left out; everything else is read.

Nodes of a page are found by u16 offsets from byte 16 to ``lower``. A node is lo u16, hi u16, flags u16, key size u16,
key, data; in a branch lo, hi and flags are the number of the page below.
"""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from datasets.errors import DatasetChanged, NotADataset
from datasets.lmdb_file import (
    BIGDATA,
    BRANCH,
    HEADER,
    KINDS,
    LEAF,
    META,
    NO_PAGE,
    OVERFLOW,
    SUBDATA,
    LmdbFile,
    Meta,
    Tree,
    check_order,
    tree_of,
)
from datasets.raw import Lost, RawReader, Stored
from datasets.source import show_key

MAX_NAMED = 64
"""Names of databases that an error lists."""
WORTH_ARRAYS = 12
"""Nodes of a page from which on arrays take less time than a loop."""
_KIND_NAMES = {BRANCH: "a branch", LEAF: "a leaf", OVERFLOW: "an overflow page", META: "a meta page"}
_DEEPEST = 32  # pages on the way to a leaf, as in LMDB's own cursor


@dataclass(frozen=True, slots=True)
class Leaf:
    """A page of records. low, high: its keys should lie in low <= key < high. doubt: why they may be another page's."""

    number: int
    page: bytes
    places: list[int]
    low: bytes
    high: bytes | None
    doubt: str

    def key(self, index: int) -> bytes:
        """The key of the record that comes at this place of the page."""
        return _key(self.page, self.places[index])

    def keys(self) -> list[bytes]:
        """The keys of the page, in its order."""
        page, places = self.page, self.places
        if len(places) >= WORTH_ARRAYS:
            size = page[places[0] + 6] | page[places[0] + 7] << 8
            at, content = np.array(places)[:, None], np.frombuffer(page, np.uint8)
            if size and (content[at + np.array((6, 7))] == [size & 255, size >> 8]).all():
                text = content[at + np.arange(8, 8 + size)].tobytes()
                return [text[start : start + size] for start in range(0, len(text), size)]
        return [_key(page, place) for place in places]


class Pages:
    """The trees of one opened file.

    Attributes
    ----------
    cut: whether a page lay beyond the end of the file. seen: one byte a page of the file, 1 where something lies there.
    """

    def __init__(self, file: LmdbFile, meta: Meta) -> None:
        self.file = file
        self.meta = meta
        self.cut = False
        # Memory is taken where it is written to: an index that names few of the pages of a terabyte costs nothing.
        size = max(min(meta.last_page + 1, -(-file.size // meta.page_size)), 1)
        self.seen = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def leaves(self, tree: Tree) -> Iterator[Leaf | Lost]:
        """The pages that hold records, in key order, and those above and among them that are damaged."""
        if tree.root == NO_PAGE:
            return
        stack: list[tuple[int, bytes, bytes | None]] = [(tree.root, b"", None)]
        while stack:
            number, low, high = stack.pop()
            if self._take(number, 1) is not None:
                yield Lost(f"page {number}", "is referenced twice")
                continue
            page, problem = self.page(number)
            if problem:
                yield Lost(f"page {number}", problem)
            if page is None:
                continue
            places, broken = nodes(page)
            if broken:
                yield Lost(f"page {number}", broken)
            if page[10] & BRANCH:
                children, disorder = _children(page, places, low, high)
                if disorder:
                    yield Lost(f"page {number}", disorder)
                stack += reversed(children)
            else:
                yield Leaf(number, page, places, low, high, f"page {number} {problem}" if problem else "")

    def ends(self, tree: Tree) -> tuple[bytes, bytes] | Lost:
        """The first and the last key of a tree that is not empty, or the damage on the way to them."""
        found = []
        for side in (0, -1):
            number = tree.root
            for _ in range(_DEEPEST):
                page, problem = self.page(number)
                places = nodes(page)[0] if page is not None else []
                if page is None or problem or not places:
                    return Lost(
                        f"page {number}", problem or ("lies beyond the end of the file" if self.cut else "is empty")
                    )
                if page[10] & LEAF:
                    found.append(_key(page, places[side]))
                    break
                number = int.from_bytes(page[places[side] : places[side] + 6], "little")
            else:
                return Lost(f"page {number}", f"lies below {_DEEPEST} others")
        return found[0], found[1]

    def find(self, tree: Tree, key: bytes, steps: int = 0) -> Leaf | None:
        """The leaf with the record that comes ``steps`` behind ``key``, and no other of its records.

        None where it lies on another leaf than the key, or is not found, or anything on the way is damaged.
        """
        number = tree.root
        for _ in range(_DEEPEST):
            page, problem = self.page(number)
            if page is None or problem:
                return None
            places, broken = nodes(page)
            if broken or not places:
                return None
            if page[10] & LEAF:
                at = bisect_left(places, key, key=lambda place: _key(page, place))
                if at + steps >= len(places) or _key(page, places[at]) != key:
                    return None
                return Leaf(number, page, [places[at + steps]], b"", None, "")
            # The first key of a branch says nothing.
            at = bisect_right(places, key, lo=1, key=lambda place: _key(page, place)) - 1
            number = int.from_bytes(page[places[at] : places[at] + 6], "little")
        return None

    def page(self, number: int) -> tuple[bytes | None, str]:
        """The page, if its records can be found, and what is wrong with it."""
        size = self.meta.page_size
        if not 2 <= number <= self.meta.last_page:
            return None, f"is not one of the pages 2 to {self.meta.last_page} of the file"
        page = self.file.read(number * size, size)
        if len(page) < size:
            self.cut = True  # said once, for the whole file
            return None, ""
        own, _, flags, lower, upper = struct.unpack_from("<QHHHH", page)
        kind = flags & KINDS
        if kind not in (BRANCH, LEAF):
            return None, f"is {_KIND_NAMES.get(kind, f'marked {flags:#06x}')} where a branch or a leaf should be"
        if not HEADER <= lower <= upper <= size or lower % 2:
            return None, f"has a damaged header: its nodes would lie in {lower}..{upper} of {size} bytes"
        if own != number:
            return page, f"has a damaged header: it says that it is page {own}"
        return page, ""

    def value(self, page: bytes, place: int, key_size: int, flags: int) -> tuple[bytes | None, str, str]:
        """The value of a node, what is wrong with it, and why it may be another's."""
        low, high = struct.unpack_from("<HH", page, place)
        size = low | high << 16
        start = place + 8 + key_size
        if not flags & BIGDATA:
            if start + size > len(page):
                return None, f"its value of {size} bytes would not end on its page", ""
            return page[start : start + size], "", ""
        if start + 8 > len(page):
            return None, "the number of its overflow page is cut", ""
        number = int.from_bytes(page[start : start + 8], "little")
        pages = -(-(HEADER + size) // self.meta.page_size)
        if number < 2 or number + pages - 1 > self.meta.last_page:
            return None, f"its value of {size} bytes would lie on page {number}, beyond those of the file", ""
        if number < len(self.seen) and self.seen[number]:
            return None, f"its value lies on page {number}, which is another's", ""
        whole = self.file.read(number * self.meta.page_size, HEADER + size)
        own, _, kind, count = struct.unpack("<QHHI", whole[:HEADER].ljust(HEADER, b"\0"))
        doubt = ""
        # A value that took the place of a longer one keeps all its pages: more than it needs are no damage.
        if own != number or kind & KINDS != OVERFLOW or not pages <= count <= self.meta.last_page + 1 - number:
            doubt = f"overflow page {number} has a damaged header"
        # Where the sizes in node and page disagree, the larger must not claim pages that are sound records of others.
        taken = self._take(number, min(pages, max(count, 1)) if kind & KINDS == OVERFLOW else 1)
        if taken is not None:
            return None, f"its value lies on page {taken}, which is another's", ""
        if len(whole) < HEADER + size:
            return None, f"its value on page {number} lies beyond the end of the file", ""
        return whole[HEADER:], doubt, doubt

    def _take(self, number: int, pages: int) -> int | None:
        """Mark pages as used; the first that was used before, if any. Those beyond the file are nobody's."""
        if number >= len(self.seen):  # up to 2**64 - 1 in a damaged file, more than an offset may be
            return None
        found = self.seen.find(b"\1", number, number + pages)
        pages = min(pages, len(self.seen) - number)
        self.seen[number : number + pages] = b"\1" * pages
        return None if found < 0 else found


def databases(pages: Pages, only: bool) -> Iterator[tuple[bytes, Tree] | Lost]:
    """Named databases that the main one lists, as key and tree. ``only``: stops before the first record."""
    for leaf in pages.leaves(pages.meta.main):
        if isinstance(leaf, Lost):
            yield leaf
            continue
        for place in leaf.places:
            size, flags = struct.unpack_from("<I", leaf.page, place)[0], leaf.page[place + 4]
            if flags & SUBDATA and size == 48:
                key = _key(leaf.page, place)
                stored = leaf.page[place + 8 + len(key) : place + 56 + len(key)]
                if len(stored) == 48:
                    yield key, tree_of(stored)
            elif only:
                return


def needs_no_more(pages: Pages, tree: Tree) -> bool:
    """Whether every page of a tree, and those of its values, lie inside the file. Values are not read."""
    end = pages.file.size
    for leaf in pages.leaves(tree):
        if isinstance(leaf, Lost):
            return False
        for place in leaf.places:
            low, high, flags, key_size = struct.unpack_from("<4H", leaf.page, place)
            if flags & BIGDATA:
                start = int.from_bytes(leaf.page[place + 8 + key_size : place + 16 + key_size], "little")
                if start * pages.meta.page_size + HEADER + (low | high << 16) > end:
                    return False
    return not pages.cut


class LmdbReader(RawReader):
    """Reads the records of an LMDB page by page; see the module's text. The file is open only inside :meth:`scan`."""

    backend = "lmdb"

    def __init__(self, path: str, db: str | None = None) -> None:
        self.path = path
        self.db = db
        with LmdbFile(path, self.name) as file:
            self._meta = file.meta()
            tree = self._meta.main if db is None else self._named(Pages(file, self._meta), db)
        check_order(tree, self.name)
        self._tree = tree
        self.expected = tree.entries

    def scan(self) -> Iterator[Stored | Lost]:
        with LmdbFile(self.path, self.name) as file:
            pages = Pages(file, self._meta)
            have = file.size
            need = self._meta.nbytes
            if self._meta.doubt:
                yield Lost(
                    self._meta.doubt, "is damaged: what the last commit wrote may be missing from what is read here"
                )
            last: bytes | None = None
            read = 0
            for item in self._walk(pages):
                if isinstance(item, Stored):
                    last = item.key
                    read += 1
                    yield item
                else:
                    yield Lost(item.place, item.reason, item.key, last)
            if pages.cut or (have < need and read < self._tree.entries):
                yield Lost(
                    "the file", f"is cut off: {have} bytes of {need}; an interrupted copy, most likely", None, last
                )
            now = file.meta().transaction
            if now != self._meta.transaction:
                raise DatasetChanged(
                    f"{self.name} was written to while it was read",
                    expected=f"transaction {self._meta.transaction}",
                    found=f"transaction {now}",
                    hint="let the writer finish, then start again",
                )

    def first_damage(self) -> tuple[Lost, int] | None:
        """The first page that is damaged, and the number of records before it; None if there is none.

        Values are not read.
        """
        with LmdbFile(self.path, self.name) as file:
            pages = Pages(file, self._meta)
            if self._meta.doubt:
                return Lost(self._meta.doubt, "is damaged"), 0
            records = 0
            last: Leaf | None = None
            for item in pages.leaves(self._tree):
                if isinstance(item, Lost):
                    return Lost(item.place, item.reason, None, last.key(-1) if last and last.places else None), records
                records += len(item.places)
                last = item
        return None

    # ------------------------------------------------------------------------------------------------------------

    def _named(self, pages: Pages, db: str) -> Tree:
        names = []
        for item in databases(pages, only=False):
            if not isinstance(item, Lost):
                if item[0] == db.encode():
                    return item[1]
                names.append(show_key(item[0]))
        raise NotADataset(
            f"{self.path} holds no database named '{db}'",
            expected="the name of a sub-database",
            found="named databases: " + (", ".join(names[:8]) or "none"),
        )

    def _walk(self, pages: Pages) -> Iterator[Stored | Lost]:
        from datasets.lmdb_strays import Strays

        strays = Strays(Pages(pages.file, self._meta), self._meta, self._tree)
        for item in pages.leaves(self._tree):
            if isinstance(item, Lost):
                yield item
                continue
            yield from strays.before(item.low)
            yield from self._leaf(pages, item)
            strays.skip(item.high)
        yield from strays.before(None)

    def _leaf(self, pages: Pages, leaf: Leaf) -> Iterator[Stored | Lost]:
        number, page, low, high = leaf.number, leaf.page, leaf.low, leaf.high
        keys = leaf.keys()
        kept = _ascending([key if low <= key and (high is None or key < high) else None for key in keys])
        for index, (place, key) in enumerate(zip(leaf.places, keys, strict=True)):
            flags = int.from_bytes(page[place + 4 : place + 6], "little")
            if flags & SUBDATA:
                yield Lost(f"page {number}", "is a database of its own: name it with --db", key)
                continue
            value, problem, questionable = pages.value(page, place, len(key), flags)
            if value is None:
                yield Lost(f"page {number}", problem, key)
                continue
            if problem:
                yield Lost(f"page {number}", problem)
            order = "" if kept[index] else "its key is not in order: bytes of it, or of the page above it, were changed"
            yield Stored(key, value, order or leaf.doubt or questionable)


def nodes(page: bytes) -> tuple[list[int], str]:
    """Where the nodes of a page begin, without those that cannot lie on it, and what is wrong with these."""
    lower, upper = struct.unpack_from("<HH", page, 12)
    offsets = struct.unpack_from(f"<{(lower - HEADER) // 2}H", page, HEADER)
    size = len(page)
    if len(offsets) >= WORTH_ARRAYS:
        return _nodes_of_many(page, offsets, upper)
    good = [at for at in offsets if upper <= at <= size - 8 and at + 8 + (page[at + 6] | page[at + 7] << 8) <= size]
    bad = len(offsets) - len(good)
    return good, f"{bad} of its {len(offsets)} nodes cannot lie on it" if bad else ""


def _nodes_of_many(page: bytes, offsets: Sequence[int], upper: int) -> tuple[list[int], str]:
    """:func:`nodes` by whole arrays."""
    at, content = np.array(offsets), np.frombuffer(page, np.uint8)
    good = at[(upper <= at) & (at <= len(page) - 8)]
    good = good[good + 8 + (content[good + 6] | content[good + 7].astype(np.int64) << 8) <= len(page)]
    bad = len(offsets) - len(good)
    return good.tolist(), f"{bad} of its {len(offsets)} nodes cannot lie on it" if bad else ""


def _key(page: bytes, place: int) -> bytes:
    return page[place + 8 : place + 8 + (page[place + 6] | page[place + 7] << 8)]


def _children(
    page: bytes, places: list[int], low: bytes, high: bytes | None
) -> tuple[list[tuple[int, bytes, bytes | None]], str]:
    """(page, low, high) of the pages below, and what is wrong with the keys that should divide them."""
    numbers = [int.from_bytes(page[place : place + 6], "little") for place in places]
    # The first key of a branch says nothing: it is empty, or left over.
    bounds: list[bytes | None] = [low, *(_key(page, place) for place in places[1:]), high]
    inner = [bound for bound in bounds if bound is not None]
    if inner != sorted(inner) or len(set(inner[1:])) < len(inner) - 1:
        return [(number, low, high) for number in numbers], "the keys that divide the pages below it are not in order"
    return [(number, bounds[at] or b"", bounds[at + 1]) for at, number in enumerate(numbers)], ""


def _ascending(keys: list[bytes | None]) -> list[bool]:
    """Which keys to keep so that as many as possible ascend; None is never kept."""
    if None not in keys and all(first < second for first, second in pairwise(keys)):  # type: ignore[operator]
        return [True] * len(keys)
    ends: list[bytes] = []  # ends[n]: the smallest last key of n + 1 ascending ones
    at: list[int] = []
    before: list[int] = []
    for index, key in enumerate(keys):
        before.append(-1)
        if key is None:
            continue
        length = bisect_left(ends, key)
        before[index] = at[length - 1] if length else -1
        ends[length:] = [key, *ends[length + 1 :]]
        at[length:] = [index, *at[length + 1 :]]
    kept = [False] * len(keys)
    index = at[-1] if at else -1
    while index >= 0:
        kept[index] = True
        index = before[index]
    return kept
