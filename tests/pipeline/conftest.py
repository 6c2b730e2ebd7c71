"""Fixtures of several files."""

from __future__ import annotations

import pytest

from tests.pipeline.bad_sets import write_sets


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A data set with bad records of every kind, as LMDB and as LevelDB: paths by kind."""
    return write_sets(tmp_path_factory.mktemp("sets"))
