"""Records of an LMDB into a slot, one compiled call a batch: read, parsed, cropped, mirrored and hashed one after the
other, while each is in the cache. Importing this file imports numba: do it at first use.

It takes what nearly all records are, raw pixels with a label, and gives up at the first that is not: the general way
(:mod:`pipeline.maker`) then makes the batch, or says what is wrong. So nothing here decides what an error is.
"""
# mypy: disallow_untyped_defs=False

from __future__ import annotations

import numpy as np

from pipeline.kernels import hash_of, put
from profiler.jit import CFunction, njit

_MORE, _SEVEN, _LAST = np.uint64(0x80), np.uint64(0x7F), np.uint64(10)
_INT32 = np.uint64(0xFFFF_FFFF)
_SIGN = np.int64(0x8000_0000)


pread = CFunction("pread", "intp", "intc", "uintp", "uintp", "int64")
clock_gettime = CFunction("clock_gettime", "intc", "intc", "uintp")


@njit
def _now(pair):
    """Nanoseconds of CLOCK_MONOTONIC; pair int64[2] is where the library writes."""
    clock_gettime(1, pair.ctypes.data)
    return pair[0] * 1_000_000_000 + pair[1]


@njit
def _varint(bytes_, at, end):
    """The number at a place and the place after it; -1 where it is none."""
    value, shift = np.uint64(0), np.uint64(0)
    for _ in range(10):
        if at >= end:
            return value, -1
        byte = np.uint64(bytes_[at])
        at += 1
        value |= (byte & _SEVEN) << shift
        if byte < _MORE:
            return value, at
        shift += np.uint64(7)
    return value, -1


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
            size, at = _varint(record, at, end)
            if at < 0 or size > np.uint64(end - at):
                return False
            found[4], found[5] = at, np.int64(size)
            at += np.int64(size)
            continue
        if tag != 0x08 and tag != 0x10 and tag != 0x18 and tag != 0x28 and tag != 0x38:
            return False
        value, at = _varint(record, at, end)
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
def make(fd, offsets, lengths, scratch, shape, words, mirror, random, mean, scale, out, labels, hashes, times):
    """Make a batch. Returns how many records were taken: fewer than all where one is none of these.

    Parameters
    ----------
    fd, offsets, lengths: where the records lie, int64[B] each.
    scratch: uint8, more bytes than the longest record has, from a multiple of 64 on.
    shape: int64[3]: channels, height and width that every record must have, the last two 0 where a crop allows any.
    words: uint64[B, 4], what chance drew (:func:`pipeline.philox.block_1`); mirror, random: whether it decides on
        mirroring and on the place of the crop.
    mean, scale, out, labels: as in :func:`pipeline.kernels.fill`; labels int32[B].
    hashes: uint64[B] for the hashes of the stored bytes, or empty.
    times: int64[3], nanoseconds of reading, of parsing and hashing, and of filling.
    """
    pair, found = np.empty(2, np.int64), np.empty(6, np.int64)
    rows, columns = out.shape[2], out.shape[3]
    row = np.empty(columns, out.dtype)
    before = _now(pair)
    for i in range(len(offsets)):
        size = lengths[i]
        done = np.int64(0)
        while done < size:
            got = pread(fd, scratch.ctypes.data + done, size - done, offsets[i] + done)
            if got <= 0:
                return i
            done += got
        now = _now(pair)
        times[0] += now - before
        before = now
        if not _parse(scratch, size, found):
            return i
        channels, height, width = found[0], found[1], found[2]
        if channels != shape[0] or (shape[1] and (height != shape[1] or width != shape[2])):
            return i
        if height < rows or width < columns:
            return i
        if len(hashes):
            hashes[i] = hash_of(np.uint64(scratch.ctypes.data), np.uint64(size))
        now = _now(pair)
        times[1] += now - before
        before = now
        top, left = (height - rows) // 2, (width - columns) // 2
        if random:
            top = np.int64(words[i, 1] % np.uint64(height - rows + 1))
            left = np.int64(words[i, 2] % np.uint64(width - columns + 1))
        flip = mirror and words[i, 0] & np.uint64(1) == np.uint64(1)
        image = scratch[found[4] : found[4] + found[5]].reshape((channels, height, width))
        put(image, top, left, flip, mean, scale, row, out[i])
        labels[i] = found[3]
        now = _now(pair)
        times[2] += now - before
        before = now
    return len(offsets)
