"""The mean image against those that Caffe's compute_image_mean made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import pytest

from datasets import datum, mean
from datasets.caffe_pb2 import BlobProto
from datasets.datum import DatumError, DatumSizeMismatch
from datasets.source import open_source
from profiler.errors import StallscopeError, UsageError
from tests.datasets import golden

CAFFES = {
    "crops96_raw_40x48_lmdb": "mean_40x48",
    "crops96_raw_40x48_leveldb": "mean_40x48_from_leveldb",
    "crops24_png_72_lmdb": "mean_png_72",  # encoded records
}


def write(folder: Path, records: dict[bytes, bytes]) -> Path:
    with lmdb.open(str(folder), map_size=64 << 20, lock=False) as env, env.begin(write=True) as txn:
        for key, value in records.items():
            txn.put(key, value)
    return folder


def raw(image: np.ndarray) -> bytes:
    channels, height, width = image.shape
    return datum.serialize(channels=channels, height=height, width=width, data=image.tobytes(), label=0)


@pytest.mark.parametrize("name", CAFFES)
def test_the_file_is_the_one_caffe_wrote(tmp_path: Path, name: str) -> None:
    out = tmp_path / "mean.binaryproto"
    assert mean.main([str(golden.DB / name), str(out), "--npy", str(tmp_path / "mean.npy")]) == 0
    caffes = (golden.DB / f"{CAFFES[name]}.binaryproto").read_bytes()
    assert out.read_bytes() == caffes
    blob = BlobProto.FromString(caffes)
    image = np.load(tmp_path / "mean.npy")
    assert (image.dtype, image.shape) == (np.float32, (blob.channels, blob.height, blob.width))
    np.testing.assert_array_equal(image.ravel(), np.asarray(blob.data, np.float32))


def test_sums_are_made_in_float32_in_the_order_of_the_keys(tmp_path: Path) -> None:
    # From 2^24 on, float32 steps by 2: the odd numbers that follow are rounded one by one.
    values = [2.0**24, 1.0, 1.0, 1.0, 3.0]
    items = {
        b"%d" % place: datum.serialize(channels=1, height=1, width=1, float_data=[value])
        for place, value in enumerate(values)
    }
    with open_source(write(tmp_path / "db", items)) as source:
        got = mean.compute(source)
    expected = np.float32(0)
    for value in values:
        expected += np.float32(value)
    assert got.image.ravel().tolist() == [expected / np.float32(5)]
    assert got.image.ravel()[0] != np.float32(sum(values) / 5)


def test_channel_means(tmp_path: Path) -> None:
    image = np.stack([np.full((4, 4), value, np.uint8) for value in (10, 20, 33)])
    with open_source(write(tmp_path / "db", {b"a": raw(image), b"b": raw(image + 1)})) as source:
        assert mean.compute(source).channels == [10.5, 20.5, 33.5]


def test_different_sizes_are_refused_with_both_keys(tmp_path: Path) -> None:
    items = {b"%04d" % at: raw(np.zeros((3, 30, 30), np.uint8)) for at in range(70)}
    items[b"0066"] = raw(np.zeros((3, 30, 24), np.uint8))
    with open_source(write(tmp_path / "db", items)) as source, pytest.raises(DatumError) as caught:
        mean.compute(source)
    assert str(caught.value.expected) == "3x30x30, as record 0 (key '0000')"
    assert str(caught.value.found) == "3x30x24 in record 66 (key '0066')"
    assert "--resize" in str(caught.value)


def test_gray_among_colour_needs_a_decision(tmp_path: Path) -> None:
    from PIL import Image

    from tests.datasets.test_decode import file

    items = {
        b"a": datum.serialize(data=file(Image.new("RGB", (4, 4), (30, 60, 90))), encoded=True),
        b"b": datum.serialize(data=file(Image.new("L", (4, 4), 90)), encoded=True),
    }
    with open_source(write(tmp_path / "db", items)) as source:
        with pytest.raises(DatumError, match="--color"):
            mean.compute(source)
        assert mean.compute(source, "color").channels == [90, 75, 60]


def test_a_record_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    items = {
        b"good": raw(np.zeros((1, 2, 2), np.uint8)),
        b"odd": datum.serialize(channels=3, height=4, width=5, data=b"0123456789"),
    }
    with (
        open_source(write(tmp_path / "db", items)) as source,
        pytest.raises(DatumSizeMismatch, match=r"record 1 \(key 'odd'\) of LMDB"),
    ):
        mean.compute(source)


def test_an_empty_database_has_no_mean(tmp_path: Path) -> None:
    with (
        open_source(write(tmp_path / "db", {})) as source,
        pytest.raises(StallscopeError, match="holds no records"),
    ):
        mean.compute(source)


def test_files_are_not_replaced_unasked(tmp_path: Path) -> None:
    out = tmp_path / "mean.binaryproto"
    out.write_text("mine")
    database = str(golden.DB / "mnist_test_lmdb")
    for arguments, text in (
        ([database, str(out)], "exists already"),
        ([database, str(tmp_path)], "is a folder"),
        ([database, str(tmp_path / "no" / "mean")], "does not exist"),
        ([database, str(tmp_path / "m"), "--npy", str(tmp_path / "m")], "the same file"),
    ):
        with pytest.raises(UsageError, match=text):
            mean.main(arguments)
    assert out.read_text() == "mine"
    assert mean.main([database, str(out), "--force"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mean.binaryproto"]


def test_the_command_line(tmp_path: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "datasets.mean", *map(str, arguments)]
        return subprocess.run(command, cwd=golden.DB.parents[2], capture_output=True, text=True, check=False)

    done = run(golden.DB / "crops96_raw_40x48_lmdb", tmp_path / "m", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert (document["records"], document["shape"]) == (96, [3, 40, 48])
    assert document["channel_means"] == pytest.approx([99.9910, 111.9367, 112.8199], abs=1e-4)
    done = run("memory:records=5,shape=3x4x4", tmp_path / "synthetic")
    assert "channel means (mean_value): B " in done.stdout
    done = run("/no/such/place", tmp_path / "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no data set at" in done.stderr
    assert "Traceback" not in done.stderr
