"""Compiled loops of random resized crops.

References: :mod:`tests.pipeline.test_resized_crop` (numpy.random.Philox, datasets.resize, Pillow's transform, PyTorch).
"""
# mypy: disallow_untyped_defs=False

from __future__ import annotations

import math

import numpy as np

from pipeline import philox
from pipeline.kernels import bytes_at, philox_block
from profiler.jit import intrinsic, later, njit

ir, carray, types = later("llvmlite.ir"), later("numba.carray"), later("numba.types")

TRIES = 10
_MIRROR, _STREAM = np.uint64(philox.CROP_AND_MIRROR), np.uint64(philox.RESIZED_CROP)
_ONE = np.int32(2048)  # weights have 11 fractional bits, as in datasets.resize
_FOUR, _SIXTEEN, _TWO, _UNIT = np.int32(4), np.int32(16), np.int32(2), np.uint64(1)
_FRACTION = np.uint64(11)


@njit
def draw(seed, phase, epoch, record, height, width, areas, ratios, roots, mirror, box):
    """Where a random part of a picture lies: top, left, height, width, and whether to mirror it, into box, int64[5].

    Try t takes block t of the sample's words: area, ratio, top and left. After TRIES that do not fit: the largest
    central part of the nearest ratio that is allowed. (torchvision's RandomResizedCrop.)

    areas: shares of the picture, lowest and highest. ratios: width to height, lowest and highest. roots: float64[53],
    (highest / lowest) ** (1/2, 1/4, 1/8, ...): their products are powers that no library for mathematics rounds.
    """
    box[4] = np.int64(philox_block(seed, phase, _UNIT, _MIRROR, epoch, record)[0] & _UNIT) if mirror else 0
    for turn in range(1, TRIES + 1):
        c0, c1, c2, c3 = philox_block(seed, phase, np.uint64(turn), _STREAM, epoch, record)
        share = areas[0] + (areas[1] - areas[0]) * (np.float64(c0 >> _FRACTION) / 9007199254740992.0)
        ratio, word = ratios[0], c1 >> _FRACTION
        for place in range(53):
            if (word >> np.uint64(52 - place)) & _UNIT:
                ratio *= roots[place]
        area = share * np.float64(height * width)
        wide, high = np.int64(np.rint(math.sqrt(area * ratio))), np.int64(np.rint(math.sqrt(area / ratio)))
        if 0 < wide <= width and 0 < high <= height:
            box[0] = np.int64(c2 % np.uint64(height - high + 1))
            box[1] = np.int64(c3 % np.uint64(width - wide + 1))
            box[2], box[3] = high, wide
            return
    across, down = width, height
    if width < ratios[0] * height:
        down = min(height, max(1, int(np.rint(width / ratios[0]))))
    elif width > ratios[1] * height:
        across = min(width, max(1, int(np.rint(height * ratios[1]))))
    box[0], box[1], box[2], box[3] = (height - down) // 2, (width - across) // 2, down, across


@njit
def _taps(start, length, count, backwards, stride, places, weights):
    """Where the two samples of a line lie, and the weight of the second, for each pixel that a part of it becomes.

    Pixels' centres lie at whole numbers and a half; outside the line its ends go on. start: where the part begins,
    between two samples where it was scaled down. length: of the part, in samples; count: of samples there are.
    """
    size = len(weights)
    for i in range(size):
        centre = np.float32((i + 0.5) * (length / size) - 0.5 + start)
        low = np.int64(np.floor(centre))
        weight = centre - np.float32(low)
        if low < 0 or low >= count - 1:
            weight = np.float32(0)
        low = min(max(low, np.int64(0)), count - 1)
        to = size - 1 - i if backwards else i
        places[0, to], places[1, to] = low * stride, min(low + 1, count - 1) * stride
        weights[to] = np.int32(np.rint(weight * np.float32(2048)))


@njit
def resize(pixels, span, flip, mean, scale, rows, columns, lines, out):
    """Bring a part of a picture to size, mirror it, subtract the mean and scale: all in one pass.

    pixels: uint8[h, w, 4], of which the first C are the channels. span: where the part begins and its length, down then
    across. mean: float32[C, 1, 1], or [C, H, W] of ``out`` before it is mirrored; without elements: pixels as they are.
    rows, columns: places int64[2, n] and weights int32[n] for H and W pixels; lines: int32[2, 4, >= W + 3], to work in.
    out: float32 or uint8 [C, H, W]. The arithmetic is that of datasets.resize (OpenCV's for 8 bits).
    """
    channels, height, width = out.shape
    at, low = rows
    places, weights = columns
    base = np.uint64(pixels.ctypes.data)
    _taps(span[0], span[1], pixels.shape[0], False, pixels.strides[0], at, low)
    _taps(span[2], span[3], pixels.shape[1], flip, pixels.strides[1], places[:, :width], weights[:width])
    for x in range(width, len(weights)):  # the last ones of a group of four
        places[0, x], places[1, x], weights[x] = 0, 0, 0
    as_is, whole = mean.size == 0, mean.shape[1] * mean.shape[2] > 1
    held = (np.int64(-1), np.int64(-1))
    top, bottom = 0, 1
    for y in range(height):
        if held[0] != at[0, y]:
            top, bottom = bottom, top
            held = (held[1], held[0])
        if held[0] != at[0, y]:
            _across(base + np.uint64(at[0, y]), places, weights, lines[top])
        if held[1] != at[1, y]:
            _across(base + np.uint64(at[1, y]), places, weights, lines[bottom])
        held = (at[0, y], at[1, y])
        under = low[y]
        over = np.int32(_ONE - under)
        for plane in range(channels):
            upper, lower, into = lines[top, plane], lines[bottom, plane], out[plane, y]
            if as_is:
                for x in range(width):
                    into[x] = _blend(upper[x], over, lower[x], under)
            elif not whole:
                constant = mean[plane, 0, 0]
                for x in range(width):
                    into[x] = (np.float32(_blend(upper[x], over, lower[x], under)) - constant) * scale
            elif flip:
                means = mean[plane, y, ::-1]
                for x in range(width):
                    into[x] = (np.float32(_blend(upper[x], over, lower[x], under)) - means[x]) * scale
            else:
                means = mean[plane, y]
                for x in range(width):
                    into[x] = (np.float32(_blend(upper[x], over, lower[x], under)) - means[x]) * scale


@njit(inline="always")
def _blend(upper, over, lower, under):
    # The shifts lose bits on purpose: they are the ones of OpenCV's integer path. At most 255 is left.
    total = np.int32(np.int32(np.int32(upper * over) >> _SIXTEEN) + np.int32(np.int32(lower * under) >> _SIXTEEN))
    return np.int32(np.int32(total + _TWO) >> _TWO)


@njit
def _across(line, places, weights, into):
    """One line brought to its width, channels apart: into int32[4, n]."""
    group, place = np.uint64(places.ctypes.data), np.uint64(weights.ctypes.data)
    others = np.uint64(places.strides[0])
    target, stride = np.uint64(into.ctypes.data), np.uint64(into.strides[0])
    for _ in range(len(weights) // 4):
        four_pixels(line, group, others, place, target, stride)
        group += np.uint64(32)
        place += np.uint64(16)
        target += np.uint64(16)


@intrinsic
def four_pixels(typingctx, line, places, others, weights, target, stride):
    """Blend two samples of four channels for each of four pixels, and write channels apart.

    A lane is a channel, until four pixels are turned into four channels: with a loop over pixels every byte is looked
    up alone, which took three times as long.
    """
    i32 = ir.IntType(32)
    four = ir.VectorType(i32, 4)
    nothing = ir.Constant(four, ir.Undefined)

    def lanes(*numbers):
        return ir.Constant(four, list(numbers))

    def codegen(context, builder, signature, args):
        source, first, apart, weight_at, into, step = args

        def at(address, kind, align):
            return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)

        def plus(address, offset):
            return builder.add(address, ir.Constant(address.type, offset))

        made = []
        for pixel in range(4):
            place = plus(first, 8 * pixel)
            one, other = (
                builder.zext(
                    at(builder.add(source, at(where, place.type, 8)), ir.VectorType(ir.IntType(8), 4), 1), four
                )
                for where in (place, builder.add(place, apart))
            )
            weight = builder.insert_element(nothing, at(plus(weight_at, 4 * pixel), i32, 4), i32(0))
            weight = builder.shuffle_vector(weight, nothing, lanes(0, 0, 0, 0))
            total = builder.add(builder.shl(one, lanes(11, 11, 11, 11)), builder.mul(builder.sub(other, one), weight))
            made.append(builder.ashr(total, lanes(4, 4, 4, 4)))
        pairs = [
            builder.shuffle_vector(made[a], made[b], lanes(*order))
            for order in ((0, 4, 1, 5), (2, 6, 3, 7)) for a, b in ((0, 1), (2, 3))
        ]  # fmt: skip
        for channel in range(4):
            halves = pairs[:2] if channel < 2 else pairs[2:]
            turned = builder.shuffle_vector(
                halves[0], halves[1], lanes(0, 1, 4, 5) if channel % 2 == 0 else lanes(2, 3, 6, 7)
            )
            address = builder.add(into, builder.mul(step, ir.Constant(step.type, channel)))
            builder.store(turned, builder.inttoptr(address, four.as_pointer()), align=4)
        return context.get_dummy_value()

    word = types.uint64
    return types.void(word, word, word, word, word, word), codegen


@njit
def pack(address, row, column, out, lane):
    """One channel, with rows and columns so many bytes apart, into a lane of uint8[h, w, 4]."""
    for y in range(out.shape[0]):
        if column >= 0:
            line = carray(bytes_at(np.uint64(address)), (out.shape[1] * column + 1,), np.uint8)
            for x in range(out.shape[1]):
                out[y, x, lane] = line[x * column]
        else:
            for x in range(out.shape[1]):
                out[y, x, lane] = carray(bytes_at(np.uint64(np.int64(address) + x * column)), (1,), np.uint8)[0]
        address = np.uint64(np.int64(address) + row)
