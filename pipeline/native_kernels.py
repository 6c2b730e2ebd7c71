"""Records of an LMDB or a LevelDB into a slot, one compiled call a batch: read, parsed, cropped, mirrored and hashed
one after the other, while each is in the cache.

It takes what nearly all records are, raw pixels with a label, and gives up at the first that is not: the general way
(:mod:`pipeline.maker`) then makes the batch, or says what is wrong. So nothing here decides what an error is.
"""
# mypy: disallow_untyped_defs=False

from __future__ import annotations

import numpy as np

from datasets.leveldb_kernels import congruent, read, seek, size_of, sound, unsnap, varint
from pipeline.kernels import bytes_at, carray, fetch, hash_of, memcpy, put, room_for
from profiler.jit import CFunction, njit

_INT32 = np.uint64(0xFFFF_FFFF)
_SIGN = np.int64(0x8000_0000)
_TRAILER = 5
_PAGE, _LINE = 4096, 64
_AHEAD = 2
"""Records between the one that is worked on and the one that is fetched."""

clock_gettime = CFunction("clock_gettime", "intc", "intc", "uintp")


@njit
def _now(pair):
    """Nanoseconds of CLOCK_MONOTONIC; pair int64[2] is where the library writes."""
    clock_gettime(1, pair.ctypes.data)
    return pair[0] * 1_000_000_000 + pair[1]


@njit
def _int32(value):
    low = np.int64(value & _INT32)
    return low - (_SIGN << 1) if low & _SIGN else low


@njit
def _parse(record, end, found):
    """The fields of a Datum of raw pixels into found, int64[6]: channels, height, width, label, first byte of the
    pixels and their number. False where it is anything else: see :mod:`datasets.datum`."""
    found[:] = 0
    at, labels = 0, 0
    while at < end:
        tag = record[at]
        at += 1
        if tag == 0x22:  # data
            size, at = varint(record, at, end)
            if at < 0 or size > np.uint64(end - at):
                return False
            found[4], found[5] = at, np.int64(size)
            at += np.int64(size)
            continue
        if tag != 0x08 and tag != 0x10 and tag != 0x18 and tag != 0x28 and tag != 0x38:
            return False
        value, at = varint(record, at, end)
        if at < 0:
            return False
        if tag == 0x28:
            found[3], labels = _int32(value), 1
        elif tag == 0x38:
            if value:
                return False  # an image file
        else:
            found[(tag >> 3) - 1] = _int32(value)
    if labels == 0 or found[0] < 1 or found[1] < 1 or found[2] < 1 or found[5] < 1:
        return False
    return found[0] * found[1] * found[2] == found[5] and found[0] < 1 << 16 and found[1] < 1 << 20


@njit
def _take(i, record, spare, shape, words, mirror, random, mean, scale, lines, out, labels, hashes, times, pair, before):
    """Parse, hash and write record i, given as its bytes; returns the time, or -1 where it is none of these."""
    found = np.empty(6, np.int64)
    if not _parse(record, len(record), found):
        return np.int64(-1)
    channels, height, width = found[0], found[1], found[2]
    rows, columns = out.shape[2], out.shape[3]
    if channels != shape[0] or (shape[1] and (height != shape[1] or width != shape[2])):
        return np.int64(-1)
    if height < rows or width < columns:
        return np.int64(-1)
    if len(hashes):
        place = np.uint64(record.ctypes.data)
        if place & np.uint64(7):
            memcpy(spare.ctypes.data, place, len(record))
            place = np.uint64(spare.ctypes.data)
        hashes[i] = hash_of(place, np.uint64(len(record)))
    now = _now(pair)
    times[1] += now - before
    top, left = (height - rows) // 2, (width - columns) // 2
    if random:
        top = np.int64(words[i, 1] % np.uint64(height - rows + 1))
        left = np.int64(words[i, 2] % np.uint64(width - columns + 1))
    flip = mirror and words[i, 0] & np.uint64(1) == np.uint64(1)
    image = record[found[4] : found[4] + found[5]].reshape((channels, height, width))
    put(image, top, left, flip, mean, scale, lines, out[i])
    labels[i] = found[3]
    done = _now(pair)
    times[2] += done - now
    return done


@njit
def _fetch_head(address, size):
    """Bring the beginning of a record near while others are worked on; the processor notices by itself that a long one
    goes on."""
    for k in range(0, min(size, _PAGE), _LINE):
        fetch(address + np.uint64(k))


@njit(packages=("datasets",))
def make(
    fd, base, mapped, offsets, lengths, scratch, shape, words, mirror, random, mean, scale, out, labels, hashes, times
):
    """Make a batch of an LMDB. Returns how many records were taken: fewer than all where one is none of these.

    Parameters
    ----------
    fd, offsets, lengths: where the records lie, int64[B] each.
    base, mapped: uint64, int64: where the file lies in memory, and how many bytes of it; what lies behind them is read.
    scratch: uint8 from a page on, a page more than the longest record.
    shape: int64[3]: channels, height and width that every record must have, the last two 0 where a crop allows any.
    words: uint64[B, 4], what chance drew (:func:`pipeline.philox.block_1`); mirror, random: whether it decides on
        mirroring and on the place of the crop.
    mean, scale, out, labels: as in :func:`pipeline.kernels.fill`; labels int32[B].
    hashes: uint64[B] for the hashes of the stored bytes, or empty.
    times: int64[4], nanoseconds of reading, of parsing and hashing, of filling, and how much of the first verifying is.
    """
    pair = np.empty(2, np.int64)
    lines = room_for(out.shape[3])
    before = _now(pair)
    for i in range(len(offsets)):
        size = lengths[i]
        if offsets[i] + size <= mapped:
            if i + _AHEAD < len(offsets) and offsets[i + _AHEAD] < mapped:
                _fetch_head(base + np.uint64(offsets[i + _AHEAD]), lengths[i + _AHEAD])
            record = carray(bytes_at(base + np.uint64(offsets[i])), (size,), np.uint8)
        else:
            at = congruent(offsets[i])
            if not read(fd, offsets[i], size, scratch, at):
                return i
            record = scratch[at : at + size]
        now = _now(pair)
        times[0] += now - before
        before = _take(
            i, record, scratch, shape, words, mirror, random, mean, scale, lines, out, labels, hashes, times, pair, now
        )
        if before < 0:
            return i
    return len(offsets)


@njit(packages=("datasets",))
def make_from_tables(
    order, pieces, fds, starts, sizes, blocks, keys, key_ends, stored, opened, spare, need, shape, words, mirror,
    random, mean, scale, out, labels, hashes, times,
):  # fmt: skip
    """Make a batch of a LevelDB; otherwise as :func:`make`.

    Parameters
    ----------
    order: int64[B], in which records are taken: those of one block together.
    pieces: int64[B + 1]: those of record i are pieces[i] up to pieces[i + 1] of fds, starts and sizes, int64 each.
    blocks: bool[B]: whether the only piece is the block of a table; else the pieces are the record's bytes.
    keys, key_ends: uint8 and int64[B]: the keys one after the other, and where each ends.
    stored, opened, spare: uint8 from a page on: room for what is read, for a block, and for a record.
    need: int64[1], set to how many bytes each room should have where it is too small (and the call given up).
    """
    pair, name = np.empty(2, np.int64), np.empty(1024, np.uint8)
    lines = room_for(out.shape[3])
    before = _now(pair)
    last_fd, last_start, inside = np.int64(-1), np.int64(-1), stored[:0]
    for taken in range(len(order)):
        i = order[taken]
        first = pieces[i]
        if blocks[i]:
            size = sizes[first]
            if fds[first] != last_fd or starts[first] != last_start:
                if size + _TRAILER + _PAGE > len(stored):
                    need[0] = size + _TRAILER + _PAGE
                    return taken
                at = congruent(starts[first])
                if not read(fds[first], starts[first], size + _TRAILER, stored, at):
                    return taken
                verified = _now(pair)
                block = stored[at : at + size + _TRAILER]
                if not sound(block, size):
                    return taken
                times[3] += _now(pair) - verified
                if block[size] == 0:
                    inside = block[:size]
                elif block[size] == 1:
                    room = size_of(block, 0, size)
                    if room > len(opened):
                        need[0] = room
                        return taken
                    room = unsnap(block, 0, size, opened)
                    if room < 0:
                        return taken
                    inside = opened[:room]
                else:
                    return taken
                last_fd, last_start = fds[first], starts[first]
            begin = key_ends[i - 1] if i else 0
            low, high = seek(inside, keys[begin : key_ends[i]], name)
            if low < 0:
                return taken
            record = inside[low:high]
        else:
            last_fd = np.int64(-1)  # what was in the room for blocks is overwritten
            size = np.int64(0)
            for piece in range(first, pieces[i + 1]):
                if size + sizes[piece] > len(stored):
                    need[0] = size + sizes[piece]
                    return taken
                if not read(fds[piece], starts[piece], sizes[piece], stored, size):
                    return taken
                size += sizes[piece]
            record = stored[:size]
        if len(record) > len(spare):
            need[0] = len(record)
            return taken
        now = _now(pair)
        times[0] += now - before
        before = _take(
            i, record, spare, shape, words, mirror, random, mean, scale, lines, out, labels, hashes, times, pair, now
        )
        if before < 0:
            return taken
    return len(order)
