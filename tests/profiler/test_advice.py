"""Advice names configuration keys and flags that exist, at values that this version takes."""

import re
from pathlib import Path

import pytest

from pipeline.config import keys, validate

ADVICE = (Path(__file__).parents[2] / "profiler" / "advice.py").read_text()


def test_every_key_named_exists() -> None:
    known = {key for key, _ in keys()}
    named = set(re.findall(r"\b(?:data|feed|device|run|profile)(?:\.[a-z_0-9]+)+", ADVICE))
    assert named
    assert named <= known, named - known


@pytest.mark.parametrize(
    ("key", "value"), re.findall(r"\b((?:data|feed|device|run|profile)(?:\.[a-z_0-9]+)+): ([a-z]+)\b", ADVICE)
)
def test_every_value_named_is_accepted(key: str, value: str) -> None:
    document: dict = {}
    section = document
    *path, last = key.split(".")
    for name in path:
        section = section.setdefault(name, {})
    section[last] = value
    validate(document)
