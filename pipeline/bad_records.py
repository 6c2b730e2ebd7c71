"""Records that cannot be used, with ``data.on_bad_record: skip`` or ``zero``: written down in the slot by whoever makes
the batch, counted by the consumer in strict order, refused above the cap, and listed in the run's notes.

A maker decides nothing that depends on other batches, so which bytes a batch has never depends on who made it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np

from datasets.datum import DatumError, DatumSizeMismatch
from datasets.errors import DatasetCorrupt
from datasets.image_file import ImageDecodeError, ImageModeError
from datasets.source import show_key
from pipeline.functions import numbers
from pipeline.samples import LabelError, NotFiniteError
from profiler.errors import StallscopeError
from profiler.recorder import Recorder

Policy = Literal["stop", "skip", "zero"]

ATTEMPTS = 16
"""Stand-ins that are tried for one item. With a tenth of all records bad, one item in 10^16 finds none."""

_LISTED = 10
_MOST_NOTES = 200
_log = logging.getLogger(__name__)


class TooManyBadRecords(StallscopeError):
    """More records cannot be used than ``data.bad_record_cap`` allows."""


class Reason(IntEnum):
    """What is wrong with a record."""

    READ = 1  # the database cannot give it out
    DATUM = 2  # it is no Datum, or contradicts itself
    IMAGE = 3  # its image file cannot be decoded, or has another mode
    SHAPE = 4  # its image does not fit the others, the crop or the mean
    LABEL = 5  # its label is absent or of another kind
    VALUE = 6  # its floats hold NaN or infinity

    @classmethod
    def of(cls, error: BaseException) -> Reason:
        kinds: tuple[tuple[type | tuple[type, ...], Reason], ...] = (
            (DatasetCorrupt, cls.READ), (NotFiniteError, cls.VALUE),
            ((ImageDecodeError, ImageModeError), cls.IMAGE), (DatumSizeMismatch, cls.DATUM),
            (DatumError, cls.DATUM), (LabelError, cls.LABEL),
        )  # fmt: skip
        return next((reason for kind, reason in kinds if isinstance(error, kind)), cls.SHAPE)


ENTRY = np.dtype(
    [
        ("record", "i8"),
        ("used", "i8"),  # the record that stands in; with zero, the record itself
        ("item", "i4"),  # its place in the batch
        ("epoch", "i4"),
        ("reason", "u1"),
        ("key", "S96"),  # as errors show it, UTF-8, cut
        ("what", "S240"),  # the error's first sentence, likewise
    ]
)
"""One row for each record that was met and could not be used."""


def capacity(policy: Policy, batch: int) -> int:
    """Rows of :data:`ENTRY` in a slot."""
    return 0 if policy == "stop" else 2 * batch + 16


class Found:
    """What is wrong in one batch, in the rows of its slot. Only whoever makes the batch writes."""

    def __init__(self, rows: np.ndarray, count: np.ndarray) -> None:
        self._rows, self._count = rows, count
        self._count[0] = 0

    def add(self, item: int, epoch: int, record: int, key: bytes, error: StallscopeError) -> None:
        """Note a record that could not be used. Raises :class:`TooManyBadRecords` when there is no row left."""
        at = int(self._count[0])
        if at == len(self._rows):
            raise TooManyBadRecords(
                "one batch met more records that cannot be used than a batch may, whatever data.bad_record_cap says",
                expected=f"at most {len(self._rows)} in one batch",
                found=f"the last one: {error.what}",
                hint="python -m datasets.verify lists all of them and can save the sound ones to a new data set",
            )
        shown = show_key(key) if key else "?"
        self._rows[at] = (
            record, record, item, epoch, Reason.of(error), shown.encode()[:96], " ".join(error.what.split()).encode(),
        )  # fmt: skip
        self._count[0] = at + 1

    def settle(self, item: int, used: int) -> None:
        """Say which record stands in for an item."""
        rows = self._rows[: int(self._count[0])]
        rows["used"][rows["item"] == item] = used


@dataclass(frozen=True)
class BadRecord:
    """One record that was met and could not be used."""

    record: int
    key: str
    reason: str
    what: str
    epoch: int
    item: int
    used: int


def read_rows(rows: np.ndarray, count: np.ndarray) -> list[BadRecord]:
    """The rows of a slot as values, in the order of the batch's items."""
    found = [
        BadRecord(
            record, key.decode("utf-8", "replace"), Reason(reason).name.lower(), what.decode("utf-8", "replace"),
            epoch, item, used,
        )
        for record, used, item, epoch, reason, key, what in rows[: int(count[0])].tolist()
    ]  # fmt: skip
    return sorted(found, key=lambda bad: bad.item)


class Tally:
    """The consumer's count over a whole run: distinct records against the cap, items by epoch for the report.

    Parameters
    ----------
    policy, cap, records: ``skip`` or ``zero``; the share of the data set's ``records`` that may be bad. At least one
        record may, unless the cap is 0.
    source: name of the data set for errors.
    phase: for the notes.
    known: records that an earlier part of the run found bad.
    """

    def __init__(
        self, policy: Policy, cap: float, records: int, source: str, phase: str, recorder: Recorder,
        known: Iterable[int] = (),
    ) -> None:  # fmt: skip
        self.policy, self.cap, self.source, self.phase, self.recorder = policy, cap, source, phase, recorder
        self.records = records
        self.limit = max(1, int(round(cap * records, 6))) if cap else 0
        self.known = {int(record) for record in known}
        self.items_by_epoch: dict[int, int] = {}
        self._listed: list[str] = []
        self._said: set[int] = set()
        self._noted = -1  # the last epoch whose figures were noted

    def take(self, step: int, epoch: int, found: list[BadRecord]) -> None:
        """Count what the batch of ``step`` met. Raises :class:`TooManyBadRecords` above the cap."""
        self._note_epochs(epoch)
        for bad in {(bad.item, bad.epoch): bad for bad in found}.values():
            self.items_by_epoch[bad.epoch] = self.items_by_epoch.get(bad.epoch, 0) + 1
        for bad in found:
            if bad.record not in self.known:
                self.known.add(bad.record)
                self._say(step, bad)
        if len(self.known) > self.limit:
            before, more = sorted(self.known - self._said), len(self._said) - len(self._listed)
            listed = self._listed + ([f"{more} more"] if more else [])
            raise TooManyBadRecords(
                f"{len(self.known)} of the {self.records} records of {self.source} cannot be used, up to step {step}",
                expected=f"at most {self.limit} (data.bad_record_cap: {self.cap:g})",
                found="; ".join(listed + ([f"known before: {numbers(before)}"] if before else [])),
                hint="python -m datasets.verify lists all of them and can save the sound ones to a new data set",
            )

    def close(self) -> None:
        """Note the figures of the last epoch."""
        self._note_epochs(max(self.items_by_epoch, default=0) + 1)

    def stats(self) -> dict[str, Any]:
        """``records``: distinct bad ones so far; ``items`` replaced or zeroed, by epoch; plain JSON values."""
        return {
            "policy": self.policy, "records": len(self.known), "limit": self.limit,
            "items_by_epoch": {str(epoch): items for epoch, items in sorted(self.items_by_epoch.items())},
        }  # fmt: skip

    def _say(self, step: int, bad: BadRecord) -> None:
        self._said.add(bad.record)
        text = f"record {bad.record} (key {bad.key}, {bad.reason})"
        if len(self._listed) < _LISTED:
            self._listed.append(text)
            done = f"record {bad.used} stands in for it" if self.policy == "skip" else "its sample is zeros"
            _log.warning("%s (%s); %s", bad.what, bad.reason, done)
        if len(self.known) <= _MOST_NOTES:
            self.recorder.note(
                "bad_record", step=step, epoch=bad.epoch, record=bad.record, key=bad.key, reason=bad.reason,
                policy=self.policy, used=bad.used, phase=self.phase, what=bad.what,
            )  # fmt: skip

    def _note_epochs(self, before: int) -> None:
        """Note the figures of the epochs that have ended."""
        if self._noted + 1 >= before:
            return
        for epoch in sorted(self.items_by_epoch):
            if self._noted < epoch < before:
                self.recorder.note(
                    "bad_records", epoch=epoch, items=self.items_by_epoch[epoch], records=len(self.known),
                    policy=self.policy, phase=self.phase,
                )  # fmt: skip
        self._noted = before - 1
