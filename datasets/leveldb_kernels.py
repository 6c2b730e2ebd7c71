"""A record out of a LevelDB's table or log without Python: read, verified, decompressed and found by its key.

The same as :class:`datasets.leveldb_table.Table` does by libraries, which tests hold it to. It takes what is usual,
plain blocks and Snappy's, and gives up at anything else: the general way then reads the record, or says what is wrong.
"""
# mypy: disallow_untyped_defs=False, disable-error-code=assignment

from __future__ import annotations

import numpy as np

from datasets.crc32c import crc32c
from profiler.jit import CFunction, njit

PAGE = 4096
LONGEST_KEY = 1024
_LINE = 64
_TRAILER, _TAG = 5, 8
_SEVEN, _MORE = np.uint64(7), np.uint64(0x80)
_LOW7 = np.uint64(0x7F)
_MASK, _HALF, _HIGH = np.uint32(0xA282EAD8), np.uint32(15), np.uint32(17)
_FEW = 16

pread = CFunction("pread", "intp", "intc", "uintp", "uintp", "int64")
memcpy = CFunction("memcpy", "uintp", "uintp", "uintp", "uintp")


@njit
def read(fd, offset, size, scratch, at):
    """Read bytes of a file into scratch, from ``at`` on. False for a short read."""
    done = np.int64(0)
    while done < size:
        got = pread(fd, scratch.ctypes.data + at + done, size - done, offset + done)
        if got <= 0:
            return False
        done += got
    return True


@njit
def congruent(offset):
    """Where in a buffer that begins at a page the bytes from ``offset`` of a file should go: at a cache line of about
    the same place in its page. Where the target lies a little further on in its page than the source, some processors
    copy at a fifth of the speed, since they take the one for the other."""
    return offset & (PAGE - _LINE)


@njit
def varint(bytes_, at, end):
    """The number at a place and the place after it; -1 where it is none."""
    value, shift = np.uint64(0), np.uint64(0)
    for _ in range(10):
        if at >= end:
            return value, -1
        byte = np.uint64(bytes_[at])
        at += 1
        value |= (byte & _LOW7) << shift
        if byte < _MORE:
            return value, at
        shift += _SEVEN
    return value, -1


@njit
def size_of(packed, start, end):
    """How many bytes Snappy's block packed[start:end] becomes; -1 where it is none, or none that is believed."""
    size, at = varint(packed, start, end)
    return np.int64(size) if at >= 0 and size < np.uint64(1 << 30) else np.int64(-1)


@njit
def unsnap(packed, start, end, out):
    """Decompress Snappy's block packed[start:end] into out. Returns how many bytes, -1 where it is damaged or out too
    small. The format: ``format_description.txt`` of Snappy."""
    length, at = varint(packed, start, end)
    if at < 0 or length > np.uint64(len(out)):
        return -1
    size, put = np.int64(length), 0
    while at < end:
        tag = np.int64(packed[at])
        at += 1
        kind = tag & 3
        if kind == 0:  # bytes as they are
            n = (tag >> 2) + 1
            if n > 60:
                extra = n - 60
                if extra > end - at:
                    return -1
                n = np.int64(0)
                for k in range(extra):
                    n |= np.int64(packed[at + k]) << (8 * k)
                n += 1
                at += extra
            if n > end - at or n > size - put:
                return -1
            if n > _FEW:
                memcpy(out.ctypes.data + put, packed.ctypes.data + at, n)
            else:
                for k in range(n):
                    out[put + k] = packed[at + k]
            at += n
            put += n
            continue
        if kind == 1:  # bytes that came before
            n, width, back = 4 + ((tag >> 2) & 7), 1, (tag >> 5) << 8
        else:
            n, width, back = (tag >> 2) + 1, 2 if kind == 2 else 4, np.int64(0)
        if width > end - at:
            return -1
        for k in range(width):
            back |= np.int64(packed[at + k]) << (8 * k)
        at += width
        if back == 0 or back > put or n > size - put:
            return -1
        if back >= n and n > _FEW:
            memcpy(out.ctypes.data + put, out.ctypes.data + put - back, n)
        else:
            done = min(n, back)
            for k in range(done):
                out[put + k] = out[put - back + k]
            while done < n:  # what repeats is copied from itself, twice as much each time
                more = min(done, n - done)
                memcpy(out.ctypes.data + put + done, out.ctypes.data + put, more)
                done += more
        put += n
    return size if put == size else -1


@njit
def seek(block, key, found):
    """The newest value of a key in a block: its start and end; -1 where it is not there, deleted, or not understood.

    found: uint8[LONGEST_KEY], room for a key.
    """
    if len(block) < 4:
        return -1, -1
    count = np.int64(block[-4]) | np.int64(block[-3]) << 8 | np.int64(block[-2]) << 16 | np.int64(block[-1]) << 24
    end = len(block) - 4 - 4 * count
    at, before = 0, 0
    while at < end:
        shared, at = varint(block, at, end)
        if at < 0:
            return -1, -1
        fresh, at = varint(block, at, end)
        if at < 0:
            return -1, -1
        size, at = varint(block, at, end)
        if at < 0 or shared > np.uint64(before) or fresh > np.uint64(LONGEST_KEY) or size > np.uint64(end - at):
            return -1, -1
        kept, more, n = np.int64(shared), np.int64(fresh), np.int64(size)
        if kept + more > LONGEST_KEY or kept + more < _TAG or more + n > end - at:
            return -1, -1
        for k in range(more):
            found[kept + k] = block[at + k]
        at += more
        before = kept + more
        if before - _TAG == len(key):
            same = True
            for k in range(len(key)):
                if found[k] != key[k]:
                    same = False
                    break
            if same:
                return (at, at + n) if found[len(key)] == 1 else (-1, -1)
        at += n
    return -1, -1


@njit
def sound(stored, size):
    """Whether a block of ``size`` bytes, with what stands behind it, has the checksum that was written."""
    crc = np.uint32(crc32c(stored[: size + 1]))
    masked = ((crc >> _HALF) | (crc << _HIGH)) + _MASK
    written = np.uint32(0)
    for k in range(4):
        written |= np.uint32(stored[size + 1 + k]) << np.uint32(8 * k)
    return np.uint32(masked) == written
