"""The ring: slots for batches in one piece of shared memory, and the one cursor that says what is made next.

The life of a slot::

    FREE --claim--> FILLING --ready--> READY --lease--> LEASED --release--> FREE
                      |  ^
               reclaim|  |claim (before any new step)
                      v  |
                      REDO        its worker died: the slot stays promised to the same step

* Step ``s`` lives in slot ``s % depth``. Workers may finish out of order; the consumer leases in order. Steps are
  claimed in order and a claimed step always has its slot, so the step the consumer waits for can never starve.
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
from dataclasses import dataclass
from enum import Enum, IntEnum

import numpy as np

from pipeline.process import Process
from pipeline.shared import RecordLock, RingError, allocate, drain, wake, wake_pipe

VERSION = 1
MAX_WORKERS = 256
POLL_S = 0.05
NO_STOP = 2**63 - 1
HASHES = ("ids", "ids_set", "raw", "raw_set", "fill")
"""Names of a batch's hashes, in the order of the descriptor."""

_MAGIC = int.from_bytes(b"STLLRING", "little")
_PAGE = mmap.PAGESIZE

_HEADER = np.dtype(
    [
        ("magic", "u8"),
        ("version", "u4"),
        ("depth", "u4"),
        ("slot_bytes", "i8"),
        ("next_step", "i8"),  # the cursor: the next step nobody has claimed
        ("stop_step", "i8"),  # first step that is not made
        ("released", "i8"),  # slots given back so far
        ("stop", "u4"),  # 1: workers end as soon as they look
        ("poison", "u4"),  # 1: a freed slot is filled with 0xFF
    ]
)
_WORKER = np.dtype(
    [
        ("pid", "i8"),  # 0: nobody
        ("heartbeat_ns", "i8"),  # last claim, ready or look for work
        ("step", "i8"),  # being made, -1 for none
        ("ended", "i8"),  # 1: left its loop by itself (done, told to stop, or with an error)
    ]
)
_SLOT = np.dtype(
    [
        ("state", "u4"),
        ("owner", "i4"),  # row of the worker that fills or filled it, -1 for none
        ("step", "i8"),  # the slot's generation
        ("items", "i8"),  # records in the batch
        ("epoch", "i8"),
        ("redo", "i8"),  # times it was begun again after a worker was lost
        ("claimed_ns", "i8"),
        ("ready_ns", "i8"),
        ("hashes", "u8", (len(HASHES),)),
    ]
)


class State(IntEnum):
    FREE = 0
    FILLING = 1
    READY = 2
    LEASED = 3
    REDO = 4


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


@dataclass(frozen=True)
class Claim:
    step: int
    slot: int
    redo: bool


@dataclass(frozen=True)
class Ready:
    """What a descriptor says about a finished batch."""

    step: int
    slot: int
    items: int
    epoch: int
    owner: int
    ready_ns: int
    hashes: dict[str, int]


class Ring:
    """One mapping of the ring. Made by the consumer with :meth:`create`, by workers with :meth:`attach`."""

    def __init__(self, address: RingAddress, fds: tuple[int, int, int], created: bool) -> None:
        self.address = address
        self._memory, self._ready, self._free = fds
        self.lock = RecordLock(self._memory, patient=not created)
        self._map = mmap.mmap(self._memory, address.nbytes)
        self._header = np.frombuffer(self._map, _HEADER, 1)[0:1]
        if created:
            return
        head = self._header[0]
        if head["magic"] != _MAGIC or head["version"] != VERSION:
            self.close()
            raise RingError(
                f"/proc/{address.pid}/fd/{address.memory_fd} is not a ring of this version",
                expected=f"version {VERSION}",
                found=int(head["version"]),
                hint="run trainer and workers from the same installation",
            )
        self._views(int(head["depth"]), int(head["slot_bytes"]))

    # -- life cycle ------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, depth: int, slot_bytes: int, *, start_step: int = 0, stop_step: int | None = None, poison: bool = False
    ) -> Ring:
        """A new ring of ``depth`` slots whose first step is ``start_step``.

        Raises :class:`RingError` naming the memory needed where there is not enough: the pages are reserved here, so
        that nobody dies of SIGBUS later.
        """
        slot_bytes = -(-slot_bytes // _PAGE) * _PAGE
        nbytes = _payload_offset(depth) + depth * slot_bytes
        what = f"the ring: {depth} slots of {slot_bytes / 2**20:,.1f} MiB"
        memory = allocate("stallscope-ring", nbytes, what)
        ready, free = wake_pipe(), wake_pipe()
        ring = cls(RingAddress(os.getpid(), memory, ready, free, nbytes), (memory, ready, free), created=True)
        ring._header[0] = (
            _MAGIC, VERSION, depth, slot_bytes, start_step, NO_STOP if stop_step is None else stop_step, 0, 0, poison,
        )  # fmt: skip
        ring._views(depth, slot_bytes)
        ring._workers["step"] = -1
        ring._slots["step"] = ring._slots["owner"] = -1
        return ring

    @classmethod
    def attach(cls, address: RingAddress) -> Ring:
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

    def _views(self, depth: int, slot_bytes: int) -> None:
        self.depth, self.slot_bytes = depth, slot_bytes
        self._workers = np.frombuffer(self._map, _WORKER, MAX_WORKERS, _PAGE)
        self._slots = np.frombuffer(self._map, _SLOT, depth, _PAGE + MAX_WORKERS * _WORKER.itemsize)
        payload = np.frombuffer(self._map, np.uint8, depth * slot_bytes, _payload_offset(depth))
        self._payload = payload.reshape(depth, slot_bytes)

    def close(self) -> None:
        """Give mapping and descriptors back. Idempotent. A user's arrays keep the memory until they go."""
        if self._memory < 0:
            return
        for name in ("_header", "_workers", "_slots", "_payload"):
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
        """All slots: uint8[depth * slot_bytes], page-aligned."""
        return self._payload.reshape(-1)

    # -- the worker's side -----------------------------------------------------------------------------------

    def enter(self, row: int) -> None:
        """Take a worker's row. From here on the consumer counts on this process."""
        with self.lock:
            if self._workers[row]["pid"]:
                raise RingError(f"row {row} of the ring belongs to process {self._workers[row]['pid']}")
            self._workers[row] = (os.getpid(), time.monotonic_ns(), -1, 0)

    def claim(self, row: int) -> Claim | Blocked:
        """The next step to make and its slot, now FILLING; or why there is none. A lost worker's steps come first."""
        now = time.monotonic_ns()
        with self.lock:
            head, slots = self._header[0], self._slots
            self._workers[row]["heartbeat_ns"] = now
            if head["stop"]:
                return Blocked.STOP
            states = slots["state"].tolist()  # plain integers: NumPy's scalars compare slowly with an enum
            redo = State.REDO in states
            if redo:
                step, slot = min((int(slots["step"][at]), at) for at in range(self.depth) if states[at] == State.REDO)
            else:
                step = int(head["next_step"])
                slot = step % self.depth
                if step >= head["stop_step"]:
                    return Blocked.WORK if State.FILLING in states else Blocked.DONE
                if states[slot] != State.FREE:
                    return Blocked.SLOT
                slots[slot]["redo"] = 0
            # A kill between any two of these lines leaves a consistent ring, see reclaim().
            entry = slots[slot]
            entry["claimed_ns"], entry["owner"], entry["step"] = now, row, step
            entry["state"] = int(State.FILLING)
            self._workers[row]["step"] = step
            if not redo:
                head["next_step"] = step + 1
            more = states[(step + 1) % self.depth] == State.FREE
        if more:  # the byte that woke us may have stood for two free slots
            wake(self._free)
        return Claim(step, slot, redo)

    def ready(self, row: int, claim: Claim, *, items: int, epoch: int, hashes: dict[str, int]) -> int:
        """FILLING → READY; returns the time of it (monotonic ns). Raises :class:`RingError` if the claim is lost."""
        with self.lock:
            slot = self._slots[claim.slot]
            if (int(slot["state"]), int(slot["owner"]), int(slot["step"])) != (State.FILLING, row, claim.step):
                raise RingError(
                    f"worker {row} finished step {claim.step} in slot {claim.slot}, which it does not hold",
                    expected=f"FILLING, step {claim.step}, worker {row}",
                    found=f"{State(slot['state']).name}, step {slot['step']}, worker {slot['owner']}",
                )
            now = time.monotonic_ns()
            slot["items"], slot["epoch"], slot["ready_ns"] = items, epoch, now
            slot["hashes"] = [hashes.get(name, 0) for name in HASHES]
            slot["state"] = int(State.READY)
            self._workers[row]["step"], self._workers[row]["heartbeat_ns"] = -1, now
        wake(self._ready)
        return now

    def leave(self, row: int) -> None:
        """Say that this worker ends by itself, and wake the consumer to look at how."""
        self._workers[row]["ended"] = 1
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

    def is_ready(self, step: int) -> bool:
        """Whether the batch of ``step`` waits in its slot. Takes no lock."""
        slot = self._slots[step % self.depth]
        return int(slot["state"]) == State.READY and int(slot["step"]) == step

    def is_leased(self, step: int) -> bool:
        """Whether the slot that ``step`` needs is still with the consumer, for an earlier step. Takes no lock."""
        return int(self._slots[step % self.depth]["state"]) == State.LEASED

    def lease(self, step: int) -> Ready:
        """READY → LEASED: the consumer reads the slot from now on. Raises :class:`RingError` if it is not ready."""
        index = step % self.depth
        with self.lock:
            slot = self._slots[index]
            self._expect(index, State.READY, step)
            slot["state"] = int(State.LEASED)
            return Ready(
                step, index, int(slot["items"]), int(slot["epoch"]), int(slot["owner"]), int(slot["ready_ns"]),
                dict(zip(HASHES, slot["hashes"].tolist(), strict=True)),
            )  # fmt: skip

    def release(self, step: int) -> None:
        """LEASED → FREE, and wake the workers. Raises :class:`RingError` for a slot that is not leased to ``step``."""
        index = step % self.depth
        with self.lock:
            self._expect(index, State.LEASED, step)
            if self._header[0]["poison"]:
                self._payload[index] = 0xFF
            self._slots[index]["owner"] = -1
            self._slots[index]["state"] = int(State.FREE)
            self._header[0]["released"] += 1
        wake(self._free)

    def wait_ready(self, timeout_s: float = POLL_S, *, also: tuple[int, ...] = ()) -> None:
        """Sleep until a batch may have become ready, or a descriptor in ``also`` is readable."""
        poll = select.poll()
        for fd in (self._ready, *also):
            poll.register(fd, select.POLLIN)
        poll.poll(timeout_s * 1e3)
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
            self._workers[row] = (0, 0, -1, 0)
        wake(self._free)
        return lost

    def stop(self) -> None:
        """Tell all workers to end as soon as they look."""
        self._header[0]["stop"] = 1
        for _ in range(MAX_WORKERS):
            if not wake(self._free):
                break

    # -- for looking at it -----------------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        return int(self._header[0]["next_step"])

    @property
    def released(self) -> int:
        return int(self._header[0]["released"])

    def counts(self) -> dict[str, int]:
        """How many slots are in each state, by lower-case name."""
        states = self._slots["state"].tolist()
        return {state.name.lower(): states.count(state) for state in State}

    def worker(self, row: int) -> tuple[int, int, int, bool]:
        """(pid, heartbeat_ns, step, ended) of a row; pid 0 where nobody has entered, step -1 where none is made."""
        pid, heartbeat_ns, step, ended = self._workers[row].tolist()
        return pid, heartbeat_ns, step, bool(ended)

    # -- inside ----------------------------------------------------------------------------------------------

    def _expect(self, index: int, state: State, step: int) -> None:
        slot = self._slots[index]
        if int(slot["state"]) != state or int(slot["step"]) != step:
            raise RingError(
                f"slot {index} of the ring is not in the state this call needs",
                expected=f"{state.name}, step {step}",
                found=f"{State(slot['state']).name}, step {slot['step']}",
            )


def _payload_offset(depth: int) -> int:
    return -(-(_PAGE + MAX_WORKERS * _WORKER.itemsize + depth * _SLOT.itemsize) // _PAGE) * _PAGE
