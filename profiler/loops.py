"""The profiler round somebody else's loop: one line, and the run folder reads like that of a job of our own.

Each turn becomes a step: the wait for the next item, then whatever the body of the loop does. What happens in other
processes of a foreign loader is not seen per batch; it shows in the samples, and the manifest says so.
"""

from __future__ import annotations

import logging
import operator
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from profiler import recorder as recording
from profiler import store
from profiler.environment import environment
from profiler.errors import StallscopeError
from profiler.events import Flag, Stage
from profiler.osread import boot_id, clock_pair
from profiler.recorder import Detail, Recorder
from profiler.sampler import Sampler

Item = TypeVar("Item")

_log = logging.getLogger(__name__)
PARTS = ("events", "fingerprints", "samples", "memory")
NOT_SEEN = [
    "what the loader does inside its own threads and processes, batch by batch (their CPU time is sampled)",
    "device work that the loop does not wait for: it shows where the loop next waits for the device",
    "what the body of the loop spends its time on, beyond the spans it records itself",
]


class _Progress:
    """Where the loops of one run folder have got to: steps go on counting over epochs and over several loops."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.step = 0
        self.epoch = 0
        self.busy = False
        self.left_early = False


_progress: dict[Path, _Progress] = {}
_opening = threading.Lock()


@contextmanager
def record(
    folder: str | os.PathLike[str] | None = None,
    *,
    name: str = "loop",
    detail: Detail = "full",
    hz: float = 10.0,
    overwrite: bool = False,
) -> Iterator[Recorder]:
    """Record this process into a run folder while the block runs.

    The recorder handed out is also the process's current one, which :func:`watch` uses. An exception is recorded in
    the manifest and goes on. A killed process leaves a readable folder all the same.

    Parameters
    ----------
    folder: where to; by default ``runs/<script>-<date>-<time>``. This process may add several recordings to it.
    detail: "full", "steps" (times only) or "off" (nothing is written).
    hz: samples per second of host and process tree, 0 for none.
    overwrite: replace a run of another process that lies there; otherwise that is a StallscopeError.
    """
    if detail == "off":
        yield recording.NULL
        return
    path = Path(folder) if folder is not None else default_folder()
    with _opening:
        progress = _claim(path, overwrite)
        monotonic_ns, wall_ns = clock_pair()
        recorder = Recorder.open(path, name=name, role="trainer", actor=0, detail=detail, fingerprints="off")
        store.write_manifest(
            path,
            {
                "job": {"type": "loop", "command": sys.argv, "folder": str(path.resolve()), "pid": os.getpid()},
                "clock": {"monotonic_ns": monotonic_ns, "wall_ns": wall_ns, "boot_id": boot_id()},
                "environment": environment(),
                "profile": {"detail": detail, "fingerprints": "off", "samplers_hz": hz},
                "not_seen": NOT_SEEN,
                "outcome": {"state": "running"},
            },
        )
    before = recording.current()
    recording.set_current(recorder)
    recorder.watch_gc()
    sampler = Sampler(path, hz).start() if hz else None
    outcome: dict[str, Any] = {"state": "finished"}
    try:
        yield recorder
    except BaseException as error:
        outcome = _outcome_of(error)
        raise
    finally:
        if sampler is not None:
            sampler.stop()
        recorder.close()
        recording.set_current(before)
        if outcome["state"] == "finished" and progress.left_early:
            outcome["detail"] = "the loop was left before its iterable ended (break or exception)"
        _finish(path, recorder, sampler, {**outcome, "steps": progress.step})


def watch(
    iterable: Iterable[Item],
    folder: str | os.PathLike[str] | None = None,
    *,
    items: Callable[[Item], int] | None = None,
    body: Stage | None = Stage.COMPUTE,
    **options: Any,
) -> Watched[Item]:
    """The same iterable, with each turn of the loop over it recorded as a step.

    Inside :func:`record` (or ``python -m profiler.run``) the steps go to that run; otherwise each loop over the result
    makes a recording of its own in ``folder``, closed when the loop ends, breaks or fails. A loop inside a watched
    loop is passed through unrecorded.

    Parameters
    ----------
    items: tells how many samples an item holds, for rates; called inside the step, outside the wait.
    body: what the body of the loop counts as, apart from spans recorded inside it; None leaves it unattributed.
    options: of :func:`record`.
    """
    return Watched(iterable, folder, items, body, options)


class Watched(Generic[Item]):
    """An iterable being watched; has a length if the original has one. Other attributes are the original's."""

    def __init__(
        self,
        iterable: Iterable[Item],
        folder: str | os.PathLike[str] | None,
        items: Callable[[Item], int] | None,
        body: Stage | None,
        options: dict[str, Any],
    ) -> None:
        self._iterable = iterable
        self._folder = folder
        self._items = items
        self._body = body
        self._options = options

    def __iter__(self) -> Iterator[Item]:
        recorder = recording.current()
        if recorder.enabled:
            return _steps(self._iterable, self._items, self._body, recorder)
        return self._alone()

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]  # TypeError, as from the original

    def __length_hint__(self) -> int:
        hint = operator.length_hint(self._iterable, -1)
        return hint if hint >= 0 else NotImplemented

    def __bool__(self) -> bool:  # else `if loader:` would ask a generator for its length
        return bool(self._iterable)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # never reached once initialised; keeps copying and unpickling from recursing
            raise AttributeError(name)
        return getattr(self._iterable, name)

    def _alone(self) -> Iterator[Item]:
        path = None
        try:
            with record(self._folder, **self._options) as recorder:
                path = recorder.folder if recorder.enabled else None
                yield from _steps(self._iterable, self._items, self._body, recorder)
        finally:
            if self._folder is None and path is not None:
                sys.stderr.write(f"stallscope: recorded in {path}; see it with: python -m profiler.report {path}\n")


def default_folder() -> Path:
    """``runs/<script>-<date>-<time>`` in the current directory, a name that is not taken."""
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "loop"
    base = Path("runs") / f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def _steps(
    iterable: Iterable[Item], items: Callable[[Item], int] | None, body: Stage | None, recorder: Recorder
) -> Iterator[Item]:
    progress = _progress.setdefault(recorder.folder.resolve(), _Progress())
    if not recorder.enabled or progress.busy:
        recorder.note("nested_loop", text="a watched loop inside a watched loop is part of the outer one's step")
        yield from iterable
        return
    epoch, progress.epoch = progress.epoch, progress.epoch + 1
    flags = int(Flag.FIRST)
    progress.busy = True
    ended = False
    try:
        # The iterator is made inside the first step: loaders start their processes there, and that is a wait, too.
        iterator: Iterator[Item] | None = None
        while True:
            step = progress.step
            with recorder.span(Stage.STEP, step=step, epoch=epoch, flags=flags) as turn:
                with recorder.span(Stage.FEED_WAIT, step=step, epoch=epoch, flags=flags) as wait:
                    try:
                        iterator = iter(iterable) if iterator is None else iterator
                        item = next(iterator)
                    except StopIteration:
                        ended = True
                        wait.step = -1  # waited for the end, not for a step
                if ended:
                    turn.drop()
                    return
                progress.step += 1
                if items is not None:
                    turn.items = items(item)
                if body is None:
                    yield item
                else:
                    with recorder.span(body, step=step, epoch=epoch, flags=flags):
                        yield item
            del item  # as in a plain loop, nothing here keeps a batch alive during the next wait
            flags = 0
    finally:
        progress.busy = False
        progress.left_early = not ended


def _claim(path: Path, overwrite: bool) -> _Progress:
    """The progress of a folder that this process may write to."""
    key = path.resolve()
    known = _progress.get(key)
    if known is not None and known.pid == os.getpid():
        return known
    taken = path.is_dir() and any((path / part).exists() for part in ("manifest.json", *PARTS))
    # A forked child knows its parent's folder, and must not touch it even when told to overwrite.
    if known is not None or (taken and not overwrite):
        raise StallscopeError(
            f"{path} holds a run already",
            expected="a new or an empty folder",
            hint="choose another folder, or pass overwrite=True (--force) to replace the run",
        )
    if taken:
        for part in PARTS:
            shutil.rmtree(path / part, ignore_errors=True)
    progress = _progress[key] = _Progress()
    return progress


def _outcome_of(error: BaseException) -> dict[str, Any]:
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code == 0:
            return {"state": "finished"}
        state = "interrupted" if code in (130, 143) else "failed"
        return {"state": state, "exit_code": code}
    if isinstance(error, GeneratorExit):
        return {"state": "finished"}
    state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    return {"state": state, "error": f"{type(error).__name__}: {error}"}


def _finish(path: Path, recorder: Recorder, sampler: Sampler | None, outcome: dict[str, Any]) -> None:
    overhead = {
        "recorder_ns": recorder.overhead_ns,
        "sampler_ns": sampler.overhead_ns if sampler else 0,
        "lost": recorder.lost,
    }
    try:
        store.update_manifest(path, outcome=outcome, overhead=overhead, missing=sampler.problems if sampler else {})
        store.compact(path)
    except OSError as error:  # the job that was watched must not fail for its profile
        _log.warning("the recording in %s could not be finished: %s", path, error)
