"""A launcher of plain processes, so that the crew can be tested without Ray."""

from __future__ import annotations

import contextlib
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from pipeline.crew import Outcome
from pipeline.maker import Probe
from pipeline.ring import RingAddress
from pipeline.spec import FeedSpec
from pipeline.worker import work
from tests.pipeline import functions

_SPAWN = multiprocessing.get_context("spawn")


def _body(pipe: Connection, *args: Any) -> None:
    try:
        pipe.send(Outcome("done", text=str(work(*args))))
    except Exception as error:
        pipe.send(Outcome("error", error))


class SpawnedJob:
    def __init__(self, args: tuple[Any, ...]) -> None:
        self._pipe, there = _SPAWN.Pipe(duplex=False)
        self.process = _SPAWN.Process(target=_body, args=(there, *args), daemon=True)
        self.process.start()
        there.close()
        self._outcome: Outcome | None = None

    def outcome(self, timeout_s: float = 0.0) -> Outcome | None:
        if self._outcome is None and self._pipe.poll(timeout_s):
            try:
                self._outcome = self._pipe.recv()
            except EOFError:
                self._outcome = Outcome("lost", text="the pipe broke")
        return self._outcome

    def discard(self) -> None:
        with contextlib.suppress(ValueError):  # discarded before
            self.process.kill()
            self.process.join()
            self.process.close()
            self._pipe.close()


class NeverStarts:
    def outcome(self, timeout_s: float = 0.0) -> Outcome | None:
        return None

    def discard(self) -> None:
        pass


class SpawnLauncher:
    """``never``: rows whose workers stay pending for ever."""

    def __init__(self, spec: FeedSpec, probed: Probe, address: RingAddress, never: tuple[int, ...] = ()) -> None:
        self.args, self.address, self.never = (spec, probed), address, never
        self.closed = False

    def launch(self, row: int) -> Any:
        return NeverStarts() if row in self.never else SpawnedJob((self.address, *self.args, row))

    def describe(self, row: int) -> str:
        return f"worker {row + 1} (1 process)"

    def close(self) -> None:
        self.closed = True


class FillingJob:
    """A process that fills slots with the number of their step: a worker that starts in no time."""

    def __init__(self, address: RingAddress, row: int) -> None:
        self.process = _SPAWN.Process(target=functions.fill_ring, args=(address, row, 0.002), daemon=True)
        self.process.start()
        self.asked = 0  # how often for its outcome

    def outcome(self, timeout_s: float = 0.0) -> Outcome | None:
        self.asked += 1
        self.process.join(timeout_s)
        code = self.process.exitcode
        return None if code is None else Outcome("done" if code == 0 else "lost", text=str(code))

    def discard(self) -> None:
        self.process.kill()
        self.process.join()


class FillingLauncher:
    def __init__(self, address: RingAddress) -> None:
        self.address, self.jobs = address, list[FillingJob]()

    def launch(self, row: int) -> FillingJob:
        self.jobs.append(FillingJob(self.address, row))
        return self.jobs[-1]

    def describe(self, row: int) -> str:
        return f"worker {row + 1}"

    def close(self) -> None:
        pass
