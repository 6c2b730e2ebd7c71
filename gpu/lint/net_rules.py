"""Rules about how a net is wired: in-place layers, gradients that reach nobody, layers and blobs without effect."""

from __future__ import annotations

from collections.abc import Iterator

from gpu import fields
from gpu.lint.finding import Hit, Rule
from gpu.lint.view import METRICS, Node, View

_KEEPS_RELU = ("ReLU", "Sigmoid", "Softmax")
"""Types whose output is never negative."""
_REDUNDANT = {
    "SoftmaxWithLoss": ("Softmax", "ReLU", "Sigmoid"),
    "SigmoidCrossEntropyLoss": ("Sigmoid", "ReLU", "Softmax"),
}
"""What a loss should not be fed with: it does that itself, or cannot undo it."""


def _missing(view: View) -> Iterator[Hit]:
    for node, blob in view.missing:
        makers = [(layer, reason) for layer, tops, reason in view.filtered.excluded if blob in tops]
        later = [other.name for other in view.nodes if blob in other.spec.top]
        if makers:
            layer, reason = makers[0]
            yield node.name, f"reads blob {blob!r} of layer {layer!r}, which is excluded because {reason}"
        elif later:
            yield node.name, f"reads blob {blob!r} before layer {later[0]!r} makes it"
        else:
            yield node.name, f"reads blob {blob!r}, which no layer makes"


def _twice(view: View) -> Iterator[Hit]:
    for node, blob in view.twice:
        yield node.name, f"makes blob {blob!r} again, without reading it"
    names = [node.name for node in view.nodes]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield name, f"{names.count(name)} layers have this name in this phase"


def _in_place_type(view: View) -> Iterator[Hit]:
    for node in view.nodes:
        if node.cls is not None and not node.cls.in_place:
            for bottom in node.bottoms:
                if bottom is not None and node.in_place(bottom):
                    yield node.name, f"type {node.type} cannot write its output over its input {bottom.name!r}"


def _overwritten(view: View) -> Iterator[Hit]:
    """An in-place layer destroys what another layer's backward pass reads."""
    for value in view.values if view.phase == "TRAIN" else ():
        writer, maker = value.written_over, value.producer
        if writer is None or len(value.readers) > 1 or maker.layer is None or not maker.layer.reads_top():
            continue
        if (maker.type, writer.type) == ("ReLU", "Dropout") and not maker.spec.relu_param.negative_slope:
            continue  # what is dropped has no gradient, and the others keep their sign, which is all that is read
        yield writer.name, f"writes over {value.name!r}, which the backward pass of {maker.name!r} ({maker.type}) reads"


def _gradient_in_place(view: View) -> Iterator[Hit]:
    if view.phase == "TRAIN":
        for node in view.nodes:
            if node.layer is not None and fields.caffe_reads_what_it_wrote(node.layer):
                yield node.name, f"{node.type} in place takes its gradient from its output in Caffe"


def _shared_in_place(view: View) -> Iterator[Hit]:
    for value in view.values:
        writer = value.written_over
        if writer is not None and len(value.readers) > 1:
            others = [reader.name for reader in value.readers if reader is not writer]
            yield writer.name, f"writes over {value.name!r}, which {', '.join(others)} read as it was before"


def _input_in_place(view: View) -> Iterator[Hit]:
    for value in view.values:
        if value.written_over is not None and value.producer.is_source:
            yield value.written_over.name, f"writes over {value.name!r}, what layer {value.producer.name!r} was given"


def _no_loss(view: View) -> Iterator[Hit]:
    if view.phase == "TRAIN" and not any(node.loss_weight(top.index) for node in view.nodes for top in node.tops):
        yield None, "no layer gives a loss"


def _learners(view: View) -> list[Node]:
    from gpu.lint.weight_rules import has_weights

    return [node for node in view.nodes if has_weights(node) and node.learns(0)]


def _dead(view: View) -> Iterator[Hit]:
    if view.phase != "TRAIN" or next(_no_loss(view), None):
        return
    reached = view.under_loss()
    for node in _learners(view):
        if not any(top in reached or node.loss_weight(top.index) for top in node.tops):
            yield node.name, "no loss has a gradient for its parameters, so they never change"


def _loss_path(view: View) -> Iterator[Hit]:
    if view.phase != "TRAIN":
        return
    learners = _learners(view)
    for node in view.nodes:
        if any(node.loss_weight(top.index) for top in node.tops):
            above = set(view.upstream(node))
            if learners and not above.intersection(learners):
                yield node.name, "nothing that learns lies between it and the inputs"


def _unread(view: View) -> Iterator[Hit]:
    for node in view.nodes:
        if node.is_source:
            unread = [top.name for top in node.tops if not top.readers]
            for name in unread if len(unread) < len(node.tops) or view.phase == "TRAIN" else []:
                yield node.name, f"nobody reads its top {name!r}"
        elif view.phase == "TRAIN" and node.type not in METRICS:
            for top in node.tops:
                is_loss = node.cls is not None and node.cls.loss
                if not top.readers and not node.loss_weight(top.index) and not is_loss:
                    yield node.name, f"nobody reads its top {top.name!r}"


def _no_effect(view: View) -> Iterator[Hit]:
    for node in view.nodes:
        spec = node.spec
        if node.type == "Dropout" and spec.dropout_param.dropout_ratio == 0:
            yield node.name, "drops nothing: dropout_ratio is 0"
        elif node.type == "Power":
            p = spec.power_param
            if (p.power, p.scale, p.shift) == (1, 1, 0):
                yield node.name, "is x to the power 1, times 1, plus 0"
        elif node.type in ("Concat", "Eltwise") and len(spec.bottom) == 1:
            if node.type == "Concat" or list(spec.eltwise_param.coeff) in ([], [1.0]):
                yield node.name, "joins one input with nothing"
        elif node.type in ("Slice", "Split") and len(spec.top) == 1:
            yield node.name, "has one top, so nothing is divided"
        elif node.type == "Pooling":
            p = spec.pooling_param
            if p.kernel_size == 1 and p.stride == 1 and not p.pad and not p.global_pooling:
                yield node.name, "pools single values: kernel_size and stride are 1"
        elif (
            node.type == "ReLU" and not spec.relu_param.negative_slope and node.bottoms and node.bottoms[0] is not None
        ):
            maker = node.bottoms[0].producer
            if maker.type in _KEEPS_RELU and not (maker.type == "ReLU" and maker.spec.relu_param.negative_slope):
                yield node.name, f"its input comes from {maker.name!r} ({maker.type}) and is never negative"


def _redundant(view: View) -> Iterator[Hit]:
    for node in view.nodes:
        bottom = node.bottoms[0] if node.bottoms else None
        if bottom is not None and bottom.producer.type in _REDUNDANT.get(node.type, ()):
            maker = bottom.producer
            yield node.name, f"its scores come from {maker.name!r} ({maker.type})"


def _swapped(view: View) -> Iterator[Hit]:
    for node in view.of_type("SoftmaxWithLoss", "Accuracy", "HingeLoss", "MultinomialLogisticLoss"):
        first, second = (*node.bottoms, None, None)[:2]
        if first is not None and first.producer.type in ("Data", "ImageData") and first.index == 1:
            yield node.name, f"its first bottom is the label {first.name!r}"
        elif second is not None and second.producer.type in ("Data", "ImageData") and second.index == 0:
            yield node.name, f"its second bottom is the image {second.name!r}"


def _batch_norm_rates(view: View) -> Iterator[Hit]:
    for node in view.of_type("BatchNorm"):
        if any(param.lr_mult != 0 for param in node.spec.param):
            yield node.name, "lr_mult of its statistics is not 0"


def _batch_norm_scale(view: View) -> Iterator[Hit]:
    for node in view.of_type("BatchNorm"):
        if node.tops and not any(reader.type == "Scale" for reader in node.tops[0].readers):
            yield node.name, "no Scale layer follows"


def _batch_norm_stats(view: View) -> Iterator[Hit]:
    for node in view.of_type("BatchNorm"):
        p = node.spec.batch_norm_param
        if p.HasField("use_global_stats") and p.use_global_stats == (view.phase == "TRAIN"):
            yield node.name, f"use_global_stats: {str(p.use_global_stats).lower()} in {view.phase}"


def _bias_before_norm(view: View) -> Iterator[Hit]:
    for node in view.of_type("BatchNorm"):
        maker = node.bottoms[0].producer if node.bottoms and node.bottoms[0] is not None else None
        for kind, message in (("Convolution", "convolution_param"), ("InnerProduct", "inner_product_param")):
            if maker is not None and maker.type == kind and getattr(maker.spec, message).bias_term and maker.learns(1):
                yield maker.name, f"its bias is taken away again by {node.name!r}"


RULES = (
    Rule("missing-blob", "error", "The net cannot be built.", "Give producer and reader the same rules.", _missing),
    Rule("double-blob", "error", "The net cannot be built.", "Rename one of the two.", _twice),
    Rule("in-place-type", "error", "The net cannot be built.", "Give the top a name of its own.", _in_place_type),
    Rule(
        "in-place-overwrites",
        "warning",
        "Caffe computes that gradient from values that are gone; here a copy is kept, so the two differ.",
        "Give the top of the in-place layer a name of its own.",
        _overwritten,
    ),
    Rule(
        "in-place-gradient",
        "warning",
        "Caffe's gradient is wrong where input and output differ; here it is taken from the input.",
        "Give the top a name of its own, and both compute the same.",
        _gradient_in_place,
    ),
    Rule(
        "in-place-copied",
        "note",
        "The value is kept for its other readers, so this layer saves no memory.",
        "Nothing, if that is meant.",
        _shared_in_place,
    ),
    Rule(
        "in-place-input",
        "note",
        "Here what was given is kept; in Caffe a second pass without new data starts from the changed values.",
        "Give the top a name of its own.",
        _input_in_place,
    ),
    Rule("no-loss", "warning", "Nothing can be learned.", "Add a loss, or a loss_weight.", _no_loss),
    Rule("dead-parameters", "warning", "They stay as they were filled.", "Connect it to a loss, or remove it.", _dead),
    Rule(
        "idle-loss", "warning", "It costs time and teaches nothing.", "Connect it, or give loss_weight: 0.", _loss_path
    ),
    Rule("unread-blob", "note", "It is computed for nobody.", "Remove it, or end it in a Silence layer.", _unread),
    Rule("no-effect", "note", "It costs time and changes nothing.", "Remove the layer.", _no_effect),
    Rule(
        "double-activation",
        "warning",
        "The loss applies its own (or needs scores of both signs), so gradients become small and wrong.",
        "Feed the loss with the scores themselves.",
        _redundant,
    ),
    Rule("swapped-bottoms", "error", "Scores come first, labels second.", "Exchange the two bottoms.", _swapped),
    Rule(
        "batch-norm-lr",
        "warning",
        "Caffe refuses it: statistics are no parameters. Here they are never trained.",
        "Give three times param { lr_mult: 0 }, or none.",
        _batch_norm_rates,
    ),
    Rule(
        "batch-norm-scale",
        "note",
        "The layer alone cannot undo its normalisation.",
        "Add a Scale layer with bias_term.",
        _batch_norm_scale,
    ),
    Rule(
        "batch-norm-stats",
        "warning",
        "TRAIN is meant to use the batch's statistics and TEST the stored ones; this is the other way round.",
        "Leave use_global_stats out: the phase decides.",
        _batch_norm_stats,
    ),
    Rule(
        "bias-before-norm",
        "note",
        "The parameter and its gradient are wasted.",
        "Set bias_term: false.",
        _bias_before_norm,
    ),
)
