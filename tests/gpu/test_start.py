"""Case D6: weights that start badly are told at the first step of a solver, unless they have come from elsewhere."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from gpu import Net, Solver
from gpu.fields import FieldWarning

SOLVER = 'base_lr: 0.01 lr_policy: "fixed"\n'
HEAD = """force_backward: true
input: "x" input_shape { dim: 2 dim: 2 dim: 4 dim: 4 }
input: "t" input_shape { dim: 2 dim: 2 dim: 8 dim: 8 }
"""
LOSS = 'layer { name: "loss" type: "EuclideanLoss" bottom: "y" bottom: "t" }'


def solver(settings: str, param: str = "") -> Solver:
    layer = f"""layer {{ name: "up" type: "Deconvolution" bottom: "x" top: "y" {param}
      convolution_param {{ num_output: 2 kernel_size: 4 stride: 2 pad: 1 bias_term: false {settings} }} }}"""
    return Solver(SOLVER, net=Net(HEAD + layer + LOSS, "TRAIN"))


def told(one: Solver) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one.step(2)
    assert all(warning.category is FieldWarning for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("", "has no weight_filler, so its weights start as constant 0"),
        ('weight_filler { type: "constant" }', "its learnable weights start as 0"),
        ('weight_filler { type: "bilinear" }', "bilinear weights with num_output 2 and group 1"),
        ('weight_filler { type: "gaussian" }', "weight_filler is gaussian without std, which is then 1"),
    ],
)
def test_each_is_told_once_with_its_layer(settings: str, text: str) -> None:
    one = solver(settings)
    (message,) = told(one)
    assert message.startswith(f"layer 'up' (Deconvolution): {text}")
    assert not told(one)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ('weight_filler { type: "xavier" }', ""),
        ('weight_filler { type: "bilinear" } group: 2', ""),
        ('weight_filler { type: "gaussian" std: 0.1 }', ""),
        ("", "param { lr_mult: 0 }"),
    ],
)
def test_what_is_sound_is_not_told(settings: str, param: str) -> None:
    assert not told(solver(settings, param))


@pytest.mark.parametrize("settings", ["", 'weight_filler { type: "bilinear" }', 'weight_filler { type: "gaussian" }'])
def test_weights_from_elsewhere_are_somebodys_choice(settings: str) -> None:
    one = solver(settings)
    one.net.params["up"][0].data = np.full(one.net.params["up"][0].shape, 0.1)
    assert not told(one)
