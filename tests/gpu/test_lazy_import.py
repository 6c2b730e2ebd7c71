"""What importing the package costs, seen from a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gpu

HEAVY = ("cupy", "h5py", "numba", "ray", "lmdb", "plyvel", "torch", "scipy")


def loaded_after(code: str) -> set[str]:
    """Top-level modules of ``HEAVY`` and of the project that a fresh interpreter holds after ``code``."""
    script = f"{code}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split()) & {*HEAVY, "numpy", "gpu", "pipeline", "datasets", "google"}


def test_importing_the_package_loads_nothing() -> None:
    assert loaded_after("import gpu") == {"gpu"}


@pytest.mark.parametrize("name", ["open_device", "select_backend", "Solver", "Net"])
def test_a_name_loads_what_it_needs_and_never_the_heavy_ones(name: str) -> None:
    assert not loaded_after(f"from gpu import {name}") & set(HEAVY)


def test_a_host_device_needs_no_cupy() -> None:
    code = (
        "import gpu, numpy\nwith gpu.open_device('emulated', step_ms=1) as d:\n d.upload({'x': numpy.ones(3)}).wait()"
    )
    assert not loaded_after(code) & set(HEAVY)


def test_every_public_name_is_there() -> None:
    for name in gpu.__all__:
        assert getattr(gpu, name).__name__ == name
        assert name in dir(gpu)
    with pytest.raises(AttributeError, match="no attribute 'Nett'"):
        _ = gpu.Nett
