"""From a decoded image to the numbers in the blob: python function, crop, mirror, mean, scale.

``out = (float32(x) - mean) * scale`` with two float32 roundings in this order (docs/design.md, section 2.3). The mean
image is indexed at the place of the pixel before crop and mirror, as Caffe does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline import philox
from pipeline.functions import OwnFunction, TransformError
from pipeline.spec import TransformSpec
from profiler.errors import UsageError

__all__ = ["NO_MEAN", "Shape", "Transform", "TransformError", "load_mean"]

Shape = tuple[int, int, int]


NO_MEAN = np.empty((0, 0, 0), np.float32)
"""For the compiled loops: leave the pixels as they are."""


class Transform:
    """A transform made ready for images of one data set.

    Parameters
    ----------
    spec: what to do.
    seed, phase: the key of a user function's random numbers; phase is 0 for TRAIN, 1 for TEST.
    """

    def __init__(self, spec: TransformSpec, seed: int, phase: int) -> None:
        if spec.mean_value and spec.mean_file:
            raise UsageError("mean_value and mean_file exclude each other", hint="remove one of the two")
        self.spec = spec
        self.seed, self.phase = seed, phase
        own = OwnFunction.load(spec.python, seed, phase) if spec.python else None
        batched = own is not None and own.per_batch
        self.function = None if batched else own
        """The user's, on each image before the crop."""
        self.batch_function = own if batched else None
        """The user's, on the samples of a batch before mean and scale."""
        self._check_function()
        self.scale = np.float32(spec.scale)
        self._mean_image = load_mean(spec.mean_file) if spec.mean_file else None
        self.mean = np.zeros((1, 1, 1), np.float32)
        """float32[C, 1, 1] or float32[C, H, W]; set by :meth:`fit`."""
        self.record_shape: Shape = (0, 0, 0)
        self.sample_shape: Shape = (0, 0, 0)
        self._first = ""
        self._fitting: Shape | None = None  # a shape known to pass check(): that of nearly every record

    def _check_function(self) -> None:
        spec = self.spec
        if self.function is not None and spec.decode != "full":
            raise UsageError(
                f"transform.decode: {spec.decode} cannot go with transform.python, a function on each image",
                expected="decode: full, or a function marked with pipeline.per_batch",
                found=spec.python,
                hint="the function is given the whole picture, before a part of it is chosen",
            )
        moved = spec.crop or spec.mirror
        if self.batch_function is not None and spec.mean_file and moved:
            raise UsageError(
                "a function per batch (transform.python) cannot go with a mean image where samples are cropped or "
                "mirrored",
                expected="mean_value, or a function on each image",
                found=f"{spec.python} with {spec.mean_file}",
                hint="the mean of a pixel depends on where it was before the crop, which a sample does not say",
            )

    def fit(self, shape: Shape, where: object) -> Shape:
        """Take the shape of the first image; returns the shape (C, h, w) of a sample.

        Raises :class:`TransformError` where crop or mean do not fit it.
        """
        self.record_shape = shape
        channels = shape[0]
        crop = self.spec.crop if self.spec.resized_crop is None else self.spec.resized_crop.size
        self._first = str(where)
        self.sample_shape = (channels, crop, crop) if crop else shape
        values = self.spec.mean_value
        if len(values) > 1 and len(values) != channels:
            raise TransformError(
                f"mean_value does not fit {where}",
                expected=f"1 or {channels} numbers (the image has {channels} channels)",
                found=f"{len(values)}: {list(values)}",
            )
        if self._mean_image is not None:
            self.mean = self._mean_image
        else:
            self.mean = np.empty((channels, 1, 1), np.float32)
            self.mean[:, 0, 0] = values if values else 0.0
        self.check(shape, where)
        self._fitting = shape
        return self.sample_shape

    def check(self, shape: Sequence[int], where: object) -> None:
        """Raise :class:`TransformError` if an image of this shape cannot become a sample of the batch."""
        if shape == self._fitting:
            return
        crop, resized = self.spec.crop, self.spec.resized_crop is not None
        channels, height, width = shape
        if crop and (crop > height or crop > width):
            raise TransformError(
                f"the crop is larger than the image of {where}",
                expected=f"a crop of at most {min(height, width)}",
                found=f"crop {crop}, image {_text(shape)}",
                hint="a smaller transform.crop, or records resized when they are converted",
            )
        mean = self._mean_image
        if mean is not None and resized and mean.shape != self.sample_shape:
            raise TransformError(
                f"the mean image {self.spec.mean_file} does not fit the samples of random_resized_crop",
                expected=f"a mean of their shape {_text(self.sample_shape)}",
                found=_text(mean.shape),
                hint="use mean_value: parts come from anywhere in images of any size",
            )
        if mean is not None and not resized and tuple(shape) != mean.shape:
            raise TransformError(
                f"the mean image {self.spec.mean_file} does not fit {where}",
                expected=f"a mean of the uncropped image's shape {_text(shape)}",
                found=f"mean {_text(mean.shape)}" + (f" (crop {crop} is cut out of both)" if crop else ""),
                hint="compute the mean of this data set, or use mean_value; nothing is resized",
            )
        if channels != self.record_shape[0]:
            raise TransformError(
                f"{where} has another number of channels than {self._first}",
                expected=f"{self.record_shape[0]} channels",
                found=f"{channels}, image {_text(shape)}",
                hint="transform.force_color or transform.force_gray makes encoded images alike",
            )
        if not (crop or resized) and tuple(shape) != self.record_shape:
            raise TransformError(
                f"{where} has another size than {self._first}, and there is no crop",
                expected=_text(self.record_shape),
                found=_text(shape),
                hint="set transform.crop, or resize the records when they are converted",
            )

    def check_pixels(self, image: np.ndarray, where: object) -> None:
        """Raise :class:`TransformError` for an image of floats, which a slot of uint8 cannot hold."""
        if image.dtype != np.uint8:
            raise TransformError(
                f"{where} holds floats, and the slots hold pixels of 8 bits",
                expected="uint8",
                found=str(image.dtype),
                hint="feed.pixels: float32",
            )

    def draws(self, images: Sequence[np.ndarray], epochs: np.ndarray, records: np.ndarray) -> philox.Draws:
        """What chance decides for crop and mirroring of these images [C, H, W], of records in epochs."""
        _, height, width = self.sample_shape
        spare = (
            np.fromiter((image.shape[1] - height for image in images), np.int64, len(images)),
            np.fromiter((image.shape[2] - width for image in images), np.int64, len(images)),
        )
        return philox.draw(
            self.seed, self.phase, epochs, records, spare, mirror=self.spec.mirror, random_crop=self.random_crop
        )  # fmt: skip

    @property
    def random_crop(self) -> bool:
        """Whether the place of a crop is left to chance."""
        return bool(self.spec.crop) and self.phase == philox.PHASES["TRAIN"]

    def fill(self, images: Sequence[np.ndarray], draws: philox.Draws, out: np.ndarray) -> None:
        """Write a batch of checked images into ``out``, float32[B, C, h, w]; cropped and mirrored only where it is
        uint8 or a function per batch comes first.

        One compiled call for uint8 images; float images take the NumPy reference, which gives the same bits.
        """
        floats = any(image.dtype != np.uint8 for image in images)
        if floats or (self._cuts_only(out) and out.dtype != np.uint8):
            self.fill_numpy(images, draws, out)
            return
        from pipeline.kernels import fill  # numba loads here, at the first batch

        images = [np.ascontiguousarray(image) for image in images]
        count = len(images)
        addresses = np.fromiter((image.__array_interface__["data"][0] for image in images), np.uint64, count)
        heights = np.fromiter((image.shape[1] for image in images), np.int64, count)
        widths = np.fromiter((image.shape[2] for image in images), np.int64, count)
        mean = self.mean if out.dtype == np.float32 else NO_MEAN
        fill(addresses, heights, widths, draws.h_off, draws.w_off, draws.mirror, mean, self.scale, out)

    def fill_numpy(self, images: Sequence[np.ndarray], draws: philox.Draws, out: np.ndarray) -> None:
        """The reference of :meth:`fill` in plain NumPy."""
        _, height, width = self.sample_shape
        whole = self.mean.shape[1:] != (1, 1)
        for index, image in enumerate(images):
            top, left = int(draws.h_off[index]), int(draws.w_off[index])
            window = np.s_[:, top : top + height, left : left + width]
            values = image[window]
            if not self._cuts_only(out):
                values = (values.astype(np.float32) - (self.mean[window] if whole else self.mean)) * self.scale
            out[index] = values[:, :, ::-1] if draws.mirror[index] else values

    def _cuts_only(self, out: np.ndarray) -> bool:
        return out.dtype == np.uint8 or self.batch_function is not None

    def finish(self, samples: np.ndarray, out: np.ndarray) -> None:
        """Mean and scale of samples [B, C, h, w] that a function per batch gave back, into ``out`` of that shape.

        Raises :class:`TransformError` for floats where ``out`` is of uint8, which holds pixels without mean and scale.
        """
        if out.dtype == np.uint8:
            self.check_pixels(samples, f"what {self.spec.python} returned")
            if samples.__array_interface__["data"] != out.__array_interface__["data"] or samples.strides != out.strides:
                np.copyto(out, samples)
        elif samples.dtype == np.uint8:
            from pipeline.kernels import fill  # numba loads here, at the first batch

            samples, (count, _, height, width) = np.ascontiguousarray(samples), samples.shape
            first, each = samples.__array_interface__["data"][0], samples[:1].nbytes
            nothing = np.zeros(count, np.int64)
            fill(
                np.uint64(first) + np.arange(count, dtype=np.uint64) * np.uint64(each),
                np.full(count, height, np.int64), np.full(count, width, np.int64), nothing, nothing,
                np.zeros(count, np.bool_), self.mean, self.scale, out,
            )  # fmt: skip
        else:
            np.subtract(samples, self.mean, out=out)
            np.multiply(out, self.scale, out=out)


def load_mean(path: str) -> NDArray[np.float32]:
    """The mean image of a BlobProto file (``.binaryproto``), float32[C, H, W].

    Raises :class:`TransformError` for a file that is missing, is no BlobProto or has contradictory dimensions.
    """
    from google.protobuf.message import DecodeError

    from datasets import caffe_pb2

    try:
        with open(path, "rb") as file:
            blob = caffe_pb2.BlobProto.FromString(file.read())
    except OSError as error:
        raise TransformError(f"the mean file {path} cannot be read: {error.strerror}") from error
    except DecodeError as error:
        raise TransformError(
            f"the mean file {path} is not a BlobProto: {error}", hint="make it with Caffe's compute_image_mean"
        ) from error
    values = np.array(blob.double_data if len(blob.double_data) else blob.data, np.float32)
    shape = list(blob.shape.dim) if blob.HasField("shape") else [blob.num, blob.channels, blob.height, blob.width]
    while len(shape) > 3 and shape[0] == 1:
        del shape[0]
    if len(shape) != 3 or min(shape) < 1 or int(np.prod(shape)) != values.size:
        raise TransformError(
            f"the mean file {path} does not hold one image",
            expected="1 x channels x height x width values",
            found=f"shape {shape}, {values.size} values",
        )
    return values.reshape(shape)


def _text(shape: Sequence[int]) -> str:
    return " x ".join(str(side) for side in shape) + " (C x H x W)"
