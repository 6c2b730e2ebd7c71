"""What the data layers of a net ask of the feed: where records lie, how many make a batch, what happens to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu.prototxt import FilteredNet, PrototxtError, filter_net, load_net

UNREAD = ("WindowData",)
"""Types of Caffe's data layers that nothing here reads."""
PYTHON = "python:"
"""Begins the ``source`` of a Python data layer: ``python:module:Class``."""


@dataclass(frozen=True)
class Transform:
    """``transform_param`` of a data layer; None stands for a field that the text does not mention.

    ``resize``: height and width that image files are brought to first, (``new_height``, ``new_width``) of ImageData.
    """

    scale: float | None = None
    mirror: bool | None = None
    crop: int | None = None
    mean_file: str | None = None
    mean_value: tuple[float, ...] | None = None
    force_color: bool | None = None
    force_gray: bool | None = None
    resize: tuple[int, int] | None = None


@dataclass(frozen=True)
class DataLayer:
    """What a data layer asks of the feed; None stands for a field that the text does not mention.

    ``backend``: LMDB or LEVELDB, LIST (ImageData), HDF5 or PYTHON; None where the text is silent: then the folder
    decides, not Caffe's default. ``root``: where paths of a list begin. ``shuffle``: of types that have it. ``param``:
    the ``param_str`` of a Python layer.
    ``unused``: fields given in the text that have no effect here (``rand_skip``, ``prefetch`` ...), to be warned about.
    """

    name: str
    phase: str
    tops: tuple[str, ...]
    source: str | None
    batch: int | None
    backend: str | None
    transform: Transform
    unused: tuple[str, ...] = ()
    root: str | None = None
    shuffle: bool | None = None
    param: str | None = None


def data_layers(
    source: str | Path, phase: str = "TRAIN", stages: tuple[str, ...] = (), level: int = 0
) -> list[DataLayer]:
    """The data layers of a net in one phase, without building the net. Raises PrototxtError, LayerError."""
    return data_layers_of(filter_net(load_net(source), phase, stages, level))


def data_layers_of(filtered: FilteredNet) -> list[DataLayer]:
    """The data layers of one phase. Raises PrototxtError, LayerError."""
    found = (data_layer(layer, filtered.phase) for layer in filtered.net.layer)
    return [layer for layer in found if layer is not None]


def data_layer(layer: Any, phase: str) -> DataLayer | None:
    """What one layer message asks of the feed, None for a layer that asks nothing. Raises PrototxtError, LayerError."""
    read = _READ.get(layer.type, _python)
    return read(layer, phase) if not layer.bottom else None


def _data(layer: Any, phase: str) -> DataLayer:
    data = layer.data_param
    enum = type(data).DESCRIPTOR.fields_by_name["backend"].enum_type
    return DataLayer(
        name=layer.name,
        phase=phase,
        tops=tuple(layer.top),
        source=_given(data, "source"),
        batch=_given(data, "batch_size"),
        backend=enum.values_by_number[data.backend].name if data.HasField("backend") else None,
        transform=_transform(layer),
        unused=_unused("data_param", data, "source", "batch_size", "backend"),
    )


def _image_data(layer: Any, phase: str) -> DataLayer:
    data, where = layer.image_data_param, f"layer {layer.name!r} ({layer.type})"
    if not data.source:
        raise PrototxtError(f"{where} has no source", expected="image_data_param { source: LIST }")
    size = (data.new_height, data.new_width)
    if (size[0] > 0) != (size[1] > 0):
        raise PrototxtError(
            f"{where}: new_height and new_width go together",
            expected="both, or neither",
            found=f"{size[0]} x {size[1]}",
        )
    own = _transform(layer)
    unused = _unused(
        "image_data_param", data,
        "source", "batch_size", "shuffle", "new_height", "new_width", "is_color", "root_folder",
    )  # fmt: skip
    for name in ("force_color", "force_gray"):  # Caffe's layer does not look at them either
        if getattr(own, name) is not None:
            unused += (f"transform_param.{name}",)
    return DataLayer(
        name=layer.name,
        phase=phase,
        tops=tuple(layer.top),
        source=data.source,
        batch=int(data.batch_size),
        backend="LIST",
        transform=replace(
            own,
            force_color=True if data.is_color else None,
            force_gray=None if data.is_color else True,
            resize=size if size[0] else None,
        ),
        unused=unused,
        root=data.root_folder or ".",
        shuffle=_given(data, "shuffle"),
    )


def _hdf5_data(layer: Any, phase: str) -> DataLayer:
    data, where = layer.hdf5_data_param, f"layer {layer.name!r} ({layer.type})"
    if layer.HasField("transform_param"):
        raise PrototxtError(
            f"{where} has a transform_param, and rows of HDF5 files are not transformed",
            expected="none: the values go into the net as they are",
            found=" ".join(str(layer.transform_param).split()) or "an empty one",
            hint="store them as they shall be, or scale them with a Power or Scale layer",
        )
    if not data.source:
        raise PrototxtError(f"{where} has no source", expected="hdf5_data_param { source: LIST }")
    return DataLayer(
        name=layer.name,
        phase=phase,
        tops=tuple(layer.top),
        source=data.source,
        batch=_given(data, "batch_size"),
        backend="HDF5",
        transform=Transform(),
        unused=_unused("hdf5_data_param", data, "source", "batch_size", "shuffle"),
        shuffle=_given(data, "shuffle"),
    )


def _unread(layer: Any, phase: str) -> DataLayer:
    raise PrototxtError(
        f"layer {layer.name!r} has the type {layer.type}, which is not supported",
        expected="Data, ImageData, HDF5Data, or a Python data layer",
        found=layer.type,
        hint="give the records another way: data.<phase>.source, or a Python data layer (docs/custom_layers.md)",
    )


def _python(layer: Any, phase: str) -> DataLayer | None:
    """A Python data layer, or None for any other layer."""
    if layer.type != "Python" and not layer.python_param.module:
        return None
    from gpu.python_class import find_data_class

    cls = find_data_class(layer)
    if cls is None:
        return None
    return DataLayer(
        name=layer.name,
        phase=phase,
        tops=tuple(layer.top),
        source=f"{PYTHON}{cls.__module__}:{cls.__qualname__}",
        batch=None,
        backend="PYTHON",
        transform=_transform(layer),
        param=layer.python_param.param_str,
    )


_READ: dict[str, Callable[[Any, str], DataLayer | None]] = {
    "Data": _data, "ImageData": _image_data, "HDF5Data": _hdf5_data, **dict.fromkeys(UNREAD, _unread),
}  # fmt: skip


def _transform(layer: Any) -> Transform:
    transform = layer.transform_param
    return Transform(
        scale=_given(transform, "scale"),
        mirror=_given(transform, "mirror"),
        crop=_given(transform, "crop_size"),
        mean_file=_given(transform, "mean_file"),
        mean_value=tuple(transform.mean_value) or None,
        force_color=_given(transform, "force_color"),
        force_gray=_given(transform, "force_gray"),
    )


def _given(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _unused(name: str, message: Any, *known: str) -> tuple[str, ...]:
    return tuple(f"{name}.{field.name}" for field, _ in message.ListFields() if field.name not in known)
