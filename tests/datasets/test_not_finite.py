"""NaN and infinity among the floats of a record are told by whoever reads it, with its key."""

import math
from pathlib import Path

import pytest

from datasets import datum, inspect, mean, verify
from datasets.datum import DatumError
from datasets.source import open_source
from datasets.writer import LmdbWriter


@pytest.fixture(params=[math.nan, math.inf, -math.inf])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """300 records of four floats; record 7 and 200 hold one that is not finite."""
    path = tmp_path / "db"
    path.mkdir()
    writer = LmdbWriter(path)
    for index in range(300):
        floats = [float(index), 1.0, request.param if index in (7, 200) else 2.0, 3.0]
        writer.put(b"%08d" % index, datum.serialize(channels=1, height=2, width=2, float_data=floats, label=0))
    writer.close()
    return path


def test_the_mean_stops_at_the_first_one(folder: Path) -> None:
    with open_source(folder) as source, pytest.raises(DatumError, match=r"00000007.*NaN or infinity"):
        mean.compute(source)


def test_verify_counts_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(folder)]) == 0
    assert "2 records hold NaN or infinity, the first has key '00000007'" in capsys.readouterr().out


def test_inspect_counts_them(folder: Path) -> None:
    with open_source(folder) as source:
        document = inspect.examine(source)
    assert any("2 records with NaN or infinity, the first is record 7" in warning for warning in document["warnings"])
