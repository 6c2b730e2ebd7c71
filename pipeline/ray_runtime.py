"""Ray for the length of a job: one of our own on this machine, or a cluster that somebody else runs.

What we started is stopped on every way out; a cluster that was only joined is left as it was.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pipeline import ray_head
from pipeline.crew import FeedError
from pipeline.process import Process
from pipeline.watchdog import watching
from profiler.osread import usable_cpus

if TYPE_CHECKING:
    from pipeline.config import Config

OBJECT_STORE_BYTES = 256 << 20
"""Of a local Ray: only records of a LevelDB owner go through it; batches lie in the ring."""

_log = logging.getLogger(__name__)
_RAYS_ANSWERS = (1, int(signal.SIGTERM))  # exit codes of Ray's two handlers of SIGTERM
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


@contextlib.contextmanager
def running(config: Config | None = None, address: str | None = None, num_cpus: int | None = None) -> Iterator[None]:
    """A context in which Ray is up. What the first of several started, the last one stops, in whatever order they end.

    Parameters
    ----------
    config: the job's configuration (kept for what later versions read from it).
    address: ``auto`` or an address joins that cluster; None starts a Ray of our own on this machine, unless this
        process is connected already (it was started by ``ray job submit``, or a notebook did it).
    num_cpus: of a Ray of our own; default: the CPUs that this process may use.

    Raises :class:`FeedError` where Ray cannot be started or the cluster cannot be reached.
    """
    if "ray" not in sys.modules:
        # Ray prints a long guess about every process that dies; the feed says itself what happened and goes on.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed while executing")
    import ray

    if not ray.is_initialized():
        _start(address, num_cpus)
    elif not _ours.contexts:
        _watch_cluster()  # somebody else's: left as it is
    _ours.contexts += 1
    try:
        yield
    finally:
        _ours.contexts -= 1
        if not _ours.contexts:
            _ours.ending.close()


class _Ours:
    """The Ray that a context of this process has started or joined: how many use it, and what ends it."""

    contexts = 0
    ending = contextlib.ExitStack()
    servers: tuple[tuple[str, Process], ...] = ()  # without one of these Ray can neither start nor end anything
    head: ray_head.HeadWatch | None = None  # of a cluster


_ours = _Ours()


def _start(address: str | None, num_cpus: int | None) -> None:
    import ray

    if address is None and os.environ.get("RAY_ADDRESS"):
        address = "auto"  # ray job submit tells the driver so which cluster it belongs to
    _ours.ending.close()  # of one that somebody else has shut down
    before = _descendants()
    try:
        _connect(address, num_cpus)
    except FeedError as error:
        if address is not None or isinstance(error.__cause__, OSError):
            raise
        # Some of its servers look for a free port and take it a moment later: another start may have been quicker.
        _log.info("Ray did not start, once more: %s", error.what)
        ray.shutdown()
        _connect(address, num_cpus)
    started = [] if address else sorted(_descendants() - before)
    with contextlib.ExitStack() as failed:
        failed.callback(ray.shutdown)
        if started:
            _watch(tuple(_servers(started)))
            _ours.ending.enter_context(watching(started))
        else:
            _watch_cluster()
        failed.pop_all()
    _ours.ending.callback(ray.shutdown)  # ends what ray.init started; from a joined cluster it only disconnects


def _watch(servers: tuple[tuple[str, Process], ...], head: ray_head.HeadWatch | None = None) -> None:
    _ours.servers, _ours.head = servers, head
    for _, server in servers:
        _ours.ending.callback(server.close)
    if head is not None:
        _ours.ending.callback(head.close)


def _watch_cluster() -> None:
    """Watch the head of a cluster that somebody else runs, and its node on this machine."""
    _ours.ending.close()
    head, raylet = ray_head.connected()
    _watch((("raylet", raylet),) if raylet is not None else (), head)


def _servers(pids: Sequence[int]) -> Iterator[tuple[str, Process]]:
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            name = psutil.Process(pid).name()
            if name in ("gcs_server", "raylet"):
                yield name, Process(pid)


def check() -> None:
    """Raise :class:`RayLost` where a server of Ray's that this process depends on has died. Costs microseconds.

    Ray itself says so late or not at all: without its raylet new workers wait for ever, and a minute after the end of
    its gcs_server it ends this process at once, without a report. The head of a cluster is given up after
    :data:`pipeline.ray_head.LOST_S` without an answer.
    """
    head = _ours.head
    if head is not None and _ours.contexts and head.lost:
        raise RayLost(
            f"cluster head lost: Ray's head at {head.address} answers no more",
            expected=f"an answer within {ray_head.LOST_S:g} s",
            found=head.why or "none",
            hint="start the cluster anew (ray start --head), then the job: it goes on from its last snapshot with "
            "run.if_exists: resume",
        )
    for name, server in _ours.servers if _ours.contexts else ():
        if not server.alive:
            raise RayLost(
                f"Ray has lost its {name} (process {server.pid}): no worker can be started or replaced any more",
                found=server.exit_status() or "gone",
                hint="killed by someone, or by the kernel for memory (dmesg | grep -i oom); start again: a job goes on "
                "from its last snapshot with run.if_exists: resume",
            )


class RayLost(FeedError):
    """A Ray of our own, or the cluster, has died."""


def _descendants() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _connect(address: str | None, num_cpus: int | None) -> None:
    import ray

    room = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    if address is None and room < OBJECT_STORE_BYTES:
        _log.info(
            "/dev/shm has %.0f MiB free, so Ray keeps its object store of %d MiB on the disk; batches do not go "
            "through it and are as fast (a container's --shm-size sets the size)",
            room / 2**20, OBJECT_STORE_BYTES >> 20,
        )  # fmt: skip
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    variables = worker_environment()
    try:
        with _handlers_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Ray about itself: nothing a user of ours can act on
            if address is not None:
                wanted = {name: value for name, value in variables.items() if name not in _set_by_job()}
                ray.init(address=address, runtime_env={"env_vars": wanted}, **quiet)
                return
            # The environment of a Ray of our own is what its workers inherit; that spares them a runtime_env.
            with _environment({**variables, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}), _needed_servers_only():
                ray.init(
                    address="local",
                    num_cpus=num_cpus or usable_cpus(),
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    **quiet,
                )
    except Exception as error:  # Ray raises a bare Exception where its servers do not start in time
        what = f"cannot join the Ray cluster at '{address}'" if address else "cannot start Ray on this machine"
        raise FeedError(
            f"{what}: {str(error).strip() or type(error).__name__}",
            hint="ray status shows whether the cluster is up"
            if address
            else "try again when the machine is less busy; --feed.engine inline needs no Ray; "
            "Ray's own logs are in /tmp/ray/session_latest/logs",
        ) from error


@contextlib.contextmanager
def _needed_servers_only() -> Iterator[None]:
    """Spare a Ray of our own what serves nobody here: autoscaler, dashboard (it is started whatever
    ``include_dashboard`` says, and waited for), log monitor, and the dashboard's libraries in this process.

    They take half of the CPU time of Ray's start, and 160 MB. ``ray.init`` cannot be told so; a Ray that starts them in
    another way starts them.
    """
    try:
        from ray._private import utils
        from ray._private.node import Node
    except ImportError:
        yield
        return

    def nothing(self: Any, *args: Any, **options: Any) -> None:
        """In place of a server's start."""

    def missing() -> Exception:
        return ImportError("not wanted")

    wanted: list[tuple[Any, str, Any]] = [
        (Node, name, nothing) for name in ("start_monitor", "start_api_server", "start_log_monitor")
    ]
    wanted.append((utils, "get_dashboard_dependency_error", missing))
    with contextlib.ExitStack() as stack:
        for home, name, instead in wanted:
            if hasattr(home, name):
                stack.callback(setattr, home, name, getattr(home, name))
                setattr(home, name, instead)
        yield


def worker_environment() -> dict[str, str]:
    """Variables that worker processes need: our packages and the user's modules importable, one thread each."""
    root = str(Path(__file__).resolve().parent.parent)
    folders = [root, os.getcwd(), *(path for path in sys.path if path), *os.environ.get("PYTHONPATH", "").split(":")]
    path = ":".join(dict.fromkeys(folder for folder in folders if folder))
    return {"PYTHONPATH": path, **dict.fromkeys(_ONE_THREAD, "1")}


def _set_by_job() -> set[str]:
    """Variables that ``ray job submit`` was told to set: Ray refuses to have them set a second time."""
    try:
        job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    except ValueError:
        return set()
    return set((job.get("runtime_env") or {}).get("env_vars") or {})


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """``ray.init`` puts a handler of its own over SIGTERM, which leaves the process at once: put back what was there.

    A SIGTERM while Ray starts is passed on to the handler that was there, and the start is given up with
    ``KeyboardInterrupt``. Where the process had no handler, Ray's stays: it ends what Ray has started.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before in (None, signal.SIG_DFL) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    except SystemExit as error:
        if error.code not in _RAYS_ANSWERS:
            raise
        signal.signal(signal.SIGTERM, before)
        import ray

        ray.shutdown()  # of what has been started so far
        signal.raise_signal(signal.SIGTERM)
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
