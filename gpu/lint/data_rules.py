"""Rules about a net and the database it is fed from, as ``python -m datasets.inspect --json`` describes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import caffe_pb2
from gpu.lint.finding import Hit, Rule
from gpu.lint.inspected import SOURCES, DataView, source_name
from gpu.lint.view import View
from profiler.errors import StallscopeError

_FAR_MEAN = 25.0
"""Grey levels between mean_value and the mean of the records from which on the two do not belong together."""


def _unpaired(about: tuple[dict[str, View], list[dict[str, Any]], list[DataView]]) -> Iterator[Hit]:
    """Inspections that belong to no layer."""
    views, documents, datas = about
    read = sorted({source_name(node) for view in views.values() for node in view.of_type(*SOURCES)})
    for document in documents:
        if all(data.document is not document for data in datas):
            reads = f"data layers read {', '.join(read)}" if read else "there is no data layer"
            yield None, f"no data layer reads {document['path']}: {reads}"


def _range(data: DataView) -> Iterator[Hit]:
    low, high = data.labels.get("min"), data.labels.get("max")
    for node, classifier, outputs in data.readers():
        ignored = node.spec.loss_param.ignore_label if node.spec.loss_param.HasField("ignore_label") else None
        if node.type == "Accuracy" and node.spec.accuracy_param.HasField("ignore_label"):
            ignored = node.spec.accuracy_param.ignore_label
        wrong = [label for label in (low, high) if label is not None and not 0 <= label < outputs and label != ignored]
        if wrong:
            yield classifier.name, f"gives {outputs} scores to {node.name!r}, and labels go from {low} to {high}"


def _unused_classes(data: DataView) -> Iterator[Hit]:
    high = data.labels.get("max")
    for classifier, outputs in {(classifier, outputs) for _, classifier, outputs in data.readers()}:
        if high is not None and 0 <= high < outputs - 1:
            yield classifier.name, f"gives {outputs} scores, and the largest label is {high}"


def _absent(data: DataView) -> Iterator[Hit]:
    readers = [node.name for node, _, _ in data.readers()]
    if readers and data.labels.get("absent"):
        yield data.layer.name, f"{data.labels['absent']} records have no label, and {', '.join(readers)} read it"
    if readers and data.labels.get("vectors"):
        yield data.layer.name, f"{data.labels['vectors']} labels are vectors, and {', '.join(readers)} read one class"


def _crop(data: DataView) -> Iterator[Hit]:
    crop = data.layer.spec.transform_param.crop_size
    small = [shape for shape in data.shapes if min(shape[1:]) < crop]
    if crop and small:
        yield data.layer.name, f"crop_size {crop} is larger than records of {_text(small[0])}"


def _sizes(data: DataView) -> Iterator[Hit]:
    batch = data.param.batch_size
    sizes = {shape[1:] for shape in data.shapes}
    if len(sizes) > 1 and not data.layer.spec.transform_param.crop_size and batch != 1:
        yield data.layer.name, f"records have {len(sizes)} sizes, batch_size is {batch}, and nothing is cropped"


def _channels(data: DataView) -> Iterator[Hit]:
    found = {shape[0] for shape in data.shapes}
    if data.channels is None and len(found) > 1:
        yield data.layer.name, f"records have {' and '.join(map(str, sorted(found)))} channels"


def _mean_values(data: DataView) -> Iterator[Hit]:
    values = list(data.layer.spec.transform_param.mean_value)
    if data.channels is not None and len(values) not in (0, 1, data.channels):
        yield data.layer.name, f"mean_value is given {len(values)} times, for {data.channels} channels"


def _far_mean(data: DataView) -> Iterator[Hit]:
    values = list(data.layer.spec.transform_param.mean_value)
    means = data.document.get("channel_mean")
    if values and means and len(values) in (1, len(means)) and None not in means:
        values = values * len(means) if len(values) == 1 else values
        worst = max(abs(value - mean) for value, mean in zip(values, means, strict=True))
        if worst > _FAR_MEAN:
            shown = ", ".join(f"{mean:.1f}" for mean in means)
            yield data.layer.name, f"mean_value {', '.join(f'{v:g}' for v in values)}; the records' means are {shown}"


def _mean_file(data: DataView) -> Iterator[Hit]:
    transform = data.layer.spec.transform_param
    if not transform.mean_file:
        return
    if transform.mean_value:
        yield data.layer.name, "mean_file and mean_value exclude each other"
    path = next((p for p in (Path(transform.mean_file), data.folder / transform.mean_file) if p.is_file()), None)
    if path is None:
        yield data.layer.name, f"mean_file {transform.mean_file} does not exist"
        return
    try:
        shape = _mean_shape(path)
    except StallscopeError as error:
        yield data.layer.name, error.what
        return
    for other in data.shapes:
        wanted = (data.channels or other[0], *other[1:])
        if shape != wanted:
            yield data.layer.name, f"the mean image {path.name} is {_text(shape)}, records are {_text(wanted)}"
            return


def _mean_shape(path: Path) -> tuple[int, ...]:
    if path.suffix == ".npy":
        import numpy as np

        try:
            return tuple(np.load(path, mmap_mode="r", allow_pickle=False).shape)
        except (OSError, ValueError) as error:
            raise StallscopeError(f"mean_file {path} is no array: {error}") from error
    blob = caffe_pb2.BlobProto()
    try:
        blob.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError has no common base in its builds
        raise StallscopeError(f"mean_file {path} is no mean image") from error
    dims = tuple(blob.shape.dim) or (blob.num, blob.channels, blob.height, blob.width)
    return tuple(dims[-3:])


def _batch(data: DataView) -> Iterator[Hit]:
    batch, records = data.param.batch_size, data.document["records"]
    if batch > records:
        yield data.layer.name, f"batch_size {batch} is more than the {records} records"


def _bad(data: DataView) -> Iterator[Hit]:
    if data.document.get("bad_records"):
        yield data.layer.name, f"{data.document['bad_records']} records of {data.document['path']} cannot be understood"


def _unscaled(data: DataView) -> Iterator[Hit]:
    transform = data.layer.spec.transform_param
    bytes_only = set(data.document.get("encodings", {})) - {"float"}
    if bytes_only and not (transform.HasField("scale") or transform.mean_value or transform.mean_file):
        yield data.layer.name, "neither scale nor mean: the net gets values of 0 to 255"


def _warned(data: DataView) -> Iterator[Hit]:
    for text in data.document.get("warnings", []):
        yield data.layer.name, f"{Path(data.document['path']).name}: {text}"


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


RULES = (
    Rule(
        "label-range",
        "error",
        "Such labels name no score: the job stops there, and Caffe reads past the scores.",
        "num_output = largest label + 1.",
        _range,
    ),
    Rule(
        "unused-classes",
        "note",
        "These scores are trained towards 0 and never asked for.",
        "num_output = largest label + 1, if that is all.",
        _unused_classes,
    ),
    Rule(
        "label-kind",
        "error",
        "There is nothing to compare scores with.",
        "Convert with labels, or name a second source.",
        _absent,
    ),
    Rule(
        "crop-size", "error", "Nothing can be cut out of them.", "A smaller crop_size, or convert with --resize.", _crop
    ),
    Rule("sizes-differ", "error", "A batch has one size.", "Give crop_size, or convert with --resize.", _sizes),
    Rule(
        "channels-differ", "error", "A batch has one number of channels.", "Give force_color or force_gray.", _channels
    ),
    Rule("mean-values", "error", "It is given once, or once a channel.", "Count the channels again.", _mean_values),
    Rule(
        "far-mean",
        "warning",
        "Inputs are far from 0; perhaps the mean is another data set's, or its channels are R, G, B.",
        "python -m datasets.mean says what it is (B, G, R).",
        _far_mean,
    ),
    Rule(
        "mean-file",
        "error",
        "It is subtracted before cropping, pixel by pixel.",
        "python -m datasets.mean DB OUT makes one.",
        _mean_file,
    ),
    Rule("large-batch", "warning", "A batch then holds records twice.", "A smaller batch_size.", _batch),
    Rule(
        "bad-records",
        "warning",
        "A job stops at them unless told otherwise.",
        "python -m datasets.verify lists them; data.on_bad_record.",
        _bad,
    ),
    Rule(
        "unscaled",
        "note",
        "Learning rates for values around 1 are then far too large.",
        "scale: 0.00390625, or a mean.",
        _unscaled,
    ),
    Rule("data-warning", "note", "python -m datasets.inspect says so.", "See there.", _warned),
)


UNPAIRED = (
    Rule(
        "data-unused",
        "warning",
        "Nothing of it was compared with the net.",
        "Inspect what the layer names; one inspection alone belongs to every data layer.",
        _unpaired,
    ),
)


def coverage(param: Any, datas: list[DataView]) -> Iterator[Hit]:
    """How much of the test set a test reads."""
    for data in datas:
        if data.view.phase == "TEST" and param.test_iter:
            read = param.test_iter[0] * data.param.batch_size
            records = data.document["records"]
            if read != records:
                verb = "leaves out" if read < records else "reads twice"
                yield (
                    data.layer.name,
                    f"test_iter {param.test_iter[0]} {verb} {abs(records - read)} of {records} records",
                )
