"""Where things lie in the memory of a ring: header, workers, slots, payload; all of them words of eight bytes."""

from __future__ import annotations

import mmap

import numpy as np

VERSION = 3
MAX_WORKERS = 256
MAX_SPANS = 16
KEY_BYTES = 56
NO_STOP = 2**63 - 1
GIVEN_STEPS = 64 * 256
"""Steps from the first one on of which a ring knows whether they were given out before it was made."""
HASHES = ("ids", "ids_set", "raw", "raw_set", "fill")
"""Names of a batch's hashes, in the order of the descriptor."""

MAGIC = int.from_bytes(b"STLLRING", "little")
PAGE = mmap.PAGESIZE

HEADER = np.dtype(
    [
        ("magic", "u8"),
        ("version", "i8"),
        ("capacity", "i8"),  # slots that there are addresses for
        ("slot_bytes", "i8"),
        ("next_step", "i8"),  # the cursor: the next step nobody has claimed
        ("stop_step", "i8"),  # first step that is not made
        ("released", "i8"),  # slots given back so far
        ("stop", "i8"),  # 1: workers end as soon as they look
        ("poison", "i8"),  # 1: a freed slot is filled with 0xFF
        ("span_count", "i8"),
        ("spans", "i8", (MAX_SPANS, 2)),  # first step, slots in use from it on
        ("window", "i8"),  # arrival: steps that may be claimed from the oldest on; 0: strict order
        ("oldest", "i8"),  # arrival: the oldest step that the consumer has not leased
        ("start_step", "i8"),
        ("given_end", "i8"),  # steps from here on were not given out before
        ("given", "u8", (GIVEN_STEPS // 64,)),  # a bit for each step from start_step on: was given out before
    ]
)
WORKER = np.dtype(
    [
        ("pid", "i8"),  # 0: nobody
        ("heartbeat_ns", "i8"),  # last claim, ready or look for work
        ("step", "i8"),  # being made, -1 for none
        ("ended", "i8"),  # 1: left its loop by itself (done, told to stop, or with an error)
        ("retired", "i8"),  # 1: ends when it looks for work
        ("record", "i8"),  # the record that it began last
        ("record_step", "i8"),  # while it made this step
        ("key", f"S{KEY_BYTES}"),  # its key, or the beginning of it
    ]
)
SLOT = np.dtype(
    [
        ("state", "i8"),
        ("owner", "i8"),  # row of the worker that fills or filled it, -1 for none
        ("step", "i8"),  # the slot's generation
        ("items", "i8"),  # records in the batch
        ("epoch", "i8"),
        ("redo", "i8"),  # times it was begun again after a worker was lost
        ("claimed_ns", "i8"),
        ("ready_ns", "i8"),
        ("hashes", "u8", (len(HASHES),)),
    ]
)

SLOTS_AT = PAGE + MAX_WORKERS * WORKER.itemsize
"""Bytes before the first slot's descriptor."""
SLOT_WORDS = SLOT.itemsize // 8
WORKER_WORDS = WORKER.itemsize // 8


def payload_offset(capacity: int) -> int:
    """Bytes before the payload, a multiple of the page."""
    return -(-(SLOTS_AT + capacity * SLOT.itemsize) // PAGE) * PAGE


def worker_at(row: int) -> int:
    """The first word of a worker's row."""
    return PAGE // 8 + row * WORKER_WORDS


def slot_at(slot: int) -> int:
    """The first word of a slot's descriptor."""
    return SLOTS_AT // 8 + slot * SLOT_WORDS


def header_word(name: str) -> int:
    """Where a field of the header lies, in words."""
    return _word(HEADER, name)


def worker_word(name: str) -> int:
    """Where a field lies in a worker's row, in words."""
    return _word(WORKER, name)


def slot_word(name: str) -> int:
    """Where a field lies in a slot's descriptor, in words."""
    return _word(SLOT, name)


def _word(record: np.dtype[np.void], name: str) -> int:
    assert record.fields is not None
    return int(record.fields[name][1]) // 8
