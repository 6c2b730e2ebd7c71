"""The record that a worker has begun, in its row of the ring: what is known of it when it dies there."""

from __future__ import annotations

from pipeline import ring_layout as layout
from pipeline.ring import Ring

_STEP, _RECORD, _RECORD_STEP, _KEY = map(layout.worker_word, ("step", "record", "record_step", "key"))


def begin(ring: Ring, row: int, record: int, key: bytes) -> None:
    """Say which record comes now, for the case that it is the last one. Takes no lock."""
    me, words = layout.worker_at(row), ring._words
    words[me + _RECORD], words[me + _RECORD_STEP] = record, words[me + _STEP]
    at = 8 * (me + _KEY)
    ring._map[at : at + layout.KEY_BYTES] = key[: layout.KEY_BYTES].ljust(layout.KEY_BYTES, b"\0")


def last(ring: Ring, row: int) -> tuple[int, bytes] | None:
    """(position, beginning of its key) of the record that a worker began last in its step; None: not known."""
    worker = ring._workers[row]
    if worker["record"] < 0 or worker["record_step"] < 0 or worker["record_step"] != worker["step"]:
        return None
    return int(worker["record"]), bytes(worker["key"])
