"""Whether the head of a Ray cluster is still there: asked from a thread, since Ray itself does not tell.

A minute after the head has gone, Ray ends every process that is connected to it, at once and without a report; until
then calls wait. So a job has to notice before.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil

from pipeline.process import Process

EVERY_S = 2.0
LOST_S = 15.0
"""A head that has answered no connection for so long is lost. (One that is restarted in that time is not.)"""
_FAILURES = 3


class HeadWatch:
    """Connects to ``address`` (host:port of the head's gcs_server) every :data:`EVERY_S` until :meth:`close`.

    ask: a question to the head, which raises where it does not answer: the kernel takes connections for a server that
        hangs or is half way through its end. Not counted before it was answered once: it may need rights that we lack.
    """

    def __init__(self, address: str, ask: Callable[[], object] | None = None) -> None:
        self.address = address
        self.why = ""
        self._question, self._answered = ask, False
        self._answered_s, self._failures = time.monotonic(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="stallscope-head", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Costs no system call."""
        # After a pause of this process the last answer is old, and nothing was asked since.
        return self._failures >= _FAILURES and time.monotonic() - self._answered_s > LOST_S

    def close(self) -> None:
        self._stop.set()

    def _go_on(self) -> None:
        while not self._stop.is_set():
            try:
                self._ask()
                self._answered_s, self._failures = time.monotonic(), 0
            except OSError as error:
                self.why = error.strerror or str(error)
                self._failures += 1
            self._stop.wait(EVERY_S)

    def _ask(self) -> None:
        host, _, port = self.address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), EVERY_S).close()
        if self._question is None:
            return
        try:
            self._question()
            self._answered = True
        except Exception as error:  # of gRPC, which a Ray of another version may have other errors of
            if self._answered:
                raise TimeoutError(f"it takes connections and answers nothing ({type(error).__name__})") from error


def connected() -> tuple[HeadWatch | None, Process | None]:
    """A watch on the head of the cluster that this process is connected to, and its own node's raylet.

    None where Ray does not say where they are.
    """
    import ray

    head = raylet = None
    with contextlib.suppress(Exception):  # whatever another version of Ray raises: nobody is watched then
        context = ray.get_runtime_context()
        here = context.get_node_id()
        sockets = [node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == here]
        raylet = next(_processes_with(f"--raylet_socket_name={sockets[0]}"), None)
        head = HeadWatch(context.gcs_address, _question_to(context.gcs_address))
    return head, raylet


def _question_to(address: str) -> Callable[[], object] | None:
    """What Ray's own tools ask a head to see that it lives."""
    try:
        from ray._private.grpc_utils import init_grpc_channel
        from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

        ask = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(init_grpc_channel(address)).CheckAlive
        question = gcs_service_pb2.CheckAliveRequest()  # type: ignore[attr-defined]
    except (ImportError, AttributeError):
        return None
    return lambda: ask(question, timeout=EVERY_S)


def _processes_with(argument: str) -> Iterator[Process]:
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if process.info["name"] == "raylet" and argument in process.cmdline():
                yield Process(process.pid)
