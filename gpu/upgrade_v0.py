"""The oldest net format (a ``layer`` with a type in words inside each ``layers``) brought to V1.

Facts about the V0 format follow BVLC Caffe 1.0's message definitions and what its upgrade tool makes of them: padding
layers become the padding of the layers that read them, flat settings move to the parameters of their type, and those
of the transformation to ``transform_param``.
"""

from __future__ import annotations

import warnings
from typing import Any

_TYPES = {
    "accuracy": "ACCURACY",
    "bnll": "BNLL",
    "concat": "CONCAT",
    "conv": "CONVOLUTION",
    "data": "DATA",
    "dropout": "DROPOUT",
    "euclidean_loss": "EUCLIDEAN_LOSS",
    "flatten": "FLATTEN",
    "hdf5_data": "HDF5_DATA",
    "hdf5_output": "HDF5_OUTPUT",
    "im2col": "IM2COL",
    "images": "IMAGE_DATA",
    "infogain_loss": "INFOGAIN_LOSS",
    "innerproduct": "INNER_PRODUCT",
    "lrn": "LRN",
    "multinomial_logistic_loss": "MULTINOMIAL_LOGISTIC_LOSS",
    "pool": "POOLING",
    "relu": "RELU",
    "sigmoid": "SIGMOID",
    "softmax": "SOFTMAX",
    "softmax_loss": "SOFTMAX_LOSS",
    "split": "SPLIT",
    "tanh": "TANH",
    "window_data": "WINDOW_DATA",
}
_PADDING = "padding"
_PADDED = ("conv", "pool")
_KEPT = ("name", "blobs", "blobs_lr", "weight_decay")
_SOURCES = {
    "data": "data_param",
    "hdf5_data": "hdf5_data_param",
    "images": "image_data_param",
    "window_data": "window_data_param",
}
_LEARNED = {"conv": "convolution_param", "innerproduct": "inner_product_param"}
_WINDOWS = {"conv": "convolution_param", "pool": "pooling_param"}


def _same(field: str, **owners: str) -> dict[str | None, tuple[str, str]]:
    return {kind: (param, field) for kind, param in owners.items()}


# Old field: {old type: (message of V1, its field)}; None stands for every type.
_MOVES: dict[str, dict[str | None, tuple[str, str]]] = {
    "num_output": _same("num_output", **_LEARNED),
    "biasterm": _same("bias_term", **_LEARNED),
    "weight_filler": _same("weight_filler", **_LEARNED),
    "bias_filler": _same("bias_filler", **_LEARNED),
    "pad": _same("pad", **_WINDOWS),
    "kernelsize": _same("kernel_size", **_WINDOWS),
    "stride": _same("stride", **_WINDOWS),
    "group": _same("group", conv="convolution_param"),
    "pool": _same("pool", pool="pooling_param"),
    "dropout_ratio": _same("dropout_ratio", dropout="dropout_param"),
    "local_size": _same("local_size", lrn="lrn_param"),
    "alpha": _same("alpha", lrn="lrn_param"),
    "beta": _same("beta", lrn="lrn_param"),
    "k": _same("k", lrn="lrn_param"),
    "source": _same("source", **_SOURCES, infogain_loss="infogain_loss_param"),
    "batchsize": _same("batch_size", **_SOURCES),
    "rand_skip": _same("rand_skip", data="data_param", images="image_data_param"),
    "shuffle_images": _same("shuffle", images="image_data_param"),
    "new_height": _same("new_height", images="image_data_param"),
    "new_width": _same("new_width", images="image_data_param"),
    "concat_dim": _same("concat_dim", concat="concat_param"),
    "det_fg_threshold": _same("fg_threshold", window_data="window_data_param"),
    "det_bg_threshold": _same("bg_threshold", window_data="window_data_param"),
    "det_fg_fraction": _same("fg_fraction", window_data="window_data_param"),
    "det_context_pad": _same("context_pad", window_data="window_data_param"),
    "det_crop_mode": _same("crop_mode", window_data="window_data_param"),
    "scale": {None: ("transform_param", "scale")},
    "meanfile": {None: ("transform_param", "mean_file")},
    "cropsize": {None: ("transform_param", "crop_size")},
    "mirror": {None: ("transform_param", "mirror")},
}


def is_v0(net: Any) -> bool:
    """Whether any of a net's ``layers`` holds a layer of its own."""
    return any(old.HasField("layer") for old in net.layers)


def upgrade_v0(net: Any, *, weights: bool) -> None:
    """Bring a V0 ``NetParameter`` to V1, in place.

    A setting that means nothing to its layer's type is left out with a warning, as in Caffe. ``weights``: the net is
    only looked at for its blobs, so its wiring, types and settings do not matter. Raises ValueError, with a readable
    message, for what cannot be followed.
    """
    for old in net.layers:
        if not old.HasField("layer"):
            raise ValueError(f"holds both V0 and V1 entries in 'layers' ({old.name!r} is V1); a net must keep to one")
    upgraded = type(net)()
    if not weights:
        _fold_padding(net)
    for old in net.layers:
        _upgrade_layer(old, upgraded.layers.add(), weights)
    del net.layers[:]
    net.layers.extend(upgraded.layers)


def _fold_padding(net: Any) -> None:
    """Drop padding layers; the convolution or pooling that reads one reads its bottom, with that padding."""
    makers: dict[str, Any] = dict.fromkeys(net.input)
    kept = []
    for old in net.layers:
        kind = old.layer.type
        for index, bottom in enumerate(old.bottom):
            if bottom not in makers:
                raise ValueError(f"layer {old.layer.name!r} (V0 format) reads {bottom!r}, which no layer produces")
            maker = makers[bottom]
            if maker is None or maker.layer.type != _PADDING:
                continue
            if kind not in _PADDED or len(old.bottom) != 1:
                raise ValueError(
                    f"layer {old.layer.name!r} (V0 format, type {kind!r}) reads padding layer {maker.layer.name!r}; "
                    "only conv and pool layers with one bottom can"
                )
            if len(maker.bottom) != 1 or len(maker.top) != 1:
                raise ValueError(f"padding layer {maker.layer.name!r} (V0 format) needs one bottom and one top")
            old.layer.pad = maker.layer.pad
            old.bottom[index] = maker.bottom[0]
        makers.update(dict.fromkeys(old.top, old))
        if kind != _PADDING:
            kept.append(type(old).FromString(old.SerializeToString()))
    del net.layers[:]
    net.layers.extend(kept)


def _upgrade_layer(old: Any, new: Any, weights: bool) -> None:
    v0 = old.layer
    new.bottom.extend(old.bottom)
    new.top.extend(old.top)
    if v0.type in _TYPES:
        new.type = type(new).DESCRIPTOR.fields_by_name["type"].enum_type.values_by_name[_TYPES[v0.type]].number
    elif not weights:
        raise ValueError(
            f"layer {v0.name!r} (V0 format) has "
            + (f"the unknown type {v0.type!r}; known are {', '.join(_TYPES)}" if v0.type else "no type")
        )
    for field, value in v0.ListFields():
        if field.name in _KEPT:
            _put(new, field.name, value)
        elif field.name == "hdf5_output_param" and v0.type == "hdf5_output":
            new.hdf5_output_param.CopyFrom(value)
        elif field.name != "type" and not weights:
            by_type = _MOVES.get(field.name, {})
            move = by_type.get(v0.type) or by_type.get(None)
            if move is None:
                warnings.warn(
                    f"layer {v0.name!r} (V0 format): {field.name!r} means nothing to type {v0.type!r} and is left out",
                    RuntimeWarning,
                    stacklevel=2,
                )
            else:
                _put(getattr(new, move[0]), move[1], value)


def _put(message: Any, name: str, value: Any) -> None:
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.is_repeated:
        getattr(message, name).extend(value if hasattr(value, "__len__") else [value])
    elif field.message_type is not None:
        getattr(message, name).CopyFrom(value)
    else:
        setattr(message, name, value)
