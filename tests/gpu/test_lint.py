"""Every rule of gpu.lint finds its fault, and a sound net passes without one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.lint import data_rules, forks, net_rules, solver_rules, weight_rules
from gpu.lint.__main__ import main
from gpu.lint.check import _COVERAGE, _NET_RULES, check
from gpu.lint.finding import SEVERITIES, Finding
from profiler.errors import StallscopeError

ROOT = Path(__file__).parents[2]
DATA = """
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  data_param { source: "train_lmdb" batch_size: 4 } transform_param { scale: 0.00390625 } }
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TEST }
  data_param { source: "test_lmdb" batch_size: 10 } transform_param { scale: 0.00390625 } }
"""
CONV = """layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 8 kernel_size: 3 weight_filler { type: "xavier" } } }
"""
LOSS = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }\n'
SOLVER = """net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" momentum: 0.9 max_iter: 100 random_seed: 1
test_iter: 10 test_interval: 50
"""


def ip(bottom: str = "conv", name: str = "ip", filler: str = 'weight_filler { type: "xavier" }', more: str = "") -> str:
    return f"""layer {{ name: "{name}" type: "InnerProduct" bottom: "{bottom}" top: "{name}" {more}
      inner_product_param {{ num_output: 10 {filler} }} }}\n"""


def layer(kind: str, bottom: str, top: str, more: str = "") -> str:
    return f'layer {{ name: "L" type: "{kind}" bottom: "{bottom}" top: "{top}" {more} }}\n'


SOUND = DATA + CONV + ip() + LOSS


def inspection(**changes: Any) -> dict[str, Any]:
    document = {
        "schema": 1,
        "path": "/data/train_lmdb",
        "backend": "lmdb",
        "records": 1000,
        "shapes": {"3x32x32": 1000},
        "encodings": {"raw": 1000},
        "labels": {"present": 1000, "absent": 0, "vectors": 0, "min": 0, "max": 9, "classes": 10},
        "channel_mean": [100.0, 110.0, 120.0],
        "bad_records": 0,
        "warnings": [],
    }
    return document | changes


def find(
    tmp_path: Path, net: str, solver: str | None = None, data: list[dict[str, Any]] | None = None
) -> list[Finding]:
    (tmp_path / "net.prototxt").write_text(net)
    if solver is not None:
        (tmp_path / "solver.prototxt").write_text(solver)
    return check(tmp_path / "net.prototxt", None if solver is None else tmp_path / "solver.prototxt", data or [])


def conv(settings_: str, kind: str = "Convolution", more: str = "") -> str:
    text = f'layer {{ name: "L" type: "{kind}" bottom: "data" top: "conv" {more} convolution_param {{ {settings_} }} }}'
    return DATA + text + ip() + LOSS


TRANSFORM = "transform_param { scale: 0.00390625 }"
NETS: dict[str, tuple[str, str | None]] = {
    "implicit-filler": (DATA + ip("data", filler="") + LOSS, "ip"),
    "zero-weights": (DATA + ip("data", filler='weight_filler { type: "constant" }') + LOSS, "ip"),
    "equal-weights": (DATA + ip("data", filler='weight_filler { type: "constant" value: 2 }') + LOSS, "ip"),
    "zero-scale": (
        DATA
        + CONV
        + layer("Scale", "conv", "s", 'scale_param { filler { type: "constant" value: 0 } }')
        + ip("s")
        + LOSS,
        "L",
    ),
    "gaussian-std": (DATA + ip("data", filler='weight_filler { type: "gaussian" }') + LOSS, "ip"),
    "uniform-range": (DATA + ip("data", filler='weight_filler { type: "uniform" max: 0.1 }') + LOSS, "ip"),
    "bilinear-type": (DATA + ip("data", filler='weight_filler { type: "bilinear" }') + LOSS, "ip"),
    "bilinear-group": (
        conv('num_output: 3 kernel_size: 4 stride: 2 weight_filler { type: "bilinear" }', "Deconvolution"),
        "L",
    ),
    "bilinear-kernel": (
        conv('num_output: 3 group: 3 kernel_h: 4 kernel_w: 2 weight_filler { type: "bilinear" }', "Deconvolution"),
        "L",
    ),
    "bilinear-factor": (
        conv('num_output: 3 group: 3 kernel_size: 5 stride: 2 weight_filler { type: "bilinear" }', "Deconvolution"),
        "L",
    ),
    "bilinear-learned": (
        conv('num_output: 3 group: 3 kernel_size: 4 stride: 2 weight_filler { type: "bilinear" }', "Deconvolution"),
        "L",
    ),
    "missing-blob": (DATA + ip("nowhere") + LOSS, "ip"),
    "double-blob": (SOUND + 'layer { name: "M" type: "ReLU" bottom: "conv" top: "ip" }', "M"),
    "in-place-type": (DATA + CONV + layer("LRN", "conv", "conv") + ip() + LOSS, "L"),
    "in-place-overwrites": (
        DATA
        + CONV
        + layer("Sigmoid", "conv", "s")
        + 'layer { name: "over" type: "Power" bottom: "s" top: "s" power_param { scale: 2 } }'
        + ip("s")
        + LOSS,
        "over",
    ),
    "in-place-gradient": (
        DATA + CONV + layer("ReLU", "conv", "conv", "relu_param { negative_slope: -0.5 }") + ip() + LOSS,
        "L",
    ),
    "in-place-copied": (
        DATA
        + CONV
        + 'layer { name: "before" type: "Pooling" bottom: "conv" top: "p" pooling_param { kernel_size: 30 } }'
        + layer("ReLU", "conv", "conv")
        + ip("conv")
        + ip("p", "ip2")
        + LOSS
        + LOSS.replace("loss", "loss2").replace('"ip"', '"ip2"'),
        "L",
    ),
    "in-place-input": (DATA + layer("ReLU", "data", "data") + CONV + ip() + LOSS, "L"),
    "no-loss": (DATA + CONV + ip(), None),
    "dead-parameters": (SOUND + ip("conv", "aside") + layer("Silence", "aside", "x").replace('top: "x"', ""), "aside"),
    "idle-loss": (
        DATA
        + CONV
        + ip()
        + LOSS
        + layer("EuclideanLoss", "data", "l2").replace('top: "l2"', 'bottom: "data" top: "l2"'),
        "L",
    ),
    "unread-blob": (SOUND + layer("Power", "conv", "x", "power_param { scale: 2 }"), "L"),
    "no-effect": (
        DATA + CONV + layer("Dropout", "conv", "conv", "dropout_param { dropout_ratio: 0 }") + ip() + LOSS,
        "L",
    ),
    "double-activation": (DATA + CONV + ip(name="scores") + layer("Softmax", "scores", "ip") + LOSS, "loss"),
    "swapped-bottoms": (
        DATA + CONV + ip() + LOSS + layer("Accuracy", "label", "acc").replace('top: "acc"', 'bottom: "ip" top: "acc"'),
        "L",
    ),
    "batch-norm-lr": (DATA + CONV + layer("BatchNorm", "conv", "bn", "param { lr_mult: 1 }") + ip("bn") + LOSS, "L"),
    "batch-norm-scale": (DATA + CONV + layer("BatchNorm", "conv", "bn") + ip("bn") + LOSS, "L"),
    "batch-norm-stats": (
        DATA + CONV + layer("BatchNorm", "conv", "bn", "batch_norm_param { use_global_stats: true }") + ip("bn") + LOSS,
        "L",
    ),
    "bias-before-norm": (DATA + CONV + layer("BatchNorm", "conv", "bn") + ip("bn") + LOSS, "conv"),
    "never-used": (SOUND + layer("Power", "conv", "x", 'include { stage: "deploy" }'), "L"),
    "no-test-source": (
        DATA.split("layer", 2)[0]
        + "layer"
        + DATA.split("layer", 2)[1]
        + CONV
        + ip()
        + LOSS
        + layer("Accuracy", "ip", "acc", "include { phase: TEST }").replace('top: "acc"', 'bottom: "label" top: "acc"'),
        None,
    ),
}
SOLVERS = {
    "solver-refused": SOLVER + 'type: "AdaGrad"',
    "solver-no-effect": SOLVER + "layer_wise_reduce: false",
    "solver-net": SOLVER.replace("net:", "test_net:"),
    "solver-other-net": SOLVER.replace("net.prototxt", "other.prototxt"),
    "missing-seed": SOLVER.replace("random_seed: 1", ""),
    "no-iterations": SOLVER.replace("max_iter: 100", ""),
    "learning-rate": SOLVER.replace("base_lr: 0.01", ""),
    "no-lr-policy": SOLVER.replace('lr_policy: "fixed"', ""),
    "constant-rate": SOLVER.replace('lr_policy: "fixed"', 'lr_policy: "poly"'),
    "late-steps": SOLVER.replace('lr_policy: "fixed"', 'lr_policy: "step" gamma: 0.1 stepsize: 100'),
    "test-iter": SOLVER.replace("test_iter: 10", ""),
    "never-tests": SOLVER.replace("test_interval: 50", ""),
    "no-momentum": SOLVER.replace("momentum: 0.9", 'type: "Nesterov"'),
    "solver-unused": SOLVER + "rms_decay: 0.9",
    "adam-rate": SOLVER + 'type: "Adam"',
    "snapshot-prefix": SOLVER + "snapshot: 10",
}
DATABASES: dict[str, tuple[dict[str, Any], str]] = {
    "label-range": ({"labels": {"min": 0, "max": 10}}, TRANSFORM),
    "unused-classes": ({"labels": {"min": 0, "max": 8}}, TRANSFORM),
    "label-kind": ({"labels": {"min": 0, "max": 9, "absent": 3}}, TRANSFORM),
    "crop-size": ({}, "transform_param { scale: 1 crop_size: 33 }"),
    "sizes-differ": ({"shapes": {"3x32x32": 1, "3x32x40": 1}}, TRANSFORM),
    "channels-differ": ({"shapes": {"3x32x32": 1, "1x32x32": 1}}, TRANSFORM),
    "mean-values": ({}, "transform_param { mean_value: 100 mean_value: 110 }"),
    "far-mean": ({}, "transform_param { mean_value: 120 mean_value: 110 mean_value: 10 }"),
    "mean-file": ({}, 'transform_param { mean_file: "nowhere.binaryproto" }'),
    "large-batch": ({"records": 3}, TRANSFORM),
    "bad-records": ({"bad_records": 2}, TRANSFORM),
    "unscaled": ({}, ""),
    "data-warning": ({"warnings": ["labels are sorted"]}, TRANSFORM),
}


def test_every_rule_has_a_case_here() -> None:
    tables = (weight_rules.RULES, net_rules.RULES, _NET_RULES, solver_rules.RULES, data_rules.RULES, _COVERAGE)
    tables += (data_rules.UNPAIRED,)
    rules = [rule.id for table in tables for rule in table]
    assert len(rules) == len(set(rules))
    alone = {"iter-size-norm", "no-test-data", "test-coverage"}  # need a net, a solver and data together, see below
    alone |= {"data-unused"}  # tests/gpu/test_lint_data.py
    assert set(rules) == {*NETS, *SOLVERS, *DATABASES, *alone}
    assert all(rule.severity in SEVERITIES for table in tables for rule in table)


def test_a_sound_net_has_no_findings(tmp_path: Path) -> None:
    data = [inspection(), inspection(path="/data/test_lmdb", records=100)]
    assert find(tmp_path, SOUND, SOLVER, data) == []


@pytest.mark.parametrize("rule", NETS)
def test_rule_about_nets(tmp_path: Path, rule: str) -> None:
    net, where = NETS[rule]
    assert (rule, where) in {(finding.rule, finding.layer) for finding in find(tmp_path, net)}


@pytest.mark.parametrize("rule", SOLVERS)
def test_rule_about_solvers(tmp_path: Path, rule: str) -> None:
    found = {finding.rule for finding in find(tmp_path, SOUND, SOLVERS[rule])}
    assert rule in found


@pytest.mark.parametrize("rule", DATABASES)
def test_rule_about_data(tmp_path: Path, rule: str) -> None:
    changes, transform = DATABASES[rule]
    found = find(tmp_path, SOUND.replace(TRANSFORM, transform), None, [inspection(**changes)])
    assert [finding.layer for finding in found if finding.rule == rule] == (
        ["ip"] if rule in ("label-range", "unused-classes") else ["data"]
    )
    assert all(finding.phases == ["TRAIN"] for finding in found if finding.rule == rule)  # the database's name decides


def test_rules_about_several_files(tmp_path: Path) -> None:
    norm = DATA + CONV + layer("BatchNorm", "conv", "bn") + ip("bn") + LOSS
    assert "iter-size-norm" in {f.rule for f in find(tmp_path, norm, SOLVER + "iter_size: 2")}
    untested = SOUND.replace("include { phase: TEST }", 'include { phase: TEST stage: "x" }')
    assert "no-test-data" in {f.rule for f in find(tmp_path, untested, SOLVER)}
    test_set = inspection(path="/data/test_lmdb", records=99)
    [finding] = find(tmp_path, SOUND, SOLVER, [inspection(), test_set])
    assert (finding.rule, finding.severity) == ("test-coverage", "note")
    assert "reads twice 1 of 99 records" in finding.what


def test_fields_of_forks_are_named_with_line_and_fork(tmp_path: Path) -> None:
    net = SOUND.replace(TRANSFORM, "transform_param {\n scale: 0.00390625\n resize_param { height: 300 }\n}", 1)
    net = net.replace("batch_size: 10", "batch_size: 10 threads: 3").replace(
        "kernel_size: 3", "kernel_size: 3 kernal: 3"
    )
    found = {finding.what for finding in find(tmp_path, net) if finding.rule == "unknown-field"}
    lines = net.splitlines()

    def line(text: str) -> int:
        return next(number for number, row in enumerate(lines, 1) if text in row)

    assert found == {
        f"line {line('resize_param')}: TransformationParameter has no field 'resize_param' in BVLC Caffe 1.0; "
        "caffe-ssd added it",
        f"line {line('threads')}: DataParameter has no field 'threads' in BVLC Caffe 1.0; NVIDIA's Caffe added it",
        f"line {line('kernal')}: ConvolutionParameter has no field 'kernal' in BVLC Caffe 1.0",
    }


def test_what_follows_an_unknown_field_is_still_looked_at(tmp_path: Path) -> None:
    net = (DATA + ip("data", filler="") + LOSS).replace(TRANSFORM, "transform_param { crop_h: 3 }")
    rules = {finding.rule for finding in find(tmp_path, net, SOLVER + "max_epoch: 3")}
    assert {"unknown-field", "implicit-filler"} <= rules


def test_a_net_of_caffe2_is_called_that(tmp_path: Path) -> None:
    net = 'name: "n"\nop {\n input: "a"\n output: "b"\n type: "Relu"\n}\nexternal_input: "a"\n'
    found = find(tmp_path, net)
    assert [finding.severity for finding in found] == ["error", "error"]
    assert all("Caffe2" in finding.what for finding in found)


def test_types_of_forks(tmp_path: Path) -> None:
    found = find(tmp_path, SOUND + layer("Permute", "conv", "x") + layer("Reelu", "conv", "y").replace('"L"', '"M"'))
    assert {(f.layer, "caffe-ssd" in f.what) for f in found if f.rule == "unknown-type"} == {("L", True), ("M", False)}


def test_no_field_of_our_own_counts_as_a_forks() -> None:
    from datasets import caffe_pb2

    known = {
        field.name
        for message in vars(caffe_pb2).values()
        if hasattr(message, "DESCRIPTOR") and hasattr(message.DESCRIPTOR, "fields")
        for field in message.DESCRIPTOR.fields
    }
    shared = {"scale_filler", "bias_filler", "engine"}
    assert not known.intersection(forks.FIELDS)
    assert {name for _, name in forks.BY_MESSAGE if name in known} <= shared


def test_all_refused_settings_are_listed(tmp_path: Path) -> None:
    net = SOUND.replace("num_output: 8", "num_output: 0").replace("num_output: 10", "num_output: 0")
    found = {finding.what for finding in find(tmp_path, net) if finding.rule == "refused-setting"}
    assert len(found) == 2
    assert all("num_output is missing or 0" in what for what in found)


def test_findings_of_both_phases_are_one(tmp_path: Path) -> None:
    [finding] = find(tmp_path, DATA + ip("data", filler="") + LOSS)
    assert finding.phases == ["TRAIN", "TEST"]


def test_ignored_labels_are_no_fault(tmp_path: Path) -> None:
    net = SOUND.replace('top: "loss"', 'top: "loss" loss_param { ignore_label: 255 }')
    data = [inspection(labels={"min": 0, "max": 255})]
    assert "label-range" not in {finding.rule for finding in find(tmp_path, net, None, data)}
    data = [inspection(labels={"min": -1, "max": 255})]
    assert "label-range" in {finding.rule for finding in find(tmp_path, net, None, data)}


def test_a_mean_image_of_another_size(tmp_path: Path) -> None:
    mean = ROOT / "tests" / "data" / "proto" / "mean_40x48.binaryproto"
    net = SOUND.replace(TRANSFORM, f'transform_param {{ mean_file: "{mean}" }}')
    wrong = [f.what for f in find(tmp_path, net, None, [inspection()]) if f.rule == "mean-file"]
    assert wrong == ["the mean image mean_40x48.binaryproto is 3 x 40 x 48, records are 3 x 32 x 32"]
    right = find(tmp_path, net, None, [inspection(shapes={"3x40x48": 1000})])
    assert "mean-file" not in {finding.rule for finding in right}


def test_published_nets_pass() -> None:
    nets = sorted((ROOT / "examples" / "nets").glob("*.prototxt"))
    assert len(nets) >= 9
    worse = [(net.name, f.rule, f.layer) for net in nets for f in check(net) if f.severity != "note"]
    assert worse == []


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lint") / "inspect.json"
    path.write_text(json.dumps(inspection(labels={"min": 0, "max": 12, "absent": 0, "vectors": 0})))
    return path


def test_command_line(tmp_path: Path, inspected: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net, solver = tmp_path / "net.prototxt", tmp_path / "solver.prototxt"
    net.write_text(SOUND)
    solver.write_text(SOLVER)
    assert main([str(net), "--solver", str(solver)]) == 0
    assert "nothing found" in capsys.readouterr().out
    assert main([str(net), "--solver", str(solver), "--data", str(inspected), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert document["counts"] == {"error": 1, "warning": 0, "note": 0}
    [finding] = document["findings"]
    assert finding["rule"] == "label-range"
    assert finding["layer"] == "ip"
    assert all(finding[key] for key in ("what", "why", "do"))
    assert main([str(net), "--data", str(inspected)]) == 1
    assert "label-range" in capsys.readouterr().out


def test_notes_alone_are_fine(tmp_path: Path) -> None:
    net = tmp_path / "net.prototxt"
    net.write_text(SOUND + layer("Power", "conv", "x", "power_param { scale: 2 }"))
    assert main([str(net), "--json"]) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no layers"),
        ("layer {", "cannot be read"),
        ("layer { name: 3 }", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_unreadable_nets(tmp_path: Path, text: str | None, says: str) -> None:
    net = tmp_path / "net.prototxt"
    if text is not None:
        net.write_text(text)
    with pytest.raises(StallscopeError, match=says):
        main([str(net)])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 2, "path": "x", "records": 1, "shapes": {}, "labels": {}}']
)
def test_wrong_inspections(tmp_path: Path, text: str) -> None:
    (tmp_path / "net.prototxt").write_text(SOUND)
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(StallscopeError, match="no inspection of a data set"):
        main([str(tmp_path / "net.prototxt"), "--data", str(tmp_path / "d.json")])


@settings(max_examples=40)
@given(st.data())
def test_any_damage_to_a_net_is_told_and_never_a_crash(data: st.DataObject) -> None:
    pieces = re.findall(r"\w+|\s+|\W", SOUND)
    place = data.draw(st.integers(0, len(pieces) - 1))
    other = data.draw(st.sampled_from([*pieces, "", "0", "-1", '""', "blobs {}"]))
    text = "".join([*pieces[:place], other, *pieces[place + 1 :]])
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        net = Path(folder) / "net.prototxt"
        net.write_text(text)
        try:
            says = [finding.what for finding in check(net, None, [inspection()])]
        except StallscopeError as error:
            says = [str(error)] if str(net) in str(error) else [""]
        assert all(says)
