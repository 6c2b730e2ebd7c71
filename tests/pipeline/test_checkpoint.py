"""Snapshots: complete or absent, never half; a resume continues the same stream or is refused by name."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline import checkpoint
from profiler.errors import StallscopeError, UsageError

STREAM = {"seed": 1, "batch": 64, "records": 4000, "shuffle": "full"}


class FakeSolver:
    """Writes what it is told to, and fails where it is told to."""

    def __init__(self, content: bytes = b"weights", fail: int | None = None) -> None:
        self.content = content
        self.fail = fail

    def snapshot(self, prefix: Path) -> tuple[Path, Path]:
        weights, state = prefix / "iter_1.caffemodel", prefix / "iter_1.solverstate"
        weights.write_bytes(self.content)
        if self.fail is not None:
            raise OSError(self.fail, os.strerror(self.fail))
        state.write_bytes(b"state of " + self.content)
        return weights, state


def _write(folder: Path, iteration: int, content: bytes = b"weights") -> checkpoint.Snapshot:
    return checkpoint.write(folder, iteration, FakeSolver(content), {"stream": STREAM, "cursor": iteration * 64})


def test_a_written_snapshot_is_found_again(tmp_path: Path) -> None:
    _write(tmp_path, 5, b"five")
    written = _write(tmp_path, 10, b"ten")
    found = checkpoint.latest(tmp_path)
    assert found.snapshot == written
    assert found.ignored == []
    assert found.snapshot.iteration == 10
    assert found.snapshot.weights.read_bytes() == b"ten"
    assert found.snapshot.sidecar["cursor"] == 640
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"iter_{n}.{suffix}" for n in (10, 5) for suffix in ("caffemodel", "json", "solverstate")
    ], "no temporary file is left"


def test_no_folder_is_no_snapshot(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nothing") == checkpoint.Found(None, [])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "iter_10.json").unlink(), "iter_10 has no sidecar"),
        (lambda folder: (folder / "iter_10.json").write_text('{"schema": 1, "iter'), "iter_10.json cannot be read"),
        (lambda folder: (folder / "iter_10.json").write_text("[]"), "iter_10.json cannot be read"),
        (lambda folder: (folder / "iter_10.caffemodel").write_bytes(b"tex"), "iter_10.caffemodel is not the file"),
        (lambda folder: (folder / "iter_10.solverstate").unlink(), "iter_10.solverstate is missing"),
    ],
)
def test_a_damaged_snapshot_is_passed_over_and_named(tmp_path: Path, damage: Any, says: str) -> None:
    _write(tmp_path, 5)
    _write(tmp_path, 10, b"ten")
    damage(tmp_path)
    found = checkpoint.latest(tmp_path)
    assert found.snapshot is not None
    assert found.snapshot.iteration == 5
    assert len(found.ignored) == 1
    assert says in found.ignored[0]


def test_a_full_disk_leaves_the_older_snapshot(tmp_path: Path) -> None:
    _write(tmp_path, 5)
    with pytest.raises(StallscopeError, match="No space left on device") as caught:
        checkpoint.write(tmp_path, 10, FakeSolver(fail=errno.ENOSPC), {})
    assert "resume from iteration 5" in str(caught.value)
    found = checkpoint.latest(tmp_path)
    assert found.snapshot is not None
    assert found.snapshot.iteration == 5
    assert {path.stem for path in tmp_path.iterdir()} == {"iter_5"}


def test_writing_stopped_between_two_renames_leaves_no_half_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process had died there: whatever was renamed so far, the newest usable snapshot is the older one."""
    _write(tmp_path, 5)
    rename = Path.rename
    for allowed in range(3):
        done = 0

        def stop_later(self: Path, target: Path, allowed: int = allowed) -> Path:
            nonlocal done
            if done == allowed:
                raise KeyboardInterrupt
            done += 1
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", stop_later)
        with pytest.raises(KeyboardInterrupt):
            _write(tmp_path, 10)
        monkeypatch.setattr(Path, "rename", rename)
        found = checkpoint.latest(tmp_path)
        assert found.snapshot is not None
        assert found.snapshot.iteration == 5
    assert _write(tmp_path, 10).iteration == 10


def test_the_same_iteration_can_be_written_again(tmp_path: Path) -> None:
    _write(tmp_path, 5, b"first")
    _write(tmp_path, 5, b"second")
    found = checkpoint.latest(tmp_path)
    assert found.snapshot is not None
    assert found.snapshot.weights.read_bytes() == b"second"


def test_sidecars_hold_no_nan(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 1, FakeSolver(), {"loss": float("nan")})
    assert json.loads((tmp_path / "iter_1.json").read_text())["loss"] is None


def test_another_stream_is_refused_by_name(tmp_path: Path) -> None:
    snapshot = _write(tmp_path, 5)
    checkpoint.check_same_stream(snapshot, STREAM)
    with pytest.raises(UsageError) as caught:
        checkpoint.check_same_stream(snapshot, {**STREAM, "batch": 32, "seed": 2})
    for fragment in ("batch, seed", "batch = 64", "batch = 32", "seed = 1", "seed = 2"):
        assert fragment in str(caught.value)
    assert "records" not in str(caught.value)


def test_what_a_stream_leaves_out_is_told_by_its_meaning(tmp_path: Path) -> None:
    snapshot = checkpoint.write(tmp_path, 5, FakeSolver(), {"stream": {**STREAM, "on_bad_record": "skip", "new": 1}})
    for before, now in ((snapshot.sidecar["stream"], STREAM), (STREAM, snapshot.sidecar["stream"])):
        with pytest.raises(UsageError) as caught:
            checkpoint.check_same_stream(replace(snapshot, sidecar={"stream": before}), now)
        told = str(caught.value)
        assert "None" not in told
        for fragment in ("on_bad_record = skip", "on_bad_record = stop", "new = 1", "new = not set"):
            assert fragment in told
