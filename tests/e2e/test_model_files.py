"""Whole jobs on what others wrote: a V0 text trains as its V2 text does; debug shows what a training begins with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from gpu.caffemodel import read_weights
from gpu.prototxt import load_net
from tests.e2e.conftest import ROOT, train_forked

DATA = ROOT / "tests" / "data"
DIGITS = DATA / "db" / "mnist_test_lmdb"
V0 = """
name: "as in 2013"
layers { layer { name: "mnist" type: "data" source: "DIGITS" batchsize: 8 scale: 0.00390625 } top: "data" top: "label" }
layers { layer { name: "conv1" type: "conv" num_output: 4 kernelsize: 5 stride: 2
  weight_filler { type: "xavier" } bias_filler { type: "constant" } blobs_lr: 1. blobs_lr: 2. }
  bottom: "data" top: "conv1" }
layers { layer { name: "pool1" type: "pool" kernelsize: 2 stride: 2 pool: MAX } bottom: "conv1" top: "pool1" }
layers { layer { name: "pad2" type: "padding" pad: 2 } bottom: "pool1" top: "pad2" }
layers { layer { name: "conv2" type: "conv" num_output: 6 kernelsize: 5 weight_filler { type: "xavier" }
  bias_filler { type: "constant" } } bottom: "pad2" top: "conv2" }
layers { layer { name: "ip1" type: "innerproduct" num_output: 10 weight_filler { type: "xavier" }
  bias_filler { type: "constant" } weight_decay: 1. weight_decay: 0. } bottom: "conv2" top: "ip1" }
layers { layer { name: "relu1" type: "relu" } bottom: "ip1" top: "ip1" }
layers { layer { name: "drop1" type: "dropout" dropout_ratio: 0.2 } bottom: "ip1" top: "ip1" }
layers { layer { name: "loss" type: "softmax_loss" } bottom: "ip1" bottom: "label" }
"""
SOLVER = """base_lr: 0.01 momentum: 0.9 weight_decay: 0.0005 lr_policy: "inv" gamma: 0.0001 power: 0.75 max_iter: 12
display: 1 random_seed: 3\n"""


def job(folder: Path, net: str, run: str, *more: str, solver: str = "") -> str:
    (folder / f"{net}.solver").write_text(f'train_net: "{net}.prototxt" {SOLVER} {solver}')
    done = train_forked(
        f"--solver={net}.solver", f"--run.folder={run}", "--feed.engine=inline", "--device.backend=numpy",
        "--profile.samplers_hz=0", *more, cwd=folder,
    )  # fmt: skip
    assert done.code == 0, done.err + done.out
    return done.out + done.err


def test_a_v0_text_trains_to_the_bits_of_its_v2_text(tmp_path: Path) -> None:
    (tmp_path / "old.prototxt").write_text(V0.replace("DIGITS", str(DIGITS)))
    new = load_net(tmp_path / "old.prototxt")
    assert len(new.layer) == 8, "the padding has become part of conv2"
    (tmp_path / "new.prototxt").write_text(str(new))
    losses = [re.findall(r"^step +\d+ +loss (\S+)", job(tmp_path, net, net), re.M) for net in ("old", "new")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 12
    assert float(losses[0][-1]) < float(losses[0][0])
    weights = [read_weights(tmp_path / net / "snapshots" / "iter_12.caffemodel") for net in ("old", "new")]
    assert [list(each) for each in weights] == [["conv1", "conv2", "ip1"]] * 2
    for name, blobs in weights[0].items():
        for ours, theirs in zip(blobs, weights[1][name], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_weights_of_the_solver_are_told_layer_by_layer(tmp_path: Path) -> None:
    """Case D11: a renamed layer begins anew, and whoever started the job reads that it does."""
    text = V0.replace("DIGITS", str(DIGITS))
    (tmp_path / "net.prototxt").write_text(text)
    (tmp_path / "renamed.prototxt").write_text(text.replace('name: "ip1"', 'name: "head"'))
    job(tmp_path, "net", "first", "--run.iterations=1")
    weights = tmp_path / "first" / "snapshots" / "iter_1.caffemodel"
    said = job(tmp_path, "renamed", "second", "--run.iterations=1", solver=f'weights: "{weights}"')
    line = next(line for line in said.splitlines() if line.startswith("weights "))
    assert line == (
        f"weights {weights}: 2 layers copied; ignored, not in the net: ip1; "
        "left at initialisation, not in the file: head"
    )
    notes = (tmp_path / "second" / "events").glob("*.jsonl")
    told = [json.loads(text) for file in notes for text in file.read_text().splitlines()]
    (note,) = [note for note in told if note.get("note") == "weights_copied"]
    assert (note["copied"], note["ignored"], note["at_init"]) == (["conv1", "conv2"], ["ip1"], ["head"])
    # What is resumed has its weights from the snapshot, and nothing is said of others.
    more = ["--run.iterations=2", "--run.if_exists=resume"]
    assert f"weights {weights}:" not in job(tmp_path, "renamed", "second", *more, solver=f'weights: "{weights}"')


@pytest.mark.parametrize("form", ["BINARYPROTO", "HDF5"])
def test_debug_lists_the_weights_that_the_training_begins_with(tmp_path: Path, form: str) -> None:
    """Those of the snapshot, not what the fillers had drawn before it was read; and nothing of what libraries debug."""
    (tmp_path / "net.prototxt").write_text(V0.replace("DIGITS", str(DIGITS)))
    ending = ".h5" if form == "HDF5" else ""
    kind = f"snapshot_format: {form}"
    job(tmp_path, "net", "first", "--run.iterations=5", solver=kind)
    state = tmp_path / "first" / "snapshots" / f"iter_5.solverstate{ending}"
    more = ["--run.iterations=6", "--run.log_level=debug", f"--run.start_from={state}"]
    said = job(tmp_path, "net", "second", *more, solver=kind)
    weights = read_weights(state.with_name(f"iter_5.caffemodel{ending}"))
    lines = [line for line in said.splitlines() if line.startswith("DEBUG ")]
    assert {line.split()[1] for line in lines} == {"pipeline.job:"}
    notes = [
        json.loads(line) for file in (tmp_path / "second").rglob("*.jsonl") for line in file.read_text().splitlines()
    ]
    told = {note["layer"]: note["params"] for note in notes if note.get("note") == "layer"}
    assert told.keys() >= weights.keys()
    for name, blobs in weights.items():
        for param, values in zip(told[name], blobs, strict=True):
            assert param["shape"] == list(values.shape)
            assert param["mean"] == pytest.approx(float(values.astype(np.float64).mean()), rel=1e-6, abs=1e-12)
            assert f"mean {param['mean']:.3g}" in " ".join(line for line in lines if f"TRAIN {name} " in line)
