"""The benchmark of JPEG decoders, run small: it must go on working, and ours must have libjpeg-turbo's bits."""

import json
from pathlib import Path

import pytest

from benchmarks import jpeg_decoders


@pytest.mark.long
def test_it_measures_and_compares_bits(tmp_path, capsys):
    assert jpeg_decoders.main(["--images", "2", "--rounds", "1", "--out", str(tmp_path / "out.json")]) == 0
    results = json.loads((tmp_path / "out.json").read_text())
    assert json.loads(capsys.readouterr().out) == results
    found = results["decoders"]
    assert {name: found[name]["bits"] for name in found if name.startswith(("datasets.jpeg", "Pillow"))} == {
        "Pillow": "equal", "datasets.jpeg": "equal", "datasets.jpeg, part, all data": "equal",
        "datasets.jpeg, part": "equal",
    }  # fmt: skip
    assert found["simplejpeg"]["to_simplejpeg"] == 1
    committed = json.loads(Path(jpeg_decoders.__file__).with_suffix(".json").read_text())
    assert set(found) <= set(committed["decoders"])
