"""A user's own function in the transform (``data.transform.python``): on each image, or on a batch of samples.

    def flip(image, label, rng): ...              # uint8[C, H, W], before the crop; the rng belongs to the record

    @pipeline.per_batch
    def mixup(images, labels, rng): ...           # uint8[B, C, h, w], cropped and mirrored; the rng belongs to the step

Both are given pixels and return pixels: mean and scale come after, in the feed or on the device (``feed.pixels``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from pipeline import philox
from profiler.errors import StallscopeError, UsageError, is_users_own

_F = TypeVar("_F", bound=Callable[..., Any])
_MARK = "stallscope_per_batch"
_INT32 = np.iinfo(np.int32)
_LISTED = 10


class TransformError(StallscopeError):
    """An image does not fit the transform, or a user's transform failed."""


def per_batch(function: _F) -> _F:
    """Mark a transform function as one that is called once for each batch: ``f(images, labels, rng)``.

    images: uint8[B, C, h, w], after crop and mirror, before mean and scale; float32 where the records hold floats. It
    may be written into. labels: int32[B], or float32[B, K]. rng: of (seed, phase, epoch, step). B is that of the batch:
    1 when the feed is made, and less than the others where an epoch ends with a short batch.
    Returns images of the same shape, uint8 or float32, and labels int[B] or float32[B, K], of one kind for all batches.
    """
    setattr(function, _MARK, True)
    return function


@dataclass(frozen=True)
class OwnFunction:
    """A function that was found, with the key of its random numbers. name: ``module:function``."""

    name: str
    call: Callable[..., Any]
    seed: int
    phase: int

    @staticmethod
    def load(name: str, seed: int, phase: int) -> OwnFunction:
        """The function of that name. Raises :class:`UsageError` naming what cannot be found."""
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
        return OwnFunction(name, function, seed, phase)

    @property
    def per_batch(self) -> bool:
        return bool(getattr(self.call, _MARK, False))

    def on_image(
        self, image: np.ndarray, label: Any, epoch: int, record: int, where: object
    ) -> tuple[np.ndarray, Any]:  # fmt: skip
        """Call it on one image with its own random numbers.

        Raises :class:`TransformError` naming function and record where it fails or returns something else than
        ``(image, label)`` with a finite image uint8 or float32 [C, H, W].
        """
        image = np.array(image)  # the function may write into its image, but not into the stored record
        rng = philox.generator(self.seed, self.phase, epoch, record)
        hint = f"call it on this record alone: it came with label {label}, epoch {epoch}"
        changed, label = self._called(image, label, rng, where, "an array [C, H, W] and a label", hint)
        if changed.ndim != 3 or changed.dtype not in (np.uint8, np.float32):
            raise TransformError(
                f"the transform function {self.name} returned an image that cannot be used for {where}",
                expected="uint8 or float32, [C, H, W]",
                found=f"{changed.dtype}, {list(changed.shape)}",
            )
        if changed.dtype == np.float32 and not np.isfinite(changed).all():
            raise TransformError(
                f"the transform function {self.name} returned NaN or infinity for {where}",
                expected="finite numbers",
                hint=hint,
            )
        return np.ascontiguousarray(changed), label

    def on_batch(
        self, images: np.ndarray, labels: np.ndarray, epoch: int, place: int, where: Callable[[], str],
        records: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Call it on the samples of a batch: see :func:`per_batch`. It may write into both arrays.

        Parameters
        ----------
        epoch, place: of the batch in the stream: what its random numbers belong to.
        where: names the batch and its records. records: int64[B], their numbers.

        Returns images as they came back, and labels int32[B] or float32[B, K]. Raises :class:`TransformError` naming
        function, batch and records where it fails or returns something else.
        """
        rng = philox.generator(self.seed, self.phase, epoch, place, philox.BATCH_FUNCTION)
        shape = images.shape
        hint = "one call made the whole batch, so no single record is to blame, and data.on_bad_record does not apply"
        what = "two arrays: images and labels"
        changed, found = self._called(images, labels, rng, where, what, hint)
        if changed.shape != shape or changed.dtype not in (np.uint8, np.float32):
            raise TransformError(
                f"the transform function {self.name} returned images that cannot be used for {where()}",
                expected=f"uint8 or float32, {list(shape)}: as many samples as it was given, of the same size",
                found=f"{changed.dtype}, {list(changed.shape)}",
                hint=hint,
            )
        if changed.dtype == np.float32 and not np.isfinite(changed).all():
            rows = np.flatnonzero(~np.isfinite(changed).all(axis=(1, 2, 3)))
            raise TransformError(
                f"the transform function {self.name} returned NaN or infinity for {where()}",
                expected="finite numbers",
                found=f"in the samples at {numbers(rows, 'place')} of the batch, made of {numbers(records[rows])}",
                hint=hint,
            )
        return changed, self._labels(found, shape[0], where, hint)

    def _called(
        self, image: np.ndarray, label: Any, rng: np.random.Generator, where: object, what: str,
        hint: str,
    ) -> tuple[np.ndarray, Any]:  # fmt: skip
        try:
            result = self.call(image, label, rng)
        except BaseException as error:
            if not is_users_own(error):
                raise
            raise TransformError(
                f"the transform function {self.name} failed on {_text(where)}: {type(error).__name__}: {error}",
                hint=hint,
            ) from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], np.ndarray)):
            raise TransformError(
                f"the transform function {self.name} returned something else than a pair for {_text(where)}",
                expected=f"a tuple of {what}",
                found=type(result).__name__,
            )
        return result

    def _labels(self, labels: Any, count: int, where: Callable[[], str], hint: str) -> np.ndarray:
        fits = isinstance(labels, np.ndarray) and labels.ndim in (1, 2) and len(labels) == count
        if fits and labels.ndim == 1 and labels.dtype.kind in "iu":
            if not count or (labels.min() >= _INT32.min and labels.max() <= _INT32.max):
                return np.asarray(labels, np.int32)
        elif fits and labels.ndim == 2 and labels.shape[1] and labels.dtype == np.float32:
            return np.asarray(labels)
        raise TransformError(
            f"the transform function {self.name} returned labels that cannot be used for {where()}",
            expected=f"integers [{count}] in the range of int32, or float32 [{count}, K]",
            found=f"{labels.dtype}, {list(labels.shape)}" if isinstance(labels, np.ndarray) else type(labels).__name__,
            hint=hint,
        )


def numbers(items: Sequence[int] | np.ndarray, noun: str = "record") -> str:
    """``records 3, 7 and 5 more``."""
    listed = ", ".join(str(int(item)) for item in items[:_LISTED])
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return f"{noun}{'s' if len(items) > 1 else ''} {listed}{more}"


def _text(where: object) -> str:
    return str(where() if callable(where) else where)
