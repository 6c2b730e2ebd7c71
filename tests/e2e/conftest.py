"""Jobs as a person starts them: ``python -m pipeline.train`` in a process of its own, on databases made from MNIST."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from datasets.convert import main as convert

ROOT = Path(__file__).parents[2]
IDX = ROOT / "tests" / "data" / "mnist"
EXAMPLE = ROOT / "examples" / "lenet_mnist.yaml"
TIMEOUT_S = 120


def environment() -> dict[str, str]:
    """The environment of a job's process. Warnings stay warnings there: Ray and its children emit their own."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests" / "e2e"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "NO_COLOR": "1"}


@dataclass(frozen=True)
class Finished:
    """A job that ended."""

    code: int
    out: str
    err: str


def train(*arguments: str | Path, cwd: Path, timeout_s: float = TIMEOUT_S) -> Finished:
    """Run ``python -m pipeline.train`` to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.train", *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def train_forked(*arguments: str | Path, cwd: Path) -> Finished:
    """The same as :func:`train` in a fork of this process, which has loaded what a job needs: for inline jobs."""
    from pipeline import train as program
    from profiler import cli

    _load_what_jobs_need()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                _be_a_program(cwd, out.fileno(), err.fileno(), [program.__name__, *map(str, arguments)])
                cli.run(program.main)
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return Finished(code, *texts)


@functools.cache
def _load_what_jobs_need() -> None:
    """Most of a short job is loading: libraries, templates, compiled kernels. One job here, and forks have it all."""
    from pipeline.run import run
    from pipeline.settings import load

    digits = ROOT / "tests" / "data" / "db" / "mnist_test_lmdb"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        flags = {
            "data.train.source": digits, "data.test.source": digits, "feed.engine": "inline", "run.iterations": 1,
            "run.folder": Path(folder) / "run", "profile.samplers_hz": 0,
        }  # fmt: skip
        assert run(load(str(EXAMPLE), [f"--{key}={value}" for key, value in flags.items()])) == 0


def _be_a_program(cwd: Path, out: int, err: int, argv: list[str]) -> None:
    """Leave behind what the tests have set up: their streams, handlers of logs and signals, filters of warnings."""
    signal.setitimer(signal.ITIMER_REAL, 0)  # of the time-out of the test
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number, file in ((1, out), (2, err)):
        os.dup2(file, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    os.chdir(cwd)
    os.environ.update(environment())
    sys.path[:0] = [str(cwd), str(ROOT / "tests" / "e2e")]
    sys.argv = argv


class Running:
    """A job in progress; a context manager that leaves none of its processes behind."""

    def __init__(self, *arguments: str | Path, cwd: Path, folder: Path) -> None:
        self.folder = folder
        self._log = cwd / "output.txt"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.train", *map(str, arguments)],
                cwd=cwd,
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.look()
        for process in [*self.seen.values()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def look(self) -> None:
        """Remember the processes that the job has now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen.setdefault(child.pid, child)

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
        """Wait until ``condition`` gives something true; fails with the job's output when it ends or takes too long."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.look()
            value = condition()
            if value:
                return value
            if self.process.poll() is not None:
                pytest.fail(f"the job ended with {self.process.returncode} before {what}:\n{self.output}")
            time.sleep(0.05)
        return pytest.fail(f"no {what} within {timeout_s} s:\n{self.output}")

    def wait_for_step(self, step: int) -> None:
        """Wait until the job says that it has done ``step`` steps."""
        self.wait_for(lambda: f"step {step:>6} " in self.output, f"step {step}")

    def end(self, timeout_s: float = 60) -> int:
        """Wait for the end of the job's own process; its exit code."""
        self.look()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return pytest.fail(f"the job did not end within {timeout_s} s:\n{self.output}")

    def alive(self) -> list[str]:
        """Processes of the job that still run."""
        names = []
        for process in self.seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    names.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        return names

    def wait_until_gone(self, timeout_s: float = 60) -> None:
        """Wait until no process of the job is left."""
        deadline = time.monotonic() + timeout_s
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, f"still running {timeout_s} s after the end: {left}"

    def stop(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder."""
    return json.loads((folder / "manifest.json").read_text())


def report(folder: Path) -> dict[str, Any]:
    """The report.json of a run folder, checked to be strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in report.json")

    return json.loads((folder / "report.json").read_text(), parse_constant=refuse)


@dataclass(frozen=True)
class Databases:
    """Folders of the MNIST databases, each 'train' and 'test' of one backend."""

    folder: Path

    def flags(self, backend: str) -> list[str]:
        return [
            f"--data.train.source={self.folder / f'train_{backend}'}",
            f"--data.test.source={self.folder / f'test_{backend}'}",
        ]

    def digits(self, backend: str) -> list[str]:
        """The smaller of the two sets for both phases."""
        folder = self.folder / f"test_{backend}"
        return [f"--data.train.source={folder}", f"--data.test.source={folder}"]


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Databases:
    """MNIST of tests/data as LMDB and LevelDB, made by ``datasets.convert``."""
    folder = tmp_path_factory.mktemp("databases")
    for backend in ("lmdb", "leveldb"):
        for name, prefix in (("train", "train"), ("test", "t10k")):
            images = str(IDX / f"{prefix}-images-idx3-ubyte.gz")
            assert convert(["idx", images, str(folder / f"{name}_{backend}"), "--backend", backend]) == 0
    return Databases(folder)
