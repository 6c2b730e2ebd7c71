"""Whole jobs: what a run leaves behind, and what its report says about time that is known beforehand."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from profiler import store
from profiler.events import Flag, Kind, Stage
from profiler.timeline import as_events, build
from tests.e2e.conftest import EXAMPLE, Databases, Finished, environment, manifest, report, train

STEP_MS = 20
FEED_ONLY = [
    "--device.backend=emulated", f"--device.step_ms={STEP_MS}", "--data.train.source=memory:records=64,shape=1x28x28",
    "--run.folder=run",
]  # fmt: skip


def _check_partition(folder: Path) -> dict[str, Any]:
    """The report, with its parts shown to add up to the wall time, which covers the loop without gaps."""
    document = report(folder)
    assert sum(document["partition"].values()) == pytest.approx(document["wall_s"], rel=0.01)
    timeline = build(as_events(store.load_run(folder).events))
    assert timeline.step.tolist() == list(range(document["steps"]))
    whole_ns = int(timeline.t1_ns[-1] - timeline.t0_ns[0])
    assert timeline.wall_ns.sum() == pytest.approx(whole_ns, rel=0.01), "steps follow each other without gaps"
    assert document["partition"]["unattributed"] <= 0.03 * document["wall_s"]
    return document


def _check_started_before_the_loop(events: np.ndarray) -> None:
    """No part of the first step is the wait for a worker's start: each feed had its first batch when the loop began."""
    spans = events[events["kind"] == Kind.SPAN]
    first = spans[spans["stage"] == Stage.STEP][0]
    ready = events[events["stage"] == Stage.READY]
    start = spans[(spans["stage"] == Stage.START) & (spans["actor"] == 0)]
    assert start["t1_ns"].max() <= first["t0_ns"]
    assert (ready["t0_ns"] < first["t0_ns"]).sum() >= 2, "one batch of each feed"
    waits = spans[spans["stage"] == Stage.FEED_WAIT]
    for flag in (0, Flag.TEST_PHASE):
        (wait,) = waits[waits["flags"] == (Flag.FIRST | flag)]
        took_ns = wait["t1_ns"] - wait["t0_ns"]
        assert took_ns < 0.05 * (start["t1_ns"] - start["t0_ns"]).max(), "next to what the start took it is nothing"


def _steady_ms(folder: Path, part: str) -> float:
    """Median milliseconds of one part in the steps after the cold one."""
    from profiler.timeline import PART

    timeline = build(as_events(store.load_run(folder).events))
    return float(np.median(timeline.parts_ns[timeline.steady, PART[part]])) / 1e6


@pytest.fixture(scope="module")
def lenet(databases: Databases, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """A short inline LeNet job with a test and two snapshots: its folder and what it printed."""
    cwd = tmp_path_factory.mktemp("lenet")
    done = train(
        EXAMPLE, *databases.flags("lmdb"), "--feed.engine=inline", "--run.iterations=60", "--run.checkpoint_every=50",
        "--run.folder=run", cwd=cwd,
    )  # fmt: skip
    assert done.code == 0, done.err + done.out
    return cwd / "run", done


def test_a_run_leaves_everything_in_its_folder(lenet: tuple[Path, Finished]) -> None:
    folder, done = lenet
    snapshots = {f"iter_{n}.{kind}" for n in (50, 60) for kind in ("caffemodel", "solverstate", "json")}
    assert {path.name for path in (folder / "snapshots").iterdir()} == snapshots
    assert [path.name for path in (folder / "events").glob("*.parquet")] == ["events.parquet"]
    assert not list((folder / "events").glob("*.arrows")), "streams are compacted at a clean end"
    for name in ("manifest.json", "report.json", "report.html"):
        assert (folder / name).stat().st_size > 0
    for name in ("run/report.html", "run/report.json", "run/snapshots/iter_60.caffemodel"):
        assert name in done.out, "the end says where the files are"
    assert done.err == ""


def test_the_manifest_tells_the_run(lenet: tuple[Path, Finished]) -> None:
    document = manifest(lenet[0])
    assert document["outcome"]["state"] == "finished"
    assert document["outcome"]["step"] == 60
    assert document["config"]["data"]["train"]["batch"] == 64
    assert document["config"]["feed"]["engine"] == "inline"
    assert document["data"]["train"]["records"] == 4000
    assert document["backend"]["name"] == "numpy"
    assert {pool["threads"] for pool in document["blas"]} == {1}
    assert document["blas"][0]["name"]
    assert document["blas"][0]["version"]
    assert {pool["num_threads"] for pool in document["environment"]["blas"] if pool["internal_api"] == "openblas"} == {
        1
    }
    assert [test["step"] for test in document["tests"]] == [0, 60]
    assert document["tests"][0]["accuracy"] < 0.3
    assert document["tests"][1]["accuracy"] > 0.8
    assert "data.train.source" in "\n".join(document["notes"])


def test_every_step_is_recorded_with_its_records_and_fingerprints(lenet: tuple[Path, Finished]) -> None:
    folder, _ = lenet
    (path,) = (folder / "records").glob("ids-*.arrows")
    table = pa.ipc.open_stream(path).read_all()
    assert table["step"].to_pylist() == list(range(60))
    first_epoch = np.concatenate([np.array(ids) for ids in table["ids"].to_pylist()])
    assert len(set(first_epoch[:3840].tolist())) == 3840, "no record comes twice within an epoch"
    prints = store.load_run(folder).fingerprints
    hashes: dict[str, dict[int, int]] = {}
    for name, step, value in zip(*(prints[key].to_pylist() for key in ("name", "step", "ordered")), strict=True):
        assert hashes.setdefault(name, {}).setdefault(step, value) == value
    assert set(hashes) == {"ids", "raw", "fill", "device", "loss", "params"}
    assert all(sorted(values) == list(range(60)) for values in hashes.values())
    assert hashes["fill"] == hashes["device"], "the bytes on the device are those of the slot"
    assert len(set(hashes["params"].values())) == 60


def test_the_partition_of_a_real_job_adds_up(lenet: tuple[Path, Finished]) -> None:
    document = _check_partition(lenet[0])
    assert document["steps"] == 60
    assert document["outcome"] == "finished"
    assert document["partition"]["test"] > 0
    assert document["partition"]["checkpoint"] > 0


def _warm(document: dict[str, Any]) -> dict[str, float]:
    """Seconds of stall by place, without what the cold start cost."""
    places: dict[str, float] = {}
    for stall in document["stalls"]:
        if stall["why"] != "cold_start":
            places[stall["where"]] = places.get(stall["where"], 0.0) + stall["seconds"]
    return places


def _in_one_of_three(
    run: Callable[[Path], dict[str, Any]], times: Callable[[Path, dict[str, Any]], None], tmp_path: Path
) -> None:
    """``run`` holds in every try. ``times`` may fail twice: somebody else's load only adds to what is expected."""
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        document = run(folder)
        try:
            times(folder / "run", document)
            return
        except AssertionError:
            if number == 2:
                raise


@pytest.mark.alone
@pytest.mark.ray
def test_a_step_fed_instantly_shows_no_stall(tmp_path: Path) -> None:
    def run(folder: Path) -> dict[str, Any]:
        done = train(
            *FEED_ONLY, "--data.train.batch=8", "--feed.engine=ray", "--feed.workers=1", "--run.iterations=100",
            cwd=folder,
        )  # fmt: skip
        assert done.code == 0, done.err + done.out
        return _check_partition(folder / "run")

    def times(folder: Path, document: dict[str, Any]) -> None:
        assert _steady_ms(folder, "compute") == pytest.approx(STEP_MS, rel=0.1)
        assert _steady_ms(folder, "feed_wait") < 0.05 * STEP_MS
        assert document["au"] > 0.8
        assert "waited" not in document["headline"], "nobody waited for data"
        places = ("storage", "read", "decode", "function", "augment")
        feed = [seconds for place, seconds in _warm(document).items() if place in places]
        assert sum(feed) < 0.02 * document["wall_s"]

    _in_one_of_three(run, times, tmp_path)


@pytest.mark.alone
@pytest.mark.parametrize("engine", ["inline", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_slow_feed_shows_the_stall_where_it_is(tmp_path: Path, engine: str) -> None:
    """40 ms of a user's transform before a step of 20 ms: the wait is 40 ms inline, and 20 ms beside a worker."""
    expected = 40 if engine == "inline" else 20

    def run(folder: Path) -> dict[str, Any]:
        done = train(
            *FEED_ONLY, "--data.train.batch=1", f"--feed.engine={engine}", "--feed.workers=1", "--run.iterations=80",
            "--data.transform.python=user_transforms:sleep", cwd=folder,
        )  # fmt: skip
        assert done.code == 0, done.err + done.out
        document = _check_partition(folder / "run")
        assert "for data: own function" in document["headline"]
        return document

    def times(folder: Path, document: dict[str, Any]) -> None:
        assert _steady_ms(folder, "feed_wait") == pytest.approx(expected, rel=0.25)
        warm = _warm(document)
        assert warm["function"] > 0.8 * sum(warm.values()), document["stalls"]
        assert warm["function"] == pytest.approx(expected * 1e-3 * document["steps"], rel=0.25)
        kind = ("function", "throughput")
        (main,) = [stall for stall in document["stalls"] if (stall["where"], stall["why"]) == kind]
        assert main["seconds"] > 0.9 * warm["function"]

    _in_one_of_three(run, times, tmp_path)


@pytest.mark.parametrize("both", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_closed_stdout_does_not_end_a_job(databases: Databases, tmp_path: Path, both: bool) -> None:
    """As with `| head -1`, or a `tee` that died: ``both`` is `2>&1 |`, and a signal must say its line to nobody."""
    command = [
        sys.executable, "-m", "pipeline.train", str(EXAMPLE), *databases.flags("lmdb"), "--feed.engine=inline",
        "--run.iterations=5000" if both else "--run.iterations=25", "--run.folder=run", "--data.train.batch=8",
        "--run.checkpoint_every=0", "--device.backend=emulated",
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if both else subprocess.PIPE, text=True,
    ) as job:  # fmt: skip
        assert job.stdout is not None
        assert job.stdout.readline()
        job.stdout.close()
        if both:
            deadline = time.monotonic() + 60
            while not list((tmp_path / "run" / "records").glob("*")) and time.monotonic() < deadline:
                time.sleep(0.05)
            job.send_signal(signal.SIGINT)
        err = job.stderr.read() if job.stderr else ""
        assert job.wait(60) == (130 if both else 0), err
        assert err == ""
    outcome = manifest(tmp_path / "run")["outcome"]
    assert outcome["state"] == ("interrupted" if both else "finished")
    assert (tmp_path / "run" / "snapshots" / f"iter_{outcome['step']}.json").exists()
    assert report(tmp_path / "run")["steps"] == outcome["step"]


@pytest.mark.long
@pytest.mark.ray
def test_the_demo_job_learns_through_ray(databases: Databases, tmp_path: Path) -> None:
    done = train(EXAMPLE, *databases.flags("lmdb"), "--run.folder=run", "--run.iterations=200", cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    document = manifest(tmp_path / "run")
    assert document["tests"][-1]["accuracy"] > 0.9
    assert document["feed"]["engine"] == "ray"
    run = store.load_run(tmp_path / "run")
    _check_started_before_the_loop(as_events(run.events))
    assert {"trainer", "worker"} <= {process["role"] for process in run.processes.values()}
    assert all(process["closed"] for process in run.processes.values())
    _check_partition(tmp_path / "run")
