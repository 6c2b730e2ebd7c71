"""The benchmark of conversions by one thread and by two, run small: it must go on working."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import convert_workers

SCRIPT = Path(convert_workers.__file__)


def test_it_measures_pairs_and_cleans_up(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    command = [sys.executable, SCRIPT, "--images", "6", "--rounds", "2", "--out", tmp_path / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path / "t") == []
    results = json.loads((tmp_path / "out.json").read_text())
    assert json.loads(done.stdout) == results
    assert (results["images"], results["rounds"]) == (6, 2)
    for mode in convert_workers.MODES:
        seconds = results[mode]["seconds"]
        assert {name: len(taken) for name, taken in seconds.items()} == {"1 workers": 2, "2 workers": 2}
        ratios = sorted(one / two for one, two in zip(seconds["1 workers"], seconds["2 workers"], strict=True))
        assert results[mode]["speed_up_range"] == pytest.approx(ratios, abs=0.02)
        assert ratios[0] - 0.02 <= results[mode]["speed_up_median"] <= ratios[1] + 0.02


def test_records_that_depend_on_the_number_of_workers_end_it(tmp_path, monkeypatch):
    images = convert_workers.make_images(tmp_path / "images", 4)

    def other(command, **options):
        workers = command[command.index("--workers") + 1]
        (tmp_path / "out.manifest.json").write_text(json.dumps({"content_sha256": workers}))

    monkeypatch.setattr(convert_workers.subprocess, "run", other)
    with pytest.raises(SystemExit, match="depend on the number of workers: 2 different"):
        convert_workers.compare(images, tmp_path / "out", [], 1)
