"""Slots of pixels: what the host leaves undone is done on the device, to the same bits."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from datasets import caffe_pb2, datum
from gpu.normalise import Normalise
from pipeline import ray_runtime
from pipeline.feed import Feed
from pipeline.native import Native
from pipeline.run import run
from pipeline.settings import load
from pipeline.spec import FeedSpec, TransformSpec
from pipeline.transforms import TransformError
from profiler import store
from profiler.errors import UsageError
from profiler.events import Stage
from tests.gpu import nets
from tests.pipeline.build import encoded, picture, raw, write_lmdb

CROPS = "tests/data/db/crops96_raw_40x48_lmdb"
TRANSFORMS = [
    TransformSpec(crop=24, mirror=True, mean_value=(104.0, 117.0, 123.0), scale=0.017),
    TransformSpec(mirror=True, mean_value=(110.5,)),
    TransformSpec(crop=31, scale=1 / 256),
    TransformSpec(),
]


@pytest.mark.parametrize("way", ["native", "general"])
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_the_device_gives_the_floats_of_the_host(
    transform: TransformSpec, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "general":
        monkeypatch.setattr(Native, "of", lambda *_: None)
    floats = FeedSpec(CROPS, 7, seed=3, shuffle="full", stop_step=20, transform=transform, fingerprints="step")
    pixels = replace(floats, pixels="uint8")
    with Feed.from_spec(floats) as a, Feed.from_spec(pixels) as b:
        normalise = Normalise(np, b.mean, transform.scale)
        for one, other in zip(a, b, strict=True):
            assert other.data.dtype == np.uint8
            assert other.data.nbytes * 4 == one.data.nbytes
            assert normalise(other.data).tobytes() == one.data.tobytes()
            assert (one.hashes["raw"], one.hashes["ids"]) == (other.hashes["raw"], other.hashes["ids"])
            np.testing.assert_array_equal(one.labels, other.labels)


def test_a_mean_image_where_nothing_moves(tmp_path: Path) -> None:
    blob = caffe_pb2.BlobProto(num=1, channels=3, height=40, width=48)
    blob.data.extend(np.random.default_rng(0).random(3 * 40 * 48).astype(np.float32))
    (tmp_path / "mean.binaryproto").write_bytes(blob.SerializeToString())
    transform = TransformSpec(mean_file=str(tmp_path / "mean.binaryproto"), scale=0.3)
    floats = FeedSpec(CROPS, 7, stop_step=3, transform=transform)
    with Feed.from_spec(floats) as a, Feed.from_spec(replace(floats, pixels="uint8")) as b:
        normalise = Normalise(np, b.mean, transform.scale)
        for one, other in zip(a, b, strict=True):
            assert normalise(other.data).tobytes() == one.data.tobytes()
    with pytest.raises(UsageError, match="cannot go with a mean image"):
        replace(floats, pixels="uint8", transform=replace(transform, mirror=True))


def test_image_files_are_pixels_too(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [encoded(picture(i, (3, 20, 22)), i) for i in range(6)])
    floats = FeedSpec(path, 4, stop_step=4, transform=TransformSpec(crop=16, mirror=True, mean_value=(9.0,)))
    with Feed.from_spec(floats) as a, Feed.from_spec(replace(floats, pixels="uint8")) as b:
        normalise = Normalise(np, b.mean, 1.0)
        for one, other in zip(a, b, strict=True):
            assert normalise(other.data).tobytes() == one.data.tobytes()


def test_what_is_no_pixel_is_refused_by_name(tmp_path: Path) -> None:
    values = np.ones((1, 4, 4), np.float32)
    floats = datum.serialize(channels=1, height=4, width=4, float_data=values.ravel(), label=1)
    spec = FeedSpec(write_lmdb(tmp_path / "all", [floats] * 3), 2, pixels="uint8")
    with pytest.raises(TransformError, match=r"record 0 .* holds floats"):
        Feed.from_spec(spec)
    mixed = write_lmdb(tmp_path / "mixed", [raw(picture(0, (1, 4, 4)), 1), floats])
    with (
        Feed.from_spec(replace(spec, source=mixed)) as feed,
        pytest.raises(TransformError, match=r"record 1 .* floats"),
    ):
        next(feed)
    with pytest.raises(UsageError, match="on_bad_record: zero"):
        replace(spec, on_bad_record="zero")


_NET = """
layer { name: "d" type: "Data" top: "data" top: "label" transform_param { crop_size: 24 mirror: true
  mean_value: 104 mean_value: 117 mean_value: 123 scale: 0.0078125 }
  data_param { source: "%s" batch_size: 8 backend: LMDB } }
"""


@pytest.mark.parametrize(
    ("engine", "backend"),
    [("inline", "emulated"), pytest.param("ray", "numpy", marks=[pytest.mark.ray, pytest.mark.long])],
)
def test_a_job_learns_the_same_bits(tmp_path: Path, engine: str, backend: str) -> None:
    text = _NET % Path(CROPS).absolute()
    text += nets.layer("Convolution", "conv", ["data"], ["conv"], nets.CONV)
    text += nets.layer("InnerProduct", "ip", ["conv"], ["ip"], f"inner_product_param {{ num_output: 10 {nets.FILL} }}")
    text += nets.layer("SoftmaxWithLoss", "loss", ["ip", "label"], ["loss"])
    (tmp_path / "net.prototxt").write_text(text)
    (tmp_path / "solver.prototxt").write_text('base_lr: 0.001 lr_policy: "fixed" max_iter: 12 momentum: 0.9')
    results = []
    with ray_runtime.running() if engine == "ray" else contextlib.nullcontext():  # one for both jobs
        for pixels in ("float32", "uint8"):
            results.append(learned(tmp_path, engine, backend, pixels))
    assert results[0] == results[1]


def learned(folder: Path, engine: str, backend: str, pixels: str) -> tuple[bytes, int]:
    """Weights of a job and the hash of its parameters after step 5."""
    run_folder = folder / pixels
    flags = [
        f"--net={folder / 'net.prototxt'}", f"--solver={folder / 'solver.prototxt'}", f"--run.folder={run_folder}",
        f"--feed.engine={engine}", f"--device.backend={backend}", f"--feed.pixels={pixels}", "--feed.workers=1",
        "--device.step_ms=1", "--run.log_level=error", "--profile.samplers_hz=0",
    ]  # fmt: skip
    assert run(load(None, flags)) == 0
    found = store.load_run(run_folder)
    prints = {(row["step"], row["name"]): row["ordered"] for row in found.fingerprints.to_pylist()}
    assert all(prints[step, "fill"] == prints[step, "device"] for step in range(12))
    if backend == "emulated":
        copies = {row["bytes"] for row in found.events.to_pylist() if row["stage"] == Stage.COPY}
        assert copies == {8 * 3 * 24 * 24 * (4 if pixels == "float32" else 1) + 8 * 4}
    assert json.loads((run_folder / "manifest.json").read_text())["outcome"]["state"] == "finished"
    return (run_folder / "snapshots" / "iter_12.caffemodel").read_bytes(), prints[5, "params"]
