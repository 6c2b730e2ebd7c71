"""What goes wrong in the real world while a feed runs through Ray. Takes minutes: real kills, and a Ray for each."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pipeline import Feed, ray_runtime
from pipeline.process import Process
from pipeline.spec import FeedSpec, TransformSpec
from tests.pipeline.build import picture, raw, write_lmdb
from tests.pipeline.faults import Saboteur, audit

pytestmark = [pytest.mark.ray, pytest.mark.long]

CROPS = "tests/data/db/crops96_raw_40x48_lmdb"
SPEC = FeedSpec(
    CROPS, 7, shuffle="full", seed=9, tail="partial", depth=4, stop_step=28, fingerprints="step", poison=True,
    engine="ray", workers=2, stall_timeout_s=1.5, max_restarts=50,
    transform=TransformSpec(crop=24, mirror=True, python="tests.pipeline.functions:slow"),
)  # fmt: skip


def until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """With the smallest object store that Ray takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_runtime, "OBJECT_STORE_BYTES", 100 << 20)
        with ray_runtime.running(num_cpus=2):
            yield


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with Feed(replace(SPEC, engine="inline")) as feed:
        return [batch.hashes["fill"] for batch in feed]


@pytest.mark.parametrize("seed", range(5))
def test_two_epochs_with_a_tail_under_kills_and_stops(local_ray: None, expected: list[int], seed: int) -> None:
    seen: list[tuple[int, int]] = []
    got, saboteur = [], Saboteur(seed, most=4)
    with Feed(SPEC) as feed:
        for batch in feed:
            got.append(batch.hashes["fill"])
            seen += zip(batch.epochs.tolist(), batch.ids.tolist(), strict=True)
            saboteur.after(batch.step, feed.stats()["workers"])
        assert feed.stats()["restarts"] >= 1
    assert got == expected
    audit(seen, 96, 2)
    assert len(saboteur.done) >= 2


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_resumed_with_any_number_of_workers(local_ray: None, expected: list[int], workers: int) -> None:
    spec = replace(SPEC, workers=workers, worker_cpus=0.5)
    with Feed(spec) as feed:
        for _ in range(9 + workers):
            next(feed)
        state = json.loads(json.dumps(feed.state_dict()))
    with Feed(replace(spec, workers=4 - workers)) as feed:
        feed.load_state_dict(state)  # the workers that `with` has started are at step 0
        assert [batch.hashes["fill"] for batch in feed] == expected[9 + workers :]


def test_a_feed_that_nobody_has_any_more_ends_its_workers(local_ray: None) -> None:
    feed = Feed(SPEC)
    next(feed)
    workers = [Process(pid) for pid in feed.stats()["workers"]]
    assert len(workers) >= 1
    del feed
    gc.collect()
    assert not any(worker.alive for worker in workers)
    for worker in workers:
        worker.close()
    assert "stallscope-ring" not in Path("/proc/self/maps").read_text()


def test_no_process_of_a_feed_knows_cupy_or_asks_for_a_device(local_ray: None) -> None:
    with Feed(replace(SPEC, transform=TransformSpec(python="tests.pipeline.functions:without_cupy"))) as feed:
        assert len(list(feed)) == 28
    assert "cupy" not in sys.modules


def test_a_thousand_large_batches_leave_the_object_store_empty(local_ray: None, tmp_path: Path) -> None:
    """Batches of 20 MB and a store of 100 MB, a slow consumer, and a small view kept of each batch."""
    from ray._private.internal_api import memory_summary

    path = write_lmdb(tmp_path / "db", [raw(picture(i, (3, 256, 256)), i) for i in range(52)])
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    store: list[float] = []
    memory: list[int] = []
    with Feed(path, batch=26, workers=2, depth=4, stop_step=1000) as feed:
        for batch in feed:
            kept.append((batch.data[:1, 0, 0, :4], batch.labels.copy()))
            time.sleep(0.002)
            if batch.step % 100 == 50:
                summary = memory_summary(stats_only=True)
                used = re.search(r"Plasma memory usage (\d+(?:\.\d+)?) MiB", summary)
                store.append(float(used[1]) if used else 0.0)
                assert "Spilled" not in summary
                memory.append(psutil.Process().memory_full_info().uss)
                assert sum(feed.stats()["slots"].values()) == 4
    assert max(store) < 1
    assert max(memory[1:]) - memory[1] < 20 << 20, "what was kept of a batch pins none of it"
    assert len(kept) == 1000


# -- processes of their own ------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys, time
import psutil
from dataclasses import replace
from pipeline import Feed
from profiler.errors import StallscopeError
from tests.pipeline.test_faults_ray import SPEC

def say(**what):
    sys.stdout.write(json.dumps(what) + "\\n")
    sys.stdout.flush()

def children():
    return {p.pid: " ".join(p.cmdline()) or p.name() for p in psutil.Process().children(recursive=True)}

def main(way):
    spec = replace(SPEC, workers=1)
    if way == "two feeds":
        train, test = Feed(spec), Feed(replace(spec, phase="TEST", worker_cpus=0.1, first_actor=501))
        first = next(train).step, next(test).step
        train.close()
        say(first=first, rest=len(list(test)))
        test.close()
        say(children=len(children()))
        with Feed(spec) as feed:
            say(again=len(list(feed)))
        return
    feed = Feed(spec)
    got = [next(feed).hashes["fill"]]
    say(children=children())
    if way == "forgets":
        return
    if way == "raises":
        raise ZeroDivisionError("the user's own")
    if way == "waits":
        time.sleep(600)
    sys.stdin.readline()
    began = time.monotonic()
    try:
        for batch in feed:
            got.append(batch.hashes["fill"])
        say(got=got)
    except StallscopeError as error:
        say(error=str(error), after_s=time.monotonic() - began)
    feed.close()

if __name__ == "__main__":
    main(sys.argv[1])
"""


class Script:
    """The script above in a process of its own, told how to end."""

    def __init__(self, folder: Path, way: str) -> None:
        file = folder / "script.py"
        file.write_text(SCRIPT)
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        environment.pop("RAY_ADDRESS", None)
        self.process = subprocess.Popen(
            [sys.executable, str(file), way], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def says(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # and not a word of Ray's about itself
                return json.loads(line)
        raise AssertionError(self.process.communicate()[1])

    def ends(self, timeout_s: float = 90) -> str:
        """What it wrote to stderr."""
        return self.process.communicate(timeout=timeout_s)[1]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[str], Script]]:
    scripts: list[Script] = []

    def start(way: str) -> Script:
        scripts.append(Script(tmp_path, way))
        return scripts[-1]

    yield start
    for script in scripts:
        script.process.kill()
        script.process.communicate()


Start = Callable[[str], Script]


def handles(children: dict[str, str]) -> dict[str, Process]:
    """By command line."""
    return {f"{pid} {name}": Process(int(pid)) for pid, name in children.items()}


def all_gone(processes: dict[str, Process]) -> None:
    until(lambda: not any(process.alive for process in processes.values()), 60)
    for process in processes.values():
        process.close()


@pytest.mark.parametrize(
    "victim", ["WorkerActor", "gcs_server", "raylet/raylet", "pipeline.watchdog", "RuntimeEnvAgent"]
)
def test_after_a_kill_of_anything_nothing_is_left(run: Start, expected: list[int], victim: str) -> None:
    script = run("goes on")
    processes = handles(script.says()["children"])
    hit = [name for name in processes if victim in name.split(" --")[0]]
    assert hit, list(processes)
    for name in hit:
        processes[name].kill()
    assert script.process.stdin is not None
    script.process.stdin.write("\n")
    script.process.stdin.flush()
    found = script.says()
    if "error" in found:
        assert victim in ("gcs_server", "raylet/raylet", "RuntimeEnvAgent"), "the raylet ends with its agent"
        assert "Ray has lost its" in found["error"]
        assert found["after_s"] < 30, "and not Ray's minute"
    else:
        assert found["got"] == expected
    script.ends()
    assert script.process.returncode == 0
    all_gone(processes)


@pytest.mark.parametrize("way", ["forgets", "raises", signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=str)
def test_however_a_script_ends_nothing_is_left(run: Start, way: str | signal.Signals) -> None:
    """Without ``with`` and without close()."""
    script = run(way if isinstance(way, str) else "waits")
    processes = handles(script.says()["children"])
    assert any("WorkerActor" in name for name in processes)
    if not isinstance(way, str):
        script.process.send_signal(way)
    text = script.ends()
    all_gone(processes)
    if way == "forgets":
        assert (script.process.returncode, text) == (0, "")
    if way == "raises":
        assert text.rstrip().endswith("ZeroDivisionError: the user's own")


def test_the_first_feed_to_end_does_not_take_ray_from_the_second(run: Start) -> None:
    script = run("two feeds")
    assert script.says() == {"first": [0, 0], "rest": 27}
    assert script.says() == {"children": 0}
    assert script.says() == {"again": 28}
    assert script.ends() == ""


def test_scripts_that_start_at_the_same_time(run: Start) -> None:
    for _ in range(2):
        scripts = [run("two feeds") for _ in range(2)]
        for script in scripts:
            assert script.says() == {"first": [0, 0], "rest": 27}
        for script in scripts:
            assert "Traceback" not in script.ends(180)
            assert script.process.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root may mount a small /dev/shm")
@pytest.mark.parametrize("size", ["64m", "1m"])
def test_a_small_dev_shm_is_no_hindrance(tmp_path: Path, size: str) -> None:
    file = tmp_path / "job.py"
    file.write_text(
        "from pipeline import Feed\nfrom tests.pipeline.test_faults_ray import SPEC\n"
        "import sys\nfrom dataclasses import replace\n"
        "if __name__ == '__main__':\n"
        "    with Feed(replace(SPEC, workers=1, batch=96)) as feed:\n"
        "        sys.stdout.write(str(len(list(feed))))\n"
    )
    command = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, "sh", sys.executable, str(file)],
        env={**os.environ, "PYTHONPATH": os.getcwd()}, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert (done.stdout, done.returncode) == ("28", 0), done.stderr
