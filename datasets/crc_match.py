"""Which records of a data set are those its manifest counted: by checksum, in order, also where some are gone.

A checksum is found by value and not by place, so a lost page shifts nothing: what follows it still matches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from datasets.key_index import dense_by_ends


@dataclass(slots=True)
class Suspect:
    """An entry that matched nothing. ``place`` is filled in when its neighbours are known."""

    key: bytes | None
    place: int = -1


@dataclass(frozen=True, slots=True)
class Gap:
    """Places start .. stop - 1 that nothing sound filled: ``missing`` are those no suspect can have come from."""

    missing: list[int] = field(default_factory=list)


class CrcMatcher:
    """Takes the entries of a database in key order and finds the place of each in the manifest.

    Parameters
    ----------
    crcs: uint32[n], the checksums in key order.
    first_key, last_key: of the manifest. Where they say that all keys are numbers without gaps, keys have places.
    """

    def __init__(self, crcs: NDArray[np.uint32], first_key: str, last_key: str) -> None:
        self.crcs = crcs
        self._order: NDArray[np.int64] | None = None
        self._sorted = crcs
        self._next = 0  # the place behind the last match
        self._suspects: list[Suspect] = []
        self._first = -1
        self._width = 0
        dense = dense_by_ends(first_key.encode(), last_key.encode(), len(crcs))
        if dense is not None:
            self._first, self._width = dense.first, dense.width

    def match(self, crc: int) -> tuple[int, Gap] | None:
        """The place of a record with this checksum and what was left out before it; None where there is none."""
        place = self._find(crc)
        if place is None:
            return None
        gap = self._close(place)
        self._next = place + 1
        return place, gap

    def suspect(self, key: bytes | None) -> Suspect:
        """Note an entry that matched nothing."""
        self._suspects.append(Suspect(key))
        return self._suspects[-1]

    def finish(self) -> Gap:
        """What was left out at the end."""
        return self._close(len(self.crcs))

    def key(self, place: int) -> str | None:
        """The key that belongs to a place, where that can be told."""
        return None if self._first < 0 else f"{self._first + place:0{self._width}d}"

    def _find(self, crc: int) -> int | None:
        if self._next < len(self.crcs) and self.crcs[self._next] == crc:
            return self._next
        if self._order is None:
            self._order = np.argsort(self.crcs, kind="stable")
            self._sorted = self.crcs[self._order]
        low, high = (int(np.searchsorted(self._sorted, np.uint32(crc), side)) for side in ("left", "right"))
        later = self._order[low:high][self._order[low:high] >= self._next]
        return int(later[0]) if len(later) else None

    def _close(self, end: int) -> Gap:
        free = dict.fromkeys(range(self._next, end))
        unplaced = []
        for suspect in self._suspects:
            place = self._place_by_key(suspect.key)
            if place in free:
                del free[place]
                suspect.place = place
            else:
                unplaced.append(suspect)
        for suspect in unplaced:
            suspect.place = next(iter(free), end)
            free.pop(suspect.place, None)
        self._suspects = []
        return Gap(list(free))

    def _place_by_key(self, key: bytes | None) -> int:
        if self._first < 0 or key is None or len(key) != self._width or not key.isdigit():
            return -1
        return int(key) - self._first
