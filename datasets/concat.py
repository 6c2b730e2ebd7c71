"""Several sources read as one: the records of the first, then those of the second, and so on."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from datasets.source import Record, Source
from profiler.errors import UsageError


class ConcatSource(Source):
    """Parts one after the other under one index: record ``i`` of part ``p`` is record ``i`` + the lengths before it.

    Keys ascend inside each part only, and may come again in another one. Owns the parts: closing it closes them.
    """

    def __init__(self, parts: Sequence[Source]) -> None:
        if not parts:
            raise UsageError("a data set of several sources needs at least one")
        self.parts = tuple(parts)
        self.path = " + ".join(part.path for part in parts)
        # A LevelDB among them decides: it wants one owner on a node.
        kinds = {part.backend for part in parts}
        self.backend = "leveldb" if "leveldb" in kinds else parts[0].backend
        self._ends = list(accumulate(len(part) for part in parts))

    @property
    def name(self) -> str:
        return " + ".join(part.name for part in self.parts)

    @property
    def notes(self) -> list[str]:
        return [f"{part.name}: {note}" for part in self.parts for note in part.notes]

    def __len__(self) -> int:
        return self._ends[-1]

    def key(self, index: int) -> bytes:
        part, inside = self._find(index)
        return part.key(inside)

    def read(self, index: int) -> Record:
        part, inside = self._find(index)
        record = part.read(inside)
        return Record(int(index), record.key, record.value, f"{record.source}, its record {inside}")

    def describe(self, index: int) -> str:
        part, inside = self._find(index)
        return f"record {index}: {part.describe(inside)}"

    def identity(self) -> dict[str, Any]:
        parts = [part.identity() for part in self.parts]
        return {"path": self.path, "backend": self.backend, "db": None, "records": len(self), "parts": parts}

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                stack.callback(part.close)

    def _find(self, index: int) -> tuple[Source, int]:
        index = self._check_index(index)
        number = bisect_right(self._ends, index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)
