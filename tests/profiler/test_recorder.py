"""The recorder: what is written, what survives, and what it never does to the job it records."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiler import recorder as recording
from profiler.errors import StallscopeError, UsageError
from profiler.events import MISSING, Flag, Kind, Stage
from profiler.recorder import NULL, Recorder
from profiler.store import load_run

ROOT = Path(__file__).parents[2]


def rows(folder: Path, **wanted: int) -> list[dict[str, Any]]:
    return [row for row in load_run(folder).events.to_pylist() if all(row[key] == wanted[key] for key in wanted)]


def start(code: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def test_span_add_and_mark_come_back_as_they_were_given(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, "worker-1", "worker", 3) as rec:
        with rec.span(Stage.READ, step=17, epoch=2, slot=5, items=64, nbytes=50_176, flags=Flag.REDO) as span:
            span.items = 63
        rec.add(Kind.SPAN, Stage.COPY, 10, 30, step=18, cpu_ns=4, runq_ns=5, inblock=6, items=7, nbytes=8, actor=9)
        rec.mark(Stage.READY, step=19, slot=1)
    read, copy, ready = rows(tmp_path)
    assert {k: read[k] for k in ("kind", "stage", "step", "epoch", "slot", "items", "bytes", "flags", "actor")} == {
        "kind": Kind.SPAN, "stage": Stage.READ, "step": 17, "epoch": 2, "slot": 5, "items": 63, "bytes": 50_176,
        "flags": Flag.REDO, "actor": 3,
    }  # fmt: skip
    assert read["t0_ns"] < read["t1_ns"]
    assert (copy["t0_ns"], copy["t1_ns"], copy["cpu_ns"], copy["runq_ns"], copy["inblock"]) == (10, 30, 4, 5, 6)
    assert (copy["actor"], copy["items"], copy["bytes"], copy["epoch"], copy["slot"]) == (9, 7, 8, -1, -1)
    assert ready["kind"] == Kind.MARK
    assert ready["t0_ns"] == ready["t1_ns"]
    assert (read["process"], read["name"], read["role"], read["pid"]) == (
        f"worker-1-{os.getpid()}", "worker-1", "worker", os.getpid(),
    )  # fmt: skip


def test_full_detail_tells_work_from_sleep_and_steps_detail_says_missing(tmp_path: Path) -> None:
    for detail in ("full", "steps"):
        with Recorder.open(tmp_path / detail, "t", "trainer", detail=detail) as rec:
            with rec.span(Stage.COMPUTE):
                until = time.thread_time_ns() + 20_000_000
                while time.thread_time_ns() < until:
                    pass
            with rec.span(Stage.FEED_WAIT):
                time.sleep(0.05)
    work, sleep = rows(tmp_path / "full")
    assert work["cpu_ns"] >= 20_000_000
    assert sleep["cpu_ns"] < work["cpu_ns"] / 2
    assert sleep["inblock"] >= 0
    assert sleep["runq_ns"] >= 0 or not Path("/proc/self/schedstat").exists()
    for row in rows(tmp_path / "steps"):
        assert (row["cpu_ns"], row["runq_ns"], row["inblock"]) == (MISSING, MISSING, MISSING)


def test_a_span_is_recorded_when_its_body_fails_and_the_error_goes_on(tmp_path: Path) -> None:
    rec = Recorder.open(tmp_path, "t", "trainer")
    with pytest.raises(ValueError, match="boom"), rec.span(Stage.DECODE, step=1):
        raise ValueError("boom")
    rec.close()
    assert len(rows(tmp_path, kind=Kind.SPAN, stage=Stage.DECODE)) == 1


def test_a_wait_in_progress_is_written_at_every_flush_and_replaced_at_its_end(tmp_path: Path) -> None:
    rec = Recorder.open(tmp_path, "t", "trainer", flush_s=60)
    with rec.span(Stage.FEED_WAIT, step=4) as span:
        rec.flush()
        time.sleep(0.01)
        rec.flush()
        first, second = rows(tmp_path)
        assert first["kind"] == second["kind"] == Kind.OPEN
        assert first["t0_ns"] == second["t0_ns"] == span.t0_ns
        assert first["t1_ns"] < second["t1_ns"]
    rec.close()
    assert [row["t0_ns"] for row in rows(tmp_path, kind=Kind.SPAN)] == [first["t0_ns"]]


def test_close_writes_open_spans_and_a_dropped_span_leaves_nothing(tmp_path: Path) -> None:
    rec = Recorder.open(tmp_path, "t", "trainer", flush_s=60)
    with rec.span(Stage.STEP, step=1) as dropped:
        dropped.drop()
    with rec.span(Stage.BATCH, step=2):
        rec.close()
    assert [(row["kind"], row["stage"]) for row in rows(tmp_path)] == [(Kind.OPEN, Stage.BATCH)]


def test_a_full_buffer_is_flushed_at_once(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, "t", "trainer", flush_s=60, capacity=16) as rec:
        for step in range(100):
            rec.mark(Stage.READY, step=step)
        assert len(rows(tmp_path)) >= 80
    assert [row["step"] for row in rows(tmp_path)] == list(range(100))
    assert rec.lost == 0


def test_a_full_disk_costs_events_but_neither_memory_nor_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rec = Recorder.open(tmp_path, "t", "trainer", flush_s=60, capacity=16)
    rec.mark(Stage.READY, step=0)
    rec.flush()

    def no_space(_fd: int, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("profiler.files.write_all", no_space)
    for step in range(1, 101):
        rec.mark(Stage.READY, step=step)
    rec.note("also lost")
    assert rec.lost >= 80
    assert len([record for record in caplog.records if "No space left" in record.message]) == 1
    monkeypatch.undo()
    lost = rec.lost
    rec.mark(Stage.READY, step=1000)
    rec.close()
    steps = [row["step"] for row in rows(tmp_path)]
    assert steps[0] == 0
    assert steps[-1] == 1000
    assert len(steps) + lost == 103  # 102 marks and a note: each is either there or counted
    assert load_run(tmp_path).notes[-1]["lost"] == lost


def test_a_half_written_message_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rec = Recorder.open(tmp_path, "t", "trainer", flush_s=60)

    def half(fd: int, data: bytes) -> None:
        os.write(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("profiler.files.write_all", half)
    rec.mark(Stage.READY, step=1)
    rec.flush()
    monkeypatch.undo()
    rec.mark(Stage.READY, step=2)
    rec.close()
    assert [row["step"] for row in rows(tmp_path)] == [2]
    assert not [text for text in load_run(tmp_path).problems if "events/" in text]


def test_values_that_do_not_fit_are_counted_not_raised(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, "t", "trainer") as rec:
        rec.mark(Stage.READY, step=1 << 70)
        rec.mark(Stage.READY, step=2)
        assert rec.lost == 1
    assert [row["step"] for row in rows(tmp_path)] == [2]


def test_a_note_is_on_disk_at_once_and_holds_no_nan(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, "worker-2", "worker", 2) as rec:
        rec.note("slow", step=3, loss=float("nan"), ids=np.arange(3), path=Path("a/b"), share=np.float32(0.5))
        line = json.loads(next((tmp_path / "events").glob("*.jsonl")).read_text())
    assert line["note"] == "slow"
    assert (line["step"], line["loss"], line["ids"], line["path"], line["share"]) == (3, None, [0, 1, 2], "a/b", 0.5)
    note = load_run(tmp_path).notes[0]
    assert (note["process"], note["actor"]) == (f"worker-2-{os.getpid()}", 2)


def test_notes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_NOTES", 5)
    with Recorder.open(tmp_path, "t", "trainer") as rec:
        for number in range(9):
            rec.note("n", number=number)
        assert rec.lost == 4
    assert len([note for note in load_run(tmp_path).notes if note["note"] == "n"]) == 5


def test_fingerprints_keep_all_64_bits_and_are_left_out_when_off(tmp_path: Path) -> None:
    with Recorder.open(tmp_path / "on", "t", "trainer") as rec:
        rec.fingerprint(7, "fill", (1 << 64) - 1, 1 << 63, max_abs=2.5, l2=3.5, zeros=1, subnormals=2, infs=3, nans=4)
        rec.fingerprint(8, "loss", 5)
    first, second = load_run(tmp_path / "on").fingerprints.to_pylist()
    assert (first["step"], first["name"], first["ordered"], first["multiset"]) == (7, "fill", (1 << 64) - 1, 1 << 63)
    assert (first["max_abs"], first["l2"], first["zeros"], first["subnormals"]) == (2.5, 3.5, 1, 2)
    assert (second["ordered"], second["nans"]) == (5, -1)
    with Recorder.open(tmp_path / "off", "t", "trainer", fingerprints="off") as rec:
        rec.fingerprint(7, "fill", 1)
    assert load_run(tmp_path / "off").fingerprints.num_rows == 0


def test_garbage_collections_are_recorded_until_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "GC_SHORT_NS", 0)
    rec = Recorder.open(tmp_path, "t", "trainer")
    rec.watch_gc()
    rec.watch_gc()
    callbacks = len(gc.callbacks)
    loop: list[Any] = []
    loop.append(loop)
    del loop
    gc.collect()
    rec.close()
    assert len(gc.callbacks) == callbacks - 1
    assert any(row["items"] >= 1 for row in rows(tmp_path, stage=Stage.GC))


def test_threads_record_side_by_side(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, "t", "trainer", capacity=64) as rec:

        def work(slot: int) -> None:
            for step in range(200):
                with rec.span(Stage.READ, step=step, slot=slot):
                    pass

        threads = [threading.Thread(target=work, args=(slot,)) for slot in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for slot in range(4):
        assert [row["step"] for row in rows(tmp_path, slot=slot, kind=Kind.SPAN)] == list(range(200))


def test_a_signal_handler_may_record(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, "t", "trainer", flush_s=0.001, capacity=32) as rec:

        def alarm(*_: object) -> None:
            rec.mark(Stage.RESTART)
            rec.note("alarm")
            # The next one only now: handlers that wait for a slow disk would pile up on each other.
            signal.setitimer(signal.ITIMER_REAL, 0.001)

        before = signal.signal(signal.SIGALRM, alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        try:
            for step in range(3000):
                rec.mark(Stage.READY, step=step)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert [row["step"] for row in rows(tmp_path, stage=Stage.READY)] == list(range(3000))
    assert not load_run(tmp_path).problems[1:]  # the manifest alone is missing


def test_close_is_bounded_when_a_write_hangs_and_may_be_called_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rec = Recorder.open(tmp_path, "t", "trainer", flush_s=0.01)
    hanging, go_on = threading.Event(), threading.Event()

    def hang(_data: bytes) -> None:
        hanging.set()
        go_on.wait()

    monkeypatch.setattr(rec._events, "append_events", hang)
    rec.mark(Stage.READY)
    assert hanging.wait(30)
    rec.close()  # returns at all: the write is still hanging
    rec.close()
    rec.mark(Stage.READY)
    assert "hangs" in caplog.text
    go_on.set()
    rec._thread.join(30)


def test_close_is_bounded_when_the_last_write_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rec = Recorder.open(tmp_path, "t", "trainer", flush_s=60)
    go_on = threading.Event()
    monkeypatch.setattr(rec._events, "append_events", lambda _data: go_on.wait())
    rec.mark(Stage.READY)
    rec.close()
    assert "hangs" in caplog.text
    go_on.set()
    rec._thread.join(30)


def test_events_survive_sigkill(tmp_path: Path) -> None:
    child = start(
        """
import sys, time
from profiler.recorder import Recorder
from profiler.events import Stage
rec = Recorder.open(sys.argv[1], "trainer", "trainer")
for step in range(10**9):
    with rec.span(Stage.STEP, step=step):
        time.sleep(0.002)
    if step == 400:
        print("go", flush=True)
""",
        tmp_path,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "go\n"
    child.send_signal(signal.SIGKILL)
    killed = time.monotonic_ns()
    child.communicate()
    run = load_run(tmp_path)
    spans = [row for row in run.events.to_pylist() if row["kind"] == Kind.SPAN]
    assert [row["step"] for row in spans] == list(range(len(spans)))
    lost_s = (killed - max(row["t1_ns"] for row in spans)) / 1e9
    assert lost_s < 5 * recording.FLUSH_S  # generous: half a second and a slow machine
    assert any("not closed" in text or "cut" in text for text in run.problems)
    assert run.processes[f"trainer-{child.pid}"]["closed"] is False


def test_a_process_that_ends_without_close_loses_nothing(tmp_path: Path) -> None:
    child = start(
        """
import sys
from profiler.recorder import Recorder
from profiler.events import Stage
rec = Recorder.open(sys.argv[1], "t", "trainer", flush_s=60)
rec.mark(Stage.READY, step=1)
rec.span(Stage.STEP, step=2).__enter__()
raise SystemExit(5)
""",
        tmp_path,
    )
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (5, "")
    assert [(row["kind"], row["step"]) for row in rows(tmp_path)] == [(Kind.MARK, 1), (Kind.OPEN, 2)]
    assert load_run(tmp_path).processes[f"t-{child.pid}"]["closed"] is True


def test_a_forked_child_never_touches_its_parents_files(tmp_path: Path) -> None:
    child = start(
        """
import os, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forks beside threads
from profiler import recorder
from profiler.events import Stage
folder = Path(sys.argv[1])
rec = recorder.Recorder.open(folder, "t", "trainer", flush_s=60)
recorder.set_current(rec)
rec.watch_gc()
rec.mark(Stage.READY, step=1)
span = rec.span(Stage.STEP, step=2)
span.__enter__()
if os.fork() == 0:
    assert recorder.current() is recorder.NULL
    rec.mark(Stage.READY, step=100)
    rec.note("from the child")
    rec.fingerprint(1, "fill", 1)
    span.__exit__(None, None, None)
    rec.flush()
    rec.close()
    own = recorder.Recorder.open(folder, "own", "worker", 1, flush_s=60)
    with own.span(Stage.READ, step=3):
        pass
    sys.exit(0)  # runs the exit hooks of the parent's recorder, too
pid, status = os.wait()
assert status == 0, status
span.__exit__(None, None, None)
rec.close()
""",
        tmp_path,
    )
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (0, "")
    run = load_run(tmp_path)
    seen = {(row["name"], row["kind"], row["step"]) for row in run.events.to_pylist()}
    assert seen == {("t", Kind.MARK, 1), ("t", Kind.SPAN, 2), ("own", Kind.SPAN, 3)}
    assert "from the child" not in [note["note"] for note in run.notes]
    assert run.fingerprints.num_rows == 0


def test_null_has_every_public_method_and_survives_pickling() -> None:
    public = [name for name in vars(Recorder) if not name.startswith("_") and callable(getattr(Recorder, name))]
    assert {"span", "add", "mark", "note", "fingerprint", "flush", "close", "watch_gc"} <= set(public)
    with NULL as rec, rec.span(Stage.READ, step=1) as span:
        span.items = 3
        rec.add(Kind.SPAN, Stage.READ, 1, 2)
        rec.mark(Stage.READY)
        rec.note("nothing")
        rec.fingerprint(1, "fill", 1)
        rec.flush()
        rec.watch_gc()
    assert pickle.loads(pickle.dumps(NULL)) is NULL
    assert (NULL.enabled, NULL.detail, NULL.fingerprints, NULL.overhead_ns, NULL.lost) == (False, "off", "off", 0, 0)


def test_the_current_recorder(tmp_path: Path) -> None:
    assert recording.current() is NULL
    with Recorder.open(tmp_path, "t", "trainer") as rec:
        recording.set_current(rec)
        assert recording.current() is rec
        recording.set_current(NULL)


def test_own_cost_is_counted(tmp_path: Path) -> None:
    with Recorder.open(tmp_path, "t", "trainer") as rec:
        for _ in range(50):
            with rec.span(Stage.READ):
                pass
        some = rec.overhead_ns
        assert some > 0
        with rec.span(Stage.READ):
            time.sleep(0.2)
        assert rec.overhead_ns - some < 100_000_000  # the body of a span is no cost of the recorder's


def test_wrong_use_is_refused_by_name(tmp_path: Path) -> None:
    assert Recorder.open(tmp_path / "none", "t", "trainer", detail="off") is NULL
    assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="bad name"):
        Recorder.open(tmp_path, "a/b", "trainer")
    with pytest.raises(UsageError, match="unknown level"):
        Recorder.open(tmp_path, "t", "trainer", detail="much")  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(StallscopeError, match="cannot write into the run folder"):
        Recorder.open(tmp_path / "file", "t", "trainer")


def test_importing_the_profiler_loads_nothing_heavy() -> None:
    child = start(
        """
import sys, profiler
assert "numpy" not in sys.modules
import profiler.recorder, profiler.hashing, profiler.jit, profiler.osread
heavy = {"ray", "cupy", "lmdb", "plyvel", "numba", "psutil", "pyarrow", "datasets", "gpu"} & set(sys.modules)
assert not heavy, heavy
"""
    )
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (0, "")


def test_recording_never_imports_pandas(tmp_path: Path) -> None:
    """Arrow would, wherever it is installed: slow in every worker, and an error in a process that is ending."""
    (tmp_path / "pandas.py").write_text("raise SystemExit('pandas was imported')\n")
    code = """
import sys
sys.path.insert(0, sys.argv[2])
from profiler.recorder import Recorder
from profiler.events import Stage
from profiler.sampler import Sampler
with Sampler(sys.argv[1], 50):
    rec = Recorder.open(sys.argv[1], "t", "trainer", flush_s=60)
    with rec.span(Stage.STEP, step=1):
        rec.fingerprint(1, "params", 3, 4)
    assert rec.flush()
    rec.mark(Stage.READY, step=2)
assert "pandas" not in sys.modules
"""
    child = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "run", tmp_path],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (child.returncode, child.stderr) == (0, "")
    run = load_run(tmp_path / "run")
    assert run.events.num_rows == 2
    assert run.fingerprints["name"].to_pylist() == ["params"]
    assert run.samples.num_rows > 0
