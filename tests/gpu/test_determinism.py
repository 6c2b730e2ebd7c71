"""Determinism on a CUDA device is arranged before the libraries load, or refused in words; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu import determinism
from profiler.errors import StallscopeError


@pytest.fixture(autouse=True)
def _no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)


def test_variables_are_set_and_kept() -> None:
    environment: dict[str, str] = {}
    determinism.prepare(environment)
    assert environment == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVIDIA_TF32_OVERRIDE": "0",
        "CUPY_TF32": "0",
        "CUPY_ACCELERATORS": "cub",
    }
    determinism.prepare(environment)
    small = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    determinism.prepare(small)
    assert small["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
        ("NVIDIA_TF32_OVERRIDE", "1"),
        ("CUPY_TF32", "1"),
        ("CUPY_ACCELERATORS", "cub,cutensor"),
    ],
)
def test_what_contradicts_is_refused_by_name_and_changes_nothing(name: str, value: str) -> None:
    environment = {name: value}
    with pytest.raises(StallscopeError, match=f"deterministic: true cannot be kept: {name}") as caught:
        determinism.prepare(environment)
    assert environment == {name: value}
    assert caught.value.found == value
    assert "device.deterministic: false" in str(caught.value)


def test_a_cupy_that_was_there_first_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    with pytest.raises(StallscopeError, match="imported before the workspace"):
        determinism.prepare({})
    determinism.prepare({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})


def core(compute: int = 1, accelerators: tuple[int, ...] = (1,)) -> Any:
    """cupy, as far as it is asked. The constants are those of cupy 14."""
    kinds = {"TBD": 0, "DEFAULT": 1, "PEDANTIC": 2, "FP16": 3, "FP32": 4, "FP64": 5, "BF16": 6, "TF32": 7}
    return types.SimpleNamespace(
        _core=types.SimpleNamespace(
            _routines_linalg=types.SimpleNamespace(**{f"COMPUTE_TYPE_{name}": kind for name, kind in kinds.items()}),
            _accelerator=types.SimpleNamespace(ACCELERATOR_CUB=1, ACCELERATOR_CUTENSOR=2),
            get_compute_type=lambda dtype: compute if dtype == np.float32 else 1,
            get_reduction_accelerators=lambda: list(accelerators),
            get_routine_accelerators=lambda: [1],
        )
    )


def test_what_cupy_was_switched_to_is_seen() -> None:
    determinism.verify(core())
    determinism.verify(core(compute=4))
    with pytest.raises(StallscopeError, match="reduced precision") as caught:
        determinism.verify(core(compute=7))
    assert caught.value.found == "TF32"
    with pytest.raises(StallscopeError, match="cuTENSOR"):
        determinism.verify(core(accelerators=(1, 2)))


def test_the_names_asked_of_cupy_are_there() -> None:
    """In a process of its own: an imported cupy would be in the way of other tests."""
    asked = """
import sys
try:
    import cupy
except ImportError:
    sys.exit(77)
from gpu import determinism
determinism.verify(cupy)
"""
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=120)
    if done.returncode == 77:
        pytest.skip("cupy is not installed")
    assert done.returncode == 0, done.stderr


def stream(pointer: int) -> Any:
    return types.SimpleNamespace(ptr=pointer)


def test_compute_stays_on_its_stream() -> None:
    held = determinism.OneStream()
    held.check(stream(0))
    held.check(stream(0))
    with pytest.raises(StallscopeError, match="moved to another stream") as caught:
        held.check(stream(0x50))
    assert caught.value.found == "0x50"


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_variables_are_there_when_cupy_is_first_imported(tmp_path: Path, deterministic: bool) -> None:
    """A module in cupy's place writes down what it finds: a context of a moment later reads the same, or too late."""
    names = list(determinism.VARIABLES)
    (tmp_path / "cupy.py").write_text(f"import os\nfound = {{name: os.environ.get(name) for name in {names}}}\n")
    ask = f"""
import json, sys
from gpu.backend import select_backend
from gpu import determinism
try:
    select_backend("cupy", deterministic={deterministic})
except Exception as error:
    assert "cannot be used" in str(error), error  # the module has no devices
import cupy
print(json.dumps(cupy.found))
"""
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    wanted = {name: variable.value if deterministic else None for name, variable in determinism.VARIABLES.items()}
    assert json.loads(done.stdout) == wanted
