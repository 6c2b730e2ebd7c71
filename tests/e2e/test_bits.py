"""Final weights are the same bits whatever engine, workers, database, restart or lost worker."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from gpu.solverstate import read_state
from tests.e2e.conftest import EXAMPLE, Databases, Running, manifest, report, train, train_forked

ITERATIONS = 200
# Batches of 16 from 1,000 digits (three epochs) and few tests keep this short; all else is the example of the README.
SMALL = ["--data.train.batch=16", "--profile.samplers_hz=0", "--run.checkpoint_every=0"]


@pytest.fixture(scope="module")
def solver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's solver with two test batches at steps 0, 100 and 200."""
    text = EXAMPLE.with_name("lenet_solver.prototxt").read_text()
    path = tmp_path_factory.mktemp("solver") / "solver.prototxt"
    path.write_text(text.replace("test_iter: 10", "test_iter: 2").replace("display: 50", "display: 20"))
    return path


def _job(databases: Databases, solver: Path, folder: Path, backend: str, engine: str, workers: int = 1) -> list[str]:
    return [
        str(EXAMPLE), *SMALL, *databases.digits(backend), f"--solver={solver}", f"--run.folder={folder}",
        f"--run.iterations={ITERATIONS}", f"--feed.engine={engine}", f"--feed.workers={workers}",
    ]  # fmt: skip


def _result(folder: Path) -> dict[str, object]:
    """Everything that has to be the same: weights, momentum, records of each step, and test results."""
    snapshots = folder / "snapshots"
    state = read_state(snapshots / f"iter_{ITERATIONS}.solverstate")
    rows: dict[int, list[int]] = {}
    for path in sorted((folder / "records").glob("ids-*.arrows"), key=lambda path: path.stat().st_mtime_ns):
        table = pa.ipc.open_stream(path).read_all()
        rows.update(zip(table["step"].to_pylist(), table["ids"].to_pylist(), strict=True))
    return {
        "weights": hashlib.sha256((snapshots / f"iter_{ITERATIONS}.caffemodel").read_bytes()).hexdigest(),
        "history": hashlib.sha256(b"".join(np.ascontiguousarray(h).tobytes() for h in state.history)).hexdigest(),
        "records": [rows[step] for step in range(ITERATIONS)],
    }


@pytest.fixture(scope="module")
def reference(databases: Databases, solver: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The result of the plainest run: inline, from LMDB, without a stop."""
    folder = tmp_path_factory.mktemp("reference")
    done = train(*_job(databases, solver, folder / "run", "lmdb", "inline"), cwd=folder)
    assert done.code == 0, done.err + done.out
    return _result(folder / "run")


@pytest.mark.parametrize(
    ("engine", "workers", "backend"),
    [
        pytest.param("inline", 1, "leveldb", marks=pytest.mark.long),
        pytest.param("ray", 1, "lmdb", marks=[pytest.mark.ray, pytest.mark.long]),
        pytest.param("ray", 2, "leveldb", marks=pytest.mark.ray),
    ],
)
def test_engine_workers_and_database_change_no_bit(
    databases: Databases,
    solver: Path,
    reference: dict[str, object],
    tmp_path: Path,
    engine: str,
    workers: int,
    backend: str,
) -> None:
    done = train(*_job(databases, solver, tmp_path / "run", backend, engine, workers), cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    assert _result(tmp_path / "run") == reference


def test_stopped_at_120_and_resumed_is_the_same_run(
    databases: Databases, solver: Path, reference: dict[str, object], tmp_path: Path
) -> None:
    """The second part reads from the other kind of database: the same records are the same stream."""
    first = _job(databases, solver, tmp_path / "run", "lmdb", "inline")
    done = train_forked(*first[:-3], "--run.iterations=120", "--feed.engine=inline", cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    second = _job(databases, solver, tmp_path / "run", "leveldb", "inline")
    done = train_forked(*second, "--run.if_exists=resume", cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    assert "resuming from iteration 120" in done.out
    assert _result(tmp_path / "run") == reference
    assert report(tmp_path / "run")["steps"] == ITERATIONS, "the report covers both parts"


@pytest.mark.ray
def test_a_killed_worker_changes_no_bit_and_is_named(
    databases: Databases, solver: Path, reference: dict[str, object], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with Running(*_job(databases, solver, folder, "lmdb", "ray", 2), cwd=tmp_path, folder=folder) as job:
        job.wait_for_step(20)
        victim = min(int(path.stem.rpartition("-")[2]) for path in (folder / "events").glob("worker-1-*.arrows"))
        os.kill(victim, signal.SIGKILL)
        assert job.end(90) == 0, job.output
    assert _result(folder) == reference
    (text,) = [finding["text"] for finding in report(folder)["findings"] if finding["kind"] == "worker_lost"]
    assert f"Worker 1 (process {victim}) was lost" in text
    assert manifest(folder)["outcome"]["state"] == "finished"
