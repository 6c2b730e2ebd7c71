"""What a job takes from a solver: nets of the phases with their stages, tests or none, and what is refused together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.settings import load
from profiler.errors import StallscopeError, UsageError
from tests.e2e.conftest import train_forked

DIGITS = Path(__file__).parents[1] / "data" / "db" / "mnist_test_lmdb"
REST = """
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = 'base_lr: 0.01 lr_policy: "fixed" max_iter: 4 random_seed: 3\n'
TESTS = "test_iter: 2 test_interval: 2\n"
MEMORY = """layer { name: "m" type: "MemoryData" top: "data" top: "label"
  memory_data_param { batch_size: 4 channels: 1 height: 5 width: 6 } }"""
INPUT = """layer { name: "i" type: "Input" top: "data" top: "label"
  input_param { shape { dim: 4 dim: 1 dim: 5 dim: 6 } shape { dim: 4 } } }"""
FED = {"data.train.source": "memory:records=20,shape=1x5x6,classes=10,seed=1"}


def data(source: str | Path, batch: int, rule: str) -> str:
    return (
        f'layer {{ name: "d" type: "Data" top: "data" top: "label" {rule} '
        f'data_param {{ source: "{source}" batch_size: {batch} }} }}\n'
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configured(solver: str, net: str | None = None, **flags: Any) -> Any:
    Path("solver.prototxt").write_text(SOLVER + solver)
    if net is not None:
        Path("net.prototxt").write_text(net + REST)
        flags["net"] = "net.prototxt"
    return load(None, {"solver": "solver.prototxt", "feed.engine": "inline", **flags})


# -- a test set that is never used -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rest",
    [
        data("nowhere", 4, "include { phase: TEST }"),
        data("nowhere", 4, "include { phase: TEST }") * 2,
        'layer { name: "w" type: "WindowData" top: "data" top: "label" include { phase: TEST } }\n',
        'layer { name: "p" type: "Python" top: "data" include { phase: TEST }'
        ' python_param { module: "gone" layer: "X" } }',
    ],
    ids=["no such folder", "two", "not supported", "no such module"],
)
@pytest.mark.parametrize("solver", ["", "test_iter: 2\n", "test_interval: 2\n"])
def test_what_is_never_tested_with_need_not_be_there(place: Path, rest: str, solver: str) -> None:
    """Caffe builds no test net then, and opens nothing for it."""
    net = data(DIGITS, 4, "include { phase: TRAIN }") + rest
    config = configured(solver, net)
    assert not config.tests
    assert config.data.train.source == str(DIGITS)
    assert any("never tests" in note for note in config.notes) is bool(solver)
    with pytest.raises(StallscopeError):
        configured(TESTS, net)


def test_a_test_set_of_the_configuration_that_is_not_used_is_noted(place: Path) -> None:
    net = data(DIGITS, 4, "")
    config = configured("", net, **{"data.test.source": str(DIGITS)})
    assert "data.test has no effect: solver.prototxt never tests" in config.notes
    with pytest.raises(UsageError, match=r"data\.test\.source: gone does not exist"):
        configured("", net, **{"data.test.source": "gone"})
    assert configured(TESTS, net, **{"data.test.source": str(DIGITS)}).tests


def test_a_job_that_never_tests_runs_without_its_test_set(place: Path) -> None:
    (place / "solver.prototxt").write_text(SOLVER)
    layers = data(DIGITS, 4, "include { phase: TRAIN }") + data("nowhere", 4, "include { phase: TEST }")
    (place / "net.prototxt").write_text(layers + REST)
    done = train_forked(
        "--net=net.prototxt", "--solver=solver.prototxt", "--feed.engine=inline", "--device.backend=numpy",
        "--profile.samplers_hz=0", cwd=place,
    )  # fmt: skip
    assert done.code == 0, done.err + done.out
    assert "data.test" not in done.out


# -- two nets, stages, levels -----------------------------------------------------------------------------------------


def test_a_net_for_each_phase_with_the_stages_of_the_solver(place: Path) -> None:
    """Data layers are looked for where the solver builds the net: in its file, with its stages and level."""
    (place / "train.prototxt").write_text(
        data(DIGITS, 4, 'include { stage: "a" }') + data("elsewhere", 9, 'exclude { stage: "a" }') + REST
    )
    (place / "test.prototxt").write_text(
        data("elsewhere", 9, "include { max_level: 1 }") + data(DIGITS, 5, "include { min_level: 2 }") + REST
    )
    solver = (
        'train_net: "train.prototxt" test_net: "test.prototxt" train_state { stage: "a" } test_state { level: 2 }\n'
    )
    config = configured(solver + TESTS)
    assert (config.data.train.batch, config.data.test.batch) == (4, 5)
    done = train_forked(
        "--solver=solver.prototxt", "--feed.engine=inline", "--device.backend=numpy", "--profile.samplers_hz=0",
        cwd=place,
    )  # fmt: skip
    assert done.code == 0, done.err + done.out
    assert [line.split()[2] for line in done.out.splitlines() if line.startswith("test after")] == ["0", "2", "4"]


def test_a_test_net_that_is_gone(place: Path) -> None:
    with pytest.raises(UsageError, match=r"solver\.prototxt: test_net: gone\.prototxt does not exist"):
        configured('test_net: "gone.prototxt"\n' + TESTS, data(DIGITS, 4, ""))


def test_what_a_job_cannot_follow_is_refused_at_once(place: Path) -> None:
    several = (
        'test_net: "a" test_net: "b" test_state { stage: "x" } test_state { level: 1 } test_iter: 2 test_iter: 3\n'
    )
    with pytest.raises(UsageError) as caught:
        configured(several + 'net_param { name: "inside" }\n', data(DIGITS, 4, ""))
    text = str(caught.value)
    for told in ("test_iter: [2, 3]", "test_net: ['a', 'b']", "test_state: ['stage: \"x\"', 'level: 1']", "net_param"):
        assert told in text
    with pytest.raises(UsageError, match="names two nets to train"):
        configured('net: "a" train_net: "b"\n', data(DIGITS, 4, ""))


# -- nets whose inputs the text describes -----------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "name"), [(MEMORY, "m"), (INPUT, "i")])
def test_the_batch_of_an_input_is_that_of_the_text(place: Path, layer: str, name: str) -> None:
    assert configured("", layer, **FED).data.train.batch == 4
    config = configured("", layer, **FED, **{"data.train.batch": 8})
    assert config.data.train.batch == 8
    assert f"data.train.batch: 8 of the configuration is used, not 4 of layer '{name}' of net.prototxt" in config.notes
    with pytest.raises(UsageError, match=r"data\.train has no batch"):
        configured("", 'layer { name: "i" type: "Input" top: "data" top: "label" }', **FED)


def test_memory_data_takes_images_of_its_own_size(place: Path) -> None:
    (place / "net.prototxt").write_text(MEMORY + REST)
    (place / "solver.prototxt").write_text(SOLVER)
    for width, code in ((6, 0), (7, 2)):
        done = train_forked(
            "--net=net.prototxt", "--solver=solver.prototxt", "--feed.engine=inline", "--device.backend=numpy",
            "--profile.samplers_hz=0", f"--run.folder=run{width}",
            f"--data.train.source=memory:records=20,shape=1x5x{width},classes=10,seed=1", cwd=place,
        )  # fmt: skip
        assert done.code == code, done.err + done.out
    assert "data.train does not fit layer 'm' (MemoryData)" in done.err
    assert "1 x 5 x 6" in done.err
    assert "1 x 5 x 7" in done.err


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("class X(gpu.PythonLayer): ...", "has no bottoms and does not say what it is"),
        (
            "class X(tests.pipeline.user_data.Noise):\n  batch = property(lambda s: '4', lambda s, v: None)",
            "batch that is none",
        ),
        (
            "class X(tests.pipeline.user_data.Noise):\n  batch = property(lambda s: 0, lambda s, v: None)",
            "batch that is none",
        ),
    ],
)
def test_python_data_layers_that_say_too_little(
    place: Path, body: str, told: str, request: pytest.FixtureRequest
) -> None:
    module = f"my_{abs(hash((body, place)))}"
    (place / f"{module}.py").write_text(f"import gpu\nimport tests.pipeline.user_data\n{body}\n")
    request.addfinalizer(lambda: sys.modules.pop(module, None))
    param = f'python_param {{ module: "{module}" layer: "X" }}'
    text = f'layer {{ name: "p" type: "Python" top: "data" top: "label" {param} }}'
    with pytest.raises(StallscopeError, match=told):
        configured("", text)


def test_a_learned_blob_is_no_input(place: Path) -> None:
    """A Parameter layer has no bottoms either, but nobody fills it."""
    text = INPUT + (
        'layer { name: "w" type: "Parameter" top: "w" parameter_param { shape { dim: 30 } } }\n'
        'layer { name: "s" type: "Silence" bottom: "w" }\n'
    )
    (place / "net.prototxt").write_text(text + REST)
    (place / "solver.prototxt").write_text(SOLVER)
    done = train_forked(
        "--net=net.prototxt", "--solver=solver.prototxt", "--feed.engine=inline", "--device.backend=numpy",
        "--profile.samplers_hz=0", f"--data.train.source={FED['data.train.source']}", cwd=place,
    )  # fmt: skip
    assert done.code == 0, done.err + done.out
