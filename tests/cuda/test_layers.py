"""Every golden layer and larger ones on the device: Caffe's and the CPU's numbers, and the same bits at every run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks import gpu_nets, gpu_parts
from gpu.backend import Backend
from gpu.cudnn import IM2COL, PASSES, Cudnn, algorithms, open_cudnn
from gpu.fingerprint import fingerprint_parts
from gpu.net import Net
from tests.gpu import test_layers

pytestmark = pytest.mark.gpu
LITTLE = gpu_nets.Amount(repeats=20, steps=200, scale=0.25)
OPS = list(gpu_nets.large_ops(LITTLE))
CUDNN = pytest.mark.parametrize("library", ["auto", "off"])


@CUDNN
@pytest.mark.parametrize("case", test_layers.CASES)
def test_as_caffe(cuda: Backend, monkeypatch: pytest.MonkeyPatch, case: str, library: str) -> None:
    monkeypatch.setitem(test_layers.BACKENDS, "cuda", dataclasses.replace(cuda, cudnn=library))
    test_layers.check_as_caffe(case, *test_layers.load(case, "cuda"), rounding=gpu_parts.RELATIVE)


@pytest.mark.parametrize("case", gpu_nets.cases(gpu_nets.Amount()))
def test_as_on_the_cpu(cuda: Backend, case: str) -> None:
    golden = gpu_nets.load(case)
    wanted = gpu_nets.once(gpu_nets.build(golden, gpu_parts.HOST), golden)
    found = gpu_nets.once(gpu_nets.build(golden, cuda), golden)
    for key, array in wanted.items():
        assert gpu_parts.relative(cuda.to_numpy(found[key]), array) <= gpu_parts.RELATIVE, key


@CUDNN
@pytest.mark.parametrize(("name", "layer", "inputs"), OPS, ids=[name for name, _, _ in OPS])
def test_large_layers(cuda: Backend, name: str, layer: str, inputs: dict[str, tuple[int, ...]], library: str) -> None:
    backend = dataclasses.replace(cuda, cudnn=library)
    net, values = gpu_nets.op_net(layer, inputs, backend)
    hashes = {fingerprint_parts(*gpu_nets.once(net, values).values(), xp=cuda.xp) for _ in range(LITTLE.repeats)}
    assert len(hashes) == 1
    there, here = gpu_nets.once(net, values), gpu_nets.once(*gpu_nets.op_net(layer, inputs, gpu_parts.HOST))
    for key, array in here.items():
        # Sums over tens of thousands of values in another order.
        assert gpu_parts.relative(cuda.to_numpy(there[key]), array) <= 1e-4, key
    if "Convolution" in layer and "group: 64" not in layer:
        recorded = algorithms(net)["L"]
        assert set(recorded) == set(PASSES)
        wanted = "cuDNN " if isinstance(open_cudnn(backend), Cudnn) else IM2COL
        assert all(text.startswith((wanted, IM2COL)) for text in recorded.values())


def test_a_new_process_gives_the_same_bits(cuda: Backend) -> None:
    """Nothing is chosen by time: not even the first run, which compiles, differs."""
    import subprocess
    import sys

    ask = (
        "from benchmarks.gpu_nets import trajectory; from gpu.backend import select_backend;"
        "print(trajectory('SGD', select_backend('cupy'), 10)[1])"
    )
    runs = [subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout
    assert int(runs[0].stdout) == gpu_nets.trajectory("SGD", cuda, 10)[1]


@pytest.mark.parametrize("part", ["fingerprints", "solvers", "float16", "plans", "memory"])
def test_parts_of_the_acceptance(cuda: Backend, part: str) -> None:
    found = gpu_parts.PARTS[part](cuda, LITTLE)
    assert found["ok"], found


def test_a_pass_allocates_nothing(cuda: Backend) -> None:
    """Counted by cupy's hook on its pool: after the first passes no new memory is taken from the driver."""
    net, values = gpu_nets.op_net(*OPS[0][1:], cuda)
    gpu_nets.once(net, values)
    taken = []

    class Count(cuda.xp.cuda.MemoryHook):  # type: ignore[name-defined, misc]
        name = "count"

        def alloc_preprocess(self, **about: int) -> None:
            taken.append(about["mem_size"])

    with Count():
        for _ in range(5):
            net.forward_only()
            net.backward_only()
    assert taken == []


def test_labels_out_of_range_are_refused_there_too(cuda: Backend) -> None:
    from gpu.layers.loss import LabelOutOfRange

    net = Net(
        """layer { name: "x" type: "Input" top: "x" top: "l" input_param { shape { dim: 2 dim: 3 } shape { dim: 2 } } }
        layer { name: "L" type: "SoftmaxWithLoss" bottom: "x" bottom: "l" top: "loss" }""",
        backend=cuda,
    )
    with pytest.raises(LabelOutOfRange):
        net.forward(x=np.zeros((2, 3), np.float32), l=np.float32([0, 3]))
