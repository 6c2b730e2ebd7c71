"""Inspections of data sets (``python -m datasets.inspect --json``), and the data layers that they belong to."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.lint.view import Node, Value, View
from profiler.errors import UsageError

_CLASSIFIED = ("SoftmaxWithLoss", "Accuracy", "HingeLoss", "MultinomialLogisticLoss", "InfogainLoss")
SOURCES = {"Data": "data_param", "ImageData": "image_data_param", "HDF5Data": "hdf5_data_param"}
"""Layers that read a database, a list of images or HDF5 files, and the field that says which."""


@dataclass(frozen=True)
class DataView:
    """A data layer of one phase, and the database behind it."""

    view: View
    layer: Node
    document: dict[str, Any]
    folder: Path

    @property
    def param(self) -> Any:
        return getattr(self.layer.spec, SOURCES[self.layer.type])

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Of what is cropped: an ImageData layer may make all images one size before."""
        if self.layer.type == "ImageData" and self.param.new_height:
            channels = {int(text.split("x")[0]) for text in self.document["shapes"]}
            return [(count, self.param.new_height, self.param.new_width) for count in sorted(channels)]
        return [tuple(int(n) for n in text.split("x")) for text in self.document["shapes"]]  # type: ignore[misc]

    @property
    def labels(self) -> dict[str, Any]:
        labels: dict[str, Any] = self.document["labels"]
        return labels

    @property
    def channels(self) -> int | None:
        """Channels of the blob, where all records give the same."""
        transform = self.layer.spec.transform_param
        if self.layer.type == "ImageData":
            return 3 if self.param.is_color else 1
        if transform.force_color:
            return 3
        if transform.force_gray:
            return 1
        found = {shape[0] for shape in self.shapes}
        return found.pop() if len(found) == 1 else None

    def readers(self) -> Iterator[tuple[Node, Node, int]]:
        """Losses and metrics that compare scores with this layer's labels: they, the classifier, its outputs."""
        for node in self.view.of_type(*_CLASSIFIED):
            label = node.bottoms[1] if len(node.bottoms) > 1 else None
            if label is not None and label.producer is self.layer and self._is_label(label):
                classifier = self.view.classifier(node)
                if classifier is not None:
                    yield node, *classifier

    def _is_label(self, value: Value) -> bool:
        """An inspection of HDF5 files tells of the data set that is called so; other layers' second top it is."""
        return value.name == "label" if self.layer.type == "HDF5Data" else value.index == 1


def load(path: str) -> dict[str, Any]:
    """Read an inspection. Raises UsageError for anything else."""
    hint = "python -m datasets.inspect DB --json > F"
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON
        raise UsageError(f"{path} is no inspection of a data set: {error}", hint=hint) from error
    keys = ("schema", "path", "records", "shapes", "labels")
    missing = [key for key in keys if not isinstance(document, dict) or key not in document]
    wrong = [] if missing else [key for key, sound in _SOUND.items() if key in document and not sound(document[key])]
    if missing or wrong or document["schema"] != 1:
        found = f"no {', '.join(missing)}" if missing else f"schema {document['schema']}"
        raise UsageError(
            f"{path} is no inspection of a data set",
            expected="schema 1 of python -m datasets.inspect DB --json",
            found=f"damaged: {', '.join(wrong)}" if wrong else found,
            hint=hint,
        )
    result: dict[str, Any] = document
    return result


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_SOUND: dict[str, Callable[[Any], bool]] = {
    "path": lambda value: isinstance(value, str),
    "records": lambda value: isinstance(value, int),
    "shapes": lambda value: isinstance(value, dict) and all(re.fullmatch(r"\d+x\d+x\d+", text) for text in value),
    "encodings": lambda value: isinstance(value, dict),
    "labels": lambda value: (
        isinstance(value, dict)
        and all(value.get(key) is None or _number(value[key]) for key in ("min", "max", "absent", "vectors"))
    ),
    "channel_mean": lambda value: (
        value is None or (isinstance(value, list) and all(each is None or _number(each) for each in value))
    ),
    "bad_records": lambda value: isinstance(value, int),
    "warnings": lambda value: isinstance(value, list) and all(isinstance(text, str) for text in value),
}
"""What the rules ask of a document."""


def pair(views: dict[str, View], documents: list[dict[str, Any]], folder: Path) -> Iterator[DataView]:
    """Each data layer with the inspection of what it reads; with the only one there is, where no path fits."""
    layers = [(view, node, source_name(node)) for view in views.values() for node in view.of_type(*SOURCES)]
    named = {id(document): Path(document["path"]).name for document in documents}
    fitting = {source for _, _, source in layers} & set(named.values())
    for view, node, source in layers:
        for document in documents:
            if named[id(document)] == source or (len(documents) == 1 and not fitting):
                yield DataView(view, node, document, folder)


def source_name(node: Node) -> str:
    return Path(getattr(node.spec, SOURCES[node.type]).source).name
