"""The run folder: read back whole, read back torn, merged, and refused when it is no run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from profiler import store, streams
from profiler.errors import StallscopeError
from profiler.events import EVENT, Kind, Stage
from profiler.recorder import Recorder
from profiler.store import compact, load_run, update_manifest, write_manifest


def record(
    folder: Path, name: str = "trainer", actor: int = 0, steps: range = range(3), *, close: bool = True
) -> Recorder:
    rec = Recorder.open(folder, name, "trainer" if actor == 0 else "worker", actor, flush_s=60)
    for step in steps:
        rec.add(Kind.SPAN, Stage.STEP, step * 10, step * 10 + 9, step=step)
        rec.flush()
    if close:
        rec.close()
    return rec


def steps_of(folder: Path) -> list[int]:
    return load_run(folder).events["step"].to_pylist()


def test_manifest_is_written_whole_and_changed_key_by_key(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"outcome": {"state": "running"}, "loss": float("nan"), "lr": np.float64(0.5), "n": 3})
    update_manifest(tmp_path, outcome={"state": "finished"}, extra=[1])
    text = (tmp_path / "manifest.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "kind": "stallscope-run", "schema": 1, "outcome": {"state": "finished"}, "loss": None, "lr": 0.5, "n": 3,
        "extra": [1],
    }  # fmt: skip
    assert [entry.name for entry in tmp_path.iterdir()] == ["manifest.json"]


def test_a_failed_manifest_write_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(tmp_path, {"n": 1})

    def fail(_old: str, _new: str) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr("profiler.files.os.replace", fail)
    with pytest.raises(OSError, match="disk gone"):
        write_manifest(tmp_path, {"n": 2})
    assert json.loads((tmp_path / "manifest.json").read_text())["n"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["manifest.json"]


def test_a_whole_run_reads_back_without_problems(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"n": 1})
    record(tmp_path)
    record(tmp_path, "worker-1", 1, range(5, 7))
    run = load_run(tmp_path)
    assert run.problems == []
    assert run.manifest["n"] == 1
    assert run.events.column_names == [*(EVENT.names or ()), "process", "name", "role", "pid"]
    assert sorted(zip(run.events["name"].to_pylist(), run.events["step"].to_pylist(), strict=True)) == [
        ("trainer", 0), ("trainer", 1), ("trainer", 2), ("worker-1", 5), ("worker-1", 6),
    ]  # fmt: skip
    who = run.processes[f"worker-1-{os.getpid()}"]
    assert (who["role"], who["actor"], who["pid"], who["closed"]) == ("worker", 1, os.getpid(), True)
    assert who["boot_id"]
    assert abs(who["wall_ns"] - who["monotonic_ns"]) > 0
    assert run.samples.num_rows == run.fingerprints.num_rows == 0
    assert "ordered" in run.fingerprints.column_names
    assert "metric" in run.samples.column_names


def test_a_stream_cut_at_any_byte_gives_everything_before_the_cut(tmp_path: Path) -> None:
    write_manifest(tmp_path, {})
    record(tmp_path)
    path = next((tmp_path / "events").glob("*.arrows"))
    whole = path.read_bytes()
    with pa.ipc.open_stream(pa.BufferReader(whole)) as reader:
        last = reader.schema.serialize().size + 2 * reader.read_next_batch().serialize().size
    assert last < len(whole) - 8
    for size in range(last, len(whole)):
        path.write_bytes(whole[:size])
        run = load_run(tmp_path)
        complete = size >= len(whole) - 8  # only the end mark is missing
        assert run.events["step"].to_pylist() == ([0, 1, 2] if complete else [0, 1]), size
        assert len(run.problems) == 1, size
        assert path.name in run.problems[0]
        between = size in (last, len(whole) - 8)  # cut exactly between two messages
        assert ("not closed" if between else "cut within") in run.problems[0], (size, run.problems)


def test_a_stream_cut_in_its_head_is_a_problem_not_a_crash(tmp_path: Path) -> None:
    write_manifest(tmp_path, {})
    record(tmp_path)
    record(tmp_path, "worker-1", 1, range(5, 7))
    path = next((tmp_path / "events").glob("worker*.arrows"))
    whole = path.read_bytes()
    for size in (0, 1, 7, 8, 100, 400):
        path.write_bytes(whole[:size])
        run = load_run(tmp_path)
        assert run.events["step"].to_pylist() == [0, 1, 2]
        assert len([text for text in run.problems if path.name in text]) == 1


def test_damaged_bytes_never_crash_the_reader(tmp_path: Path) -> None:
    record(tmp_path)
    rec = Recorder.open(tmp_path, "prints", "worker", 1)
    rec.fingerprint(1, "fill", 1)
    rec.fingerprint(2, "raw", 2)
    rec.close()
    dice = random.Random(7)
    for path in (next((tmp_path / "events").glob("trainer*.arrows")), next((tmp_path / "fingerprints").iterdir())):
        whole = path.read_bytes()
        for _ in range(150):
            damaged = bytearray(whole)
            damaged[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
            path.write_bytes(damaged)
            load_run(tmp_path)
        path.write_bytes(whole)
    assert steps_of(tmp_path) == [0, 1, 2]


def test_torn_notes_are_named_and_the_others_read(tmp_path: Path) -> None:
    rec = record(tmp_path, close=False)
    rec.note("worker_lost", step=17, pid=99, signal="SIGKILL")
    path = next((tmp_path / "events").glob("*.jsonl"))
    with path.open("ab") as file:
        file.write(b'{"note": "half')
    run = load_run(tmp_path)
    rec.close()
    assert [note["note"] for note in run.notes] == ["worker_lost"]
    assert (run.notes[0]["pid"], run.notes[0]["name"]) == (99, "trainer")  # the note's own field wins
    assert [text for text in run.problems if "line 2 is torn" in text]


def test_compaction_keeps_every_row_and_removes_the_streams(tmp_path: Path) -> None:
    write_manifest(tmp_path, {})
    record(tmp_path)
    record(tmp_path, "worker-1", 1, range(5, 7))
    before = load_run(tmp_path)
    assert compact(tmp_path) == tmp_path / "events" / "events.parquet"
    after = load_run(tmp_path)
    assert after.problems == []
    assert after.events.schema == before.events.schema
    assert after.events.to_pylist() == before.events.to_pylist()
    assert after.processes == before.processes
    assert [note["process"] for note in after.notes] == [note["process"] for note in before.notes]
    assert not list((tmp_path / "events").glob("*.arrows"))
    assert compact(tmp_path) is None


def test_a_resumed_run_is_merged_to_what_was_merged_before(tmp_path: Path) -> None:
    record(tmp_path)
    compact(tmp_path)
    record(tmp_path, steps=range(3, 6))  # same name, same process number: still a lane of its own
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4, 5]
    compact(tmp_path)
    run = load_run(tmp_path)
    assert run.events["step"].to_pylist() == [0, 1, 2, 3, 4, 5]
    assert sorted(run.processes) == [f"trainer-{os.getpid()}", f"trainer-{os.getpid()}.2"]
    assert {note["process"] for note in run.notes} == set(run.processes)


def test_interrupted_compaction_counts_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(store.Path, "unlink", lambda _self: (_ for _ in ()).throw(OSError("killed here")))
        with pytest.raises(OSError, match="killed here"):
            compact(tmp_path)
    assert list((tmp_path / "events").glob("*.arrows"))
    assert steps_of(tmp_path) == [0, 1, 2]
    compact(tmp_path)
    assert steps_of(tmp_path) == [0, 1, 2]
    assert not list((tmp_path / "events").glob("*.arrows"))


def test_compaction_leaves_streams_of_the_living_and_torn_ones_and_takes_those_of_the_dead(tmp_path: Path) -> None:
    alive = record(tmp_path, "alive", 1, range(10, 12), close=False)
    record(tmp_path, "torn", 2, range(20, 22))
    torn = next((tmp_path / "events").glob("torn*.arrows"))
    torn.write_bytes(torn.read_bytes()[:-20])
    code = """
import os, signal, sys
from profiler.recorder import Recorder
rec = Recorder.open(sys.argv[1], "dead", "worker", 3)
rec.mark(62, step=30)
rec.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    dead = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=Path(__file__).parents[2], check=False)
    assert dead.returncode == -signal.SIGKILL
    before = sorted(steps_of(tmp_path))
    compact(tmp_path)
    left = {path.name.split("-")[0] for path in (tmp_path / "events").glob("*.arrows")}
    assert left == {"alive", "torn"}
    assert sorted(steps_of(tmp_path)) == before == [10, 11, 20, 30]
    alive.mark(Stage.READY, step=12)
    alive.close()
    compact(tmp_path)
    assert sorted(steps_of(tmp_path)) == [10, 11, 12, 20, 30]


def test_a_million_events_are_read(tmp_path: Path) -> None:
    rows = np.zeros(1_000_000, EVENT)
    rows["step"] = np.arange(len(rows))
    identity = {
        "name": "t",
        "role": "trainer",
        "actor": "0",
        "pid": "1",
        "boot_id": "b",
        "monotonic_ns": "1",
        "wall_ns": "2",
    }
    file = streams.StreamFile(tmp_path / "events", "t-1", streams.EVENTS, identity)
    for start in range(0, len(rows), 10_000):
        file.append_events(rows[start : start + 10_000].tobytes())
    file.close()
    run = load_run(tmp_path)
    assert np.array_equal(run.events["step"].to_numpy(), rows["step"])
    compact(tmp_path)
    assert np.array_equal(load_run(tmp_path).events["step"].to_numpy(), rows["step"])


def test_missing_parts_are_named(tmp_path: Path) -> None:
    record(tmp_path)
    assert load_run(tmp_path).problems == ["manifest.json is missing: configuration and environment are not known"]
    (tmp_path / "manifest.json").write_text('{"kind": "stallscope-run", "sch')
    assert "manifest.json is unreadable" in load_run(tmp_path).problems[0]
    shutil.rmtree(tmp_path / "events")
    write_manifest(tmp_path, {})
    run = load_run(tmp_path)
    assert (run.events.num_rows, run.problems) == (0, ["events/ holds no events"])
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "events.parquet").write_bytes(b"PAR1 not really")
    assert "events.parquet is unreadable" in load_run(tmp_path).problems[0]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StallscopeError, match="no run folder at"):
        load_run(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(StallscopeError, match="found:    a file"):
        load_run(tmp_path / "file")
    (tmp_path / "other").mkdir()
    with pytest.raises(StallscopeError, match="is not a run folder"):
        load_run(tmp_path / "other")
    (tmp_path / "other" / "manifest.json").write_text('{"kind": "stallscope-dataset"}')
    with pytest.raises(StallscopeError, match="of kind 'stallscope-dataset'"):
        load_run(tmp_path / "other")
    (tmp_path / "other" / "manifest.json").write_text('{"kind": "stallscope-run", "schema": 2}')
    with pytest.raises(StallscopeError, match="newer version"):
        load_run(tmp_path / "other")
