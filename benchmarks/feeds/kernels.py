"""The limit as compiled loops: one call a batch over addresses of records, into memory that is there already."""

from __future__ import annotations

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from profiler.jit import njit


@intrinsic
def _pointer(typing_context, address):
    """An address as a pointer to bytes."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint8)(types.uint64), generate


@njit(nogil=True)
def random_word(state):
    """xorshift64: chance that costs nothing beside the copy."""
    state[0] ^= state[0] << np.uint64(13)
    state[0] ^= state[0] >> np.uint64(7)
    state[0] ^= state[0] << np.uint64(17)
    return state[0]


@njit(nogil=True)
def _label(address):
    view = carray(_pointer(address), (10,))
    value, shift, at = np.uint64(0), np.uint64(0), 0
    while view[at] > 127:
        value |= np.uint64(view[at] & 127) << shift
        at, shift = at + 1, shift + np.uint64(7)
    return value | np.uint64(view[at]) << shift


@njit(nogil=True)
def crop_batch(pixels, labels_at, numbers, height, width, state, mean, samples, labels):
    """Crop, mirror at random, and subtract ``mean`` unless it is None: records at the addresses ``pixels[number]``."""
    crop = samples.shape[2]
    for place in range(len(numbers)):
        number = numbers[place]
        labels[place] = np.int32(_label(labels_at[number]))
        picture = carray(_pointer(pixels[number]), (3 * height * width,))
        word = random_word(state)
        row = np.int64((word >> np.uint64(8)) % np.uint64(height - crop + 1))
        column = np.int64((word >> np.uint64(32)) % np.uint64(width - crop + 1))
        mirror = word & np.uint64(1)
        for channel in range(3):
            for line in range(crop):
                start = (channel * height + row + line) * width + column
                source, target = picture[start : start + crop], samples[place, channel, line]
                if mean is None:  # decided when this is compiled
                    if mirror:
                        for x in range(crop):
                            target[x] = source[crop - 1 - x]
                    else:
                        for x in range(crop):
                            target[x] = source[x]
                else:
                    shift = mean[channel]
                    if mirror:
                        for x in range(crop):
                            target[x] = source[crop - 1 - x] - shift
                    else:
                        for x in range(crop):
                            target[x] = source[x] - shift


@njit(nogil=True)
def resize_part(picture, row, column, height, width, mirror, sample):
    """Bilinear, from a part of uint8[H, W, 3] to uint8[3, S, S], in fixed point with 11 bits, as OpenCV does it.

    Rows of the source are brought to their width once, into planes, and then blended by vector instructions.
    """
    size = sample.shape[1]
    lefts, rights = np.empty(size, np.uint32), np.empty(size, np.uint32)
    weights = np.empty(size, np.int32)
    for x in range(size):
        at = min(max((x + 0.5) * width / size - 0.5, 0.0), width - 1.0)
        left = min(int(at), width - 1)
        to = size - 1 - x if mirror else x
        weights[to] = int((at - left) * 2048 + 0.5)
        lefts[to] = (column + left) * 3
        rights[to] = (column + min(left + 1, width - 1)) * 3
    lines = np.empty((2, 3, size), np.int32)
    held = np.full(2, -1, np.int64)
    for y in range(size):
        at = min(max((y + 0.5) * height / size - 0.5, 0.0), height - 1.0)
        top = min(int(at), height - 1)
        below, down = min(top + 1, height - 1), np.int32((at - top) * 2048 + 0.5)
        for wanted in (top, below):
            if held[wanted & 1] != wanted:
                held[wanted & 1] = wanted
                _bring(picture[row + wanted].reshape(-1), lefts, rights, weights, lines[wanted & 1])
        for channel in range(3):
            upper, lower, out = lines[top & 1, channel], lines[below & 1, channel], sample[channel, y]
            for x in range(size):
                out[x] = np.uint8((upper[x] * (np.int32(2048) - down) + lower[x] * down + np.int32(1 << 21)) >> 22)


@njit(nogil=True)
def _bring(source, lefts, rights, weights, planes):
    for x in range(len(lefts)):
        left, right, weight = lefts[x], rights[x], weights[x]
        for channel in range(3):
            one, other = np.int32(source[left + np.uint32(channel)]), np.int32(source[right + np.uint32(channel)])
            planes[channel, x] = one * (np.int32(2048) - weight) + other * weight


@njit(nogil=True)
def copy_batch(pixels, numbers, nbytes, out):
    """The first bytes of records, as they are: memcpy."""
    for place in range(len(numbers)):
        out[place] = carray(_pointer(pixels[numbers[place]]), (nbytes,))
