"""The report of a run folder: the answer first, JSON without NaN, faults in words, also for damaged and killed runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from profiler import report, store, terminal
from profiler.errors import StallscopeError
from profiler.events import PARTITION
from profiler.recorder import Recorder
from tests.profiler.synthetic import Job, simulate, write_run

KEYS = {
    "schema", "run", "steps", "wall_s", "step_ms", "au", "partition", "stalls", "fix_together", "slack", "replay_error",
    "correlation", "overhead", "coverage", "findings",
}  # fmt: skip


def folder_of(tmp_path: Path, job: Job, *, closed: bool = True, **changes: Any) -> Path:
    manifest = {
        "config": {"feed": {"depth": job.depth}, "device": {"backend": "emulated", "step_ms": job.compute}},
        "environment": {"cpu": {"usable": 2}},
        "outcome": {"state": "finished"},
        **changes,
    }
    return write_run(tmp_path / "run", simulate(job), manifest=manifest, closed=closed)


def numbers(document: Any) -> list[float]:
    if isinstance(document, dict):
        return [x for value in document.values() for x in numbers(value)]
    if isinstance(document, list):
        return [x for value in document for x in numbers(value)]
    return [document] if isinstance(document, float) else []


def test_the_document(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, Job(read=40, steps=60, jitter=0.2))
    made, files = report.write_default(folder)
    document = json.loads(files["json"].read_text())
    assert set(document) >= KEYS
    assert document["schema"] == 1
    assert document["steps"] == 60
    assert set(document["step_ms"]) == {"p50", "p95", "p99"}
    assert list(document["partition"]) == list(PARTITION)
    assert sum(document["partition"].values()) == pytest.approx(document["wall_s"], rel=1e-9)
    stall = document["stalls"][0]
    assert set(stall) >= {"where", "why", "seconds", "share", "ci95", "gain_alone", "evidence", "remedy"}
    assert stall["where"] == "read"
    assert sum(cause["share"] for cause in document["stalls"]) == pytest.approx(1)
    assert document["au"] == pytest.approx(20 / 41.4, rel=0.05)
    assert all(math.isfinite(x) for x in numbers(document))
    assert made.to_json() == document
    assert (folder / "report.html").stat().st_size < 6_000_000


def test_the_same_run_gives_the_same_report(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, Job(workers=2, decode=60, jitter=0.5, steps=80))
    texts = []
    for _ in range(2):
        report.write_default(folder)
        texts.append([(folder / name).read_bytes() for name in ("report.json", "report.html")])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("job", "start", "words"),
    [
        (Job(read=40), "Steps waited 21.3 ms of 41.4 ms for data: read 9", []),
        (Job(), "The accelerator was never starved", ["No stall."]),
        (Job(startup=2000), "The accelerator was never starved", ["only the start was slow (2.0 s"]),
        (Job(checkpoint_every=20, checkpoint=400), "The accelerator was never starved",
         ["The loop itself cost 20.2 ms of 40.3 ms a step: checkpoint"]),
        (Job(depth=1, read=10, release_late=True), "Steps waited", ["too shallow", "feed.depth"]),
    ],
)  # fmt: skip
def test_the_answer_comes_first_and_fits_one_screen(tmp_path: Path, job: Job, start: str, words: list[str]) -> None:
    text = report.summarise(folder_of(tmp_path, job))
    assert text.startswith(start)
    assert len(text.splitlines()) <= 24
    joined = " ".join(text.split())
    for word in words:
        assert word in joined


def test_a_lost_worker_is_told(tmp_path: Path) -> None:
    made = report.build(store.load_run(folder_of(tmp_path, Job(read=15, kill_worker_at=80, restart=900))))
    (fault,) = [finding for finding in made.findings if finding.kind == "worker_lost"]
    assert fault.step == 80
    for words in ("SIGKILL", "step 80", "0.9 s later", "no record was lost"):
        assert words in fault.text
    assert made.faults == {"worker_lost": 1}
    assert "a lost worker" in made.headline


def test_nothing_is_promised_about_a_batch_that_was_not_made_again(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, Job(steps=10))
    (folder / "events" / "trainer-1000.jsonl").write_text(
        json.dumps({"note": "worker_lost", "step": 500, "t_ns": 2**62, "wall_ns": 1, "exit": "SIGKILL"}) + "\n"
    )
    made = report.build(store.load_run(folder))
    (fault,) = [finding for finding in made.findings if finding.kind == "worker_lost"]
    assert "SIGKILL" in fault.text
    assert "no record" not in fault.text


def test_a_killed_run_is_reported_up_to_its_end(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, Job(read=40, stop_at=3010), closed=False, outcome={"state": "running"})
    path = folder / "events" / "trainer-1000.arrows"
    path.write_bytes(path.read_bytes()[:-7])  # a torn tail as well
    text = report.summarise(folder)
    assert "Steps waited" in text or "No training step" in text
    assert "killed or is still going" in " ".join(text.split())


@pytest.mark.parametrize(
    "state", [{"state": "failed", "error": "no space left"}, {"state": "interrupted", "signal": "SIGTERM"}]
)
def test_a_bad_end_is_told(tmp_path: Path, state: dict[str, str]) -> None:
    text = report.summarise(folder_of(tmp_path, Job(steps=20), outcome=state))
    assert state.get("error", state.get("signal")) in text


def test_a_run_without_a_step(tmp_path: Path) -> None:
    recorder = Recorder.open(tmp_path, "trainer", "trainer")
    recorder.note("something")
    recorder.close()
    made, files = report.write_default(tmp_path)
    assert made.headline.startswith("No training step was recorded")
    assert made.au is None
    assert json.loads(files["json"].read_text())["step_ms"] == {"p50": None, "p95": None, "p99": None}
    assert "No training step" in files["html"].read_text()
    assert "No training step" in terminal.text(made)


def test_what_the_recorder_writes_is_understood(tmp_path: Path) -> None:
    """Spans of a real recorder, not of the simulation."""
    from profiler.events import Stage

    with Recorder.open(tmp_path, "trainer", "trainer") as record:
        for step in range(5):
            with record.span(Stage.STEP, step=step):
                with record.span(Stage.FEED_WAIT, step=step):
                    sum(range(2_000))
                with record.span(Stage.COMPUTE, step=step):
                    sum(range(500_000))
    made = report.build(store.load_run(tmp_path))
    assert made.steps == 5
    assert sum(made.partition.values()) == pytest.approx(made.wall_s, rel=1e-9)
    assert made.partition["compute"] > made.partition["feed_wait"] > 0
    assert made.overhead["seconds"] > 0


def test_missing_readings_are_not_zero(tmp_path: Path) -> None:
    made = report.build(store.load_run(folder_of(tmp_path, Job(read=40, steps=30, readings=False))))
    assert (made.coverage["cpu"], made.coverage["run_queue"]) == (0.0, 0.0)
    made = report.build(store.load_run(folder_of(tmp_path / "other", Job(steps=30, jitter=0))))
    assert made.correlation["feed_latency_step"] is None
    assert "vary" in made.correlation["reason"]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "profiler.report", *arguments], capture_output=True, text=True, timeout=120
    )


def test_the_command_line(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, Job(read=40, steps=30))
    files = {kind: tmp_path / f"out/report.{kind}" for kind in ("html", "json", "trace")}
    done = command(str(folder), *(part for kind, path in files.items() for part in (f"--{kind}", str(path))))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Steps waited")
    assert json.loads(files["json"].read_text())["steps"] == 30
    assert json.loads(files["trace"].read_text())["traceEvents"]
    assert files["html"].read_text().startswith("<!doctype html>")
    assert all(str(path) in done.stdout for path in files.values())


def test_wrong_use_ends_with_2_and_one_message(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments in ([str(tmp_path / "nowhere")], [str(tmp_path / "empty")], []):
        done = command(*arguments)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr


def test_an_unwritable_file_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, Job(steps=10))
    with pytest.raises(StallscopeError, match="cannot write"):
        report.main([str(folder), "--json", str(folder)])


def test_a_run_resumed_after_a_reboot_keeps_its_order(tmp_path: Path) -> None:
    """The second part's monotonic clock began anew, below the first part's."""
    import pyarrow as pa

    from profiler.timeline import as_events, build, lanes

    first = simulate(Job(steps=6)).events()
    again = simulate(Job(steps=5, first_step=6, origin=1_000_000_000)).events()
    again["flags"][(again["stage"] == 1) & (again["step"] == 6)] = 1
    tables = []
    for name, events in (("trainer-9", again), ("trainer-5", first)):
        mine = events[events["actor"] == 0]
        columns = {field: mine[field] for field in mine.dtype.names}
        tables.append(pa.table({**columns, "process": [name] * len(mine), "role": ["trainer"] * len(mine)}))
    table = pa.concat_tables(tables)
    day = 86_400 * 10**9
    processes = {
        "trainer-9": {"role": "trainer", "boot_id": "b", "monotonic_ns": 10**9, "wall_ns": 20 * day},
        "trainer-5": {"role": "trainer", "boot_id": "a", "monotonic_ns": 10**12, "wall_ns": 19 * day},
    }
    events, names = lanes(table, processes)
    line = build(events)
    assert line.step.tolist() == list(range(11))
    assert line.segment.tolist() == [0] * 6 + [1] * 5
    assert line.wall_ns[6:].sum() == build(as_events(tables[0])).wall_ns.sum()
    assert names[0] in processes


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job(), "The accelerator was never starved: 0.5 % of the time was spent waiting for data."),
        (
            Job(host=3.0), "The accelerator was never starved: 0.5 % of the time was spent waiting for data. "
            "The loop itself cost 3.0 ms of 23.1 ms a step: host 99 %.",
        ),
        (Job(read=40, host=3.0, h2d=2.0), "Steps waited 18.4 ms of 41.4 ms for data: read 9"),
    ],
)  # fmt: skip
def test_waiting_for_data_is_told_from_the_loops_own_time(tmp_path: Path, job: Job, words: str) -> None:
    made = report.build(store.load_run(folder_of(tmp_path, job)))
    assert made.headline.startswith(words)
    first = made.headline.split(". ")[0]
    assert "host" not in first
    assert ("The loop itself cost 3.0 ms" in made.headline) == (job.host == 3.0)


def test_a_body_that_nothing_was_recorded_of_is_no_cost(tmp_path: Path) -> None:
    log = simulate(Job(steps=30))
    log.rows[:] = [row for row in log.rows if row[1] in (1, 2) and row[3] == 0]
    folder = write_run(tmp_path / "run", log, manifest={"job": {"type": "loop"}})
    made = report.build(store.load_run(folder))
    assert "is not recorded" in made.headline
    assert "cost" not in made.headline
    assert "body=" in made.stalls[0].remedy


def test_what_is_unknown_for_several_reasons_is_one_line(tmp_path: Path) -> None:
    """The document keeps the reasons apart, the terminal adds them up."""
    made = report.build(store.load_run(folder_of(tmp_path, Job(read=40, steps=40))))
    cause = made.stalls[0]
    whys = ("throughput", "straggler", "backpressure")
    parts = tuple(replace(cause, where="unknown", why=why, share=0.2, seconds=1.0, gain_alone_s=2.0) for why in whys)
    text = terminal.text(replace(made, stalls=parts))
    (line,) = [line for line in text.splitlines() if line.startswith("unknown")]
    assert "3.00 s" in line
    assert "60 %" in line
    assert "6.00 s" in line


def test_the_advice_on_top_is_for_what_the_answer_names(tmp_path: Path) -> None:
    made = report.build(store.load_run(folder_of(tmp_path, Job(read=22, host=0.05, profiler=8.0, inline=True))))
    assert made.headline.startswith("Steps waited")
    assert made.first is not None
    assert made.first.side == "data"
    assert "feed.engine: ray" in made.first.remedy
    made = report.build(store.load_run(folder_of(tmp_path / "other", Job(profiler=8.0))))
    assert made.first is not None
    assert made.first.side == "profiler"


def test_the_profilers_cost_is_shown(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, Job(profiler=2.0, steps=50))
    log = folder / "events" / "trainer-1000.jsonl"
    log.write_text(json.dumps({"note": "closed", "actor": 0, "overhead_ns": 50_000_000, "lost": 0}) + "\n")
    text = " ".join(report.summarise(folder).split())
    assert "profiler 4.5 % and fingerprints 9.0 %" in text
    page = report.write_default(folder)[1]["html"].read_text()
    assert "recording 4.5 %, fingerprints 9.0 %" in page


def test_quiet_prints_the_files_alone(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, Job(read=40, steps=30))
    done = command(str(folder), "--quiet", "--json", str(tmp_path / "r.json"))
    assert done.stdout == f"json   {tmp_path / 'r.json'}\n"
    assert (tmp_path / "r.json").exists()
