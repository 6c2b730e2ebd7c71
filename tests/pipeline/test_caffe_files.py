"""Batches of real Caffe's ImageData and HDF5Data layers, value for value, from prototxts with its layers.

Where a case has draws of order, crop and mirror, Caffe's own are put in. They were found by comparing each recorded
sample with every possible crop of every photo, and are those of its generator (mt19937, seeded by its third word).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datasets.order import Order, Stream
from pipeline import philox, settings
from pipeline.feed import Feed
from profiler.errors import StallscopeError
from tests.pipeline import build

REST = """
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 8 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
IMAGES = """
layer { name: "d" type: "ImageData" top: "data" top: "label" transform_param { %s }
  image_data_param { source: "list.txt" root_folder: "crops/" batch_size: 6 new_height: 40 new_width: 48 %s } }
"""


@pytest.fixture
def caffe() -> dict[str, np.ndarray]:
    with np.load("tests/data/datalayer_files.npz") as file:
        return dict(file)


@pytest.fixture
def hashes() -> dict[str, Any]:
    """By case and batch, of values that are not kept whole."""
    return json.loads(Path("tests/data/datalayer_batches.json").read_text())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with photos, their list, and HDF5 files, as Caffe's nets expect to be started in it."""
    build.photos(tmp_path)
    (tmp_path / "inputs").mkdir()
    for file in Path("tests/data/hdf5").iterdir():
        (tmp_path / "inputs" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "solver.prototxt").write_text(
        'base_lr: 0.01 lr_policy: "fixed" max_iter: 4 test_iter: 4 test_interval: 4\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(layer: str, **flags: Any) -> Any:
    Path("net.prototxt").write_text(layer + REST)
    given = {"net": "net.prototxt", "solver": "solver.prototxt", "feed.engine": "inline", **flags}
    return settings.load(None, given)


def test_photos_are_resized_as_in_caffe(caffe: dict[str, np.ndarray], hashes: dict[str, Any], place: Path) -> None:
    with Feed(config(IMAGES % ("", "")), "TEST", stop_step=4) as feed:
        assert feed.blob_shapes == [(6, 3, 40, 48), (6,)]
        for step, batch in enumerate(feed):
            np.testing.assert_array_equal(batch.labels, caffe["imagedata_resize/labels"][step])
            if step in (0, 3):
                np.testing.assert_array_equal(batch.data, caffe[f"imagedata_resize/data{step or ''}"])
            assert hashlib.sha256(batch.data.tobytes()).hexdigest() == hashes["imagedata_resize"]["sha256"][str(step)]


def test_gray_photos_are_those_of_caffe(caffe: dict[str, np.ndarray], place: Path) -> None:
    with Feed(config(IMAGES % ("scale: 0.5", "is_color: false")), "TEST") as feed:
        batch = next(feed)
        np.testing.assert_array_equal(batch.labels, caffe["imagedata_gray_resize/labels"][0])
        np.testing.assert_array_equal(batch.data, caffe["imagedata_gray_resize/data"])


def test_shuffled_crops_are_those_of_caffe_with_its_draws(
    caffe: dict[str, np.ndarray], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, draws = caffe["imagedata_shuffle_crop/records"], caffe["imagedata_shuffle_crop/draws"]
    assert sorted(order[:24]) == list(range(24))

    def records(self: Order, epoch: int, start: int, count: int) -> np.ndarray:
        assert self.shuffle == "full"  # the text's own shuffle
        return order[epoch * 24 + start :][:count]

    def draw(seed: int, phase: int, epochs: np.ndarray, ids: np.ndarray, *_: Any, **__: Any) -> philox.Draws:
        mine = draws[first[0] : first[0] + 6]
        first[0] += 6
        return philox.Draws(mine[:, 0].astype(bool), mine[:, 1], mine[:, 2])

    first = [0]
    settled = config(IMAGES % ("crop_size: 32 mirror: true mean_value: 110", "shuffle: true"))
    with Feed(settled, "TRAIN", stop_step=5) as feed:
        monkeypatch.setattr(Order, "run", records)
        monkeypatch.setattr(philox, "draw", draw)
        for step, batch in enumerate(feed):
            np.testing.assert_array_equal(batch.labels, caffe["imagedata_shuffle_crop/labels"][step])
            expected = caffe["imagedata_shuffle_crop/data"][6 * step : 6 * step + 6]
            np.testing.assert_array_equal(batch.data, expected)


def test_rows_of_hdf5_files_are_those_of_caffe_over_files_and_epochs(caffe: dict[str, np.ndarray], place: Path) -> None:
    layer = (
        'layer { name: "d" type: "HDF5Data" top: "data" top: "label" '
        'hdf5_data_param { source: "inputs/h5_list.txt" batch_size: 4 } }'
    )
    with Feed(config(layer), "TEST", stop_step=6) as feed:
        assert feed.blob_shapes == [(4, 2, 3), (4,)]
        for step, batch in enumerate(feed):
            data, labels = batch.blobs
            np.testing.assert_array_equal(data, caffe["hdf5data/data"][step])
            np.testing.assert_array_equal(labels, caffe["hdf5data/labels"][step])


def test_raw_photos_one_at_a_time_have_the_sizes_caffe_saw(
    caffe: dict[str, np.ndarray], hashes: dict[str, Any], place: Path
) -> None:
    """``rawnative_batch1_varshape``: its pixels are those of ``encnative_batch1_varshape``, stored raw."""
    from datasets import datum, decode
    from datasets.source import open_source
    from pipeline.spec import FeedSpec

    with open_source("list.txt", root="crops") as source:
        values = []
        for index in range(24):
            parsed = datum.parse(source.read(index).value)
            values.append(build.raw(decode.to_image(parsed, color="color"), parsed.label))
    spec = FeedSpec(build.write_lmdb(place / "raw", values), 1, phase="TEST", stop_step=8)
    with Feed.from_spec(spec) as feed:
        for step, batch in enumerate(feed):
            assert batch.data.shape == tuple(caffe["rawnative_batch1_varshape/shapes"][step])
            assert batch.labels.tolist() == caffe["rawnative_batch1_varshape/labels"][step].tolist()
            np.testing.assert_array_equal(batch.data[0], decode.to_image(datum.parse(values[step])))
            if kept := hashes["rawnative_batch1_varshape"]["sha256"].get(str(step)):
                assert hashlib.sha256(batch.data.tobytes()).hexdigest() == kept


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_caffes_ranks_share_what_is_one_batch_here(ranks: int) -> None:
    """In TRAIN the ranks' batches of a step are one global batch of ours; in TEST one rank reads from the beginning."""
    taken = json.loads(Path("tests/data/rank_striding.json").read_text())
    each = [taken[f"size{ranks}_rank{rank}_TRAIN"] for rank in range(ranks)]
    stream = Stream(Order(96, seed=0, shuffle="none"), 5 * ranks, "wrap")
    for step in range(3):
        records = stream.at(step).records
        for rank in range(ranks):
            assert records[rank::ranks].tolist() == each[rank][step]
        alone = Stream(Order(96, seed=0, shuffle="none"), 5, "wrap").at(step).records
        assert alone.tolist() == taken[f"size{ranks}_rank0_TEST"][step]


# -- what the texts say ----------------------------------------------------------------------------------------------


def test_what_an_image_data_layer_says_is_used_where_the_configuration_is_silent(place: Path) -> None:
    layer = IMAGES % ("crop_size: 20", "shuffle: false rand_skip: 5 is_color: false")
    settled = config(layer)
    assert settled.data.order.shuffle == "none"
    assert settled.transform("TRAIN").resize == (40, 48)
    assert settled.transform("TRAIN").force_gray
    assert settled.data.train.backend == "list"
    assert any("rand_skip" in note for note in settled.notes)
    settled = config(layer, **{"data.order.shuffle": "full", "data.train.transform": {"resize": [30, 30]}})
    assert settled.data.order.shuffle == "full"
    assert settled.transform("TRAIN").resize == (30, 30)
    assert any("data.order.shuffle: full of the configuration is used, not none" in note for note in settled.notes)
    with Feed(config(layer, **{"data.transform.force_color": True})) as feed:
        assert feed.shape == (6, 3, 20, 20)


def test_another_source_takes_nothing_that_describes_the_files(place: Path) -> None:
    database = build.write_lmdb(place / "db", [build.raw(build.picture(1, (1, 9, 9)), 1)] * 8)
    settled = config(IMAGES % ("scale: 0.5", ""), **{"data.train.source": database, "data.test.source": database})
    with Feed(settled) as feed:
        assert feed.shape == (6, 1, 9, 9)
    assert settled.transform("TRAIN").scale == 0.5
    assert settled.data.train.backend is None


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        ((IMAGES % ("", "")).replace("new_width: 48", ""), "new_height and new_width go together"),
        (
            'layer { name: "d" type: "HDF5Data" top: "data" top: "label" transform_param { scale: 2 } '
            'hdf5_data_param { source: "inputs/h5_list.txt" batch_size: 4 } }',
            "layer 'd' (HDF5Data) has a transform_param",
        ),
        (
            'layer { name: "d" type: "WindowData" top: "data" top: "label" window_data_param { source: "x" } }',
            "WindowData, which is not supported",
        ),
        (
            'layer { name: "d" type: "HDF5Data" top: "data" top: "gone" '
            'hdf5_data_param { source: "inputs/h5_list.txt" batch_size: 4 } }',
            "there is no data set 'gone'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_name(place: Path, layer: str, told: str) -> None:
    with pytest.raises(StallscopeError) as caught, Feed(config(layer)):
        pass
    assert told in str(caught.value)


def test_memory_data_is_filled_by_a_program_and_a_job_says_what_to_do(place: Path) -> None:
    layer = (
        'layer { name: "m" type: "MemoryData" top: "data" top: "label" memory_data_param '
        "{ batch_size: 4 channels: 1 height: 2 width: 3 } }"
    )
    with pytest.raises(StallscopeError, match=r"layer 'm' \(MemoryData\) is filled by a program") as caught:
        Feed(config(layer))
    assert "set_input_arrays" in str(caught.value.hint)


def test_transforms_of_the_configuration_are_refused_for_rows(place: Path) -> None:
    layer = (
        'layer { name: "d" type: "HDF5Data" top: "data" top: "label" '
        'hdf5_data_param { source: "inputs/h5_list.txt" batch_size: 4 } }'
    )
    with pytest.raises(StallscopeError, match=r"data\.transform\.scale is set, and the records of set of HDF5 files"):
        Feed(config(layer, **{"data.transform.scale": 2.0}))


def test_dummy_data_beside_a_data_layer_is_no_data_set(place: Path) -> None:
    constant = 'layer { name: "c" type: "DummyData" top: "c" dummy_data_param { shape { dim: 2 } } }\n'
    with Feed(config(IMAGES % ("", "") + constant)) as feed:
        assert feed.shape == (6, 3, 40, 48)


def test_bad_files_of_a_list_are_replaced_and_counted(place: Path) -> None:
    victim = place / "crops" / "china" / "img_0004.jpg"
    victim.write_bytes(victim.read_bytes()[:500])
    (place / "crops" / "flower" / "img_0007.png").unlink()
    with pytest.raises(StallscopeError, match=r"line 8: .*img_0007\.png"):
        Feed(config(IMAGES % ("", "")))
    flags = {"data.on_bad_record": "skip", "data.bad_record_cap": 0.2, "data.order.shuffle": "none"}
    with Feed(config(IMAGES % ("", ""), **flags), stop_step=4) as feed:
        used = np.concatenate([batch.ids.copy() for batch in feed])
        stats = feed.stats()["bad_records"]
    assert stats["records"] == 2
    assert 4 not in used
    assert 7 not in used
    assert len(used) == 24
