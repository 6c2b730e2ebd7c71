"""Records of different sizes, one at a time: with batch 1 and nothing that ties a sample to one size, each has its own.

The slots of the ring are all as large as the largest record; how much of a slot is used lies beside the sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from datasets import datum, decode
from pipeline.samples import RECORD_ERRORS
from pipeline.spec import FeedSpec
from pipeline.transforms import Shape, Transform, TransformError

if TYPE_CHECKING:
    from datasets.source import Source

_LOOKED_AT = 4096
_CHUNK = 64


def room(spec: FeedSpec, source: Source, first: Shape) -> int:
    """Values that a slot must hold, 0 where all samples have the shape of the first one.

    Reads up to 4096 records, spread over the data set, and looks at their headers; only with batch 1 and without crop,
    mean image and user function, which fix or may change the size.
    """
    transform = spec.transform
    if spec.batch != 1 or source.blobs or transform.resize or transform.crop or transform.mean_file or transform.python:
        return 0
    if transform.resized_crop is not None:
        return 0
    chosen = np.unique(np.linspace(0, len(source) - 1, min(len(source), _LOOKED_AT)).astype(np.int64))
    largest, differ = int(np.prod(first)), False
    for start in range(0, len(chosen), _CHUNK):
        for record in source.read_many(chosen[start : start + _CHUNK]):
            try:
                seen = decode.probe(datum.parse(record.value, record), record, max_pixels=spec.max_pixels)
            except RECORD_ERRORS:
                continue  # the batch that needs it says so
            channels = seen.channels
            if seen.mode and transform.color is not None:
                channels = 3 if transform.color == "color" else 1
            largest = max(largest, channels * seen.height * seen.width)
            differ = differ or (channels, seen.height, seen.width) != first
    return largest if differ else 0


class Fitted:
    """The transform for each shape that comes along."""

    def __init__(self, spec: FeedSpec, room: int) -> None:
        self._spec, self._room = spec, room
        self._by_shape: dict[Shape, Transform] = {}

    def to(self, shape: Shape, where: object) -> Transform:
        """A transform fitted to ``shape``. Raises :class:`TransformError` where the slots have no room for it."""
        if shape not in self._by_shape:
            if int(np.prod(shape)) > self._room:
                raise TransformError(
                    f"{where} is larger than every record that was looked at when the job began",
                    expected=f"at most {self._room} values, as the slots hold",
                    found=" x ".join(map(str, shape)),
                    hint="set transform.crop, or resize the records when they are converted",
                )
            transform = Transform(self._spec.transform, self._spec.seed, self._spec.phase_number)
            transform.fit(shape, where)
            self._by_shape[shape] = transform
        return self._by_shape[shape]
