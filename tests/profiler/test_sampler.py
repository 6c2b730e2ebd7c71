"""Sampling of host, processes and GPUs, and the description of the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from profiler import clock, gpus, osread
from profiler.errors import StallscopeError, UsageError
from profiler.osread import Missing
from profiler.sampler import HOST, Sampler, descendants, environment
from profiler.store import load_run

ROOT = Path(__file__).parents[2]


def samples(folder: Path) -> list[dict[str, object]]:
    (folder / "events").mkdir(exist_ok=True)
    return load_run(folder).samples.to_pylist()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited a minute"
        time.sleep(0.02)


def test_host_and_processes_are_sampled(tmp_path: Path) -> None:
    busy = subprocess.Popen([sys.executable, "-c", "import time\nwhile time.process_time() < 60: pass"])
    try:
        with Sampler(tmp_path, 20) as sampler:
            wait_until(lambda: (busy.pid, "cpu_cores") in sampler._last and sampler.overhead_ns > 0)
            time.sleep(1.0)
    finally:
        busy.kill()
        busy.wait()
    rows = samples(tmp_path)
    by_metric = {(row["pid"], row["metric"]): row["value"] for row in rows}
    assert 0 < by_metric[busy.pid, "cpu_cores"] < os.cpu_count() + 1  # type: ignore[operator]
    assert by_metric[busy.pid, "rss"] > 1 << 20
    assert by_metric[os.getpid(), "threads"] >= 2
    assert 0 <= by_metric[HOST, "cpu_share"] <= 1
    assert by_metric[HOST, "memory_available"] > 0
    times = [row["t_ns"] for row in rows if row["metric"] == "cpu_share"]
    assert times == sorted(times)
    assert len(times) >= 3
    for reading, metric in ((osread.pressure("cpu"), "psi_cpu_some"), (osread.cgroup_memory(), "cgroup_memory_used")):
        missing = isinstance(reading, Missing)
        assert ((HOST, metric) in by_metric) is not missing
        assert any(metric.startswith(problem) for problem in sampler.problems) is missing


def test_a_process_that_ends_is_no_error_and_a_failing_list_is_a_problem(tmp_path: Path) -> None:
    calls = []

    def pids() -> list[int]:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("driver gone")
        return [os.getpid(), 2**22 + 1]

    with Sampler(tmp_path, 50, pids) as sampler:
        wait_until(lambda: len(calls) >= 3)
    assert sampler.problems["pids"] == "RuntimeError: driver gone"
    assert {row["pid"] for row in samples(tmp_path)} == {HOST, os.getpid()}


def test_stop_twice_from_inside_and_before_start(tmp_path: Path) -> None:
    Sampler(tmp_path / "never", 10).stop()
    assert not (tmp_path / "never").exists()
    stopped = threading.Event()

    def pids() -> list[int]:
        sampler.stop()
        stopped.set()
        return []

    sampler = Sampler(tmp_path, 50, pids)
    sampler.start()
    sampler.start()
    assert stopped.wait(60)
    sampler.stop()
    sampler.stop()
    assert sampler._thread is not None
    assert not sampler._thread.is_alive()
    assert len(list((tmp_path / "samples").iterdir())) == 1


def test_stop_is_bounded_when_a_reading_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("profiler.sampler.STOP_S", 0.05)
    hanging, go_on = threading.Event(), threading.Event()

    def pids() -> list[int]:
        hanging.set()
        go_on.wait()
        return []

    sampler = Sampler(tmp_path, 50, pids).start()
    assert hanging.wait(60)
    sampler.stop()  # returns although the thread cannot
    assert sampler._thread is not None
    assert sampler._thread.is_alive()
    go_on.set()
    sampler._thread.join(60)


def test_a_process_that_forgets_to_stop_ends_all_the_same_and_keeps_its_samples(tmp_path: Path) -> None:
    code = "import sys, time; from profiler.sampler import Sampler; Sampler(sys.argv[1], 50).start(); time.sleep(0.2)"
    child = subprocess.run(
        [sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert (child.returncode, child.stderr) == (0, "")
    assert samples(tmp_path)
    assert not [text for text in load_run(tmp_path).problems if "samples/" in text]


def test_descendants_include_grandchildren() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: len(descendants()) >= 3)
        found = descendants()
        assert found[0] == os.getpid()
        assert child.pid in found
    finally:
        grandchildren = [pid for pid in descendants()[1:] if pid != child.pid]
        child.kill()
        child.wait()
        for pid in grandchildren:
            os.kill(pid, 9)


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sampling rate"):
        Sampler(tmp_path, 0)
    (tmp_path / "file").touch()
    with pytest.raises(StallscopeError, match="cannot write"):
        Sampler(tmp_path / "file", 1).start()


class FakeNvml(SimpleNamespace):
    """A driver with one GPU that does not report its power."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    nvmlSystemGetDriverVersion = staticmethod(lambda: "580.1")
    nvmlSystemGetCudaDriverVersion = staticmethod(lambda: 13010)
    nvmlDeviceGetCount = staticmethod(lambda: 1)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
    nvmlDeviceGetName = staticmethod(lambda _: "H200")
    nvmlDeviceGetUUID = staticmethod(lambda _: "GPU-1")
    nvmlDeviceGetMemoryInfo = staticmethod(lambda _: SimpleNamespace(total=1 << 37, used=1 << 30))
    nvmlDeviceGetUtilizationRates = staticmethod(lambda _: SimpleNamespace(gpu=50))
    nvmlDeviceGetClockInfo = staticmethod(lambda *_: 1980)
    nvmlDeviceGetTemperature = staticmethod(lambda *_: 40)

    @staticmethod
    def nvmlDeviceGetPowerUsage(_: object) -> int:
        raise FakeNvml.NVMLError_NotSupported


def test_gpus_are_read_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_state", [FakeNvml()])
    assert gpus.describe() == [
        {"index": 0, "name": "H200", "uuid": "GPU-1", "memory": 1 << 37, "driver": "580.1", "cuda": "13.1"}
    ]
    assert gpus.sample() == {
        "gpu0.busy_share": 0.5, "gpu0.memory_used": 1 << 30, "gpu0.sm_clock_mhz": 1980, "gpu0.temperature_c": 40,
    }  # fmt: skip


def test_without_a_gpu_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_state", [])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reading = gpus.sample()
    assert isinstance(reading, Missing)
    assert "nvidia-ml-py is not installed" in reading.reason
    assert gpus.describe() == reading


def test_the_environment_is_plain_data_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-write-me")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    document = environment()
    text = json.dumps(document, allow_nan=False)
    assert "do-not-write-me" not in text
    assert document["variables"]["OMP_NUM_THREADS"] == "3"
    assert document["packages"]["numpy"]
    assert document["python"]["version"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert document["cpu"]["usable"] >= 1
    assert document["platform"]["boot_id"] == osread.boot_id()
    assert all(pool["num_threads"] >= 1 for pool in document["blas"])
    assert isinstance(document["gpus"], list) or document["gpus"]["missing"]


def test_clocks_of_one_boot_are_one_and_others_need_round_trips() -> None:
    here, there = {"boot_id": "a", "host": "h1"}, {"boot_id": "b", "host": "h2"}
    assert clock.between(here, dict(here)) == clock.Offset(0, 0)
    unknown = clock.between(here, there)
    assert isinstance(unknown, Missing)
    assert "h1 and h2" in unknown.reason
    true_offset = 1_000_000
    trips = [(100, 100 + out - true_offset, 100 + out + back) for out, back in ((50, 950), (30, 10), (400, 20))]
    found = clock.between(here, there, trips)
    assert isinstance(found, clock.Offset)
    assert found.error_ns == 20
    assert abs(found.offset_ns - true_offset) <= found.error_ns
