"""The way from positions to the bytes of records, through the pages of an LMDB: compiled, by plain reads, without the
interpreter's lock.

Nothing is mapped: a page beyond the end of the file is a short read. Every page must carry its own number and kind and
every offset lie inside it, so damage is a status and never a crash. Branch pages are kept from call to call, so a
look-up reads one page, the leaf; leaves are read anew in each call, and the key is compared there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from profiler.jit import CFunction, njit

FOUND, MISSING, CUT, FAILED, DAMAGED, ENDED = range(6)
"""What became of a look-up: found; no such key; a page beyond the end of the file; the system refused to read; a page
that is none of the tree; fewer records than asked for."""
BRANCH_BYTES = 1 << 23
"""Bytes of branch pages that are kept: 2,048 of 4 KiB, those of some 400,000 leaves."""
WAYS = 4
"""Places that one branch page may be kept in."""
MOST_OFFSET, MOST_PAGE = 1 << 48, 1 << 32
"""Places from here on are not kept: they do not fit into 16 bytes (256 TiB, and 16 TiB of 4 KiB pages)."""
_DEEPEST = 32
_HEADER = 16
_NO_PAGE = -1
_PAGE_MASK = (1 << 48) - 1  # the number of the page below, in a branch


_pread = CFunction("pread", "intp", "intc", "uintp", "uintp", "int64")
_NOUGHT = np.int64(0)
"""As an argument; a literal would have the function compiled once more, for it alone."""


@njit
def _u16(page: np.ndarray, at: int) -> int:
    value: Any = np.int64(page[at]) | np.int64(page[at + 1]) << 8
    return value


@njit
def _u64(page: np.ndarray, at: int) -> int:
    value: Any = np.int64(0)
    for place in range(8):
        value |= np.int64(page[at + place]) << (8 * place)
    return value


@njit
def _shape(page: np.ndarray) -> tuple[int, int]:
    """The kind of a page, and how many nodes it has."""
    lower: Any = np.int64(page[12]) | np.int64(page[13]) << 8
    kind: Any = (np.int64(page[10]) | np.int64(page[11]) << 8) & 0x6F
    return kind, (lower - _HEADER) // 2


@njit
def _read(fd: int, start: int, into: np.ndarray, at: int, size: int) -> int:
    """Write ``size`` bytes of the file into a vector from ``at`` on: FOUND, CUT or FAILED."""
    done = np.int64(0)
    while done < size:
        got = _pread(fd, into.ctypes.data + at + done, size - done, start + done)
        if got < 0:
            return FAILED
        if got == 0:
            return CUT
        done += got
    return FOUND


@njit
def _copy(of: np.ndarray, start: int, into: np.ndarray, at: int, size: int) -> None:
    for place in range(size):  # assigning slices takes numba seconds to compile
        into[at + place] = of[start + place]


@njit
def _page(fd: int, number: int, sizes: np.ndarray, pages: np.ndarray, held: np.ndarray) -> tuple[int, int]:
    """Row of ``pages`` and status of a branch or leaf page, read unless it is held. A leaf is in the last row."""
    page_size, last_page = sizes[0], sizes[1]
    if number < 2 or number > last_page:
        return 0, DAMAGED
    last = held.size - 1
    if held[last] == number:
        return last, FOUND
    first = ((number * 2654435761) >> 20) % (last // WAYS) * WAYS
    for row in range(first, first + WAYS):
        if held[row] == number:
            return row, FOUND
    held[last] = _NO_PAGE
    page = pages[last]
    status = _read(fd, number * page_size, page, _NOUGHT, page_size)
    if status != FOUND:
        return 0, status
    kind, nodes = _shape(page)
    upper = np.int64(page[14]) | np.int64(page[15]) << 8
    if upper == 0 and page_size == 65536:  # 65536 in 16 bits: a page without nodes
        return 0, DAMAGED
    if _u64(page, _NOUGHT) != number or (kind != 1 and kind != 2):
        return 0, DAMAGED
    if nodes < 1 or _HEADER + 2 * nodes > upper or upper > page_size or page[12] % 2:
        return 0, DAMAGED
    if kind == 2:
        held[last] = number
        return last, FOUND
    row = first
    while row < first + WAYS - 1 and held[row] != _NO_PAGE:
        row += 1
    if held[row] != _NO_PAGE:  # none is free: any goes, told by chance
        row = first + (number >> 3) % WAYS
    _copy(page, _NOUGHT, pages[row], _NOUGHT, page_size)
    held[row] = number
    return row, FOUND


@njit
def _node(page: np.ndarray, place: int, page_size: int) -> tuple[int, int]:
    """Where a node begins and how long its key is; -1 where it does not lie on the page."""
    at = _u16(page, _HEADER + 2 * place)
    if at < (np.int64(page[14]) | np.int64(page[15]) << 8) or at > page_size - 8:
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
    while first <= last:
        middle = (first + last) // 2
        at, size = _node(page, middle, page_size)
        if at < 0:
            return 0, False, False
        start, common = at + 8, min(size, key.size)
        place = 0
        while place < common and page[start + place] == key[place]:
            place += 1
        if place < common:
            smaller = page[start + place] < key[place]
        elif size == key.size:
            return middle, True, True
        else:
            smaller = size < key.size
        if smaller:
            first = middle + 1
        else:
            last = middle - 1
    return first - 1, False, True


@njit
def _place(page: np.ndarray, number: int, place: int, sizes: np.ndarray, out: np.ndarray) -> bool:
    """Write offset and length of value and of key of a node; False where they cannot be right."""
    page_size, last_page = sizes[0], sizes[1]
    at, key_size = _node(page, place, page_size)
    if at < 0:
        return False
    size = _u64(page, at) & 0xFFFFFFFF
    start = at + 8 + key_size
    out[1], out[2], out[3] = size, number * page_size + at + 8, key_size
    if page[at + 4] & 1 == 0:
        out[0] = number * page_size + start
        return start + size <= page_size
    if start + 8 > page_size:
        return False
    first = _u64(page, start)
    if first < 2 or first > last_page:
        return False
    pages = (_HEADER + size + page_size - 1) // page_size
    out[0] = first * page_size + _HEADER
    return pages <= last_page - first + 1


@njit
def _number(first: np.ndarray, index: int, key: np.ndarray) -> bool:
    """Write the padded number that is ``index`` more than ``first``; False where it has more digits."""
    rest = index
    for at in range(first.size - 1, -1, -1):
        rest += first[at] - 48
        key[at] = 48 + rest % 10
        rest //= 10
    return rest == 0


@njit
def _kept(keys: np.ndarray, ends: np.ndarray, which: int) -> np.ndarray:
    """A kept key: a copy, of the same kind of array as a number."""
    begin, end = np.int64(ends[which - 1]) if which else np.int64(0), np.int64(ends[which])
    key = np.empty(end - begin, np.uint8)
    for place in range(key.size):
        key[place] = keys[begin + place]
    return key


@njit
def _note(
    page: np.ndarray, number: int, nodes: int, index: int, sizes: np.ndarray, keys: np.ndarray, key: np.ndarray,
    cells: np.ndarray,
) -> None:  # fmt: skip
    """Keep the places of all records of a leaf, the first of which is record ``index``. ``key`` is written over."""
    dense = sizes[4] == 0
    found = np.empty(4, np.int64)
    for other in range(nodes):
        which = index + other
        if which < 0 or which >= cells.shape[0] or not _place(page, number, other, sizes, found):
            continue
        if dense:
            # Keys that only look like all the numbers: a gap, and what comes behind is another's place.
            same = _number(keys, which, key) and found[3] == key.size
            at = found[2] - number * sizes[0]
            for place in range(key.size if same else 0):
                same &= page[at + place] == key[place]
            if not same:
                continue
        overflow = np.int64(0)
        if found[0] != found[2] + found[3]:
            overflow = found[0] // sizes[0]
        if found[2] < MOST_OFFSET and overflow < MOST_PAGE:
            cells[which, 0] = np.uint64(found[2] | found[3] << 48)
            cells[which, 1] = np.uint64(found[1] | overflow << 32)


@njit
def _known(cells: np.ndarray, index: int, page_size: int, out: np.ndarray) -> bool:
    """Write the place of a record if it is kept."""
    if index >= cells.shape[0] or cells[index, 0] == 0:
        return False
    first, rest = np.int64(cells[index, 0]), np.int64(cells[index, 1])
    key_size = (first >> 48) & 0xFFFF
    out[2], out[3] = first & (MOST_OFFSET - 1), key_size
    overflow = (rest >> 32) & 0xFFFFFFFF
    out[0] = overflow * page_size + _HEADER if overflow else out[2] + key_size
    out[1] = rest & 0xFFFFFFFF
    return True


@njit
def _find(
    fd: int, sizes: np.ndarray, index: int, key: np.ndarray, steps: int, keys: np.ndarray, pages: np.ndarray,
    held: np.ndarray, path: np.ndarray, cells: np.ndarray, out: np.ndarray,
) -> tuple[int, int]:  # fmt: skip
    """Place of the record that comes ``steps`` behind ``key``: status and page. The leaf is then in the last row."""
    page_size, number = sizes[0], sizes[2]
    depth, row, node = 0, 0, 0
    while True:
        row, status = _page(fd, number, sizes, pages, held)
        if status == FOUND and depth == _DEEPEST:
            status = DAMAGED
        if status != FOUND:
            return status, number
        page = pages[row]
        kind, nodes = _shape(page)
        node, equal, sound = _search(page, page_size, nodes, np.int64(kind & 1), key)  # a branch's first key is none
        if kind & 2:
            if not sound or not equal:
                return DAMAGED if not sound else MISSING, number
            break
        at, _size = _node(page, node, page_size)
        if not sound or at < 0:
            return DAMAGED, number
        path[0, depth], path[1, depth] = number, node
        depth += 1
        number = _u64(page, at) & _PAGE_MASK
    while steps >= nodes - node:  # on to the next leaf
        steps -= nodes - node
        level = depth - 1
        while level >= 0:
            row, status = _page(fd, path[0, level], sizes, pages, held)
            if status != FOUND:
                return status, path[0, level]
            if path[1, level] + 1 < _shape(pages[row])[1]:
                break
            level -= 1
        if level < 0:
            return ENDED, number
        path[1, level] += 1
        while True:
            at, _size = _node(pages[row], path[1, level], page_size)
            if at < 0:
                return DAMAGED, path[0, level]
            number = _u64(pages[row], at) & _PAGE_MASK
            row, status = _page(fd, number, sizes, pages, held)
            level += 1
            is_leaf = status == FOUND and _shape(pages[row])[0] & 2 != 0
            if status == FOUND and is_leaf != (level == depth):
                status = DAMAGED  # all leaves lie at one depth
            if status != FOUND:
                return status, number
            if is_leaf:
                break
            path[0, level], path[1, level] = number, 0
        nodes, node = _shape(pages[row])[1], np.int64(0)  # type: ignore[assignment]
    node += steps
    page = pages[row]
    if not _place(page, number, node, sizes, out):
        return DAMAGED, number
    if cells.shape[0]:  # what comes before and after on the page has been read as well
        _note(page, number, nodes, index - node, sizes, keys, key, cells)
    return FOUND, number


@njit
def find(
    fd: int,
    sizes: np.ndarray,
    indices: np.ndarray,
    keys: np.ndarray,
    ends: np.ndarray,
    pages: np.ndarray,
    held: np.ndarray,
    cells: np.ndarray,
    places: np.ndarray,
    failed: np.ndarray,
    data: np.ndarray,
    starts: np.ndarray,
) -> int:
    """Find records, and read those that lie on a leaf. Returns how many were found; ``failed`` tells of the next one.

    Parameters
    ----------
    sizes: int64: bytes of a page, last page, root, number of records, and how many records lie from one kept key to the
        next; 0 where the keys are padded numbers.
    indices: int64 [n], positions of the records.
    keys, ends: uint8 and uint64, the kept keys one after another, and where each ends; or the digits of the first
        number, and nothing.
    pages, held: uint8 [rows + 1, page]; int64 [rows + 1], the page in each row. Branches, and in the last row a leaf.
    cells: uint64 [records or 0, 2], places that are kept, see :class:`datasets.lmdb_locate.Locator`.
    places: int64 [4, n]: offset and length of the value, offset and length of the key.
    failed: int64 [2]: status and page.
    data: uint8, room for the records that lie on a leaf, key and value behind each other. starts: int64 [n], where in
        it the value begins; -1 for those that are not there: their places say where to read them. Both may be empty.
    """
    page_size, last = sizes[0], held.size - 1
    held[last] = _NO_PAGE  # a leaf of another call is never believed
    found, path = np.empty(4, np.int64), np.empty((2, _DEEPEST), np.int64)
    dense = sizes[4] == 0
    key = np.empty(keys.size if dense else 0, np.uint8)
    free = np.int64(0)
    for query in range(indices.size):
        index = indices[query]
        status, at_page, steps = FOUND, np.int64(0), np.int64(0)
        if not _known(cells, index, page_size, found):
            if dense:
                sound = _number(keys, index, key)
            else:
                steps = index % sizes[4]
                key, sound = _kept(keys, ends, index // sizes[4]), True
            if not sound:
                status = MISSING
            else:
                status, at_page = _find(fd, sizes, index, key, steps, keys, pages, held, path, cells, found)
        if status != FOUND:
            failed[0], failed[1] = status, at_page
            return query
        for part in range(4):
            places[part, query] = found[part]
        if starts.size == 0:
            continue
        starts[query] = -1
        size = found[3] + found[1]
        if found[0] != found[2] + found[3] or free + size > data.size:
            continue
        leaf, inside = found[2] // page_size, found[2] % page_size
        follows = held[last] != leaf and query + 1 < indices.size
        if follows and _known(cells, indices[query + 1], page_size, found) and found[2] // page_size == leaf:
            _page(fd, leaf, sizes, pages, held)  # two in a row of one page: it is read once
        if held[last] == leaf:
            _copy(pages[last], inside, data, free, size)
        elif _read(fd, places[2, query], data, free, size) != FOUND:
            continue
        starts[query] = free + places[3, query]
        free += size
    failed[0], failed[1] = FOUND, 0
    return indices.size
