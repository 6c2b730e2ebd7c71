"""However a job is stopped, it leaves a snapshot or at least a report, and no process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import checkpoint
from tests.e2e.conftest import EXAMPLE, Databases, Running, environment, manifest, report, train


def _job(databases: Databases, folder: Path, engine: str) -> list[str]:
    """LeNet on an emulated device of 20 ms a step: long enough to be stopped in the middle."""
    return [
        str(EXAMPLE), *databases.flags("lmdb"), f"--feed.engine={engine}", f"--run.folder={folder}",
        "--run.iterations=5000", "--run.checkpoint_every=0", "--data.train.batch=8", "--device.backend=emulated",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "code", "engine"),
    [
        (signal.SIGINT, 130, "inline"),
        (signal.SIGTERM, 143, "inline"),
        pytest.param(signal.SIGINT, 130, "ray", marks=[pytest.mark.ray, pytest.mark.long]),
        pytest.param(signal.SIGTERM, 143, "ray", marks=[pytest.mark.ray, pytest.mark.long]),
    ],
)
def test_a_signal_ends_the_step_and_leaves_a_snapshot_and_a_report(
    databases: Databases, tmp_path: Path, number: signal.Signals, code: int, engine: str
) -> None:
    folder = tmp_path / "run"
    with Running(*_job(databases, folder, engine), cwd=tmp_path, folder=folder) as job:
        job.wait_for_step(50)
        job.stop(number)
        assert job.end() == code, job.output
        job.wait_until_gone(20)
        assert "Traceback" not in job.output
    outcome = manifest(folder)["outcome"]
    assert outcome["state"] == "interrupted"
    assert outcome["signal"] == number.name
    found = checkpoint.latest(folder / "snapshots")
    assert found.snapshot is not None
    assert found.snapshot.iteration == outcome["step"] >= 50
    assert report(folder)["steps"] == outcome["step"]
    assert (folder / "report.html").exists()


@pytest.mark.long
def test_a_second_interrupt_aborts_without_a_snapshot(databases: Databases, tmp_path: Path) -> None:
    """The first comes in a step of ten seconds, so the second finds the job still in it."""
    folder = tmp_path / "run"
    arguments = [*_job(databases, folder, "inline"), "--device.step_ms=10000"]
    with Running(*arguments, cwd=tmp_path, folder=folder) as job:
        job.wait_for(lambda: list((folder / "records").glob("*")) or "test after" in job.output, "the first step")
        job.stop(signal.SIGINT)
        job.wait_for(lambda: "stopping after this step" in job.output, "the answer to the first signal")
        other = train(*arguments, "--run.if_exists=replace", cwd=tmp_path)
        assert other.code == 2, other.err
        assert f"process {job.process.pid}" in other.err, "two jobs never share a folder"
        job.stop(signal.SIGINT)
        assert job.end(30) == 130, job.output
    assert manifest(folder)["outcome"]["state"] == "interrupted"
    assert checkpoint.latest(folder / "snapshots").snapshot is None
    assert "Traceback" not in job.output


@pytest.mark.ray
def test_a_killed_driver_leaves_a_readable_run_and_no_process(databases: Databases, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Running(*_job(databases, folder, "ray"), cwd=tmp_path, folder=folder) as job:
        job.wait_for_step(100)
        job.stop(signal.SIGKILL)
        assert job.end() == -signal.SIGKILL
        assert any("WorkerActor" in name for name in job.alive()), "there was something to end"
        job.wait_until_gone(40)  # Ray's own agents alone would stay for a minute
    done = subprocess.run(
        [sys.executable, "-m", "profiler.report", str(folder), "--json", "report.json", "--html", "report.html"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["steps"] >= 50, "at most the last second, 50 steps, is lost"
    assert document["outcome"] == "unfinished"
    assert "unfinished" in {finding["kind"] for finding in document["findings"]}
    assert not list(Path("/dev/shm").glob("*stallscope*"))


def test_a_killed_job_is_resumed_from_its_last_snapshot(databases: Databases, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [*_job(databases, folder, "inline"), "--run.checkpoint_every=20"]
    arguments.remove("--run.checkpoint_every=0")
    with Running(*arguments, cwd=tmp_path, folder=folder) as job:
        job.wait_for(lambda: (folder / "snapshots" / "iter_40.json").exists(), "the second snapshot")
        os.kill(job.process.pid, signal.SIGKILL)
        job.end()
    last = checkpoint.latest(folder / "snapshots").snapshot
    assert last is not None
    done = train(
        *[word for word in arguments if "iterations" not in word],
        f"--run.iterations={last.iteration + 10}", "--run.if_exists=resume", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err + done.out
    assert f"resuming from iteration {last.iteration}" in done.out
    assert manifest(folder)["outcome"]["step"] == last.iteration + 10
    assert "resumed" in {finding["kind"] for finding in report(folder)["findings"]}
