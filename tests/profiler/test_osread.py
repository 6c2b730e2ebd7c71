"""Readings of the operating system: a value or a reason, never an exception, never a made-up zero."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

import pytest

from profiler import osread
from profiler.osread import CgroupMemory, MemoryGroup, Missing, Pressure, SchedFile, Smaps, Throttling


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Stands in for the files of /proc and /sys: path to text; any other path is missing."""
    texts: dict[str, str] = {}

    def read(path: Path) -> str | Missing:
        return texts.get(str(path), Missing(f"{path}: No such file or directory"))

    monkeypatch.setattr(osread, "_read", read)
    return texts


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel keeps no scheduler statistics")
def test_a_threads_account_grows_with_its_work_and_ends_with_it() -> None:
    file = SchedFile()
    before = file.read()
    until = time.thread_time_ns() + 30_000_000
    while time.thread_time_ns() < until:
        pass
    time.sleep(0.001)  # the kernel brings the account up to date when the thread leaves its CPU
    after = file.read()
    assert not isinstance(before, Missing)
    assert not isinstance(after, Missing)
    assert after.cpu_ns - before.cpu_ns > 20_000_000
    assert after.runq_ns >= before.runq_ns >= 0
    file.close()
    file.close()
    other: list[SchedFile] = []
    thread = threading.Thread(target=lambda: other.append(SchedFile()))
    thread.start()
    thread.join()
    deadline = time.monotonic() + 30
    while other[0].read() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert other[0].read() == Missing("the thread has ended")


def test_a_thread_that_is_not_there_has_a_reason() -> None:
    reading = SchedFile(tid=2**22 + 1).read()
    assert isinstance(reading, Missing)
    assert "No such file" in reading.reason
    assert not reading


def test_usage_counts_page_faults_of_this_thread() -> None:
    before = osread.thread_usage()
    block = mmap.mmap(-1, 8 << 20)  # fresh pages; memory that was used before may come without a fault
    for at in range(0, len(block), 4096):
        block[at] = 1
    after = osread.thread_usage()
    assert not isinstance(before, Missing)
    assert not isinstance(after, Missing)
    assert after.minor_faults > before.minor_faults
    assert after.inblock >= before.inblock >= 0


def test_pressure(files: dict[str, str]) -> None:
    files["/proc/pressure/io"] = (
        "some avg10=0.00 avg60=0.00 avg300=0.00 total=1234\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=99\n"
    )
    files["/proc/pressure/cpu"] = "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
    files["/proc/pressure/memory"] = "something else"
    assert osread.pressure("io") == Pressure(1234, 99)
    assert osread.pressure("cpu") == Pressure(7, 0)
    assert osread.pressure("memory") == Missing("/proc/pressure/memory has an unknown form")
    assert osread.pressure("irq") == Missing("/proc/pressure/irq: No such file or directory")


def test_control_group_version_2(files: dict[str, str]) -> None:
    files["/proc/self/cgroup"] = "0::/not/mounted/here\n"
    files["/sys/fs/cgroup/cpu.stat"] = (
        "usage_usec 5\nuser_usec 5\nsystem_usec 0\nnr_periods 20\nnr_throttled 3\nthrottled_usec 4500\n"
    )
    files["/sys/fs/cgroup/memory.current"] = "1048576\n"
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    files["/sys/fs/cgroup/cpu.max"] = "150000 100000\n"
    assert osread.cgroup_throttling() == Throttling(20, 3, 4_500_000)
    assert osread.cgroup_memory() == CgroupMemory(1 << 20, None)
    assert osread.cgroup_cpus() == 1.5
    files["/sys/fs/cgroup/cpu.max"] = "max 100000\n"
    files["/sys/fs/cgroup/memory.max"] = "2097152\n"
    assert osread.cgroup_cpus() is None
    assert osread.cgroup_memory() == CgroupMemory(1 << 20, 2 << 20)
    files["/sys/fs/cgroup/memory.events"] = "low 0\nhigh 0\nmax 7\noom 2\noom_kill 3\noom_group_kill 0\n"
    assert MemoryGroup().oom_kills() == 3


def test_control_group_version_1(files: dict[str, str]) -> None:
    files["/proc/self/cgroup"] = "4:memory:/nowhere/x\n2:cpu,cpuacct:/\n"
    files["/sys/fs/cgroup/cpu/cpu.stat"] = "nr_periods 20\nnr_throttled 3\nthrottled_time 4500\n"
    files["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "50000\n"
    files["/sys/fs/cgroup/cpu/cpu.cfs_period_us"] = "100000\n"
    files["/sys/fs/cgroup/memory/memory.usage_in_bytes"] = "4096\n"
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n"
    assert osread.cgroup_throttling() == Throttling(20, 3, 4500)
    assert osread.cgroup_cpus() == 0.5
    assert osread.cgroup_memory() == CgroupMemory(4096, None)
    files["/sys/fs/cgroup/memory/memory.oom_control"] = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
    assert MemoryGroup().oom_kills() == 2
    files["/sys/fs/cgroup/memory/memory.oom_control"] = "oom_kill_disable 0\nunder_oom 0\n"  # before Linux 4.13
    assert isinstance(MemoryGroup().oom_kills(), Missing)
    files["/proc/vmstat"] = "nr_free_pages 5\noom_kill 4\n"
    assert MemoryGroup().oom_kills() == 4
    files["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "-1\n"
    assert osread.cgroup_cpus() is None


@pytest.mark.parametrize(("cores", "own", "around", "usable"), [
    (64, "max", "max", 64), (64, "max", "250000", 2), (64, "400000", "800000", 4), (2, "400000", "max", 2),
    (64, "50000", "max", 1),
])  # fmt: skip
def test_cpus_of_a_container(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch, cores: int, own: str, around: str, usable: int
) -> None:
    monkeypatch.setattr(osread.os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(osread, "_cgroup", lambda name: Path(f"/sys/fs/cgroup/{name}/pod/app"))
    assert osread.usable_cpus() == cores, "no limit is known"
    files["/sys/fs/cgroup/pod/app/cpu.max"] = f"{own} 100000\n"
    files["/sys/fs/cgroup/pod/cpu.max"] = f"{around} 100000\n"
    assert osread.usable_cpus() == usable


@pytest.mark.parametrize(
    ("controller", "used", "limit", "cache"),
    [
        ("", "memory.current", "memory.max", "{}_file"),
        ("memory", "memory.usage_in_bytes", "memory.limit_in_bytes", "total_{}_file"),
    ],
)
def test_room_under_a_limit_counts_page_cache_as_free(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch, controller: str, used: str, limit: str, cache: str
) -> None:
    """Version 2 and version 1, with the limit at the process's own group and at one around it."""
    root = Path("/sys/fs/cgroup") / controller
    monkeypatch.setattr(osread, "_cgroup", lambda name: (root if name == controller else Path("/nowhere")) / "pod/app")
    for group, bound in (("pod", "max" if not controller else str(2**63 - 4096)), ("pod/app", str(64 << 20))):
        files[f"{root}/{group}/{used}"] = f"{60 << 20}\n"
        files[f"{root}/{group}/{limit}"] = f"{bound}\n"
        files[f"{root}/{group}/memory.stat"] = f"{cache.format('inactive')} {30 << 20}\n"
    assert osread.available_memory() == 34 << 20
    files[f"{root}/pod/app/memory.stat"] += f"{cache.format('active')} {10 << 20}\nshmem {9 << 20}\n"
    assert osread.available_memory() == 44 << 20
    files[f"{root}/pod/{limit}"] = f"{40 << 20}\n"
    assert osread.available_memory() == 10 << 20
    files[f"{root}/pod/memory.stat"] = ""
    assert osread.available_memory() == 0


def test_the_memory_group_of_another_process(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked after its end, too: then /proc knows nothing of it any more."""
    monkeypatch.setattr(Path, "is_dir", lambda path: str(path).startswith("/sys/fs/cgroup/memory/pod"))
    files["/proc/7/cgroup"] = "4:memory:/pod/worker\n"
    files["/proc/self/cgroup"] = "4:memory:/pod/trainer\n"
    folder = "/sys/fs/cgroup/memory/pod/worker"
    files[f"{folder}/memory.usage_in_bytes"], files[f"{folder}/memory.limit_in_bytes"] = "4096", "8192"
    files[f"{folder}/memory.stat"] = "cache 9\ntotal_inactive_file 1000\ntotal_active_file 24\n"
    files[f"{folder}/memory.oom_control"] = "oom_kill 5\n"
    group = MemoryGroup(7)
    del files["/proc/7/cgroup"]
    assert group.memory() == CgroupMemory(4096, 8192, 1024)
    assert group.oom_kills() == 5
    assert isinstance(MemoryGroup().memory(), Missing)


def test_nothing_readable_gives_reasons_and_no_zeros(files: dict[str, str]) -> None:
    readings = [
        osread.cgroup_throttling(), osread.cgroup_memory(), osread.cgroup_cpus(), osread.smaps(),
        MemoryGroup().oom_kills(),
    ]  # fmt: skip
    assert all(isinstance(reading, Missing) and reading.reason for reading in readings)
    assert osread.boot_id().startswith("host-")


def test_memory_of_a_process(files: dict[str, str]) -> None:
    files["/proc/7/smaps_rollup"] = "55-7f ---p 0 00:00 0 [rollup]\nRss:  1760 kB\nPss:   305 kB\nPss_Dirty: 1 kB\n"
    assert osread.smaps(7) == Smaps(1760 * 1024, 305 * 1024)
    files["/proc/8/smaps_rollup"] = "nothing of use"
    assert isinstance(osread.smaps(8), Missing)


def test_real_readings_are_sane() -> None:
    for reading in (
        osread.pressure("cpu"),
        osread.cgroup_throttling(),
        osread.cgroup_memory(),
        osread.smaps(os.getpid()),
    ):
        assert isinstance(reading, Missing) or all(value is None or value >= 0 for value in vars(reading).values())
    assert osread.boot_id() == osread.boot_id() != ""


def test_clocks_are_read_together() -> None:
    outer = time.monotonic_ns(), time.time_ns()
    monotonic_ns, wall_ns = osread.clock_pair()
    assert outer[0] <= monotonic_ns <= time.monotonic_ns()
    assert abs((wall_ns - outer[1]) - (monotonic_ns - outer[0])) < 1_000_000_000
