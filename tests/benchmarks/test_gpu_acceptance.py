"""The acceptance runs unattended, goes on after a failing part, and says so; on NumPy, with a little of everything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_acceptance, gpu_parts
from benchmarks.gpu_nets import Amount, large_ops, op_net
from benchmarks.machine import accelerator
from gpu.backend import Backend
from gpu.layers.pooling import Pooling
from profiler.errors import UsageError

ROOT = Path(__file__).parents[2]
LITTLE = Amount(repeats=2, steps=6, scale=0.02, cases=5)
NUMPY = Backend("numpy", np, "test")


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.long) if part in ("ceilings", "determinism") else part
        for part in sorted(set(gpu_parts.PARTS) - {"solvers"})
    ],
)
def test_each_part_on_numpy(part: str) -> None:
    found = gpu_parts.PARTS[part](NUMPY, LITTLE)
    assert found["ok"], found
    json.dumps(found)


def test_a_layer_with_other_numbers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right, golden = gpu_parts.once, ["pool_max_k2s2", "relu"]

    def wrong(net: Any, values: Any) -> Any:
        out = {key: array.copy() for key, array in right(net, values).items()}
        if net.backend is not NUMPY and "Pooling" in {layer.type for layer in net.layers}:
            out["din_x"][..., 0] += 1e-3
        return out

    monkeypatch.setattr(gpu_parts, "once", wrong)
    monkeypatch.setattr(gpu_parts, "cases", lambda amount: golden)
    monkeypatch.setattr(gpu_parts, "HOST", NUMPY)
    found = gpu_parts.parity(Backend("portable", np, "test"), LITTLE)
    assert not found["ok"]
    assert [name for name, row in found["layers"].items() if not row["ok"]] == ["pool_max_k2s2"]
    assert "pool_max_k2s2" in gpu_acceptance.verdict(found)


def test_one_bit_in_a_repeat_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    backward, calls = Pooling.backward, []

    def drifting(self: Any, *arrays: Any) -> None:
        backward(self, *arrays)
        calls.append(1)
        if len(calls) == 2:
            arrays[3][0].reshape(-1).view(np.uint32)[5] ^= 1

    monkeypatch.setattr(Pooling, "backward", drifting)
    monkeypatch.setattr(gpu_parts, "cases", lambda amount: [])
    found = gpu_parts.determinism(NUMPY, LITTLE)
    assert [name for name, row in found["operations"].items() if not row["ok"]] == ["large pooling MAX"]
    assert found["operations"]["large pooling MAX"]["different"] == 2


def test_an_error_in_a_layer_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("illegal address")

    monkeypatch.setattr(Pooling, "forward", broken)
    monkeypatch.setattr(gpu_parts, "cases", lambda amount: ["pool_max_k2s2", "relu"])
    found = gpu_parts.parity(NUMPY, LITTLE)
    assert found["layers"]["pool_max_k2s2"] == {"ok": False, "error": "RuntimeError: illegal address"}
    assert found["layers"]["relu"]["ok"]


def test_every_large_layer_has_gradients() -> None:
    for name, layer, inputs in large_ops(LITTLE):
        net, values = op_net(layer, inputs, NUMPY)
        out = gpu_parts.once(net, values)
        assert any(key.startswith(("din", "dp")) for key in out), name


def test_the_command_goes_on_after_a_failing_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = iter(
        [
            {"ok": True, "backend": "numpy", "machine": {"cores": 2}},
            {"ok": False, "error": "exit status -11: \nSegmentation fault"},
            {"ok": True, "skipped": "backend numpy"},
            {"ok": False, "operations": {"conv": {"ok": False}, "relu": {"ok": True}}},
        ]
    )
    monkeypatch.setattr(gpu_acceptance, "run_part", lambda name, arguments: next(results))
    out = tmp_path / "out.json"
    options = ["--backend", "numpy", "--quick", "--parts", "parity,plans,determinism", "--json", str(out)]
    assert gpu_acceptance.main(options) == 1
    document = json.loads(out.read_text())
    assert [part["ok"] for part in document["parts"].values()] == [False, True, False]
    assert not document["ok"]
    assert (document["backend"], document["machine"]) == ("numpy", {"cores": 2})
    said = capsys.readouterr().out
    assert "FAILED: Segmentation fault" in said
    assert "skipped: backend numpy" in said
    assert "NOT FINE: conv " in said


def test_parts_are_processes(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.gpu_acceptance", "--backend", "numpy", "--quick", "--json", str(out)]
    done = subprocess.run(
        [*command, "--parts", "plans,overlap"], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert list(document["parts"]) == ["plans", "overlap"]
    assert document["machine"]["cores"] >= 1
    slow = [*command, "--parts", "parity", "--timeout", "0.01"]
    done = subprocess.run(slow, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "not done after 0.01 s" in json.loads(out.read_text())["parts"]["parity"]["error"]


def test_the_first_process_leaves_the_device_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may be set to serve one process at a time: a context of this one would keep every part from it."""

    def touched(*_: Any, **__: Any) -> None:
        raise AssertionError("the device was touched")

    monkeypatch.setattr(gpu_acceptance, "select_backend", touched)
    monkeypatch.setattr(gpu_acceptance, "accelerator", touched)
    options = ["--backend", "numpy", "--quick", "--parts", "plans", "--json", str(tmp_path / "out.json")]
    assert gpu_acceptance.main(options) == 0
    assert json.loads((tmp_path / "out.json").read_text())["backend"] == "numpy"


def test_a_cast_that_rounds_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = gpu_parts.half.encode, []

    def truncating(values: Any, out: Any, counts: Any) -> None:
        whole(values, out, counts)
        calls.append(1)
        if len(calls) == 2:  # the backend's, after the host's
            out.view(np.uint16)[7] ^= 1

    monkeypatch.setattr(gpu_parts.half, "encode", truncating)
    found = gpu_parts.float16(NUMPY, LITTLE)
    assert not found["ok"]
    assert [name for name, row in found["float16"].items() if not row["ok"]] == ["encode"]


def test_without_a_gpu_one_message(tmp_path: Path) -> None:
    from gpu.backend import probe_cupy

    if probe_cupy().module is not None:
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", "benchmarks.gpu_acceptance", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: backend 'cupy'")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.json").exists()


def test_unknown_parts_are_named() -> None:
    with pytest.raises(UsageError, match="--parts"):
        gpu_acceptance.main(["--backend", "numpy", "--parts", "parity,speed"])


def test_a_device_is_described() -> None:
    import types

    properties = {"name": b"H100", "totalGlobalMem": 80 << 30, "multiProcessorCount": 132, "major": 9, "minor": 0}
    runtime = types.SimpleNamespace(
        getDeviceProperties=lambda number: properties, driverGetVersion=lambda: 13000, runtimeGetVersion=lambda: 13010
    )
    cuda = types.SimpleNamespace(runtime=runtime, Device=lambda: types.SimpleNamespace(id=0))
    found = accelerator(types.SimpleNamespace(cuda=cuda, __version__="14.0"))
    assert found is not None
    assert (found["name"], found["memory_gib"], found["compute_capability"]) == ("H100", 80.0, "9.0")
    assert accelerator(np) is None
