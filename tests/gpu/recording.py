"""A recorder that keeps its events in a list."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from profiler.events import Kind, Stage


@dataclass(frozen=True)
class Row:
    kind: int
    stage: Stage
    t0_ns: int
    t1_ns: int
    fields: dict[str, Any]

    @property
    def ms(self) -> float:
        return (self.t1_ns - self.t0_ns) / 1e6


@dataclass
class ListRecorder:
    rows: list[Row] = field(default_factory=list)
    fingerprints: list[tuple[Any, ...]] = field(default_factory=list)

    @contextmanager
    def span(self, stage: int, **fields: Any) -> Iterator[SimpleNamespace]:
        began = time.monotonic_ns()
        try:
            yield SimpleNamespace()  # takes what is learnt in the span, and keeps nothing of it
        finally:
            self.add(Kind.SPAN, stage, began, time.monotonic_ns(), **fields)

    def add(self, kind: int, stage: int, t0_ns: int, t1_ns: int, **fields: Any) -> None:
        self.rows.append(Row(kind, Stage(stage), t0_ns, t1_ns, fields))

    def mark(self, stage: int, **fields: Any) -> None:
        now = time.monotonic_ns()
        self.add(Kind.MARK, stage, now, now, **fields)

    def fingerprint(self, step: int, name: str, ordered: int, multiset: int = 0, **stats: Any) -> None:
        self.fingerprints.append((step, name, ordered, stats))

    def of(self, stage: Stage) -> list[Row]:
        return [row for row in self.rows if row.stage == stage]
