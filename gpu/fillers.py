"""Initial values of parameters, with the meaning that BVLC Caffe 1.0 gives to ``FillerParameter``.

Numbers come from Philox keyed by the seed and the parameter's name (docs/design.md 2.2), straight from its raw words,
so a parameter's first value depends on nothing else: not on other layers, not on NumPy's choice of algorithms.
Glorot and Bengio 2010 (xavier), He et al. 2015 (msra).
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np

from profiler.errors import StallscopeError

STREAM = 2
"""Counter word 1 of every draw of this module."""

_FAN_OUT, _AVERAGE = 1, 2


class FillerError(StallscopeError):
    """A filler of unknown type, or one that does not fit the shape."""


def name_key(name: str) -> int:
    """The second key word of a named draw: the first 8 bytes of SHA-256, little-endian."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def fill(filler: Any, shape: tuple[int, ...], seed: int, name: str) -> np.ndarray:
    """Initial values, float32, of the parameter called ``name`` (``layer/index``) under ``seed`` (taken modulo 2^64).

    ``filler``: a ``FillerParameter``; its type defaults to constant 0. Raises FillerError.
    """
    kind = filler.type
    if kind == "constant":
        return np.full(shape, filler.value, np.float32)
    if kind == "given":  # no type of Caffe's: the values themselves (gpu.python_layer.Given)
        return np.array(filler.values, np.float32)
    if kind == "bilinear":
        return _bilinear(shape, name)
    draw = _Draw(seed, name)
    count = math.prod(shape)
    if kind == "uniform":
        values = filler.min + (filler.max - filler.min) * draw.uniform(count)
    elif kind == "gaussian":
        values = filler.mean + filler.std * draw.normal(count)
        if filler.sparse >= 0:
            # On average `sparse` weights of each column stay: the chance is over the number of outputs.
            values = values * (draw.uniform(count) < filler.sparse / shape[0])
    elif kind == "xavier":
        bound = math.sqrt(3.0 / _fan(filler, shape))
        values = bound * (2.0 * draw.uniform(count) - 1.0)
    elif kind == "msra":
        values = math.sqrt(2.0 / _fan(filler, shape)) * draw.normal(count)
    elif kind == "positive_unitball":
        values = draw.uniform(count).reshape(shape[0], -1)
        values = values / values.sum(axis=1, keepdims=True)
    else:
        raise FillerError(
            f"parameter {name!r} has a filler of unknown type {kind!r}",
            expected="constant, uniform, gaussian, xavier, msra, positive_unitball or bilinear",
            found=kind,
        )
    return np.asarray(values, np.float32).reshape(shape)


class _Draw:
    """A run of raw Philox words turned into float64 numbers, always the same way."""

    def __init__(self, seed: int, name: str) -> None:
        key = np.array([seed % 2**64, name_key(name)], np.uint64)
        self._philox = np.random.Philox(key=key, counter=np.array([0, STREAM, 0, 0], np.uint64))

    def uniform(self, count: int) -> np.ndarray:
        """In [0, 1), 53 bits."""
        return (self._philox.random_raw(count) >> np.uint64(11)) * 2.0**-53

    def normal(self, count: int) -> np.ndarray:
        """Mean 0, standard deviation 1, by Box and Muller."""
        half = (count + 1) // 2
        u1, u2 = self.uniform(2 * half).reshape(2, half)
        radius = np.sqrt(-2.0 * np.log(1.0 - u1))
        angle = 2.0 * np.pi * u2
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _fan(filler: Any, shape: tuple[int, ...]) -> float:
    count = math.prod(shape)
    fan_in = count / shape[0] if shape else count  # a single value, as of a PReLU that channels share
    fan_out = count / shape[1] if len(shape) > 1 else count
    if filler.variance_norm == _FAN_OUT:
        return fan_out
    if filler.variance_norm == _AVERAGE:
        return (fan_in + fan_out) / 2
    return fan_in


def _bilinear(shape: tuple[int, ...], name: str) -> np.ndarray:
    """The same interpolation kernel in every (output, input) pair: meant for group = channels."""
    if len(shape) != 4 or shape[2] != shape[3]:
        raise FillerError(
            f"parameter {name!r}: filler 'bilinear' needs a square kernel", expected="(n, n, k, k)", found=shape
        )
    size = shape[3]
    factor = math.ceil(size / 2)
    centre = (size - 1) / (2 * factor)
    row = 1 - np.abs(np.arange(size) / factor - centre)
    return np.broadcast_to(np.outer(row, row).astype(np.float32), shape).copy()
