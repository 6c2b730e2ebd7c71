"""Which array library runs the net, and why: NumPy, cupy, or NumPy posing as an accelerator.

This is the one place that imports cupy, and only when somebody asks for it. "Installed" is not "usable": a wheel can
import on a machine without a driver and fail at the first array, so :func:`probe_cupy` goes as far as running one
kernel, and keeps what went wrong so that it can be reported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gpu import determinism
from gpu.threads import set_threads
from profiler.errors import MissingExtraError, StallscopeError, UsageError

NAMES = ("auto", "numpy", "cupy", "emulated")


@dataclass(frozen=True)
class Backend:
    """``name``: numpy, cupy or emulated. ``xp``: the array module. ``reason``: one line saying why this one.

    ``deterministic``: the same bits at every run on one machine. ``cudnn``: auto (where it is installed) or off.
    """

    name: str
    xp: ModuleType
    reason: str
    deterministic: bool = True
    cudnn: str = "auto"

    def to_numpy(self, array: Any) -> np.ndarray:
        """The array on the host; a NumPy array is returned as it is, without a copy."""
        return array if isinstance(array, np.ndarray) else self.xp.asnumpy(array)


@dataclass(frozen=True)
class CupyProbe:
    """What trying cupy gave: ``module`` where it is usable, otherwise the ``problem`` in a few words and the ``error``.

    ``kind``: ok, not_installed, no_libcuda, no_toolkit, no_device, hidden, two_distributions or broken.
    """

    kind: str
    module: ModuleType | None = None
    problem: str = ""
    hint: str = ""
    error: BaseException | None = None


def select_backend(name: str | Backend = "auto", *, deterministic: bool = True, cudnn: str = "auto") -> Backend:
    """The backend called ``name``; ``auto`` takes cupy where it is usable and NumPy where it is not.

    Raises UsageError for an unknown name, MissingExtraError where cupy was asked for and is not installed, and
    StallscopeError where it is installed and cannot be used, or not deterministically (:mod:`gpu.determinism`).
    """
    if isinstance(name, Backend):
        return name
    if name == "numpy":
        return Backend("numpy", np, "asked for by name")
    if name == "emulated":
        return Backend("emulated", np, "asked for by name: NumPy's numbers, an accelerator's timing")
    if name not in NAMES:
        raise UsageError(f"unknown backend {name!r}", expected=" | ".join(NAMES), found=name)
    if deterministic and _cupy_is_there():
        determinism.prepare()
    probe = probe_cupy()
    if probe.module is not None:
        if deterministic:
            determinism.verify(probe.module)
        reason = f"cupy {probe.module.__version__} is usable" if name == "auto" else "asked for by name"
        return Backend("cupy", probe.module, reason, deterministic, cudnn)
    if name == "auto":
        return Backend("numpy", np, f"cupy is not usable: {probe.problem}")
    if probe.kind == "not_installed":
        raise MissingExtraError("cupy", "gpu", "backend 'cupy'") from probe.error
    raise StallscopeError(
        "backend 'cupy' cannot be used on this machine",
        expected="one cupy distribution, a CUDA driver and at least one visible device",
        found=probe.problem,
        hint=probe.hint,
    ) from probe.error


def cupy_distributions() -> list[str]:
    """Name and version of every installed distribution that provides cupy, e.g. ``cupy-cuda13x 14.0.1``."""
    found = set()
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name == "cupy" or name.startswith(("cupy-cuda", "cupy-rocm")):
            found.add(f"{name} {distribution.version}")
    return sorted(found)


def _cupy_is_there() -> bool:
    try:
        return "cupy" in sys.modules or importlib.util.find_spec("cupy") is not None
    except (ImportError, ValueError):
        return True


def probe_cupy() -> CupyProbe:
    """Import cupy, count devices, run one kernel and one product; never raises for what is wrong with the machine."""
    # Reading the names of all that is installed takes a tenth of a second.
    installed = cupy_distributions() if _cupy_is_there() else []
    if len(installed) > 1:
        # Two wheels write into the same folder; which files won decides what fails, so nothing it says can be trusted.
        return CupyProbe(
            "two_distributions",
            problem=f"{len(installed)} cupy distributions are installed over each other: {', '.join(installed)}",
            hint="pip uninstall all of them, then install one",
        )
    try:
        cupy = importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name == "cupy" and not installed:
            hint = "in the checkout: pip install '.[gpu]'"
            return CupyProbe("not_installed", problem="not installed", hint=hint, error=error)
        return _failed(error, "cannot be imported")
    except Exception as error:  # a damaged wheel raises whatever it likes
        return _failed(error, "cannot be imported")
    try:
        devices = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # CUDARuntimeError, which cannot be named without cupy
        return _failed(error, "cannot count devices")
    if devices == 0:
        return _no_device(None)
    try:
        total = int((cupy.arange(5) + 1).sum())
        ones = cupy.ones((3, 3), np.float32)
        product = float(cupy.matmul(ones, ones)[0, 0])
    except Exception as error:
        return _failed(error, "failed its first kernel")
    for what, found, wanted in (("kernel", total, 15), ("product", product, 3)):
        if found != wanted:
            problem = f"first {what} gave {found} instead of {wanted}"
            return CupyProbe("broken", problem=problem, hint="check driver and wheel")
    return CupyProbe("ok", module=cupy)


def _failed(error: Exception, doing: str) -> CupyProbe:
    """Turn what cupy raised into one of the kinds a person can act on."""
    text = " ".join(str(error).split())
    lowered = text.lower()
    if "libcuda.so" in lowered or "nvcuda.dll" in lowered:
        return CupyProbe(
            "no_libcuda", problem=f"libcuda missing (no NVIDIA driver): {text}", hint="install the driver", error=error
        )
    if "insufficientdriver" in lowered or "driver version is insufficient" in lowered:
        # Also what the runtime says where there is no driver at all.
        return CupyProbe(
            "no_libcuda",
            problem=f"no CUDA driver, or one too old for this cupy: {text}",
            hint="install or update the driver, or, in the checkout: pip install '.[gpu12]'",
            error=error,
        )
    if "failure finding" in lowered and ".so" in lowered:
        return CupyProbe(
            "no_toolkit",
            problem=f"a CUDA library is missing: {text[:200]}",
            hint="in the checkout: pip install '.[gpu]', which brings NVIDIA's libraries",
            error=error,
        )
    if "nodevice" in lowered or "no cuda-capable device" in lowered:
        return _no_device(error)
    return CupyProbe(
        "broken", problem=f"{doing}: {type(error).__name__}: {text}", hint="reinstall one cupy wheel", error=error
    )


def _no_device(error: Exception | None) -> CupyProbe:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return CupyProbe(
            "hidden",
            problem=f"every device is hidden by CUDA_VISIBLE_DEVICES={visible!r}",
            hint="unset CUDA_VISIBLE_DEVICES; in a Ray actor ask for num_gpus",
            error=error,
        )
    return CupyProbe("no_device", problem="0 devices", hint="check nvidia-smi", error=error)


@dataclass(frozen=True)
class BlasPool:
    """One BLAS library loaded in this process, for the manifest."""

    name: str
    version: str
    threads: int
    path: str


def blas_threads(threads: int) -> list[BlasPool]:
    """Pin every BLAS pool of this process to ``threads`` threads for good, and report the pools.

    The number decides in which order a product is summed, so it belongs to what makes a run repeatable. Compiled
    kernels use as many threads, though their bits do not depend on it.
    Raises UsageError for a number below 1.
    """
    if threads < 1:
        raise UsageError("BLAS threads must be at least 1", expected=">= 1", found=threads)
    import threadpoolctl

    # The object restores the old limits only when it is used as a context manager: dropping it leaves them in force.
    threadpoolctl.threadpool_limits(limits=threads, user_api="blas")
    set_threads(threads)
    return blas_pools()


def blas_pools() -> list[BlasPool]:
    """The BLAS libraries loaded in this process with the threads each will use now; the one that NumPy brought first.

    Others, like SciPy's, come when something asks for them (a compiler does, where its cache is cold).
    """
    import threadpoolctl

    pools = [
        BlasPool(
            str(pool.get("internal_api")), str(pool.get("version")), int(pool["num_threads"]), str(pool["filepath"])
        )
        for pool in threadpoolctl.threadpool_info()
        if pool.get("user_api") == "blas"
    ]
    return sorted(pools, key=lambda pool: not {"numpy", "numpy.libs"} & set(Path(pool.path).parts))
