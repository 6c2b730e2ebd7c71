"""Two results of :mod:`gpu.time` compared, for example before and after an upgrade.

The document (``against`` of :mod:`gpu.time`)::

    other        its file
    versions     {name: [there, here]}, those that differ
    comparable   whether net, phase, shapes, weights and inputs are the same bits; if not, bits of layers mean nothing
    different    [what differs], of those
    layers       [{layer, forward, backward}]: time here / time there; null where type or sizes differ
    total        {forward, backward}, the same of the whole pass; null unless all layers are the same work
    only_here, only_there   [layer]
    changed      [{layer, pass}], layers whose bits differ, in the order of a step; null where not comparable
    first        the first of them, or null
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profiler.errors import UsageError

_SAME = ("net_hash", "phase", "shapes", "input_hash", "param_hash")
_WORDS = {"net_hash": "the net", "phase": "phase", "shapes": "shapes", "input_hash": "inputs", "param_hash": "weights"}


def load(path: str) -> dict[str, Any]:
    """Read a result of gpu.time. Raises UsageError for anything else."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="python -m gpu.time ... --json F") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON
        raise UsageError(f"{path} is no result of gpu.time: {error}", hint="--json F writes one") from error
    keys = ("schema", "kind", "layers", "versions", *_SAME)
    missing = [key for key in keys if not isinstance(document, dict) or key not in document]
    if missing or document["schema"] != 1 or document["kind"] != "time":
        found = f"no {', '.join(missing)}" if missing else f"schema {document['schema']}, kind {document['kind']}"
        raise UsageError(f"{path} is no result of gpu.time", expected="schema 1, kind time", found=found)
    try:
        compare(document, document, path)
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        found = f"{type(error).__name__}: {error}"
        raise UsageError(f"{path} is a damaged result of gpu.time", found=found, hint="write it anew") from error
    result: dict[str, Any] = document
    return result


def compare(here: Mapping[str, Any], there: Mapping[str, Any], path: str) -> dict[str, Any]:
    """What changed from ``there`` to ``here``."""
    ours, theirs = ({_name(row): row for row in document["layers"]} for document in (here, there))
    names = sorted({*here["versions"], *there["versions"]})
    versions = {name: [there["versions"].get(name), here["versions"].get(name)] for name in names}
    versions["backend"] = [there["backend"], here["backend"]]
    different = [_WORDS[key] for key in _SAME if here[key] != there[key]]
    common = [name for name in ours if name in theirs]
    same = {name for name in common if _work(ours[name]) == _work(theirs[name])}
    whole = len(same) == len(ours) == len(theirs)
    changed = None if different else _changed(ours, theirs, common)
    return {
        "other": path,
        "versions": {name: pair for name, pair in versions.items() if pair[0] != pair[1]},
        "comparable": not different,
        "different": different,
        "layers": [{"layer": name} | _ratios(ours[name], theirs[name], name in same) for name in common],
        "total": _ratios(here["total"], there["total"], whole),
        "only_here": [name for name in ours if name not in theirs],
        "only_there": [name for name in theirs if name not in ours],
        "changed": changed,
        "first": changed[0] if changed else None,
    }


_PARTS = ("forward", "backward")


def _name(row: Mapping[str, Any]) -> str:
    if not isinstance(row["layer"], str):
        raise TypeError(f"a layer is called {row['layer']!r}")
    return row["layer"]


def _work(row: Mapping[str, Any]) -> tuple[str, float, float]:
    """What a layer's time depends on before versions do: no use in a ratio between a small layer and a large one."""
    return row["type"], row["bytes"]["blobs"], row["bytes"]["params"]


def _ratios(here: Mapping[str, Any], there: Mapping[str, Any], same: bool) -> dict[str, float | None]:
    found = {part: _ratio(here[f"{part}_ms"], there[f"{part}_ms"]) for part in _PARTS}
    return found if same else dict.fromkeys(_PARTS)


def _ratio(here: Mapping[str, float] | None, there: Mapping[str, float] | None) -> float | None:
    return here["median"] / float(there["median"]) if here and there and there["median"] else None


def _changed(ours: Mapping[str, Any], theirs: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, str]]:
    return [
        {"layer": name, "pass": part}
        for part, order in (("forward", names), ("backward", list(names)[::-1]))
        for name in order
        if ours[name]["hashes"][part] != theirs[name]["hashes"][part]
    ]
