"""Net prototxt to one checked, current-format message: parse, upgrade, keep the layers of one phase.

The wiring of blobs is not looked at here (that is :mod:`gpu.wiring`); what is settled here is which layers there are,
and why the others are not.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from datasets import caffe_pb2
from gpu.upgrade import upgrade
from profiler.errors import StallscopeError, UsageError

PHASES = ("TRAIN", "TEST")
_UNKNOWN = re.compile(r'Message type "caffe\.(\w+)" has no field named "(\w+)"')
_FIELD = re.compile(r"\s*[A-Za-z_]\w*\s*(:(?!/)|<)")  # but no address, as of s3://
_MAX_UNKNOWN = 50
_TEXT = "prototxt text"
_ONE_LINE = "if this is meant as a path: there is no such file"


class PrototxtError(StallscopeError):
    """A prototxt that cannot be read, or says something that cannot be followed."""


@dataclass(frozen=True)
class FilteredNet:
    """``net``: the layers that take part in this phase. ``excluded``: (layer, tops, reason) of the others."""

    net: Any
    phase: str
    excluded: tuple[tuple[str, tuple[str, ...], str], ...]


@dataclass(frozen=True)
class UnknownField:
    """A field that the text gives at ``line`` and that BVLC Caffe's message ``message`` does not have."""

    line: int
    name: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.name!r} in {self.message}"


def is_text(source: str | Path) -> bool:
    """Whether this is a prototxt itself rather than the path of one.

    A Path never is, nor what names a file that there is. Any other string is where it has a line break or a brace, or
    begins as a field does: ``base_lr: 0.1``.
    """
    if not isinstance(source, str) or os.path.isfile(source):
        return False
    return "\n" in source or "{" in source or _FIELD.match(source) is not None


def read_message(source: str | Path, message: Any) -> str:
    """Parse a prototxt, by its path or the text itself (:func:`is_text`); returns the name to use in errors.

    All unknown fields are reported at once. Raises PrototxtError.
    """
    where, unknown = read_tolerant(source, message)
    if unknown:
        raise PrototxtError(
            f"{where}: {len(unknown)} unknown field{'s' if len(unknown) > 1 else ''}",
            found="; ".join(str(field) for field in unknown),
            hint="fields are those of BVLC Caffe 1.0; check the spelling",
        )
    return where


def read_tolerant(source: str | Path, message: Any) -> tuple[str, list[UnknownField]]:
    """:func:`read_message` that leaves unknown fields out and returns them beside the name, at most 50.

    After the fiftieth, or where what lies behind one cannot be read either, ``message`` holds the text up to there.
    Raises PrototxtError where nothing was unknown and the text cannot be read.
    """
    text, where = _text(source)
    unknown: list[UnknownField] = []
    while True:
        message.Clear()
        try:
            text_format.Parse(text, message)
        except text_format.ParseError as error:
            line, column = error.GetLine() or 1, error.GetColumn() or 1
            match = _UNKNOWN.search(str(error))
            if match is not None and len(unknown) < _MAX_UNKNOWN:
                kind, field = match.groups()
                unknown.append(UnknownField(line, field, kind))
                text = _blank(text, line, column)
                continue
            if not unknown:
                detail = str(error).split(" : ", 1)[-1].replace("caffe.", "")
                raise PrototxtError(
                    f"{where}, line {line}, column {column}: cannot be read",
                    found=detail,
                    hint=_ONE_LINE if where == _TEXT and "\n" not in text else None,
                ) from error
        return where, unknown


def load_net(source: str | Path) -> Any:
    """A ``NetParameter`` in the current format (V1 nets are upgraded). Raises PrototxtError."""
    net = caffe_pb2.NetParameter()
    upgrade_net(net, read_message(source, net))
    return net


def upgrade_net(net: Any, where: str) -> None:
    """Bring a parsed ``NetParameter`` to the current format, in place. Raises PrototxtError, also for an empty one."""
    try:
        upgrade(net)
    except ValueError as error:
        raise PrototxtError(f"{where}: {error}") from error
    if not net.layer:
        raise PrototxtError(f"{where}: the net has no layers", hint="is this a solver or an empty file?")


def filter_net(net: Any, phase: str, stages: tuple[str, ...] = (), level: int = 0) -> FilteredNet:
    """Keep the layers whose include and exclude rules agree with phase, stages and level.

    The net's own ``state`` adds its stages, and its level where ``level`` is 0. Raises PrototxtError, UsageError.
    """
    if phase not in PHASES:
        raise UsageError(f"unknown phase {phase!r}", expected="TRAIN or TEST", found=phase)
    stages = tuple(stages) + tuple(net.state.stage)
    level = level or net.state.level
    kept = caffe_pb2.NetParameter()
    kept.CopyFrom(net)
    del kept.layer[:]
    excluded = []
    for layer in net.layer:
        reason = _exclusion(layer, phase, stages, level)
        if reason is None:
            kept.layer.add().CopyFrom(layer)
        else:
            excluded.append((layer.name, tuple(layer.top), reason))
    return FilteredNet(kept, phase, tuple(excluded))


def _text(source: str | Path) -> tuple[str, str]:
    if is_text(source):
        return str(source), _TEXT
    if not str(source).strip():
        raise PrototxtError("the prototxt is empty: neither the path of a file nor text")
    path = Path(source)
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        hint = "check the path" if isinstance(error, OSError) else "a prototxt is text: are these weights, or a state?"
        raise PrototxtError(f"prototxt {path} cannot be read: {reason}", hint=hint) from error


def _blank(text: str, line: int, column: int) -> str:
    """Replace the unknown field that starts at line and column (from 1) by spaces, so that parsing can go on."""
    start = sum(len(row) for row in text.splitlines(keepends=True)[: line - 1]) + column - 1
    end = re.compile(r"\w+\s*:?\s*").match(text, start).end()  # type: ignore[union-attr]
    token = re.compile(
        r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[{}<>\[\]]|[^\s{}<>\[\]"'#;,]+|.""", re.DOTALL
    )
    depth = 0
    while end < len(text):
        match = token.match(text, end)
        assert match is not None  # the last alternative takes any character
        piece = match.group()
        depth += (piece in "{<[") - (piece in "}>]")
        if depth < 0:  # the field had no value; the bracket closes the message around it
            break
        end = match.end()
        if depth == 0 and not piece.isspace() and not piece.startswith("#"):
            break
    return text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]


def _exclusion(layer: Any, phase: str, stages: tuple[str, ...], level: int) -> str | None:
    """Why a layer takes no part, or None where it does."""
    if layer.include and layer.exclude:
        raise PrototxtError(
            f"layer {layer.name!r} has both include and exclude rules", hint="keep one kind: the two cannot be combined"
        )
    if layer.include:
        reasons = [_mismatch(rule, phase, stages, level) for rule in layer.include]
        if None in reasons:
            return None
        return " and ".join(dict.fromkeys(reason for reason in reasons if reason))
    for rule in layer.exclude:
        if _mismatch(rule, phase, stages, level) is None:
            return f"its exclude rule {{ {text_format.MessageToString(rule, as_one_line=True)} }} applies"
    return None


def _mismatch(rule: Any, phase: str, stages: tuple[str, ...], level: int) -> str | None:
    """Why a rule does not fit the state, or None where it does."""
    if rule.HasField("phase") and PHASES[rule.phase] != phase:
        return f"it is for {PHASES[rule.phase]}"
    if rule.HasField("min_level") and level < rule.min_level:
        return f"level {level} is below min_level {rule.min_level}"
    if rule.HasField("max_level") and level > rule.max_level:
        return f"level {level} is above max_level {rule.max_level}"
    for stage in rule.stage:
        if stage not in stages:
            return f"stage {stage!r} is missing"
    for stage in rule.not_stage:
        if stage in stages:
            return f"stage {stage!r} is set"
    return None
