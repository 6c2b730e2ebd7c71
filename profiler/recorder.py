"""Writes what a process did into the run folder while it runs, so that a killed process still tells its story.

Events go into a preallocated buffer; a daemon thread appends them every half second to an Arrow stream whose torn
tail is readable. Memory is bounded: a full buffer is flushed at once, and what cannot be written is counted and
reported, never queued. A forked child records nothing; it never touches its parent's files.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import math
import os
import socket
import struct
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from profiler import files, spans
from profiler.cli import finite
from profiler.errors import StallscopeError, UsageError
from profiler.events import EVENT, MISSING, Kind, Stage
from profiler.osread import boot_id, clock_pair
from profiler.spans import NullSpan, Span

Detail = Literal["off", "steps", "full"]
Level = Literal["off", "step", "layer"]

FLUSH_S = 0.5
CAPACITY = 16_384
"""Events a buffer holds (96 bytes each; there are two buffers)."""
MAX_NOTES = 20_000
"""Notes a process may write; further ones are counted as lost."""
MAX_FINGERPRINTS = 8_192
"""Fingerprint rows held between two flushes."""
CLOSE_S = 2.0
"""How long :meth:`Recorder.close` waits for the last write."""
GC_SHORT_NS = 100_000
"""Garbage collections shorter than this are only summed up in a note at the end."""

_ROW = struct.Struct("=BBHiiiqqqqqqqqqq")
assert _ROW.size == EVENT.itemsize
_log = logging.getLogger(__name__)
_now = time.monotonic_ns
_cpu = time.thread_time_ns


class Recorder:
    """Records the events of one process. Make it with :meth:`open`; :data:`NULL` has the same methods and does nothing.

    Attributes
    ----------
    detail: "off", "steps" (times only) or "full" (CPU time, run-queue wait, storage reads, page faults and
        waits of the thread as well).
    fingerprints: "off", "step" or "layer": what :meth:`fingerprint` is wanted for. "off" makes it do nothing.
    lost: events, notes and fingerprints that could not be kept.
    """

    enabled = True

    def __init__(
        self, folder: Path, name: str, role: str, actor: int, detail: Detail, fingerprints: Level, flush_s: float,
        capacity: int,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.name = name
        self.role = role
        self.actor = actor
        self.detail: Detail = detail
        self.fingerprints: Level = fingerprints
        self.lost = 0
        self._readings = detail == "full"
        self._overhead_ns = 0
        self._open: dict[int, Span] = {}
        self._capacity = capacity
        self._buffer = memoryview(bytearray(capacity * EVENT.itemsize))
        self._spare = memoryview(bytearray(capacity * EVENT.itemsize))
        self._count = 0
        self._prints: list[tuple[Any, ...]] = []
        self._collections: deque[tuple[int, int, int, int]] = deque(maxlen=4096)
        self._gc_start = (0, 0)
        self._gc_short = [0, 0]
        self._notes = 0
        self._live = True
        self._writing = False
        self._warned = False
        self._renew_locks()
        monotonic_ns, wall_ns = clock_pair()
        self.identity = {
            "name": name, "role": role, "actor": str(actor), "pid": str(os.getpid()), "host": socket.gethostname(),
            "boot_id": boot_id(), "monotonic_ns": str(monotonic_ns), "wall_ns": str(wall_ns), "detail": detail,
        }  # fmt: skip
        stem = f"{name}-{os.getpid()}"
        from profiler import streams  # here, since it loads Arrow, which those who only import NULL do not need

        try:
            # Notes are never merged or removed: their file settles a stem that is unique in the run.
            self._note_fd, notes = files.create(folder / "events", stem, ".jsonl")
            stem = notes.stem
            self._events = streams.StreamFile(folder / "events", stem, streams.EVENTS, self.identity)
            self._print_file = streams.StreamFile(
                folder / "fingerprints", stem, streams.FINGERPRINTS, self.identity, lazy=True
            )
        except OSError as error:
            raise StallscopeError(
                f"cannot write into the run folder {folder}", found=error, hint="choose another run.folder"
            ) from error
        self._flush_s = flush_s
        self._thread = threading.Thread(target=self._flush_loop, name="stallscope-flush", daemon=True)
        self._thread.start()
        _all.add(self)

    @staticmethod
    def open(
        folder: str | os.PathLike[str],
        name: str,
        role: str,
        actor: int = 0,
        detail: Detail = "full",
        fingerprints: Level = "step",
        *,
        flush_s: float = FLUSH_S,
        capacity: int = CAPACITY,
    ) -> Recorder:
        """Start recording this process into a run folder (made if absent). With ``detail="off"`` this is NULL.

        Parameters
        ----------
        name: of the process in file names and reports ("trainer", "worker-3"); letters, digits, ``-``, ``_``, ``.``.
        role: what it is ("trainer", "worker", "owner", "loop").
        actor: its number in the run, 0 for the trainer.

        Raises StallscopeError when the folder cannot be written to.
        """
        if not name or not all(c.isalnum() or c in "-_." for c in name):
            raise UsageError("bad name for a process", expected="letters, digits, '-', '_' and '.'", found=repr(name))
        if detail not in ("off", "steps", "full") or fingerprints not in ("off", "step", "layer"):
            raise UsageError(
                "unknown level of recording", expected="detail off|steps|full, fingerprints off|step|layer",
                found=f"detail {detail!r}, fingerprints {fingerprints!r}",
            )  # fmt: skip
        if detail == "off":
            return NULL
        return Recorder(Path(folder), name, role, actor, detail, fingerprints, flush_s, max(16, capacity))

    # recording -----------------------------------------------------------------------------------------------------

    def span(
        self, stage: int, *, step: int = -1, epoch: int = -1, slot: int = -1, items: int = 0, nbytes: int = 0,
        flags: int = 0,
    ) -> Span:  # fmt: skip
        """A context manager that records the time between its two ends, and what the thread used in it."""
        return Span(self, stage, step, epoch, slot, items, nbytes, flags)

    def add(
        self, kind: int, stage: int, t0_ns: int, t1_ns: int, *, step: int = -1, epoch: int = -1, slot: int = -1,
        cpu_ns: int = MISSING, runq_ns: int = MISSING, inblock: int = MISSING, items: int = 0, nbytes: int = 0,
        flags: int = 0, actor: int | None = None, major_faults: int = MISSING, waits: int = MISSING,
    ) -> None:  # fmt: skip
        """Record one event whose times (``time.monotonic_ns`` of this host) are known already."""
        if not self._live:
            return
        if actor is None:
            actor = self.actor
        row = (
            kind, stage, flags, actor, epoch, slot, step, t0_ns, t1_ns, cpu_ns, runq_ns, inblock, items, nbytes,
            major_faults, waits,
        )  # fmt: skip
        while not self._put(row):
            if not self.flush():
                self.lost += 1
                return

    def mark(
        self, stage: int, *, step: int = -1, epoch: int = -1, slot: int = -1, items: int = 0, nbytes: int = 0,
        flags: int = 0, actor: int | None = None,
    ) -> None:  # fmt: skip
        """Record a moment: now."""
        now = _now()
        self.add(
            Kind.MARK, stage, now, now, step=step, epoch=epoch, slot=slot, items=items, nbytes=nbytes, flags=flags,
            actor=actor,
        )  # fmt: skip

    def note(self, note: str, **fields: Any) -> None:
        """Write one line of JSON: ``{"note": ..., "t_ns": monotonic, "wall_ns": ..., **fields}``, on disk at return."""
        if not self._live:
            return
        self._notes += 1
        if self._notes > MAX_NOTES:
            self.lost += 1
            return
        line = {"note": note, "t_ns": _now(), "wall_ns": time.time_ns(), **fields}
        # One write call: whole lines even when a signal handler writes a note in the middle of another.
        text = json.dumps(finite(line), allow_nan=False, default=_text_of)
        self._attempt(files.write_all, self._note_fd, text.encode() + b"\n", rows=1)

    def fingerprint(
        self, step: int, name: str, ordered: int, multiset: int = 0, *, max_abs: float = math.nan, l2: float = math.nan,
        zeros: int = -1, subnormals: int = -1, infs: int = -1, nans: int = -1,
    ) -> None:  # fmt: skip
        """Record the hashes (0 <= hash < 2**64) and statistics of something at a step."""
        if not self._live or self.fingerprints == "off":
            return
        if len(self._prints) >= MAX_FINGERPRINTS and not self.flush():
            self.lost += 1
            return
        with self._lock:
            self._prints.append((step, name, int(ordered), int(multiset), max_abs, l2, zeros, subnormals, infs, nans))

    def watch_gc(self) -> None:
        """Record this process's garbage collections as ``Stage.GC`` spans (those of 0.1 ms and more)."""
        if self._live and self._on_gc not in gc.callbacks:
            gc.callbacks.append(self._on_gc)

    @property
    def overhead_ns(self) -> int:
        """Time spent on recording so far: in spans by the threads that record, and CPU time of the flush thread."""
        return self._overhead_ns

    # writing -------------------------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Append what was recorded to the files; errors are counted and logged once, never raised.

        Returns False where the buffer could not be emptied, because another write hangs or is under way in this thread.
        """
        if not self._live or not self._io.acquire(timeout=CLOSE_S / 2):
            return False
        try:
            if self._writing:  # a signal handler came in the middle of its own thread's write
                return False
            self._writing = True
            try:
                self._write_out()
            finally:
                self._writing = False
            return True
        finally:
            self._io.release()

    def close(self) -> None:
        """Write everything, spans still open included, and end the files. Idempotent; takes three seconds at most."""
        if not self._live:
            return
        self._stop.set()
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)
        # The thread does the last write too, so that a write that hangs holds up nobody for longer than this.
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._live = False
            _log.warning("%s: a write into %s hangs; the last events are lost", self.name, self.folder)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, row: tuple[int, ...]) -> bool:
        with self._lock:
            at = self._count
            if at >= self._capacity:
                return False
            self._count = at + 1
            try:
                _ROW.pack_into(self._buffer, at * EVENT.itemsize, *row)
            except struct.error:  # a value that does not fit its column must not stop the job that is recorded
                self._count = at
                self.lost += 1
                self._warn(f"an event does not fit the schema: {row}")
        return True

    def _flush_loop(self) -> None:
        try:
            while not self._stop.wait(self._flush_s):
                before = _cpu()
                self.flush()
                self._overhead_ns += _cpu() - before
        finally:
            self._end()

    def _end(self) -> None:
        with self._io:
            if not self._live:
                return  # close() has given up waiting
            if self._gc_short[0]:
                self.note("gc_short", collections=self._gc_short[0], total_ns=self._gc_short[1])
            self._write_out()
            self.note("closed", lost=self.lost, overhead_ns=self._overhead_ns)
            self._live = False
            for action in (self._events.close, self._print_file.close):
                self._attempt(action)
            self._attempt(os.close, self._note_fd)

    def _write_out(self) -> None:
        with self._lock:
            rows, count = self._buffer, self._count
            self._buffer, self._spare, self._count = self._spare, rows, 0
            prints, self._prints = self._prints, []
        extra = bytearray()
        while self._collections:
            t0, t1, cpu, collected = self._collections.popleft()
            extra += _ROW.pack(
                Kind.SPAN, Stage.GC, 0, self.actor, -1, -1, -1, t0, t1, cpu, -1, -1, collected, 0, -1, -1
            )
        now = _now()
        for span in list(self._open.values()):
            if span.t0_ns:
                extra += _ROW.pack(*span.so_far(now, self.actor))
        data = bytes(rows[: count * EVENT.itemsize]) + extra
        if data:
            self._attempt(self._events.append_events, data, rows=len(data) // EVENT.itemsize)
        if prints:
            self._attempt(self._print_file.append_rows, prints, rows=len(prints))

    def _attempt(self, action: Any, *args: Any, rows: int = 0) -> None:
        try:
            action(*args)
        except OSError as error:
            self.lost += rows
            self._warn(f"cannot write into {self.folder}: {error}")

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s: part of the recording is lost: %s", self.name, text)

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        # Runs inside any allocation, maybe with a lock of ours held: touches nothing but a deque.
        if phase == "start":
            self._gc_start = (_now(), _cpu())
            return
        t0, cpu0 = self._gc_start
        t1 = _now()
        if t1 - t0 < GC_SHORT_NS:
            self._gc_short[0] += 1
            self._gc_short[1] += t1 - t0
            return
        if len(self._collections) == self._collections.maxlen:
            self.lost += 1
        self._collections.append((t0, t1, _cpu() - cpu0, info.get("collected", 0)))

    def _renew_locks(self) -> None:
        self._lock = threading.RLock()
        self._io = threading.RLock()
        self._stop = threading.Event()

    def _after_fork(self) -> None:
        """In a forked child: forget the parent's files without writing to them."""
        self._live = False
        self._renew_locks()
        self._open.clear()
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)
        for fd in (self._note_fd, self._events.fd, self._print_file.fd):
            if fd >= 0:
                os.close(fd)


class _Null(Recorder):
    """Same methods, no effect."""

    enabled = False

    def __init__(self) -> None:
        self.folder = Path(os.devnull)
        self.name = self.role = "null"
        self.actor = 0
        self.detail, self.fingerprints = "off", "off"
        self.lost = 0
        self.identity = {}
        self._live = False
        self._overhead_ns = 0
        self._nothing = NullSpan(self, 0, -1, -1, -1, 0, 0, 0)

    def span(self, stage: int, **_fields: Any) -> Span:
        return self._nothing

    def add(self, *_args: Any, **_fields: Any) -> None:
        return None

    def mark(self, *_args: Any, **_fields: Any) -> None:
        return None

    def __reduce__(self) -> str:
        return "NULL"


class Kept(Recorder):
    """Keeps events in memory until somebody takes them: for work whose events another process writes down.

    Notes and fingerprints are not kept.
    """

    def __init__(self, detail: Detail) -> None:
        self.folder = Path(os.devnull)
        self.name = self.role = "kept"
        self.actor = 0
        self.detail, self.fingerprints = detail, "off"
        self.lost = 0
        self.identity = {}
        self._live = detail != "off"
        self._readings = detail == "full"
        self._overhead_ns = 0
        self._open = {}
        self._rows: list[tuple[int, ...]] = []

    def take(self) -> list[tuple[int, ...]]:
        """The events since the last call, each with the columns of :data:`profiler.events.EVENT`."""
        rows, self._rows = self._rows, []
        return rows

    def note(self, note: str, **fields: Any) -> None:
        return None

    def fingerprint(self, *_args: Any, **_fields: Any) -> None:
        return None

    def _put(self, row: tuple[int, ...]) -> bool:
        self._rows.append(row)
        return True


def _text_of(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    return str(value)


_all: weakref.WeakSet[Recorder] = weakref.WeakSet()
NULL: Recorder = _Null()
_current: Recorder = NULL


def set_current(recorder: Recorder) -> None:
    """Make a recorder the process's default."""
    global _current
    _current = recorder


def current() -> Recorder:
    """The process's default recorder, :data:`NULL` until one is set (and again in a forked child)."""
    return _current


def _close_all() -> None:
    for recorder in list(_all):
        recorder.close()


def _after_fork_in_child() -> None:
    global _current
    _current = NULL
    spans.forget_threads()
    for recorder in list(_all):
        if recorder._live:
            recorder._after_fork()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
