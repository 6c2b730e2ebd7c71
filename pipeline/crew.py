"""The workers of a feed as its consumer sees them: started, watched while it waits, replaced when lost, ended.

There is no thread here. The consumer calls :meth:`Crew.watch` while it waits for a batch; a death wakes it at once
because it sleeps on the workers' pidfds too. How a worker is started is a :class:`Launcher`'s business.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pipeline import autopsy, last_record
from pipeline.process import Process
from pipeline.ring import POLL_S, Ring
from pipeline.spec import FeedSpec
from profiler import osread
from profiler.errors import StallscopeError
from profiler.events import Kind, Stage
from profiler.recorder import Recorder

_LOOK_S = 0.2  # asking a launcher for news of a worker that has not started costs a message
_AGAIN_S = 10.0  # one that has started says in the ring that it ends, or its pidfd does; asked all the same
_NEWS_S = 10.0  # how long the outcome of a worker that has ended may take to arrive


class FeedError(StallscopeError):
    """The feed cannot go on."""


@dataclass(frozen=True)
class Outcome:
    """How a worker's call ended: ``done`` by itself, ``error`` with an exception, ``lost`` with its process."""

    kind: Literal["done", "error", "lost"]
    error: BaseException | None = None
    text: str = ""


class Job(Protocol):
    """One worker's call."""

    def outcome(self, timeout_s: float = 0.0) -> Outcome | None:
        """How it ended, None while it runs."""
        ...

    def discard(self) -> None:
        """End its process, whatever it does, and forget it."""
        ...


class Launcher(Protocol):
    """Starts workers."""

    def launch(self, row: int) -> Job:
        """Start worker ``row``; returns at once."""
        ...

    def describe(self, row: int) -> str:
        """What worker ``row`` asks for, in words, for an error about workers that do not start."""
        ...

    def close(self) -> None:
        """End whatever else was started."""
        ...


class _Member:
    def __init__(self, row: int, job: Job) -> None:
        self.row = row
        self.job = job
        self.started_s = time.monotonic()
        self.looked_s = 0.0
        self.process: Process | None = None  # from its entering the ring to its end
        self.vitals: autopsy.Vitals | None = None  # of the last one
        self.over = False
        self.retired = False
        self.lost_ns = 0  # when the worker was lost that this one replaces


class Crew:
    """All workers of one ring.

    Parameters
    ----------
    batch_of: epoch, first and last record of a step, for the note about a lost worker.
    """

    def __init__(
        self,
        ring: Ring,
        spec: FeedSpec,
        launcher: Launcher,
        workers: int,
        recorder: Recorder,
        batch_of: Callable[[int], dict[str, Any]],
    ) -> None:
        self.ring, self.spec, self.launcher, self.recorder = ring, spec, launcher, recorder
        self.restarts = 0
        self._kills = autopsy.KillsByGroup()
        self._batch_of = batch_of
        self._errors: dict[int, BaseException] = {}  # by the step that failed, -1: before any step
        self._looked_s = 0.0  # when all were last looked at
        self._deaths = select.poll()  # the pidfds of all that have started
        ring.lock.on_kept = self._end_lock_holder
        self._members: list[_Member] = []
        self._rows = 0
        self.resize(workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that have entered the ring and have not ended."""
        for member in self._members:
            self._meet(member)
        return [member.process.pid for member in self._members if member.process is not None]

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that become readable when a worker dies."""
        known = (member.process.fileno() for member in self._members if member.process is not None)
        return tuple(fd for fd in known if fd >= 0)  # -1: it was gone when we met it

    @property
    def size(self) -> int:
        """Workers that make batches, or will when they have started."""
        return sum(not (member.over or member.retired) for member in self._members)

    @property
    def all_started(self) -> bool:
        """Whether all of them have entered the ring."""
        mine = [member for member in self._members if not (member.over or member.retired)]
        for member in mine:
            self._meet(member)
        return all(member.process is not None for member in mine)

    def resize(self, workers: int) -> None:
        """Have so many workers: start some, or tell the newest to end when they have made what they are making."""
        mine = [member for member in self._members if not (member.over or member.retired)]
        for _ in range(workers - len(mine)):
            self._members.append(_Member(self._rows, self.launcher.launch(self._rows)))
            self._rows += 1  # a row is never given twice: who was told to end may still be about to enter it
        for member in mine[workers:]:
            member.retired = True
            self.ring.retire(member.row)
            self._meet(member)
            if member.process is None:
                self._leave(member)

    def watch(self, step: int, waited_s: float) -> None:
        """Look after the workers while the consumer waits for ``step``, for ``waited_s`` so far.

        Raises the error of the worker that failed to make ``step``, and :class:`FeedError` when no worker can go on.
        """
        if self._is_time() or self._news():
            for member in list(self._members):
                if not member.over:
                    self._look(member, waited_s)
        failed = self._errors.get(step) or self._errors.get(-1)
        if failed is None and all(member.over for member in self._members) and not self.ring.is_ready(step):
            failed = self._errors[min(self._errors)] if self._errors else None
            if failed is None:
                raise FeedError(f"all workers have ended and none has made step {step}", found=str(self.ring.counts()))
        if failed is not None:
            raise failed

    def notice(self) -> None:
        """Replace workers that have died while the consumer found its batches ready; looks twenty times a second."""
        if not self._is_time():
            return
        for member in list(self._members):
            self._meet(member)
            ended = self.ring.worker(member.row)[3]
            if member.retired and ended and not member.over:
                self._look(member, 0.0)
            elif member.process is not None and not member.process.alive and not ended:
                self._lost(member, "died")
            elif member.vitals is not None:
                member.vitals.look()

    def close(self, patience_s: float = 5.0) -> None:
        """End all workers and wait until their processes are gone. The ring must have been stopped."""
        deadline = time.monotonic() + patience_s
        for member in self._members:
            self._meet(member)
            if not member.over and member.process is not None:
                left_s = max(0.0, deadline - time.monotonic())
                if member.job.outcome(left_s) is None and member.process.alive:
                    self._note_silent(member)
        for member in self._members:
            member.job.discard()
        self.launcher.close()
        for member in self._members:
            if member.process is not None:
                if not member.process.wait(2.0):
                    member.process.kill()
                self._forget(member)
        self._members = []

    def _is_time(self) -> bool:
        now = time.monotonic()
        if now - self._looked_s < POLL_S:
            return False
        self._looked_s = now
        return True

    def _news(self) -> bool:
        """Whether a worker has ended or died since it was looked at. Costs a system call, whatever their number."""
        ended = self.ring.ended(self._rows)
        return bool(self._deaths.poll(0)) or any(ended[member.row] for member in self._members if not member.over)

    # -- one worker ------------------------------------------------------------------------------------------

    def _look(self, member: _Member, waited_s: float) -> None:
        self._meet(member)
        _, heartbeat_ns, _, ended = self.ring.worker(member.row)
        now = time.monotonic()
        process = member.process
        if process is not None and not ended:
            if not process.alive:
                self._lost(member, "died")
                return
            if member.vitals is not None:
                member.vitals.look()
            silent_s = (time.monotonic_ns() - heartbeat_ns) / 1e9
            if min(waited_s, silent_s) > self.spec.stall_timeout_s:
                # Its own waiting is counted too: after a pause of the whole job everybody looks silent at first.
                self._lost(member, f"no sign of life for {silent_s:.1f} s: killed")
                return
        if ended or now - member.looked_s > (_LOOK_S if process is None else _AGAIN_S):
            member.looked_s = now
            outcome = member.job.outcome(_NEWS_S if ended and not member.retired else 0.0)
            if outcome is not None:
                self._ended(member, outcome)
                return
        if process is None and now - member.started_s > self.spec.start_timeout_s:
            self._not_started(member)

    def _meet(self, member: _Member) -> None:
        """Take note of a worker that has entered the ring."""
        pid = self.ring.worker(member.row)[0]
        if member.process is not None or not pid or member.over:
            return
        member.process = Process(pid)
        member.vitals = self._kills.vitals(pid if member.process.alive else None)
        if member.process.alive:
            self._deaths.register(member.process.fileno(), select.POLLIN)
        if member.lost_ns:
            # In the worker's lane: from the loss to the first sign of its replacement.
            self.recorder.add(
                Kind.SPAN, Stage.RESTART, member.lost_ns, time.monotonic_ns(),
                actor=self.spec.first_actor + member.row,
            )  # fmt: skip
            member.lost_ns = 0

    def _ended(self, member: _Member, outcome: Outcome) -> None:
        if outcome.kind == "lost":
            self._lost(member, "died", outcome.text)
            return
        if outcome.error is not None:
            step = self.ring.worker(member.row)[2] if member.process is not None else -1
            self._errors[step] = outcome.error
            self.recorder.note(
                "worker_error", worker=self.spec.first_actor + member.row, step=step, error=str(outcome.error)
            )
        member.over = True
        if member.retired and outcome.error is None:
            self._leave(member)
        else:
            self._forget(member)

    def _leave(self, member: _Member) -> None:
        """The end of one that was not wanted any more."""
        member.job.discard()
        self._forget(member)
        self._members.remove(member)

    def _lost(self, member: _Member, how: str, text: str = "") -> None:
        lost_ns = time.monotonic_ns()
        pid, _, step, _ = self.ring.worker(member.row)
        status, last, vitals = None, None, member.vitals
        if member.process is not None:
            last = last_record.last(self.ring, member.row)
            member.process.kill()  # nobody else may write where it could still write
            lost_step = self.ring.reclaim(member.row, member.process)
            step = -1 if lost_step is None else lost_step
        member.job.discard()
        if member.process is not None:
            status = member.process.exit_status()  # known once its parent has collected it
        self._forget(member)
        if member.retired:
            member.over = True
            self._members.remove(member)
            if step < 0:
                return  # it held nothing
        status = status or text or "unknown"
        vitals = vitals or self._kills.vitals(None)
        meaning, figures = vitals.meaning(status, how), vitals.figures()
        batch = self._batch_of(step) if step >= 0 else {}
        if last is not None:
            batch |= {"record": last[0], "key": last[1].decode(errors="backslashreplace")}
        self.recorder.note(
            "worker_lost", worker=member.row + 1, actor=self.spec.first_actor + member.row, pid=pid, lost_pid=pid,
            how=how, exit=status, meaning=meaning, step=step, available_mib=osread.available_memory() >> 20, **batch,
            **figures,
        )  # fmt: skip
        if member.retired:
            return  # nobody takes its place
        self.restarts += 1
        if self.restarts > self.spec.max_restarts:
            from profiler.findings import lost_figures

            member.over = True
            raise FeedError(
                f"worker {member.row + 1} of the feed (process {pid}) was lost"
                + (f" while it made step {step} ({batch})" if step >= 0 else ""),
                expected=f"at most {self.spec.max_restarts} lost workers (feed.max_restarts)",
                found=f"{self.restarts}; this one {how}: {status}"
                + (f" ({meaning})" if meaning else "")
                + (f"; when last seen it had {said}" if (said := lost_figures(figures)) else ""),
                hint=autopsy.hint(meaning or status),
            )
        member.job = self.launcher.launch(member.row)
        member.started_s, member.lost_ns = time.monotonic(), lost_ns

    def _not_started(self, member: _Member) -> None:
        pending = [other for other in self._members if other.process is None and not other.over]
        if len(pending) < len(self._members):
            # Somebody works: slower is better than not at all.
            self.recorder.note("worker_not_started", worker=self.spec.first_actor + member.row)
            member.job.discard()
            member.over = True
            return
        raise FeedError(
            "no worker of the feed has started",
            expected=f"{len(pending)} within {self.spec.start_timeout_s:g} s",
            found="still pending: " + "; ".join(self.launcher.describe(other.row) for other in pending),
            hint="another job holds the CPUs (ray status), or the machine is too busy: fewer feed.workers",
        )

    def _end_lock_holder(self, pid: int) -> None:
        for member in self._members:
            self._meet(member)
            if member.process is not None and member.process.pid == pid:
                member.process.kill()  # watch() finds it dead and replaces it
                return
        holder = Process(pid)  # one that we have not met yet, or one that was given up
        holder.kill()
        holder.close()

    def _note_silent(self, member: _Member) -> None:
        """A worker that was told to end and did not: it hung, perhaps long before, with nobody waiting for it."""
        pid, heartbeat_ns, step, _ = self.ring.worker(member.row)
        self.recorder.note(
            "worker_silent", worker=member.row + 1, actor=self.spec.first_actor + member.row, pid=pid, step=step,
            silent_s=round((time.monotonic_ns() - heartbeat_ns) / 1e9, 1),
        )  # fmt: skip

    def _forget(self, member: _Member) -> None:
        member.vitals = None
        if member.process is not None:
            with contextlib.suppress(KeyError, ValueError):  # it was dead when we met it, or gone: then it is -1
                self._deaths.unregister(member.process.fileno())
            member.process.close()
            member.process = None
