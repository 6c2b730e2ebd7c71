"""NVIDIA GPUs through NVML, where there are any; loaded at first use, and never a reason to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from profiler.osread import Missing

_lock = threading.Lock()
_state: list[Any] = []


def _nvml() -> Any:
    """The initialised module ``pynvml``, or Missing."""
    with _lock:
        if not _state:
            _state.append(_load())
        return _state[0]


def _load() -> Any:
    try:
        import pynvml
    except ImportError as error:
        return Missing(f"nvidia-ml-py is not installed ({error})")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Missing(f"no NVIDIA driver ({error})")
    return pynvml


def describe() -> list[dict[str, Any]] | Missing:
    """Name, memory (bytes), driver and CUDA version of each GPU."""
    nvml = _nvml()
    if isinstance(nvml, Missing):
        return nvml
    try:
        driver, cuda = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion()
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found.append(
                {
                    "index": index, "name": nvml.nvmlDeviceGetName(handle), "uuid": nvml.nvmlDeviceGetUUID(handle),
                    "memory": int(nvml.nvmlDeviceGetMemoryInfo(handle).total), "driver": driver,
                    "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
                }
            )  # fmt: skip
        return found
    except nvml.NVMLError as error:
        return Missing(f"NVML: {error}")


def sample() -> dict[str, float] | Missing:
    """One reading of each GPU: ``gpu<i>.<metric>`` to value. A metric that a device does not offer is left out.

    ``busy_share`` is NVML's utilisation: the share of time in which at least one kernel was running, not how much of
    the device it used.
    """
    nvml = _nvml()
    if isinstance(nvml, Missing):
        return nvml
    values: dict[str, float] = {}
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            readings: dict[str, Callable[[Any], float]] = {
                "busy_share": lambda device: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
                "memory_used": lambda device: nvml.nvmlDeviceGetMemoryInfo(device).used,
                "power_w": lambda device: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
                "sm_clock_mhz": lambda device: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
                "temperature_c": lambda device: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
            }
            for metric, read in readings.items():
                try:
                    values[f"gpu{index}.{metric}"] = float(read(handle))
                except nvml.NVMLError_NotSupported:
                    continue
    except nvml.NVMLError as error:
        return Missing(f"NVML: {error}")
    return values
