"""``iter_size``: a step of a job sums the gradients of several batches, as in Caffe."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gpu import Net
from gpu.solver import Solver
from pipeline.feed import Feed
from pipeline.run import run
from pipeline.settings import load
from pipeline.spec import FeedSpec, TransformSpec
from profiler import store
from profiler.errors import StallscopeError
from profiler.events import Kind, Stage
from tests.gpu import nets
from tests.pipeline.build import picture, raw, write_lmdb

_NET = (
    """layer { name: "d" type: "Data" top: "data" top: "label" data_param { source: "%s" batch_size: %d backend: LMDB }
  transform_param { crop_size: 8 mirror: true scale: 0.01 } }
"""
    + nets.layer("InnerProduct", "ip", ["data"], ["ip"], f"inner_product_param {{ num_output: 5 {nets.FILL} }}")
    + nets.layer("SoftmaxWithLoss", "loss", ["ip", "label"], ["loss"])
)
_SOLVER = 'base_lr: 0.1 momentum: 0.9 weight_decay: 0.01 lr_policy: "fixed" max_iter: 9 random_seed: 3 iter_size: %d'


def job(folder: Path, name: str, batch: int, parts: int, *more: str, labels: int = 5) -> int:
    folder.mkdir(exist_ok=True)
    if not (folder / "db").exists():
        write_lmdb(folder / "db", [raw(picture(i, (1, 10, 10)), i % labels) for i in range(22)])
    (folder / f"{name}.prototxt").write_text(_NET % (folder / "db", batch))
    (folder / f"{name}_solver.prototxt").write_text(_SOLVER % parts)
    flags = [
        f"--net={folder / name}.prototxt", f"--solver={folder / name}_solver.prototxt", "--feed.engine=inline",
        "--device.backend=numpy", f"--run.folder={folder / name}", "--data.order.seed=1", *more,
    ]  # fmt: skip
    return run(load(None, flags))


def weights(folder: Path, name: str, step: int = 9) -> np.ndarray:
    net = Net(str(folder / f"{name}.prototxt"), "TRAIN", input_shapes={"data": (2, 1, 8, 8), "label": (2,)})
    net.copy_from(str(folder / name / "snapshots" / f"iter_{step}.caffemodel"))
    return np.concatenate([np.asarray(blob.data).ravel() for blob in net.params["ip"]])


def test_a_job_makes_the_steps_that_the_solver_makes_of_the_same_batches(tmp_path: Path) -> None:
    assert job(tmp_path, "job", 2, 3) == 0
    solver = Solver(
        str(tmp_path / "job_solver.prototxt"), net=str(tmp_path / "job.prototxt"), backend="numpy",
        input_shapes={"data": (2, 1, 8, 8), "label": (2,)},
    )  # fmt: skip
    spec = FeedSpec(
        str(tmp_path / "db"), 2, seed=1, shuffle="full", transform=TransformSpec(crop=8, mirror=True, scale=0.01)
    )
    with Feed.from_spec(spec) as feed:  # batch by batch: nine steps of three
        for _ in range(9):
            solver.step_on(lambda: dict(zip(("data", "label"), next(feed).blobs, strict=False)))
    mine = np.concatenate([np.asarray(blob.data).ravel() for blob in solver.net.params["ip"]])
    assert weights(tmp_path, "job").tobytes() == mine.tobytes()
    steps = store.load_run(tmp_path / "job").events.to_pylist()
    assert [row["items"] for row in steps if row["stage"] == Stage.STEP and row["kind"] == Kind.SPAN] == [6] * 9


def test_three_batches_of_two_are_one_of_six_but_for_rounding(tmp_path: Path) -> None:
    assert job(tmp_path, "parts", 2, 3) == job(tmp_path, "whole", 6, 1) == 0
    np.testing.assert_allclose(weights(tmp_path, "parts"), weights(tmp_path, "whole"), rtol=1e-4, atol=1e-6)
    assert weights(tmp_path, "parts").tobytes() != weights(tmp_path, "whole").tobytes()


def test_a_run_that_goes_on_has_the_same_bits_and_another_iter_size_is_refused(tmp_path: Path) -> None:
    assert job(tmp_path, "whole", 2, 3) == 0
    assert job(tmp_path, "halves", 2, 3, "--run.iterations=4") == 0
    with pytest.raises(StallscopeError, match="iter_size"):
        job(tmp_path, "halves", 2, 2, "--run.if_exists=resume")
    assert job(tmp_path, "halves", 2, 3, "--run.if_exists=resume") == 0
    assert weights(tmp_path, "halves").tobytes() == weights(tmp_path, "whole").tobytes()
    sidecar = json.loads((tmp_path / "halves" / "snapshots" / "iter_9.json").read_text())
    assert (sidecar["stream"]["batch"], sidecar["stream"]["iter_size"]) == (2, 3)


def test_a_label_in_any_part_is_told_with_its_record(tmp_path: Path) -> None:
    with pytest.raises(StallscopeError, match=r"label 5 .*record (5|11|17) \(key '000000(05|11|17)_img'\)"):
        job(tmp_path, "wrong", 2, 4, labels=6)
