"""From a YAML file, flags and the prototxts they name to one :class:`pipeline.config.Config`.

Precedence: flag, then YAML, then the net's own data layers, then the default. A relative path is looked up in the
current directory first (as Caffe does) and then in the folder of the file that names it; ``run.folder`` is always
relative to the current directory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline import netdata
from pipeline.config import Config, allowed_at, keys, unknown_key, validate
from profiler.errors import UsageError


def load(path: str | Path | None, flags: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """The configuration in ``path`` with ``flags`` on top.

    ``flags`` are words of a command line (``--feed.workers 4`` or ``--feed.workers=4``) or a mapping of dotted keys to
    values. Without ``path`` the flags alone make the configuration.

    Raises :class:`UsageError` for a file that cannot be read, an unknown key, a value that is not allowed, a path that
    does not exist and for a job without data.
    """
    document = read_yaml(path) if path is not None else {}
    where = str(path) if path is not None else "the configuration"
    validate(document, where)  # before the flags, so that an error names the file it stands in
    for key, value in (flags if isinstance(flags, Mapping) else parse_flags(flags)).items():
        _put(document, key, value)
    validate(document, where if not flags else f"{where} and flags")
    base = Path(path).parent if path is not None else Path()
    return netdata.complete(document, base)


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of YAML 1.2 (``off`` is a word, ``1e-3`` a number) and without repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _value in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is no text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("bool", "float", "timestamp")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"),
    list("-+0123456789."),
)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. An empty file is an empty mapping. Raises :class:`UsageError`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"no configuration file {path}", hint="check the path, or start from an example") from None
    except IsADirectoryError:
        raise UsageError(
            f"the configuration {path} is a folder",
            expected="a YAML file",
            found="a folder",
            hint="name the file in it",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the configuration {path}", expected="a YAML file", found=str(error)) from None
    try:
        document = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"{path}{line} is not valid YAML", expected="YAML with each key once", found=problem) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError(
            f"{path} holds no mapping",
            expected="keys with values, as in 'net: my_net.prototxt'",
            found=f"{type(document).__name__}: {str(document)[:60]}",
        )
    return document


def parse_flags(words: Sequence[str]) -> dict[str, Any]:
    """Dotted keys and values from words of a command line, values read as YAML. Raises :class:`UsageError`."""
    known = {name for name, _ in keys()}
    flags: dict[str, Any] = {}
    pending = list(words)
    while pending:
        word = pending.pop(0)
        if not word.startswith("--"):
            raise UsageError(f"unexpected argument {word}", expected="flags such as --feed.workers 4", found=word)
        key, equals, text = word[2:].partition("=")
        if key not in known:
            parts = key.split(".")
            raise unknown_key(key, _nearest_level(parts), "flags")
        if not equals:
            if not pending:
                raise UsageError(f"the flag --{key} has no value", expected=dict(keys())[key], found="nothing")
            text = pending.pop(0)
        try:
            value = yaml.load(text, _Loader)
        except yaml.YAMLError:
            value = text  # a path such as `a: b` is no YAML, yet a value; the model judges it
        if key in flags:
            raise UsageError(f"the flag --{key} is given twice", expected="once", found=f"{flags[key]} and {value}")
        flags[key] = value
    return flags


def _nearest_level(parts: list[str]) -> list[str]:
    """Keys allowed at the deepest level of a dotted key that exists."""
    level: list[str] = []
    for part in parts[:-1]:
        if part not in allowed_at(level):
            return allowed_at(level)
        level.append(part)
    return allowed_at(level) or allowed_at([])


def _put(document: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(document.get(parent), dict):
            document[parent] = {}
        document = document[parent]
    document[last] = value
