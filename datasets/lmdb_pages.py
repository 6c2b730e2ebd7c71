"""The pages of an LMDB, followed by plain reads: no map, so no page can kill the process, and every page is checked.

LMDB keeps no checksums and trusts what it maps: a damaged page shows as ``MDB_CORRUPTED``, as a crash, or not at all.
Here each page must carry its own number and kind, lie inside the file, be referenced once, and hold keys that ascend
between those of the page above it. What fails is reported and left out; everything else is read.

The format (64-bit, little-endian): ``lmdb.h`` and ``mdb.c`` of LMDB 0.9. A page begins with number u64, pad u16,
flags u16, lower u16, upper u16; nodes are found by u16 offsets from byte 16 to ``lower``. A node is lo u16, hi u16,
flags u16, key size u16, key, data; in a branch lo, hi and flags are the number of the page below.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from datasets import lmdb_env
from datasets.errors import DatasetChanged, DatasetCorrupt, NotADataset, SourceError
from datasets.raw import Lost, RawReader, Stored
from datasets.source import show_key

_HEADER = 16
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
_KINDS = {_BRANCH: "a branch", _LEAF: "a leaf", _OVERFLOW: "an overflow page", _META: "a meta page"}
_BIGDATA, _SUBDATA = 1, 2  # flags of a node
_DUPSORT = 4  # flag of a database
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_NO_PAGE = 2**64 - 1
_PAGE_SIZES = (4096, 8192, 16384, 32768, 65536, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class _Tree:
    """One database inside the file."""

    flags: int
    entries: int
    root: int


@dataclass(frozen=True, slots=True)
class _Meta:
    """What the newer of the two meta pages says."""

    page_size: int
    last_page: int
    transaction: int
    main: _Tree


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A page of records. low, high: its keys should lie in low <= key < high. doubt: why they may be another page's."""

    number: int
    page: bytes
    places: list[int]
    low: bytes
    high: bytes | None
    doubt: str


class LmdbReader(RawReader):
    """Reads the records of an LMDB page by page; see the module's text. The file is open only inside :meth:`scan`."""

    backend = "lmdb"

    def __init__(self, path: str, db: str | None = None) -> None:
        self.path = path
        self.db = db
        self._file = lmdb_env.data_file(path)
        self._seen: set[int] = set()
        self._cut = False
        with self._opened():
            self._meta = self._read_meta()
            tree = self._meta.main if db is None else self._named(db)
        if tree.flags & _DUPSORT:
            raise NotADataset(f"{self.name} holds several values per key", expected="one record per key")
        self._tree = tree
        self.expected = tree.entries

    def scan(self) -> Iterator[Stored | Lost]:
        with self._opened() as file:
            self._seen = set()
            self._cut = False
            have = os.fstat(file.fileno()).st_size
            need = (self._meta.last_page + 1) * self._meta.page_size
            last: bytes | None = None
            read = 0
            for item in self._walk(self._tree):
                if isinstance(item, Stored):
                    last = item.key
                    read += 1
                    yield item
                else:
                    yield Lost(item.place, item.reason, item.key, last)
            if self._cut or (have < need and read < self._tree.entries):
                yield Lost(
                    "the file", f"is cut off: {have} bytes of {need}; an interrupted copy, most likely", None, last
                )
            now = self._read_meta().transaction
            if now != self._meta.transaction:
                raise DatasetChanged(
                    f"{self.name} was written to while it was read",
                    expected=f"transaction {self._meta.transaction}",
                    found=f"transaction {now}",
                    hint="let the writer finish, then start again",
                )

    @property
    def transaction(self) -> int:
        """Number of the last transaction that was committed when this reader was made."""
        return self._meta.transaction

    def first_damage(self) -> tuple[Lost, int] | None:
        """The first page that LMDB would stumble over, or die on, when it goes through the keys; None if there is none.

        Beside it, the number of records before it. Values are not read.
        """
        with self._opened():
            self._seen = set()
            self._cut = False
            records = 0
            last: _Leaf | None = None
            for item in self._leaves(self._tree):
                if isinstance(item, Lost):
                    after = _key(last.page, last.places[-1]) if last and last.places else None
                    return Lost(item.place, item.reason, None, after), records
                records += len(item.places)
                last = item
        return None

    # ------------------------------------------------------------------------------------------------------------

    def _opened(self) -> _File:
        self._bytes = _File(self._file, self.name)
        return self._bytes

    def _read_meta(self) -> _Meta:
        head = self._bytes.read(0, _HEADER + 136)
        if len(head) == _HEADER + 136 and head[16:20] == _MAGIC.to_bytes(4, "big"):
            raise NotADataset(f"{self._file} was written on a big-endian machine", hint="convert it there")
        first = _meta(head)
        sizes = (first.page_size,) if first else _PAGE_SIZES
        second = next((meta for size in sizes if (meta := _meta(self._bytes.read(size, _HEADER + 136)))), None)
        found = [meta for meta in (first, second) if meta is not None]
        if not found:
            raise NotADataset(
                f"{self._file} has no readable meta page of an LMDB",
                expected=f"the mark {_MAGIC:#x} and format version {_VERSION} on its first or second page",
                found=f"{self._bytes.size} bytes that begin {head[16:24].hex(' ') or 'nowhere'}",
                hint="a file of another kind, or one whose beginning is lost: copy it again",
            )
        return max(found, key=lambda meta: meta.transaction)

    def _named(self, db: str) -> _Tree:
        names = []
        for item in self._walk(self._meta.main, databases=True):
            if isinstance(item, Stored):
                if item.key == db.encode():
                    return _tree(item.value)
                names.append(show_key(item.key))
        raise NotADataset(
            f"{self.path} holds no database named '{db}'",
            expected="the name of a sub-database",
            found="named databases: " + (", ".join(names[:8]) or "none"),
        )

    def _walk(self, tree: _Tree, databases: bool = False) -> Iterator[Stored | Lost]:
        """``databases`` gives the named databases and not the records."""
        for item in self._leaves(tree):
            if isinstance(item, Lost):
                yield item
            else:
                yield from self._leaf(item, databases)

    def _leaves(self, tree: _Tree) -> Iterator[_Leaf | Lost]:
        """The pages that hold records, in key order, and those above and among them that are damaged."""
        if tree.root == _NO_PAGE:
            return
        stack: list[tuple[int, bytes, bytes | None]] = [(tree.root, b"", None)]
        while stack:
            number, low, high = stack.pop()
            page, problem = self._page(number)
            if problem:
                yield Lost(f"page {number}", problem)
            if page is None:
                continue
            places, broken = _nodes(page)
            if broken:
                yield Lost(f"page {number}", broken)
            if page[10] & _BRANCH:
                children, disorder = _children(page, places, low, high)
                if disorder:
                    yield Lost(f"page {number}", disorder)
                stack += reversed(children)
            else:
                yield _Leaf(number, page, places, low, high, f"page {number} {problem}" if problem else "")

    def _page(self, number: int) -> tuple[bytes | None, str]:
        """The page, if its records can be found, and what is wrong with it."""
        size = self._meta.page_size
        if not 2 <= number <= self._meta.last_page:
            return None, f"is not one of the pages 2 to {self._meta.last_page} of the file"
        if number in self._seen:
            return None, "is referenced twice"
        self._seen.add(number)
        page = self._bytes.read(number * size, size)
        if len(page) < size:
            self._cut = True  # said once, for the whole file
            return None, ""
        own, _, flags, lower, upper = struct.unpack_from("<QHHHH", page)
        kind = flags & 0x6F
        if kind not in (_BRANCH, _LEAF):
            return None, f"is {_KINDS.get(kind, f'marked {flags:#06x}')} where a branch or a leaf should be"
        if not _HEADER <= lower <= upper <= size or lower % 2:
            return None, f"has a damaged header: its nodes would lie in {lower}..{upper} of {size} bytes"
        if own != number:
            return page, f"has a damaged header: it says that it is page {own}"
        return page, ""

    def _leaf(self, leaf: _Leaf, databases: bool) -> Iterator[Stored | Lost]:
        number, page, low, high = leaf.number, leaf.page, leaf.low, leaf.high
        keys = [_key(page, place) for place in leaf.places]
        kept = _ascending([key if low <= key and (high is None or key < high) else None for key in keys])
        for index, (place, key) in enumerate(zip(leaf.places, keys, strict=True)):
            flags = int.from_bytes(page[place + 4 : place + 6], "little")
            if bool(flags & _SUBDATA) != databases:
                if not databases:
                    yield Lost(f"page {number}", "is a database of its own: name it with --db", key)
                continue
            value, problem, questionable = self._value(page, place, len(key), flags)
            if value is None:
                yield Lost(f"page {number}", problem, key)
                continue
            if problem:
                yield Lost(f"page {number}", problem)
            order = "" if kept[index] else "its key is not in order: bytes of it, or of the page above it, were changed"
            yield Stored(key, value, order or leaf.doubt or questionable)

    def _value(self, page: bytes, place: int, key_size: int, flags: int) -> tuple[bytes | None, str, str]:
        """The value of a node, what is wrong with it, and why it may be another's."""
        low, high = struct.unpack_from("<HH", page, place)
        size = low | high << 16
        start = place + 8 + key_size
        if not flags & _BIGDATA:
            if start + size > len(page):
                return None, f"its value of {size} bytes would not end on its page", ""
            return page[start : start + size], "", ""
        if start + 8 > len(page):
            return None, "the number of its overflow page is cut", ""
        number = int.from_bytes(page[start : start + 8], "little")
        pages = -(-(_HEADER + size) // self._meta.page_size)
        if number < 2 or number + pages - 1 > self._meta.last_page:
            return None, f"its value of {size} bytes would lie on page {number}, beyond those of the file", ""
        if number in self._seen:
            return None, f"its value lies on page {number}, which is another's", ""
        self._seen.add(number)
        whole = self._bytes.read(number * self._meta.page_size, _HEADER + size)
        if len(whole) < _HEADER + size:
            return None, f"its value on page {number} lies beyond the end of the file", ""
        own, _, kind, count = struct.unpack_from("<QHHI", whole)
        doubt = ""
        if own != number or kind & 0x6F != _OVERFLOW or count != pages:
            doubt = f"overflow page {number} has a damaged header"
        return whole[_HEADER:], doubt, doubt


class _File:
    """Plain reads at positions; short where the file ends."""

    def __init__(self, path: str, name: str) -> None:
        try:
            self._opened = open(path, "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise SourceError(
                f"{name} cannot be read: {error.strerror}",
                found=error.filename,
                hint="check the mode of the file and of the folders above it",
            ) from error
        self.name = name
        self.size = os.fstat(self.fileno()).st_size

    def fileno(self) -> int:
        return self._opened.fileno()

    def read(self, start: int, size: int) -> bytes:
        try:
            return os.pread(self.fileno(), min(size, max(self.size - start, 0)), start)
        except OSError as error:
            raise DatasetCorrupt(
                f"{self.name} cannot be read at byte {start}", found=error.strerror, hint="a failing disk, most likely"
            ) from error

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def _nodes(page: bytes) -> tuple[list[int], str]:
    """Where the nodes of a page begin, without those that cannot lie on it, and what is wrong with these."""
    lower, upper = struct.unpack_from("<HH", page, 12)
    offsets = struct.unpack_from(f"<{(lower - _HEADER) // 2}H", page, _HEADER)
    size = len(page)
    good = [at for at in offsets if upper <= at <= size - 8 and at + 8 + (page[at + 6] | page[at + 7] << 8) <= size]
    bad = len(offsets) - len(good)
    return good, f"{bad} of its {len(offsets)} nodes cannot lie on it" if bad else ""


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


def _meta(page: bytes) -> _Meta | None:
    if len(page) < _HEADER + 136:
        return None
    magic, version = struct.unpack_from("<II", page, _HEADER)
    if magic != _MAGIC or version != _VERSION:
        return None
    page_size = int.from_bytes(page[40:44], "little")
    if page_size not in _PAGE_SIZES:
        return None
    last_page, transaction = struct.unpack_from("<QQ", page, 136)
    return _Meta(page_size, last_page, transaction, _tree(page[88:136]))


def _tree(stored: bytes) -> _Tree:
    flags, entries, root = struct.unpack("<4xH2x24xQQ", stored)
    return _Tree(flags, entries, root)
