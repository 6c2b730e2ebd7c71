"""Fixtures of several files."""

from pathlib import Path

import pytest

from tests.datasets.damage import Records, raw_records, write_lmdb


@pytest.fixture(scope="module")
def records() -> Records:
    return raw_records(2000)


@pytest.fixture
def lmdb_folder(tmp_path: Path, records: Records) -> Path:
    return write_lmdb(tmp_path / "db", records)
