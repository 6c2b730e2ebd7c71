"""Bilinear resizing in fixed point, as OpenCV (and so Caffe's own converters) does it for 8-bit images.

Pillow's filters average over the source when they shrink an image and so give other pixels; a set made by this package
must not differ from one that ``convert_imageset`` made.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ONE = 2048  # weights have 11 fractional bits


def resize(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """uint8[C, H, W] -> uint8[C, height, width], bilinear between pixel centres, no smoothing when shrinking."""
    if image.shape[1:] == (height, width):
        return image
    rows, lower = _taps(image.shape[1], height)
    columns, right = _taps(image.shape[2], width)
    upper, left = _ONE - lower, _ONE - right
    source = image.astype(np.int32)
    across = source[:, :, columns[0]] * left + source[:, :, columns[1]] * right
    # The shifts lose bits on purpose: they are the ones of OpenCV's integer path.
    top = (across[:, rows[0]] >> 4) * upper[:, None] >> 16
    bottom = (across[:, rows[1]] >> 4) * lower[:, None] >> 16
    return np.clip((top + bottom + 2) >> 2, 0, 255).astype(np.uint8)


def _taps(old: int, new: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Per output pixel: the two source pixels int64[2, new], and the weight int32[new] of the second."""
    centre = ((np.arange(new) + 0.5) * (old / new) - 0.5).astype(np.float32)
    first = np.floor(centre).astype(np.int64)
    weight = centre - first.astype(np.float32)
    outside = (first < 0) | (first >= old - 1)
    first = np.clip(first, 0, old - 1)
    weight[outside] = 0
    return np.stack([first, np.minimum(first + 1, old - 1)]), np.rint(weight * np.float32(_ONE)).astype(np.int32)
