"""What a report says, as plain data. Rendering (terminal, HTML, JSON) only writes these down."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from profiler.cli import finite

SCHEMA = 1
NO_STALL = 0.02
"""A stall of less than this share of the wall time is none."""


@dataclass(frozen=True)
class StallCause:
    """One cause of the stall. ``share`` is of the whole stall (all shares add up to 1), ``gain_alone_s`` what the run
    would have been shorter by with this cause alone removed, ``ci95_s`` of ``seconds`` (None: too few steps to say).
    ``side``: what the time went to: "data" (waiting for it), "loop" (the loop itself), "profiler" (its work there)."""

    where: str
    why: str
    side: str
    seconds: float
    share: float
    ci95_s: tuple[float, float] | None
    gain_alone_s: float
    evidence: dict[str, Any]
    remedy: str
    text: str

    def to_json(self) -> dict[str, Any]:
        return {
            "where": self.where, "why": self.why, "side": self.side, "seconds": self.seconds, "share": self.share,
            "ci95": None if self.ci95_s is None else list(self.ci95_s), "gain_alone": self.gain_alone_s,
            "evidence": self.evidence, "remedy": self.remedy, "text": self.text,
        }  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """Something a person should know about the run. ``level``: info | warning | fault."""

    kind: str
    level: str
    text: str
    step: int | None = None


@dataclass(frozen=True)
class Report:
    """All that is said about one run. Seconds unless the name says otherwise; ``None`` means not measured, and the
    field beside it (``*_reason``, ``coverage``) says why. ``making``: see :func:`profiler.services.making`;
    ``memory``: see :func:`profiler.memory.split`."""

    run: str
    headline: str
    outcome: str
    steps: int
    cold_steps: int
    wall_s: float
    step_ms: dict[str, float | None]
    au: float | None
    au_kind: str
    partition: dict[str, float]
    stall_s: float
    stalls: tuple[StallCause, ...]
    fix_together: tuple[dict[str, Any], ...]
    slack: dict[str, Any]
    replay_error: float | None
    correlation: dict[str, Any]
    overhead: dict[str, Any]
    coverage: dict[str, Any]
    making: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    faults: dict[str, int] = field(default_factory=dict)

    @property
    def first(self) -> StallCause | None:
        """The cause to do something about first: the largest; where the feed starved the loop, the largest of that."""
        steady = [cause for cause in self.stalls if cause.why != "cold_start"]
        data = [cause for cause in steady if cause.side == "data"]
        waited = sum(self.partition.get(part, 0.0) for part in ("feed_wait", "h2d"))
        if data and waited >= NO_STALL * self.wall_s:
            known = (cause for cause in data if cause.where != "unknown" and 2 * cause.seconds >= data[0].seconds)
            return data[0] if data[0].why == "fault" else next(known, data[0])
        return next(iter(self.stalls), None)

    def to_json(self) -> dict[str, Any]:
        """The document of ``--json``: schema 1, no NaN in it."""
        document: dict[str, Any] = {"schema": SCHEMA}
        document |= {key: getattr(self, key) for key in self.__dataclass_fields__}
        document["stalls"] = [cause.to_json() for cause in self.stalls]
        document["findings"] = [asdict(finding) for finding in self.findings]
        document["fix_together"] = list(self.fix_together)
        return finite(document)
