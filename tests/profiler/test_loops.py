"""The profiler round foreign loops: the loop behaves as before, and the run folder tells what happened."""

from __future__ import annotations

import gc
import json
import operator
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import profiler
from profiler import recorder as recording
from profiler.errors import StallscopeError
from profiler.events import Kind, Stage
from profiler.store import Run, load_run

ROOT = Path(__file__).parents[2]
FAST = {"hz": 0.0}


def spans(run: Run, stage: Stage) -> list[dict[str, Any]]:
    return [row for row in run.events.to_pylist() if row["stage"] == stage]


def outcome(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())["outcome"]
    return found


def test_each_turn_is_a_step_made_of_the_wait_and_the_body(tmp_path: Path) -> None:
    def slow() -> Iterator[int]:
        for number in range(4):
            time.sleep(0.03)
            yield number

    seen = []
    for number in profiler.watch(slow(), tmp_path / "run", items=lambda _: 7, **FAST):
        seen.append(number)
        time.sleep(0.01)
    assert seen == [0, 1, 2, 3]
    run = load_run(tmp_path / "run")
    assert run.problems == []
    steps, bodies = spans(run, Stage.STEP), spans(run, Stage.COMPUTE)
    waits = [row for row in spans(run, Stage.FEED_WAIT) if row["step"] >= 0]
    assert [row["step"] for row in steps] == [row["step"] for row in waits] == [row["step"] for row in bodies] == seen
    assert [row["items"] for row in steps] == [7] * 4
    for step, wait, body in zip(steps, waits, bodies, strict=True):
        assert step["t0_ns"] <= wait["t0_ns"] <= wait["t1_ns"] <= body["t0_ns"] <= body["t1_ns"] <= step["t1_ns"]
        assert wait["t1_ns"] - wait["t0_ns"] >= 30_000_000
        assert body["t1_ns"] - body["t0_ns"] >= 10_000_000
    assert run.manifest["outcome"] == {"state": "finished", "steps": 4}
    assert run.manifest["overhead"]["lost"] == 0
    assert run.manifest["not_seen"]
    assert not list((tmp_path / "run" / "events").glob("*.arrows"))


def test_an_instant_loader_waits_for_nothing_and_a_body_left_alone_is_not_labelled(tmp_path: Path) -> None:
    for _ in profiler.watch(range(5), tmp_path, body=None, **FAST):
        time.sleep(0.02)
    run = load_run(tmp_path)
    assert not spans(run, Stage.COMPUTE)
    waited = sum(row["t1_ns"] - row["t0_ns"] for row in spans(run, Stage.FEED_WAIT))
    whole = sum(row["t1_ns"] - row["t0_ns"] for row in spans(run, Stage.STEP))
    assert waited < whole / 4


def test_length_attributes_and_repeated_loops_are_those_of_the_original(tmp_path: Path) -> None:
    class Loader:
        batch_size = 3

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[str]:
            return iter("ab")

    watched = profiler.watch(Loader(), tmp_path, **FAST)
    assert len(watched) == 2
    assert watched.batch_size == 3
    with pytest.raises(AttributeError):
        _ = watched.nonsense
    assert list(watched) == list(watched) == ["a", "b"]
    steps = spans(load_run(tmp_path), Stage.STEP)
    assert [(row["step"], row["epoch"]) for row in steps] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    stream = profiler.watch((x for x in "abc"), tmp_path, **FAST)
    assert operator.length_hint(stream, 9) == 9
    assert stream
    assert not profiler.watch([], tmp_path)
    with pytest.raises(TypeError):
        len(stream)


def test_a_generator_can_be_gone_on_with_after_a_break(tmp_path: Path) -> None:
    numbers = iter(range(10))
    for number in profiler.watch(numbers, tmp_path, **FAST):
        if number == 3:
            break
    gc.collect()
    assert "before its iterable ended" in outcome(tmp_path)["detail"]
    assert recording.current() is recording.NULL
    assert next(numbers) == 4
    run = load_run(tmp_path)
    assert run.processes
    assert all(who["closed"] for who in run.processes.values())
    assert [row["step"] for row in spans(run, Stage.STEP)] == [0, 1, 2, 3]


def test_an_error_in_the_body_closes_the_recording_and_goes_on(tmp_path: Path) -> None:
    def train() -> None:
        for number in profiler.watch(range(5), tmp_path, **FAST):
            if number == 2:
                raise RuntimeError("bad batch")

    with pytest.raises(RuntimeError, match="bad batch"):
        train()
    assert recording.current() is recording.NULL
    assert [row["step"] for row in spans(load_run(tmp_path), Stage.STEP)] == [0, 1, 2]
    assert all(who["closed"] for who in load_run(tmp_path).processes.values())


def test_an_error_in_the_loader_is_told_in_the_manifest(tmp_path: Path) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        list(profiler.watch(broken(), tmp_path, **FAST))
    assert outcome(tmp_path)["state"] == "failed"
    assert outcome(tmp_path)["error"] == "OSError: disk gone"


def test_items_are_not_kept_alive_during_the_next_wait(tmp_path: Path) -> None:
    class Batch:
        pass

    alive: list[weakref.ref[Batch]] = []

    def batches() -> Iterator[Batch]:
        for _ in range(3):
            assert not [ref for ref in alive if ref() is not None]
            batch = Batch()
            alive.append(weakref.ref(batch))
            yield batch
            del batch

    for batch in profiler.watch(batches(), tmp_path, **FAST):
        del batch
    assert len(alive) == 3


def test_record_takes_in_watched_loops_and_own_spans(tmp_path: Path) -> None:
    with profiler.record(tmp_path, **FAST) as recorder:
        assert recording.current() is recorder
        for _ in range(2):
            for _number in profiler.watch(range(2), body=None):
                with recorder.span(profiler.Stage.UPDATE):
                    pass
        assert outcome(tmp_path) == {"state": "running"}
    run = load_run(tmp_path)
    assert [row["step"] for row in spans(run, Stage.STEP)] == [0, 1, 2, 3]
    assert len(spans(run, Stage.UPDATE)) == 4
    assert len(run.processes) == 1


def test_a_loop_inside_a_watched_loop_belongs_to_its_step(tmp_path: Path) -> None:
    turns = []
    with profiler.record(tmp_path, **FAST):
        for outer in profiler.watch(range(2)):
            turns += [(outer, inner) for inner in profiler.watch("ab")]
    assert turns == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    run = load_run(tmp_path)
    assert [row["step"] for row in spans(run, Stage.STEP)] == [0, 1]
    assert "nested_loop" in [note["note"] for note in run.notes]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("x"), {"state": "failed", "error": "ValueError: x"}),
        (KeyboardInterrupt(), {"state": "interrupted", "error": "KeyboardInterrupt: "}),
        (SystemExit(0), {"state": "finished"}),
        (SystemExit(3), {"state": "failed", "exit_code": 3}),
        (SystemExit(143), {"state": "interrupted", "exit_code": 143}),
    ],
)
def test_how_a_recorded_block_ended(tmp_path: Path, error: BaseException, expected: dict[str, object]) -> None:
    with pytest.raises(type(error)), profiler.record(tmp_path, **FAST):
        raise error
    assert outcome(tmp_path) == {**expected, "steps": 0}


def test_another_runs_folder_is_refused_or_replaced_when_told(tmp_path: Path) -> None:
    code = "import profiler, sys\nfor _ in profiler.watch(range(7), sys.argv[1], hz=0): pass"
    subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, check=True, timeout=60)
    assert len(spans(load_run(tmp_path), Stage.STEP)) == 7
    with pytest.raises(StallscopeError, match="holds a run already"):
        list(profiler.watch(range(2), tmp_path, **FAST))
    assert len(spans(load_run(tmp_path), Stage.STEP)) == 7
    list(profiler.watch(range(2), tmp_path, overwrite=True, **FAST))
    assert len(spans(load_run(tmp_path), Stage.STEP)) == 2


@pytest.mark.alone
def test_the_profilers_own_cost_is_small_and_told(tmp_path: Path) -> None:
    before = time.monotonic_ns()
    for _ in profiler.watch(range(150), tmp_path, hz=10):
        time.sleep(0.005)
    whole = time.monotonic_ns() - before
    overhead = load_run(tmp_path).manifest["overhead"]
    assert overhead["recorder_ns"] > 0
    assert overhead["sampler_ns"] > 0
    # About 2 % on a quiet machine; the bound allows for a crowded one.
    assert overhead["recorder_ns"] + overhead["sampler_ns"] < whole / 5


def test_without_a_folder_one_is_made_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/some/where/train.py"])
    list(profiler.watch(range(2), **FAST))
    list(profiler.watch(range(3), **FAST))
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name[:6] for folder in folders] == ["train-", "train-"]
    message = capsys.readouterr().err
    assert all(f"python -m profiler.report {folder.relative_to(tmp_path)}\n" in message for folder in folders)


def test_off_means_nothing_is_written(tmp_path: Path) -> None:
    assert list(profiler.watch("abc", tmp_path / "off", detail="off")) == ["a", "b", "c"]
    assert not (tmp_path / "off").exists()


def test_the_loaders_own_processes_are_sampled_and_a_killed_loop_can_be_read(tmp_path: Path) -> None:
    code = """
import multiprocessing, sys, time, profiler

def busy(connection):
    while True:
        connection.send(sum(range(20000)))

if __name__ == "__main__":
    here, there = multiprocessing.get_context("spawn").Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=busy, args=(there,), daemon=True)
    worker.start()
    for step, _ in enumerate(profiler.watch(iter(here.recv, None), sys.argv[1], hz=20)):
        time.sleep(0.005)
        if step == 300:
            print(worker.pid, flush=True)
"""
    script = tmp_path / "loop.py"
    script.write_text(code)
    child = subprocess.Popen(
        [sys.executable, script, tmp_path / "run"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert child.stdout is not None
    worker = int(child.stdout.readline())
    child.kill()
    child.communicate(timeout=60)
    run = load_run(tmp_path / "run")
    assert len([row for row in spans(run, Stage.STEP) if row["kind"] == Kind.SPAN]) > 100
    assert run.manifest["outcome"] == {"state": "running"}
    assert worker in run.samples["pid"].to_pylist()
    assert any("not closed" in text or "cut" in text for text in run.problems)
