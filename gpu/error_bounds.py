"""How far float32 rounding may take a layer's results from the exact ones, so that anything further is called a bug.

For a tensor y = f(x) of a layer whose longest sum has K terms::

    |error| <= C * sqrt(K) * (u * |y| + |f(x * (1 +- u)) - f(x)|)          in the L2 norm, u = 2^-24

The second part is measured in float64, with random signs: how much y moves when each input, weight and gradient is
moved by one rounding. It is what makes sums that cancel (a bias before a normalisation) come out right. sqrt(K) is the
growth of the rounding errors of a sum of K terms, each independent and of either sign (Higham, "Accuracy and Stability
of Numerical Algorithms", 2nd ed., section 2.8; the worst case would be K). C = 8 leaves room for functions that are
good to a few units in the last place (exp, log, powers).

Over several layers errors grow with the net's own sensitivity, which is measured too: two float64 passes, one of which
rounds to float32 what each layer hands to the next, differ by d. A float32 net may differ by::

    C * sqrt(largest K so far) * (d + u * |y|)

Where the largest of several values decides (maximum pooling, ReLU at 0) a rounding can change which one it is, and then
a net's result is further off. That is told, and is no bug: every layer is also held, inside the net, to what float64
makes of the arrays that the layers before it wrote there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpu.wiring import Node

UNIT = 2.0**-24
"""Largest relative error of rounding to float32."""
FACTOR = 8.0

_ONE_TERM = (
    *(
        "AbsVal",
        "BNLL",
        "BatchReindex",
        "Clip",
        "Concat",
        "Crop",
        "Dropout",
        "ELU",
        "Eltwise",
        "Exp",
        "Filter",
        "Flatten",
    ),
    *("Log", "Power", "ReLU", "Reshape", "Sigmoid", "Silence", "Slice", "Split", "Swish", "TanH", "Threshold"),
)
_PICKS_LARGEST = ("Accuracy", "ArgMax", "SPP")
"""Types whose results jump where two values tie, so moving their inputs tells nothing."""
_MAX, _ELTWISE_MAX = 0, 2
_TINY = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Lengths:
    """Terms of the longest sum behind one value of a top, of a bottom's gradient and of a parameter's gradient."""

    forward: int
    bottom: int
    param: int

    def of(self, name: str) -> int:
        """The one for a tensor of an :class:`gpu.isolated.Outcome`."""
        if name.startswith("bottom"):
            return self.bottom
        return self.param if name.startswith("parameter") else self.forward


def lengths(node: Node) -> Lengths:
    """Sum lengths of a layer by its type; for types not known here, all values of its largest bottom."""
    kind, spec = node.layer.type, node.layer.spec
    bottom = node.bottoms[0].shape if node.bottoms else ()
    top = node.tops[0].shape if node.tops else ()
    values = max((math.prod(b.shape) for b in node.bottoms), default=1)
    if kind in _ONE_TERM:
        return Lengths(1, max(1, len(node.tops)), values)
    if kind in ("Convolution", "Deconvolution"):
        weight = node.layer.param_shapes[0].shape
        window = math.prod(weight[2:])
        sums = weight[1] * window, max(1, weight[0] // spec.convolution_param.group) * window
        forward, back = sums if kind == "Convolution" else sums[::-1]
        positions = top if kind == "Convolution" else bottom
        return Lengths(forward, back, positions[0] * math.prod(positions[2:]) * max(1, len(node.bottoms)))
    if kind == "InnerProduct":
        outputs = spec.inner_product_param.num_output
        rows = math.prod(top) // outputs
        return Lengths(math.prod(bottom) // rows, outputs, rows)
    if kind == "Pooling":
        windows = math.prod(bottom[2:]) if spec.pooling_param.global_pooling else _window(spec.pooling_param)
        return Lengths(1 if spec.pooling_param.pool == _MAX else windows, windows, 1)
    if kind == "LRN":
        near = spec.lrn_param.local_size ** (2 if spec.lrn_param.norm_region else 1)
        return Lengths(near, near, 1)
    if kind in ("Scale", "Bias", "PReLU"):
        shapes = node.layer.param_shapes  # its blobs are filled in nets only
        learned = values // max(1, math.prod(shapes[0].shape)) if shapes else values
        return Lengths(1, values if len(node.bottoms) > 1 else 1, learned)
    if kind == "Softmax":
        return Lengths(bottom[spec.softmax_param.axis], bottom[spec.softmax_param.axis], 1)
    if kind in ("BatchNorm", "MVN"):
        across = values // bottom[1] if kind == "BatchNorm" and len(bottom) > 1 else values // bottom[0]
        return Lengths(across, across, 1)
    return Lengths(values, values, values)


def _window(param: object) -> int:
    height, width = getattr(param, "kernel_h", 0), getattr(param, "kernel_w", 0)
    return int(height * width or getattr(param, "kernel_size", 1) ** 2)


def smooth(node: Node) -> bool:
    """Whether moving the inputs a little moves the results a little."""
    spec = node.layer.spec
    if node.layer.type == "Pooling":
        return bool(spec.pooling_param.pool != _MAX)
    if node.layer.type == "Eltwise":
        return bool(spec.eltwise_param.operation != _ELTWISE_MAX)
    return node.layer.type not in _PICKS_LARGEST


def bound(wanted: np.ndarray, shift: float, terms: int) -> float:
    """Largest L2 distance from ``wanted`` that rounding explains.

    ``shift``: how far rounding the inputs takes this tensor, or, after several layers, rounding between layers.
    """
    return FACTOR * math.sqrt(max(1, terms)) * (UNIT * norm(wanted) + shift) + _TINY * math.sqrt(wanted.size)


def norm(values: np.ndarray) -> float:
    """L2 norm of all finite values."""
    flat = values.reshape(-1)
    return float(np.linalg.norm(np.where(np.isfinite(flat), flat, 0.0)))


def shift(moved: np.ndarray, still: np.ndarray) -> float:
    """L2 distance of two tensors of one shape: infinite where only one is finite, and 0 of what neither is."""
    finite = np.isfinite(moved), np.isfinite(still)
    return (
        math.inf
        if (finite[0] != finite[1]).any()
        else norm(np.where(finite[0], moved, 0.0) - np.where(finite[0], still, 0.0))
    )


def representable(wanted: np.ndarray, found: np.ndarray) -> np.ndarray:
    """``wanted`` with infinity where float32 has no number for it and ``found`` is that infinity, too."""
    if wanted.shape != found.shape:
        return wanted
    beyond = np.isinf(found) & (np.abs(wanted) >= _LARGEST * (1 - UNIT)) & (np.sign(wanted) == np.sign(found))
    return np.where(beyond, found, wanted)


@dataclass(frozen=True)
class Distance:
    """``absolute``: largest. ``relative``: L2 of the difference over L2 of the reference. ``ulp``: largest in units in
    the last place of float32, among values of at least 1/1024 of the largest. Infinite: only one side is finite."""

    absolute: float
    relative: float
    ulp: float
    l2: float


def distance(found: np.ndarray, wanted: np.ndarray) -> Distance:
    """How far ``found`` is from ``wanted``, both float64."""
    if found.shape != wanted.shape:
        return Distance(math.inf, math.inf, math.inf, math.inf)
    if wanted.size == 0:
        return Distance(0.0, 0.0, 0.0, 0.0)
    finite = np.isfinite(found) & np.isfinite(wanted)
    same = finite | (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    if not same.all():
        return Distance(math.inf, math.inf, math.inf, math.inf)
    gap = np.where(finite, np.abs(np.where(finite, found, 0) - np.where(finite, wanted, 0)), 0.0)
    size = np.where(finite, np.abs(wanted), 0.0)
    whole, apart = norm(size), norm(gap)
    large = size >= max(float(size.max()) / 1024, _TINY)
    # A value that float32 cannot hold has no unit in the last place there.
    units = np.spacing(np.minimum(size[large], _LARGEST).astype(np.float32)).astype(np.float64)
    ulp = float((gap[large] / units).max(initial=0.0))
    relative = apart / whole if whole else (0.0 if apart == 0 else math.inf)
    return Distance(float(gap.max()), relative, ulp, apart)


def largest(terms: Sequence[Lengths]) -> int:
    """The longest of several layers' sums, forward and backward."""
    return max((max(each.forward, each.bottom, each.param) for each in terms), default=1)
