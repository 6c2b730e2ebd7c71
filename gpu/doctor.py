"""``python -m gpu.doctor``: what this machine has for a net on a GPU, and whether it works.

Driver, CUDA runtime, the cupy distributions and NVIDIA's packages that are installed, each device with its UUID, and
a kernel that is compiled and run. Exit code 0: a GPU can be used; 1: none can, with the reason.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu.backend import Backend, CupyProbe, cupy_distributions, probe_cupy
from profiler import cli

_USABLE = "a GPU can be used"
_DRIVER = Path("/proc/driver/nvidia/version")


def main(argv: Sequence[str] | None = None) -> int:
    """Say what this machine has for a net on a GPU, and whether it works."""
    cli.Parser(prog="python -m gpu.doctor", description=main.__doc__).parse_args(argv)
    found = findings(probe_cupy())
    for name, value in found:
        sys.stdout.write(f"{name:<10}{value}\n")
    return cli.EXIT_OK if found[-1][1] == _USABLE else cli.EXIT_NOT_FINE


def findings(probe: CupyProbe) -> list[tuple[str, str]]:
    """What there is, as pairs of a short name and text, the verdict last."""
    found = [("cupy", ", ".join(cupy_distributions()) or "not installed"), ("driver", _driver())]
    packages = sorted(
        f"{name} {one.version}"
        for one in metadata.distributions()
        if (name := (one.metadata["Name"] or "").lower()).startswith(("nvidia-c", "nvidia-n"))
    )
    found.append(("NVIDIA's", ", ".join(packages) or "no package of NVIDIA's libraries is installed"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found.append(("visible", "all devices" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r}"))
    cupy = probe.module
    if cupy is None:
        return [*found, ("verdict", f"no GPU can be used: {probe.problem}" + (f"; {probe.hint}" if probe.hint else ""))]
    runtime = cupy.cuda.runtime
    driver, own = _version(runtime.driverGetVersion()), _version(runtime.runtimeGetVersion())
    found.append(("CUDA", f"driver {driver}, runtime {own}"))
    found += [("device", text_of(device(cupy, index))) for index in range(runtime.getDeviceCount())]
    found.append(("kernel", "compiled and run, and a product: their numbers are right"))  # else it is no module
    return [*found, ("verdict", _USABLE)]


def device(cupy: Any, index: int) -> dict[str, Any]:
    """Index among the visible devices, name, UUID, PCI bus and memory (bytes) of a GPU; what is not told is absent."""
    try:
        told = cupy.cuda.runtime.getDeviceProperties(index)
    except Exception as error:  # CUDARuntimeError, which cannot be named without cupy
        return {"index": index, "problem": str(error)}
    found: dict[str, Any] = {"index": index}
    if told.get("name"):
        found["name"] = told["name"].decode() if isinstance(told["name"], bytes) else str(told["name"])
    if isinstance(told.get("uuid"), bytes) and len(told["uuid"]) == 16:
        found["uuid"] = f"GPU-{uuid.UUID(bytes=told['uuid'])}"
    if "pciBusID" in told:
        found["pci"] = f"{told.get('pciDomainID', 0):04x}:{told['pciBusID']:02x}:{told.get('pciDeviceID', 0):02x}.0"
    if "totalGlobalMem" in told:
        found["memory"] = int(told["totalGlobalMem"])
    return found


def about(backend: Backend) -> dict[str, Any]:
    """Of a chosen backend, for the manifest: name, reason, deterministic, and which GPU it is (None without one)."""
    one = None
    if backend.name == "cupy":
        one = device(backend.xp, int(backend.xp.cuda.runtime.getDevice()))
        one["visible"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {
        "name": backend.name, "reason": backend.reason, "deterministic": backend.deterministic, "device": one,
    }  # fmt: skip


def text_of(found: dict[str, Any]) -> str:
    """What :func:`device` found, in a line."""
    memory = f"{found['memory'] / 2**30:.0f} GiB" if "memory" in found else None
    parts = [found.get(name) for name in ("name", "uuid", "pci", "problem")]
    return f"{found['index']}: " + ", ".join(str(part) for part in (*parts, memory) if part)


def _driver() -> str:
    try:
        return _DRIVER.read_text(encoding="utf-8", errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return f"none that {_DRIVER} tells of"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


if __name__ == "__main__":
    cli.run(main)
