"""After warming up, a LeNet step compiles nothing."""

import subprocess
import sys
from pathlib import Path

import numpy as np

import gpu
from gpu.backend import select_backend
from gpu.fingerprint import fingerprint_params
from gpu.layers import kernels, pooling_kernels, row_kernels
from gpu.warm import warm_up
from profiler import hashing, objectcode
from profiler.jit import Kernel

EXAMPLES = Path(__file__).parents[2] / "examples"


def signatures() -> dict[str, int]:
    """Number of compiled forms of each kernel."""
    found = {**vars(kernels), **vars(pooling_kernels), **vars(row_kernels), **vars(hashing)}
    return {name: k.signatures for name, k in found.items() if isinstance(k, Kernel) and k.loaded}


def test_every_kernel_of_a_layer_is_called() -> None:
    warm_up(select_backend("numpy"))
    for module in (pooling_kernels, row_kernels):
        own = {name: each for name, each in vars(module).items() if isinstance(each, Kernel) and name[0] != "_"}
        assert [name for name, each in own.items() if not each.loaded] == []


def test_a_process_that_finds_them_compiled_needs_no_numba() -> None:
    warm_up(select_backend("numpy"))  # compiled by now
    code = "import sys; from gpu.backend import select_backend; from gpu.warm import warm_up"
    code += "; warm_up(select_backend('numpy')); print('numba' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    assert found.stdout == f"{not objectcode.usable()}\n"


def test_a_training_step_finds_its_kernels_compiled() -> None:
    backend = select_backend("numpy")
    warm_up(backend)
    before = signatures()
    assert len(before) >= 8, before
    shapes = {"data": (4, 1, 24, 24), "label": (4,)}
    solver = gpu.Solver(
        str(EXAMPLES / "lenet_solver.prototxt"),
        net=str(EXAMPLES / "lenet_train_test.prototxt"),
        backend=backend,
        input_shapes=shapes,
        test_input_shapes=shapes,
        seed=1,
    )
    rng = np.random.default_rng(0)
    solver.step_on({"data": rng.random((4, 1, 24, 24), np.float32), "label": np.arange(4, dtype=np.int32)})
    fingerprint_params(solver.net)
    assert signatures() == before
