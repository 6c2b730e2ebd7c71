"""Bilinear resizing in fixed point, as OpenCV (and so Caffe's own converters) does it for 8-bit images.

Pillow's filters average over the source when they shrink an image and so give other pixels; a set made by this package
must not differ from one that ``convert_imageset`` made.

There are two ways to the same bits: a compiled kernel, and whole-array arithmetic. Loading the kernel takes more than a
second, most of it with the interpreter's lock held: as long as several hundred images. So arrays do the work until
:func:`prepare` was asked for and is done.
"""

from __future__ import annotations

import functools
import threading

import numpy as np
from numpy.typing import NDArray

from profiler.jit import njit

_ONE = 2048  # weights have 11 fractional bits
WORTH_LOADING = 500
"""So many images, or more, take longer without the kernel than it takes to load it."""
_compiled = threading.Event()
_loading = threading.Lock()


def resize(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """uint8[C, H, W] -> uint8[C, height, width], bilinear between pixel centres, no smoothing when shrinking.

    ``image`` may be a view of uint8[H, W, C]: channels need not lie apart. The result is contiguous, or
    ``image`` itself where it has that size already.
    """
    if image.shape[1:] == (height, width):
        return image
    near = image.flags.c_contiguous or image.transpose(1, 2, 0).flags.c_contiguous
    if not near or not image.flags.writeable:  # the kernel is compiled once, for what decoders mostly give
        image = np.array(image, order="C")
    rows, lower = _taps(image.shape[1], height)
    columns, right = _taps(image.shape[2], width)
    if not _compiled.is_set():
        return _by_arrays(image, rows, lower, columns, right)
    flat = (image if image.flags.c_contiguous else image.transpose(1, 2, 0)).reshape(-1)
    channel, row, column = image.strides
    made = np.empty((len(image), height, width), np.uint8)
    _interpolate(flat, channel, row, rows, lower, columns * column, right, made)
    return made


def prepare() -> None:
    """Load the compiled kernel, or compile it. Returns when it is ready; other threads may resize meanwhile."""
    with _loading:
        if not _compiled.is_set():
            tap, weight = _taps(1, 1)
            _interpolate(np.zeros(1, np.uint8), 1, 1, tap, weight, tap * 1, weight, np.empty((1, 1, 1), np.uint8))
            _compiled.set()


@njit
def _interpolate(
    flat: NDArray[np.uint8],
    channel: int,
    row: int,
    rows: NDArray[np.int64],
    lower: NDArray[np.int32],
    columns: NDArray[np.int64],
    right: NDArray[np.int32],
    made: NDArray[np.uint8],
) -> None:
    """``channel``, ``row`` and what is in ``columns``: distances in ``flat``."""
    channels, height, width = made.shape
    # The last two rows of the source that were interpolated across: the next row needs one of them, or both, again.
    across = np.empty((2, channels, width), np.int32)
    held = np.full(2, -1, np.int64)
    one, top, bottom = np.int32(_ONE), 0, 1
    for y in range(height):
        if held[top] != rows[0, y]:
            top, bottom = bottom, top
        for place, source in ((top, rows[0, y]), (bottom, rows[1, y])):
            if held[place] != source:
                _interpolate_across(flat, channel, row * source, columns, right, across[place])
                held[place] = source
        weight = lower[y]
        for plane in range(channels):
            upper_row, lower_row, into = across[top, plane], across[bottom, plane], made[plane, y]
            for x in range(width):
                # The shifts lose bits on purpose: they are the ones of OpenCV's integer path. At most 255 is left.
                total = ((upper_row[x] * (one - weight)) >> 16) + ((lower_row[x] * weight) >> 16)
                into[x] = np.uint8((total + 2) >> 2)


@njit
def _interpolate_across(
    flat: NDArray[np.uint8],
    channel: int,
    start: int,
    columns: NDArray[np.int64],
    right: NDArray[np.int32],
    into: NDArray[np.int32],
) -> None:
    channels, width = into.shape
    if channels == 3:  # three at a time share the look-ups, which is what this costs
        blue, green, red = flat[start:], flat[start + channel :], flat[start + 2 * channel :]
        for x in range(width):
            second = right[x]
            first = np.int32(_ONE) - second
            # Unsigned: a signed index would be tested for counting from the end.
            here, there = np.uint64(columns[0, x]), np.uint64(columns[1, x])
            into[0, x] = (np.int32(blue[here]) * first + np.int32(blue[there]) * second) >> np.int32(4)
            into[1, x] = (np.int32(green[here]) * first + np.int32(green[there]) * second) >> np.int32(4)
            into[2, x] = (np.int32(red[here]) * first + np.int32(red[there]) * second) >> np.int32(4)
        return
    for plane in range(channels):
        pixels = flat[start + plane * channel :]
        for x in range(width):
            second = right[x]
            here, there = np.uint64(columns[0, x]), np.uint64(columns[1, x])
            both = np.int32(pixels[here]) * (np.int32(_ONE) - second) + np.int32(pixels[there]) * second
            into[plane, x] = both >> np.int32(4)


def _by_arrays(
    image: NDArray[np.uint8],
    rows: NDArray[np.int64],
    lower: NDArray[np.int32],
    columns: NDArray[np.int64],
    right: NDArray[np.int32],
) -> NDArray[np.uint8]:
    """The same arithmetic as the kernel's, for whole planes at once."""
    used, place = np.unique(rows, return_inverse=True)
    upper, under = place.reshape(rows.shape)
    made = np.empty((len(image), rows.shape[1], columns.shape[1]), np.uint8)
    left = np.int32(_ONE) - right
    weight = lower[:, None]
    for plane, into in zip(image, made, strict=True):
        pixels = plane[used]  # no more than two rows for each of the result
        across = np.multiply(pixels.take(columns[0], 1), left, dtype=np.int32)
        across += np.multiply(pixels.take(columns[1], 1), right, dtype=np.int32)
        across >>= 4
        total = across.take(upper, 0)
        total *= np.int32(_ONE) - weight
        total >>= 16
        below = across.take(under, 0)
        below *= weight
        below >>= 16
        total += below
        total += 2
        total >>= 2
        into[...] = total
    return made


@functools.lru_cache(maxsize=256)
def _taps(old: int, new: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Per output pixel: the two source pixels int64[2, new], and the weight int32[new] of the second."""
    centre = ((np.arange(new) + 0.5) * (old / new) - 0.5).astype(np.float32)
    first = np.floor(centre).astype(np.int64)
    weight = centre - first.astype(np.float32)
    outside = (first < 0) | (first >= old - 1)
    first = np.clip(first, 0, old - 1)
    weight[outside] = 0
    taps = np.stack([first, np.minimum(first + 1, old - 1)])
    shares = np.rint(weight * np.float32(_ONE)).astype(np.int32)
    taps.setflags(write=False)  # they are shared by all calls
    shares.setflags(write=False)
    return taps, shares
