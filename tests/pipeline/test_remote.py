"""Workers on other nodes: the same batches, through Ray objects; a node that is lost costs nothing but time."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pipeline import elsewhere, placement, ray_runtime, remote
from pipeline.crew import FeedError
from pipeline.feed import Feed
from pipeline.maker import BatchMaker, LocalReader, probe
from pipeline.spec import FeedSpec, TransformSpec
from pipeline.worker import open_data
from profiler import store
from profiler.errors import UsageError
from profiler.events import Stage
from profiler.recorder import NULL, Recorder
from tests.pipeline import golden

MNIST = "tests/data/db/mnist_test_lmdb"
SPEC = FeedSpec(
    MNIST, 16, shuffle="full", seed=4, stop_step=60, depth=4, fingerprints="step", poison=True, engine="ray", workers=1,
    remote_workers=1, worker_cpus=0.5, transform=TransformSpec(crop=20, mirror=True), on_bad_record="skip",
)  # fmt: skip


def test_a_parcel_is_the_batch_with_its_events(tmp_path: Path) -> None:
    """Without Ray: what the two ends do, as they do it."""
    spec = replace(SPEC, engine="inline", remote_workers=0, tail="partial", detail="full")
    with open_data(spec) as source, Recorder.open(tmp_path, "worker-1", "worker", 1) as recorder:
        probed = probe(spec, source)
        maker = remote.MakerActor(spec, probed, "full")
        carried = remote.Carried(_Here(maker), probed, recorder)
        carried._ask = lambda call: call  # type: ignore[method-assign,assignment]
        carried.warm_up()
        alone = BatchMaker(spec, probed, LocalReader(source), NULL)
        slots = [probed.layout.views(np.full(probed.layout.nbytes, 0xEE, np.uint8)) for _ in range(2)]
        for step in (0, 3, 62):
            assert carried.make(step, slots[0], index=2, flags=1) == alone.make(step, slots[1])
            for name in ("data", "labels", "ids", "epochs", "bad_count"):
                count = 8 if step == 62 and name != "bad_count" else None
                np.testing.assert_array_equal(getattr(slots[0], name)[:count], getattr(slots[1], name)[:count])
    events = store.load_run(tmp_path).events.to_pylist()
    for step in (0, 3, 62):
        mine = [row for row in events if row["step"] == step]
        assert {row["actor"] for row in mine} == {1}
        stages = [Stage(row["stage"]) for row in sorted(mine, key=lambda row: int(row["t0_ns"]))]
        assert stages == [Stage.READ, Stage.DECODE, Stage.AUGMENT, Stage.COLLATE, Stage.TRANSFER]
        assert all(row["t0_ns"] <= row["t1_ns"] for row in mine)
        assert next(row for row in mine if row["stage"] == Stage.TRANSFER)["bytes"] == probed.layout.nbytes


class _Here:
    """Calls of an actor's handle, made at once."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return type("Method", (), {"remote": staticmethod(method)})


def test_what_the_other_node_finds_wrong_is_raised_here(tmp_path: Path) -> None:
    with open_data(SPEC) as source:
        probed = probe(SPEC, source)
    gone = remote.MakerActor(replace(SPEC, source=str(tmp_path / "nothing")), probed, "off")
    for call in (gone.ready, lambda: gone.make(0, 0, 0)):
        with pytest.raises(Exception, match="nothing"):
            call()


def test_remote_workers_that_would_wait_for_ever_are_refused() -> None:
    spec = replace(SPEC, remote_workers=3)
    big = 10**6

    def nodes(*cpus: float, store: int = big) -> list[placement.Node]:
        return [placement.Node(f"node {i}", count, store) for i, count in enumerate(cpus)]

    placement.check_remote(spec, nodes(1.0, 0.5), 1000, 7500)
    with pytest.raises(FeedError, match=r"(?s)3 x 0.5 CPUs.*2 other nodes with 0.5, 0.6 CPUs.*remote_workers: 2"):
        placement.check_remote(spec, nodes(0.5, 0.6), 1000, big)
    with pytest.raises(FeedError, match=r"(?s)0 other nodes.*--address auto"):
        placement.check_remote(spec, [], 1000, big)
    needed = (
        r"(?s)store of the trainer's node.*3 workers x 2 batches x 1000 bytes = 6000 bytes, at most 80 % of the store"
    )
    with pytest.raises(FeedError, match=needed):
        placement.check_remote(spec, nodes(4.0), 1000, 7499)
    placement.check_remote(spec, nodes(1.0, 1.0, store=5000), 1000, big)
    with pytest.raises(FeedError, match=r"(?s)store of node 0.*2 workers x 2 batches x 1000 bytes = 4000 bytes"):
        placement.check_remote(spec, nodes(1.0, 1.0, store=4999), 1000, big)
    with pytest.raises(UsageError, match=r"feed.remote_workers needs feed.engine: ray"):
        replace(SPEC, engine="inline")
    assert placement.plan(replace(spec, workers=2), 2, owner=False).cpus == 2 * 0.5 + 3 * 0.1 + 0.25


NODES = [
    {"NodeManagerHostname": f"host{i}", "NodeManagerAddress": f"10.0.0.{i}", "NodeID": f"{i}abcdef0123"} for i in (1, 2)
]


def test_a_node_that_lacks_the_data_set_is_named_before_anything_starts(tmp_path: Path) -> None:
    """Case E11: data go by their path, on every node."""
    with open_data(SPEC) as source:
        spec = replace(SPEC, identity=source.identity())

    def look(*texts: str | None) -> Any:
        return lambda spec, nodes: list(texts)

    elsewhere.check_data(spec, NODES, look(None, None))
    with pytest.raises(FeedError, match="1 of the 2 other nodes of the cluster cannot read the data set") as caught:
        elsewhere.check_data(spec, NODES, look(None, "/data/x is not there"))
    assert MNIST in str(caught.value)
    assert "host2 (10.0.0.2, node 2abcdef0): /data/x is not there" in str(caught.value)
    assert "host1" not in str(caught.value)

    assert elsewhere.look_at_data(spec) is None
    assert "nothing" in (elsewhere.look_at_data(replace(spec, source=str(tmp_path / "nothing"))) or "")
    other = replace(spec, source="tests/data/db/crops96_raw_40x48_lmdb")
    assert (elsewhere.look_at_data(other) or "").startswith("another data set lies there")


@pytest.fixture
def address() -> Iterator[str]:
    """Of a cluster of two nodes on this machine."""
    from ray.cluster_utils import Cluster

    sizes = {"num_cpus": 2, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=sizes)
    try:
        cluster.add_node(**sizes)
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.mark.ray
@pytest.mark.long
def test_batches_of_another_node_are_the_same_and_its_loss_loses_nothing(tmp_path: Path, address: str) -> None:
    from ray._private.internal_api import memory_summary

    expected = [step["fill"] for step in golden.hashes(replace(SPEC, engine="inline", remote_workers=0))]
    spec = replace(SPEC, recorder_folder=str(tmp_path), detail="full", workers=1, transform=replace(
        SPEC.transform, python="tests.pipeline.functions:slow"
    ))  # fmt: skip
    got: list[int] = []
    with (
        ray_runtime.running(address=address),
        Recorder.open(tmp_path, "trainer", "trainer") as recorder,
        Feed.from_spec(spec, recorder) as feed,
    ):
        for batch in feed:
            got.append(batch.hashes["fill"])
            deadline = time.monotonic() + 120
            while batch.step == 0 and len(feed.stats()["workers"]) < 2:  # or the one that is here makes them all
                assert time.monotonic() < deadline, "the other node never came in"
                time.sleep(0.05)
            if batch.step == 25:
                makers = [
                    process for process in psutil.process_iter(["cmdline"])
                    if "MakerActor" in " ".join(process.info["cmdline"] or ())
                ]  # fmt: skip
                for maker in makers:
                    os.kill(maker.pid, signal.SIGKILL)
        assert feed.stats()["restarts"] >= 1
        stores = str(memory_summary(stats_only=True))
        assert int(re.search(r", (\d+) objects", stores)[1]) <= 4, "case E3: what was copied is given back"  # type: ignore[index]
    assert got == expected
    events = store.load_run(tmp_path).events.to_pylist()
    carried = {row["step"] for row in events if row["stage"] == Stage.TRANSFER and row["actor"] == 1}
    assert len(carried) > 3, "the other node made some of them"
