"""The benchmark of conversions by one thread and by two, run small: it must go on working."""

import contextlib
import io
import json
import os
import sys
import types

import pytest

from benchmarks import convert_workers
from datasets import convert


def here(command, **options):
    """Convert in this process: starting eight others is not what is tested."""
    assert command[:3] == [sys.executable, "-m", "datasets.convert"]
    assert options["check"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert convert.main(command[3:]) == 0


def test_it_measures_pairs_and_cleans_up(tmp_path, monkeypatch, capsys):
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(convert_workers.tempfile, "tempdir", str(tmp_path / "t"))
    monkeypatch.setattr(convert_workers, "subprocess", types.SimpleNamespace(run=here))
    assert convert_workers.main(["--images", "6", "--rounds", "2", "--out", str(tmp_path / "out.json")]) == 0
    assert os.listdir(tmp_path / "t") == []
    results = json.loads((tmp_path / "out.json").read_text())
    assert json.loads(capsys.readouterr().out) == results
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
