"""One batch as its consumer sees it: arrays in a slot of the ring, which end when the batch is given back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from pipeline import bad_records
from pipeline.crew import FeedError
from pipeline.maker import Slot
from pipeline.ring import Ready

if TYPE_CHECKING:
    from pipeline.feed import Feed


class Batch:
    """One batch, in its slot. Its arrays are views that end with :meth:`release`: copy what shall live longer.

    ``data, labels = batch`` gives :attr:`blobs`; ``len(batch)`` is the number of samples.

    Attributes
    ----------
    step, epoch: position in the stream; epoch is that of the first item.
    data: float32[B, C, H, W], or uint8 where the spec says so (``pixels``); labels: int32[B] or float32[B, K].
    ids, epochs: int64[B], record and epoch of each item.
    hashes: of ids, ids_set, raw, raw_set, fill (see docs/design.md); empty when fingerprints are off.
    """

    def __init__(self, feed: Feed, ready: Ready, slot: Slot) -> None:
        self._feed: Feed | None = feed
        self._slot: Slot | None = slot
        self._count = ready.items
        self._held = False
        self._bad: list[Any] = []
        if slot.bad is not None and slot.bad_count is not None and slot.bad_count[0]:
            self._bad = bad_records.read_rows(slot.bad, slot.bad_count)
        self._blobs = feed.probe.blobs
        self._ready = ready
        self.step, self.epoch, self.slot = ready.step, ready.epoch, ready.slot
        self.hashes = ready.hashes

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.blobs)

    def __repr__(self) -> str:
        if self._slot is None:
            return f"<Batch of step {self.step}, given back>"
        arrays = ", ".join(f"{array.dtype}{list(array.shape)}" for array in self.blobs)
        return f"<Batch of step {self.step}, epoch {self.epoch}: {arrays}>"

    def __reduce__(self) -> NoReturn:
        raise FeedError(
            f"the batch of step {self.step} lies in memory of its feed and cannot be sent or copied as a whole",
            hint="send copies of its arrays: batch.data.copy(), batch.labels.copy()",
        )

    @property
    def data(self) -> np.ndarray:
        return self._live().samples(self._count)

    @property
    def labels(self) -> np.ndarray:
        return self._live().labels[: self._count]

    @property
    def blobs(self) -> list[np.ndarray]:
        """The arrays as a net takes them: data and labels, or what a source with shapes of its own says."""
        shapes = self._blobs
        if not shapes:
            return [self.data, self.labels]
        arrays, at = [self.data.reshape(self._count, *shapes[0])], 0
        labels = self.labels.reshape(self._count, -1)
        for shape in shapes[1:]:
            part = np.ascontiguousarray(labels[:, at : at + math.prod(shape)])
            arrays.append(part.reshape(self._count, *shape))
            at += math.prod(shape)
        return arrays

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._live().ids[: self._count]

    @property
    def epochs(self) -> NDArray[np.int64]:
        return self._live().epochs[: self._count]

    def hold(self) -> Self:
        """Keep the batch beyond the next one; :meth:`release` must be called later."""
        self._held = True
        return self

    def release(self) -> None:
        """Give the slot back; it may be filled again at once. Idempotent.

        In the thread that takes the batches; of a batch that is held, in one other.
        """
        feed = self._feed
        if feed is not None:
            feed._check_process()
        self._forget()
        if feed is not None:
            feed._release(self)

    def _forget(self) -> None:
        """Refuse to be read from now on, and keep no memory of the ring."""
        self._feed = self._slot = None

    def _live(self) -> Slot:
        if self._slot is None:
            raise FeedError(
                f"the batch of step {self.step} was given back, its slot may hold another one by now",
                hint="copy what is needed before release(), or call batch.hold() before the next batch is asked for",
            )
        return self._slot
