"""One pass over the records of a data set: counts, and the places of what is odd; see :mod:`datasets.inspect`."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from datasets import datum, decode, runs
from datasets.datum import DatumError
from datasets.footprint import Footprint, footprint
from datasets.paired import label_numbers
from datasets.source import Record, Source, show_key

_CHUNK = 64
_STRETCHES = 64
_MOST_BAD = 20
_FEWEST_FOR_RUNS = 20
_UNLIKELY = 1e-6


class Labels:
    """Label statistics in one pass.

    Attributes
    ----------
    counts: records of each label. absent: records without one. vectors: records with float labels beside their data.
    runs, longest: how often the label changes, plus one per stretch; and the most equal labels in a row.
    first: the first record of each label.
    """

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.first: dict[int, int] = {}
        self.absent = self.vectors = 0
        self.runs = self.longest = 0
        self.stretches: list[int] = []
        self._last: int | None = None
        self._length = 0

    def begin(self) -> None:
        """The records that follow do not lie beside the ones before."""
        self.stretches.append(0)
        self._last = None

    def add(self, label: int, index: int) -> None:
        self.counts[label] += 1
        self.first.setdefault(label, index)
        self.stretches[-1] += 1
        if label != self._last:
            self.runs += 1
            self._length = 0
        self._last = label
        self._length += 1
        self.longest = max(self.longest, self._length)

    @property
    def present(self) -> int:
        return self.counts.total()

    @property
    def expected_runs(self) -> float | None:
        """Mean number of runs in a random order of the same labels."""
        return runs.expected_runs(self.counts.values(), self._stretches) if self.present else None

    def shuffled_longest(self, chance: float) -> int | None:
        """The longest run that a random order of the same labels reaches with at least this chance."""
        if len(self.counts) < 2:
            return None
        return runs.longest_run(self.counts.values(), self._stretches, chance)

    @property
    def shuffled_most(self) -> int | None:
        """The longest run that a random order still reaches once in a million times."""
        return self.shuffled_longest(_UNLIKELY)

    @property
    def grouped(self) -> bool:
        """Whether the records lie in an order that shuffling would not give."""
        most, expected = self.shuffled_most, self.expected_runs
        if self.present < _FEWEST_FOR_RUNS or most is None or expected is None:
            return False
        return self.runs < expected / 2 or self.longest > most

    @property
    def _stretches(self) -> list[int]:
        return [length for length in self.stretches if length]


class Keys:
    """Key statistics in one pass. Keys come in byte order, with gaps where not every record is looked at."""

    def __init__(self) -> None:
        self.first = self.last = b""
        self.records = 0
        self.all_digits = True
        self.dense = True
        self._widths: set[int] = set()
        self._numeric_order = True
        self._last_number = -1
        self._origin = 0

    def add(self, key: bytes, index: int) -> None:
        if self.records == 0:
            self.first = key
        self.last = key
        self.records += 1
        if self.all_digits and key.isdigit():
            number = int(key)
            self._widths.add(len(key))
            if self.records == 1:
                self._origin = number - index
            self.dense &= number - index == self._origin
            self._numeric_order &= number > self._last_number
            self._last_number = number
        else:
            self.all_digits = False

    @property
    def numeric(self) -> bool:
        return self.all_digits and self.records > 0

    @property
    def padded(self) -> bool:
        return self.numeric and len(self._widths) == 1

    @property
    def misleading(self) -> bool:
        """Numbers without padding: byte order is not the order a person expects."""
        return self.numeric and (not self._numeric_order or len(self._widths) > 1)


@dataclass
class Survey:
    """What a pass over a data set found.

    Attributes
    ----------
    records: in the data set. looked_at, stretches: how many of them were read, in how many stretches of neighbours.
    shapes, encodings, modes: records of each, by name.
    first: the first record of each shape, encoding and mode, by (kind, name).
    sizes: bytes of each value read, in order; places: the record numbers of the smallest and the largest.
    bad: the first records that cannot be understood, as {index, key, reason, problem}; bad_records: how many there are.
    unflagged: records that hold an image file and do not say so. no_label: the first record without a label.
    not_finite: records with NaN or infinity among their floats; first_not_finite: the first of them.
    on_disk: the files, as they were before the records were read.
    unlabelled: whether labels in the records are made up, as where an HDF5 file has one data set.
    """

    records: int
    looked_at: int = 0
    stretches: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    encodings: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    first: dict[tuple[str, str], int] = field(default_factory=dict)
    labels: Labels = field(default_factory=Labels)
    keys: Keys = field(default_factory=Keys)
    sizes: array[int] = field(default_factory=lambda: array("I"))
    places: dict[str, int] = field(default_factory=dict)
    bad: list[dict[str, Any]] = field(default_factory=list)
    bad_records: int = 0
    unflagged: int = 0
    no_label: int | None = None
    not_finite: int = 0
    first_not_finite: int | None = None
    on_disk: Footprint | None = None
    unlabelled: bool = False

    @property
    def complete(self) -> bool:
        return self.looked_at == self.records

    def add(self, record: Record, max_pixels: int | None) -> None:
        """Count one record."""
        self.looked_at += 1
        self.keys.add(record.key, record.index)
        self._measure(record)
        try:
            parsed = datum.parse(record.value, record)
            seen = decode.probe(parsed, record, max_pixels=max_pixels)
            numbers = label_numbers(record)
        except DatumError as error:
            self.bad_records += 1
            if len(self.bad) < _MOST_BAD:
                reason = str(error)
                self.bad.append(
                    {
                        "index": record.index,
                        "key": show_key(record.key)[1:-1],
                        "reason": reason,
                        "problem": reason.removeprefix(f"{record}: "),
                    }
                )
            return
        shape = f"{seen.channels}x{seen.height}x{seen.width}"
        for kind, counts, name in (
            ("shape", self.shapes, shape), ("encoding", self.encodings, seen.encoding), ("mode", self.modes, seen.mode),
        ):  # fmt: skip
            if name:
                counts[name] += 1
                self.first.setdefault((kind, name), record.index)
        self.unflagged += not seen.flagged
        if not parsed.finite or (numbers is not None and not np.isfinite(numbers).all()):
            self.not_finite += 1
            if self.first_not_finite is None:
                self.first_not_finite = record.index
        label = None if self.unlabelled else parsed.label
        if numbers is not None and len(numbers) == 1 and _is_label(float(numbers[0])):
            label = int(numbers[0])
        elif numbers is not None or (len(parsed.data) and parsed.float_data is not None):
            self.labels.vectors += 1
            return
        if label is None:
            self.labels.absent += 1
            if self.no_label is None:
                self.no_label = record.index
        else:
            self.labels.add(label, record.index)

    def _measure(self, record: Record) -> None:
        size = len(record.value)
        if not self.sizes or size < self._least:
            self._least = size
            self.places["smallest"] = record.index
        if not self.sizes or size > self._largest:
            self._largest = size
            self.places["largest"] = record.index
        self.sizes.append(min(size, 2**32 - 1))

    _least: int = 0
    _largest: int = 0


def survey(
    source: Source,
    limit: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
    max_pixels: int | None = None,
) -> Survey:
    """Read the records of ``source`` and count what they are.

    Parameters
    ----------
    limit: read at most so many records: up to 64 stretches of neighbours, spread evenly from the first record to the
        last. Which ones depends on the number of records and the limit alone.
    progress: called now and then with the number of records read.
    max_pixels: see :func:`datasets.decode.to_image`.
    """
    found = Survey(
        len(source), on_disk=footprint(source), unlabelled=source.backend == "hdf5" and len(source.blobs) == 1
    )
    for stretch in stretches(len(source), limit):
        found.stretches += 1
        found.labels.begin()
        for start in range(stretch.start, stretch.stop, _CHUNK):
            for record in source.read_many(range(start, min(start + _CHUNK, stretch.stop))):
                found.add(record, max_pixels)
            progress(found.looked_at)
    return found


def _is_label(number: float) -> bool:
    """Whether a float is a whole number that a Datum's label could be."""
    return number.is_integer() and -(2**31) <= number < 2**31


def stretches(records: int, limit: int | None) -> list[range]:
    """The records to look at: all in one range, or ``limit`` of them in ranges spread evenly, both ends included."""
    if limit is None or limit >= records:
        return [range(records)] if records else []
    parts = min(_STRETCHES, max(min(2, limit), limit // _CHUNK))
    lengths = np.diff(np.linspace(0, limit, parts + 1).astype(np.int64))
    gaps = np.linspace(0, records - limit, parts).astype(np.int64)
    starts = gaps + np.concatenate([[0], np.cumsum(lengths)[:-1]])
    made = [range(int(start), int(start + length)) for start, length in zip(starts, lengths, strict=True)]
    joined = made[:1]
    for before, here in pairwise(made):
        # Neighbours that touch are one stretch: a run of labels goes on across them.
        joined[-1:] = [range(joined[-1].start, here.stop)] if before.stop == here.start else [joined[-1], here]
    return joined
