"""cuDNN's plans are chosen by rule, recorded by name, and done without where there is none; with a stand-in."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from gpu import cudnn, net
from gpu.backend import Backend
from gpu.cudnn import BARRED, IM2COL, PASSES, ConvolutionShape, Cudnn, NoPlanError
from tests.gpu.fake_cudnn import FakeCudnn, FakePlan, Graph
from tests.gpu.test_layers import CASES, check_as_caffe, load

CUPY = types.SimpleNamespace(cuda=types.SimpleNamespace(get_current_stream=lambda: types.SimpleNamespace(ptr=7)))
SHAPE = ConvolutionShape((2, 3, 5, 5), (4, 3, 3, 3), (2, 4, 5, 5), (1, 1), (1, 1), (1, 1))
OFFERED = [
    FakePlan("fastest, by TF32", notes=("TENSOR_CORE", "DOWN_CONVERT_INPUTS")),
    FakePlan("with atomics", notes=("NONDETERMINISTIC",)),
    FakePlan("broken", problem="CUDNN_STATUS_NOT_SUPPORTED"),
    FakePlan("roomy", workspace=1 << 40),
    FakePlan("first that is allowed", workspace=4096),
    FakePlan("second that is allowed"),
]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCudnn:
    monkeypatch.setattr(FakeCudnn, "plans", {direction: list(OFFERED) for direction in PASSES})
    monkeypatch.setattr(FakeCudnn, "built", [])
    monkeypatch.setattr(FakeCudnn, "executed", [])
    return FakeCudnn()


def test_the_first_allowed_plan_in_the_order_of_the_heuristics(fake: FakeCudnn) -> None:
    opened = Cudnn(fake, CUPY)
    for direction in PASSES:
        found = opened.convolution(direction, SHAPE)
        assert (found.name, found.workspace, found.index) == ("first that is allowed", 4096, 4)
        assert opened.convolution(direction, SHAPE) is found
    assert FakeCudnn.executed == []  # nothing was tried out
    assert "second that is allowed" not in FakeCudnn.built
    assert fake.streams == [7]
    assert Cudnn(fake, CUPY, deterministic=False).convolution("data", SHAPE).name == "with atomics"
    assert Cudnn(fake, CUPY, limit=1 << 41).convolution("data", SHAPE).name == "roomy"


def test_plans_are_listed_with_their_notes(fake: FakeCudnn) -> None:
    opened = Cudnn(fake, CUPY)
    opened.convolution("forward", SHAPE)
    listed = opened.candidates("forward", SHAPE)
    assert [entry.name for entry in listed] == [plan.name for plan in OFFERED]
    assert [entry.allowed for entry in listed] == [False, False, False, False, True, True]
    assert [entry.chosen for entry in listed] == [False, False, False, False, True, False]
    assert [entry.deterministic for entry in listed] == [True, False, True, True, True, True]
    assert set(listed[0].notes) == {"TENSOR_CORE", "DOWN_CONVERT_INPUTS"}
    assert listed[2].problem == "CUDNN_STATUS_NOT_SUPPORTED"
    assert [entry.workspace for entry in listed] == [0, 0, -1, 1 << 40, 4096, 0]


def test_without_an_allowed_plan_the_reason_is_kept(fake: FakeCudnn) -> None:
    FakeCudnn.plans["data"] = OFFERED[:2]
    FakeCudnn.plans["weights"] = []
    opened = Cudnn(fake, CUPY)
    with pytest.raises(NoPlanError, match="no plan that is allowed") as caught:
        opened.convolution("data", SHAPE)
    assert "NONDETERMINISTIC" in str(caught.value.expected)
    assert "Deselecting" in str(caught.value.found)
    with pytest.raises(NoPlanError, match="No valid engine configs"):
        opened.convolution("weights", SHAPE)
    again = caught.value
    with pytest.raises(NoPlanError) as second:
        opened.convolution("data", SHAPE)
    assert second.value is again


# ---- layers


@pytest.fixture
def in_use(monkeypatch: pytest.MonkeyPatch, fake: FakeCudnn) -> Cudnn:
    opened = Cudnn(fake, CUPY)
    monkeypatch.setattr(net, "open_cudnn", lambda backend: opened)
    return opened


CONVOLUTIONS = [case for case in CASES if case.startswith("conv_")]


@pytest.mark.parametrize("offered", [PASSES, ("forward",), ("data",), ("weights",), ()])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_as_caffe(in_use: Cudnn, case: str, offered: tuple[str, ...]) -> None:
    for direction in set(PASSES) - set(offered):
        FakeCudnn.plans[direction] = []
    if case == "conv_group2":  # the stand-in knows no groups
        FakeCudnn.plans = {direction: [] for direction in PASSES}
    one_layer, golden = load(case, "portable")
    check_as_caffe(case, one_layer, golden)
    if case in ("conv_group2", "conv_depthwise"):
        assert not FakeCudnn.executed
    else:
        bottoms = len(one_layer.layers[-1].spec.bottom)
        passes = [direction for direction in offered if not (direction == "weights" and bottoms > 1)]
        assert len(FakeCudnn.executed) == len(passes) * bottoms
        recorded = cudnn.algorithms(one_layer)["L"]
        for direction in PASSES:
            wanted = "cuDNN first that is allowed" if direction in passes else IM2COL
            assert recorded[direction].startswith(wanted)


def test_a_layer_served_whole_unrolls_nothing(in_use: Cudnn) -> None:
    whole, _ = load("conv_3x3", "portable")
    FakeCudnn.plans["weights"] = []
    in_use._found.clear()
    part, _ = load("conv_3x3", "portable")
    assert whole.layers[-1].context.scratch.count == 4096 // 4 + 1
    assert part.layers[-1].context.scratch.count > whole.layers[-1].context.scratch.count


def test_a_net_lists_the_plans_of_its_convolutions(in_use: Cudnn) -> None:
    FakeCudnn.plans["data"] = []
    listed = cudnn.candidates(load("conv_3x3", "portable")[0])
    assert [entry.direction for entry in listed["L"]] == ["forward"] * 6 + ["weights"] * 6
    assert [entry.name for entry in listed["L"] if entry.chosen] == ["first that is allowed"] * 2
    assert cudnn.candidates(load("ip", "portable")[0]) == {}
    in_use._found.clear()
    assert cudnn.candidates(load("conv_depthwise", "portable")[0]) == {}


def test_every_plan_is_tried_by_name(in_use: Cudnn) -> None:
    from gpu.algorithms import try_algorithms

    FakeCudnn.plans = {direction: [OFFERED[1], OFFERED[2], *OFFERED[4:]] for direction in PASSES}
    rows = list(try_algorithms(load("conv_3x3", "portable")[0], 2, 0))
    (own,) = (row for row in rows if row.chosen)
    assert own.algorithm == "; ".join(f"{direction} cuDNN first that is allowed" for direction in PASSES)
    for direction in PASSES:
        tried = [row.algorithm for row in rows if row.algorithm.startswith(f"{direction} ") and row is not own]
        names = ("with atomics (NONDETERMINISTIC)", "first that is allowed", "second that is allowed")
        assert tried == [f"{direction} cuDNN {name}" for name in names]
    assert any(row.algorithm.startswith("im2col") for row in rows)
    assert all(row.identical and row.relative < 1e-5 for row in rows)


def test_why_not_is_recorded() -> None:
    for backend, reason in ((Backend("portable", np, "test"), "backend portable"),):
        built = net.Net(str(load("conv_3x3", "portable")[1]["prototxt"]), "TRAIN", backend=backend)
        assert cudnn.algorithms(built)["L"] == dict.fromkeys(PASSES, f"{IM2COL}: {reason}")
    assert cudnn.algorithms(load("ip", "portable")[0]) == {}


# ---- opening


@pytest.fixture
def _nothing_opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cudnn, "_opened", {})
    return


@pytest.mark.usefixtures("_nothing_opened")
def test_opening_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = CUPY
    assert cudnn.open_cudnn(Backend("numpy", np, "test")) == "backend numpy"
    assert cudnn.open_cudnn(Backend("cupy", device, "test", cudnn="off")) == "device.cudnn: off"
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert cudnn.open_cudnn(Backend("cupy", device, "test")) == "nvidia-cudnn-frontend is not installed"


@pytest.mark.usefixtures("_nothing_opened")
def test_a_missing_library_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch, fake: FakeCudnn) -> None:
    device: Any = CUPY

    def broken() -> Any:
        raise RuntimeError("Unable to find symbol\n cudnnCreate")

    monkeypatch.setattr(fake, "create_handle", broken, raising=False)
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    found = cudnn.open_cudnn(Backend("cupy", device, "test"))
    assert found == "cuDNN cannot be used: Unable to find symbol cudnnCreate"


@pytest.mark.usefixtures("_nothing_opened")
def test_determinism_decides_what_is_barred(monkeypatch: pytest.MonkeyPatch, fake: FakeCudnn) -> None:
    device: Any = CUPY
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    strict = cudnn.open_cudnn(Backend("cupy", device, "test"))
    loose = cudnn.open_cudnn(Backend("cupy", device, "test", deterministic=False))
    assert isinstance(strict, Cudnn)
    assert isinstance(loose, Cudnn)
    assert cudnn.open_cudnn(Backend("cupy", device, "test")) is strict
    assert set(strict.barred) - set(loose.barred) == {"NONDETERMINISTIC"}
    assert "91400" in strict.version


def test_the_stand_in_has_the_names_of_the_wheel() -> None:
    """pip install --no-deps nvidia-cudnn-frontend (91 MB) is enough for this; cuDNN itself and a GPU are not needed."""
    real = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed", exc_type=ImportError)
    for name in (*BARRED, "NONDETERMINISTIC"):
        assert hasattr(real.numerical_note, name)
    for owner, names in (("heur_mode", ("A", "FALLBACK")), ("data_type", ("FLOAT",))):
        assert all(hasattr(getattr(real, owner), name) for name in names)
    for name in ("create_handle", "set_stream", "backend_version", "cudnnGraphNotSupportedError", "__version__"):
        assert hasattr(real, name)
    for name, method in vars(Graph).items():
        if name.startswith("_") and name != "__init__":
            continue
        theirs = inspect.signature(getattr(real.pygraph, name)).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in theirs):
            continue
        ours = set(inspect.signature(method).parameters)
        assert ours <= {parameter.name for parameter in theirs}, name
