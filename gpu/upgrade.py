"""Older net formats brought to the current one: the one way in for prototxts and for weights files.

V0 (:mod:`gpu.upgrade_v0`) becomes V1, V1 (``layers`` with enum types) becomes ``layer`` with type names.

Facts about the V1 format follow BVLC Caffe 1.0's message definitions and what its upgrade tool makes of them.
"""

from __future__ import annotations

from typing import Any

from gpu.upgrade_v0 import is_v0, upgrade_v0

# Enum names that are not the type name in capitals with underscores.
_IRREGULAR = {
    "ABSVAL": "AbsVal",
    "ARGMAX": "ArgMax",
    "BNLL": "BNLL",
    "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output",
    "IM2COL": "Im2col",
    "LRN": "LRN",
    "MVN": "MVN",
    "RELU": "ReLU",
    "SOFTMAX_LOSS": "SoftmaxWithLoss",
    "TANH": "TanH",
}
# Settings of the transformation that data layers used to carry themselves.
_MOVED = ("scale", "mean_file", "crop_size", "mirror")
_DATA_PARAMS = ("data_param", "image_data_param", "window_data_param")
_BATCH_NORM_BLOBS = 3


def upgrade(net: Any, *, weights: bool = False) -> None:
    """Bring a ``NetParameter`` to the current format, in place.

    ``weights``: the net comes from a weights file and only names and blobs count, so a type that is not known here
    does not matter. Raises ValueError, with a readable message, for nets that mix old and new layers, and for an old
    layer without a type.
    """
    if net.layers:
        if net.layer:
            raise ValueError(
                "holds both 'layers' (V0, V1) and 'layer' (current format); a net must keep to one of them"
            )
        if is_v0(net):
            upgrade_v0(net, weights=weights)
        for old in net.layers:
            _upgrade_layer(old, net.layer.add(), weights)
        del net.layers[:]
    for layer in net.layer:
        _move_transform(layer)
        if layer.type == "BatchNorm" and len(layer.param) == _BATCH_NORM_BLOBS:
            # Old texts name the three statistics as parameters; they are never learned.
            for spec in layer.param:
                spec.lr_mult = spec.decay_mult = 0
    if not weights:
        _upgrade_inputs(net)


def _type_name(old: Any) -> str:
    enum = type(old).DESCRIPTOR.fields_by_name["type"].enum_type
    name = enum.values_by_number[old.type].name
    if name == "NONE":
        raise ValueError(f"layer {old.name!r} (V1 format) has no type")
    return _IRREGULAR.get(name) or "".join(word.capitalize() for word in name.split("_"))


def _upgrade_layer(old: Any, new: Any, weights: bool) -> None:
    if old.type or not weights:
        new.type = _type_name(old)
    done = {"type", "param", "blob_share_mode", "blobs_lr", "weight_decay", "layer"}
    for field, value in old.ListFields():
        if field.name in done:
            continue
        if field.name not in new.DESCRIPTOR.fields_by_name:
            raise ValueError(f"layer {old.name!r} (V1 format) has the field {field.name!r}, which has no successor")
        if field.is_repeated:
            getattr(new, field.name).MergeFrom(value)
        elif field.message_type is not None:
            getattr(new, field.name).CopyFrom(value)
        else:
            setattr(new, field.name, value)
    for i in range(max(len(old.param), len(old.blob_share_mode), len(old.blobs_lr), len(old.weight_decay))):
        spec = new.param.add()
        if i < len(old.param) and old.param[i]:
            spec.name = old.param[i]
        if i < len(old.blob_share_mode):
            spec.share_mode = old.blob_share_mode[i]
        if i < len(old.blobs_lr):
            spec.lr_mult = old.blobs_lr[i]
        if i < len(old.weight_decay):
            spec.decay_mult = old.weight_decay[i]


def _move_transform(layer: Any) -> None:
    for name in _DATA_PARAMS:
        if not layer.HasField(name):
            continue
        data = getattr(layer, name)
        for field in _MOVED:
            if field in data.DESCRIPTOR.fields_by_name and data.HasField(field):
                setattr(layer.transform_param, field, getattr(data, field))
                data.ClearField(field)


def _upgrade_inputs(net: Any) -> None:
    """``input: "data" input_dim: ...`` at the top of the net becomes an Input layer at its beginning."""
    if not net.input:
        return
    if net.input_dim and net.input_shape:
        raise ValueError("gives both input_dim and input_shape; a net must keep to one of them")
    if len(net.input_dim) not in (0, 4 * len(net.input)):
        raise ValueError(f"gives {len(net.input_dim)} input_dim values for {len(net.input)} inputs; 4 each are needed")
    if net.input_shape and len(net.input_shape) != len(net.input):
        raise ValueError(f"gives {len(net.input_shape)} input_shape entries for {len(net.input)} inputs")
    layer = type(net).DESCRIPTOR.fields_by_name["layer"].message_type._concrete_class()
    layer.name = "input"
    layer.type = "Input"
    layer.top.extend(net.input)
    for shape in net.input_shape:
        layer.input_param.shape.add().CopyFrom(shape)
    for start in range(0, len(net.input_dim), 4):
        layer.input_param.shape.add().dim.extend(net.input_dim[start : start + 4])
    rest = [layer, *net.layer]
    copies = [type(item).FromString(item.SerializeToString()) for item in rest]
    del net.layer[:]
    net.layer.extend(copies)
    for field in ("input", "input_dim", "input_shape"):
        net.ClearField(field)
