"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.pipeline import functions
from tests.pipeline.bad_sets import write_sets


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A data set with bad records of every kind, as LMDB and as LevelDB: paths by kind."""
    return write_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture
def gate() -> Iterator[Any]:
    """At which ``functions.waits_at_the_gate`` waits; open again afterwards."""
    functions.gate.clear()
    functions.someone_at_the_gate.clear()
    yield functions.gate
    functions.gate.set()
    functions.someone_at_the_gate.set()
