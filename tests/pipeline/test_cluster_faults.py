"""What goes wrong with a cluster of several nodes, or with two jobs on one machine. Takes minutes: real clusters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline import Feed, actors, ray_runtime
from pipeline.crew import FeedError
from pipeline.process import Process
from pipeline.spec import FeedSpec
from pipeline.spill import StoreFull
from profiler import report, store
from profiler.events import Flag, Stage
from profiler.recorder import Recorder
from tests.pipeline.build import picture, raw, write_lmdb

pytestmark = [pytest.mark.ray, pytest.mark.long]

SIZES: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 << 20}


@pytest.fixture
def cluster() -> Iterator[Any]:
    """One of a single node, the head, that knows nothing of this process's jobs."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args=SIZES)
    try:
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write_lmdb(tmp_path / "db", [raw(picture(i, (1, 8, 8)), i % 10) for i in range(64)])


NET = """
layer { name: "d" type: "Data" top: "data" top: "label" data_param { source: "%s" batch_size: 4 backend: LMDB } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 10 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def environment() -> dict[str, str]:
    variables = {**os.environ, "PYTHONPATH": os.getcwd()}
    variables.pop("RAY_ADDRESS", None)
    return variables


# -- E14 and E9: the head of the cluster ends, the driver ends -------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path, path: str, cluster: Any) -> Iterator[subprocess.Popen[str]]:
    """A training job on the cluster that has written its first snapshot."""
    (tmp_path / "net.prototxt").write_text(NET % path)
    (tmp_path / "solver.prototxt").write_text('base_lr: 0.01 lr_policy: "fixed" max_iter: 100000')
    flags = [
        f"--net={tmp_path}/net.prototxt", f"--solver={tmp_path}/solver.prototxt", "--feed.workers=1",
        f"--run.folder={tmp_path}/run", "--device.backend=emulated", "--device.step_ms=100", "--run.checkpoint_every=5",
    ]  # fmt: skip
    started = subprocess.Popen(
        [sys.executable, "-m", "pipeline.train", *flags, "--address", cluster.address],
        env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not list(tmp_path.glob("run/snapshots/iter_5.json")):
            assert started.poll() is None, started.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield started
    finally:
        started.kill()
        started.communicate()


def workers(cluster: Any) -> list[Process]:
    """Those of this cluster's node, and of no other Ray on the machine."""
    (raylet,) = cluster.head_node.all_processes["raylet"]
    children = psutil.Process(raylet.process.pid).children(recursive=True)
    found = [Process(child.pid) for child in children if "WorkerActor" in " ".join(child.cmdline())]
    assert found
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_whose_cluster_loses_its_head_fails_in_time_with_its_last_snapshot(
    job: subprocess.Popen[str], cluster: Any, how: signal.Signals
) -> None:
    """Ray would end it after 60 s, without a word to anybody."""
    making = workers(cluster)
    (gcs,) = cluster.head_node.all_processes["gcs_server"]
    gcs.process.send_signal(how)
    said, errors = job.communicate(timeout=240)
    assert "cluster head lost" in errors, (said, errors)
    assert job.returncode == 2, "in time: Ray's own end of it would have been 1"
    last = said.split("the last snapshot is ")[1].split(": ")[0]
    assert Path(last).is_file()
    assert "run.if_exists: resume" in said
    for worker in making:
        assert worker.wait(60)
        worker.close()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_job_that_ends_leaves_nothing_on_a_cluster_that_it_has_joined_and_the_cluster_as_it_was(
    job: subprocess.Popen[str], cluster: Any, how: signal.Signals
) -> None:
    making = workers(cluster)
    job.send_signal(how)
    job.communicate(timeout=240)
    for worker in making:
        assert worker.wait(60)
        worker.close()
    assert job.returncode == (130 if how is signal.SIGINT else -signal.SIGKILL)
    for name in ("gcs_server", "raylet"):
        (server,) = cluster.head_node.all_processes[name]
        assert server.process.poll() is None
    with ray_runtime.running(address=cluster.address):
        assert actors.node_cpus() == 2


# -- E11: a node without the data --------------------------------------------------------------------------------------


def test_a_node_without_the_data_is_named_before_training(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "python:tests.pipeline.user_data:Somewhere"
    cluster.add_node(**SIZES)
    monkeypatch.setenv("STALLSCOPE_TEST_NO_DATA", "1")
    bare = cluster.add_node(**SIZES)
    monkeypatch.delenv("STALLSCOPE_TEST_NO_DATA")
    spec = FeedSpec(source, 4, stop_step=20, engine="ray", workers=1, remote_workers=1, worker_cpus=0.5, param="{}")
    with ray_runtime.running(address=cluster.address):
        with pytest.raises(FeedError, match="1 of the 2 other nodes") as caught, Feed.from_spec(spec) as feed:
            next(feed)
        assert f"node {bare.node_id[:8]}): " in str(caught.value)
        assert "no data on this node" in str(caught.value)
        cluster.remove_node(bare)
        deadline = time.monotonic() + 60
        while len(actors.other_nodes()) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with Feed.from_spec(spec) as feed:
            assert len(list(feed)) == 20


# -- E1: a full object store -------------------------------------------------------------------------------------------


def hog(node_id: str) -> Any:
    """An actor on that node which fills its object store."""
    import numpy as np
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Hog:
        def __init__(self) -> None:
            self.refs: list[Any] = []
            self.views: list[Any] = []

        def put(self, number: int, pause_s: float = 0.0) -> None:
            for _ in range(number):
                self.refs.append(ray.put(np.zeros(10 << 20, np.uint8)))
                time.sleep(pause_s)

        def pin(self) -> None:
            """What is looked at cannot be written to disk."""
            self.views = [ray.get(ref) for ref in self.refs]

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(Hog).options(num_cpus=0.1, scheduling_strategy=there).remote()


def both(feed: Feed) -> None:
    """Wait until the worker of the other node is there too, or the one that is here makes all batches."""
    deadline = time.monotonic() + 240
    next(feed)
    while len(feed.stats()["workers"]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def large(tmp_path: Path) -> FeedSpec:
    """Batches of 20 MB, half of which come from another node."""
    path = write_lmdb(tmp_path / "large", [raw(picture(i, (3, 256, 256)), i) for i in range(52)])
    return FeedSpec(path, 26, stop_step=400, engine="ray", workers=1, remote_workers=1, worker_cpus=0.5, depth=4)


def test_a_store_that_spills_is_a_reason_of_the_stall(tmp_path: Path, cluster: Any) -> None:
    import ray

    node = cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    spec = replace(large(tmp_path), recorder_folder=str(tmp_path / "run"), detail="full")
    with (
        ray_runtime.running(address=cluster.address),
        Recorder.open(tmp_path / "run", "trainer", "trainer") as recorder,
    ):
        neighbour, put, last = hog(node.node_id), None, 400
        with Feed.from_spec(spec, recorder) as feed:
            both(feed)
            for step in range(1, 400):
                if step == 20:
                    put = neighbour.put.remote(50, 0.1)
                if step < last == 400 and put is not None and ray.wait([put], timeout=0)[0]:
                    last = step + 40
                if step == last:
                    break
                with recorder.span(Stage.STEP, step=step, flags=Flag.FIRST if step == 1 else 0):
                    next(feed)
                    with recorder.span(Stage.COMPUTE, step=step):
                        time.sleep(0.02)
    run = store.load_run(tmp_path / "run")
    spilled = [row for row in run.events.to_pylist() if row["stage"] == Stage.SPILL]
    assert sum(row["bytes"] for row in spilled) > 50 << 20
    made = report.build(run)
    (finding,) = [finding for finding in made.findings if finding.kind == "objects_spilled"]
    assert "(80 MiB)" in finding.text
    causes = [cause for cause in made.stalls if cause.why == "spill"]
    assert [cause.where for cause in causes] == ["transfer"]
    assert causes[0].seconds > 0
    assert causes[0].evidence["spilled_mib"] > 50
    assert "--object-store-memory" in causes[0].remedy


def test_a_full_store_beside_a_full_disk_ends_the_feed_by_name(tmp_path: Path) -> None:
    """Every disk counts as full here, and what fills the store is in use, so it cannot be written to disk."""
    import ray
    from ray.cluster_utils import Cluster

    head = {**SIZES, "_system_config": {"local_fs_capacity_threshold": 0.0001}}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        node = made.add_node(num_cpus=2, object_store_memory=80 << 20)
        with ray_runtime.running(address=made.address):
            neighbour = hog(node.node_id)
            ray.get(neighbour.put.remote(7))
            ray.get(neighbour.pin.remote())
            with Feed.from_spec(replace(large(tmp_path), max_restarts=0)) as feed:
                both(feed)
                with pytest.raises(StoreFull, match="object store is full, and so is the disk") as caught:
                    list(feed)
                assert "ray memory" in str(caught.value)
    finally:
        made.shutdown()


# -- E15: two at once --------------------------------------------------------------------------------------------------

TWICE = """
import sys
from pipeline import Feed, ray_runtime
if __name__ == "__main__":
    with ray_runtime.running(), Feed(sys.argv[1], batch=8, workers=1, stop_step=4) as feed:
        sys.stdout.write(str(len(list(feed))))
"""


@pytest.mark.parametrize("time", range(20))
def test_two_drivers_that_start_at_once(tmp_path: Path, path: str, time: int) -> None:
    """Ports are chosen before they are taken; both have to come up."""
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    drivers = [
        subprocess.Popen(
            [sys.executable, str(script), path], env=environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        for driver in drivers:
            said, errors = driver.communicate(timeout=240)
            assert (said, driver.returncode) == ("4", 0), errors
    finally:
        for driver in drivers:
            driver.kill()
            driver.communicate()
