"""The layers, found by Caffe's type names."""

from __future__ import annotations

import importlib

from gpu.layers.base import REGISTRY, Layer

_MODULES = ("convolution", "dense", "loss", "normalisation", "pointwise", "pooling", "shape")


def registry() -> dict[str, type[Layer]]:
    """Every layer class by its type name."""
    for module in _MODULES:
        importlib.import_module(f"gpu.layers.{module}")
    return REGISTRY
