"""A softmax loss that can get no larger: what a diverged training looks like, and what to look at."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gpu.net import Net

CEILING = -math.log(float(np.finfo(np.float32).tiny))
"""87.3365: the loss of a label whose probability counts as the smallest normal float32 (Caffe's FLT_MIN)."""
_NEAR = 0.85  # a tenth of the labels may be met by chance
_TYPE = "SoftmaxWithLoss"


def ceiling(net: Net) -> float | None:
    """The net's loss when no label has any probability left; None where losses of other types are added to it."""
    weight = 0.0
    for layer in net.layers:
        spec = layer.spec
        given = list(spec.loss_weight)
        if spec.type == _TYPE:
            weight += given[0] if given else 1.0
        elif any(given) or (type(layer).loss and not given):
            return None
    return weight * CEILING if weight > 0 else None


def hint(loss: float, most: float | None) -> str | None:
    """What to say of a step's loss that is near ``most``, the net's :func:`ceiling`; None where nothing is."""
    if most is None or not _NEAR * most <= loss <= 1.001 * most:
        return None
    return (
        f"the loss is {loss:.4f}, and {most:.4f} is the most that softmax makes of it (-ln of the smallest float32): "
        "nearly every label has probability 0, so the training has diverged or never began to learn; look at base_lr "
        "(smaller), at the scale of the inputs (scale: 0.00390625, a mean) and at the fillers"
    )
