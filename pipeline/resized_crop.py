"""A random part of each picture, brought to one size: ``data.transform.random_resized_crop``.

The part is that of torchvision's RandomResizedCrop: up to ten times a share of the area and the logarithm of the
ratio of width to height are drawn evenly, and the place, if such a part fits; else it is the largest of an allowed
ratio in the middle. In TEST it is the square in the middle, 0.875 of the shorter side. Chance belongs to (seed, phase,
epoch, record), in blocks of its own (docs/design.md, section 2.2); mirroring is decided by the word that decides it
anywhere.

Resizing is bilinear between pixel centres, without smoothing, in the arithmetic of :mod:`datasets.resize`: the
sample has the bits of the part cut out and resized there. The part's edges go on outside of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from datasets import datum as datums
from datasets import decode, jpeg
from datasets.image_file import Part, part_of
from datasets.jpeg import Box
from datasets.source import Record
from pipeline.samples import label_of
from pipeline.spec import FeedSpec, ResizedCropSpec
from pipeline.transforms import NO_MEAN, Transform, TransformError

CENTRAL = 0.875
"""Share of the shorter side that a TEST feed takes: 224 of 256 pixels, as is usual."""
_LANES = 4


class ResizedCrop:
    """Makes samples of one feed. What it holds besides settings is memory to work in."""

    def __init__(self, spec: FeedSpec, asked: ResizedCropSpec, transform: Transform) -> None:
        self._spec, self._asked, self._transform = spec, asked, transform
        self._seed, self._phase = np.uint64(spec.seed & (2**64 - 1)), np.uint64(spec.phase_number)
        self._random = spec.phase == "TRAIN"
        self._mirror = spec.transform.mirror
        self._areas, self._ratios = np.array(asked.scale, np.float64), np.array(asked.ratio, np.float64)
        self._roots = np.empty(53, np.float64)
        root = np.float64(asked.ratio[1] / asked.ratio[0])
        for place in range(len(self._roots)):
            self._roots[place] = root = np.sqrt(root)
        self._drawn = np.zeros(5, np.int64)
        size = asked.size
        whole = -(-size // _LANES) * _LANES
        self._rows = (np.zeros((2, size), np.int64), np.zeros(size, np.int32))
        self._columns = (np.zeros((2, whole), np.int64), np.zeros(whole, np.int32))
        self._lines = np.zeros((2, _LANES, whole), np.int32)
        self._packed = np.zeros(0, np.uint8)

    @staticmethod
    def of(spec: FeedSpec, transform: Transform) -> ResizedCrop | None:
        """For this feed, or None where it asks for none."""
        asked = spec.transform.resized_crop
        return None if asked is None else ResizedCrop(spec, asked, transform)

    def warm_up(self, pixels: str) -> None:
        """Compile or load what the first batch would otherwise wait for."""
        jpeg.prepare()
        shape = (self._transform.record_shape[0], self._asked.size, self._asked.size)
        self._resize(
            part_of(np.zeros(self._transform.record_shape, np.uint8), self._chooser(0, 0)), np.zeros(shape, pixels)
        )

    def sample(self, record: Record, epoch: int, out: NDArray[Any]) -> Any:
        """Make the sample of a record in ``out``, [C, size, size]; returns its label.

        Raises one of ``pipeline.samples.RECORD_ERRORS`` naming the record.
        """
        datum = datums.parse(record.value, record)
        asked = self._asked
        part = decode.part(
            datum, record, self._spec.transform.color, self._chooser(epoch, record.index),
            extent=self._spec.transform.decode, size=asked.size, max_pixels=self._spec.max_pixels,
        )  # fmt: skip
        self._resize(part, out, record)
        return label_of(record, datum)

    def put(self, image: NDArray[Any], record: Record, epoch: int, out: NDArray[Any]) -> None:
        """Make the sample of an image [C, H, W], which stands for that record, in ``out``."""
        self._resize(part_of(image, self._chooser(epoch, record.index)), out, record)

    def box(self, epoch: int, index: int, height: int, width: int) -> Box:
        """The part of an image of that size that a record's sample is made of in an epoch."""
        from pipeline.resize_kernels import draw  # numba loads here, at the first batch

        drawn = self._drawn
        draw(
            self._seed, self._phase, np.uint64(epoch), np.uint64(index), height, width, self._areas, self._ratios,
            self._roots, self._mirror, drawn,
        )  # fmt: skip
        if self._random:
            return (int(drawn[0]), int(drawn[1]), int(drawn[2]), int(drawn[3]))
        side = max(1, round(CENTRAL * min(height, width)))
        return ((height - side) // 2, (width - side) // 2, side, side)

    @property
    def mirrored(self) -> bool:
        """Whether the sample of the part that was chosen last is mirrored."""
        return bool(self._drawn[4])

    def _chooser(self, epoch: int, index: int) -> Any:
        return lambda height, width: self.box(epoch, index, height, width)

    def _resize(self, part: Part, out: NDArray[Any], record: object = "a record") -> None:
        from pipeline.resize_kernels import pack, resize

        pixels, transform = part.pixels, self._transform
        if pixels.dtype != np.uint8:
            raise TransformError(
                f"{record} holds floats, which are not resized",
                expected="pixels of 8 bits",
                hint="leave transform.random_resized_crop out",
            )
        transform.check((part.channels, *(pixels.shape[:2] if part.packed else pixels.shape[1:])), record)
        mean = transform.mean if out.dtype == np.float32 else NO_MEAN
        for first in range(0, part.channels, _LANES):
            last = min(part.channels, first + _LANES)
            if part.packed:
                packed = pixels
            else:
                height, width = pixels.shape[1:]
                if len(self._packed) < _LANES * height * width:
                    self._packed = np.zeros(_LANES * height * width * 5 // 4, np.uint8)
                packed = self._packed[: _LANES * height * width].reshape(height, width, _LANES)
                for channel in range(first, last):
                    plane = pixels[channel]
                    address = np.uint64(plane.__array_interface__["data"][0])
                    pack(address, plane.strides[0], plane.strides[1], packed, channel - first)
            resize(
                packed, part.span, self.mirrored, mean[first:last], transform.scale, self._rows, self._columns,
                self._lines, out[first:last],
            )  # fmt: skip
