from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import ray_head, ray_runtime
from pipeline.crew import FeedError
from pipeline.process import Process
from pipeline.signals import StopRequest


class FakeRay:
    """Notes what it is asked for."""

    def __init__(self, error: Exception | None = None, up: bool = False) -> None:
        self.error, self.up = error, up
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.seen: dict[str, str] = {}
        self.once = False  # it fails at the first start only
        self.killed = False  # a SIGTERM comes while it starts

    def is_initialized(self) -> bool:
        return self.up

    def init(self, **options: Any) -> None:
        self.calls.append(("init", options))
        self.seen = dict(os.environ)
        self.up = True
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        if self.killed:
            signal.raise_signal(signal.SIGTERM)
        if self.error:
            self.up = False
            error, self.error = self.error, None if self.once else self.error
            raise error

    def shutdown(self) -> None:
        self.up = False
        self.calls.append(("shutdown", {}))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def use(monkeypatch: pytest.MonkeyPatch, fake: FakeRay) -> FakeRay:
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def test_a_ray_of_our_own_is_stopped_on_every_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, FakeRay())
    before = dict(os.environ)
    with pytest.raises(KeyboardInterrupt), ray_runtime.running(num_cpus=3):
        raise KeyboardInterrupt
    assert [name for name, _ in fake.calls] == ["init", "shutdown"]
    options = fake.calls[0][1]
    assert (options["address"], options["num_cpus"], options["include_dashboard"]) == ("local", 3, False)
    assert fake.seen["OMP_NUM_THREADS"] == fake.seen["NUMBA_NUM_THREADS"] == "1"
    assert str(Path.cwd()) in fake.seen["PYTHONPATH"].split(":")
    assert "runtime_env" not in options, "case E11: nothing is uploaded"
    assert dict(os.environ) == before  # the trainer's own environment is as it was


def test_one_that_is_up_is_neither_started_nor_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, FakeRay(up=True))
    with ray_runtime.running(address="auto"):
        pass
    assert fake.calls == []


def test_the_last_of_several_stops_it_in_whatever_order_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, FakeRay())
    train, test, later = (ray_runtime.running() for _ in range(3))
    for context in (train, test):
        context.__enter__()
    train.__exit__(None, None, None)
    assert fake.up, "the second feed still uses it"
    test.__exit__(None, None, None)
    assert not fake.up
    with later:
        assert fake.up
    assert [name for name, _ in fake.calls] == ["init", "shutdown"] * 2


def test_one_that_was_shut_down_by_hand_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, FakeRay())
    with ray_runtime.running():
        fake.up = False
        with ray_runtime.running():
            assert fake.up
        assert fake.up
    assert not fake.up


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_cluster_is_joined_with_the_workers_environment(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    fake = use(monkeypatch, FakeRay())
    if how == "environment":
        monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    with ray_runtime.running(address="auto" if how == "argument" else None):
        pass
    options = fake.calls[0][1]
    assert options["address"] == "auto"
    assert "num_cpus" not in options
    assert options["runtime_env"]["env_vars"]["OPENBLAS_NUM_THREADS"] == "1"
    assert set(options["runtime_env"]) == {"env_vars"}, "case E11: nothing is uploaded"


def test_what_a_submitted_job_sets_is_not_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, FakeRay())
    job = {"runtime_env": {"working_dir": "gcs://x", "env_vars": {"PYTHONPATH": "/elsewhere"}}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    with ray_runtime.running(address="auto"):
        pass
    variables = fake.calls[0][1]["runtime_env"]["env_vars"]
    assert "PYTHONPATH" not in variables
    assert variables["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("address", "text"), [("auto", "cannot join the Ray cluster at 'auto'"), (None, "cannot start Ray on this machine")]
)
def test_a_failure_is_one_readable_error(monkeypatch: pytest.MonkeyPatch, address: str | None, text: str) -> None:
    use(monkeypatch, FakeRay(ConnectionError("nobody there")))
    with pytest.raises(FeedError, match=text) as caught, ray_runtime.running(address=address):
        pass
    assert "nobody there" in str(caught.value)


@pytest.mark.parametrize("address", ["auto", None])
def test_a_stop_request_keeps_its_handler(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    use(monkeypatch, FakeRay())
    with StopRequest() as stop, ray_runtime.running(address=address):
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal is signal.SIGTERM


def test_a_sigterm_while_ray_starts_reaches_the_stop_request(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, FakeRay())
    fake.killed = True
    with StopRequest() as stop, pytest.raises(KeyboardInterrupt), ray_runtime.running():
        pass
    assert stop.signal is signal.SIGTERM
    assert [name for name, _ in fake.calls] == ["init", "shutdown"]


def test_where_there_was_no_handler_rays_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeRay())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(SystemExit), ray_runtime.running():
        signal.raise_signal(signal.SIGTERM)


def test_a_start_that_lost_its_port_to_another_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case E15."""
    fake = use(monkeypatch, FakeRay(RuntimeError("Address already in use")))
    fake.once = True
    with ray_runtime.running():
        assert fake.up
    assert [name for name, _ in fake.calls] == ["init", "shutdown", "init", "shutdown"]
    fake = use(monkeypatch, FakeRay(OSError(28, "No space left on device")))
    fake.once = True
    with pytest.raises(FeedError, match="No space left"), ray_runtime.running():
        pass
    assert [name for name, _ in fake.calls] == ["init"]


def test_a_small_dev_shm_is_told_and_no_hindrance(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case E4; with a real one in test_faults_ray.py."""
    use(monkeypatch, FakeRay())
    monkeypatch.setattr(ray_runtime.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    caplog.set_level(logging.INFO)
    with ray_runtime.running():
        pass
    assert "/dev/shm has 64 MiB free" in caplog.text
    assert "--shm-size" in caplog.text


def test_the_death_of_a_server_of_rays_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeRay())
    with subprocess.Popen(["sleep", "600"]) as server, ray_runtime.running():
        ray_runtime.check()
        monkeypatch.setattr(ray_runtime._ours, "servers", (("raylet", Process(server.pid)),))
        ray_runtime.check()
        server.kill()
        server.wait()
        with pytest.raises(ray_runtime.RayLost, match=rf"its raylet \(process {server.pid}\)") as caught:
            ray_runtime.check()
        assert "resume" in str(caught.value)
    ray_runtime.check()


def test_a_cluster_whose_head_does_not_answer_is_lost_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case E14, for a cluster that was joined and for one that this process was connected to already."""
    monkeypatch.setattr(ray_head, "EVERY_S", 0.02)
    monkeypatch.setattr(ray_head, "LOST_S", 0.4)
    for up in (False, True):
        fake = use(monkeypatch, FakeRay(up=up))
        head = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{head.getsockname()[1]}"
        fake.get_runtime_context = lambda at=address: SimpleNamespace(  # type: ignore[attr-defined]
            gcs_address=at, get_node_id=lambda: "here"
        )
        fake.nodes = lambda: [{"NodeID": "here", "RayletSocketName": "/nowhere"}]  # type: ignore[attr-defined]
        with ray_runtime.running(address=None if up else "auto"):
            began = time.monotonic()
            while time.monotonic() < began + 0.6:
                ray_runtime.check()  # it answers
                time.sleep(0.05)
            ray_runtime._ours.head._answered_s -= 100.0  # type: ignore[union-attr]
            ray_runtime.check()  # as after a pause of this process: nothing was asked, so nothing is lost
            head.close()
            while not ray_runtime._ours.head.lost:  # type: ignore[union-attr]
                assert time.monotonic() < began + 60
                time.sleep(0.01)
            with pytest.raises(ray_runtime.RayLost, match=rf"cluster head lost: Ray's head at {address}") as caught:
                ray_runtime.check()
            assert "Connection refused" in str(caught.value)
            assert "resume" in str(caught.value)
        ray_runtime.check()
        assert fake.up == up


def test_a_head_that_takes_connections_and_answers_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was told to end and hangs in it. What it never answered is no sign."""
    monkeypatch.setattr(ray_head, "EVERY_S", 0.02)
    monkeypatch.setattr(ray_head, "LOST_S", 0.4)
    asked: list[int] = []
    hangs: list[int] = []

    def ask() -> None:
        asked.append(1)
        if hangs:
            raise RuntimeError("deadline exceeded")

    def refuse() -> None:
        raise RuntimeError("no rights")

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        head, other = ray_head.HeadWatch(address, ask), ray_head.HeadWatch(address, refuse)
        try:
            until = time.monotonic() + 0.6
            while time.monotonic() < until:
                assert not head.lost
                time.sleep(0.05)
            assert asked
            hangs.append(1)
            until = time.monotonic() + 60
            while not head.lost:
                assert time.monotonic() < until
                time.sleep(0.01)
            assert head.why == "it takes connections and answers nothing (RuntimeError)"
            assert not other.lost
        finally:
            head.close()
            other.close()
