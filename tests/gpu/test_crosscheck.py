"""gpu.crosscheck calls rounding rounding, and names the layer that is broken."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.backend import Backend
from gpu.crosscheck import main
from gpu.error_bounds import UNIT, bound, distance
from gpu.layer_check import BUG, ROUNDING, Checked, check_layers, overall
from gpu.layers.dense import InnerProduct
from gpu.net import Net
from gpu.probe import bare_graph, quiet_net, random_inputs
from gpu.prototxt import filter_net, load_net
from profiler.errors import StallscopeError

DATA = Path(__file__).parents[1] / "data"
NETS = sorted((DATA / "nets").glob("*.prototxt"))
SIDES = {"compiled": Backend("numpy", np, "test"), "portable": Backend("portable", np, "test")}
GOLDEN = sorted(path for path in (DATA / "layers").glob("*.npz"))
REFUSED = {"pool_max_k2s3_EMPTYWINDOW", "pool_ave_k2s3_EMPTYWINDOW", "bn_test_zero_factor"}

NET = """
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 6 dim: 3 dim: 12 dim: 12 } } }
layer { name: "label" type: "Input" top: "label" input_param { shape { dim: 6 } } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 8 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "conv" }
layer { name: "scale" type: "Scale" bottom: "conv" top: "conv" scale_param { bias_term: true } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool" pooling_param { kernel_size: 2 stride: 2 pool: AVE } }
layer { name: "norm" type: "LRN" bottom: "pool" top: "norm" }
layer { name: "drop" type: "Dropout" bottom: "norm" top: "norm" }
layer { name: "ip" type: "InnerProduct" bottom: "norm" top: "ip"
  inner_product_param { num_output: 10 weight_filler { type: "gaussian" std: 0.05 } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def check(
    text: str, sides: dict[str, Backend], phase: str = "TRAIN", prepare: Callable[[Net], None] | None = None
) -> Any:
    filtered = filter_net(load_net(text), phase)
    nets = {name: quiet_net(text, phase, backend=backend) for name, backend in sides.items()}
    for net in nets.values():
        if prepare is not None:
            prepare(net)
    inputs = random_inputs(bare_graph(filtered, {}, 0), 0)
    return check_layers(filtered, nets, inputs, {}, 0)


def first_bug(checked: Sequence[Checked], mode: str) -> str | None:
    return next((each.layer for each in checked if each.verdict(mode) == BUG), None)


def test_a_sound_net_differs_by_rounding_alone() -> None:
    checked = check(NET, SIDES)
    assert overall(checked) == ROUNDING
    tensors = [tensor for each in checked for tensor in each.tensors]
    assert {tensor.side for tensor in tensors} == set(SIDES)
    assert {tensor.mode for tensor in tensors} == {"isolated", "in net", "cumulative"}
    assert any(tensor.distance.absolute > 0 for tensor in tensors)
    names = {(each.layer, tensor.name) for each in checked for tensor in each.tensors}
    assert {("conv", "parameter 1 gradient"), ("bn", "statistic 0"), ("ip", "bottom 0 gradient")} <= names
    # A bias before a normalisation has a gradient of 0: all of what is there is rounding, and the bound knows.
    bias = [t for each in checked if each.layer == "conv" for t in each.tensors if t.name == "parameter 1 gradient"]
    assert all(tensor.verdict == ROUNDING for tensor in bias)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_layers_that_match_caffe_are_within_their_bounds(path: Path) -> None:
    if path.stem in REFUSED:
        return
    with np.load(path) as archive:
        golden = {key: archive[key] for key in archive.files}
    text, phase = str(golden["prototxt"]), str(golden["phase"])

    def prepare(net: Net) -> None:
        for i, blob in enumerate(net.params.get("L", [])):
            blob.data = golden[f"p{i}"]
        for name, blobs in net.params.items():
            if name in golden:
                blobs[0].data = golden[name]

    filtered = filter_net(load_net(text), phase)
    nets = {name: quiet_net(text, phase, backend=backend) for name, backend in SIDES.items()}
    for net in nets.values():
        prepare(net)
    inputs = {name: golden[f"in_{name}"] for name in next(iter(nets.values())).inputs}
    checked = check_layers(filtered, nets, inputs, {}, 0)
    assert [each.problems for each in checked if each.problems] == []
    assert overall(checked) != BUG


def broken(layer: str, change: Callable[[Any], None]) -> Callable[[Net], None]:
    def prepare(net: Net) -> None:
        if net.backend.name == "portable":
            change(next(each for each in net.layers if each.name == layer))

    return prepare


def forward_off_by(factor: float) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        forward = layer.forward

        def wrong(bottoms: Any, tops: Any) -> None:
            forward(bottoms, tops)
            values = tops[0].reshape(-1)
            values[np.abs(values).argmax()] *= factor

        # On the class of this one object: what watches a net replaces the methods of the object, and puts them back.
        layer.__class__ = type(type(layer).__name__, (type(layer),), {"forward": lambda _, b, t: wrong(b, t)})

    return change


def backward_without(part: str) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        backward = layer.backward

        def wrong(bottoms: Any, tops: Any, top_diffs: Any, bottom_diffs: Any, param_diffs: Any) -> None:
            backward(bottoms, tops, top_diffs, bottom_diffs, param_diffs)
            where = bottom_diffs if part == "bottom" else param_diffs
            where[0].reshape(-1)[::7] = 0

        name = type(layer).__name__
        layer.__class__ = type(name, (type(layer),), {"backward": lambda _, *arrays: wrong(*arrays)})

    return change


@pytest.mark.parametrize("layer", ["conv", "bn", "scale", "relu", "pool", "norm", "drop", "ip", "loss"])
def test_a_wrong_value_names_its_layer(layer: str) -> None:
    checked = check(NET, SIDES, prepare=broken(layer, forward_off_by(1.01)))
    assert first_bug(checked, "isolated") == layer
    wrong = {tensor.side for each in checked for tensor in each.tensors if tensor.verdict == BUG}
    assert wrong == {"portable"}
    others = [each.layer for each in checked if each.layer != layer and each.verdict("isolated") == BUG]
    assert others == []  # every layer is fed with the same arrays, so the fault does not spread


@pytest.mark.parametrize("layer", ["conv", "relu", "pool", "ip", "loss"])
def test_a_wrong_gradient_names_its_layer(layer: str) -> None:
    part = "param" if layer == "conv" else "bottom"
    checked = check(NET, SIDES, prepare=broken(layer, backward_without(part)))
    assert first_bug(checked, "isolated") == layer
    [each] = [each for each in checked if each.verdict("isolated") == BUG]
    assert {t.name for t in each.tensors if t.verdict == BUG and t.mode == "isolated"} == {
        "parameter 0 gradient" if layer == "conv" else "bottom 0 gradient"
    }


def test_a_layer_that_fails_is_named_with_its_error() -> None:
    def change(layer: Any) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("no such kernel")

        layer.__class__ = type("Broken", (type(layer),), {"forward": fail})

    checked = check(NET, SIDES, prepare=broken("pool", change))
    [each] = [each for each in checked if each.problems]
    assert (each.layer, each.problems) == ("pool", {"portable": "RuntimeError: no such kernel"})
    assert each.verdict("isolated") == BUG


def test_damage_between_layers_shows_in_the_whole_net_only() -> None:
    """As memory that two blobs share by mistake would: no layer is wrong by itself."""

    def prepare(net: Net) -> None:
        if net.backend.name == "portable":
            layer: Any = next(each for each in net.layers if each.name == "ip")
            own = net.blobs["ip"].device_data

            class Harmful(type(layer)):  # type: ignore[misc]
                def forward(self, bottoms: Any, tops: Any) -> None:
                    super().forward(bottoms, tops)
                    if np.shares_memory(tops[0], own):  # in the net, that is, and not with arrays given one by one
                        bottoms[0][...] = 0  # its weights' gradient needs them

            layer.__class__ = Harmful

    checked = check(NET, SIDES, prepare=prepare)
    assert first_bug(checked, "isolated") is None
    assert first_bug(checked, "in net") == "ip"
    [each] = [each for each in checked if each.verdict("in net") == BUG]
    assert {t.name for t in each.tensors if t.verdict == BUG} == {"parameter 0 gradient"}


@settings(max_examples=15)
@given(st.data())
def test_made_up_nets_differ_by_rounding_alone(data: st.DataObject) -> None:
    channels = data.draw(st.integers(1, 5), "channels")
    side = data.draw(st.integers(5, 11), "side")
    batch = data.draw(st.integers(2, 5), "batch")
    text = f"""force_backward: true
    layer {{ name: "x" type: "Input" top: "b0"
      input_param {{ shape {{ dim: {batch} dim: {channels} dim: {side} dim: {side} }} }} }}
    """
    kinds = data.draw(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=6), "layers")
    for i, kind in enumerate(kinds):
        text += f'layer {{ name: "L{i}" bottom: "b{i}" top: "b{i + 1}" {BLOCKS[kind]} }}\n'
    checked = check(text, SIDES)
    assert [(each.type, t.name, t.share) for each in checked for t in each.tensors if t.verdict == BUG] == []


BLOCKS = {
    "conv": """type: "Convolution"
      convolution_param { num_output: 4 kernel_size: 3 pad: 1 weight_filler { type: "msra" } }""",
    "one": 'type: "Convolution" convolution_param { num_output: 3 kernel_size: 1 weight_filler { type: "msra" } }',
    "relu": 'type: "ReLU"',
    "tanh": 'type: "TanH"',
    "elu": 'type: "ELU"',
    "ave": 'type: "Pooling" pooling_param { pool: AVE kernel_size: 3 stride: 1 pad: 1 }',
    "max": 'type: "Pooling" pooling_param { kernel_size: 3 stride: 1 pad: 1 }',
    "lrn": 'type: "LRN" lrn_param { local_size: 3 }',
    "bn": 'type: "BatchNorm"',
    "mvn": 'type: "MVN"',
    "scale": 'type: "Scale" scale_param { bias_term: true }',
    "softmax": 'type: "Softmax"',
    "power": 'type: "Power" power_param { power: 2 scale: 0.5 shift: 0.1 }',
}


def test_distances() -> None:
    one = np.array([1.0, -2.0, 0.0])
    assert distance(one, one).ulp == 0
    near = distance(one + np.array([2.0**-23, 0, 0]), one)
    assert near.ulp == 1
    assert near.absolute == 2.0**-23
    assert distance(np.array([np.nan, 1]), np.array([np.nan, 1])).relative == 0
    assert distance(np.array([np.inf, 1]), np.array([np.inf, 1])).relative == 0
    for other in ([np.nan, 1.0], [np.inf, 1.0]):
        assert distance(np.array(other), np.array([1.0, 1.0])).relative == np.inf
    assert distance(np.zeros(3), np.zeros(2)).l2 == np.inf


@given(st.integers(1, 10**6), st.floats(0.1, 1e6))
def test_bounds_grow_with_the_length_of_sums(terms: int, size: float) -> None:
    values = np.full(4, size)
    assert bound(values, 0.0, 4 * terms) > bound(values, 0.0, terms) >= 8 * UNIT * np.linalg.norm(values)


# -- the command -------------------------------------------------------------------------------------------------------


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main([*arguments, "--json", "-"]) == code
    text = capsys.readouterr().out
    assert "NaN" not in text
    assert "Infinity" not in text
    return json.loads(text)


@pytest.mark.parametrize("net", NETS, ids=lambda path: path.stem)
def test_command_on_golden_nets(net: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = document(capsys, str(net), "--backends", "float64")
    assert (found["schema"], found["sides"], found["verdict"], found["first"]) == (
        1,
        ["numpy"],
        "rounding",
        {"numpy": None},
    )
    assert all(layer["tensors"] for layer in found["layers"] if layer["type"] not in ("Input", "Data"))
    assert main([str(net), "--all", "--json", str(tmp_path / "f.json")]) == 0
    shown = capsys.readouterr().out
    assert "every layer differs from float64 by rounding alone" in shown
    assert "InnerPr" in shown
    assert json.loads((tmp_path / "f.json").read_text())["layers"] == found["layers"]


def test_command_names_the_broken_layer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu.layers.normalisation import LRN

    forward = LRN.forward

    def wrong(self: Any, bottoms: Any, tops: Any) -> None:
        forward(self, bottoms, tops)
        if self.context.compiled:
            tops[0][0] *= np.float32(1.001)

    monkeypatch.setattr(LRN, "forward", wrong)
    net = tmp_path / "net.prototxt"
    net.write_text(NET)
    found = document(capsys, str(net), "--backends", "numpy", code=1)
    assert found["verdict"] == "bug"
    assert found["first"]["numpy"] == {"layer": "norm", "mode": "isolated", "tensor": "top 0"}
    assert main([str(net), "--backends", "numpy"]) == 1
    assert "'norm' is the first that is wrong by itself" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("name", "phase"), [("net", "TRAIN"), ("ip", "TRAIN"), ("net", "TEST")])
def test_a_net_too_large_for_the_memory_is_refused_with_a_batch_that_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, phase: str, name: str
) -> None:
    """Held to what is really taken, which is more: the figure must not refuse what would fit."""
    net = tmp_path / "net.prototxt"
    wide = NET.replace("num_output: 10 weight", "num_output: 500 weight")  # most of it parameters
    net.write_text(NET.replace("dim: 12 dim: 12", "dim: 24 dim: 24") if name == "net" else wide)
    given = [str(net), "--batch", "20", "--phase", phase, "--backends", "numpy", "--json", str(tmp_path / "out.json")]
    main([*given[:2], "1", *given[3:]])  # compiles
    tracemalloc.start()
    try:
        main(given)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    monkeypatch.setattr("gpu.crosscheck.available_memory", lambda: peak)
    main(given)
    monkeypatch.setattr("gpu.crosscheck.available_memory", lambda: peak // 5)
    with pytest.raises(StallscopeError, match="not enough memory") as caught:
        main(given)
    if name == "net":
        given[2] = str(caught.value.hint).split()[-1]
        assert 1 <= int(given[2]) < 20
        main(given)
        monkeypatch.setattr("gpu.crosscheck.available_memory", lambda: 1000)
        with pytest.raises(StallscopeError, match="smaller --shape"):
            main(given)


def test_precision_lists_layers_by_damage(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    net = tmp_path / "net.prototxt"
    # Values of about 1e6 do not fit float16; everything else does.
    large = NET.replace('bottom: "norm" top: "ip"', 'bottom: "big" top: "ip"')
    blow = """layer { name: "blow" type: "Power" bottom: "norm" top: "up" power_param { scale: 1000000 } }
    layer { name: "shrink" type: "Power" bottom: "up" top: "big" power_param { scale: 0.000001 } }
    """
    net.write_text(large.replace('layer { name: "ip"', blow + 'layer { name: "ip"'))
    found = document(capsys, str(net), "--precision", "fp16")["precision"]
    assert found["layers"][0]["layer"] == "blow"
    assert found["layers"][0]["overflow"] > 0
    assert found["layers"][0]["gradient"] is None
    assert found["keep_fp32"][0] == "blow"
    assert found["enough"]
    assert found["with_keep"]["gradient"] <= found["tolerance"]
    assert found["all_fp16"]["gradient"] is None
    assert main([str(net), "--precision", "fp16"]) == 0
    assert "keep_fp32: [blow" in capsys.readouterr().out


def test_precision_without_a_sensitive_layer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    net = tmp_path / "net.prototxt"
    net.write_text(NET)
    found = document(capsys, str(net), "--precision", "fp16", "--tolerance", "0.2")["precision"]
    assert found["keep_fp32"] == []
    assert 0 < found["all_fp16"]["gradient"] < 0.2
    assert np.log2(found["loss_scale"]) % 1 == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{net}", "--backends", "tpu"], "no backend"),
        (["{net}", "--backends", ","], "no backend"),
        (["{net}", "--batch", "0"], "--batch is out of range"),
        (["{net}", "--shape", "data"], "is no shape"),
        (["{net}", "--shape", "data=0,1"], "is no shape"),
        (["{net}", "--shape", "nothing=1,2"], "no inputs"),
        (["{net}", "--weights", "nowhere.caffemodel"], "nowhere.caffemodel"),
        (["{net}", "--tolerance", "2"], "--tolerance"),
        (["{net}.missing"], "cannot be read"),
    ],
)
def test_wrong_use(arguments: list[str], says: str, tmp_path: Path) -> None:
    net = tmp_path / "net.prototxt"
    net.write_text(NET)
    with pytest.raises(StallscopeError, match=says):
        main([argument.format(net=net) for argument in arguments])


def test_shapes_of_data_layers_must_be_given_where_the_text_is_silent(tmp_path: Path) -> None:
    net = tmp_path / "net.prototxt"
    data = 'layer { name: "d" type: "Data" top: "data" top: "label" data_param { source: "x" batch_size: 4 } %s }'
    rest = NET[NET.index('layer { name: "conv"') :]
    net.write_text(data % "" + rest)
    with pytest.raises(StallscopeError, match=r"how large data is\n.*--shape data=N,C,H,W"):
        main([str(net)])
    net.write_text(data % "transform_param { crop_size: 12 force_color: true }" + rest)
    assert main([str(net)]) == 0


def test_precision_of_a_net_without_a_loss(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A deploy net has parameters and no backward pass: its outputs are compared."""
    net = tmp_path / "deploy.prototxt"
    net.write_text("""input: "data" input_shape { dim: 2 dim: 3 dim: 6 dim: 6 }
    layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
      convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
    layer { name: "prob" type: "Softmax" bottom: "conv" top: "prob" }""")
    found = document(capsys, str(net), "--precision", "fp16")["precision"]
    assert 0 < found["all_fp16"]["loss"] < 1e-2
    assert found["all_fp16"]["gradient"] == 0


SPOILT = """layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 4 dim: 6 } } }
layer { name: "l" type: "Input" top: "l" input_param { shape { dim: 4 } } }
layer { name: "a" type: "InnerProduct" bottom: "x" top: "a"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "a" top: "r" }
layer { name: "b" type: "InnerProduct" bottom: "r" top: "b"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "b" bottom: "l" top: "loss" }"""


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layer", ["a", "b"])
def test_weights_that_are_not_finite_are_no_bug_of_a_layer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, layer: str, value: float
) -> None:
    """A snapshot of a run that diverged: layers compute what they are given, and the first to be given it is named."""
    net, weights = tmp_path / "net.prototxt", tmp_path / "w.caffemodel"
    net.write_text(SPOILT)
    made = Net(SPOILT, "TRAIN", seed=1)
    made.params[layer][0].data[0, 0] = value
    made.save(weights)
    found = document(capsys, str(net), "--weights", str(weights), "--backends", "numpy")
    assert found["verdict"] == "rounding"
    assert found["not_finite"]["layer"] == layer
    assert main([str(net), "--weights", str(weights), "--backends", "numpy"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Layer '{layer}' is the first with NaN or infinity" in text
    assert "nan%" not in text
    with pytest.raises(StallscopeError, match="in float32 already"):
        main([str(net), "--weights", str(weights), "--precision", "fp16"])


def test_a_wrong_value_beside_nan_is_still_a_bug(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = InnerProduct.forward

    def wrong(self: Any, bottoms: Any, tops: Any) -> None:
        forward(self, bottoms, tops)
        if self.context.compiled and self.name == "a":
            tops[0][:, 1] *= np.float32(1.01)

    monkeypatch.setattr(InnerProduct, "forward", wrong)
    net, weights = tmp_path / "net.prototxt", tmp_path / "w.caffemodel"
    net.write_text(SPOILT)
    made = Net(SPOILT, "TRAIN", seed=1)
    made.params["a"][0].data[0, 0] = np.nan
    made.save(weights)
    found = document(capsys, str(net), "--weights", str(weights), "--backends", "numpy", code=1)
    assert found["first"]["numpy"]["layer"] == "a"
