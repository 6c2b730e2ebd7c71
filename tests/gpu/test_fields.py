"""Fields that are not followed are refused together or warned about, before anything is allocated."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest

from datasets import caffe_pb2
from gpu import fields
from gpu.blob import Blob
from gpu.fields import NO_GRADIENT, FieldWarning, SettingsError
from gpu.layers import labels, registry
from gpu.net import Net
from gpu.solver import Solver

INPUT = 'layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: 4 dim: 4 } } }\n'


def test_all_problems_are_told_at_once_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Blob, "__init__", lambda *_a, **_k: pytest.fail("allocated"))
    text = (
        INPUT
        + """
        layer { name: "c" type: "Convolution" bottom: "x" top: "c" convolution_param { num_output: 2 axis: 2 } }
        layer { name: "p" type: "Pooling" bottom: "c" top: "p" pooling_param { pool: STOCHASTIC kernel_size: 2 } }
        layer { name: "w" type: "WindowData" top: "w" }
        layer { name: "e" type: "Eltwise" bottom: "p" top: "e" }
        layer { name: "s" type: "Slice" bottom: "p" top: "a" top: "b" slice_param { slice_dim: 1 axis: 1 } }
        layer { name: "i" type: "InnerProduct" bottom: "a" top: "i" inner_product_param { num_output: 1 }
          blobs { data: 1 } phase: TRAIN }
        layer { name: "f" type: "PReLU" bottom: "a" top: "f" prelu_param { filler { type: "zeros" } } }"""
    )
    with pytest.raises(SettingsError, match="8 things cannot be followed") as caught:
        Net(text)
    told = str(caught.value)
    for part in (
        "'w' (WindowData)",
        "'c' (Convolution): only axis 1",
        "'p' (Pooling): pool method STOCHASTIC",
        "'e' (Eltwise) has a wrong number of bottoms",
        "'s' (Slice): slice_dim and axis exclude each other",
        "'i' (InnerProduct): blobs in a prototxt",
        "'i' (InnerProduct): a phase of its own",
        "'f' (PReLU): prelu_param.filler is of unknown type",
    ):
        assert part in told
    assert len(caught.value.errors) == 8


@pytest.mark.parametrize(
    ("layer", "note"),
    [
        ('type: "ReLU" relu_param { engine: CUDNN }', "relu_param.engine has no effect"),
        (
            'type: "Convolution" convolution_param { num_output: 1 kernel_size: 1 force_nd_im2col: true }',
            "convolution_param.force_nd_im2col has no effect",
        ),
        ('type: "ReLU" pooling_param { kernel_size: 2 }', "pooling_param has no effect on the type ReLU"),
        ('type: "ReLU" transform_param { scale: 2 }', "transform_param has no effect on the type ReLU"),
        ('type: "LRN" lrn_param { norm_region: WITHIN_CHANNEL k: 2 }', "lrn_param.k has no effect"),
        (
            'type: "InnerProduct" inner_product_param { num_output: 1 weight_filler { type: "xavier" std: 0.1 } }',
            "weight_filler.std has no effect on the filler 'xavier'",
        ),
        ('type: "MVN" mvn_param { eps: 0.1 }', "not in the gradient"),
        ('type: "Scale" bottom: "x" scale_param { axis: 0 num_axes: 2 }', "num_axes has no effect"),
        ('type: "SigmoidCrossEntropyLoss" bottom: "x" loss_param { ignore_label: 0 }', "ignores every target"),
        (
            'type: "SigmoidCrossEntropyLoss" bottom: "x" loss_param { normalize: true normalization: FULL }',
            "normalize has no effect",
        ),
        ('type: "EuclideanLoss" bottom: "x" loss_param { normalization: FULL }', "loss_param has no effect"),
    ],
)
def test_what_has_no_effect_is_warned_about(layer: str, note: str) -> None:
    with pytest.warns(FieldWarning, match=f"layer 'L': .*{note}"):
        Net(INPUT + f'layer {{ name: "L" bottom: "x" top: "y" {layer} }}')


def test_a_warning_is_given_once_for_all_its_layers() -> None:
    text = INPUT + "".join(
        f'layer {{ name: "r{i}" type: "ReLU" bottom: "x" top: "y{i}" relu_param {{ engine: CAFFE }} }}\n'
        for i in range(7)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Net(text)
    (warning,) = caught
    assert str(warning.message).startswith("layers 'r0', 'r1', 'r2', 'r3', 'r4' and 2 more: relu_param.engine")
    assert warning.filename == __file__


@pytest.mark.parametrize("phase", ["TRAIN", "TEST"])
def test_gradients_that_caffe_gets_wrong_in_place(phase: str) -> None:
    text = (
        INPUT
        + """layer { name: "c" type: "Split" bottom: "x" top: "h" }
        layer { name: "fine" type: "ReLU" bottom: "h" top: "h" }
        layer { name: "L" type: "BNLL" bottom: "h" top: "h" }"""
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Net(text, phase)
    assert [str(warning.message)[:9] for warning in caught] == (["layer 'L'"] if phase == "TRAIN" else [])


@pytest.mark.parametrize(
    ("phase", "given", "told"), [("TRAIN", "true", True), ("TRAIN", "false", False), ("TEST", "true", False)]
)
def test_a_gradient_is_asked_for_where_there_is_none(phase: str, given: str, told: bool) -> None:
    text = (
        INPUT
        + f"""layer {{ name: "t" type: "Input" top: "t" input_param {{ shape {{ dim: 2 dim: 4 dim: 4 }} }} }}
        layer {{ name: "L" type: "SoftmaxWithLoss" bottom: "x" bottom: "t" top: "l"
          propagate_down: true propagate_down: {given} }}"""
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Net(text, phase)
    found = [str(warning.message) for warning in caught]
    assert found == (["layer 'L': propagate_down: true has no effect on 't': " + NO_GRADIENT] if told else [])


def test_fields_of_the_net() -> None:
    with pytest.warns(FieldWarning, match="debug_info of the net"):
        Net("debug_info: true\n" + INPUT)
    with pytest.warns(FieldWarning, match="state says TRAIN; it is built for TEST"):
        Net("state { phase: TRAIN }\n" + INPUT)


def _own_fields() -> list[tuple[str, str, str]]:
    rows = []
    for name, messages in fields.OWN.items():
        for message in messages:
            kind = caffe_pb2.LayerParameter.DESCRIPTOR.fields_by_name[message].message_type
            rows += [(name, message, field.name) for field in kind.fields]
    return rows


DATA = ("transform_param", "data_param", "image_data_param", "hdf5_data_param")


def test_every_field_of_caffe_is_read_by_its_layer_or_known_to_have_no_effect() -> None:
    """A layer's own modules must at least mention each field of its messages."""
    known: dict[str, Any] = registry()
    unread = []
    for name, message, field in _own_fields():
        if name not in known or field in fields.NO_EFFECT or message in DATA:
            continue  # read by gpu.data_layers, which tells what has no effect
        modules = {inspect.getmodule(cls) for cls in known[name].__mro__}
        text = inspect.getsource(labels)  # reads the fields that losses share
        text += "".join(
            inspect.getsource(module) for module in modules if module and module.__name__.startswith("gpu.")
        )
        if field.removesuffix("_h").removesuffix("_w") not in text and field not in text:
            unread.append(f"{name}: {message}.{field}")
    assert not unread


def test_a_type_that_is_not_looked_at_is_one_of_a_users_own() -> None:
    own = {name for name, cls in registry().items() if cls.__module__.startswith("gpu.layers.")} - {"Python"}
    assert own <= set(fields.OWN)


NET = (
    INPUT.replace("\n", " ")
    + 'layer { name: "i" type: "InnerProduct" bottom: "x" top: "i" inner_product_param '
    + (
        '{ num_output: 1 weight_filler { type: "xavier" } } } layer { name: "z" type: "Input" top: "z" input_param '
        '{ shape { dim: 2 dim: 1 } } } layer { name: "l" type: "EuclideanLoss" bottom: "i" bottom: "z" top: "l" }'
    )
)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("debug_info: true", "debug_info of the solver has no effect without display"),
        ("test_compute_loss: true", "test_compute_loss"),
        ("device_id: 1", "device_id"),
        ("layer_wise_reduce: false", "layer_wise_reduce"),
        ("solver_mode: GPU", "solver_mode: GPU has no effect: the backend decides, and it is numpy"),
    ],
)
def test_fields_of_the_solver_that_have_no_effect(text: str, note: str) -> None:
    with pytest.warns(FieldWarning, match=note):
        Solver(f"base_lr: 0.1 {text}\n", net=NET + "\n", backend="numpy")


def test_the_shown_loss_is_the_mean_of_the_last_ones() -> None:
    solver = Solver("base_lr: 0.01 average_loss: 3 solver_mode: CPU\n", net=NET + "\n", backend="numpy", seed=1)
    assert solver.smoothed_loss != solver.smoothed_loss
    solver.net.blobs["x"].data[...] = 1
    losses = [solver.step() for _ in range(5)]
    assert losses[0] > losses[-1] > 0
    assert solver.smoothed_loss == pytest.approx(sum(losses[-3:]) / 3)
    with pytest.raises(Exception, match="average_loss"):
        Solver("base_lr: 0.1 average_loss: 0\n", net=NET + "\n")
