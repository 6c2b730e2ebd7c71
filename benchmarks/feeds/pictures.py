"""The pictures of the data sets: functions of their number, so that whoever checks a batch can make them again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.feeds.cases import DataSet


def pixels(data: DataSet, number: int) -> NDArray[np.uint8]:
    """uint8[3, H, W], BGR: blocks of one colour on the left, which Snappy makes smaller, and noise on the right."""
    rng = np.random.default_rng([data.height, number])
    height, width = data.height, data.width
    picture = np.frombuffer(rng.bytes(3 * height * width), np.uint8).reshape(3, height, width).copy()
    blocks = rng.integers(0, 256, (3, -(-height // 8), -(-width // 16)), np.uint8)
    picture[:, :, : width // 2] = blocks.repeat(8, 1).repeat(8, 2)[:, :height, : width // 2]
    return picture


def photograph(data: DataSet, number: int) -> NDArray[np.uint8]:
    """uint8[H, W, 3], BGR: smooth colours round one of its own with some noise, about 50 KB as a JPEG of quality 90."""
    rng = np.random.default_rng([data.height, number])
    height, width = data.height, data.width
    coarse = rng.normal(0, 18, (13, 17, 3)) + colour(data, number)
    rows, columns = (np.linspace(0, size - 1.001, count) for size, count in ((13, height), (17, width)))
    top, left = rows.astype(int), columns.astype(int)
    down, right = (rows - top)[:, None, None], (columns - left)[None, :, None]
    wide = coarse[:, left] * (1 - right) + coarse[:, left + 1] * right
    smooth = wide[top] * (1 - down) + wide[top + 1] * down
    return np.clip(smooth + rng.integers(-12, 13, (height, width, 1)), 0, 255).astype(np.uint8)


def colour(data: DataSet, number: int) -> NDArray[np.float64]:
    """The mean colour of a photograph, BGR."""
    return np.random.default_rng([1, data.height, number]).uniform(50, 205, 3)
