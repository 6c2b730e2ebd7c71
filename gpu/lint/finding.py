"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

SEVERITIES = ("error", "warning", "note")
"""error: it cannot run, or what it computes is not what was meant. warning: it probably is not. note: worth knowing."""

Hit = tuple[str | None, str]
"""The layer (or None: the net, the solver) and what is the matter with it, in a sentence without a full stop."""


@dataclass(frozen=True)
class Rule:
    """``find``: takes what its table is about and yields hits. ``why`` it matters and what to ``do`` fit them all."""

    id: str
    severity: str
    why: str
    do: str
    find: Callable[[Any], Iterable[Hit]]


@dataclass
class Finding:
    """A hit of a rule. ``phases``: those it was found in; empty where it does not depend on one."""

    rule: str
    severity: str
    layer: str | None
    what: str
    why: str
    do: str
    phases: list[str] = field(default_factory=list)


def apply(rules: Iterable[Rule], subject: Any) -> Iterator[Finding]:
    """All findings of a table of rules."""
    for rule in rules:
        for layer, what in rule.find(subject):
            yield Finding(rule.id, rule.severity, layer, what, rule.why, rule.do)


def merged(found: Iterable[tuple[str | None, Finding]]) -> list[Finding]:
    """Findings with the phase they come from; the same one of several phases once. Worst first, then as they came."""
    kept: dict[tuple[str, str | None, str], Finding] = {}
    for phase, finding in found:
        first = kept.setdefault((finding.rule, finding.layer, finding.what), finding)
        if phase is not None and phase not in first.phases:
            first.phases.append(phase)
    return sorted(kept.values(), key=lambda finding: SEVERITIES.index(finding.severity))
