"""Whether the head of a Ray cluster is still there: asked from a thread, since Ray itself does not tell.

A minute after the head has gone, Ray ends every process that is connected to it, at once and without a report; until
then calls wait. So a job has to notice before.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import psutil

from pipeline.process import Process

EVERY_S = 2.0
LOST_S = 15.0
"""A head that has answered no connection for so long is lost. (One that is restarted in that time is not.)"""
_FAILURES = 3
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a connection of gRPC (HTTP/2) begins; the server answers with its settings."""


class HeadWatch:
    """Connects to ``address`` (host:port of the head's gcs_server) every :data:`EVERY_S` until :meth:`close`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.why = ""
        self._answered_s, self._failures = time.monotonic(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="stallscope-head", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Costs no system call."""
        # After a pause of this process the last answer is old, and nothing was asked since.
        return self._failures >= _FAILURES and time.monotonic() - self._answered_s > LOST_S

    def close(self) -> None:
        self._stop.set()

    def _ask(self) -> None:
        host, _, port = self.address.rpartition(":")
        speaks: bool | None = None
        while not self._stop.is_set():
            try:
                with socket.create_connection((host.strip("[]"), int(port)), EVERY_S) as line:
                    if speaks is not False:
                        # The kernel takes connections for a server that hangs or has half ended: it has to speak.
                        line.sendall(_HELLO)
                        try:
                            spoke = bool(line.recv(1))
                        except TimeoutError:
                            spoke = False
                        if not spoke and speaks:
                            raise TimeoutError("no word of it within 2 s")
                        speaks = spoke  # at first: with TLS it may never speak to us, so a connection has to do
                    self._answered_s, self._failures = time.monotonic(), 0
            except OSError as error:
                self.why = error.strerror or str(error)
                self._failures += 1
            self._stop.wait(EVERY_S)


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
        head = HeadWatch(context.gcs_address)
    return head, raylet


def _processes_with(argument: str) -> Iterator[Process]:
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if process.info["name"] == "raylet" and argument in process.cmdline():
                yield Process(process.pid)
