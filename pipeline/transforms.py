"""From a decoded image to the numbers in the blob: python function, crop, mirror, mean, scale.

``out = (float32(x) - mean) * scale`` with two float32 roundings in this order (docs/design.md, section 2.3). The mean
image is indexed at the place of the pixel before crop and mirror, as Caffe does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.philox import Draws, generator
from pipeline.spec import TransformSpec
from profiler.errors import StallscopeError, UsageError, is_users_own

Function = Callable[[np.ndarray, Any, np.random.Generator], tuple[np.ndarray, Any]]
Shape = tuple[int, int, int]


NO_MEAN = np.empty((0, 0, 0), np.float32)
"""For the compiled loops: leave the pixels as they are."""


class TransformError(StallscopeError):
    """An image does not fit the transform, or a user's transform failed."""


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
        self.function = load_function(spec.python) if spec.python else None
        self.scale = np.float32(spec.scale)
        self._mean_image = load_mean(spec.mean_file) if spec.mean_file else None
        self.mean = np.zeros((1, 1, 1), np.float32)
        """float32[C, 1, 1] or float32[C, H, W]; set by :meth:`fit`."""
        self.record_shape: Shape = (0, 0, 0)
        self.sample_shape: Shape = (0, 0, 0)
        self._first = ""
        self._fitting: Shape | None = None  # a shape known to pass check(): that of nearly every record

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

    def apply_function(
        self, image: np.ndarray, label: Any, epoch: int, record: int, where: object
    ) -> tuple[np.ndarray, Any]:
        """Call the user's function on one image with its own random numbers.

        Raises :class:`TransformError` naming function and record where it fails or returns something else than
        ``(image, label)`` with an image uint8 or float32 [C, H, W].
        """
        if self.function is None:
            return image, label
        name = self.spec.python
        image = np.array(image)  # the function may write into its image, but not into the stored record
        try:
            result = self.function(image, label, generator(self.seed, self.phase, epoch, record))
        except BaseException as error:
            if not is_users_own(error):
                raise
            raise TransformError(
                f"the transform function {name} failed on {where}: {type(error).__name__}: {error}",
                hint=f"call it on this record alone: it came with label {label}, epoch {epoch}",
            ) from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], np.ndarray)):
            raise TransformError(
                f"the transform function {name} returned something else than (image, label) for {where}",
                expected="a tuple of an array [C, H, W] and a label",
                found=type(result).__name__,
            )
        changed, label = result
        if changed.ndim != 3 or changed.dtype not in (np.uint8, np.float32):
            raise TransformError(
                f"the transform function {name} returned an image that cannot be used for {where}",
                expected="uint8 or float32, [C, H, W]",
                found=f"{changed.dtype}, {list(changed.shape)}",
            )
        return np.ascontiguousarray(changed), label

    def fill(self, images: Sequence[np.ndarray], draws: Draws, out: np.ndarray) -> None:
        """Write a batch of checked images into ``out``, float32[B, C, h, w]; uint8: cropped and mirrored only.

        One compiled call for uint8 images; float images take the NumPy reference, which gives the same bits.
        """
        if any(image.dtype != np.uint8 for image in images):
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

    def fill_numpy(self, images: Sequence[np.ndarray], draws: Draws, out: np.ndarray) -> None:
        """The reference of :meth:`fill` in plain NumPy."""
        _, height, width = self.sample_shape
        whole = self.mean.shape[1:] != (1, 1)
        for index, image in enumerate(images):
            top, left = int(draws.h_off[index]), int(draws.w_off[index])
            window = np.s_[:, top : top + height, left : left + width]
            values = image[window]
            if out.dtype == np.float32:
                values = (values.astype(np.float32) - (self.mean[window] if whole else self.mean)) * self.scale
            out[index] = values[:, :, ::-1] if draws.mirror[index] else values


def load_function(name: str) -> Function:
    """The function ``module:function``. Raises :class:`UsageError` naming what cannot be found."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"transform.python: the module '{module_name}' cannot be imported: {error}",
            hint="start from the folder it lies in, or put that folder on PYTHONPATH",
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UsageError(
            f"transform.python: there is no function '{attribute}' in {module_name}",
            expected="module:function",
            found=name,
        )
    return function


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
