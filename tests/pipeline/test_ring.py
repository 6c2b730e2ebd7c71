from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline import shared
from pipeline.process import Process
from pipeline.ring import Blocked, Claim, Ring, RingAddress, RingError
from profiler.errors import StallscopeError
from tests.pipeline import functions

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def ring() -> Iterator[Ring]:
    ring = Ring.create(4, 1000)
    yield ring
    ring.close()


@pytest.fixture
def spawn() -> Iterator[Any]:
    started: list[Any] = []

    def start(target: Any, *args: Any) -> Any:
        process = SPAWN.Process(target=target, args=args, daemon=True)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join()
        process.close()


def dead_process() -> Process:
    with subprocess.Popen(["/bin/true"]) as child:
        pid = child.pid
    return Process(pid)


def claim(ring: Ring, row: int = 0) -> Claim:
    found = ring.claim(row)
    assert isinstance(found, Claim), found
    return found


def until(condition: Any, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.002)


def test_life_of_a_slot(ring: Ring) -> None:
    ring.enter(0)
    assert claim(ring) == Claim(0, 0, redo=False)
    assert ring.counts() == {"free": 3, "filling": 1, "ready": 0, "leased": 0, "redo": 0}
    ring.payload(0)[:] = 7
    at = ring.ready(0, Claim(0, 0, False), items=3, epoch=2, hashes={"ids": 2**64 - 1, "fill": 5})
    assert ring.is_ready(0)
    ready = ring.lease(0)
    assert (ready.step, ready.slot, ready.items, ready.epoch, ready.owner, ready.ready_ns) == (0, 0, 3, 2, 0, at)
    assert ready.hashes == {"ids": 2**64 - 1, "ids_set": 0, "raw": 0, "raw_set": 0, "fill": 5}
    assert not ring.is_ready(0)
    assert ring.is_leased(4)
    ring.release(0)
    assert ring.counts()["free"] == 4
    assert ring.released == 1


def test_every_wrong_turn_is_refused(ring: Ring) -> None:
    ring.enter(0)
    with pytest.raises(RingError, match="row 0 of the ring belongs to"):
        ring.enter(0)
    with pytest.raises(RingError, match="FREE, step -1"):
        ring.lease(0)
    first = claim(ring)
    for wrong in (Claim(4, 0, False), Claim(1, 1, False)):
        with pytest.raises(RingError, match="does not hold"):
            ring.ready(0, wrong, items=1, epoch=0, hashes={})
    with pytest.raises(RingError, match="does not hold"):
        ring.ready(1, first, items=1, epoch=0, hashes={})
    ring.ready(0, first, items=1, epoch=0, hashes={})
    with pytest.raises(RingError, match="does not hold"):
        ring.ready(0, first, items=1, epoch=0, hashes={})
    with pytest.raises(RingError, match="READY, step 4"):
        ring.lease(4)
    ring.lease(0)
    with pytest.raises(RingError, match="LEASED, step 4"):
        ring.release(4)
    ring.release(0)
    with pytest.raises(RingError, match="LEASED, step 0"):
        ring.release(0)


def test_back_pressure_and_end() -> None:
    ring = Ring.create(2, 8, start_step=10, stop_step=13)
    ring.enter(0)
    made = [claim(ring), claim(ring)]
    assert [(item.step, item.slot) for item in made] == [(10, 0), (11, 1)]
    assert ring.claim(0) is Blocked.SLOT
    for item in reversed(made):  # finished out of order, leased in order
        ring.ready(0, item, items=1, epoch=0, hashes={})
    assert ring.claim(0) is Blocked.SLOT
    ring.lease(10)
    assert ring.claim(0) is Blocked.SLOT
    ring.release(10)
    assert claim(ring).step == 12
    assert ring.claim(0) is Blocked.WORK
    ring.ready(0, Claim(12, 0, False), items=1, epoch=0, hashes={})
    assert ring.claim(0) is Blocked.DONE
    ring.stop()
    assert ring.claim(0) is Blocked.STOP
    ring.close()
    ring.close()


def test_payload_is_page_aligned_and_slots_do_not_overlap(ring: Ring) -> None:
    for slot in range(4):
        assert ring.payload(slot).ctypes.data % os.sysconf("SC_PAGESIZE") == 0
        ring.payload(slot)[:] = slot + 1
    assert [set(ring.payload(slot).tolist()) for slot in range(4)] == [{1}, {2}, {3}, {4}]


def test_poison_fills_a_freed_slot() -> None:
    ring = Ring.create(2, 100, poison=True)
    ring.enter(0)
    ring.ready(0, claim(ring), items=1, epoch=0, hashes={})
    ring.payload(0)[:] = 1
    ring.lease(0)
    ring.release(0)
    assert (ring.payload(0) == 0xFF).all()
    ring.close()


def test_memory_that_is_not_there_is_named_before_anything_is_taken() -> None:
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RingError, match=r"8 slots of 1,048,576\.0 MiB") as caught:
        Ring.create(8, 1 << 40)
    assert "8,388,608" in str(caught.value)
    assert "feed.depth" in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == fds


def test_close_gives_everything_back_though_an_array_is_held() -> None:
    fds = set(os.listdir("/proc/self/fd"))
    ring = Ring.create(2, 100)
    held = ring.payload(1)
    ring.close()
    held[:] = 3  # still mapped for its holder
    del held
    assert set(os.listdir("/proc/self/fd")) == fds
    gc.collect()  # errors that earlier tests looked at hold frames, and those arrays
    with open("/proc/self/maps") as maps:
        assert "stallscope-ring" not in maps.read()


def test_address_of_something_else_is_refused(ring: Ring) -> None:
    gone = dead_process().pid
    right = ring.address
    with open("/dev/zero", "rb") as file:
        for wrong in (
            RingAddress(gone, right.memory_fd, right.ready_fd, right.free_fd, right.nbytes),
            RingAddress(right.pid, file.fileno(), right.ready_fd, right.free_fd, right.nbytes),
        ):
            with pytest.raises(RingError, match="cannot be opened"):
                Ring.attach(wrong)


def test_a_ring_grows_while_steps_are_under_way() -> None:
    ring = Ring.create(2, 5000, most=7)
    ring.enter(0)
    ring.enter(1)
    early = [claim(ring), claim(ring)]
    assert ring.claim(0) is Blocked.SLOT
    worker = Ring.attach(ring.address)
    assert (worker.depth, worker.capacity) == (2, 7)
    ring.grow(5)
    assert worker.depth == ring.depth == 5
    # Step 2 lives in slot 2 from now on; 0 and 1 stay where they are, and are given back there.
    later = [claim(worker, 1) for _ in range(3)]
    assert [(made.step, made.slot) for made in (*early, *later)] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
    assert worker.claim(1) is Blocked.SLOT
    for made in (*early, *later):
        worker.payload(made.slot)[:] = made.step
        worker.ready(0 if made in early else 1, made, items=1, epoch=0, hashes={"fill": made.step})
    ring.grow(7)
    for step in range(5):
        ready = ring.lease(step)
        assert (ring.payload(ready.slot) == step).all()
        assert ready.hashes["fill"] == step
        ring.release(step)
    assert (claim(ring).step, ring.slot_of(5), ring.slot_of(4), ring.slot_of(0)) == (5, 5, 4, 0)
    assert ring.counts() == {"free": 6, "filling": 1, "ready": 0, "leased": 0, "redo": 0}
    worker.close()
    ring.close()


def test_growth_wakes_who_waits_for_a_slot(spawn: Any) -> None:
    ring = Ring.create(1, 100, most=3)
    spawn(functions.fill_ring, ring.address, 0, 0.0)
    until(lambda: ring.counts()["ready"] == 1)
    ring.grow(3)
    until(lambda: ring.counts()["ready"] == 3 or (ring.counts()["ready"] == 2 and ring.next_step == 2))
    ring.close()


def test_growth_that_cannot_be_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring.create(2, 100, most=30)
    for depth in (1, 2, 31):
        with pytest.raises(RingError, match=f"a ring of 2 slots cannot grow to {depth}"):
            ring.grow(depth)
    monkeypatch.setattr(shared, "available_memory", lambda: 3 * 4096)
    ring.grow(5)
    with pytest.raises(RingError, match="no memory for 9 slots"):
        ring.grow(9)
    assert ring.depth == 5
    for depth in range(6, 20):
        ring.grow(depth)
    with pytest.raises(RingError, match="15 times before"):
        ring.grow(20)
    ring.close()


def test_memory_is_taken_for_slots_in_use_and_for_all_when_somebody_may_lock_them() -> None:
    ring = Ring.create(2, 1 << 20, most=10)

    def mib() -> int:
        return os.fstat(ring.address.memory_fd).st_blocks * 512 >> 20

    assert mib() == 2
    ring.grow(5)
    assert mib() == 5
    assert ring.memory.nbytes == 10 << 20
    assert mib() == 10
    ring.close()


def test_a_retired_worker_finishes_what_it_makes_and_ends(ring: Ring) -> None:
    ring.enter(0)
    ring.enter(1)
    first = claim(ring, 0)
    ring.retire(0)
    ring.retire(2)
    ring.ready(0, first, items=1, epoch=0, hashes={})
    assert ring.claim(0) is Blocked.STOP
    assert claim(ring, 1).step == 1
    ring.leave(0)
    assert ring.ended(3) == [1, 0, 0]
    ring.enter(2)  # it was told before it came
    assert ring.claim(2) is Blocked.STOP


def test_version_is_checked(ring: Ring) -> None:
    ring._header[0]["version"] = 99
    with pytest.raises(RingError, match="not a ring of this version"):
        Ring.attach(ring.address)


def test_reclaim_is_refused_while_the_process_lives(ring: Ring, spawn: Any) -> None:
    worker = spawn(functions.fill_ring, ring.address, 0, 600.0)
    until(lambda: ring.counts()["filling"] == 1)
    os.kill(worker.pid, signal.SIGSTOP)
    process = Process(worker.pid)
    with pytest.raises(RingError, match="is alive"):
        ring.reclaim(0, process)
    process.kill()
    assert process.exit_status() in ("SIGKILL", None)
    assert ring.reclaim(0, process) == 0
    assert ring.counts()["redo"] == 1
    # Its step is made first, in the same slot, by whoever comes next.
    ring.enter(1)
    assert claim(ring, 1) == Claim(0, 0, redo=True)
    assert claim(ring, 1) == Claim(1, 1, redo=False)
    with pytest.raises(RingError, match="does not hold"):
        ring.ready(0, Claim(0, 0, False), items=1, epoch=0, hashes={})
    process.close()


@pytest.mark.parametrize("moved", [False, True])
def test_a_kill_inside_claim_counts_only_when_the_cursor_has_moved(ring: Ring, moved: bool) -> None:
    ring.enter(0)
    first = claim(ring)
    if not moved:
        ring._header[0]["next_step"] = first.step  # as if killed before the last store
    assert ring.reclaim(0, dead_process()) == (0 if moved else None)
    ring.enter(1)
    assert claim(ring, 1) == Claim(0, 0, redo=moved)
    assert claim(ring, 1).step == 1


def test_consumer_gets_past_a_worker_stopped_with_the_lock(
    ring: Ring, spawn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "PATIENCE_S", 0.2)
    holder = spawn(functions.hold_lock, ring.address)
    until(lambda: ring.lock.holder() == holder.pid)
    with pytest.raises(RingError, match=f"process {holder.pid} has kept the lock"):
        ring.enter(0)
    ended: list[int] = []

    def end(pid: int) -> None:
        ended.append(pid)
        Process(pid).kill()

    ring.lock.on_kept = end
    ring.enter(0)
    assert ended == [holder.pid]
    assert claim(ring).step == 0


def test_exactly_once_with_workers_killed_at_any_moment(spawn: Any) -> None:
    steps, depth = 400, 5
    ring = Ring.create(depth, 4096, stop_step=steps, poison=True)
    rng = np.random.default_rng(5)
    rows: dict[int, Any] = {row: spawn(functions.fill_ring, ring.address, row, 0.0005) for row in (0, 1)}
    kills, next_kill, delivered = 0, 10, []
    for step in range(steps):
        deadline = time.monotonic() + 60
        while not ring.is_ready(step):
            assert time.monotonic() < deadline, ring.counts()
            ring.wait_ready()
            for row, worker in list(rows.items()):
                if not worker.is_alive() and worker.exitcode != 0:
                    with_pid = Process(worker.pid)
                    ring.reclaim(row, with_pid)
                    rows[row] = spawn(functions.fill_ring, ring.address, row, 0.0005)
        ready = ring.lease(step)
        payload = ring.payload(ready.slot)
        assert (payload == step % 251).all(), step
        delivered.append(ready.hashes["fill"])
        ring.release(step)
        if step == next_kill and kills < 6:
            os.kill(rows[int(rng.integers(2))].pid, signal.SIGKILL)
            kills, next_kill = kills + 1, step + int(rng.integers(20, 60))
    assert kills == 6
    assert delivered == list(range(steps))
    ring.close()


def consumer_that_will_be_killed(pipe: Any) -> None:
    ring = Ring.create(2, 100)
    with subprocess.Popen(
        [sys.executable, "-c", "import sys, pickle; from tests.pipeline.functions import fill_ring; "
         "fill_ring(pickle.loads(bytes.fromhex(sys.argv[1])), 0, 0.0)", pickle.dumps(ring.address).hex()],
    ) as worker:  # fmt: skip
        until(lambda: ring.counts()["ready"] == 2)
        pipe.send(worker.pid)
        worker.wait()


def test_worker_ends_when_the_consumer_is_gone(spawn: Any) -> None:
    here, there = SPAWN.Pipe()
    consumer = spawn(consumer_that_will_be_killed, there)
    assert here.poll(60)
    worker = Process(here.recv())
    assert worker.alive
    consumer.kill()
    assert worker.wait(30)
    worker.close()


def test_a_process_that_was_gone_from_the_start() -> None:
    process = dead_process()
    assert not process.alive
    assert process.wait(0)
    assert process.exit_status() is None
    process.kill()
    process.close()
    process.close()


def test_exit_status_is_told_where_the_kernel_knows_it() -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as child:
        process = Process(child.pid)
        assert process.alive
        assert not process.wait(0)
        process.kill()
        child.wait()
    assert process.exit_status() in ("SIGKILL", None)
    process.close()


def test_a_process_that_cannot_be_killed_is_said_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as child:
        process = Process(child.pid)
        monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)
        with pytest.raises(StallscopeError, match="does not end after SIGKILL"):
            process.kill(timeout_s=0.05)
        monkeypatch.undo()
        process.kill()
        child.wait()
    process.close()


class SlotLife(RuleBasedStateMachine):
    """Any sequence of events: steps come in order, each once, and no slot has two masters."""

    rows = 3

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring.create(2, 16, most=9)
        self.slots: dict[int, int] = {}
        self.dead = dead_process()
        self.claims: dict[int, Claim] = {}
        self.leased: list[int] = []
        self.delivered: list[int] = []
        for row in range(self.rows):
            self.ring.enter(row)

    @rule(row=st.integers(0, rows - 1))
    def claim(self, row: int) -> None:
        if row in self.claims:
            return
        redo_before = self.ring.counts()["redo"]
        found = self.ring.claim(row)
        if isinstance(found, Claim):
            assert bool(found.redo) == (redo_before > 0)
            assert found.step not in [other.step for other in self.claims.values()]
            assert found.step >= len(self.delivered)
            self.ring.payload(found.slot)[0] = found.step % 251
            self.claims[row] = found
            assert found.slot == self.slots.setdefault(found.step, found.slot), "a step keeps its slot"
        else:
            assert found is Blocked.SLOT

    @rule(row=st.integers(0, rows - 1))
    def ready(self, row: int) -> None:
        if row in self.claims:
            done = self.claims.pop(row)
            self.ring.ready(row, done, items=1, epoch=0, hashes={"fill": done.step})

    @rule(row=st.integers(0, rows - 1))
    def lose(self, row: int) -> None:
        lost = self.claims.pop(row, None)
        assert self.ring.reclaim(row, self.dead) == (lost.step if lost else None)
        self.ring.enter(row)

    @precondition(lambda self: self.ring.depth < 9)
    @rule(more=st.integers(1, 7))
    def grow(self, more: int) -> None:
        self.ring.grow(min(9, self.ring.depth + more))

    @precondition(lambda self: self.ring.is_ready(len(self.delivered)))
    @rule()
    def lease(self) -> None:
        step = len(self.delivered)
        ready = self.ring.lease(step)
        assert ready.hashes["fill"] == step
        assert self.ring.payload(ready.slot)[0] == step % 251
        self.delivered.append(step)
        self.leased.append(step)

    @precondition(lambda self: self.leased)
    @rule(which=st.integers(0, 2))
    def release(self, which: int) -> None:
        self.ring.release(self.leased.pop(which % len(self.leased)))

    @invariant()
    def slots_are_accounted_for(self) -> None:
        counts = self.ring.counts()
        assert sum(counts.values()) == self.ring.depth
        assert counts["filling"] == len(self.claims)
        assert counts["leased"] == len(self.leased)
        outstanding = counts["filling"] + counts["ready"] + counts["redo"]
        assert self.ring.next_step == len(self.delivered) + outstanding

    def teardown(self) -> None:
        self.ring.close()


TestSlotLife = SlotLife.TestCase
TestSlotLife.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
