"""Layers that bring values in: written by the caller, or filled by themselves."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from datasets.caffe_pb2 import FillerParameter
from gpu.fillers import fill
from gpu.layers.base import Array, Layer, Shape, register


class Source(Layer):
    """A layer without inputs whose tops the caller writes; shapes given to the net go before those of the text."""

    n_bottoms = (0, 0)
    n_tops = (1, math.inf)

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        asked = self.context.input_shapes
        names = list(self.spec.top)
        if all(name in asked for name in names):
            return [asked[name] for name in names]
        return [asked.get(name, shape) for name, shape in zip(names, self.default_shapes(), strict=True)]

    @abstractmethod
    def default_shapes(self) -> list[Shape]:
        """The shapes that the text gives."""

    def _spread(self, given: list[Shape]) -> list[Shape]:
        """One shape for all tops, or one each."""
        count = len(self.spec.top)
        if len(given) not in (1, count):
            raise self.error("needs one shape, or one for each top", expected=count, found=len(given))
        return given * count if len(given) == 1 else given

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        """Nothing to do: the caller has written the tops."""


@register("Input")
class Input(Source):
    """Blobs that the caller fills; one shape for all tops or one each."""

    def default_shapes(self) -> list[Shape]:
        return self._spread([tuple(shape.dim) for shape in self.spec.input_param.shape])


@register("MemoryData")
class MemoryData(Source):
    """Images and labels that the caller writes batch by batch, as into any input, or gives all at once.

    Given at once (:meth:`reset`; ``set_input_arrays`` of a net) each forward pass takes the next ``batch_size`` of
    them, and after the last comes the first, as in Caffe.
    """

    n_tops = (1, 2)

    def setup(self) -> None:
        p = self.spec.memory_data_param
        for name in ("batch_size", "channels", "height", "width"):
            if not getattr(p, name):
                raise self.error(f"{name} is missing or 0", expected=">= 1")
        self._arrays: list[np.ndarray] = []
        self.position = 0
        """Number of the image that comes next."""

    def default_shapes(self) -> list[Shape]:
        p = self.spec.memory_data_param
        return [(p.batch_size, p.channels, p.height, p.width), (p.batch_size,)][: len(self.spec.top)]

    def shapes(self, bottoms: Sequence[Shape]) -> list[Shape]:
        self._shapes = super().shapes(bottoms)
        return self._shapes

    @property
    def given(self) -> bool:
        """Whether the images were given all at once."""
        return bool(self._arrays)

    def reset(self, data: Any = None, labels: Any = None) -> None:
        """Images (n, channels, height, width) and labels, one each; None: batches are written one by one again.

        n is a multiple of the batch. float32 arrays are not copied: what is written into them is seen. Raises
        LayerError for arrays that do not fit.
        """
        arrays = [] if data is None else [np.asarray(data, np.float32)]
        if labels is not None:
            arrays.append(np.asarray(labels, np.float32))
        if arrays and len(arrays) != len(self.spec.top):
            raise self.error("needs an array for each top", expected=list(self.spec.top), found=f"{len(arrays)} arrays")
        if arrays:
            self._check(arrays)
            arrays[1:] = [arrays[1].reshape(-1, *self._shapes[1][1:])] if len(arrays) > 1 else []
        self._arrays, self.position = arrays, 0

    def _check(self, arrays: Sequence[np.ndarray]) -> None:
        (batch, *image), count = self._shapes[0], len(arrays[0]) if arrays[0].ndim else 0
        if list(arrays[0].shape[1:]) != image:
            raise self.error("the images have another size", expected=("n", *image), found=arrays[0].shape)
        if not count or count % batch:
            raise self.error("the images make no whole batches", expected=f"a multiple of {batch}", found=count)
        if len(arrays) > 1 and arrays[1].size != count * math.prod(self._shapes[1][1:]):
            raise self.error("each image needs its label", expected=count, found=arrays[1].shape)

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        if not self._arrays:
            return
        self._check(self._arrays)  # the net may have been reshaped
        stop = self.position + len(tops[0])
        for array, top in zip(self._arrays, tops, strict=True):
            top[...] = self.xp.asarray(array[self.position : stop])
        self.position = stop % len(self._arrays[0])


@register("DummyData")
class DummyData(Source):
    """Blobs filled by fillers, constant 0 without one: one for all tops or one each, as the shapes.

    As in Caffe, constants are filled in once, and draws are made anew for each pass: keyed by "layer name/top
    index/iteration" ("layer name/top index" in TEST, where every pass is the same).
    """

    def setup(self) -> None:
        p, count = self.spec.dummy_data_param, len(self.spec.top)
        if len(p.data_filler) not in (0, 1, count):
            raise self.error("needs no filler, one, or one for each top", expected=count, found=len(p.data_filler))
        fillers = list(p.data_filler) or [FillerParameter()]
        self._fillers = fillers * count if len(fillers) == 1 else fillers
        sizes = {name: len(getattr(p, name)) for name in ("num", "channels", "height", "width")}
        if not p.shape and any(length not in (1, count) for length in sizes.values()):
            raise self.error("needs one num, channels, height and width, or one for each top", found=sizes)

    def default_shapes(self) -> list[Shape]:
        p, count = self.spec.dummy_data_param, len(self.spec.top)
        if p.shape:
            return self._spread([tuple(shape.dim) for shape in p.shape])
        sides = [list(side) * (count if len(side) == 1 else 1) for side in (p.num, p.channels, p.height, p.width)]
        return list(zip(*sides, strict=True))

    def allocate(self) -> None:
        self._filled = False

    def forward(self, bottoms: Sequence[Array], tops: Sequence[Array]) -> None:
        again = f"/{self.context.iteration}" if self.context.phase == "TRAIN" else ""
        for i, (filler, top) in enumerate(zip(self._fillers, tops, strict=True)):
            if self._filled and (filler.type == "constant" or not again):
                continue
            values = fill(filler, top.shape, self.context.seed, f"{self.name}/{i}{again}")
            top[...] = values if self.xp is np else self.xp.asarray(values)
        self._filled = True
