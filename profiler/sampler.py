"""Samples the host, the processes of a run and its GPUs a few times a second into ``samples/<host>-<pid>.arrows``.

Samples are background for a finding (was the machine busy, was memory short), never the source of a verdict.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from profiler import gpus, osread, streams
from profiler.environment import environment
from profiler.errors import StallscopeError, UsageError

__all__ = ["Sampler", "environment"]

HOST = 0
"""The pid of samples that belong to the whole machine."""
SLOW_EVERY_S = 0.5
"""Files of /proc and the list of processes change slowly and cost most: they are read less often."""
PSS_EVERY_S = 5.0
"""Proportional memory makes the kernel walk all pages, so it is read seldom."""
STOP_S = 2.0
WRITE_S = 0.5
_log = logging.getLogger(__name__)

Row = tuple[int, int, str, float]


class Sampler:
    """A daemon thread that samples until :meth:`stop`.

    Parameters
    ----------
    hz: samples per second (0 < hz <= 100).
    pids: called before each sample: the processes to watch, by default this process and all its descendants.

    Metrics of the host (pid 0): ``cpu_share`` (0..1 of all CPUs), ``gpu<i>.*`` (see :func:`profiler.gpus.sample`) and,
    twice a second, ``memory_available``, ``cgroup_memory_used``, ``disk_read_bytes``, ``disk_write_bytes`` (bytes; disk
    since boot), ``psi_{cpu,io,memory}_{some,full}`` and ``throttled_share`` (share of the time since the last reading
    in which tasks were held up). Metrics of a process: ``cpu_cores`` (CPU s per s), ``rss``, ``pss`` (bytes),
    ``threads`` and, twice a second, ``rss_anonymous``, ``rss_file``, ``rss_shared`` (bytes, see
    :class:`profiler.osread.Resident`) and, where the kernel counts it, ``io_wait`` (s per s, all threads). A metric
    without a reading is absent, and ``problems`` says why. Watched besides ``pids``: whoever records into the folder on
    this host.
    """

    def __init__(
        self, folder: str | os.PathLike[str], hz: float = 10.0, pids: Callable[[], Iterable[int]] | None = None
    ) -> None:
        if not 0 < hz <= 100:
            raise UsageError("sampling rate out of range", expected="0 < hz <= 100", found=hz)
        self._folder = Path(folder)
        self._period = 1 / hz
        self._pids = pids or descendants
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._file: streams.StreamFile | None = None
        self._rows: list[Row] = []
        self._processes: dict[int, psutil.Process] = {}
        self._last: dict[tuple[int, str], tuple[int, float]] = {}
        self._pss_due = 0
        self._slow_due = 0
        self._wanted: set[int] = set()
        self._writers: dict[str, int] = {}  # event stream -> pid, 0 for none of this host
        self._boot = osread.boot_id()
        no_delay = osread.counts_io_delay()
        self._io_delay = no_delay is None
        self.problems: dict[str, str] = {}
        """Reason for each metric that could not be read."""
        if no_delay is not None:
            self.problems["io_wait"] = no_delay.reason
        self.overhead_ns = 0
        """CPU time of the sampling thread so far."""

    def start(self) -> Sampler:
        """Start sampling. Raises StallscopeError when the folder cannot be written to."""
        if self._thread is None:
            monotonic_ns, wall_ns = osread.clock_pair()
            identity = {
                "name": "sampler", "role": "sampler", "actor": "-1", "pid": str(self._pid),
                "host": socket.gethostname(), "boot_id": osread.boot_id(), "monotonic_ns": str(monotonic_ns),
                "wall_ns": str(wall_ns),
            }  # fmt: skip
            stem = f"{socket.gethostname()}-{self._pid}"
            try:
                self._file = streams.StreamFile(self._folder / "samples", stem, streams.SAMPLES, identity)
            except OSError as error:
                raise StallscopeError(f"cannot write into the run folder {self._folder}", found=error) from error
            self._thread = threading.Thread(target=self._loop, name="stallscope-sampler", daemon=True)
            self._thread.start()
            atexit.register(self.stop)
        return self

    def stop(self) -> None:
        """Stop and close the file. Idempotent, bounded, harmless in a forked child and from the sampling thread."""
        self._stop.set()
        atexit.unregister(self.stop)
        thread = self._thread
        if thread is not None and os.getpid() == self._pid and thread is not threading.current_thread():
            thread.join(STOP_S)

    def __enter__(self) -> Sampler:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def _loop(self) -> None:
        assert self._file is not None
        written = time.monotonic()
        try:
            # The first round only sets the marks that rates are counted from.
            self._take()
            while not self._stop.wait(self._period):
                self._take()
                if time.monotonic() - written >= WRITE_S:
                    self._write()
                    written = time.monotonic()
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        assert self._file is not None
        rows, self._rows = self._rows, []
        if not rows:
            return
        try:
            self._file.append_rows(rows)
        except OSError as error:
            if "write" not in self.problems:
                _log.warning("samples are lost: %s", error)
            self.problems["write"] = str(error)

    def _take(self) -> None:
        before = time.thread_time_ns()
        now = time.monotonic_ns()
        self._take_cpu(now)
        slow = now >= self._slow_due
        if slow:
            self._slow_due = now + int(SLOW_EVERY_S * 1e9)
            self._take_host(now)
            try:
                self._wanted = set(self._pids())
            except Exception as error:  # somebody else's function must not end the sampling
                self.problems.setdefault("pids", f"{type(error).__name__}: {error}")
            self._wanted |= self._recording()
        pss = now >= self._pss_due
        if pss:
            self._pss_due = now + int(PSS_EVERY_S * 1e9)
        for pid in self._processes.keys() - self._wanted:
            del self._processes[pid]
        for pid in self._wanted:
            try:
                self._take_process(now, pid, slow, pss)
            except psutil.Error:  # gone between listing and reading: its absence is the reading
                self._processes.pop(pid, None)
        self.overhead_ns += time.thread_time_ns() - before

    def _recording(self) -> set[int]:
        """Processes of this host that record into the folder: a cluster's workers are no descendants of the trainer."""
        for path in (self._folder / "events").glob("*.arrows"):
            if path.stem in self._writers:
                continue
            said = streams.identity(path)
            if said is None:
                continue  # its first bytes are still to be written
            pid = int(said["pid"]) if said.get("boot_id") == self._boot else 0
            try:
                # A stream that an earlier part of the run left behind: its number may be another process's by now.
                if pid and psutil.Process(pid).create_time() > int(said["wall_ns"]) / 1e9 + 1:
                    pid = 0
            except psutil.Error:
                pid = 0
            self._writers[path.stem] = pid
        return {pid for pid in self._writers.values() if pid}

    def _take_cpu(self, now: int) -> None:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        total = sum(times[: 8 if len(times) >= 8 else len(times)])  # guest times are in user time already
        passed, idled = self._since(now, HOST, "_total", total), self._since(now, HOST, "_idle", idle)
        if passed is not None and idled is not None and passed[1] > 0:
            self._add(now, HOST, "cpu_share", min(1.0, max(0.0, 1 - idled[1] / passed[1])))
        devices = gpus.sample()
        if isinstance(devices, osread.Missing):
            self.problems.setdefault("gpu", devices.reason)
        else:
            for metric, value in devices.items():
                self._add(now, HOST, metric, value)

    def _take_host(self, now: int) -> None:
        self._add(now, HOST, "memory_available", psutil.virtual_memory().available)
        disk = psutil.disk_io_counters()
        if disk is None:
            self.problems.setdefault("disk", "the system counts no disk transfers")
        else:
            self._add(now, HOST, "disk_read_bytes", disk.read_bytes)
            self._add(now, HOST, "disk_write_bytes", disk.write_bytes)
        for name in ("cpu", "io", "memory"):
            reading = osread.pressure(name)
            if isinstance(reading, osread.Missing):
                self.problems.setdefault(f"psi_{name}", reading.reason)
                continue
            self._add_rate(now, HOST, f"psi_{name}_some", reading.some_us, 1e-6)
            self._add_rate(now, HOST, f"psi_{name}_full", reading.full_us, 1e-6)
        memory = osread.cgroup_memory()
        if isinstance(memory, osread.Missing):
            self.problems.setdefault("cgroup_memory_used", memory.reason)
        else:
            self._add(now, HOST, "cgroup_memory_used", memory.used)
        throttling = osread.cgroup_throttling()
        if isinstance(throttling, osread.Missing):
            self.problems.setdefault("throttled_share", throttling.reason)
        else:
            self._add_rate(now, HOST, "throttled_share", throttling.throttled_ns, 1e-9)

    def _take_process(self, now: int, pid: int, slow: bool, pss: bool) -> None:
        process = self._processes.get(pid)
        if process is None:
            process = self._processes[pid] = psutil.Process(pid)
            for key in [key for key in self._last if key[0] == pid]:  # the number was another process's before
                del self._last[key]
        with process.oneshot():
            times = process.cpu_times()
            self._add_rate(now, pid, "cpu_cores", times.user + times.system, 1.0)
            self._add(now, pid, "rss", process.memory_info().rss)
            self._add(now, pid, "threads", process.num_threads())
            if slow and self._io_delay:
                self._add_rate(now, pid, "io_wait", getattr(times, "iowait", 0.0), 1.0)
        if slow:
            split = osread.resident(pid)
            if isinstance(split, osread.Missing):
                self.problems.setdefault("rss_anonymous", split.reason)
            else:
                for kind in ("anonymous", "file", "shared"):
                    self._add(now, pid, f"rss_{kind}", getattr(split, kind))
        if pss:
            reading = osread.smaps(pid)
            if isinstance(reading, osread.Missing):
                self.problems.setdefault("pss", reading.reason)
            else:
                self._add(now, pid, "pss", reading.pss)

    def _since(self, now: int, pid: int, metric: str, total: float) -> tuple[float, float] | None:
        """(seconds, growth) since the last reading of a running total, None at the first one."""
        last = self._last.get((pid, metric))
        self._last[pid, metric] = (now, total)
        return None if last is None or now <= last[0] else ((now - last[0]) / 1e9, total - last[1])

    def _add_rate(self, now: int, pid: int, metric: str, total: float, unit_s: float) -> None:
        since = self._since(now, pid, metric, total)
        if since is not None:
            self._add(now, pid, metric, max(0.0, since[1]) * unit_s / since[0])

    def _add(self, now: int, pid: int, metric: str, value: float) -> None:
        self._rows.append((now, pid, metric, float(value)))


def descendants() -> list[int]:
    """This process and all processes it started, directly or not."""
    me = psutil.Process()
    return [me.pid, *(child.pid for child in me.children(recursive=True))]
