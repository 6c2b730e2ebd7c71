"""Transforms for the tests of stalls: they cost time and change nothing."""

from __future__ import annotations

import time

import numpy as np

SAMPLE_S = 0.040


def sleep(image: np.ndarray, label: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Wait 40 ms for each image, without using the CPU."""
    time.sleep(SAMPLE_S)
    return image, label
