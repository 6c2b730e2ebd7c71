"""A disk that fills up under a run folder: said in words; a job goes on without what only its report would show."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline import ray_runtime
from pipeline import run as runs
from pipeline.crew import FeedError
from pipeline.records import RecordLog
from pipeline.settings import load
from profiler import files, report, store
from profiler.errors import StallscopeError
from profiler.recorder import Recorder
from tests.pipeline.build import picture, raw, write_lmdb

ROOT = Path(__file__).parents[2]


class Disk:
    """Stands before every write into the folder of a run; ``full`` makes them fail as a full disk does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.full = False
        for module, name in ((files, "write_all"), (files, "replace")):
            patch.setattr(module, name, self._before(getattr(module, name)))

    def _before(self, real: Any) -> Any:
        def write(*args: Any) -> Any:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        return write


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def flags(tmp_path: Path, **more: Any) -> dict[str, Any]:
    source = tmp_path / "db"
    if not source.exists():
        write_lmdb(source, [raw(picture(i, (1, 8, 8)), i % 10) for i in range(40)])
    return {
        "data.train.source": str(source), "data.train.batch": 4, "run.iterations": 40, "run.log_level": "warning",
        "run.folder": str(tmp_path / "run"), "feed.engine": "inline", "device.backend": "emulated",
        "device.step_ms": 0, "profile.samplers_hz": 0, **more,
    }  # fmt: skip


def test_a_job_that_cannot_begin_leaves_no_folder(tmp_path: Path, disk: Disk) -> None:
    config = load(None, flags(tmp_path))
    disk.full = True
    with pytest.raises(StallscopeError, match=r"cannot write into the run folder .*run: No space left on device"):
        runs.run(config)
    assert not (tmp_path / "run").exists()


def test_a_job_goes_on_when_the_disk_is_full_and_says_what_is_lost(
    tmp_path: Path,
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = RecordLog.add

    def add(self: RecordLog, step: int, *args: Any) -> None:
        disk.full = step >= 20
        self._flushed = 0.0  # written at every step
        real(self, step, *args)

    monkeypatch.setattr(RecordLog, "add", add)
    with caplog.at_level(logging.WARNING):
        assert runs.run(load(None, flags(tmp_path, **{"run.log_level": "info"}))) == 0
    for part in ("the record numbers of the steps cannot be written now", "how the run ended cannot be written"):
        assert part in caplog.text
    run = store.load_run(tmp_path / "run")
    assert report.build(run).outcome == "unfinished"
    told = " ".join(capsys.readouterr().out.split())  # lines end where the path is long
    assert ", finished" in told
    assert "unfinished" not in told, "who ends the run knows how it ended"
    assert "still going" not in told


def test_record_numbers_are_written_when_there_is_room_again(tmp_path: Path, disk: Disk) -> None:
    log = RecordLog(tmp_path)
    for step in range(30):
        disk.full = step in (0, 1, 10, 11, 12)
        log.add(step, 0, np.arange(4))
        log.flush()
    log.close()
    assert log.lost == 0
    (path,) = (tmp_path / "records").glob("*.arrows")
    with pa.OSFile(str(path)) as source:
        assert pa.ipc.open_stream(source).read_all()["step"].to_pylist() == list(range(30))


def test_what_could_not_be_kept_is_a_finding(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.records._KEPT", 5)
    store.write_manifest(tmp_path, {})
    with Recorder.open(tmp_path, "trainer", "trainer", 0) as recorder:
        log = RecordLog(tmp_path, recorder)
        disk.full = True
        for step in range(12):
            log.add(step, 0, np.arange(4))
            log.flush()
        disk.full = False
        log.close()
    assert log.lost == 7
    (finding,) = [f for f in report.build(store.load_run(tmp_path)).findings if f.kind == "records_lost"]
    assert finding.level == "warning"
    assert "steps 7, reason No space left on device" in finding.text


def test_a_failing_start_of_ray_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its servers took too long on a busy machine: Ray raises a bare Exception then."""
    import ray

    def init(**_options: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(FeedError) as caught, ray_runtime.running():
        pass
    assert "cannot start Ray on this machine: The current node timed out during startup." in str(caught.value)
    assert "feed.engine inline" in str(caught.value)


MOUNT = 'mount -t tmpfs -o size=256k tmpfs "$1" || exit 77; shift; "$@"; code=$?; ls -A "$0" >&2; exit $code'


def test_a_truly_full_file_system(tmp_path: Path) -> None:
    """A tmpfs of 256 kB in a mount namespace of its own: too small for 400 steps' events, and ends nothing."""
    disk = tmp_path / "disk"
    disk.mkdir()
    config = flags(tmp_path, **{"run.folder": str(disk / "run"), "run.iterations": 400, "profile.samplers_hz": 20})
    words = [word for key, value in config.items() for word in (f"--{key}", str(value))]
    command = ["unshare", "-m", "sh", "-c", MOUNT, str(disk), str(disk), sys.executable, "-m", "pipeline.train", *words]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    if done.returncode in (1, 77) and ("Operation not permitted" in done.stderr or "permission" in done.stderr):
        pytest.skip("mounting is not allowed here")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr
