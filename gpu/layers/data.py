"""Data layers that read files. In a net their tops are inputs, which the feed fills."""

from __future__ import annotations

import math
from typing import ClassVar

from gpu.data_layers import data_layer
from gpu.layers.base import Shape, register
from gpu.layers.source import Source


@register("Data")
class Data(Source):
    """Batches from a database, which the feed writes: images, and labels if there is a second top.

    The text says how many images, but only the database how large they are: the caller gives the shape.
    """

    n_tops = (1, 2)

    def default_shapes(self) -> list[Shape]:
        names, asked = list(self.spec.top), self.context.input_shapes
        if names[0] in asked:
            return [asked[names[0]], asked[names[0]][:1]][: len(names)]
        raise self.error(
            f"the shape of {names[0]!r} is not known before the database is open",
            hint=f"input_shapes={{{names[0]!r}: (batch, channels, height, width)}}",
        )


@register("ImageData")
class ImageData(Data):
    """Image files that a list names, and their labels."""

    def setup(self) -> None:
        data_layer(self.spec, self.context.phase)  # what is wrong with the settings is told now


@register("HDF5Data")
class HDF5Data(ImageData):
    """Rows of data sets in HDF5 files, one data set for each top."""

    n_tops: ClassVar[tuple[int, float]] = (1, math.inf)  # type: ignore[assignment]

    def default_shapes(self) -> list[Shape]:
        shapes = super().default_shapes()
        return shapes + [shapes[0][:1]] * (len(self.spec.top) - len(shapes))
