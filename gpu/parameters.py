"""The learnable arrays of a net: made, filled, and one where layers share them by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpu.blob import Blob
from gpu.fillers import fill
from gpu.layers.base import Layer, LayerError, Shape


class ParamShapesError(LayerError):
    """A layer has parameters of other shapes in two nets that are to share them: their inputs differ."""


@dataclass(frozen=True)
class Param:
    """One learnable array, once even where layers share it. ``name``: its owner, as ``layer.index``."""

    blob: Blob
    lr_mult: float
    decay_mult: float
    name: str


def make_params(layers: Sequence[Layer], xp: Any, seed: int) -> list[Param]:
    """Give every layer its parameters, shared ones by name; returns each once."""
    owners: dict[str, int] = {}
    made: list[list[Any]] = []  # blob, lr_mult or None, decay_mult or None, name
    for layer in layers:
        specs = layer.spec.param
        for i, wanted in enumerate(layer.param_shapes):
            spec = specs[i] if i < len(specs) else None
            lr = spec.lr_mult if spec is not None and spec.HasField("lr_mult") else None
            decay = spec.decay_mult if spec is not None and spec.HasField("decay_mult") else None
            if not layer.learned:
                lr = decay = 0.0
            if spec is not None and spec.name in owners:
                row = made[owners[spec.name]]
                layer.blobs.append(_shared(layer, i, spec, wanted.shape, row[0], row[3]))
                for column, value, field in ((1, lr, "lr_mult"), (2, decay, "decay_mult")):
                    if value is not None and row[column] not in (None, value):
                        raise layer.error(
                            f"shared parameter {spec.name!r} has two values of {field}",
                            expected=f"{row[column]}, as in {row[3]}",
                            found=value,
                        )
                    row[column] = value if row[column] is None else row[column]
                continue
            blob = Blob(wanted.shape, xp)
            blob.data = fill(wanted.filler, wanted.shape, seed, f"{layer.name}/{i}")
            layer.blobs.append(blob)
            if spec is not None and spec.name:
                owners[spec.name] = len(made)
            made.append([blob, lr, decay, f"{layer.name}.{i}"])
    return [
        Param(blob, 1.0 if lr is None else lr, 1.0 if decay is None else decay, name) for blob, lr, decay, name in made
    ]


def _shared(layer: Layer, index: int, spec: Any, shape: Shape, blob: Blob, owner: str) -> Blob:
    """The blob of a shared parameter as its second layer sees it."""
    if blob.shape == shape:
        return blob
    permissive = spec.share_mode == 1
    if not permissive or blob.count != int(np.prod(shape)):
        raise layer.error(
            f"shared parameter {spec.name!r} (index {index}) does not have the shape of its owner",
            expected=f"{blob.shape}, as in {owner}" + (" (or as many values)" if permissive else ""),
            found=shape,
        )
    blob.lazy = False
    return Blob(shape, blob.xp, blob.device_data.reshape(shape), blob.device_diff.reshape(shape))


def share(net: Any, other: Any, learnable: Sequence[Param]) -> list[Param]:
    """Put the blobs of ``other``'s layers into those of the same names in ``net``; returns ``learnable`` with them.

    Layers that ``other`` lacks keep theirs. Raises ParamShapesError where the shapes of two layers differ.
    """
    replaced: dict[int, Blob] = {}
    for layer in net.layers:
        theirs = other.params.get(layer.name, [])
        own, given = [blob.shape for blob in layer.blobs], [blob.shape for blob in theirs]
        if not theirs or not own:
            continue
        if own != given:
            raise ParamShapesError(
                f"layer {layer.name!r} ({layer.type}): cannot share parameters of other shapes in "
                f"{net.phase} and {other.phase}",
                expected=f"{own}, as in {net.phase}",
                found=f"{given} in {other.phase}",
            )
        replaced.update({id(mine): blob for mine, blob in zip(layer.blobs, theirs, strict=True)})
    for layer in net.layers:
        layer.blobs[:] = [replaced.get(id(blob), blob) for blob in layer.blobs]
    return [replace(param, blob=replaced.get(id(param.blob), param.blob)) for param in learnable]
