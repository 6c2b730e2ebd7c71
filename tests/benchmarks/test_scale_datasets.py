"""The benchmark of large data sets, run small: it must go on working, and its figures must keep their meaning."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "scale_datasets.py"
KINDS = ["LMDB, keys that are padded numbers", "LMDB, keys that are file names", "LevelDB, keys that are file names"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scale")
    command = [sys.executable, SCRIPT, "--records", "20000", "--folder", folder, "--out", folder / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert os.listdir(folder) == ["out.json"], "databases and views are removed"
    return json.loads((folder / "out.json").read_text())


def figures(results):
    for database in results["databases"].values():
        for opening in ("first", "second"):
            yield database, database[opening]


@pytest.mark.long
def test_it_measures_what_it_says(small):
    assert list(small["databases"]) == KINDS
    assert [database["records"] for database in small["databases"].values()] == [20_000, 20_000, 2_000]
    for _, opening in figures(small):
        assert opening["open_and_first_record_s"] > 0
        assert opening["shuffled_batch_ms"]["median"] > 0
    assert small["order"]["peak_kib"] < small["order"]["permutation_kib"]


def test_the_committed_figures_are_of_ten_million_records_and_bear_out_what_is_promised():
    results = json.loads(SCRIPT.with_suffix(".json").read_text())
    assert list(results["databases"]) == KINDS
    assert results["databases"][KINDS[0]]["records"] == results["databases"][KINDS[1]]["records"] == 10_000_000
    assert results["databases"][KINDS[0]]["kept_index_bytes_per_record"] == 0
    for database, opening in figures(results):
        assert database["kept_index_bytes_per_record"] <= 16
        assert opening["open_anonymous_mib"] < 64
    for kind in KINDS:
        assert results["databases"][kind]["second"]["open_and_first_record_s"] < 3
    assert results["order"]["peak_kib"] < 0.01 * results["order"]["permutation_kib"]
    known = {"cpu", "cores", "memory_gib", "system", "load_average", "python", "lmdb", "plyvel", "numpy"}
    assert set(results["machine"]) == known, "no names of hosts or folders"
