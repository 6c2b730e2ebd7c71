from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import plyvel
import psutil
import pytest

from datasets.errors import DatasetChanged, DatasetTruncated
from pipeline import ray_runtime
from pipeline.crew import FeedError
from pipeline.feed import Feed
from pipeline.process import Process
from pipeline.spec import FeedSpec, TransformSpec
from pipeline.transforms import TransformError
from profiler import store
from profiler.events import Kind, Stage
from profiler.recorder import Recorder
from tests.pipeline import golden
from tests.pipeline.build import commit, picture, raw, write_lmdb
from tests.pipeline.faults import Saboteur, audit

pytestmark = pytest.mark.ray

MNIST = "tests/data/db/mnist_test"
SPEC = FeedSpec(
    f"{MNIST}_lmdb", 16, shuffle="full", seed=4, stop_step=40, depth=4, fingerprints="step", poison=True,
    engine="ray", workers=2, transform=TransformSpec(crop=20, mirror=True, python="tests.pipeline.functions:slow"),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    with ray_runtime.running(num_cpus=2):
        yield


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return [step["fill"] for step in golden.hashes(replace(SPEC, engine="inline"))]


def until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.02)


def rings_open() -> int:
    """Descriptors of this process that are a ring; without those that only an old error's frames hold."""
    gc.collect()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("stallscope-ring" in os.readlink(link) for link in links if os.path.islink(link))


@pytest.mark.parametrize("topology", ["fused", "split"])
def test_a_killed_worker_loses_nothing_and_the_note_says_what_happened(
    tmp_path: Path, expected: list[int], topology: Literal["fused", "split"]
) -> None:
    spec = replace(SPEC, topology=topology, recorder_folder=str(tmp_path), detail="full")
    got, victims = [], []
    with Recorder.open(tmp_path, "trainer", "trainer") as recorder, Feed.from_spec(spec, recorder) as feed:
        for batch in feed:
            got.append(batch.hashes["fill"])
            if batch.step == 10:
                # All of them: a late one could make the rest, and nobody would need the replacement.
                until(lambda: len(feed.stats()["workers"]) == spec.workers)
                victims = feed.stats()["workers"]
                for victim in victims:
                    os.kill(victim, signal.SIGKILL)
        assert feed.stats()["restarts"] == len(victims) > 0
    assert got == expected
    run = store.load_run(tmp_path)
    lost = [note for note in run.notes if note["note"] == "worker_lost"]
    assert sorted(note["lost_pid"] for note in lost) == sorted(victims)
    assert {note["exit"] for note in lost} <= {"SIGKILL", "unknown"}
    rows = run.events.to_pylist()
    assert len([row for row in rows if row["stage"] == Stage.RESTART]) >= 1
    made = [row["step"] for row in rows if row["stage"] == Stage.READY]
    # A batch that was ready when its worker died is not made again; its mark may have died with the worker.
    assert len(made) == len(set(made))
    assert set(made) <= set(range(40))
    if topology == "split":
        owners = {row["actor"] for row in rows if row["stage"] == Stage.READ}
        assert len(owners) >= 2  # the owner's own lane, and its share in the worker's
        assert [row for row in rows if row["stage"] == Stage.TRANSFER and row["kind"] == Kind.SPAN]


def test_nothing_is_left_after_close(expected: list[int]) -> None:
    with Feed.from_spec(replace(SPEC, source=f"{MNIST}_leveldb")) as feed:
        got = [next(feed).hashes["fill"] for _ in range(12)]
        workers = [Process(pid) for pid in feed.stats()["workers"]]
        assert rings_open() >= 1
    assert got == expected[:12]
    assert len(workers) >= 1
    for worker in workers:
        assert not worker.alive
        worker.close()
    assert rings_open() == 0
    until(lambda: not [p for p in psutil.Process().children(recursive=True) if "Actor" in " ".join(_words(p))])


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_bad_record_surfaces_with_data_set_key_and_record() -> None:
    spec = replace(SPEC, transform=TransformSpec(python="tests.pipeline.functions:breaks_on_label_7"))
    with Feed.from_spec(spec) as feed, pytest.raises(TransformError, match="seven is right out") as caught:
        list(feed)
    text = str(caught.value)
    assert f"{MNIST}_lmdb" in text
    assert "record " in text
    assert "key '" in text
    assert type(caught.value) is TransformError  # and no wrapper of Ray's


@pytest.mark.long
def test_back_pressure_never_more_ready_than_slots() -> None:
    with Feed.from_spec(replace(SPEC, stop_step=None)) as feed:
        next(feed)
        until(lambda: feed.stats()["slots"]["ready"] == 3)
        time.sleep(0.2)
        slots = feed.stats()["slots"]
        assert (slots["ready"], slots["leased"], slots["free"], slots["filling"]) == (3, 1, 0, 0)


def test_a_stopped_worker_is_killed_and_replaced(expected: list[int]) -> None:
    got = []
    with Feed.from_spec(replace(SPEC, stall_timeout_s=2.0)) as feed:
        for batch in feed:
            got.append(batch.hashes["fill"])
            if batch.step == 10:
                until(lambda: len(feed.stats()["workers"]) == 2)  # a late one could make all the rest
                for pid in feed.stats()["workers"]:
                    os.kill(pid, signal.SIGSTOP)
        assert feed.stats()["restarts"] >= 1
    assert got == expected


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_owner_is_started_again(expected: list[int], how: signal.Signals) -> None:
    got = []
    spec = replace(SPEC, source=f"{MNIST}_leveldb", topology="split", stall_timeout_s=10.0)
    with Feed.from_spec(spec) as feed:
        for batch in feed:
            got.append(batch.hashes["fill"])
            if batch.step == 10:
                owners = [p for p in psutil.Process().children(recursive=True) if "OwnerActor" in " ".join(_words(p))]
                assert len(owners) == 1
                owners[0].send_signal(how)
        assert feed.stats()["restarts"] == 0, "it is the owner that was lost, and no worker"
    assert got == expected


@pytest.mark.parametrize("topology", ["fused", "split"])
def test_a_cut_table_ends_the_feed_with_the_cut(tmp_path: Path, topology: Literal["fused", "split"]) -> None:
    """A short read in the process that reads; and an owner that is killed meanwhile meets it when it opens."""
    folder = tmp_path / "db"
    values = [raw(picture(i, (3, 64, 64)), i % 10) for i in range(64)]
    with plyvel.DB(str(folder), create_if_missing=True, compression=None, write_buffer_size=1 << 16) as db:
        for i, value in enumerate(values):
            db.put(b"%08d" % i, value)
    spec = FeedSpec(
        str(folder), 4, engine="ray", workers=1, depth=2, shuffle="full", stop_step=400, topology=topology
    )  # fmt: skip
    with Feed.from_spec(spec) as feed:
        next(feed)
        owners = [p for p in psutil.Process().children(recursive=True) if "OwnerActor" in " ".join(_words(p))]
        assert len(owners) == (topology == "split")
        for owner in owners:
            owner.suspend()
        for table in folder.glob("*.ldb"):
            os.truncate(table, 4096)
        for owner in owners:
            owner.kill()
        with pytest.raises(DatasetTruncated, match=r"\.ldb") as caught:
            list(feed)
    assert str(folder) in str(caught.value)


@pytest.mark.long
def test_a_test_feed_beside_a_training_feed(expected: list[int]) -> None:
    test = FeedSpec(
        f"{MNIST}_lmdb", 50, phase="TEST", cycle=3, engine="ray", workers=1, worker_cpus=0.1, depth=2,
        fingerprints="step", first_actor=501,
    )  # fmt: skip
    inline = golden.hashes(replace(test, engine="inline", stop_step=3))
    with Feed.from_spec(SPEC) as train, Feed.from_spec(test) as tested:
        got = [next(train).hashes["fill"] for _ in range(5)]
        assert [next(tested).hashes for _ in range(9)] == inline * 3
        got += [batch.hashes["fill"] for batch in train]
    assert got == expected


def test_workers_that_find_no_cpu_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    class Hog:
        def here(self) -> bool:
            return True

    hog = ray.remote(Hog).options(num_cpus=2).remote()
    assert ray.get(hog.here.remote())
    try:
        feed = Feed.from_spec(replace(SPEC, start_timeout_s=1.0))
        with feed, pytest.raises(FeedError, match="no worker of the feed has started") as caught:
            next(feed)
        assert "worker 1 (0.75 CPU); worker 2 (0.75 CPU)" in str(caught.value)
    finally:
        ray.kill(hog)


def test_more_workers_than_cpus_fail_before_anything_starts() -> None:
    with pytest.raises(FeedError, match="more CPUs than this node has"), Feed.from_spec(replace(SPEC, workers=5)):
        pass
    assert rings_open() == 0


def test_a_ray_that_was_up_before_stays_up() -> None:
    import ray

    with Feed.from_spec(replace(SPEC, stop_step=2)) as feed:
        list(feed)
    assert ray.is_initialized()


@pytest.mark.parametrize("way", ["killed", pytest.param("ended", marks=pytest.mark.long)])
def test_a_feed_of_its_own_ray_is_quiet_and_leaves_no_process_behind(tmp_path: Path, way: str) -> None:
    """In a process of its own: one is killed in mid-run, one ends by itself."""
    script = tmp_path / "job.py"
    script.write_text(
        "import sys, time, json, psutil\n"
        "from pipeline.feed import Feed\n"
        "from tests.pipeline.test_feed_ray import SPEC\n"
        "from dataclasses import replace\n"
        "if __name__ == '__main__':\n"
        "    with Feed.from_spec(replace(SPEC, stop_step=None, workers=1)) as feed:\n"
        "        for _ in range(6): next(feed)\n"
        "        children = [p.pid for p in psutil.Process().children(recursive=True)]\n"
        "        sys.stdout.write(json.dumps(children) + '\\n'); sys.stdout.flush()\n"
        "        if sys.argv[1] == 'stay': time.sleep(600)\n"
        "    sys.stdout.write(str(len(psutil.Process().children(recursive=True))) + '\\n')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    environment.pop("RAY_ADDRESS", None)
    if way == "ended":
        done = subprocess.run(
            [sys.executable, script, "go"], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        children, left = done.stdout.splitlines()
        assert len(json.loads(children)) >= 3
        assert left == "0"
        assert done.stderr == ""
        return
    with subprocess.Popen([sys.executable, script, "stay"], env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        pids = json.loads(job.stdout.readline())
        job.kill()
    processes = [Process(pid) for pid in pids]
    until(lambda: not any(process.alive for process in processes))
    for process in processes:
        process.close()


def database(folder: Path) -> str:
    return write_lmdb(folder, [raw(picture(i, (1, 8, 8)), i % 10) for i in range(64)])


def test_a_commit_during_a_run_is_an_error_of_the_feed_within_seconds(tmp_path: Path) -> None:
    path = database(tmp_path / "db")
    with Feed.from_spec(FeedSpec(path, 4, engine="ray", workers=2, depth=2)) as feed:
        next(feed)
        commit(path)
        began = time.monotonic()
        with pytest.raises(DatasetChanged, match="written to while it was in use") as caught:
            list(feed)
        assert time.monotonic() - began < 60
        assert feed.stats()["restarts"] == 0
    assert path in str(caught.value)


def test_a_cut_during_a_run_is_an_error_and_no_dead_worker(tmp_path: Path) -> None:
    path = database(tmp_path / "db")
    with Feed.from_spec(FeedSpec(path, 4, engine="ray", workers=2, depth=2)) as feed:
        next(feed)
        os.truncate(f"{path}/data.mdb", 8192)
        with pytest.raises(DatasetTruncated, match="became shorter while it was being read") as caught:
            list(feed)
        assert feed.stats()["restarts"] == 0
    assert path in str(caught.value)


def test_a_sigbus_is_told_apart_from_running_out_of_memory(tmp_path: Path) -> None:
    """Should the kernel be faster than our look at the file's size."""
    spec = replace(SPEC, max_restarts=0, workers=1, recorder_folder=str(tmp_path), detail="full", stop_step=None)
    with Recorder.open(tmp_path, "trainer", "trainer") as recorder, Feed.from_spec(spec, recorder) as feed:
        next(feed)
        os.kill(feed.stats()["workers"][0], signal.SIGBUS)
        with pytest.raises(FeedError, match="was lost") as caught:
            list(feed)
    (note,) = (note for note in store.load_run(tmp_path).notes if note["note"] == "worker_lost")
    if note["exit"] == "SIGBUS":  # known from Linux 6.15 on
        assert note["meaning"] == "a mapped file shrank or is truncated"
        assert "SIGBUS (a mapped file shrank or is truncated)" in str(caught.value)
        assert "verify" in str(caught.value)
    assert "OOM" not in str(caught.value)


@pytest.mark.long
def test_two_epochs_with_a_tail_under_kills_at_seeded_moments() -> None:
    """More seeds, and stopped workers, in test_faults_ray.py."""
    spec = replace(
        SPEC, source="tests/data/db/crops96_raw_40x48_lmdb", batch=7, tail="partial", stop_step=28, max_restarts=50
    )
    whole = [step["fill"] for step in golden.hashes(replace(spec, engine="inline"))]
    saboteur = Saboteur(1, between=(5, 9), most=2, signals=(signal.SIGKILL,))
    seen: list[tuple[int, int]] = []
    got = []
    with Feed(spec) as feed:
        for batch in feed:
            got.append(batch.hashes["fill"])
            seen += zip(batch.epochs.tolist(), batch.ids.tolist(), strict=True)
            saboteur.after(batch.step, feed.stats()["workers"])
    assert got == whole
    audit(seen, 96, 2)
    assert len(saboteur.done) == 2
