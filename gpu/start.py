"""What a net's first training step starts from, where Caffe says nothing: weights of 0, mixed channels, a wide draw."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np

from datasets import caffe_pb2
from gpu.fields import FieldWarning
from gpu.fillers import fill
from gpu.lint import weight_rules
from gpu.lint.finding import apply
from gpu.lint.view import view
from gpu.prototxt import FilteredNet

if TYPE_CHECKING:
    from gpu.net import Net

_RULES = ("implicit-filler", "zero-weights", "gaussian-std", "bilinear-group")


def warn_of_start(net: Net) -> None:
    """Warn (FieldWarning) of weights that start badly, by the rules of ``gpu.lint``.

    Only of layers that hold what their filler gives: weights that were loaded or set by hand are somebody's choice,
    unless they are trained and all 0.
    """
    layers = {layer.name: layer for layer in net.layers}
    message = caffe_pb2.NetParameter(layer=[layer.spec for layer in net.layers])
    seen = view(FilteredNet(message, net.phase, ()))
    for finding in apply([rule for rule in weight_rules.RULES if rule.id in _RULES], seen):
        layer = layers[finding.layer or ""]
        values = layer.blobs[0].data
        drawn = fill(layer.param_shapes[0].filler, layer.param_shapes[0].shape, net._seed, f"{layer.name}/0")
        if np.array_equal(values, drawn):
            text = f"layer {layer.name!r} ({layer.type}): {finding.what}. {finding.why} {finding.do}"
            warnings.warn(text, FieldWarning, stacklevel=4)
