"""Workers, and the reader of a split topology, as Ray actors. Ray loads at first use, and never carries a batch."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from pipeline import remote
from pipeline.crew import FeedError, Job, Outcome
from pipeline.maker import Probe
from pipeline.placement import CARRIER_CPUS, OWNER_CPUS, Plan
from pipeline.process import Process
from pipeline.ring import RingAddress
from pipeline.spec import FeedSpec
from pipeline.worker import open_data, recording, work
from profiler import osread, recorder
from profiler.errors import StallscopeError
from profiler.events import Kind, Stage
from profiler.recorder import Recorder

if TYPE_CHECKING:
    from datasets.source import Record

OWNER_ROW = 400  # actor numbers of owners lie away from those of workers
_OWNER_RESTARTS = 3


@dataclass(frozen=True)
class Block:
    """Records that an owner has read, with when (monotonic ns of this host) it did so and the
    readings of its thread, by their names in an event."""

    records: list[Record]
    t0_ns: int
    t1_ns: int
    readings: dict[str, int]
    pid: int


class WorkerActor:
    """Stays in one call of :meth:`run` for the feed's life."""

    def run(self, address: RingAddress, spec: FeedSpec, probed: Probe, row: int, owner: Any) -> int:
        """See :func:`pipeline.worker.work`. ``owner`` is an OwnerActor's handle, None where each reads for itself."""
        return work(
            address, spec, probed, row, None if owner is None else RemoteReader(owner, spec.stall_timeout_s / 2)
        )


class CarrierActor:
    """Brings batches from a maker on another node into the ring of this one; stays in one call, as a worker does."""

    def run(self, address: RingAddress, spec: FeedSpec, probed: Probe, row: int, node: str) -> int:
        """See :mod:`pipeline.remote`. ``node``: Ray's number of the node where batches are made."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"num_cpus": spec.worker_cpus, "scheduling_strategy": there, "max_restarts": 0}
        maker: Any = ray.remote(remote.MakerActor).options(**options).remote(spec, probed, spec.detail)
        return work(address, spec, probed, row, asks=lambda recorder: remote.Carried(maker, probed, recorder))


class OwnerActor:
    """The one process of a node that reads for all workers (``topology: split``); serves records by position.

    It keeps no position: a request asked twice gives the same answer, so Ray may restart it and ask again. What is
    wrong with the data set when it is opened, again perhaps, is told to whoever asks: an error of the making of an
    actor reaches them as text only.
    """

    def __init__(self, spec: FeedSpec) -> None:
        self._closing = contextlib.ExitStack()
        self._recorder = self._closing.enter_context(recording(spec, OWNER_ROW, "owner"))
        self._failure: StallscopeError | None = None
        try:
            self._source = self._closing.enter_context(contextlib.closing(open_data(spec)))
        except StallscopeError as error:
            self._failure = error

    def pid(self) -> int:
        return os.getpid()

    def read_many(self, indices: NDArray[np.int64], tags: dict[str, int]) -> Block:
        """The records of these positions, in this order."""
        if self._failure is not None:
            raise self._failure
        before = osread.thread_account()
        t0 = time.monotonic_ns()
        records = self._source.read_many(indices)
        t1 = time.monotonic_ns()
        after = osread.thread_account()
        readings = {name: after[name] - before[name] for name in after.keys() & before.keys()}
        self._recorder.add(
            Kind.SPAN, Stage.READ, t0, t1, items=len(records), nbytes=sum(len(record.value) for record in records),
            **readings, **tags,
        )  # fmt: skip
        return Block(records, t0, t1, readings, os.getpid())

    def close(self) -> None:
        """Close data set and recording; the actor is ended after that."""
        self._closing.close()


class RemoteReader:
    """Reads through an owner actor on the same node.

    Its spans: TRANSFER up to the owner's beginning (queueing there included), READ while the owner reads, TRANSFER
    until the records are here. The three are disjoint and add up to the whole.

    An owner that gives no answer for ``patience_s`` is killed: Ray starts it anew and asks it again.
    """

    def __init__(self, owner: Any, patience_s: float) -> None:
        self._owner, self._patience_s = owner, patience_s
        self._process: Process | None = None  # the one that answered last

    def read(self, indices: NDArray[np.int64], recorder: Recorder, **tags: int) -> list[Record]:
        import ray

        called = time.monotonic_ns()
        try:
            if self._process is None:
                self._process = Process(ray.get(self._owner.pid.remote()))
            block = self._wait_for(self._owner.read_many.remote(indices, tags))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, StallscopeError):  # what is wrong with the data, and not Ray's wrapping of it
                raise error.cause from None
            raise
        came = time.monotonic_ns()
        if self._process.pid != block.pid:
            self._process.close()
            self._process = Process(block.pid)
        nbytes, items = sum(len(record.value) for record in block.records), len(block.records)
        recorder.add(Kind.SPAN, Stage.TRANSFER, called, block.t0_ns, **tags)
        recorder.add(
            Kind.SPAN, Stage.READ, block.t0_ns, block.t1_ns, items=items, nbytes=nbytes, **block.readings, **tags,
        )  # fmt: skip
        recorder.add(Kind.SPAN, Stage.TRANSFER, block.t1_ns, came, items=items, nbytes=nbytes, **tags)
        return block.records

    def _wait_for(self, call: Any) -> Block:
        import ray

        try:
            return cast("Block", ray.get(call, timeout=self._patience_s))
        except ray.exceptions.GetTimeoutError:
            assert self._process is not None
            self._process.kill()
            recorder.current().note("owner_silent", pid=self._process.pid, silent_s=self._patience_s)
            return cast("Block", ray.get(call))


class RayLauncher:
    """Starts the workers of one feed on the node this process runs on. Ray must be up."""

    def __init__(self, spec: FeedSpec, probed: Probe, address: RingAddress, plan: Plan) -> None:
        import ray

        self._spec, self._probe, self._address, self._plan = spec, probed, address, plan
        self._owner: Any = None
        self._owner_pid = 0
        if plan.owner:
            options = _here(OWNER_CPUS) | {"max_restarts": _OWNER_RESTARTS, "max_task_retries": _OWNER_RESTARTS}
            self._owner = ray.remote(OwnerActor).options(**options).remote(spec)

    def launch(self, row: int) -> Job:
        import ray

        if row < self._spec.remote_workers:
            nodes = other_nodes()
            if not nodes:
                raise FeedError("no node is left for the remote workers of the feed", hint="ray status shows the nodes")
            node = nodes[row % len(nodes)]["NodeID"]
            carrier: Any = ray.remote(CarrierActor).options(**_here(CARRIER_CPUS), max_restarts=0).remote()
            return RayJob(carrier, carrier.run.remote(self._address, self._spec, self._probe, row, node))
        actor: Any = ray.remote(WorkerActor).options(**_here(self._plan.worker_cpus), max_restarts=0).remote()
        return RayJob(actor, actor.run.remote(self._address, self._spec, self._probe, row, self._owner))

    def describe(self, row: int) -> str:
        if row < self._spec.remote_workers:
            return f"worker {row + 1} ({self._spec.worker_cpus:g} CPU on another node)"
        return f"worker {row + 1} ({self._plan.worker_cpus:g} CPU)"

    def close(self) -> None:
        import ray

        owner, self._owner = self._owner, None
        if owner is None:
            return
        try:
            pid = ray.get(owner.pid.remote(), timeout=5)
            ray.get(owner.close.remote(), timeout=5)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            pid = 0  # it is gone already, or is ended the hard way now
        ray.kill(owner)
        if pid:
            process = Process(pid)
            process.wait(5)
            process.close()


class RayJob:
    """The call of one worker actor."""

    def __init__(self, actor: Any, call: Any) -> None:
        self._actor, self._call = actor, call

    def outcome(self, timeout_s: float = 0.0) -> Outcome | None:
        import ray

        done, _ = ray.wait([self._call], timeout=timeout_s)
        if not done:
            return None
        try:
            ray.get(self._call)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ray.exceptions.RayActorError):
                return Outcome("lost", text="the maker of its batches, on another node, is gone")
            if isinstance(cause, StallscopeError):
                return Outcome("error", cause)
            text = f"{type(cause).__name__}: {cause}" if cause is not None else str(error)
            wrapped = StallscopeError(
                f"a worker of the feed failed: {text}", hint="run with --feed.engine inline to see it in this process"
            )
            wrapped.add_note(str(error))  # the worker's traceback, shown with STALLSCOPE_TRACEBACK=1
            return Outcome("error", wrapped)
        except ray.exceptions.RayError as error:
            return Outcome("lost", text=str(error).splitlines()[0])
        return Outcome("done")

    def discard(self) -> None:
        import ray

        ray.kill(self._actor)


def other_nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster that are up, without the one this process runs on, in a settled order."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    nodes = (node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
    return sorted(nodes, key=lambda node: str(node["NodeID"]))


def this_node() -> dict[str, Any]:
    """The node that this process runs on."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return next(node for node in ray.nodes() if node["NodeID"] == here)


def node_cpus() -> float:
    """CPUs of the node this process runs on, as Ray counts them."""
    return float(this_node()["Resources"].get("CPU", 0))


def _here(num_cpus: float) -> dict[str, Any]:
    """Options of an actor that maps our memory: it must run on this node, with our packages importable."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {
        "num_cpus": num_cpus,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    }
