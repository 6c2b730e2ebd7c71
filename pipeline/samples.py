"""From a stored record to an image and its label, and which failures are the record's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from datasets import datum as datums
from datasets import decode
from datasets.datum import Datum, DatumError
from datasets.errors import DatasetCorrupt
from datasets.image_file import kind_of
from datasets.paired import PairedRecord
from datasets.resize import resize
from datasets.source import Record
from pipeline.spec import Color
from pipeline.transforms import TransformError

_INT32 = range(-(2**31), 2**31)


class LabelError(TransformError):
    """A record has no label, or one that cannot stand in the batch."""


class NotFiniteError(DatumError):
    """The floats of a record hold NaN or infinity: one such value makes every weight it reaches NaN."""


RECORD_ERRORS = (DatumError, TransformError, DatasetCorrupt)
"""What a record can be to blame for: ``data.on_bad_record`` speaks of these. (A user's function may raise one of them
too, and is called where nobody catches it.)"""


def decoded(
    record: Record, color: Color, max_pixels: int | None = None, size: tuple[int, int] | None = None
) -> tuple[np.ndarray, Any]:
    """Image [C, H, W], resized to ``size`` (H, W), and label of a record: an int, or float32[K] from float_data.

    Raises one of :data:`RECORD_ERRORS` naming the record.
    """
    datum = datums.parse(record.value, record)
    image = decode.to_image(datum, record, color=color, max_pixels=max_pixels)
    if image.dtype.kind == "f" and not np.isfinite(image).all():
        raise _not_finite(record, image)
    if size is not None:
        image = _resized(record, image, size)
    return image, label_of(record, datum)


def holds_jpeg(record: Record) -> bool:
    """Whether a sound record says that it holds an image file, and that is a JPEG."""
    datum = datums.parse(record.value, record)
    return datum.encoded and kind_of(datum.data) == "jpeg"


def label_of(record: Record, datum: Datum) -> Any:
    """The label of a record that was parsed. Raises one of :data:`RECORD_ERRORS` where it has none."""
    if type(record) is PairedRecord:
        return paired_label(record)
    if len(datum.data) and datum.float_data is not None:
        return datum.float_data
    if datum.label is None:
        raise _absent(record, str(record), "the field label (or float_data beside data)")
    return datum.label


def label_alone(record: Record) -> Any:
    """The label of a record whose image cannot be used. Raises one of :data:`RECORD_ERRORS` where it has none."""
    if type(record) is PairedRecord:
        return paired_label(record)
    return label_of(record, datums.parse(record.value, record))


def paired_label(record: PairedRecord) -> Any:
    """The label that lies in the second source: float32[K] where it has float_data, else its label."""
    where = f"the label of {record}, in {record.label_source},"
    datum = datums.parse(record.label_value, where)
    if datum.float_data is not None and not len(datum.data):
        return datum.float_data
    if datum.label is None:
        raise _absent(record, where, "float_data without data, or the field label")
    return datum.label


def check_label(label: Any, width: int, where: object) -> None:
    """Raise :class:`LabelError` unless the label is an int32 (width 0) or a vector of ``width`` numbers."""
    if isinstance(label, np.ndarray) and label.ndim == 1 and label.dtype == np.float32:
        found = len(label)
    elif isinstance(label, (int, np.integer)) and int(label) in _INT32:
        found = 0
    else:
        raise LabelError(
            f"the label of {where} cannot be used", expected="an int32, or a float32 vector", found=repr(label)[:80]
        )
    if found != width:
        names = ["one int32" if size == 0 else f"{size} float32" for size in (width, found)]
        raise LabelError(
            f"the label of {where} is of another kind than that of the first record", expected=names[0], found=names[1]
        )


def _resized(record: Record, image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if image.dtype != np.uint8:
        raise TransformError(
            f"{record} holds floats, which are not resized",
            expected="pixels of 8 bits",
            hint="leave transform.resize out",
        )
    return resize(image, *size)


def _not_finite(record: Record, image: np.ndarray) -> NotFiniteError:
    wrong = np.argwhere(~np.isfinite(image))
    channel, row, column = wrong[0].tolist()
    return NotFiniteError(
        f"{record} holds NaN or infinity",
        expected="finite numbers",
        found=f"{len(wrong):,} of {image.size:,} values, the first is {image[channel, row, column]} in channel "
        f"{channel}, row {row}, column {column}",
        hint="data.on_bad_record: skip or zero goes on without it; python -m datasets.inspect counts such records of "
        "databases, lists and HDF5 files",
    )


def _absent(record: Record, where: str, expected: str) -> LabelError:
    return LabelError(
        f"{where} has no label",
        expected=expected,
        found="neither; that is not the same as label 0",
        hint=f"record {record.index} was cut short or was written without a label: python -m datasets.verify",
    )
