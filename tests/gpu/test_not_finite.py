"""NaN and infinity in tools that try a net out: who had them first is told, and a value too large is no bug."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import crosscheck, time
from gpu.error_bounds import representable
from gpu.layers.pointwise import Power
from gpu.net import Net

NET = """layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ dim: 4 dim: 6 }} }} }}
layer {{ name: "l" type: "Input" top: "l" input_param {{ shape {{ dim: 4 }} }} }}
layer {{ name: "a" type: "InnerProduct" bottom: "x" top: "a"
  inner_product_param {{ num_output: 5 weight_filler {{ type: "gaussian" std: {std} }} }} }}
layer {{ name: "p" type: "Power" bottom: "a" top: "p" power_param {{ power: 3 }} }}
layer {{ name: "b" type: "InnerProduct" bottom: "p" top: "b"
  inner_product_param {{ num_output: 3 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "b" bottom: "l" top: "loss" loss_weight: {weight} }}
"""
TOO_LARGE = NET.format(std=1e20, weight=1)
SOUND = NET.format(std=0.1, weight=1)
GRADIENTS = NET.format(std=2, weight="3e38")


def timed(folder: Path, text: str, *flags: str) -> tuple[int, Any]:
    (folder / "net.prototxt").write_text(text)
    out = folder / "out.json"
    code = time.main(
        [str(folder / "net.prototxt"), "--backend", "numpy", "--iterations", "2", "--json", str(out), *flags]
    )
    return code, json.loads(out.read_text())


def spoilt(folder: Path, layer: str, value: float) -> str:
    net = Net(SOUND, "TRAIN", seed=1)
    net.params[layer][0].data[0, 0] = value
    net.save(folder / "w.caffemodel")
    return str(folder / "w.caffemodel")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layer", ["a", "b"])
def test_gpu_time_names_the_layer_that_has_them_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layer: str, value: float
) -> None:
    code, found = timed(tmp_path, SOUND, "--weights", spoilt(tmp_path, layer, value))
    assert code == 1
    assert found["repeats"]["identical"], "NaN repeats bit for bit: that alone says nothing"
    assert (found["not_finite"]["layer"], found["not_finite"]["pass"]) == (layer, "forward")
    assert 0 < found["not_finite"]["values"] <= found["not_finite"]["of"]
    said = capsys.readouterr()
    assert f"layer '{layer}' is the first with NaN or infinity, in its forward pass" in " ".join(said.out.split())
    assert said.err == ""


def test_gpu_time_tells_gradients_apart(tmp_path: Path) -> None:
    code, found = timed(tmp_path, GRADIENTS)
    assert (code, found["not_finite"]["pass"]) == (1, "backward")
    assert found["not_finite"]["layer"] in ("loss", "b", "p", "a")
    assert found["total"]["backward_ms"] is not None
    code, found = timed(tmp_path, GRADIENTS, "--phase", "TEST")
    assert (code, found["not_finite"]) == (0, None), "there is no backward pass"


def test_gpu_time_of_a_sound_net_names_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = timed(tmp_path, SOUND)
    assert (code, found["not_finite"]) == (0, None)
    assert "not finite" not in capsys.readouterr().out


def checked(folder: Path, capsys: pytest.CaptureFixture[str], text: str) -> Any:
    (folder / "net.prototxt").write_text(text)
    capsys.readouterr()
    crosscheck.main([str(folder / "net.prototxt"), "--backends", "numpy", "--json", "-"])
    return json.loads(capsys.readouterr().out)


def test_values_too_large_for_float32_are_no_bug_of_a_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = checked(tmp_path, capsys, TOO_LARGE)
    assert found["verdict"] != "bug"
    assert found["not_finite"] == {"layer": "p", "tensor": "top 0"}
    assert found["first"] == {"numpy": None}


@pytest.mark.parametrize("wrong", [np.nan, 1e30, "other sign"])
def test_where_float32_has_no_number_anything_but_that_infinity_is_a_bug(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    forward = Power.forward

    def other(self: Any, bottoms: Any, tops: Any) -> None:
        forward(self, bottoms, tops)
        if tops[0].dtype == np.float32:
            tops[0].reshape(-1)[0] = -tops[0].reshape(-1)[0] if wrong == "other sign" else wrong

    monkeypatch.setattr(Power, "forward", other)
    found = checked(tmp_path, capsys, TOO_LARGE)
    assert found["verdict"] == "bug"
    assert found["first"]["numpy"]["layer"] == "p"


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 1.0, -3.5, 3.3e38, 3.5e38, -1e60, 1e300, np.inf, -np.inf, np.nan]),
            st.sampled_from([0.0, 1.0, -3.5, 3.3e38, np.inf, -np.inf, np.nan]),
        )
    )
)
def test_only_an_infinity_for_what_float32_cannot_hold_is_taken_for_it(
    pairs: list[tuple[float, float]],
) -> None:
    wanted, found = (np.array([pair[i] for pair in pairs], np.float64) for i in (0, 1))
    with np.errstate(over="ignore", invalid="ignore"):
        held = representable(wanted, found)
        rounded = wanted.astype(np.float32).astype(np.float64)
    for want, got, kept, nearest in zip(wanted, found, held, rounded, strict=True):
        overflowed = np.isfinite(want) and np.isinf(nearest) and got == nearest
        np.testing.assert_equal(kept, got if overflowed else want)
