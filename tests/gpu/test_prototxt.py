"""Reading nets: formats, errors a person can act on, and the rules that pick the layers of a phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from datasets import caffe_pb2
from gpu.data_layers import DataLayer, Transform, data_layers
from gpu.lint.check import check
from gpu.net import Net
from gpu.prototxt import PrototxtError, filter_net, load_net, read_message
from gpu.solver import Solver
from profiler.errors import UsageError

LEGACY = Path(__file__).parents[1] / "data" / "legacy"


@pytest.mark.parametrize("name", ["v1_net", "v1_data_net"])
def test_v1_is_upgraded_as_caffe_does(name: str) -> None:
    assert load_net(LEGACY / f"{name}.prototxt") == load_net(LEGACY / f"{name}.upgraded.prototxt")


def test_net_inputs_become_an_input_layer() -> None:
    net = load_net('input: "a" input: "b" input_shape { dim: 2 dim: 3 } input_shape { dim: 4 } layer { name: "x" }')
    assert [layer.name for layer in net.layer] == ["input", "x"]
    assert [list(shape.dim) for shape in net.layer[0].input_param.shape] == [[2, 3], [4]]
    assert list(net.layer[0].top) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('layers { name: "a" type: RELU } layer { name: "b" type: "ReLU" }', "both 'layers' .*and 'layer'"),
        ('layers { name: "a" }', "'a'.*no type"),
        ('input: "a" input_dim: 3 layer { name: "x" }', "1 input_dim values for 1 inputs"),
        ('name: "empty"\n', "no layers"),
    ],
)
def test_formats_that_cannot_be_followed(text: str, message: str) -> None:
    with pytest.raises(PrototxtError, match=message):
        load_net(text)


def test_all_unknown_fields_are_reported_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text(
        'nmae: "x"\nlayer {\n  name: "a"  # a comment with a } in it\n  convolution_param { kernel: 3 num_output: 2 }\n'
        '  extra { text: "}" deeper [1, 2] }\n  type: "ReLU"\n}\n'
    )
    with pytest.raises(PrototxtError) as caught:
        load_net(path)
    assert str(path) in caught.value.what
    assert "3 unknown fields" in caught.value.what
    assert caught.value.found == (
        "line 1: 'nmae' in NetParameter; line 4: 'kernel' in ConvolutionParameter; line 5: 'extra' in LayerParameter"
    )


def test_a_bad_value_is_reported_with_its_place() -> None:
    with pytest.raises(PrototxtError) as caught:
        load_net('name: "x"\nlayer { pooling_param { pool: MIDDLE } }')
    assert "line 2" in caught.value.what
    assert "MIDDLE" in str(caught.value.found)
    with pytest.raises(PrototxtError, match="line 1"):
        load_net('name: "x" name: "y"\n')


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PrototxtError, match=r"missing\.prototxt.*No such file"):
        load_net(tmp_path / "missing.prototxt")
    with pytest.raises(PrototxtError, match="is empty"):
        load_net("")
    with pytest.raises(PrototxtError, match="directory"):
        load_net(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PrototxtError, match="not UTF-8"):
        load_net(tmp_path / "binary")


ONE_LINE_NET = 'input: "x" input_shape { dim: 2 dim: 3 } layer { name: "L" type: "ReLU" bottom: "x" top: "y" }'
ONE_LINE_SOLVER = 'base_lr: 0.25 lr_policy: "fixed"'
NET_READERS = {
    "load_net": load_net,
    "Net": Net,
    "data_layers": data_layers,
    "the net of a Solver": lambda net: Solver(ONE_LINE_SOLVER, net=net, backend="numpy"),
    "lint": check,
    "lint of a solver's": lambda net: check(net, ONE_LINE_SOLVER),
}
SOLVER_READERS = {
    "Solver": lambda solver: Solver(solver, net=ONE_LINE_NET, backend="numpy"),
    "lint": lambda solver: check(ONE_LINE_NET, solver),
    "read_message": lambda solver: read_message(solver, caffe_pb2.SolverParameter()),
}
READERS = [(call, ONE_LINE_NET) for call in NET_READERS.values()]
READERS += [(call, ONE_LINE_SOLVER) for call in SOLVER_READERS.values()]
each_reader = pytest.mark.parametrize(
    ("read", "text"), READERS, ids=[f"net, {name}" for name in NET_READERS] + [f"solver, {n}" for n in SOLVER_READERS]
)


@each_reader
def test_text_on_one_line_is_text(read: Any, text: str) -> None:
    read(text)
    read("  " + text)
    read(text.replace(" ", "\n"))


@each_reader
def test_a_file_is_a_path_however_it_is_named(
    read: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("net: 1", "a{b}.prototxt", "a b.prototxt"):
        Path(name).write_text(text)
        read(name)
        read(Path(name))
        read(tmp_path / name)
        with pytest.raises(PrototxtError, match=r"gone.*cannot be read: No such file"):
            read(Path("gone " + name))


@each_reader
def test_what_is_neither_text_nor_a_file(read: Any, text: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing.prototxt"
    for source in ("missing.prototxt", str(missing), missing, "s3://bucket/missing.prototxt", "missing"):
        with pytest.raises(PrototxtError, match=r"missing.*cannot be read: No such file"):
            read(source)
    for source in ("", "  "):
        with pytest.raises(PrototxtError, match="is empty: neither the path of a file nor text"):
            read(source)
    for folder in (tmp_path, str(tmp_path), "."):
        with pytest.raises(PrototxtError, match="cannot be read: Is a directory"):
            read(folder)
    with pytest.raises(PrototxtError, match="cannot be read: File name too long"):
        read("x" * 5000)
    with pytest.raises(PrototxtError, match=r"text, line 1, column \d+: cannot be read") as caught:
        read("debug_info:missing.prototxt")
    assert "no such file" in str(caught.value.hint)


RULES = """
layer { name: "always" }
layer { name: "train" include { phase: TRAIN } }
layer { name: "staged" include { stage: "a" not_stage: "b" } }
layer { name: "high" include { min_level: 2 } include { phase: TEST max_level: 0 } }
layer { name: "unless" exclude { phase: TEST stage: "a" } }
"""


@pytest.mark.parametrize(
    ("phase", "stages", "level", "kept"),
    [
        ("TRAIN", (), 0, {"always", "train", "unless"}),
        ("TRAIN", ("a",), 2, {"always", "train", "staged", "high", "unless"}),
        ("TEST", ("a",), 0, {"always", "staged", "high"}),
        ("TEST", ("a", "b"), 1, {"always"}),
        ("TEST", (), 1, {"always", "unless"}),
    ],
)
def test_rules(phase: str, stages: tuple[str, ...], level: int, kept: set[str]) -> None:
    filtered = filter_net(load_net(RULES), phase, stages, level)
    assert {layer.name for layer in filtered.net.layer} == kept
    assert {name for name, _, _ in filtered.excluded} == {"always", "train", "staged", "high", "unless"} - kept


def test_rules_say_why_and_cannot_be_mixed() -> None:
    reasons = {name: reason for name, _, reason in filter_net(load_net(RULES), "TEST", ("b",), 1).excluded}
    assert reasons["train"] == "it is for TRAIN"
    assert reasons["staged"] == "stage 'a' is missing"
    assert reasons["high"] == "level 1 is below min_level 2 and level 1 is above max_level 0"
    with pytest.raises(PrototxtError, match="'x' has both include and exclude"):
        filter_net(load_net('layer { name: "x" include { phase: TEST } exclude { stage: "a" } }'), "TEST")
    with pytest.raises(UsageError, match="unknown phase 'test'"):
        filter_net(load_net(RULES), "test")


def test_the_nets_own_state_adds_stages() -> None:
    net = load_net('state { stage: "a" level: 2 } layer { name: "x" include { stage: "a" min_level: 2 } }')
    assert len(filter_net(net, "TRAIN").net.layer) == 1


DATA = """
layer { name: "train" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  transform_param { scale: 0.5 crop_size: 24 mean_value: 1 mean_value: 2 }
  data_param { source: "db" batch_size: 64 backend: LMDB rand_skip: 3 prefetch: 2 } }
layer { name: "test" type: "Data" top: "data" include { phase: TEST } data_param { source: "db" } }
"""


def test_data_layers() -> None:
    assert data_layers(DATA, "TRAIN") == [
        DataLayer(
            name="train",
            phase="TRAIN",
            tops=("data", "label"),
            source="db",
            batch=64,
            backend="LMDB",
            transform=Transform(scale=0.5, crop=24, mean_value=(1.0, 2.0)),
            unused=("data_param.rand_skip", "data_param.prefetch"),
        )
    ]
    (test,) = data_layers(DATA, "TEST")
    assert (test.backend, test.batch, test.transform) == (None, None, Transform())  # silence is not Caffe's default
