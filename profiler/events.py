"""The event record: one fixed-size row for something that took time, and the closed lists it draws from.

An event never carries text. Text (why a worker was restarted, which record was slow) goes to the *notes* of the
same process, see :meth:`profiler.recorder.Recorder.note`. Times are ``time.monotonic_ns`` of the host that wrote them.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

MISSING = -1
"""Value of cpu_ns, runq_ns, inblock, major_faults, waits, step, slot where there is no reading. Reports show it as n/a,
never as 0."""


class Kind(IntEnum):
    SPAN = 1
    """Something that began at t0 and ended at t1."""
    OPEN = 2
    """A span still in progress when it was written: t1 is the moment of writing, the true end is unknown. A later
    SPAN of the same process with the same stage, step and t0 replaces it."""
    MARK = 3
    """A moment: t0 == t1."""


class Stage(IntEnum):
    """What a span was spent on. The comment says which lane writes it."""

    # the trainer's own thread: these partition a step
    STEP = 1  # the whole step: from the end of the step before to the end of this one
    FEED_WAIT = 2  # the loop waited for a batch
    H2D = 3  # the loop waited for a host-to-device copy (exposed part only)
    FORWARD = 4
    BACKWARD = 5
    UPDATE = 6
    COMPUTE = 7  # forward, backward and update where they cannot be told apart
    SYNC = 8  # barrier or reduction with other trainers
    HOST = 9  # fingerprints, display, other host work of the loop
    TEST = 10
    CHECKPOINT = 11
    ALLOC = 12
    GC = 13  # a garbage collection; any process
    # worker processes (with the inline engine: the trainer's thread, inside FEED_WAIT)
    BATCH = 20  # the whole making of one batch, claim to ready
    READ = 21
    DECODE = 22
    AUGMENT = 23
    COLLATE = 24
    TRANSFER = 25  # records or batches crossing a process border (owner actor, object store)
    SLOT_WAIT = 26  # no free slot: back-pressure
    LEASE_WAIT = 27  # no work to do
    FUNCTION = 28  # the user's own function, on each image or on the batch; runs before it had this in AUGMENT
    # device lanes
    COPY = 40  # a copy on the copy engine, hidden or not
    DEVICE = 41  # device busy with a step's compute
    # life of processes, as marks or spans
    START = 60  # from process start to ready for work
    RESTART = 61  # a worker was lost and replaced; the note says why
    READY = 62  # mark: a batch became ready in its slot
    RELEASE = 63  # mark: a slot was given back
    SPILL = 70  # Ray wrote objects to disk (bytes) and read some back (items: bytes), as seen once a second
    # training in float16, as marks; the note of the same step says why
    LOSS_SCALE = 64  # the loss scale changed; items: how often 2^-16 must be doubled to give the new one
    SKIPPED = 65  # a step whose loss or gradients were not finite was not applied
    # emit: arrival, as a mark of the trainer's
    ORDER = 66  # the loop's turn ``step`` got the batch of another step of the stream: that one is in items


PARTITION = ("compute", "h2d", "feed_wait", "sync", "host", "test", "checkpoint", "alloc", "gc", "unattributed")
"""Names of the parts of a step's wall time, in the order reports show them. They add up to the step."""

PART_OF_STAGE: dict[Stage, str] = {
    Stage.FEED_WAIT: "feed_wait",
    Stage.H2D: "h2d",
    Stage.FORWARD: "compute",
    Stage.BACKWARD: "compute",
    Stage.UPDATE: "compute",
    Stage.COMPUTE: "compute",
    Stage.SYNC: "sync",
    Stage.HOST: "host",
    Stage.TEST: "test",
    Stage.CHECKPOINT: "checkpoint",
    Stage.ALLOC: "alloc",
    Stage.GC: "gc",
}

WHERE = (
    "storage", "read", "decode", "augment", "function", "collate", "transfer", "h2d", "compute", "sync",
    "cpu_contention", "gc", "alloc", "host", "checkpoint", "unknown",
)  # fmt: skip
WHY = ("throughput", "straggler", "cold_start", "backpressure", "scheduling", "fault", "spill")


class Flag(IntEnum):
    """Bits of the column ``flags``."""

    FIRST = 1  # first step of a run or of a resumed part: cold, kept out of steady-state figures
    EMULATED = 2  # the time is nominal, not measured work
    INLINE = 4  # made by the consumer's own thread
    REDO = 8  # made again after a worker was lost
    TEST_PHASE = 16
    PROFILER = 32  # work of the loop that is the profiler's own: fingerprints, record numbers
    OWN_CODE = 64  # a user's code does the work: what it waits for need not be storage


EVENT = np.dtype(
    [
        ("kind", "u1"),
        ("stage", "u1"),
        ("flags", "u2"),
        ("actor", "i4"),
        ("epoch", "i4"),
        ("slot", "i4"),
        ("step", "i8"),
        ("t0_ns", "i8"),
        ("t1_ns", "i8"),
        ("cpu_ns", "i8"),  # CPU time of the thread between t0 and t1
        ("runq_ns", "i8"),  # time runnable but not running (schedstat)
        ("inblock", "i8"),  # blocks read from storage by the thread (ru_inblock)
        ("items", "i8"),
        ("bytes", "i8"),
        ("major_faults", "i8"),  # pages that the thread touched and that had to come from storage first (ru_majflt)
        ("waits", "i8"),  # times the thread gave its CPU up to wait for something (ru_nvcsw)
    ]
)
"""One event: 96 bytes. ``actor`` is the number of the process in the run (0 is the trainer)."""

# 64 bits each: a last column of 32 bits that ends in -1 and its padding would read as the end mark of a stream.
LATER = ("major_faults", "waits")
"""Columns that older runs lack: read as MISSING there."""
