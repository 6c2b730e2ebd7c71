"""The feed as a max-plus recurrence: replay a run with some services set to zero, or with another configuration.

Batch i is claimed when a worker is free and the slot of batch i - depth was given back; it is ready after its services;
the trainer takes batches in strict order. Where the run took them as they became ready (``Model.claims``) a batch is
claimed when any slot is given back, and the trainer takes the one of its epoch that was ready first. Workers claim
greedily, as the ring's do: whoever is free first makes the next batch. Where copies to a device were recorded, one
engine makes them in order: batch i begins when the trainer has it, or before, when the arrays of an earlier one arrived
and batch i was ready; the step waits for what is left of it, and the slot is free when the copy is over. All variants
of a run are replayed side by side, one vector operation per step for all of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from profiler.services import CAUSE, CAUSES, Model

_CHUNK_VALUES = 4_000_000  # of one matrix [steps of a chunk, variants]: bounds memory at about 200 MB


@dataclass(frozen=True)
class Variants:
    """What differs between the replays made side by side: v of them.

    ``keep``: float64[v, len(CAUSES)], factor on the services of a cause (0 removes it). ``extra_make_ns``: float64[v],
    added to the making of every batch; ``extra_copy_ns``: to every copy. ``depth``: ring depth for all (None: the
    recorded one).
    """

    keep: np.ndarray
    extra_make_ns: np.ndarray | None = None
    extra_copy_ns: np.ndarray | None = None
    depth: int | None = None

    @property
    def count(self) -> int:
        return len(self.keep)


def recorded() -> Variants:
    """The run as it was."""
    return Variants(np.ones((1, len(CAUSES))))


def subsets(causes: list[list[str]]) -> Variants:
    """All 2^k subsets of k groups of causes set to zero; bit j of the variant's number removes group j."""
    k = len(causes)
    keep = np.ones((1 << k, len(CAUSES)))
    numbers = np.arange(1 << k)
    for j, group in enumerate(causes):
        for name in group:
            keep[(numbers >> j) & 1 == 1, CAUSE[name]] = 0.0
    return Variants(keep)


def removed_alone(causes: list[str]) -> Variants:
    """The run as it was, then with each of the causes alone set to zero."""
    keep = np.ones((len(causes) + 1, len(CAUSES)))
    for row, name in enumerate(causes, 1):
        keep[row, CAUSE[name]] = 0.0
    return Variants(keep)


def replay(model: Model, variants: Variants, weights: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Replay ``model`` under every variant; returns (lengths, totals).

    lengths: float64[n, v], ns of each step under each variant; with ``weights`` (float64[v, w]) the product
    float64[n, w], without ever holding the whole [n, v]. totals: float64[v], T of each variant in ns.
    """
    n, v = len(model.rows), variants.count
    keep = variants.keep.T
    depth = variants.depth or model.depth
    extra = np.zeros(v) if variants.extra_make_ns is None else variants.extra_make_ns
    out = np.empty((n, v if weights is None else weights.shape[1]))
    start = model.start_ns[:, None] * np.ones((1, v))
    started = variants.keep[:, CAUSE["startup"]] > 0
    workers = _Workers(np.where(started[None, :], start, np.minimum(start, 0.0)))
    feed = _InOrder(model, workers, depth) if model.claims is None else _AsReady(model, workers, depth)
    end = np.zeros(v)
    copies, engine, arrivals = model.copies, np.full(v, -np.inf), _Arrivals(model)
    extra_copy = np.zeros(v) if variants.extra_copy_ns is None else variants.extra_copy_ns
    chunk = max(1, _CHUNK_VALUES // max(v, 1))
    for lo in range(0, n, chunk):
        hi = min(n, lo + chunk)
        part = slice(lo, hi)
        feed.load(lo, hi, keep, extra)
        pre = model.pre[part] @ keep + model.fixed_pre[part, None]
        take = model.take[part] @ keep
        mid = model.mid[part] @ keep + model.fixed_mid[part, None]
        post = model.post[part] @ keep + model.fixed_post[part, None]
        if copies is not None:
            copy = copies.length[part, None] * keep[CAUSE["h2d"]] + extra_copy
        length = np.empty((hi - lo, v))
        for i in range(hi - lo):
            asked = end + pre[i]
            if model.serial:
                ready = asked + feed.make(lo + i)
            else:
                ready = feed.ready(lo + i)
            taken = np.maximum(asked, ready) + take[i]
            given = taken + mid[i]
            if copies is not None:
                # The batch's own turn is the latest moment to begin its copy.
                issued = given if model.serial else arrivals.earliest(ready, given)
                engine = np.maximum(issued, engine) + copy[i]
                given = np.maximum(given, engine)
                arrivals.add(given)
            now = given + post[i]
            if copies is not None and not model.serial:
                feed.give_back(lo + i, engine + copies.lag[lo + i])
            elif not model.serial:
                feed.give_back(lo + i, np.where(model.lag[lo + i] > 0, now + model.lag[lo + i], given))
            length[i] = now - end
            end = now
        out[part] = length if weights is None else length @ weights
    return out, end


class _Workers:
    """When each is free: float64[workers, v]. Whoever is free first makes the next batch."""

    def __init__(self, free: np.ndarray) -> None:
        self._free, self._lanes = free, np.arange(free.shape[1])

    def make(self, slot: np.ndarray, service: np.ndarray, tail: float) -> np.ndarray:
        """When a batch is ready whose slot is free from then on; tail: how long its worker stays busy after it."""
        free = self._free
        if len(free) == 1:
            ready = np.maximum(free[0], slot) + service
            free[0] = ready + tail
        else:
            worker = free.argmin(axis=0)
            ready = np.maximum(free[worker, self._lanes], slot) + service
            free[worker, self._lanes] = ready + tail
        return ready


class _InOrder:
    """The batch of row i lives in slot i mod depth and is taken as row i."""

    def __init__(self, model: Model, workers: _Workers, depth: int) -> None:
        self._model, self._workers, self._depth = model, workers, depth
        self._released = np.full((depth, len(workers._lanes)), -np.inf)

    def load(self, lo: int, hi: int, keep: np.ndarray, extra: np.ndarray) -> None:
        """Work out the services that rows lo to hi need."""
        self._lo = lo
        self._gap = self._model.gap[lo:hi] @ keep
        self._make = self._model.make[lo:hi] @ keep + extra

    def make(self, row: int) -> np.ndarray:
        """How long its batch takes to make: float64[v]."""
        making: np.ndarray = self._make[row - self._lo]
        return making

    def ready(self, row: int) -> np.ndarray:
        """When the batch that a row takes was ready; rows in order."""
        at = row - self._lo
        service = self._gap[at] + self._make[at]
        return self._workers.make(self._released[row % self._depth], service, self._model.tail[row])

    def give_back(self, row: int, moment: np.ndarray) -> None:
        """The slot of the batch that the row took is free from then on."""
        self._released[row % self._depth] = moment


class _AsReady(_InOrder):
    """A claim takes the slot that was given back last; a row takes the batch of its epoch that was ready first.

    So which batch a row takes differs between variants: what is made is counted by claims, what the trainer does by
    rows. Before a row is looked at, all claims that its predecessors' slots allow are made. (How far a batch may be
    overtaken is not limited here.)
    """

    def __init__(self, model: Model, workers: _Workers, depth: int) -> None:
        super().__init__(model, workers, depth)
        assert model.claims is not None
        assert model.epoch is not None
        self._claims, self._row_epoch, self._claimed = model.claims, model.epoch, 0
        self._lanes = workers._lanes
        self._pending = np.full((depth, len(self._lanes)), np.inf)  # ready and not taken
        self._epoch = np.zeros((depth, len(self._lanes)), np.int64)
        self._place = np.zeros(len(self._lanes), np.int64)  # of the batch taken last

    def load(self, lo: int, hi: int, keep: np.ndarray, extra: np.ndarray) -> None:
        self._lo = self._claimed
        rows = self._claims[self._lo : hi + self._depth - 1]
        self._gap = self._model.gap[rows] @ keep
        self._make = self._model.make[rows] @ keep + extra

    def ready(self, row: int) -> np.ndarray:
        while self._claimed < min(len(self._claims), row + self._depth):
            claim = self._claimed
            its = self._claims[claim]
            slot = self._released[(claim - self._depth) % self._depth]
            at = claim - self._lo
            ready = self._workers.make(slot, self._gap[at] + self._make[at], self._model.tail[its])
            place = claim if claim < self._depth else self._place
            self._pending[place, self._lanes] = ready
            self._epoch[place, self._lanes] = self._row_epoch[its]
            self._claimed += 1
        mine = np.where(self._epoch == self._row_epoch[row], self._pending, np.inf)
        self._place = mine.argmin(axis=0)
        taken: np.ndarray = mine[self._place, self._lanes]
        self._pending[self._place, self._lanes] = np.inf
        return taken


class _Arrivals:
    """When the arrays of the last few batches arrived: the moments at which the trainer looks for batches to copy."""

    def __init__(self, model: Model) -> None:
        self._last: deque[np.ndarray] = deque(maxlen=model.copies.ahead if model.copies is not None else 0)

    def add(self, moment: np.ndarray) -> None:
        self._last.append(moment)

    def earliest(self, ready: np.ndarray, latest: np.ndarray) -> np.ndarray:
        """The first of them at which a batch that is ready then could be begun with, else ``latest``."""
        begin = latest
        for moment in reversed(self._last):
            begin = np.where(ready <= moment, moment, begin)
        return begin
