"""Training batches on their way to the device: the one whose step it is, and those copied ahead of their steps.

    batch = next(batches)          # the feed records how long this waits
    arrays = batch.on_device()     # the device records what is not hidden of the copy: Stage.H2D
    batches.copy_ahead()           # batches that are ready now are copied beside this step's compute

A slot goes back to the ring when the device is done with reading it, at that moment and by whoever sees it. What the
step wants to know of its batch besides the arrays (records, labels, hashes) is therefore kept apart from the slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gpu.device import Device, Upload
    from pipeline.feed import Batch, Feed

Inputs = Callable[["Batch"], Mapping[str, np.ndarray]]


class StagedBatch:
    """A batch of the feed with its upload.

    step, epoch, slot, hashes: as of :class:`pipeline.feed.Batch`. ids int64[B] and labels are copies.
    """

    def __init__(self, batch: Batch, device: Device, inputs: Inputs) -> None:
        self.step, self.epoch, self.slot, self.hashes = batch.step, batch.epoch, batch.slot, batch.hashes
        self.ids, self.labels = batch.ids.copy(), batch.labels.copy()
        self._upload: Upload = device.upload(inputs(batch), step=batch.step, epoch=batch.epoch, slot=batch.slot)
        self._upload.when_done(batch.hold().release)

    def __len__(self) -> int:
        return len(self.ids)

    def on_device(self) -> dict[str, Any]:
        """The arrays by the names of the net's inputs, when they have arrived. StallscopeError for a failed copy."""
        return self._upload.wait().arrays

    def taken(self) -> None:
        """The net has its own copy: nothing submitted later reads the arrays."""
        self._upload.taken()


class Staging:
    """An iterator of :class:`StagedBatch` over a feed, for one device. ``inputs``: which arrays of a batch it gets."""

    def __init__(self, feed: Feed, device: Device, inputs: Inputs) -> None:
        self._feed, self._device, self._inputs = feed, device, inputs
        self._ahead: deque[StagedBatch] = deque()

    def __iter__(self) -> Staging:
        return self

    def __next__(self) -> StagedBatch:
        batch = next(self._feed)
        return self._ahead.popleft() if self._ahead else self._begin(batch)

    def copy_ahead(self) -> None:
        """Begin the copies of the batches that come next, as far as they are ready and staging buffers are free."""
        while len(self._ahead) < self._device.ahead:
            batch = self._feed.peek(len(self._ahead))
            if batch is None:
                return
            self._ahead.append(self._begin(batch))

    def _begin(self, batch: Batch) -> StagedBatch:
        return StagedBatch(batch, self._device, self._inputs)
