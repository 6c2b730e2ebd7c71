"""Pixels into a net's input on the device: (float32(x) - mean) * scale, with the two roundings that a feed makes.

So a job's bits do not depend on where it is done (docs/design.md, section 2.3).
"""

from __future__ import annotations

from typing import Any

import numpy as np


class Normalise:
    """For one array library.

    Parameters
    ----------
    xp: numpy or cupy. mean: float32[C, 1, 1] or [C, H, W], on the host. scale: float32.
    """

    def __init__(self, xp: Any, mean: np.ndarray, scale: float) -> None:
        self._xp = xp
        self._mean = xp.asarray(mean, np.float32)
        self._scale = np.float32(scale)
        self._out: Any = None

    def __call__(self, pixels: Any) -> Any:
        """uint8[B, C, H, W] of the device to float32 of the same shape, in an array that the next call overwrites."""
        xp = self._xp
        if self._out is None or self._out.shape != pixels.shape:
            self._out = xp.empty(pixels.shape, np.float32)
        xp.subtract(pixels, self._mean, out=self._out, dtype=np.float32)
        xp.multiply(self._out, self._scale, out=self._out)
        return self._out
