"""Advice names configuration keys and flags that exist, at values that this version takes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pipeline import placement
from pipeline.config import keys, validate
from pipeline.spec import FeedSpec
from profiler import advice, report, store, timeline
from profiler.advice import Setting
from profiler.finding import StallCause
from profiler.stalls import attribute
from tests.profiler.synthetic import Job, Log, simulate, write_run

ADVICE = (Path(__file__).parents[2] / "profiler" / "advice.py").read_text()


def test_every_key_named_exists() -> None:
    known = {key for key, _ in keys()}
    named = set(re.findall(r"\b(?:data|feed|device|run|profile)(?:\.[a-z_0-9]+)+", ADVICE))
    assert named
    assert named <= known, named - known


@pytest.mark.parametrize(
    ("key", "value"), re.findall(r"\b((?:data|feed|device|run|profile)(?:\.[a-z_0-9]+)+): ([a-z]+)\b", ADVICE)
)
def test_every_value_named_is_accepted(key: str, value: str) -> None:
    document: dict = {}
    section = document
    *path, last = key.split(".")
    for name in path:
        section = section.setdefault(name, {})
    section[last] = value
    validate(document)


def causes(job: Job, setting: Setting, log: Log | None = None) -> tuple[StallCause, ...]:
    events = (log or simulate(job)).events()
    return attribute(timeline.build(events), events, depth=job.depth, setting=setting).causes


@pytest.mark.parametrize("owner", [False, True])
@pytest.mark.parametrize("cores", range(1, 9))
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_no_more_workers_are_advised_than_are_placed(cores: int, workers: int, owner: bool) -> None:
    remedy = causes(Job(steps=60, workers=workers, read=40.0 * workers), Setting(cores=cores, owner=owner))[0].remedy
    advised = [int(number) for number in re.findall(r"raise feed\.workers to (\d+)", remedy)]
    spec = FeedSpec(source="nowhere", batch=1, workers=advised[0] if advised else workers + 1)
    # The placement knows the training feed alone; the worker of the test reserves its CPUs beside it.
    room = cores - advice.TEST_CPUS
    if advised:
        assert advised[0] > workers
        placement.plan(spec, room, owner=owner)
    else:
        assert "smaller" in remedy
        assert f"{cores} core" in remedy or cores == 1
        with pytest.raises(placement.FeedError):
            placement.plan(spec, room, owner=owner)


def test_one_core_is_not_told_to_use_workers() -> None:
    assert "feed.engine" in causes(Job(steps=60, inline=True, read=10), Setting(cores=2))[0].remedy
    assert "feed.engine" not in causes(Job(steps=60, inline=True, read=10), Setting(cores=1))[0].remedy


def test_without_a_count_of_cores_that_is_said() -> None:
    assert "not known" in causes(Job(steps=60, read=40), Setting())[0].remedy


@pytest.mark.parametrize("where", [*advice.WHERE_TEXT])
@pytest.mark.parametrize("why", [*advice.WHY_TEXT])
@pytest.mark.parametrize("side", ["data", "loop"])
def test_a_foreign_loop_is_advised_no_key(where: str, why: str, side: str) -> None:
    job = Job(steps=30, inline=True)
    events = simulate(job).events()
    line = timeline.build(events)
    parts = list(attribute(line, events).models)
    found = {"worst_steps": [{"step": 7, "ms": 1.0}]}
    said = advice.remedy(advice.Key(where, why, side), parts, line, found, Setting(loop=True))
    assert not re.search(r"\b(data|feed|device|run|profile|datasets)\.[a-z]|RUN/|prototxt", said)
    assert said


def test_a_loop_that_starved_is_advised_in_terms_of_the_loop(tmp_path: Path) -> None:
    log = simulate(Job(read=40, steps=60))
    log.rows[:] = [row for row in log.rows if row[3] == 0]
    folder = write_run(tmp_path / "run", log, manifest={"job": {"type": "loop"}, "outcome": {"state": "finished"}})
    made = report.build(store.load_run(folder))
    assert made.headline.startswith("Steps waited 21.3 ms of 41.4 ms for data.")
    assert "give the loader more workers" in made.stalls[0].remedy
    assert "not seen per batch" in made.stalls[0].remedy


def slow_batches(step: int) -> dict[str, float]:
    return {"decode": 400.0} if step % 50 == 25 else {}


def test_the_records_of_slow_batches_are_named(tmp_path: Path) -> None:
    """From RUN/records/ where the run has it; otherwise the folder is named, and no tool that cannot select."""
    from pipeline.records import RecordLog

    folder = write_run(tmp_path / "run", simulate(Job(workers=2, slow=slow_batches)), manifest={})
    without = report.build(store.load_run(folder)).stalls[0]
    assert without.why == "straggler"
    assert "RUN/records/" in without.remedy
    assert "datasets.inspect" not in without.remedy

    log = RecordLog(folder)
    for step in range(200):
        log.add(step, 0, np.arange(1000 * step, 1000 * step + 64))
    log.close()
    cause = report.build(store.load_run(folder)).stalls[0]
    for worst in cause.evidence["worst_steps"]:
        assert worst["record_count"] == 64
        assert worst["records"] == list(range(1000 * worst["step"], 1000 * worst["step"] + 64))
    first = cause.evidence["worst_steps"][0]["step"]
    assert f"step {first}: {1000 * first}, {1000 * first + 1}" in cause.remedy

    (path,) = (folder / "records").iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    assert report.build(store.load_run(folder)).stalls[0].why == "straggler"  # a torn list is no failure


def test_the_profilers_own_cost_is_named_as_such(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", simulate(Job(host=0.6, profiler=2.0)), manifest={})
    made = report.build(store.load_run(folder))
    own, display = (next(c for c in made.stalls if (c.where, c.side) == ("host", s)) for s in ("profiler", "loop"))
    assert own.seconds == pytest.approx(0.4, rel=0.01)
    assert display.seconds == pytest.approx(0.12, rel=0.01)
    assert "profile.fingerprints" in own.remedy
    assert "fingerprints" not in display.remedy
    assert "display in the solver's prototxt" in display.remedy
    assert made.overhead["fingerprints_seconds"] == pytest.approx(0.4, rel=0.01)
    assert "profiler's fingerprints 7" in made.headline


def test_fingerprints_that_cannot_be_told_apart_are_named_with_the_display() -> None:
    (host,) = [c for c in causes(Job(host=2.0), Setting(fingerprints=True)) if c.where == "host"]
    assert host.evidence["work"] == "fingerprints and display"
    assert "profile.fingerprints: off" in host.remedy
