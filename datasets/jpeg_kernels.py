"""Compiled loops of :mod:`datasets.jpeg`: headers, Huffman codes and colours of baseline JPEG files.

The bytes are not trusted: every read is bounded, and whatever is
not entirely regular makes a function say so, which leaves the file to libjpeg-turbo.
"""
# mypy: disallow_untyped_defs=False

from __future__ import annotations

import numpy as np

from datasets.jpeg_blocks import LARGEST_SUM, inverse
from profiler.jit import intrinsic, later, njit

ir, carray, types = later("llvmlite.ir"), later("numba.carray"), later("numba.types")

LOOK = 11
"""Bits that are looked up at once: 8 KB a table, of which a photograph uses four."""

_ZIGZAG = np.array([
    0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7, 14, 21,
    28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54,
    47, 55, 62, 63,
], np.uint8)  # fmt: skip
LOOK_ = np.uint64(LOOK)
_LOOK = np.uint64(64 - LOOK)
_SLOW, _END = 128, 100  # marks of an entry: not decided by LOOK bits; run of "end of block"
_1, _3, _32, _56, _63, _64 = (np.uint64(number) for number in (1, 3, 32, 56, 63, 64))
_0 = np.uint64(0)
_NONE, _MOST, _HALF, _16, _I8, _I128 = (np.int32(number) for number in (0, 255, 32768, 16, 8, 128))
_OVER = np.uint64(1024)
_LOW_BITS, _HIGH_BITS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)


@intrinsic
def _bytes_at(typingctx, address):
    """An address (uint64) as a pointer to bytes."""
    signature = types.CPointer(types.uint8)(types.uint64)

    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return signature, codegen


@intrinsic
def _word_at(typingctx, address):
    """Eight bytes, wherever they lie, the first one highest."""

    def codegen(context, builder, sig, args):
        word = builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)
        return builder.bswap(word)

    return types.uint64(types.uint64), codegen


@intrinsic
def _put_word(typingctx, address, word):
    def codegen(context, builder, sig, args):
        builder.store(builder.bswap(args[1]), builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), codegen


@njit
def table(kind, counts, symbols, entries, strides, limits, offsets):
    """Make the look-up table of a Huffman code. Returns whether the code is sound.

    kind: 0 for DC, 1 for AC. counts uint8[17], of codes of each length; symbols uint8[256]. Written: entries
    int32[1 << LOOK]; strides, the same for as many codes as fit together; limits and offsets int64[17], for what takes
    more bits.
    """
    code, place = 0, 0
    for i in range(1 << LOOK):
        entries[i] = _SLOW
    for bits in range(1, 17):
        offsets[bits] = place - code
        for _ in range(counts[bits]):
            if kind == 0 and symbols[place] > 15:
                return False
            if code >> bits:
                return False
            if bits <= LOOK:
                first = code << (LOOK - bits)
                for rest in range(first, first + (1 << (LOOK - bits))):
                    entry = _entry(np.uint64(rest) << _LOOK, bits, np.int64(symbols[place]), kind == 0)
                    entries[rest] = entry if entry & 63 <= LOOK else _SLOW
            code, place = code + 1, place + 1
        limits[bits] = code  # codes of this length are below it
        if counts[bits] and code >= 1 << bits:  # a code of ones alone is not allowed
            return False
        code <<= 1
    for first in range(1 << LOOK):
        used, places, end = np.int64(0), np.int64(0), 0
        while not end:
            entry = np.int64(entries[(first << used) & ((1 << LOOK) - 1)])
            if entry & _SLOW or used + (entry & 63) > LOOK:
                break
            used += entry & 63
            if (entry >> 8) & 127 == _END:
                end = _SLOW
            elif places < 64:
                places += ((entry >> 8) & 127) + 1
        strides[first] = (min(places, np.int64(100)) << 8) | end | used
    return True


@njit
def _entry(word, bits, symbol, direct):
    """What a code of ``bits`` bits at the top of ``word`` means: number << 16 | run << 8 | length with the number."""
    size, run = symbol & 15, symbol >> 4
    if direct:
        run = 0
    elif size == 0 and run != 15:
        run = _END
    number = np.int64(((word << np.uint64(bits)) >> _1) >> np.uint64(63 - size))
    if number < (1 << size) >> 1:  # ITU-T T.81, figure F.12
        number += 1 - (1 << size)
    return (number << 16) | (run << 8) | (bits + size)


@njit
def _long(word, table, limits, offsets, symbols):
    """The entry for a code that is, or whose number is, beyond LOOK bits; 0 for no code."""
    for bits in range(1, 17):
        code = np.int64(word >> np.uint64(64 - bits))
        place = code + offsets[table, bits]
        if code < limits[table, bits] and place >= 0:
            return _entry(word, bits, np.int64(symbols[table, place & 255]), table < 4)
    return np.int64(0)


@njit
def unstuff(address, length, start, plain):
    """Copy the coded data without its stuffing zeros. Returns its length, and the marker that ends it (or 0)."""
    view = carray(_bytes_at(address), (length,), np.uint8)
    at, to, base, target = start, 0, address, np.uint64(plain.ctypes.data)
    while True:
        while at + 8 <= length:
            word = _word_at(base + np.uint64(at))
            if (~word - _LOW_BITS) & word & _HIGH_BITS:
                break
            _put_word(target + np.uint64(to), word)
            at, to = at + 8, to + 8
        stop = min(at + 8, length)
        while at < stop:
            byte = view[at]
            if byte == 0xFF:
                if at + 1 >= length:
                    return to, 0
                if view[at + 1] != 0:
                    return to, np.int64(view[at + 1])
                at += 1
            plain[to] = byte
            at, to = at + 1, to + 1
        if at >= length:
            return to, 0


@njit
def scan(
    shape, used, window, kept, quantisers, entries, strides, limits, offsets, symbols, plain, size, coefficients, planes
):
    """Decode the coded data of some rows of MCUs, and the pixels of those blocks that are wanted.

    shape: blocks of luma across and down an MCU, blocks of an MCU, MCUs in a row, rows to decode.
    used: int64[components, 3], which quantiser, DC table and AC table each component uses.
    window: first and last + 1 row, then column, of the MCUs that are wanted. kept: so many components of them.
    size: bytes in ``plain``, which has PADDING more. planes: a tuple of three uint8[h, w], whole MCUs.
    Returns how many bits of the data were used, -1 where something is irregular.
    """
    across, down, blocks, columns, rows = shape
    top, bottom, left, right = window
    first, second, third = planes
    dc = np.zeros(3, np.int64)
    here = np.uint64(plain.ctypes.data)
    begin, limit = here, here + np.uint64(size + 8)
    store = np.uint64(coefficients.ctypes.data)
    bits, n = _0, _0
    for row in range(rows):
        for column in range(columns):
            inside = top <= row < bottom and left <= column < right
            for block in range(blocks):
                component = max(0, block - across * down + 1)
                wanted = inside and component < kept
                if wanted:
                    coefficients[:] = 0
                factors = np.uint64(used[component, 0])
                table = np.uint64(used[component, 1])
                bits |= _word_at(here) >> n
                here += (_63 - n) >> _3
                n |= _56
                entry = np.int64(entries[table, bits >> _LOOK])
                if entry & _SLOW:
                    entry = _long(bits, np.int64(table), limits, offsets, symbols)
                    if not entry:
                        return -1
                taken = np.uint64(entry & 63)
                dc[component] += entry >> 16
                if abs(dc[component]) > 32767:
                    return -1
                bits <<= taken
                n -= taken
                coefficients[0] = dc[component] * np.int64(quantisers[factors, 0])
                table = np.uint64(used[component, 2])
                k = _1
                last, done = _64, wanted
                while not done:  # over codes whose numbers nobody wants, several at a time
                    bits |= _word_at(here) >> n
                    here += (_63 - n) >> _3
                    n |= _56
                    for _ in range(4):
                        entry = np.int64(strides[table, bits >> _LOOK])
                        places = np.uint64(entry >> 8)
                        taken = np.uint64(entry & 63)
                        done = not taken or k + places > _63
                        if done:
                            break
                        bits <<= taken
                        n -= taken
                        k += places
                        if entry & _SLOW:
                            done = True
                            k = _64
                            break
                while k <= _63:
                    bits |= _word_at(here) >> n
                    here += (_63 - n) >> _3
                    n |= _56
                    for _ in range(4):  # of at most LOOK bits each
                        entry = np.int64(entries[table, bits >> _LOOK])
                        if entry & _SLOW:
                            bits |= _word_at(here) >> n
                            here += (_63 - n) >> _3
                            n |= _56
                            entry = _long(bits, np.int64(table), limits, offsets, symbols)
                            if not entry:
                                return -1
                        last = k
                        k += np.uint64((entry >> 8) & 127)
                        if k > _63:
                            k += _OVER
                            break
                        taken = np.uint64(entry & 63)
                        bits <<= taken
                        n -= taken
                        coefficients[np.uint64(_ZIGZAG[k])] = (entry >> 16) * np.int64(quantisers[factors, k])
                        k += _1
                        if taken > LOOK_:
                            break
                if k >= _OVER and last < _64:  # else the block is full and the entry belongs to the next one
                    if k < _OVER + np.uint64(_END):
                        return -1
                    taken = np.uint64(entry & 63)
                    bits <<= taken
                    n -= taken
                if here > limit:
                    return -1
                if wanted:
                    if component == 0:
                        y = (row - top) * down + block // across
                        x = (column - left) * across + block % across
                        plane = first
                    else:
                        y, x = row - top, column - left
                        plane = second if component == 1 else third
                    stride = plane.shape[1]
                    target = np.uint64(plane.ctypes.data) + np.uint64(8 * (y * stride + x))
                    if inverse(store, target, np.uint64(stride)) > LARGEST_SUM:
                        return -1
    return np.int64((here - begin) << _3) - np.int64(n)


@njit
def colours(tiling, size, corner, box, planes, sums, line, gray, out):
    """Write a part of the picture: uint32[h, w], blue in the lowest byte, then green and red; or luma alone.

    tiling: pixels to a sample of chroma, across and down. size: height and width of the chroma planes in the picture.
    corner: row and column of the picture where ``planes`` begin. box: row and column where ``out`` begins.
    sums, line: int32[2, >= w + 4], for chroma between its samples (libjpeg's "fancy" triangle filter).
    gray: what luma is multiplied by where there is no chroma, 0 where there is.
    """
    across, down = tiling
    first, second, third = planes
    height, width = out.shape
    for y in range(height):
        luma = first[box[0] + y - corner[0], box[1] - corner[1] :]
        target = out[y]
        if gray:
            for x in range(width):
                target[x] = np.uint32(luma[x] * gray)
            continue
        row = (box[0] + y) // down
        near = row - corner[0] // down
        far = near
        if down == 2:
            far = min(max(row + (1 if (box[0] + y) & 1 else -1), 0), size[0] - 1) - corner[0] // 2
        start = box[1] // across
        for chroma in range(2):
            plane = second if chroma == 0 else third
            _between(
                plane[near], plane[far], across, down, start, start - corner[1] // across, size[1],
                (box[1] + width - 1) // across - start + 1, sums[0], line[chroma],
            )  # fmt: skip
        _to_colours(luma, line[0, box[1] % across :], line[1, box[1] % across :], target)


@njit
def _between(near, far, across, down, start, place, whole, count, sums, line):
    """Chroma of a row of pixels, less 128: ``count`` samples from ``start`` on, at ``place`` in the plane."""
    if across == 1:
        for i in range(count):
            line[i] = np.int32(near[place + i]) - _I128
        return
    inner, outer = near[place:], far[place:]
    before, here, after = sums, sums[1:], sums[2:]
    weight = np.int32(3 if down == 2 else 1)
    share = np.int32(1 if down == 2 else 0)
    if down == 2:
        for i in range(count):
            here[i] = np.int32(np.int32(inner[i]) * np.int32(3)) + np.int32(outer[i])
    else:
        for i in range(count):
            here[i] = np.int32(inner[i])
    before[0], after[count - 1] = here[0], here[count - 1]
    if start > 0:
        before[0] = weight * near[place - 1] + share * far[place - 1]
    if start + count < whole:
        after[count - 1] = weight * near[place + count] + share * far[place + count]
    left, right, shift = np.int32(8 - 16 * 128), np.int32(7 - 16 * 128), np.int32(4)
    if down == 1:
        left, right, shift = np.int32(1 - 4 * 128), np.int32(2 - 4 * 128), np.int32(2)
    for i in range(count):
        three = np.int32(here[i] * np.int32(3))
        line[2 * i] = np.int32(np.int32(three + before[i]) + left) >> shift
        line[2 * i + 1] = np.int32(np.int32(three + after[i]) + right) >> shift


@njit
def _to_colours(luma, blueness, redness, target):
    """ITU-R BT.601 as in JFIF, with 16 fractional bits (libjpeg's jdcolor.c)."""
    for x in range(len(target)):
        y, cb, cr = np.int32(luma[x]), blueness[x], redness[x]
        blue = np.int32(y + np.int32(np.int32(np.int32(cb * np.int32(116130)) + _HALF) >> _16))
        less = np.int32(np.int32(cb * np.int32(-22554)) + np.int32(cr * np.int32(-46802)))
        green = np.int32(y + np.int32(np.int32(less + _HALF) >> _16))
        red = np.int32(y + np.int32(np.int32(np.int32(cr * np.int32(91881)) + _HALF) >> _16))
        blue, green, red = min(max(blue, _NONE), _MOST), min(max(green, _NONE), _MOST), min(max(red, _NONE), _MOST)
        target[x] = np.uint32(blue | np.int32(green << _I8) | np.int32(red << _16))
