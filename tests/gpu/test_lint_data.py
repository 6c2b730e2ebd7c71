"""gpu.lint against what datasets.inspect says of real databases, lists of images and HDF5 files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from datasets import inspect
from gpu.lint.__main__ import main
from gpu.lint.finding import Finding
from profiler.errors import UsageError
from tests.gpu.test_lint import SOUND, check, inspection

DATA = Path(__file__).parents[1] / "data"
KINDS = ("lmdb", "leveldb", "images", "hdf5")


def examined(capsys: pytest.CaptureFixture[str], path: Path) -> str:
    capsys.readouterr()
    assert inspect.main([str(path), "--json"]) == 0
    return capsys.readouterr().out


@pytest.fixture
def source(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, str]:
    """A data set with labels 0 to 9, and the layer that reads it."""
    if request.param in ("lmdb", "leveldb"):
        path = DATA / "db" / f"mnist_test_{request.param}"
        return path, f'type: "Data" data_param {{ source: "{path}" batch_size: 4 }} transform_param {{ scale: 0.004 }}'
    if request.param == "images":
        from PIL import Image

        path = tmp_path / "list.txt"
        for label in range(10):  # of several sizes
            Image.new("RGB", (8 + label, 9), (label, 0, 0)).save(tmp_path / f"{label}.png")
        path.write_text("".join(f"{label}.png {label}\n" for label in range(10)))
        more = "batch_size: 4 new_height: 8 new_width: 8"
        return (
            path,
            f'type: "ImageData" image_data_param {{ source: "{path}" {more} }} transform_param {{ scale: 0.004 }}',
        )
    import h5py

    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"], file["label"] = np.zeros((10, 5), np.float32), np.arange(10, dtype=np.float32)
    path = tmp_path / "files.txt"
    path.write_text(f"{tmp_path / 'a.h5'}\n")
    return path, f'type: "HDF5Data" hdf5_data_param {{ source: "{path}" batch_size: 4 }}'


def net(layer: str, outputs: int) -> str:
    return f"""layer {{ name: "data" top: "data" top: "label" {layer} }}
    layer {{ name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
      inner_product_param {{ num_output: {outputs} weight_filler {{ type: "xavier" }} }} }}
    layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }}"""


@pytest.mark.parametrize("source", KINDS, indirect=True)
def test_labels_of_every_kind_of_data_set_are_held_to_the_scores(
    tmp_path: Path, source: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, layer = source
    inspected, text = tmp_path / "inspect.json", tmp_path / "net.prototxt"
    inspected.write_text(examined(capsys, path))
    for outputs, found in ((9, {"label-range"}), (10, set()), (11, {"unused-classes"})):
        text.write_text(net(layer, outputs))
        main([str(text), "--data", str(inspected), "--json"])
        findings = json.loads(capsys.readouterr().out)["findings"]
        assert {each["rule"] for each in findings} - {"data-warning"} == found, outputs
        assert all(each["layer"] == "ip" for each in findings if each["rule"] in found)


def rules(tmp_path: Path, text: str, *documents: dict[str, Any]) -> list[Finding]:
    (tmp_path / "net.prototxt").write_text(text)
    return check(tmp_path / "net.prototxt", None, documents)


IMAGES = 'type: "ImageData" image_data_param { source: "train_lmdb" batch_size: 4 %s } transform_param { scale: 1 %s }'


@pytest.mark.parametrize(
    ("param", "transform", "changes", "rule"),
    [
        ("", "", {"shapes": {"3x8x8": 1, "3x9x8": 1}}, "sizes-differ"),
        ("new_height: 8 new_width: 8", "", {"shapes": {"3x8x8": 1, "3x9x8": 1}}, None),
        ("new_height: 8 new_width: 8", "crop_size: 9", {}, "crop-size"),
        ("", "crop_size: 9", {}, None),
        ("is_color: false", "mean_value: 100 mean_value: 110 mean_value: 120", {}, "mean-values"),
        ("", "mean_value: 100 mean_value: 110 mean_value: 120", {}, None),
        ("", "", {"shapes": {"3x8x8": 1, "1x8x8": 1}}, None),  # is_color makes three of one
    ],
)
def test_images_are_what_their_layer_makes_of_them(
    tmp_path: Path, param: str, transform: str, changes: dict[str, Any], rule: str | None
) -> None:
    found = rules(tmp_path, net(IMAGES % (param, transform), 10), inspection(**changes))
    assert {finding.rule for finding in found} == ({rule} if rule else set())


def test_an_inspection_that_belongs_to_no_layer_is_told(tmp_path: Path) -> None:
    others = [inspection(path="/data/other_lmdb"), inspection(path="/data/third_lmdb")]
    for documents, paths in ((others, ["other", "third"]), ([inspection(), others[0]], ["other"])):
        found = [finding for finding in rules(tmp_path, SOUND, *documents) if finding.rule == "data-unused"]
        assert [finding.what.split("/data/")[1].split("_")[0] for finding in found] == paths
        assert all("data layers read test_lmdb, train_lmdb" in finding.what for finding in found)
    assert rules(tmp_path, SOUND, others[0]) == []  # the only one is everybody's
    fed = SOUND.replace('type: "Data"', 'type: "Input" input_param { shape { dim: 4 dim: 3 dim: 8 dim: 8 } }')
    [finding] = [finding for finding in rules(tmp_path, fed, others[0]) if finding.rule == "data-unused"]
    assert "there is no data layer" in finding.what


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_inspection_is_refused_or_used_and_never_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    document = copy.deepcopy(inspection())
    place = document if data.draw(st.booleans()) else document[data.draw(st.sampled_from(["labels", "shapes"]))]
    key = data.draw(st.sampled_from(sorted(place)))
    if data.draw(st.booleans()):
        del place[key]
    else:
        place[key] = data.draw(ANY)
    (tmp_path / "d.json").write_text(json.dumps(document))
    (tmp_path / "net.prototxt").write_text(SOUND)
    try:
        main([str(tmp_path / "net.prototxt"), "--data", str(tmp_path / "d.json")])
    except UsageError as error:
        assert "inspection of a data set" in str(error)  # noqa: PT017
    capsys.readouterr()
