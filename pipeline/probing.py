"""A look at the first record, which settles the shapes of all batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import bad_records, sizes
from pipeline.layout import Layout, Probe
from pipeline.resized_crop import ResizedCrop
from pipeline.samples import RECORD_ERRORS, check_label, decoded, holds_jpeg
from pipeline.spec import FeedSpec
from pipeline.transforms import Transform, TransformError
from profiler.errors import StallscopeError

if TYPE_CHECKING:
    from datasets.source import Record, Source

_PROBED = 64  # records that are looked at for one that can be used
TRY = "data.on_bad_record: skip or zero goes on without it; python -m datasets.verify lists all such records"


def probe(spec: FeedSpec, source: Source) -> Probe:
    """Look at record 0 and settle the shapes of every batch.

    Raises what reading, decoding and the transform raise for it; :class:`TransformError` for an empty data set.
    """
    if not len(source):
        raise TransformError(f"{source.name} holds no records", expected="at least one")
    transform = Transform(spec.transform, spec.seed, spec.phase_number)
    record, image, label = _first_usable(spec, source)
    if transform.function is not None:
        image, label = transform.function.on_image(image, label, 0, record.index, record)
    shape = (int(image.shape[0]), int(image.shape[1]), int(image.shape[2]))
    sample_shape = transform.fit(shape, record)
    width = len(label) if isinstance(label, np.ndarray) else 0
    check_label(label, width, record)
    rows = bad_records.capacity(spec.on_bad_record, spec.batch)
    given = None
    if transform.batch_function is not None:
        given = Layout(spec.batch, sample_shape, width, pixels="uint8" if image.dtype == np.uint8 else "float32")
        width = _width_given_back(spec, transform, given, record, image, label)
    layout = Layout(spec.batch, sample_shape, width, rows, sizes.room(spec, source, shape), spec.pixels)
    if spec.pixels == "uint8":
        transform.check_pixels(image, record)
    return Probe(
        len(source), source.backend, str(record), shape, sample_shape, layout, source.blobs, given, holds_jpeg(record)
    )


def _width_given_back(
    spec: FeedSpec, transform: Transform, given: Layout, record: Record, image: np.ndarray, label: Any
) -> int:
    """Width of the labels that a function per batch gives back, told by a batch of the first record alone."""
    assert transform.batch_function is not None
    one = np.zeros((1, *given.sample_shape), given.pixels)
    resized = ResizedCrop.of(spec, transform)
    if resized is not None:
        resized.put(image, record, 0, one[0])
    else:
        transform.fill([image], transform.draws([image], np.zeros(1, np.int64), np.array([record.index])), one)
    changed, labels = transform.batch_function.on_batch(
        one, np.array([label], np.float32 if given.label_width else np.int32), 0, 0,
        lambda: f"{record} alone, a batch that is made to see what comes back", np.array([record.index]),
    )  # fmt: skip
    if spec.pixels == "uint8":
        transform.check_pixels(changed, f"what {transform.batch_function.name} returned")
    return labels.shape[1] if labels.ndim == 2 else 0


def _first_usable(spec: FeedSpec, source: Source) -> tuple[Record, np.ndarray, Any]:
    """The first record with its image and label; bad ones before it are passed over where the job says so."""
    tried = 1 if spec.on_bad_record == "stop" else _PROBED
    first: StallscopeError | None = None
    for index in range(min(len(source), tried)):
        try:
            record = source.read(index)
            return record, *decoded(record, spec.transform.color, spec.max_pixels, spec.transform.resize)
        except RECORD_ERRORS as error:
            first = first or error
    assert first is not None
    first.hint = first.hint or TRY
    raise first
