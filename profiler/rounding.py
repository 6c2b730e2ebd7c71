"""What float16 did to a run, from its notes: overflow, underflow, loss scale and the steps it cost, with remedies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from profiler.finding import Finding

NOTES = ("precision", "precision_first", "loss_scale", "skipped_step")
MUCH = 0.1
"""Share of a layer's values other than 0 that may become 0 before the report warns of it."""
_MANY = 8
_Note = Mapping[str, Any]


def findings(notes: Iterable[_Note]) -> list[Finding]:
    """Findings of a run in fp16, none for one in fp32."""
    mine = [note for note in notes if note.get("note") in NOTES]
    return [*_overflow(mine), *_underflow(mine), *_scale(mine)]


def by_layer(notes: Iterable[_Note]) -> dict[str, dict[str, dict[str, int]]]:
    """Counts of the run, ``{layer: {kind: {column: values}}}``: the last of each process, added up."""
    last = {
        (note.get("process"), note.get("pid"), note["layer"]): note for note in notes if note.get("note") == "precision"
    }
    total: dict[str, dict[str, dict[str, int]]] = {}
    for (_process, _pid, layer), note in last.items():
        for kind in ("weights", "outputs", "gradients"):
            sums = total.setdefault(layer, {}).setdefault(kind, {})
            for column, values in note.get(kind, {}).items():
                sums[column] = sums.get(column, 0) + int(values)
    return total


def _first(notes: list[_Note], kind: str) -> _Note | None:
    """The first note of a kind; a resumed part notes its own first."""
    found = [note for note in notes if note.get("note") == "precision_first" and note.get("kind") == kind]
    return min(found, key=lambda note: int(note["step"]), default=None)


def _where(note: _Note) -> str:
    what = f"{note['tensor']} of layer {note['layer']} ({note['phase']})"
    return f"step {note['step']} in {what}: {note['values']:,} of {note['nonzero']:,} values other than 0"


def _overflow(notes: list[_Note]) -> list[Finding]:
    first = _first(notes, "overflow")
    if first is None:
        return []
    text = f"float16 overflowed, first at {_where(first)} became infinite."
    told = [
        f"{layer} {counts['overflow']:,} {kind}"
        for layer, kinds in by_layer(notes).items()
        for kind, counts in kinds.items()
        if counts.get("overflow")
    ]
    text += f" In all: {', '.join(told[:_MANY])}{', ...' if len(told) > _MANY else ''}." if told else ""
    keep = f"device.keep_fp32: [{first['layer']}]"
    if first["phase"] == "forward":
        return [Finding("fp16_overflow", "warning", f"{text} No loss scale helps there: {keep}.", int(first["step"]))]
    if first.get("dynamic"):
        text += f" The loss scale backs off from that; if it goes on, {keep}."
        return [Finding("fp16_overflow", "info", text, int(first["step"]))]
    text += " device.loss_scale: dynamic backs off from that."
    return [Finding("fp16_overflow", "warning", text, int(first["step"]))]


def _underflow(notes: list[_Note]) -> list[Finding]:
    first = _first(notes, "underflow")
    if first is None:
        return []
    shares = {
        (layer, kind): counts["flushed"] / counts["nonzero"]
        for layer, kinds in by_layer(notes).items()
        for kind, counts in kinds.items()
        if counts.get("nonzero")
    }
    worst = sorted(((share, *key) for key, share in shares.items() if share >= MUCH), key=lambda w: (-w[0], w[1:]))
    text = f"float16 rounded values to 0, first at {_where(first)}."
    step = int(first["step"])
    if not worst:
        return [Finding("fp16_underflow", "info", text, step)]
    listed = ", ".join(f"{100 * share:.0f} % of the {kind} of {layer}" for share, layer, kind in worst[:_MANY])
    text += f" In all {listed}{', ...' if len(worst) > _MANY else ''} were lost: what is 0 is not learned from."
    layers = ", ".join(dict.fromkeys(layer for _, layer, _ in worst[:_MANY]))
    if any(kind == "gradients" for _, _, kind in worst) and not first.get("dynamic"):
        text += " device.loss_scale: dynamic lifts gradients above that."
    else:
        text += f" device.keep_fp32: [{layers}]."
    return [Finding("fp16_underflow", "warning", text, step)]


def _scale(notes: list[_Note]) -> list[Finding]:
    changes = [note for note in notes if note.get("note") == "loss_scale"]
    skipped = [note for note in notes if note.get("note") == "skipped_step"]
    found = []
    if changes:
        grown = sum(note["after"] > note["before"] for note in changes)
        text = f"The loss scale grew {_times(grown)} and backed off {_times(len(changes) - grown)}; "
        text += f"it went from {changes[0]['before']:g} to {changes[-1]['after']:g}."
        found.append(Finding("loss_scale", "info", text, int(changes[0]["step"])))
    if skipped:
        steps = sorted({int(note["step"]) for note in skipped})
        listed = ", ".join(map(str, steps[:_MANY])) + (", ..." if len(steps) > _MANY else "")
        text = f"{len(steps)} step{'s' if len(steps) > 1 else ''} of fp16 {'were' if len(steps) > 1 else 'was'} skipped"
        first = skipped[0]
        text += f", which changed no weights: {listed} ({first['why']}"
        text += f", first in {first['tensor']} of layer {first['layer']})." if "tensor" in first else ")."
        searched = all(any(change["step"] == note["step"] for change in changes) for note in skipped)
        found.append(Finding("skipped_steps", "info" if searched else "warning", text, steps[0]))
    return found


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
