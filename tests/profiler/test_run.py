"""``python -m profiler.run``: the script runs as it would alone, and its run folder is there afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from profiler.events import Stage
from profiler.store import load_run

ROOT = Path(__file__).parents[2]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "profiler.run", *map(str, arguments)]


def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=folder, capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def manifest(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return document


WATCHED = """
import sys, time
import helper
import profiler

class Local:
    pass

if __name__ == "__main__":
    import pickle
    assert isinstance(pickle.loads(pickle.dumps(Local())), Local)
    print(sys.argv, helper.VALUE, __file__)
    for batch in profiler.watch(range(12)):
        time.sleep(0.002)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "helper.py").write_text("VALUE = 42\n")
    path = tmp_path / "code" / "train.py"
    path.write_text(WATCHED)
    return path


def test_a_script_sees_its_own_arguments_and_neighbours_and_gets_a_report(tmp_path: Path, script: Path) -> None:
    done = run(tmp_path, "--folder", "out", "code/train.py", "--lr", "0.1", "--folder", "x")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['code/train.py', '--lr', '0.1', '--folder', 'x'] 42 code/train.py\n"
    found = load_run(tmp_path / "out")
    assert sum(found.events["stage"].to_numpy() == Stage.STEP) == 12
    assert found.manifest["outcome"] == {"state": "finished", "steps": 12}
    assert "12 steps" in done.stderr
    assert "python -m profiler.report out" in done.stderr


def test_the_folder_is_named_after_the_script(tmp_path: Path, script: Path) -> None:
    done = run(tmp_path, "--no-report", "--hz", "0", script)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("train-")
    assert f"recorded in runs/{folder.name}" in done.stderr
    assert "12 steps" not in done.stderr


def test_a_module_is_run_by_name(tmp_path: Path, script: Path) -> None:
    done = run(script.parent, "--folder", "out", "--no-report", "-m", "train", "a")
    assert done.returncode == 0, done.stderr
    assert "'a'] 42" in done.stdout


def test_a_script_without_watched_loops_is_told_what_was_seen(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('done')\n")
    done = run(tmp_path, "--folder", "out", "plain.py")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "never called profiler.watch" in done.stderr
    assert "not seen:" in done.stderr


@pytest.mark.parametrize(
    ("code", "status", "text", "state"),
    [
        ("raise SystemExit(7)", 7, "", "failed"),
        ("import sys; sys.exit()", 0, "", "finished"),
        ("import sys; sys.exit('no data')", 1, "no data\n", "failed"),
        ("def f():\n    1 / 0\nf()", 1, "ZeroDivisionError", "failed"),
        ("from profiler.errors import StallscopeError\nraise StallscopeError('own')", 1, "Traceback", "failed"),
        ("raise KeyboardInterrupt", 130, "", "interrupted"),
    ],
)
def test_the_scripts_end_is_that_of_the_command(tmp_path: Path, code: str, status: int, text: str, state: str) -> None:
    (tmp_path / "end.py").write_text(code)
    done = run(tmp_path, "--folder", "out", "--hz", "0", "end.py")
    assert done.returncode == status, done.stderr
    assert text in done.stderr
    assert "runpy" not in done.stderr  # the traceback is the script's own
    assert manifest(tmp_path / "out")["outcome"]["state"] == state


def test_sigterm_ends_the_run_with_a_report(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(
        "import time, profiler\nfor i in profiler.watch(range(10**6)):\n    time.sleep(0.01)\n"
        "    if i == 20: print('go', flush=True)\n"
    )
    child = subprocess.Popen(
        command("--folder", "out", "long.py"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "go\n"
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 143
    assert manifest(tmp_path / "out")["outcome"]["state"] == "interrupted"
    assert "recorded in out" in errors
    assert "steps" in errors


def test_wrong_use_ends_with_2_and_one_message(tmp_path: Path) -> None:
    (tmp_path / "ok.py").write_text("print('ran')")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text("{}")
    for arguments, text in (
        (("absent.py",), "no script at absent.py"),
        (("--hz", "1000", "ok.py"), "--hz out of range"),
        (("--folder", "out", "ok.py"), "holds a run already"),
        ((), "required: SCRIPT"),
    ):
        done = run(tmp_path, *arguments)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert text in done.stderr
        assert "Traceback" not in done.stderr
    done = run(tmp_path, "--force", "--folder", "out", "ok.py")
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
