"""Random numbers that belong to a sample, not to a worker: Philox4x64-10, keyed by (seed, phase, epoch, record).

The layout of key and counter is a contract (docs/design.md, section 2.2). ``block_1`` gives the same words as
``numpy.random.Philox(key=[seed, phase], counter=[0, stream, epoch, record]).random_raw(4)`` for a whole batch at once.
(Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CROP_AND_MIRROR = 0
USER_FUNCTION = 1
RESIZED_CROP = 4
BATCH_FUNCTION = 5
PHASES = {"TRAIN": 0, "TEST": 1}

MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10

_MASK = (1 << 64) - 1
_LOW = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)


@dataclass(frozen=True, eq=False)
class Draws:
    """What chance decided for each sample of a batch: bool[B], int64[B], int64[B] (offsets in pixels)."""

    mirror: NDArray[np.bool_]
    h_off: NDArray[np.int64]
    w_off: NDArray[np.int64]


def block_1(seed: int, phase: int, stream: int, epochs: np.ndarray, records: np.ndarray) -> NDArray[np.uint64]:
    """The first block of each sample: uint64[B, 4]. Compiled; :func:`block_1_numpy` gives the same bits."""
    from pipeline.kernels import philox_blocks  # numba loads here, at the first batch

    words = np.empty((len(records), 4), np.uint64)
    philox_blocks(
        np.uint64(seed & _MASK), np.uint64(phase & _MASK), np.uint64(stream),
        np.ascontiguousarray(epochs, np.uint64), np.ascontiguousarray(records, np.uint64), words,
    )  # fmt: skip
    return words


def block_1_numpy(seed: int, phase: int, stream: int, epochs: np.ndarray, records: np.ndarray) -> NDArray[np.uint64]:
    """The reference of :func:`block_1` in plain NumPy."""
    count = len(records)
    c0, c1 = np.full(count, 1, np.uint64), np.full(count, stream, np.uint64)
    c2, c3 = np.asarray(epochs).astype(np.uint64), np.asarray(records).astype(np.uint64)
    for turn in range(ROUNDS):
        key_0 = np.uint64((seed + turn * WEYL[0]) & _MASK)
        key_1 = np.uint64((phase + turn * WEYL[1]) & _MASK)
        high_0, low_0 = _multiply(np.uint64(MULTIPLIERS[0]), c0)
        high_1, low_1 = _multiply(np.uint64(MULTIPLIERS[1]), c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
    return np.stack([c0, c1, c2, c3], axis=1)


def _multiply(a: np.uint64, b: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """High and low 64 bits of a · b, in 32-bit limbs."""
    a_low, a_high = a & _LOW, a >> _HALF
    b_low, b_high = b & _LOW, b >> _HALF
    low_low, high_low = a_low * b_low, a_high * b_low
    middle = (low_low >> _HALF) + (high_low & _LOW) + a_low * b_high
    return a_high * b_high + (high_low >> _HALF) + (middle >> _HALF), a * b


def draw(
    seed: int,
    phase: int,
    epochs: np.ndarray,
    records: np.ndarray,
    spare: tuple[np.ndarray, np.ndarray],
    *,
    mirror: bool,
    random_crop: bool,
) -> Draws:
    """Crop offsets and mirroring of a batch.

    Parameters
    ----------
    spare: (H - crop, W - crop) of each sample, int64[B] each and >= 0; zeros where nothing is cropped.
    mirror, random_crop: what is left to chance. Without ``random_crop`` the crop is central.
    """
    rows, columns = (np.asarray(side, np.int64) for side in spare)
    if not (mirror or random_crop):
        return Draws(np.zeros(len(records), np.bool_), rows // 2, columns // 2)
    words = block_1(seed, phase, CROP_AND_MIRROR, epochs, records)
    flips = (words[:, 0] & np.uint64(1)).astype(np.bool_) if mirror else np.zeros(len(records), np.bool_)
    if not random_crop:
        return Draws(flips, rows // 2, columns // 2)
    h_off = (words[:, 1] % (rows.astype(np.uint64) + np.uint64(1))).astype(np.int64)
    w_off = (words[:, 2] % (columns.astype(np.uint64) + np.uint64(1))).astype(np.int64)
    return Draws(flips, h_off, w_off)


def draw_one(
    seed: int, phase: int, epoch: int, record: int, spare: tuple[int, int], *, mirror: bool, random_crop: bool
) -> tuple[int, int, bool]:
    """Row and column of the crop of one sample, and whether it is mirrored: what :func:`draw` gives for it."""
    rows, columns = spare
    if not (mirror or random_crop):
        return rows // 2, columns // 2, False
    from pipeline.kernels import draw_one  # numba loads here, at the first batch

    words = draw_one(
        np.uint64(seed & _MASK), np.uint64(phase), np.uint64(CROP_AND_MIRROR), np.uint64(epoch), np.uint64(record)
    )
    flip = bool(words[0] & 1) and mirror
    if not random_crop:
        return rows // 2, columns // 2, flip
    return words[1] % (rows + 1), words[2] % (columns + 1), flip


def generator(seed: int, phase: int, epoch: int, record: int, stream: int = USER_FUNCTION) -> np.random.Generator:
    """The ``rng`` of a user's transform for one sample; with BATCH_FUNCTION, for a batch (``record``: its place)."""
    key = np.array([seed & _MASK, phase], np.uint64)
    counter = np.array([0, stream, epoch, record], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
