"""Compiled loops of the feed: one call a batch.

Each has a reference in NumPy (:mod:`pipeline.philox`, :mod:`pipeline.transforms`) that gives the same bits.
"""
# mypy: disallow_untyped_defs=False

from __future__ import annotations

import numpy as np

from pipeline import philox
from profiler import hashing
from profiler.jit import CFunction, intrinsic, later, njit

ir, carray, types = later("llvmlite.ir"), later("numba.carray"), later("numba.types")

_M0, _M1 = (np.uint64(number) for number in philox.MULTIPLIERS)
_W0, _W1 = (np.uint64(number) for number in philox.WEYL)
_ROUNDS = philox.ROUNDS
_POSITION, _HASH_1, _HASH_2, _LENGTH = (
    np.uint64(number) for number in (hashing.POSITION, hashing.M1, hashing.M2, hashing.LENGTH)
)
_WIDE = 32
_S29, _THREE = np.uint64(29), np.uint64(3)
_LOW, _HALF, _ONE = np.uint64(0xFFFF_FFFF), np.uint64(32), np.uint64(1)

memcpy = CFunction("memcpy", "uintp", "uintp", "uintp", "uintp")
_swapped = CFunction("llvm.bswap.i64", "uint64", "uint64")  # an instruction, once LLVM has compiled it


@intrinsic
def bytes_at(typingctx, address):
    """An address (uint64) as a pointer to uint8: images of a batch lie wherever their records are."""
    signature = types.CPointer(types.uint8)(types.uint64)

    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return signature, codegen


@intrinsic
def _words(typingctx, address):
    """An address (uint64, a multiple of 8) as a pointer to uint64."""
    signature = types.CPointer(types.uint64)(types.uint64)

    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return signature, codegen


@intrinsic
def fetch(typingctx, address):
    """Have the processor bring a line of memory (64 bytes) near, and do not wait for it. An address that leads nowhere
    is no error."""
    signature = types.void(types.uint64)

    def codegen(context, builder, sig, args):
        small = ir.IntType(32)
        place = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, small, small, small])
        name = "llvm.prefetch.p0"
        known = builder.module.globals.get(name)
        builder.call(known or ir.Function(builder.module, kind, name), [place, small(0), small(3), small(1)])
        return context.get_dummy_value()

    return signature, codegen


@njit
def _mix(x):
    x = (x ^ (x >> _HALF)) * _HASH_1
    x = (x ^ (x >> _S29)) * _HASH_2
    return x ^ (x >> _HALF)


@njit
def hash_of(address, length):
    """``profiler.hashing.ordered`` of a buffer that begins at a multiple of 8."""
    count = length >> _THREE
    words = carray(_words(address), (count,), np.uint64)
    key = _POSITION
    total = np.uint64(0)
    for j in range(count):
        total += _mix(words[j] ^ key)
        key += _POSITION
    rest = length - (count << _THREE)
    if rest:
        tail = carray(bytes_at(address + (count << _THREE)), (rest,), np.uint8)
        word = np.uint64(0)
        for j in range(rest):
            word |= np.uint64(tail[j]) << (np.uint64(j) << _THREE)
        total += _mix(word ^ key)
    return _mix((total + _mix(length ^ _LENGTH)) ^ _LENGTH)


@njit
def hash_records(addresses, lengths, out):
    """:func:`hash_of` of each of many buffers into out, uint64[n]. addresses, lengths: uint64[n]."""
    for i in range(len(addresses)):
        out[i] = hash_of(addresses[i], lengths[i])


@njit
def _high(a, b):
    """High 64 bits of a · b."""
    a_low, a_high = a & _LOW, a >> _HALF
    b_low, b_high = b & _LOW, b >> _HALF
    high_low = a_high * b_low
    middle = ((a_low * b_low) >> _HALF) + (high_low & _LOW) + a_low * b_high
    return a_high * b_high + (high_low >> _HALF) + (middle >> _HALF)


@njit
def philox_block(seed, phase, turn, stream, epoch, record):
    """Block ``turn`` of Philox4x64-10 of a sample: four words."""
    c0, c1, c2, c3, k0, k1 = turn, stream, epoch, record, seed, phase
    for _ in range(_ROUNDS):
        c0, c1, c2, c3 = _high(_M1, c2) ^ c1 ^ k0, _M1 * c2, _high(_M0, c0) ^ c3 ^ k1, _M0 * c0
        k0 += _W0
        k1 += _W1
    return c0, c1, c2, c3


@njit
def philox_blocks(seed, phase, stream, epochs, records, words):
    """Block 1 of each sample into words, uint64[B, 4]."""
    for i in range(len(records)):
        words[i, 0], words[i, 1], words[i, 2], words[i, 3] = philox_block(
            seed, phase, _ONE, stream, epochs[i], records[i]
        )


@intrinsic
def _turned_32(typingctx, source, target):
    """Copy 32 bytes from one address (uint64) to another, the last one first."""
    signature = types.void(types.uint64, types.uint64)

    def codegen(context, builder, sig, args):
        vector = ir.VectorType(ir.IntType(8), _WIDE)
        begin, goal = (builder.inttoptr(address, vector.as_pointer()) for address in args)
        places = ir.Constant(ir.VectorType(ir.IntType(32), _WIDE), list(range(_WIDE - 1, -1, -1)))
        taken = builder.load(begin, align=1)
        builder.store(builder.shuffle_vector(taken, ir.Constant(vector, ir.Undefined), places), goal, align=1)
        return context.get_dummy_value()

    return signature, codegen


@njit
def turned(source, target, count):
    """Copy bytes from one address to another, the last one first: 32 or 8 at a time. They must not overlap."""
    if count >= _WIDE:
        begin, goal = np.uint64(source), np.uint64(target)
        for done in range(0, count - _WIDE + 1, _WIDE):
            _turned_32(begin + np.uint64(count - _WIDE - done), goal + np.uint64(done))
        if count % _WIDE:  # the last ones, some of them once more
            _turned_32(begin, goal + np.uint64(count - _WIDE))
        return
    whole = count >> 3
    words = carray(_words(np.uint64(source + count - 8 * whole)), (whole,), np.uint64)
    out = carray(_words(np.uint64(target)), (whole,), np.uint64)
    for k in range(whole):
        out[k] = _swapped(words[whole - 1 - k])
    rest = count - 8 * whole
    first = carray(bytes_at(np.uint64(source)), (rest,), np.uint8)
    last = carray(bytes_at(np.uint64(target + 8 * whole)), (rest,), np.uint8)
    for k in range(rest):
        last[k] = first[rest - 1 - k]


@njit
def put(image, top, left, flip, mean, scale, lines, out):
    """Crop, mirror, subtract the mean and scale one image uint8[C, H, W] into out, [C, h, w]; both contiguous.

    mean: float32; one without elements: the pixels stay as they are, and out is uint8.
    lines: uint8, room for some lines of w pixels (:func:`room_for`). Lines are short, and a loop over a short one is
    not vectorised: so they are put together as bytes, and converted together.
    """
    channels, rows, columns = out.shape
    as_is, by_place = mean.size == 0, mean.shape[1] * mean.shape[2] > 1
    together = rows if as_is else len(lines) // columns
    source = image.ctypes.data + top * image.shape[2] + left
    for c in range(channels):
        target = out[c].reshape(-1)
        for first in range(0, rows, together):
            count = min(together, rows - first)
            goal = out.ctypes.data + (c * rows + first) * columns if as_is else lines.ctypes.data
            for y in range(first, first + count):
                begin = source + (c * image.shape[1] + y) * image.shape[2]
                if flip and not by_place:
                    turned(begin, goal, columns)
                else:
                    memcpy(goal, begin, columns)
                goal += columns
            if as_is:
                continue
            part = target[first * columns : (first + count) * columns]
            if not by_place:
                constant = mean[c, 0, 0]
                for k in range(len(part)):
                    part[k] = (np.float32(lines[k]) - constant) * scale
                continue
            for y in range(count):
                means = mean[c, top + first + y, left : left + columns]
                pixels, line = lines[y * columns : (y + 1) * columns], part[y * columns : (y + 1) * columns]
                for x in range(columns):
                    line[x] = (np.float32(pixels[x]) - means[x]) * scale
                if flip:
                    for x in range(columns // 2):
                        line[x], line[columns - 1 - x] = line[columns - 1 - x], line[x]


@njit
def room_for(columns):
    """Room for :func:`put`: lines that fit into the nearest cache, one at least."""
    return np.empty(max(4096 // columns, 1) * columns, np.uint8)


@njit
def put_packed(packed, top, left, flip, mean, scale, out):
    """Mirror, subtract the mean and scale a part of an image into out, [C, h, w] with C <= 4.

    packed: uint32[h, w], channel 0 in the lowest byte. top, left: where the part begins in the image, which a mean
    image [C, H, W] is indexed by. mean, scale: as in :func:`put`, of the same bits.
    """
    channels, rows, columns = out.shape
    as_is, by_place = mean.size == 0, mean.shape[1] * mean.shape[2] > 1
    turned_round = np.empty(columns, np.uint32)
    for y in range(rows):
        words = packed[y]
        if flip and not by_place:  # once for all channels
            for x in range(columns):
                turned_round[x] = words[columns - 1 - x]
            words = turned_round
        for c in range(channels):
            line, shift = out[c, y], np.uint32(8 * c)
            if as_is:
                for x in range(columns):
                    line[x] = np.uint8(words[x] >> shift)
            elif by_place:
                means = mean[c, top + y, left : left + columns]
                for x in range(columns):
                    line[x] = (np.float32(np.uint8(words[x] >> shift)) - means[x]) * scale
            else:
                constant = mean[c, 0, 0]
                for x in range(columns):
                    line[x] = (np.float32(np.uint8(words[x] >> shift)) - constant) * scale
            if flip and by_place:
                for x in range(columns // 2):
                    line[x], line[columns - 1 - x] = line[columns - 1 - x], line[x]


@njit
def draw_one(seed, phase, stream, epoch, record):
    """The words that decide on mirror, row and column of one sample."""
    words = philox_block(seed, phase, _ONE, stream, epoch, record)
    return words[0], words[1], words[2]


@njit
def fill(addresses, heights, widths, h_off, w_off, mirror, mean, scale, out):
    """:func:`put` for a batch, straight into its slot.

    addresses uint64[B], heights, widths, h_off, w_off int64[B] and mirror bool[B] describe uint8[C, H, W] images;
    mean is float32[C, 1, 1] or float32[C, H, W]; scale float32; out float32 or uint8 [B, C, h, w].
    """
    lines = room_for(out.shape[3])
    for i in range(len(addresses)):
        shape = (out.shape[1], heights[i], widths[i])
        image = carray(bytes_at(addresses[i]), shape, np.uint8)
        put(image, h_off[i], w_off[i], mirror[i], mean, scale, lines, out[i])
