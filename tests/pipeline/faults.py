"""Faults at seeded moments, and what a feed must have delivered all the same."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence

import numpy as np

SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


class Saboteur:
    """Kills or stops one of the processes it is shown, at moments that its seed decides.

    Parameters
    ----------
    between: least and largest number of steps from one fault to the next. most: faults in all.
    """

    def __init__(
        self, seed: int, between: tuple[int, int] = (4, 12), most: int = 6, signals: Sequence[signal.Signals] = SIGNALS
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._signals = signals
        self._between, self.left = between, most
        self._next = int(self._rng.integers(*between))
        self.done: list[tuple[int, int, signal.Signals]] = []

    def after(self, step: int, pids: Sequence[int]) -> None:
        """To be called after each step; ``pids`` are those that may be hit."""
        if step < self._next or not self.left or not pids:
            return
        pid, how = int(self._rng.choice(pids)), self._signals[int(self._rng.integers(len(self._signals)))]
        os.kill(pid, how)
        self.done.append((step, pid, how))
        self.left -= 1
        self._next = step + int(self._rng.integers(*self._between))


def audit(seen: Sequence[tuple[int, int]], records: int, epochs: int) -> None:
    """``seen`` are (epoch, record) of all samples: each record of each epoch exactly once."""
    counted = Counter(seen)
    wanted = {(epoch, record) for epoch in range(epochs) for record in range(records)}
    assert set(counted) == wanted
    assert set(counted.values()) == {1}
