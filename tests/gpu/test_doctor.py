"""What the doctor says of machines with and without a GPU; fake modules stand in for cupy (cases F7 and F13)."""

from __future__ import annotations

import subprocess
import sys
import types
import uuid
from typing import Any

import numpy as np
import pytest

from gpu import backend, doctor
from tests.gpu.test_backend import FakeCudaError, fake_cupy, install

__all__ = ["install"]  # a fixture

UUID = uuid.UUID("0d8a5ee2-3c53-4ab0-9c1c-6f1f0f2f7a11")


def gpu() -> types.ModuleType:
    """cupy with two devices, of which the second one is current."""
    module: Any = fake_cupy(2)

    def properties(index: int) -> dict[str, Any]:
        if index == 0:
            raise FakeCudaError("cudaErrorECCUncorrectable")
        return {"name": b"NVIDIA H200", "uuid": UUID.bytes, "pciDomainID": 0, "pciBusID": 0x65, "pciDeviceID": 0,
                "totalGlobalMem": 139 << 30}  # fmt: skip

    runtime = module.cuda.runtime
    runtime.driverGetVersion, runtime.runtimeGetVersion = lambda: 13000, lambda: 12090
    runtime.getDeviceProperties, runtime.getDevice = properties, lambda: 1
    return module


def said(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, list[str]]]:
    code = doctor.main([])
    lines: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        name, _, text = line.partition(" ")
        lines.setdefault(name, []).append(text.strip())
    return code, lines


def test_a_machine_with_gpus(install: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install(gpu())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{UUID},0")
    code, lines = said(capsys)
    assert code == 0
    assert lines["CUDA"] == ["driver 13.0, runtime 12.9"]
    assert lines["device"] == [
        "0: cudaErrorECCUncorrectable", f"1: NVIDIA H200, GPU-{UUID}, 0000:65:00.0, 139 GiB",
    ]  # fmt: skip
    assert lines["visible"] == [f"CUDA_VISIBLE_DEVICES='GPU-{UUID},0'"]
    assert lines["kernel"] == ["compiled and run, and a product: their numbers are right"]
    assert lines["verdict"] == ["a GPU can be used"]


@pytest.mark.parametrize(
    ("found", "distributions", "problem"),
    [
        (gpu(), ["cupy-cuda12x 13.6.0", "cupy-cuda13x 14.0.0"], "2 cupy distributions are installed over each other"),
        (ModuleNotFoundError("No module named 'cupy'", name="cupy"), [], "not installed; in the checkout: pip install"),
        (fake_cupy(0), None, "0 devices"),
        (fake_cupy(arange=lambda n: np.zeros(n)), None, "first kernel gave 5 instead of 15"),
        (fake_cupy(FakeCudaError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")), None, "too old"),
    ],
    ids=["two distributions", "none", "no device", "wrong numbers", "old driver"],
)
def test_a_machine_without(
    install: Any, capsys: pytest.CaptureFixture[str], found: Any, distributions: list[str] | None, problem: str
) -> None:
    install(found, distributions)
    code, lines = said(capsys)
    assert code == 1
    assert problem in lines["verdict"][0]
    assert "device" not in lines


def test_what_a_run_notes_of_its_backend(install: Any) -> None:
    install(gpu())
    about = doctor.about(backend.select_backend("cupy"))
    assert about["name"] == "cupy"
    assert about["device"] == {
        "index": 1, "name": "NVIDIA H200", "uuid": f"GPU-{UUID}", "pci": "0000:65:00.0", "memory": 139 << 30,
        "visible": None,
    }  # fmt: skip
    assert doctor.about(backend.Backend("numpy", np, "because"))["device"] is None


def test_the_command_on_this_machine() -> None:
    done = subprocess.run([sys.executable, "-m", "gpu.doctor"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.splitlines()[-1].startswith("verdict"), done.stdout
    assert not done.stderr
