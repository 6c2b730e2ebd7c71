"""A layer with the arrays that it works on, in each of the two passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu.blob import Blob
from gpu.layers.base import Array

Pass = tuple[Any, list[Array], list[Array]]
"""What to call for a layer's forward pass (the layer, or what stands where it does), its bottoms and its tops."""


@dataclass
class Step:
    """A layer with the arrays it works on in backward, and when it does."""

    time: int
    layer: Any
    bottoms: list[Array]
    tops: list[Array]
    top_diffs: list[Array]
    bottom_diffs: list[Array | None]
    sums: list[tuple[Array, Array]]
    param_diffs: list[Array | None]
    params: list[tuple[int, Blob, Array]]
