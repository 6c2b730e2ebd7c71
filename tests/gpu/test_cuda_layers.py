"""The layers as they run on a device: the same calls, with the CUDA kernels built for the host in place of cupy's."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from gpu.backend import Backend
from gpu.cuda import kernels
from gpu.net import Net
from tests.gpu.host_kernels import COMPILER, HostLauncher
from tests.gpu.test_layers import CASES, check_as_caffe, load

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (g++ or clang++)")
PORTABLE = Backend("portable", np, "test")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> HostLauncher:
    launcher = HostLauncher(2, 3)
    monkeypatch.setattr(kernels, "own_kernels", lambda xp: launcher)
    return launcher


def test_numpy_has_no_cuda_kernels() -> None:
    assert kernels.own_kernels(np) is None


USES = {
    "pool_max": {"max_pool", "max_pool_back"},
    "pool_ave": {"ave_pool", "ave_pool_back"},
    "conv_3x3": {"im2col", "col2im"},
    "conv_depthwise": {"depthwise", "depthwise_back", "depthwise_columns", "sum_rows"},
    "deconv": {"im2col", "col2im"},
    "im2col": {"im2col", "col2im"},
    "lrn_ac": {"lrn_forward", "lrn_backward"},
    "embed": {"sum_picks"},
    "batch_reindex": {"sum_picks"},
}


@pytest.mark.parametrize("case", CASES)
def test_as_caffe(own: HostLauncher, case: str) -> None:
    net, golden = load(case, "portable")
    check_as_caffe(case, net, golden)
    for start, names in USES.items():
        if case.startswith(start) and case != "pool_max_mask":  # it has no gradients
            assert names <= set(own.launched), case


@pytest.mark.parametrize("iteration", [0, 7])
def test_dropout_draws_the_same_masks(monkeypatch: pytest.MonkeyPatch, iteration: int) -> None:
    text = """force_backward: true
    layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 3 dim: 7 } } }
    layer { name: "L" type: "Dropout" bottom: "x" top: "y" dropout_param { dropout_ratio: 0.3 } }"""
    x, dy = np.ones((3, 7), np.float32), np.arange(21, dtype=np.float32).reshape(3, 7)

    def run() -> list[np.ndarray]:
        net = Net(text, "TRAIN", backend=PORTABLE, seed=2**63 + 5)
        net.iteration = iteration
        return [net.forward(x=x)["y"].copy(), net.backward(y=dy)["x"].copy()]

    wanted, launcher = run(), HostLauncher(2, 2)
    monkeypatch.setattr(kernels, "own_kernels", lambda xp: launcher)
    found = run()
    assert launcher.launched == ["dropout_mask"]
    for have, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(have, want)


class Module:
    """cupy.RawModule as far as launches go: what was compiled, and what was launched with which grid."""

    made: ClassVar[list[dict[str, Any]]] = []
    launched: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, **options: Any) -> None:
        self.made.append(options)

    def get_function(self, name: str) -> Any:
        return lambda grid, block, values: self.launched.append((name, grid, block, values))


def test_cupy_compiles_a_file_once_and_launches_whole_blocks() -> None:
    import types

    cupy = types.ModuleType("cupy")
    cupy.RawModule = Module
    launcher = kernels.CupyLauncher(cupy)
    values = np.zeros((300, 2), np.float32)
    for _ in range(2):
        launcher.launch("sum_rows", 300, values, np.zeros(300, np.float32), 2)
    launcher.launch("sum_rows", 0, values, np.zeros(0, np.float32), 2)
    (made,) = Module.made
    assert made["code"] == kernels.source("depthwise")
    assert "--fmad=false" in made["options"]
    assert not any("fast_math" in option for option in made["options"])
    assert [entry[:3] for entry in Module.launched] == [("sum_rows", (2,), (256,))] * 2
    assert [type(value) for value in Module.launched[0][3][2:]] == [np.int32, np.int32]
