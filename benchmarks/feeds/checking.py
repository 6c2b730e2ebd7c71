"""Does a feed do the work that it is measured at? Asked of the batches themselves, by making the pictures again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from benchmarks.feeds.cases import MEAN, Case
from benchmarks.feeds.pictures import colour, pixels

_CLOSE = 22.0
"""Levels between the mean colour of a part of a photograph and that of the whole."""


class WrongWork(AssertionError):
    """A feed delivers something else than asked for: its figures would mean nothing."""


class Check:
    """Takes the first batches of a feed. Raises :class:`WrongWork`."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.labels: list[NDArray[np.int64]] = []
        self.mirrored: list[bool] = []
        self.places: list[tuple[int, int]] = []

    def batch(self, samples: Any, labels: Any) -> None:
        case, samples, labels = self.case, np.asarray(samples), np.asarray(labels).reshape(-1).astype(np.int64)
        _same("shape of a batch", case.shape, samples.shape)
        _same("type of the samples", np.dtype(case.dtype), samples.dtype)
        _same("number of labels", case.batch, len(labels))
        if labels.min() < 0 or labels.max() >= case.data.records:
            raise WrongWork(f"labels from {labels.min()} to {labels.max()}, expected numbers of records")
        self.labels.append(labels)
        for place in range(0, case.batch, max(1, case.batch // 8)):
            (self._part if case.data.encoded else self._crop)(samples[place], int(labels[place]))

    def _crop(self, sample: NDArray[Any], number: int) -> None:
        if sample.dtype == np.float32:
            sample = sample + np.array(MEAN, np.float32).reshape(3, 1, 1)
        picture, crop = pixels(self.case.data, number), self.case.crop
        for mirrored in (False, True):
            want = sample[:, :, ::-1] if mirrored else sample
            width = min(crop, 16)
            rows = sliding_window_view(picture[2, :, : picture.shape[2] - crop + width], width, axis=1)
            rows = rows[: picture.shape[1] - crop + 1]
            for row, column in np.argwhere((rows == want[2, 0, :width]).all(axis=2)):
                if (picture[:, row : row + crop, column : column + crop] == want).all():
                    self.mirrored.append(mirrored)
                    self.places.append((int(row), int(column)))
                    return
        raise WrongWork(f"the sample with label {number} is no crop of record {number}")

    def _part(self, sample: NDArray[Any], number: int) -> None:
        """Decoders round differently and a part has a mean of its own: all there is to see is whose it is."""
        mean, want = sample.reshape(3, -1).mean(axis=1, dtype=np.float64), colour(self.case.data, number)
        if min(np.abs(mean - want).max(), np.abs(mean[::-1] - want).max()) > _CLOSE:  # BGR or RGB
            raise WrongWork(
                f"the sample with label {number} has the mean colour {mean.round()}, expected {want.round()}"
            )
        if sample.std() < 2:
            raise WrongWork(f"the sample with label {number} is flat")

    def order(self) -> str:
        """``random`` or ``sequential``, after some batches."""
        labels = np.concatenate(self.labels)
        if len(self.mirrored) >= 16 and len(set(self.mirrored)) < 2:
            raise WrongWork(f"of {len(self.mirrored)} samples all or none are mirrored")
        if len(self.places) >= 8 and len(set(self.places)) < 4:
            raise WrongWork(f"crops lie at {sorted(set(self.places))} only")
        return "sequential" if (np.diff(labels) == 1).mean() > 0.9 else "random"


def _same(what: str, expected: object, found: object) -> None:
    if expected != found:
        raise WrongWork(f"{what}: expected {expected}, found {found}")
