"""Samples of JPEG records without a resize: the crop (or the whole picture) goes from the decoder straight to its slot.

``datasets.jpeg`` makes the pixels of the crop alone, with the bits of a full decode; files that it does not know are
decoded whole by libjpeg-turbo. Either way the sample is cropped, mirrored and written in one compiled pass. Records of
other kinds are not taken: the general way makes the same samples of them, and refuses what is refused here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from datasets import datum as datums
from datasets import decode, jpeg
from datasets.image_file import kind_of
from datasets.jpeg import Box
from datasets.source import Record
from pipeline import philox
from pipeline.layout import Probe
from pipeline.samples import label_of
from pipeline.spec import FeedSpec
from pipeline.transforms import NO_MEAN, Transform

_LANES = 4


class JpegCrop:
    """Makes samples of one feed. Holds memory to work in."""

    def __init__(self, spec: FeedSpec, transform: Transform) -> None:
        self._spec, self._transform = spec, transform
        self._size = (0, 0)  # of the picture that was chosen from last
        self._place = (0, 0, False)  # top, left and whether it is mirrored
        self._packed = np.zeros(0, np.uint8)

    @staticmethod
    def of(spec: FeedSpec, probed: Probe, transform: Transform) -> JpegCrop | None:
        """For this feed, or None where the first record is no JPEG, or where more is asked for than a crop."""
        asked = spec.transform
        if not probed.jpeg or probed.layout.room or transform.function is not None:
            return None
        return JpegCrop(spec, transform) if asked.resize is None and asked.resized_crop is None else None

    def warm_up(self, out: NDArray[Any]) -> None:
        """Compile or load what the first batch would otherwise wait for. out: [C, h, w], written over."""
        jpeg.prepare()
        self._put(np.zeros((*out.shape[1:], _LANES), np.uint8), (0, 0, False), out)

    def sample(self, record: Record, epoch: int, out: NDArray[Any]) -> Any:
        """Make the sample of a record in ``out``, [C, h, w]; returns its label, None for a record of another kind.

        Raises one of ``pipeline.samples.RECORD_ERRORS`` naming the record.
        """
        datum = datums.parse(record.value, record)
        if not datum.encoded or kind_of(datum.data) != "jpeg":
            return None
        asked = self._spec.transform

        def choose(height: int, width: int) -> Box:
            self._size = (height, width)
            side, (_, rows, columns) = asked.crop, self._transform.sample_shape
            if not side or side > height or side > width:
                self._place = (0, 0, False)
                if side or (height, width) != (rows, columns):
                    return 0, 0, height, width  # it does not fit: said when it is known to be sound
            self._place = philox.draw_one(
                self._spec.seed, self._spec.phase_number, epoch, record.index, (height - rows, width - columns),
                mirror=asked.mirror, random_crop=self._transform.random_crop,
            )  # fmt: skip
            return self._place[0], self._place[1], rows, columns

        part = decode.part(
            datum, record, asked.color, choose, extent=asked.decode, max_pixels=self._spec.max_pixels
        )  # fmt: skip
        label = label_of(record, datum)
        self._transform.check((part.channels, *self._size), record)
        pixels = part.pixels
        if not part.packed:
            from pipeline.resize_kernels import pack

            channels, height, width = pixels.shape
            if len(self._packed) < _LANES * height * width:
                self._packed = np.zeros(_LANES * height * width, np.uint8)
            packed = self._packed[: _LANES * height * width].reshape(height, width, _LANES)
            for channel in range(channels):
                plane = pixels[channel]
                pack(np.uint64(plane.__array_interface__["data"][0]), *plane.strides, packed, channel)
            pixels = packed
        self._put(pixels, self._place, out)
        return label

    def _put(self, packed: NDArray[np.uint8], place: tuple[int, int, bool], out: NDArray[Any]) -> None:
        from pipeline.kernels import put_packed  # numba loads here, at the first batch

        transform = self._transform
        mean = NO_MEAN if out.dtype == np.uint8 else transform.mean
        put_packed(packed.view(np.uint32)[..., 0], *place, mean, transform.scale, out)
