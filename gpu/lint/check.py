"""A net (and solver, and data) in; findings out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datasets import caffe_pb2
from gpu import fields
from gpu.fields import FieldWarning, SettingsError, build_layers
from gpu.layers.base import Context, Scratch
from gpu.layers.python import import_types
from gpu.lint import data_rules, forks, inspected, net_rules, solver_rules, weight_rules
from gpu.lint.finding import Finding, Rule, apply, merged
from gpu.lint.view import View, view
from gpu.prototxt import PHASES, FilteredNet, UnknownField, filter_net, is_text, read_tolerant, upgrade_net
from profiler.errors import StallscopeError


def check(
    net: str | Path,
    solver: str | Path | None = None,
    inspections: Sequence[dict[str, Any]] = (),
    stages: Sequence[str] = (),
) -> list[Finding]:
    """All findings, worst first.

    Parameters
    ----------
    net, solver: prototxts, as paths or text. inspections: documents of ``datasets.inspect``.
    stages: as of a net's state.

    Raises StallscopeError for a file that cannot be read at all.
    """
    message = caffe_pb2.NetParameter()
    where, unknown = read_tolerant(net, message)
    found: list[tuple[str | None, Finding]] = [(None, finding) for finding in _unknown("", unknown)]
    try:
        upgrade_net(message, where)
    except StallscopeError:
        if not found:
            raise
        return merged(found)  # nothing but unknown fields: another format
    param, solver_unknown = _read_solver(solver)
    found += [(None, finding) for finding in _unknown("solver: ", solver_unknown)]
    views: dict[str, View] = {}
    all_views: dict[str, View] = {}
    for number, phase in enumerate(PHASES):
        state = _state(param, number)
        try:
            filtered = filter_net(message, phase, (*stages, *state))
        except StallscopeError as error:
            found.append((phase, _settings(error)))
            continue
        if not filtered.net.layer:
            continue
        found += [(phase, _settings(error)) for error in _imported(filtered)]
        seen = view(filtered)
        all_views[phase] = seen
        found += [(phase, finding) for finding in _built(filtered, seen)]
    # A net for use has no loss, and its TRAIN phase is nobody's; one that is only trained has no data layer for TEST.
    fed = [phase for phase, seen in all_views.items() if seen.is_fed]
    for phase, seen in all_views.items():
        if (phase == "TRAIN" and not _trains(seen)) or (fed and phase not in fed):
            continue
        views[phase] = seen
        for rules in (weight_rules.RULES, net_rules.RULES):
            found += [(phase, finding) for finding in apply(rules, seen)]
    found += [(None, finding) for finding in apply(_NET_RULES, (message, views, stages))]
    folder = Path() if is_text(net) else Path(net).parent
    datas = list(inspected.pair(views, list(inspections), folder))
    found += [(None, finding) for finding in apply(data_rules.UNPAIRED, (views, list(inspections), datas))]
    for data in datas:
        found += [(data.view.phase, finding) for finding in apply(data_rules.RULES, data)]
    if param is not None and solver is not None:
        file, net_file = (None if is_text(source) else Path(source) for source in (solver, net))
        about = solver_rules.SolverView(param, file or Path(), net_file, views)
        found += [(None, finding) for finding in apply(solver_rules.RULES, about)]
        found += [(None, finding) for finding in apply(_COVERAGE, (param, datas))]
    return merged(found)


def _read_solver(solver: str | Path | None) -> tuple[Any, list[UnknownField]]:
    if solver is None:
        return None, []
    param = caffe_pb2.SolverParameter()
    return param, read_tolerant(solver, param)[1]


def _state(param: Any, number: int) -> tuple[str, ...]:
    """The stages that a solver gives to its TRAIN net (0) and its first TEST net (1)."""
    if param is None:
        return ()
    if number == 0:
        return tuple(param.train_state.stage)
    return tuple(param.test_state[0].stage) if param.test_state else ()


def _trains(seen: View) -> bool:
    learns = any(node.cls is not None and node.cls.loss for node in seen.nodes)
    weighted = any(node.loss_weight(top.index) for node in seen.nodes for top in node.tops)
    return learns or weighted or any(seen.of_type(*inspected.SOURCES))


def _unknown(prefix: str, fields_: Sequence[UnknownField]) -> Iterator[Finding]:
    for field in fields_:
        fork = forks.origin(field)
        what = f"{prefix}line {field.line}: {field.message} has no field {field.name!r} in BVLC Caffe 1.0"
        yield Finding(
            "unknown-field",
            "error",
            None,
            what + (f"; {fork} added it" if fork else ""),
            "What it asks for does not happen, and the file is refused by a net.",
            "Remove it, or say the same with BVLC Caffe's fields." if fork else "Check the spelling.",
        )


def _settings(error: StallscopeError) -> Finding:
    found = f" (found: {error.found})" if error.found is not None else ""
    expected = f"Expected: {error.expected}." if error.expected is not None else "Change the setting."
    why = "A net with it is refused."
    return Finding("refused-setting", "error", None, error.what + found, why, error.hint or expected)


def _imported(filtered: FilteredNet) -> Iterator[StallscopeError]:
    """Import the modules that may register types of one's own, as a net does; what keeps one from it."""
    try:
        import_types(filtered.net)
    except StallscopeError as error:
        yield error


def _built(filtered: FilteredNet, seen: View) -> Iterator[Finding]:
    """What making the layers says; enters the layers into the view where all of them can be made."""
    context = Context(filtered.phase, np, True, 0, Scratch(np), input_shapes={})
    unknown = [node for node in seen.nodes if node.cls is None]
    for node in unknown:
        fork = forks.TYPES.get(node.type)
        what = f"type {node.type!r} is not supported" + (f"; {fork} added it" if fork else "")
        do = "docs/custom_layers.md tells how to write it in Python."
        yield Finding("unknown-type", "error", node.name, what, "A net with it is refused.", do)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for node, layer in zip(seen.nodes, build_layers(filtered, context), strict=True):
                node.layer = layer
        except SettingsError as error:
            for one in error.errors:
                if "unsupported type" not in one.what:
                    yield _settings(one)
        except StallscopeError as error:
            if not unknown:
                yield _settings(error)
    for warning in caught:
        if isinstance(warning.message, FieldWarning) and fields.IN_PLACE not in str(warning.message):
            yield Finding(
                "no-effect-setting", "note", None, str(warning.message), "It changes nothing here.", "Leave it out."
            )


def _never_used(about: tuple[Any, dict[str, View], Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Layers that no phase has."""
    message, _, stages = about
    used: set[int] = set()
    reasons: dict[int, str] = {}
    for phase in PHASES:
        try:
            filtered = filter_net(message, phase, tuple(stages))
        except StallscopeError:
            return
        kept = [layer.SerializeToString() for layer in filtered.net.layer]
        for i, layer in enumerate(message.layer):
            if layer.SerializeToString() in kept:
                used.add(i)
        for name, _tops, reason in filtered.excluded:
            for i, layer in enumerate(message.layer):
                if layer.name == name and i not in reasons:
                    reasons[i] = reason
    for i, layer in enumerate(message.layer):
        if i not in used:
            yield layer.name, f"takes part in no phase: {reasons.get(i, 'its rules exclude it')}"


def _untested(about: tuple[Any, dict[str, View], Sequence[str]]) -> Iterator[tuple[None, str]]:
    """A net with layers for TEST and nothing to feed them."""
    message, views, _ = about
    meant = any(rule.phase == 1 and rule.HasField("phase") for layer in message.layer for rule in layer.include)
    if meant and "TRAIN" in views and "TEST" not in views:
        yield None, "layers are included in TEST, and no data layer is"


_NET_RULES = (
    Rule(
        "never-used",
        "note",
        "The layer is never built, unless a stage or level is given.",
        "Give the stage (--stage), or remove the layer.",
        _never_used,
    ),
    Rule("no-test-source", "warning", "It cannot be tested.", "Add a data layer for TEST.", _untested),
)
_COVERAGE = (
    Rule(
        "test-coverage",
        "note",
        "Results are then not those of the whole test set.",
        "test_iter * batch_size = records.",
        lambda about: data_rules.coverage(*about),
    ),
)
