"""What a net or a solver asks for that is not done here: refused by name, all of it at once, or warned about.

This is the one place that knows. Before anything is allocated, :func:`build_layers` makes every layer of a net and
collects all that is wrong with their settings (each layer checks its own), beside what no layer looks at. Fields that
Caffe honours and that would change numbers are refused; fields without an effect here, or that Caffe itself accepts and
gets wrong, become warnings, each once for all the layers it concerns.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from gpu.fillers import FillerError
from gpu.layers import registry
from gpu.layers.base import Context, Layer, LayerError
from gpu.layers.python import import_types
from gpu.prototxt import PHASES, FilteredNet, PrototxtError
from gpu.wiring import check_count
from profiler.errors import StallscopeError

_SHOWN = 5


class FieldWarning(UserWarning):
    """A field of a net or solver that has no effect, or that Caffe gets wrong."""


class SettingsError(PrototxtError, LayerError):
    """Several layers whose settings cannot be followed. ``errors``: one for each problem."""

    errors: list[StallscopeError]


OWN = {
    **dict.fromkeys(("Convolution", "Deconvolution", "Im2col"), ("convolution_param",)),
    **dict.fromkeys(("LSTM", "RNN", "Recurrent"), ("recurrent_param",)),
    **dict.fromkeys(
        (
            "AbsVal",
            "BNLL",
            "BatchReindex",
            "EuclideanLoss",
            "Filter",
            "LSTMUnit",
            "MultinomialLogisticLoss",
            "Silence",
            "Split",
        ),
        (),
    ),
    "Accuracy": ("accuracy_param",),
    "ArgMax": ("argmax_param",),
    "BatchNorm": ("batch_norm_param",),
    "Bias": ("bias_param",),
    "Clip": ("clip_param",),
    "Concat": ("concat_param",),
    "ContrastiveLoss": ("contrastive_loss_param",),
    "Crop": ("crop_param",),
    "Data": ("data_param", "transform_param"),
    "Dropout": ("dropout_param",),
    "DummyData": ("dummy_data_param",),
    "ELU": ("elu_param",),
    "Eltwise": ("eltwise_param",),
    "Embed": ("embed_param",),
    "Exp": ("exp_param",),
    "Flatten": ("flatten_param",),
    "HDF5Data": ("hdf5_data_param",),
    "HingeLoss": ("hinge_loss_param",),
    "ImageData": ("image_data_param", "transform_param"),
    "InfogainLoss": ("infogain_loss_param", "loss_param"),
    "InnerProduct": ("inner_product_param",),
    "Input": ("input_param",),
    "LRN": ("lrn_param",),
    "Log": ("log_param",),
    "MVN": ("mvn_param",),
    "MemoryData": ("memory_data_param",),
    "PReLU": ("prelu_param",),
    "Parameter": ("parameter_param",),
    "Pooling": ("pooling_param",),
    "Power": ("power_param",),
    "ReLU": ("relu_param",),
    "Reduction": ("reduction_param",),
    "Reshape": ("reshape_param",),
    "SPP": ("spp_param",),
    "Scale": ("scale_param",),
    "Sigmoid": ("sigmoid_param",),
    "SigmoidCrossEntropyLoss": ("loss_param",),
    "Slice": ("slice_param",),
    "Softmax": ("softmax_param",),
    "SoftmaxWithLoss": ("softmax_param", "loss_param"),
    "Swish": ("swish_param",),
    "TanH": ("tanh_param",),
    "Threshold": ("threshold_param",),
    "Tile": ("tile_param",),
}
"""The messages of settings that a layer type reads; types of a user's own are not in here, and not looked at."""

NO_EFFECT = {
    "debug_info": "blobs and gradients are there to look at",
    "engine": "the backend chooses how to compute",
    "force_nd_im2col": "the results are the same",
    "stable_prod_grad": "the stable gradient is always used",
}
"""Fields that change nothing here, wherever they stand in a message of OWN, and why."""

_FILLER_FIELDS = {
    "constant": {"value"},
    "uniform": {"min", "max"},
    "gaussian": {"mean", "std", "sparse"},
    "xavier": {"variance_norm"},
    "msra": {"variance_norm"},
    "positive_unitball": set(),
    "bilinear": set(),
}
_READ_AFTER_WRITING = ("BNLL", "Clip", "ELU", "Log", "Power", "ReLU")
"""Types that Caffe lets write over their input and whose gradient it then takes from the output."""
IN_PLACE = "written in place; Caffe takes the gradient from the output, here it is taken from the input"
_MVN_EPS = 1e-3
NO_GRADIENT = "labels, selectors and indices have none; Caffe ends in most such layers"


def build_layers(filtered: FilteredNet, context: Context) -> list[Layer]:
    """Make the layers of a net, in its order, with nothing allocated; warn about fields without an effect.

    Raises the one error there is, or SettingsError that lists all of them.
    """
    import_types(filtered.net)
    errors: list[StallscopeError] = list(_unknown_types(filtered.net))
    notes: dict[str, list[str]] = defaultdict(list)
    for note in _net_notes(filtered):
        notes[note] = []
    layers = []
    known = registry()
    for spec in filtered.net.layer:
        cls = known.get(spec.type)
        if cls is None:
            continue
        if cls.loss and not spec.top:
            spec.top.append(spec.name)  # old texts leave the top of a loss out
        problems = [*_refused(spec, filtered.phase), *_counts(spec, cls)]
        errors += problems
        for note in _notes(spec):
            notes[note].append(spec.name)
        if problems:
            continue
        try:
            layer = cls(spec, context)
        except StallscopeError as error:
            errors.append(error)
            continue
        layers.append(layer)
        if filtered.phase == "TRAIN":
            if caffe_reads_what_it_wrote(layer):
                notes[IN_PLACE].append(spec.name)
            for i, wanted in enumerate(spec.propagate_down[: len(spec.bottom)]):
                if wanted and layer.differentiable and not layer.allows_gradient(i):
                    notes[f"propagate_down: true has no effect on {spec.bottom[i]!r}: {NO_GRADIENT}"].append(spec.name)
    if errors:
        raise _all(filtered.net.name, errors)
    for note, names in notes.items():
        _warn(note, names)
    return layers


def check_solver(solver: Any, backend: str) -> None:
    """Refuse or warn about fields of a ``SolverParameter`` that are not followed; ``backend``: that of its nets."""
    if solver.average_loss < 1:
        raise StallscopeError("average_loss in the solver is out of range", expected=">= 1", found=solver.average_loss)
    mode = type(solver).DESCRIPTOR.fields_by_name["solver_mode"].enum_type.values_by_number[solver.solver_mode].name
    if solver.HasField("solver_mode") and (mode == "GPU") != (backend == "cupy"):
        _warn(f"solver_mode: {mode} has no effect: the backend decides, and it is {backend}", [])
    if solver.debug_info and not solver.display:
        _warn("debug_info of the solver has no effect without display, in Caffe and here", [])
    for field, why in (
        ("device_id", "the backend's current device is used"),
        ("test_compute_loss", "give the loss in the test net a top, and its mean is shown with the other outputs"),
        ("layer_wise_reduce", "one process trains, so nothing is reduced"),
    ):
        default = type(solver).DESCRIPTOR.fields_by_name[field].default_value
        if getattr(solver, field) != default:
            _warn(f"{field} of the solver has no effect: {why}", [])


def _all(net: str, errors: list[StallscopeError]) -> StallscopeError:
    if len(errors) == 1:
        return errors[0]
    lines = ["\n    ".join(str(error).splitlines()) for error in errors]
    found = SettingsError(f"net {net!r}: {len(errors)} things cannot be followed\n  " + "\n  ".join(lines))
    found.errors = errors
    return found


def _warn(note: str, names: list[str]) -> None:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    plural = "s" if len(names) > 1 else ""
    where = f"layer{plural} {', '.join(repr(name) for name in names[:_SHOWN])}{more}: " if names else ""
    warnings.warn(where + note, FieldWarning, stacklevel=4)


def _unknown_types(net: Any) -> Iterator[StallscopeError]:
    """All layers of unsupported types, in one error."""
    known = registry()
    unknown = [layer for layer in net.layer if layer.type not in known]
    missing = [f"{layer.name!r} ({layer.type or 'no type'})" for layer in unknown]
    if missing:
        named = [layer for layer in unknown if layer.python_param.module]
        hint = "for a type of your own see docs/custom_layers.md"
        if named:
            first = named[0]
            hint = (
                f"module {first.python_param.module!r} registers no type {first.type!r}: put "
                f"@gpu.register_layer({first.type!r}) before its class (docs/custom_layers.md)"
            )
        yield PrototxtError(
            f"the net has {len(missing)} layer(s) of unsupported type",
            expected=f"one of {', '.join(sorted(known))}",
            found=", ".join(missing),
            hint=hint,
        )


def _counts(spec: Any, cls: type[Layer]) -> Iterator[StallscopeError]:
    for what, count, allowed in (("bottom", len(spec.bottom), cls.n_bottoms), ("top", len(spec.top), cls.n_tops)):
        try:
            check_count(spec, what, count, allowed)
        except PrototxtError as error:
            yield error


def _refused(spec: Any, phase: str) -> Iterator[StallscopeError]:
    """Fields that Caffe honours in any layer and that would change numbers."""
    where = f"layer {spec.name!r} ({spec.type})"
    if spec.blobs:
        yield LayerError(f"{where}: blobs in a prototxt are not supported", hint="give weights as a .caffemodel")
    if spec.HasField("phase") and PHASES[spec.phase] != phase:
        yield LayerError(
            f"{where}: a phase of its own is not supported", expected=f"{phase}, the net's", found=PHASES[spec.phase]
        )
    for name, filler in _fillers(spec):
        if filler.type not in _FILLER_FIELDS:
            known = ", ".join(_FILLER_FIELDS)
            yield FillerError(f"{where}: {name} is of unknown type", expected=known, found=filler.type)
    for message, first, second in (
        ("slice_param", "slice_dim", "axis"),
        ("dummy_data_param", "shape", "num"),
    ):
        if message in OWN.get(spec.type, ()) and _given(getattr(spec, message), first, second):
            yield LayerError(f"{where}: {first} and {second} exclude each other")


def _given(message: Any, *names: str) -> bool:
    fields = {field.name for field, _ in message.ListFields()}
    return fields.issuperset(names)


def _net_notes(filtered: FilteredNet) -> Iterator[str]:
    net = filtered.net
    if net.debug_info:
        yield "debug_info of the net has no effect: say it in the solver, as Caffe's training asks for"
    if net.state.HasField("phase") and PHASES[net.state.phase] != filtered.phase:
        yield f"the net's own state says {PHASES[net.state.phase]}; it is built for {filtered.phase}"


def _notes(spec: Any) -> Iterator[str]:
    """What is given for a layer without having an effect, or with an effect that surprises."""
    own = OWN.get(spec.type)
    if own is None:
        return
    for field, value in spec.ListFields():
        if not field.name.endswith("_param"):
            continue
        if field.name not in own:
            yield f"{field.name} has no effect on the type {spec.type}"
            continue
        for inner, _ in value.ListFields():
            if inner.name in NO_EFFECT:
                yield f"{field.name}.{inner.name} has no effect: {NO_EFFECT[inner.name]}"
    for name, filler in _fillers(spec):
        for inner, _ in filler.ListFields():
            if inner.name != "type" and inner.name not in _FILLER_FIELDS.get(filler.type, (inner.name,)):
                yield f"{name}.{inner.name} has no effect on the filler {filler.type!r}"
    yield from _type_notes(spec)


def _fillers(spec: Any) -> Iterator[tuple[str, Any]]:
    """The fillers given in the messages that the type reads, by ``message.field``."""
    for message in OWN.get(spec.type, ()):
        for field, given in getattr(spec, message).ListFields():
            if field.message_type is not None and field.message_type.name == "FillerParameter":
                yield from ((f"{message}.{field.name}", filler) for filler in (given if field.is_repeated else [given]))


def _type_notes(spec: Any) -> Iterator[str]:
    if spec.type in ("Scale", "Bias") and len(spec.bottom) > 1:
        for name in ("num_axes", "filler"):
            message = f"{spec.type.lower()}_param"
            if getattr(spec, message).HasField(name):
                yield f"{message}.{name} has no effect: the second bottom is the operand"
    if spec.type == "InfogainLoss" and len(spec.bottom) > 2 and spec.infogain_loss_param.source:
        yield "infogain_loss_param.source has no effect: the third bottom is the matrix"
    if spec.type == "LRN" and spec.lrn_param.norm_region == 1 and spec.lrn_param.HasField("k"):
        yield "lrn_param.k has no effect WITHIN_CHANNEL, in Caffe and here"
    if "loss_param" in OWN[spec.type] and _given(spec.loss_param, "normalize", "normalization"):
        yield "loss_param.normalize has no effect beside normalization"
    loss = spec.loss_param
    if spec.type == "SigmoidCrossEntropyLoss" and loss.HasField("ignore_label") and loss.ignore_label == 0:
        yield "ignore_label: 0 ignores every target above -1 and below 1: targets are cut to whole numbers"
    if spec.type == "MVN" and spec.mvn_param.normalize_variance and spec.mvn_param.eps > _MVN_EPS:
        yield "a large mvn_param.eps is in the output and not in the gradient, in Caffe and here"


def caffe_reads_what_it_wrote(layer: Layer) -> bool:
    """Whether Caffe takes the gradient of this in-place layer from its output where its input is needed."""
    spec = layer.spec
    return spec.type in _READ_AFTER_WRITING and list(spec.bottom) == list(spec.top) and layer.reads_bottom()
