"""The layers, found by Caffe's type names."""

from __future__ import annotations

import importlib

from gpu.layers.base import REGISTRY, Layer

_MODULES = (
    "activation",
    "affine",
    "arrange",
    "convolution",
    "data",
    "dense",
    "functions",
    "log_loss",
    "loss",
    "lstm",
    "margin_loss",
    "normalisation",
    "pointwise",
    "pooling",
    "python",
    "recurrent",
    "reduction",
    "rows",
    "shape",
    "source",
    "windows",
)


def registry() -> dict[str, type[Layer]]:
    """Every layer class by its type name."""
    for module in _MODULES:
        importlib.import_module(f"gpu.layers.{module}")
    return REGISTRY
