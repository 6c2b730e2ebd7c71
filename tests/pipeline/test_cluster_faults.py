"""What goes wrong with a cluster of several nodes, or with two jobs on one machine. Takes minutes: real clusters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.process import Process
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


# -- E14: the head of the cluster ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_whose_cluster_loses_its_head_fails_in_time_with_its_last_snapshot(
    tmp_path: Path, path: str, cluster: Any, how: signal.Signals
) -> None:
    """Ray would end it after 60 s, without a word to anybody."""
    (tmp_path / "net.prototxt").write_text(NET % path)
    (tmp_path / "solver.prototxt").write_text('base_lr: 0.01 lr_policy: "fixed" max_iter: 100000')
    flags = [
        f"--net={tmp_path}/net.prototxt", f"--solver={tmp_path}/solver.prototxt", "--feed.workers=1",
        f"--run.folder={tmp_path}/run", "--device.backend=emulated", "--device.step_ms=100", "--run.checkpoint_every=5",
    ]  # fmt: skip
    job = subprocess.Popen(
        [sys.executable, "-m", "pipeline.train", *flags, "--address", cluster.address],
        env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not list(tmp_path.glob("run/snapshots/iter_5.json")):
            assert job.poll() is None and time.monotonic() < deadline, job.communicate(timeout=1)
            time.sleep(0.1)
        workers = [
            Process(found.pid) for found in psutil.process_iter(["cmdline"])
            if "WorkerActor" in " ".join(found.info["cmdline"] or ())
        ]  # fmt: skip
        assert workers
        (gcs,) = cluster.head_node.all_processes["gcs_server"]
        gcs.process.send_signal(how)
        gcs.process.wait()
        began = time.monotonic()
        said, errors = job.communicate(timeout=90)
        took = time.monotonic() - began
    finally:
        job.kill()
        job.communicate()
    assert "cluster head lost" in errors, (said, errors)
    assert job.returncode == 2
    assert took < 50, "before Ray's minute is over"
    last = said.split("the last snapshot is ")[1].split(": ")[0]
    assert Path(last).is_file()
    assert "run.if_exists: resume" in said
    for worker in workers:
        assert worker.wait(60)
        worker.close()
