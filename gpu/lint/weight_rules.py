"""Rules about how parameters start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu.lint.finding import Hit, Rule
from gpu.lint.view import Node, View

_WEIGHTS = {
    "Convolution": ("convolution_param", "weight_filler"),
    "Deconvolution": ("convolution_param", "weight_filler"),
    "Embed": ("embed_param", "weight_filler"),
    "InnerProduct": ("inner_product_param", "weight_filler"),
    "LSTM": ("recurrent_param", "weight_filler"),
    "RNN": ("recurrent_param", "weight_filler"),
    "Scale": ("scale_param", "filler"),
    "Bias": ("bias_param", "filler"),
    "PReLU": ("prelu_param", "filler"),
}
_OWN_DEFAULT = ("Scale", "Bias", "PReLU")
"""Types whose default is a sound one (1, 0 and 0.25)."""


def has_weights(node: Node) -> bool:
    """Whether the layer has parameters that a solver trains."""
    return node.type in _WEIGHTS and not (node.type in ("Scale", "Bias") and len(node.spec.bottom) > 1)


def _fillers(view: View) -> Iterator[tuple[Node, Any, str, Any]]:
    """Layer, its settings, the filler's field and the filler, of the weights that have not come from another layer."""
    owned: set[str] = set()
    for node in view.nodes:
        if not has_weights(node):
            continue
        shared = node.spec.param[0].name if node.spec.param else ""
        if shared and shared in owned:
            continue
        owned.add(shared)
        message, field = _WEIGHTS[node.type]
        settings = getattr(node.spec, message)
        yield node, settings, field, getattr(settings, field)


def _implicit(view: View) -> Iterator[Hit]:
    for node, settings, field, _ in _fillers(view):
        if node.type not in _OWN_DEFAULT and node.learns(0) and not settings.HasField(field):
            yield node.name, f"has no {field}, so its weights start as constant 0"


def _constant(view: View) -> Iterator[tuple[Node, float]]:
    for node, settings, field, filler in _fillers(view):
        if node.type not in _OWN_DEFAULT and node.learns(0) and settings.HasField(field) and filler.type == "constant":
            yield node, float(filler.value)


def _zero(view: View) -> Iterator[Hit]:
    for node, value in _constant(view):
        if value == 0:
            yield node.name, "its learnable weights start as 0"


def _alike(view: View) -> Iterator[Hit]:
    for node, value in _constant(view):
        if value != 0:
            yield node.name, f"all its weights start as {value:g}, so all its outputs are alike"


def _zero_scale(view: View) -> Iterator[Hit]:
    for node, settings, field, filler in _fillers(view):
        if node.type == "Scale" and settings.HasField(field) and filler.type == "constant" and not filler.value:
            yield node.name, "its factor starts as 0"


def _each_filler(view: View) -> Iterator[tuple[Node, str, Any]]:
    for node, settings, _, _ in _fillers(view):
        for field, value in settings.ListFields():
            if field.message_type is not None and field.message_type.name == "FillerParameter":
                yield node, field.name, value


def _gaussian(view: View) -> Iterator[Hit]:
    for node, name, filler in _each_filler(view):
        if filler.type == "gaussian" and not filler.HasField("std"):
            yield node.name, f"{name} is gaussian without std, which is then 1"


def _uniform(view: View) -> Iterator[Hit]:
    for node, name, filler in _each_filler(view):
        if filler.type == "uniform" and not (filler.HasField("min") and filler.HasField("max")):
            yield node.name, f"{name} is uniform over {filler.min:g} to {filler.max:g}: one of the two is the default"


def _bilinear(view: View) -> Iterator[tuple[Node, Any]]:
    for node, settings, _, filler in _fillers(view):
        if filler.type == "bilinear":
            yield node, settings


def _bilinear_type(view: View) -> Iterator[Hit]:
    for node, _ in _bilinear(view):
        if node.type not in ("Convolution", "Deconvolution"):
            yield node.name, f"the filler 'bilinear' needs windows, and {node.type} has none"


def _bilinear_group(view: View) -> Iterator[Hit]:
    for node, p in _bilinear(view):
        if node.type in ("Convolution", "Deconvolution") and p.num_output > 1 and p.group != p.num_output:
            yield node.name, f"bilinear weights with num_output {p.num_output} and group {p.group}"


def _bilinear_kernel(view: View) -> Iterator[Hit]:
    for node, p in _bilinear(view):
        if node.type in ("Convolution", "Deconvolution"):
            kernel = [p.kernel_h, p.kernel_w] if p.HasField("kernel_h") else list(p.kernel_size)
            if len(set(kernel)) > 1:
                yield node.name, f"bilinear weights in a kernel of {' x '.join(map(str, kernel))}"


def _bilinear_factor(view: View) -> Iterator[Hit]:
    for node, p in _bilinear(view):
        if node.type == "Deconvolution" and len(p.kernel_size) == 1 and len(p.stride) <= 1:
            factor = p.stride[0] if p.stride else 1
            wanted = 2 * factor - factor % 2
            if p.kernel_size[0] != wanted:
                yield node.name, f"kernel_size {p.kernel_size[0]} with stride {factor} is no interpolation; {wanted} is"


def _bilinear_learned(view: View) -> Iterator[Hit]:
    for node, _ in _bilinear(view):
        if node.learns(0):
            yield node.name, "its bilinear weights are trained"


RULES = (
    Rule(
        "implicit-filler",
        "warning",
        "Weights of 0 pass no gradient down and all outputs are alike, unless a weights file is loaded.",
        'Give one, for example weight_filler { type: "xavier" }.',
        _implicit,
    ),
    Rule(
        "zero-weights",
        "warning",
        "Weights of 0 pass no gradient down; two such layers in a row never learn.",
        "Give a filler that draws (xavier, msra), or lr_mult: 0 if the weights are to stay.",
        _zero,
    ),
    Rule("equal-weights", "warning", "They get equal gradients and stay alike.", "Give a filler that draws.", _alike),
    Rule(
        "zero-scale",
        "note",
        "The branch starts switched off: a known trick at the end of a residual branch, a fault elsewhere.",
        "Nothing, if that is meant.",
        _zero_scale,
    ),
    Rule("gaussian-std", "warning", "1 is far too large for most layers.", "Give std, for example 0.01.", _gaussian),
    Rule("uniform-range", "warning", "The default is 0 to 1: no weight is negative.", "Give min and max.", _uniform),
    Rule("bilinear-type", "error", "The net cannot be filled.", "Choose another filler.", _bilinear_type),
    Rule(
        "bilinear-group",
        "warning",
        "Every output becomes the sum over all channels: the maps are mixed where they were to be enlarged.",
        "Set group (and num_output) to the number of channels.",
        _bilinear_group,
    ),
    Rule("bilinear-kernel", "error", "The filler takes square kernels only.", "Make it square.", _bilinear_kernel),
    Rule(
        "bilinear-factor",
        "note",
        "The enlarged map ripples.",
        "kernel_size = 2 * stride - stride % 2.",
        _bilinear_factor,
    ),
    Rule(
        "bilinear-learned",
        "note",
        "It will not stay an interpolation.",
        "param { lr_mult: 0 } keeps it.",
        _bilinear_learned,
    ),
)
