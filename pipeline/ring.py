"""The ring: slots for batches in one piece of shared memory, and the one cursor that says what is made next.

The life of a slot::

    FREE --claim--> FILLING --ready--> READY --lease--> LEASED --release--> FREE
                      |  ^
               reclaim|  |claim (before any new step)
                      v  |
                      REDO        its worker died: the slot stays promised to the same step

* Step ``s`` lives in slot ``s % depth``. Workers may finish out of order; the consumer leases in order (as they become
  ready: :mod:`pipeline.ring_arrival`). Steps are claimed in order and a claimed step always has its slot, so the step
  the consumer waits for can never starve. Steps that were given out before the ring was made are passed over.
* A ring may grow (:meth:`Ring.grow`): steps that were claimed before stay where they are, later ones spread over more
  slots. Addresses are given for the most slots at the start, memory only as they come into use.
* The memory is a ``memfd``: it has no name, so nothing is left behind however the processes end, and /dev/shm does not
  bound it. Others map it through ``/proc/<pid>/fd/<n>``.
* Every change of state happens under one ``fcntl`` record lock, which the kernel releases when its holder dies. The
  order of the stores inside makes each change all or nothing: a claim counts when the cursor has moved.
* Two pipes wake those who wait (a slot became free, a batch became ready). They carry no information: a lost byte costs
  one poll interval of :data:`POLL_S`.

This file knows nothing of records, images or Ray: a slot's payload is ``slot_bytes`` bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple, Self

import numpy as np

from pipeline import ring_layout as layout
from pipeline.process import Process
from pipeline.ring_layout import MAX_WORKERS
from pipeline.shared import RecordLock, RingError, allocate, drain, reserve, wake, wake_pipe

POLL_S = 0.05
HASHES = layout.HASHES


class State(IntEnum):
    FREE = 0
    FILLING = 1
    READY = 2
    LEASED = 3
    REDO = 4


_FREE, _FILLING, _READY, _LEASED, _REDO = (state.value for state in State)  # an enum compares slowly
_NEXT_STEP, _STOP_STEP, _RELEASED, _STOP, _POISON, _SPAN_COUNT, _START_STEP, _GIVEN_END, _GIVEN = map(
    layout.header_word,
    ("next_step", "stop_step", "released", "stop", "poison", "span_count", "start_step", "given_end", "given"),
)
_HEARTBEAT, _MAKING, _ENDED, _RETIRED = map(layout.worker_word, ("heartbeat_ns", "step", "ended", "retired"))
_STATE, _OWNER, _STEP, _ITEMS, _EPOCH, _REDONE, _CLAIMED, _READY_NS, _HASHES = map(
    layout.slot_word, ("state", "owner", "step", "items", "epoch", "redo", "claimed_ns", "ready_ns", "hashes")
)

_END = _HASHES + len(HASHES)


class Blocked(Enum):
    """Why there is nothing to claim."""

    SLOT = "the next step's slot is not free"
    WORK = "all steps are claimed, some are still being made"
    DONE = "all steps are made"
    STOP = "the ring is being closed"


@dataclass(frozen=True)
class RingAddress:
    """How to find a ring from another process of the same host."""

    pid: int
    memory_fd: int
    ready_fd: int
    free_fd: int
    nbytes: int
    arrival: bool = False


class Claim(NamedTuple):
    step: int
    slot: int
    redo: int  # times the step was begun before: its generation, beside the step


class Ready(NamedTuple):
    """What a descriptor says about a finished batch."""

    step: int
    slot: int
    items: int
    epoch: int
    owner: int
    ready_ns: int
    hashes: dict[str, int]
    making_ns: int = 0
    """From its claim to READY."""


class Ring:
    """One mapping of the ring. Made by the consumer with :meth:`create`, by workers with :meth:`attach`."""

    arrival = False

    def __init__(self, address: RingAddress, fds: tuple[int, int, int], created: bool) -> None:
        self.address = address
        self._memory, self._ready, self._free = fds
        self.lock = RecordLock(self._memory, patient=not created)
        self._sleep: select.poll | None = None
        self._also: tuple[int, ...] = ()
        self._map = mmap.mmap(self._memory, address.nbytes)
        self._header = np.frombuffer(self._map, layout.HEADER, 1)[0:1]
        if created:
            return
        head = self._header[0]
        if head["magic"] != layout.MAGIC or head["version"] != layout.VERSION:
            self.close()
            raise RingError(
                f"/proc/{address.pid}/fd/{address.memory_fd} is not a ring of this version",
                expected=f"version {layout.VERSION}",
                found=int(head["version"]),
                hint="run trainer and workers from the same installation",
            )
        self._views(int(head["capacity"]), int(head["slot_bytes"]))

    # -- life cycle ------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, depth: int, slot_bytes: int, *, most: int = 0, start_step: int = 0, stop_step: int | None = None,
        poison: bool = False, given: Iterable[Sequence[int]] = (),
    ) -> Self:  # fmt: skip
        """A new ring of ``depth`` slots, which may grow to ``most``, whose first step is ``start_step``.

        given: (first, last) of steps beyond it that nobody shall make; at most :data:`ring_layout.GIVEN_STEPS` away.

        Raises :class:`RingError` naming the memory needed where there is not enough: the pages are reserved here, so
        that nobody dies of SIGBUS later.
        """
        capacity = max(depth, most)
        slot_bytes = -(-slot_bytes // layout.PAGE) * layout.PAGE
        begin = layout.payload_offset(capacity)
        what = f"the ring: {depth} slots of {slot_bytes / 2**20:,.1f} MiB"
        memory = allocate(
            "stallscope-ring", begin + depth * slot_bytes, what, address_space=begin + capacity * slot_bytes
        )
        ready, free = wake_pipe(), wake_pipe()
        address = RingAddress(os.getpid(), memory, ready, free, begin + capacity * slot_bytes, cls.arrival)
        ring = cls(address, (memory, ready, free), created=True)
        head = ring._header[0]
        head["magic"], head["version"], head["capacity"] = layout.MAGIC, layout.VERSION, capacity
        head["slot_bytes"], head["next_step"], head["poison"] = slot_bytes, start_step, poison
        head["stop_step"] = layout.NO_STOP if stop_step is None else stop_step
        head["spans"][0], head["span_count"] = (start_step, depth), 1
        head["start_step"] = head["oldest"] = head["given_end"] = start_step
        for first, last in given:
            for at in range(first - start_step, last + 1 - start_step):
                head["given"][at // 64] |= np.uint64(1 << at % 64)
            head["given_end"] = last + 1
        ring._views(capacity, slot_bytes)
        ring._workers["step"] = -1
        ring._slots["step"] = ring._slots["owner"] = -1
        return ring

    @classmethod
    def attach(cls, address: RingAddress) -> Self:
        """Map the ring of another process. Raises :class:`RingError` when that process or its ring is gone."""
        fds: list[int] = []
        try:
            for fd in (address.memory_fd, address.ready_fd, address.free_fd):
                fds.append(os.open(f"/proc/{address.pid}/fd/{fd}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
            if os.fstat(fds[0]).st_size != address.nbytes:
                raise FileNotFoundError("the descriptor is something else now")
        except OSError as error:
            for fd in fds:
                os.close(fd)
            raise RingError(
                f"the ring of process {address.pid} cannot be opened: {error}",
                hint="workers must run on the trainer's node, as the trainer's user",
            ) from error
        return cls(address, (fds[0], fds[1], fds[2]), created=False)

    def _views(self, capacity: int, slot_bytes: int) -> None:
        self.capacity, self.slot_bytes = capacity, slot_bytes
        self._workers = np.frombuffer(self._map, layout.WORKER, MAX_WORKERS, layout.PAGE)
        self._slots = np.frombuffer(self._map, layout.SLOT, capacity, layout.SLOTS_AT)
        payload = np.frombuffer(self._map, np.uint8, capacity * slot_bytes, layout.payload_offset(capacity))
        self._payload = payload.reshape(capacity, slot_bytes)
        # The same words as plain integers: a field of a NumPy record takes ten times as long.
        self._words = memoryview(self._map).cast("q")
        self._unsigned = memoryview(self._map).cast("Q")
        self._spans: list[tuple[int, int]] = []

    def close(self) -> None:
        """Give mapping and descriptors back. Idempotent. A user's arrays keep the memory until they go."""
        if self._memory < 0:
            return
        for name in ("_header", "_workers", "_slots", "_payload", "_words", "_unsigned"):
            self.__dict__.pop(name, None)
        with contextlib.suppress(BufferError):  # a user holds an array of a batch: unmapped when that goes
            self._map.close()
        del self._map
        for fd in (self._memory, self._ready, self._free):
            os.close(fd)
        self._memory = self._ready = self._free = -1

    def payload(self, slot: int) -> np.ndarray:
        """The bytes of a slot: uint8[slot_bytes], page-aligned, in shared memory."""
        return self._payload[slot]

    @property
    def memory(self) -> np.ndarray:
        """All slots: uint8[capacity * slot_bytes], page-aligned, and reserved from now on, in use or not."""
        self._reserve(self.capacity)
        return self._payload.reshape(-1)

    @property
    def depth(self) -> int:
        """Slots in use for steps that are claimed from now on."""
        return self._all_spans()[-1][1]

    def grow(self, depth: int) -> None:
        """Use ``depth`` slots (at most :attr:`capacity`) for all steps that nobody has claimed yet; never fewer.

        Raises :class:`RingError` where there is no memory for them, or it grew too often: nothing is changed then.
        """
        spans = self._all_spans()
        if not self.depth < depth <= self.capacity or len(spans) == layout.MAX_SPANS:
            raise RingError(
                f"a ring of {self.depth} slots cannot grow to {depth}",
                expected=f"more than that, at most {self.capacity}, and {layout.MAX_SPANS - 1} times",
                found=f"{depth} slots, {len(spans) - 1} times before",
            )
        self._reserve(depth)
        with self.lock:
            self._header[0]["spans"][len(spans)] = (self.next_step, depth)
            self._header[0]["span_count"] = len(spans) + 1
        for _ in range(depth - spans[-1][1]):
            wake(self._free)

    def slot_of(self, step: int) -> int:
        """Where a step lives."""
        spans = self._spans if len(self._spans) == self._words[_SPAN_COUNT] else self._all_spans()
        if len(spans) == 1:  # as long as it has not grown
            return step % spans[0][1]
        for first, depth in reversed(spans):
            if step >= first:
                return step % depth
        return step % spans[0][1]

    def _all_spans(self) -> list[tuple[int, int]]:
        """(first step, slots in use) of each stretch of steps; the ring has grown between two."""
        if len(self._spans) != self._words[_SPAN_COUNT]:
            self._spans = [(int(first), int(depth)) for first, depth in self._header[0]["spans"]]
            del self._spans[self._words[_SPAN_COUNT] :]
        return self._spans

    def _reserve(self, slots: int) -> None:
        used = max(depth for _, depth in self._all_spans())
        begin = layout.payload_offset(self.capacity)
        what = f"{slots} slots of {self.slot_bytes / 2**20:,.1f} MiB in the ring"
        reserve(self._memory, begin + used * self.slot_bytes, begin + slots * self.slot_bytes, what)

    # -- the worker's side -----------------------------------------------------------------------------------

    def enter(self, row: int) -> None:
        """Take a worker's row. From here on the consumer counts on this process."""
        with self.lock:
            if self._workers[row]["pid"]:
                raise RingError(f"row {row} of the ring belongs to process {self._workers[row]['pid']}")
            self._workers[row] = (os.getpid(), time.monotonic_ns(), -1, 0, self._workers[row]["retired"], -1, -1, b"")

    def claim(self, row: int) -> Claim | Blocked:
        """The next step to make and its slot, now FILLING; or why there is none. A lost worker's steps come first."""
        now, words, me = time.monotonic_ns(), self._words, layout.worker_at(row)
        with self.lock:
            words[me + _HEARTBEAT] = now
            if words[_STOP] or words[me + _RETIRED]:
                return Blocked.STOP
            states = self._states()
            redo = _REDO in states
            if redo:
                slots = (at for at, state in enumerate(states) if state == _REDO)
                step, slot = min((words[layout.slot_at(at) + _STEP], at) for at in slots)
            else:
                step = words[_NEXT_STEP]
                if step < words[_GIVEN_END]:
                    step = self._not_given(step)
                if step >= words[_STOP_STEP]:
                    return Blocked.WORK if _FILLING in states else Blocked.DONE
                slot = self._room(step, states)
                if slot < 0:
                    return Blocked.SLOT
                words[layout.slot_at(slot) + _REDONE] = 0
            # A kill between any two of these lines leaves a consistent ring, see reclaim().
            at = layout.slot_at(slot)
            words[at + _CLAIMED], words[at + _OWNER], words[at + _STEP] = now, row, step
            words[at + _STATE] = _FILLING
            words[me + _MAKING] = step
            if not redo:
                words[_NEXT_STEP] = step + 1
            states[slot] = _FILLING
            more = self._room(step + 1, states) >= 0
            attempt = words[at + _REDONE]
        if more:  # the byte that woke us may have stood for two free slots
            wake(self._free)
        return Claim(step, slot, attempt)

    def ready(self, row: int, claim: Claim, *, items: int, epoch: int, hashes: dict[str, int]) -> int:
        """FILLING → READY; returns the time of it (monotonic ns). Raises :class:`RingError` if the claim is lost."""
        words, me, at = self._words, layout.worker_at(row), layout.slot_at(claim.slot)
        with self.lock:
            found = (words[at + _STATE], words[at + _OWNER], words[at + _STEP], words[at + _REDONE])
            if found != (_FILLING, row, claim.step, claim.redo):
                raise RingError(
                    f"worker {row} finished step {claim.step} in slot {claim.slot}, which it does not hold",
                    expected=f"FILLING, step {claim.step}, worker {row}, begun again {claim.redo} times",
                    found=f"{State(found[0]).name}, step {found[2]}, worker {found[1]}, {found[3]} times",
                )
            now = time.monotonic_ns()
            words[at + _ITEMS], words[at + _EPOCH], words[at + _READY_NS] = items, epoch, now
            for place, name in enumerate(HASHES, at + _HASHES):
                self._unsigned[place] = hashes.get(name, 0)
            words[at + _STATE] = _READY
            words[me + _MAKING], words[me + _HEARTBEAT] = -1, now
        wake(self._ready)
        return now

    def leave(self, row: int) -> None:
        """Say that this worker ends by itself, and wake the consumer to look at how."""
        self._words[layout.worker_at(row) + _ENDED] = 1
        wake(self._ready)

    def wait_free(self, trainer: Process, timeout_s: float = POLL_S) -> bool:
        """Sleep until a slot may have become free; False when the trainer's process has ended."""
        poll = select.poll()
        poll.register(self._free, select.POLLIN)
        if trainer.fileno() >= 0:
            poll.register(trainer.fileno(), select.POLLIN)
        poll.poll(timeout_s * 1e3)
        drain(self._free)
        return trainer.alive

    # -- the consumer's side ---------------------------------------------------------------------------------

    def turn(self, step: int) -> int:
        """The step that can be leased now where it is ``step``'s turn, -1 for none. Takes no lock."""
        return step if self.is_ready(step) else -1

    def is_ready(self, step: int) -> bool:
        """Whether the batch of ``step`` waits in its slot. Takes no lock."""
        at = layout.slot_at(self.slot_of(step))
        return self._words[at + _STATE] == _READY and self._words[at + _STEP] == step

    def is_leased(self, step: int) -> bool:
        """Whether the slot that ``step`` needs is still with the consumer, for an earlier step. Takes no lock."""
        return self._words[layout.slot_at(self.slot_of(step)) + _STATE] == _LEASED

    def lease(self, step: int) -> Ready:
        """READY → LEASED: the consumer reads the slot from now on. Raises :class:`RingError` if it is not ready."""
        index, words = self.slot_of(step), self._words
        at = layout.slot_at(index)
        with self.lock:
            self._expect(index, _READY, step)
            words[at + _STATE] = _LEASED
            return Ready(
                step, index, words[at + _ITEMS], words[at + _EPOCH], words[at + _OWNER], words[at + _READY_NS],
                dict(zip(HASHES, self._unsigned[at + _HASHES : at + _END].tolist(), strict=True)),
                words[at + _READY_NS] - words[at + _CLAIMED],
            )  # fmt: skip

    def release(self, step: int) -> None:
        """LEASED → FREE, and wake the workers. Raises :class:`RingError` for a slot that is not leased to ``step``."""
        index, words = self.slot_of(step), self._words
        at = layout.slot_at(index)
        with self.lock:
            self._expect(index, _LEASED, step)
            if words[_POISON]:
                self._payload[index] = 0xFF
            words[at + _OWNER], words[at + _STATE] = -1, _FREE
            words[_RELEASED] += 1
        wake(self._free)

    def wait_ready(self, timeout_s: float = POLL_S, *, also: tuple[int, ...] = ()) -> None:
        """Sleep until a batch may have become ready, or a descriptor in ``also`` is readable."""
        if self._sleep is None or also != self._also:  # by numbers: kept from one wait to the next
            self._sleep, self._also = select.poll(), also
            for fd in (self._ready, *also):
                self._sleep.register(fd, select.POLLIN)
        self._sleep.poll(timeout_s * 1e3)
        drain(self._ready)

    def reclaim(self, row: int, process: Process) -> int | None:
        """Take back what a dead worker was filling; returns its step, or None if it held nothing.

        Raises :class:`RingError` while ``process`` is alive: a paused process would write into a slot that has a new
        owner.
        """
        if process.alive:
            raise RingError(f"process {process.pid} is alive: its slots cannot be given to another worker")
        lost = None
        with self.lock:
            for slot in np.flatnonzero((self._slots["state"] == State.FILLING) & (self._slots["owner"] == row)):
                if self._slots["step"][slot] >= self._header[0]["next_step"]:
                    self._slots["state"][slot] = State.FREE  # killed inside claim(): the cursor never moved
                    continue
                lost = int(self._slots["step"][slot])
                self._slots["redo"][slot] += 1
                self._slots["owner"][slot] = -1
                self._slots["state"][slot] = State.REDO
            self._workers[row] = (0, 0, -1, 0, 0, -1, -1, b"")
        wake(self._free)
        return lost

    def retire(self, row: int) -> None:
        """Tell one worker to end when it looks for work the next time: what it makes now it still finishes."""
        self._words[layout.worker_at(row) + _RETIRED] = 1

    def stop(self) -> None:
        """Tell all workers to end as soon as they look."""
        self._words[_STOP] = 1
        for _ in range(MAX_WORKERS):
            if not wake(self._free):
                break

    # -- for looking at it -----------------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """The next step nobody has claimed."""
        return self._words[_NEXT_STEP]

    @property
    def released(self) -> int:
        """Slots given back so far."""
        return self._words[_RELEASED]

    def counts(self) -> dict[str, int]:
        """How many slots in use are in each state, by lower-case name."""
        states = self._states()
        return {state.name.lower(): states.count(state) for state in State}

    def worker(self, row: int) -> tuple[int, int, int, bool]:
        """(pid, heartbeat_ns, step, ended) of a row; pid 0 where nobody has entered, step -1 where none is made."""
        at = layout.worker_at(row)
        pid, heartbeat_ns, step, ended = self._words[at : at + 4]
        return pid, heartbeat_ns, step, bool(ended)

    def ended(self, rows: int) -> list[int]:
        """For each of the first rows whether its worker has left its loop by itself."""
        begin, size = layout.worker_at(0), layout.WORKER_WORDS
        return self._words[begin + _ENDED : begin + rows * size : size].tolist()

    # -- inside ----------------------------------------------------------------------------------------------

    def _states(self) -> list[int]:
        begin, size = layout.slot_at(0), layout.SLOT_WORDS
        return self._words[begin : begin + self.depth * size : size].tolist()

    def _room(self, step: int, states: Sequence[int]) -> int:
        """The free slot that a step may take, -1 for none."""
        slot = self.slot_of(step)
        return -1 if states[slot] else slot

    def _not_given(self, step: int) -> int:
        """The first step from this one on that was not given out before."""
        while step < self._words[_GIVEN_END]:
            at = step - self._words[_START_STEP]
            if not self._unsigned[_GIVEN + at // 64] >> at % 64 & 1:
                break
            step += 1
        return step

    def _expect(self, index: int, state: int, step: int) -> None:
        at = layout.slot_at(index)
        found, of = self._words[at + _STATE], self._words[at + _STEP]
        if found != state or of != step:
            raise RingError(
                f"slot {index} of the ring is not in the state this call needs",
                expected=f"{State(state).name}, step {step}",
                found=f"{State(found).name}, step {of}",
            )
