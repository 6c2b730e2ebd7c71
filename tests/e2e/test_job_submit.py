"""`ray job submit` from a checkout really trains on a cluster (one node, started for this test, on loopback)."""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PATIENCE_S = 120


@dataclass(frozen=True)
class Cluster:
    dashboard: str
    env: dict[str, str]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # A short path of its own: Ray's sockets live there, and their names are bounded by the system.
    folder = tempfile.mkdtemp(prefix="rj-")
    port = free_port()
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "RAY_AUTH_MODE": "token"}
    env["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    env.pop("RAY_ADDRESS", None)
    command = [
        str(BIN / "ray"), "start", "--head", "--block", "--port=0", "--num-cpus=2", "--disable-usage-stats",
        "--node-ip-address=127.0.0.1", "--include-dashboard=true", "--dashboard-host=127.0.0.1",
        f"--dashboard-port={port}", f"--temp-dir={folder}", "--object-store-memory=100000000",
        # The agent's own port is fixed by default: another Ray on the machine would take it away.
        f"--dashboard-agent-listen-port={free_port()}", f"--dashboard-agent-grpc-port={free_port()}",
    ]  # fmt: skip
    log = Path(folder, "head.log")
    with log.open("wb") as output:
        head = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for_port(port, head, log)
        yield Cluster(f"http://127.0.0.1:{port}", env)
    finally:
        # Only the process group that was started here: `ray stop` would end every Ray of the machine.
        os.killpg(head.pid, signal.SIGKILL)
        head.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_port(port: int, head: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert head.poll() is None, log.read_text()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    pytest.fail(f"no dashboard after {PATIENCE_S} s:\n{log.read_text()}")


def submit(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(BIN / "ray"), "job", "submit", "--address", cluster.dashboard, "--working-dir", str(ROOT), "--",
        "python", "-m", "pipeline.train", *arguments,
    ]  # fmt: skip
    deadline = time.monotonic() + PATIENCE_S
    while True:
        done = subprocess.run(command, env=cluster.env, capture_output=True, text=True, timeout=PATIENCE_S)
        # The dashboard answers before the node's agent has registered with it.
        if "No available agent" not in done.stderr or time.monotonic() > deadline:
            return done
        time.sleep(1)


JOB = [
    "--data.train.source=memory:records=64,shape=1x8x8,classes=10", "--data.train.batch=8",
    "--device.backend=emulated", "--device.step_ms=2", "--run.iterations=20", "--feed.workers=1",
]  # fmt: skip


@pytest.mark.ray
def test_a_submitted_job_runs_on_the_cluster_and_leaves_its_report(cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = submit(cluster, *JOB, f"--run.folder={run}")
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["outcome"]["state"] == "finished"
    report = json.loads((run / "report.json").read_text())
    assert report["steps"] == 20
    assert (run / "report.html").stat().st_size > 10_000


@pytest.mark.ray
def test_a_relative_run_folder_is_refused_in_a_submitted_job(cluster: Cluster) -> None:
    """The job's current folder is a copy that Ray deletes: what is written there would be lost."""
    done = submit(cluster, *JOB, "--run.folder=runs/lost")
    assert done.returncode != 0
    assert "run.folder" in done.stdout
    assert "absolute" in done.stdout
