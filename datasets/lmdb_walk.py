"""The way from a key to the bytes of its record, through the pages of an LMDB: compiled, by plain reads, without the
interpreter's lock.

Nothing is mapped: a page beyond the end of the file is a short read. Every page must carry its own number and kind and
every offset lie inside it, so damage is a status and never a crash.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from profiler.jit import njit

FOUND, MISSING, CUT, FAILED, DAMAGED, ENDED = range(6)
"""What became of a look-up: found; no such key; a page beyond the end of the file; the system refused to read; a page
that is none of the tree; fewer records than asked for."""
SLOTS = 512
"""Pages that are kept, 2 MiB of 4 KiB: the upper pages of a tree, on the way to any record."""
MOST_OFFSET, MOST_PAGE = 1 << 48, 1 << 32
"""Places from here on are not kept: they do not fit into 16 bytes (256 TiB, and 16 TiB of 4 KiB pages)."""
_DEEPEST = 32
_HEADER = 16
_NO_PAGE = -1


class _Pread:
    """``pread`` of the C library, by its name: an address would keep numba from caching what calls it."""

    @property
    def _numba_type_(self) -> Any:
        from numba.core import types

        return types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.int64))


_pread: Any = _Pread()


@njit
def _u16(page: np.ndarray, at: int) -> int:
    value: Any = np.int64(page[at]) | np.int64(page[at + 1]) << 8
    return value


@njit
def _unsigned(page: np.ndarray, at: int, size: int) -> int:
    value: Any = np.int64(0)
    for place in range(size):
        value |= np.int64(page[at + place]) << (8 * place)
    return value


@njit
def _read_page(fd: int, number: int, sizes: np.ndarray, pages: np.ndarray, held: np.ndarray) -> tuple[int, int]:
    """Slot and status of a branch or leaf page, read unless it is held."""
    page_size, last_page = sizes[0], sizes[1]
    if number < 2 or number > last_page:
        return 0, DAMAGED
    slot = number % SLOTS
    if held[slot] == number:
        return slot, FOUND
    held[slot] = _NO_PAGE
    page = pages[slot]
    done = np.int64(0)
    while done < page_size:
        got = _pread(fd, page.ctypes.data + done, page_size - done, number * page_size + done)
        if got < 0:
            return 0, FAILED
        if got == 0:
            return 0, CUT
        done += got
    kind, lower, upper = _u16(page, 10) & 0x6F, _u16(page, 12), _u16(page, 14)
    if upper == 0 and page_size == 65536:  # 65536 in 16 bits: a page without nodes
        return 0, DAMAGED
    if _unsigned(page, 0, 8) != number or (kind != 1 and kind != 2):
        return 0, DAMAGED
    if lower <= _HEADER or lower > upper or upper > page_size or lower % 2:
        return 0, DAMAGED
    held[slot] = number
    return slot, FOUND


@njit
def _node(page: np.ndarray, place: int, page_size: int) -> tuple[int, int]:
    """Where a node begins and how long its key is; -1 where it does not lie on the page."""
    at = _u16(page, _HEADER + 2 * place)
    if at < _u16(page, 14) or at > page_size - 8:
        return -1, 0
    size = _u16(page, at + 6)
    if at + 8 + size > page_size:
        return -1, 0
    return at, size


@njit
def _search(page: np.ndarray, page_size: int, nodes: int, low: int, key: np.ndarray) -> tuple[int, bool, bool]:
    """Number of the last node from ``low`` on whose key is not greater, whether it is equal, and whether all is sound.

    ``low - 1`` where there is none.
    """
    first, last = low, nodes - 1
    equal = False
    while first <= last:
        middle = (first + last) // 2
        at, size = _node(page, middle, page_size)
        if at < 0:
            return 0, False, False
        start, common = at + 8, min(size, key.size)
        order = 0
        for place in range(common):
            if page[start + place] != key[place]:
                order = -1 if page[start + place] < key[place] else 1
                break
        if order == 0:
            order = 0 if size == key.size else (-1 if size < key.size else 1)
        if order == 0:
            equal = True
            first = middle + 1
            break
        if order < 0:
            first = middle + 1
        else:
            last = middle - 1
    return first - 1, equal, True


@njit
def _place(page: np.ndarray, number: int, place: int, sizes: np.ndarray, out: np.ndarray) -> bool:
    """Write offset and length of value and of key of a node; False where they cannot be right."""
    page_size, last_page = sizes[0], sizes[1]
    at, key_size = _node(page, place, page_size)
    if at < 0:
        return False
    size = _unsigned(page, at, 4)
    start = at + 8 + key_size
    out[1], out[2], out[3] = size, number * page_size + at + 8, key_size
    if _u16(page, at + 4) & 1 == 0:
        out[0] = number * page_size + start
        return start + size <= page_size
    if start + 8 > page_size:
        return False
    first = _unsigned(page, start, 8)
    if first < 2 or first > last_page:
        return False
    pages = (_HEADER + size + page_size - 1) // page_size
    out[0] = first * page_size + _HEADER
    return pages <= last_page - first + 1


@njit
def _is_number(page: np.ndarray, number: int, place: np.ndarray, sizes: np.ndarray, index: int) -> bool:
    """Whether the key at a place of a page is the padded number that record ``index`` should have."""
    width = sizes[4]
    if place[3] != width:
        return False
    rest = sizes[5] + index
    at = place[2] - number * sizes[0] + width
    for _ in range(width):
        at -= 1
        if page[at] != 48 + rest % 10:
            return False
        rest //= 10
    return rest == 0


@njit
def walk(
    fd: int,
    sizes: np.ndarray,
    indices: np.ndarray,
    keys: np.ndarray,
    ends: np.ndarray,
    steps: np.ndarray,
    pages: np.ndarray,
    held: np.ndarray,
    cells: np.ndarray,
    tags: np.ndarray,
    out: np.ndarray,
    failed: np.ndarray,
) -> int:
    """Find records by keys. Returns how many were found; the next one, if any, is told in ``failed``.

    Parameters
    ----------
    sizes: int64: bytes of a page, last page, root, number of records; where keys are padded numbers, their width and
        the first (else 0 and 0).
    indices: int64, positions of the records. keys, ends: their keys, one after another, and where each ends.
    steps: how many records behind its key each one comes.
    pages, held: uint8 [SLOTS, page]; int64 [SLOTS], the page in each slot.
    cells, tags: where the places of whole pages are noted, see :class:`datasets.lmdb_locate.Locator`.
    out: int64 [n, 4]: offset and length of the value, offset and length of the key.
    failed: int64 [2]: status and page.
    """
    page_size, root, records = sizes[0], sizes[2], sizes[3]
    above = np.empty(_DEEPEST, np.int64)  # pages on the way down
    taken = np.empty(_DEEPEST, np.int64)  # the node taken on each
    found = np.empty(4, np.int64)
    failed[0], failed[1] = FOUND, root
    start = 0
    for query in range(indices.size):
        key = keys[start : ends[query]]
        start = ends[query]
        number, depth, slot, node = root, 0, 0, 0
        while True:
            slot, status = _read_page(fd, number, sizes, pages, held)
            if status == FOUND and depth == _DEEPEST:
                status = DAMAGED
            if status != FOUND:
                failed[0], failed[1] = status, number
                return query
            page = pages[slot]
            nodes = (_u16(page, 12) - _HEADER) // 2
            if _u16(page, 10) & 2:
                node, equal, sound = _search(page, page_size, nodes, 0, key)
                if not sound or not equal:
                    failed[0], failed[1] = DAMAGED if not sound else MISSING, number
                    return query
                break
            node, equal, sound = _search(page, page_size, nodes, 1, key)
            at, _size = _node(page, node, page_size)
            if not sound or at < 0:
                failed[0], failed[1] = DAMAGED, number
                return query
            above[depth], taken[depth] = number, node
            depth += 1
            number = _unsigned(page, at, 6)
        left = steps[query]
        while left >= nodes - node:  # on to the next leaf
            left -= nodes - node
            level = depth - 1
            while level >= 0:
                slot, status = _read_page(fd, above[level], sizes, pages, held)
                if status != FOUND:
                    failed[0], failed[1] = status, above[level]
                    return query
                if taken[level] + 1 < (_u16(pages[slot], 12) - _HEADER) // 2:
                    break
                level -= 1
            if level < 0:
                failed[0], failed[1] = ENDED, number
                return query
            taken[level] += 1
            while True:
                at, _size = _node(pages[slot], taken[level], page_size)
                if at < 0:
                    failed[0], failed[1] = DAMAGED, above[level]
                    return query
                number = _unsigned(pages[slot], at, 6)
                slot, status = _read_page(fd, number, sizes, pages, held)
                level += 1
                is_leaf = status == FOUND and _u16(pages[slot], 10) & 2 != 0
                if status == FOUND and is_leaf != (level == depth):
                    status = DAMAGED  # all leaves lie at one depth
                if status != FOUND:
                    failed[0], failed[1] = status, number
                    return query
                if is_leaf:
                    break
                above[level], taken[level] = number, 0
            nodes, node = (_u16(pages[slot], 12) - _HEADER) // 2, 0
        node += left
        page = pages[slot]
        if not _place(page, number, node, sizes, out[query]):
            failed[0], failed[1] = DAMAGED, number
            return query
        for other in range(nodes):  # what comes before and after on the page has been read as well
            index = indices[query] - node + other
            if index < 0 or index >= records:
                continue
            if not _place(page, number, other, sizes, found):
                continue
            if sizes[4] and not _is_number(page, number, found, sizes, index):
                continue  # keys that only look like all the numbers: a gap, and what comes behind is another's place
            overflow = np.int64(0)
            if found[0] != found[2] + found[3]:
                overflow = found[0] // page_size
            if found[2] >= MOST_OFFSET or overflow >= MOST_PAGE:
                continue
            cell = index % cells.shape[0]
            cells[cell, 0] = np.uint64(found[2] | found[3] << 48)
            cells[cell, 1] = np.uint64(found[1] | overflow << 32)
            if tags.size:
                tags[cell] = np.uint32(index // cells.shape[0])
    return indices.size
