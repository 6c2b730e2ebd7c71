"""Small nets of every kind for tests of memory, and random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

DATA = Path(__file__).parents[1] / "data"


def inputs(**shapes: tuple[int, ...]) -> str:
    """Input layers."""
    return "\n".join(
        f'layer {{ name: "{name}" type: "Input" top: "{name}" '
        f"input_param {{ shape {{ {' '.join(f'dim: {size}' for size in shape)} }} }} }}"
        for name, shape in shapes.items()
    )


def layer(kind: str, name: str, bottoms: list[str], tops: list[str], extra: str = "") -> str:
    """One layer."""
    ends = "".join(f' bottom: "{b}"' for b in bottoms) + "".join(f' top: "{t}"' for t in tops)
    return f'layer {{ name: "{name}" type: "{kind}"{ends} {extra} }}\n'


def dense(name: str, bottom: str, top: str, outputs: int, extra: str = "") -> str:
    """An InnerProduct with a bias of 0.1."""
    return (
        f'layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{top}" {extra} inner_product_param '
        f'{{ num_output: {outputs} weight_filler {{ type: "xavier" }} bias_filler {{ value: 0.1 }} }} }}\n'
    )


FILL = 'weight_filler { type: "xavier" } bias_filler { value: 0.1 }'
CONV = f"convolution_param {{ num_output: 4 kernel_size: 3 pad: 1 {FILL} }}"
DECONV = f"convolution_param {{ num_output: 4 kernel_size: 3 pad: 1 {FILL} }}"
SAME_SHAPE = {
    "relu": ("ReLU", ""),
    "leaky": ("ReLU", "relu_param { negative_slope: 0.1 }"),
    "relu_down": ("ReLU", "relu_param { negative_slope: -0.5 }"),
    "sigmoid": ("Sigmoid", ""),
    "tanh": ("TanH", ""),
    "square": ("Power", "power_param { power: 2 scale: 0.5 shift: 0.25 }"),
    "cube": ("Power", "power_param { power: 3 scale: 0.25 }"),
    "line": ("Power", "power_param { scale: 0.5 shift: 1 }"),
    "dropout": ("Dropout", "dropout_param { dropout_ratio: 0.3 }"),
    "bn": ("BatchNorm", "batch_norm_param { use_global_stats: false }"),
    "scale": ("Scale", "scale_param { bias_term: true }"),
    "softmax": ("Softmax", ""),
    "lrn": ("LRN", "lrn_param { local_size: 3 alpha: 0.1 }"),
    "lrn_within": ("LRN", "lrn_param { local_size: 3 alpha: 0.1 norm_region: WITHIN_CHANNEL }"),
    "conv": ("Convolution", CONV),
    "group": ("Convolution", CONV.replace("kernel_size", "group: 2 kernel_size")),
    "deconv": ("Deconvolution", DECONV),
    "max": ("Pooling", "pooling_param { kernel_size: 3 stride: 1 pad: 1 }"),
    "ave": ("Pooling", "pooling_param { pool: AVE kernel_size: 3 stride: 1 pad: 1 }"),
}
"""Layers that keep (N, 4, H, W)."""
IN_PLACE = ("relu", "leaky", "sigmoid", "tanh", "square", "line", "dropout", "bn", "scale", "softmax")
TWO_TO_ONE = {
    "sum": ("Eltwise", "eltwise_param { coeff: 1 coeff: -0.5 }"),
    "product": ("Eltwise", "eltwise_param { operation: PROD }"),
    "largest": ("Eltwise", "eltwise_param { operation: MAX }"),
    "concat": ("Concat", ""),
    "by": ("Scale", "scale_param { axis: 0 }"),
}


def every_layer() -> str:
    """A net in TRAIN with all layer types of this file, one after the other, two losses and an accuracy."""
    text = inputs(x=(3, 4, 6, 7), l=(3,), t=(3, 5))
    at = "x"
    for name, (kind, extra) in SAME_SHAPE.items():
        top = at if name in IN_PLACE and at != "x" and name not in ("leaky", "square") else name
        text += layer(kind, name, [at], [top], extra)
        at = top
    for name, (kind, extra) in TWO_TO_ONE.items():
        bottoms = ["max", "conv"] if name == "concat" else ["conv", at]
        text += layer(kind, name, bottoms, [name], extra)
        if name == "concat":
            text += layer("Slice", "cut", ["concat"], ["cut_a", "cut_b"])
            text += layer("Eltwise", "joined", ["cut_a", "cut_b"], ["joined"])
            at = "joined"
        else:
            at = name
    text += layer("Split", "split", [at], ["s1", "s2"]) + layer("Flatten", "flat", ["s1"], ["flat"])
    text += layer("Reshape", "again", ["s2"], ["again"], "reshape_param { shape { dim: 0 dim: -1 } }")
    text += layer("Eltwise", "both", ["flat", "again"], ["both"])
    dense = f"inner_product_param {{ num_output: 5 {FILL} }}"
    text += layer("InnerProduct", "ip", ["both"], ["ip"], dense)
    text += layer(
        "InnerProduct", "ip2", ["both"], ["ip2"], dense.replace("num_output: 5", "transpose: true num_output: 5")
    )
    text += layer("SoftmaxWithLoss", "loss", ["ip", "l"], ["loss", "prob"], "loss_weight: 1 loss_weight: 0")
    text += layer("EuclideanLoss", "far", ["ip2", "t"], ["far"], "loss_weight: 0.3")
    return text + layer("Accuracy", "accuracy", ["ip", "l"], ["accuracy"])


def feed(net: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Numbers for the inputs of such a net; labels are below the number of classes."""
    rng = np.random.default_rng(seed)
    made = {}
    for name in net.inputs:
        shape = net.blobs[name].shape
        labels = name in ("l", "label")
        made[name] = rng.integers(0, 5, shape) if labels else rng.standard_normal(shape, np.float32)
    return made


@st.composite
def random_net(draw: Any) -> str:
    """A net of random layers on (N, 4, H, W): in place or not, joined again, some blobs left as outputs."""
    text = inputs(x=(2, 4, draw(st.integers(3, 6)), draw(st.integers(3, 6))), l=(2,))
    if draw(st.booleans()):
        text = "force_backward: true\n" + text
    blobs = ["x"]
    for i in range(draw(st.integers(1, 9))):
        bottom = draw(st.sampled_from(blobs[-3:]))
        if draw(st.booleans()) and len(blobs) > 1 and i:
            kind, extra = draw(st.sampled_from([TWO_TO_ONE[k] for k in ("sum", "product", "largest", "by")]))
            text += layer(kind, f"l{i}", [bottom, draw(st.sampled_from(blobs))], [f"b{i}"], extra)
            blobs.append(f"b{i}")
            continue
        name = draw(st.sampled_from(sorted(SAME_SHAPE)))
        kind, extra = SAME_SHAPE[name]
        top = bottom if name in IN_PLACE and bottom != "x" and draw(st.booleans()) else f"b{i}"
        text += layer(kind, f"l{i}", [bottom], [top], extra)
        if top != bottom:
            blobs.append(top)
    text += layer("InnerProduct", "ip", [blobs[-1]], ["ip"], f"inner_product_param {{ num_output: 5 {FILL} }}")
    if draw(st.booleans()):
        text += layer("ReLU", "last", ["ip"], ["ip"])
    return text + layer("SoftmaxWithLoss", "loss", ["ip", "l"], ["loss"])
