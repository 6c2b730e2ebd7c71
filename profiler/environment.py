"""What the numbers of a run depend on besides its configuration: versions, libraries, threads, hardware, limits."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from threadpoolctl import threadpool_info

from profiler import gpus, osread

PACKAGES = (
    "cupy-cuda12x", "cupy-cuda13x", "llvmlite", "lmdb", "numba", "numpy", "nvidia-cudnn-frontend", "nvidia-ml-py",
    "pillow", "plyvel", "protobuf", "psutil", "pyarrow", "pydantic", "ray", "scipy", "simplejpeg", "stallscope",
    "stallscope-profiler", "threadpoolctl", "torch",
)  # fmt: skip
_POOL = ("internal_api", "version", "num_threads", "threading_layer", "architecture")
_VARIABLE = re.compile(
    r"(OMP|OPENBLAS|MKL|BLIS|VECLIB_MAXIMUM|NUMEXPR|NUMBA|GOTO)_(NUM_THREADS|DYNAMIC|PROC_BIND|PLACES|THREADING_LAYER)"
    r"|CUDA_VISIBLE_DEVICES|NVIDIA_TF32_OVERRIDE|CUBLAS_WORKSPACE_CONFIG|OPENBLAS_CORETYPE|MKL_CBWR|PYTHONHASHSEED"
    r"|MALLOC_ARENA_MAX|LD_PRELOAD"
)


def environment() -> dict[str, Any]:
    """The environment of this process as plain data for the manifest.

    Only variables that are known to change numbers or speed are named, so no secrets get in. What cannot be read is
    ``{"missing": reason}``.
    """
    return {
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "platform": {
            "system": platform.platform(), "machine": platform.machine(), "host": socket.gethostname(),
            "libc": " ".join(platform.libc_ver()).strip(), "boot_id": osread.boot_id(),
        },
        "packages": _versions(),
        "blas": [
            {key: pool.get(key) for key in _POOL} for pool in threadpool_info()
        ],
        "cpu": {
            "model": _cpu_model(), "logical": os.cpu_count(), "physical": psutil.cpu_count(logical=False),
            "usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "cgroup_limit": _shown(osread.cgroup_cpus()),
        },
        "memory": {"total": psutil.virtual_memory().total, "cgroup": _shown(osread.cgroup_memory())},
        "gpus": _shown(gpus.describe()),
        "variables": {name: value for name, value in sorted(os.environ.items()) if _VARIABLE.fullmatch(name)},
        "switch_interval_s": sys.getswitchinterval(),
    }  # fmt: skip


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str | dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError as error:
        return platform.processor() or {"missing": str(error)}
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or {"missing": "/proc/cpuinfo names no model"}


def _shown(value: Any) -> Any:
    if isinstance(value, osread.Missing):
        return {"missing": value.reason}
    return vars(value) if hasattr(value, "__dataclass_fields__") else value
