"""What the figures of a benchmark depend on besides the code: kept in each JSON of results."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any


def machine(*packages: str) -> dict[str, Any]:
    """The machine and the versions of ``packages``; the load by other work at the start included, no names of hosts."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def accelerator(xp: Any) -> dict[str, Any] | None:
    """The device of an array library of cupy's kind: what it is and what drives it; None for NumPy."""
    if not hasattr(xp, "cuda"):
        return None
    runtime = xp.cuda.runtime
    found = runtime.getDeviceProperties(xp.cuda.Device().id)
    name = found["name"]
    return {
        "name": name.decode() if isinstance(name, bytes) else name,
        "memory_gib": round(found["totalGlobalMem"] / 2**30, 1),
        "multiprocessors": found["multiProcessorCount"],
        "compute_capability": f"{found['major']}.{found['minor']}",
        "driver": runtime.driverGetVersion(),
        "runtime": runtime.runtimeGetVersion(),
        "cupy": xp.__version__,
    }
