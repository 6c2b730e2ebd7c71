"""Bilinear resizing in fixed point, as OpenCV (and so Caffe's own converters) does it for 8-bit images.

Pillow's filters average over the source when they shrink an image and so give other pixels; a set made by this package
must not differ from one that ``convert_imageset`` made.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from profiler.jit import njit

_ONE = 2048  # weights have 11 fractional bits


def resize(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """uint8[C, H, W] -> uint8[C, height, width], bilinear between pixel centres, no smoothing when shrinking."""
    if image.shape[1:] == (height, width):
        return image
    rows, lower = _taps(image.shape[1], height)
    columns, right = _taps(image.shape[2], width)
    made = np.empty((len(image), height, width), np.uint8)
    _interpolate(np.ascontiguousarray(image), rows, lower, columns, right, made)
    return made


@njit  # ten times as fast as whole-array arithmetic, and other threads run meanwhile
def _interpolate(
    image: NDArray[np.uint8],
    rows: NDArray[np.int64],
    lower: NDArray[np.int32],
    columns: NDArray[np.int64],
    right: NDArray[np.int32],
    made: NDArray[np.uint8],
) -> None:
    channels, height, width = made.shape
    for channel in range(channels):
        plane = image[channel]
        for y in range(height):
            upper_row, lower_row = plane[rows[0, y]], plane[rows[1, y]]
            weight = np.int64(lower[y])
            for x in range(width):
                first, second, share = columns[0, x], columns[1, x], np.int64(right[x])
                top = np.int64(upper_row[first]) * (_ONE - share) + np.int64(upper_row[second]) * share
                bottom = np.int64(lower_row[first]) * (_ONE - share) + np.int64(lower_row[second]) * share
                # The shifts lose bits on purpose: they are the ones of OpenCV's integer path.
                total = ((top >> 4) * (_ONE - weight) >> 16) + ((bottom >> 4) * weight >> 16)
                value = (total + 2) >> 2
                made[channel, y, x] = 0 if value < 0 else 255 if value > 255 else value


def _taps(old: int, new: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Per output pixel: the two source pixels int64[2, new], and the weight int32[new] of the second."""
    centre = ((np.arange(new) + 0.5) * (old / new) - 0.5).astype(np.float32)
    first = np.floor(centre).astype(np.int64)
    weight = centre - first.astype(np.float32)
    outside = (first < 0) | (first >= old - 1)
    first = np.clip(first, 0, old - 1)
    weight[outside] = 0
    return np.stack([first, np.minimum(first + 1, old - 1)]), np.rint(weight * np.float32(_ONE)).astype(np.int32)
