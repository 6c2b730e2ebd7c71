"""A user's transforms, for the tests: one that costs time, and one that fails."""

from __future__ import annotations

import time

import numpy as np

SAMPLE_S = 0.040


def sleep(image: np.ndarray, label: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Wait 40 ms for each image, without using the CPU."""
    time.sleep(SAMPLE_S)
    return image, label


def no_sevens(image: np.ndarray, label: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Fail for one class."""
    if label == 7:
        raise ValueError("a seven")
    return image, label
