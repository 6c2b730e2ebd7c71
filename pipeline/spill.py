"""Whether Ray writes objects to the disk for want of room in its object stores, while batches travel as objects.

Nothing fails then: everything only gets slower, and nobody is told. So the counters of the nodes that take part are
read once a second, and what was written or read back in that second is an event.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profiler.errors import StallscopeError
from profiler.events import Kind, Stage
from profiler.recorder import Recorder

EVERY_S = 1.0


class StoreFull(StallscopeError):
    """Ray has no room for an object, neither in memory nor on the disk."""


def store_full(error: BaseException, where: str) -> StoreFull | None:
    """What an error of Ray's says about a full object store or a full disk; None for any other error."""
    import ray

    cause = getattr(error, "cause", None) or error
    if isinstance(cause, ray.exceptions.OutOfDiskError):
        what, found = "Ray's object store is full, and so is the disk that it writes objects to", "no room on the disk"
    elif isinstance(cause, ray.exceptions.ObjectStoreFullError):
        what, found = "Ray's object store is full", "no room in memory"
    else:
        return None
    return StoreFull(
        f"{what}, so a batch could not travel: {where}",
        expected="room for two batches of each remote worker",
        found=found,
        hint="ray memory shows what fills the store, df what fills the disk; fewer feed.remote_workers, a smaller "
        "batch, or ray start --object-store-memory",
    )


@dataclass(frozen=True)
class Counters:
    """Of one node's store since it started: bytes, and the seconds that it took."""

    written: int = 0
    restored: int = 0
    seconds: float = 0.0
    store_bytes: int = 0


class Watch:
    """Turns the counters of some nodes into events, and notes each node that spills once.

    Parameters
    ----------
    readers: by the name of a node, what gives its counters; an error of any kind means that they are not known now.
    """

    def __init__(self, recorder: Recorder, readers: Mapping[str, Callable[[], Counters]]) -> None:
        self._recorder, self._readers = recorder, dict(readers)
        self._last: dict[str, tuple[int, Counters]] = {}
        self._told: set[str] = set()

    def look(self) -> None:
        """Read all counters once."""
        for node, read in self._readers.items():
            try:
                now, found = time.monotonic_ns(), read()
            except Exception as error:  # Ray's inner workings, which may change: the job does not depend on them
                self._tell(f"{node} unknown", "spill_unknown", node=node, reason=f"{type(error).__name__}: {error}")
                continue
            then, before = self._last.get(node, (now, found))
            self._last[node] = (now, found)
            written, restored = found.written - before.written, found.restored - before.restored
            if written <= 0 and restored <= 0:
                continue
            # The counters move when a piece of work has ended, which may have begun before the last look.
            begun = min(then, now - int((found.seconds - before.seconds) * 1e9))
            self._recorder.add(
                Kind.SPAN, Stage.SPILL, begun, now, items=max(0, restored), nbytes=max(0, written), actor=0
            )
            self._tell(node, "objects_spilled", node=node, store_mib=found.store_bytes >> 20)

    def _tell(self, once: str, note: str, **fields: Any) -> None:
        if once not in self._told:
            self._told.add(once)
            self._recorder.note(note, **fields)


@contextlib.contextmanager
def watching(recorder: Recorder, nodes: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """A context in which the object stores of these nodes (of ``ray.nodes()``) are looked at."""
    try:
        readers = {f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})": _reader(node) for node in nodes}
    except (ImportError, AttributeError, KeyError) as error:
        recorder.note("spill_unknown", reason=f"this version of Ray does not tell ({error})")
        yield
        return
    watch, stop = Watch(recorder, readers), threading.Event()

    def go_on() -> None:
        while True:
            watch.look()
            if stop.wait(EVERY_S):
                return

    thread = threading.Thread(target=go_on, name="stallscope-spill", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(2 * EVERY_S)


def _reader(node: Mapping[str, Any]) -> Callable[[], Counters]:
    """Of one node's raylet; what ``ray memory`` asks of it."""
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc

    channel = init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
    ask = node_manager_pb2_grpc.NodeManagerServiceStub(channel).GetNodeStats
    question = node_manager_pb2.GetNodeStatsRequest(include_memory_info=False)  # type: ignore[attr-defined]

    def read() -> Counters:
        said = ask(question, timeout=EVERY_S).store_stats
        return Counters(
            said.spilled_bytes_total, said.restored_bytes_total, said.spill_time_total_s + said.restore_time_total_s,
            said.object_store_bytes_avail,
        )  # fmt: skip

    return read
