"""Configuration: precedence, ranges, and errors that name the key, what is allowed and what is near."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import keys, validate
from pipeline.settings import load, parse_flags, read_yaml
from profiler.errors import UsageError

NET = """
layer {{ name: "digits" type: "Data" top: "data" top: "label" include {{ phase: TRAIN }}
  transform_param {{ scale: 0.00390625 mirror: true crop_size: 20 }}
  data_param {{ source: "{train}" batch_size: 64 backend: LMDB }} }}
layer {{ name: "digits" type: "Data" top: "data" top: "label" include {{ phase: TEST }}
  transform_param {{ scale: 0.5 mean_value: 33.3 }}
  data_param {{ source: "{test}" batch_size: 100 }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param {{ num_output: 10 }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }}
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 50 test_iter: 1 test_interval: 10'


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a net, a solver, two (empty) data folders and a configuration that names only the solver."""
    for name in ("train_db", "test_db", "other_db"):
        (tmp_path / name).mkdir()
    (tmp_path / "net.prototxt").write_text(NET.format(train="train_db", test="test_db"))
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    (tmp_path / "job.yaml").write_text("solver: solver.prototxt\n")
    return tmp_path / "job.yaml"


def test_prototxts_supply_what_the_yaml_leaves_out(job: Path) -> None:
    config = load(job)
    assert config.net == str(job.parent / "net.prototxt")
    assert config.run.iterations == 50
    assert config.source("TRAIN").source == str(job.parent / "train_db")
    assert (config.source("TRAIN").batch, config.source("TEST").batch) == (64, 100)
    assert config.source("TRAIN").backend == "lmdb"
    assert config.source("TEST").backend is None, "a backend that was left out is for the folder to decide"
    train, test = config.transform("TRAIN"), config.transform("TEST")
    assert (train.crop, train.mirror, train.scale, train.mean_value) == (20, True, 0.00390625, ())
    assert (test.crop, test.mirror, test.scale, test.mean_value) == (0, False, 0.5, (33.3,))
    assert config.notes == ()


def test_settings_of_fp16_beside_fp32_are_noted(job: Path) -> None:
    document = "solver: solver.prototxt\ndevice: {keep_fp32: [ip], loss_scale: 8, precision: PRECISION}\n"
    job.write_text(document.replace("PRECISION", "fp32"))
    assert load(job).notes == tuple(
        f"device.{key} has no effect: device.precision is fp32" for key in ("keep_fp32", "loss_scale")
    )
    job.write_text(document.replace("PRECISION", "fp16"))
    assert load(job).notes == ()
    job.write_text(document.replace("PRECISION", "fp16, loss_scale_growth: 9"))
    assert load(job).notes == ("device.loss_scale_growth has no effect: device.loss_scale is a number",)


def test_the_yaml_wins_and_says_so(job: Path) -> None:
    job.write_text(
        "solver: solver.prototxt\n"
        "data: {train: {source: other_db, batch: 32}, transform: {scale: 0.25}}\n"
        "run: {iterations: 7}\n"
    )
    config = load(job)
    assert config.source("TRAIN").source == str(job.parent / "other_db")
    assert config.source("TRAIN").backend is None, "the prototxt's backend describes the prototxt's source"
    assert config.source("TRAIN").batch == 32
    assert config.transform("TRAIN").scale == config.transform("TEST").scale == 0.25
    assert config.run.iterations == 7
    text = "\n".join(config.notes)
    for expected in (
        "data.train.batch: 32 of the configuration is used, not 64",
        "data.train.source",
        "data.train.transform.scale: 0.25",
        "data.test.transform.scale: 0.25",
        "run.iterations: 7",
    ):
        assert expected in text


def test_flags_win_over_the_yaml_in_both_spellings(job: Path) -> None:
    config = load(job, ["--feed.workers", "4", "--feed.engine=inline", "--data.transform.mean_value", "[1, 2.5]"])
    assert config.feed.workers == 4
    assert config.feed.engine == "inline"
    assert config.transform("TRAIN").mean_value == (1.0, 2.5)


def test_paths_are_looked_up_in_the_current_directory_first(
    job: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    assert load(job).source("TRAIN").source == str(job.parent / "train_db")
    (elsewhere / "train_db").mkdir()
    assert load(job).source("TRAIN").source == "train_db"


def test_mirror_acts_in_train_only_unless_test_is_told(job: Path) -> None:
    shared = validate({"data": {"transform": {"mirror": True, "crop": 5}}})
    assert shared.transform("TRAIN").mirror
    assert not shared.transform("TEST").mirror
    assert shared.transform("TEST").crop == 5
    told = validate({"data": {"test": {"transform": {"mirror": True}}}})
    assert told.transform("TEST").mirror


def test_order_seed_falls_back_to_the_runs_seed() -> None:
    assert validate({"run": {"seed": 3}}).order_seed == 3
    assert validate({"run": {"seed": 3}, "data": {"order": {"seed": 0}}}).order_seed == 0


def test_configuration_is_frozen_and_survives_pickling() -> None:
    config = validate({}).with_notes("one")
    with pytest.raises(Exception, match="frozen"):
        config.trainers = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert pickle.loads(pickle.dumps(config)).notes == ("one",)


@pytest.mark.parametrize(
    ("document", "fragments"),
    [
        ({"fede": {}}, ["unknown key fede", "one of net, solver", "did you mean feed?"]),
        ({"feed": {"worker": 3}}, ["unknown key feed.worker", "did you mean feed.workers?", "depth"]),
        ({"workers": 3}, ["unknown key workers", "did you mean feed.workers?"]),
        ({"feed": {"workers": 0}}, ["feed.workers", "auto or an integer from 1 to 256", "0"]),
        ({"feed": {"workers": True}}, ["feed.workers", "auto or an integer from 1 to 256", "True"]),
        ({"feed": {"depth": "8"}}, ["feed.depth", "auto or an integer from 1 to 1024"]),
        ({"feed": 3}, ["feed has a value", "a mapping"]),
        ({"device": {"step_ms": -1}}, ["device.step_ms", "a number from 0", "-1"]),
        ({"device": {"step_ms": float("nan")}}, ["device.step_ms", "nan"]),
        ({"data": {"transform": {"mean_value": [1, "a"]}}}, ["data.transform.mean_value[1]", "'a'"]),
        ({"data": {"transform": {"python": "no_colon"}}}, ["data.transform.python", "module:function"]),
        ({"data": {"transform": {"force_color": True, "force_gray": True}}}, ["exclude each other"]),
        ({"data": {"train": {"tail": "cut"}}}, ["data.train.tail", "wrap, partial or drop"]),
        ({"data": {"on_bad_record": "ignore"}}, ["data.on_bad_record", "stop, skip or zero", "ignore"]),
        ({"data": {"bad_record_cap": 1.5}}, ["data.bad_record_cap", "a number from 0 to 1", "1.5"]),
        ({"data": {"train": {"source": []}}}, ["data.train.source", "or a list of them"]),
        ({"data": {"train": {"source": ["a", ""]}}}, ["data.train.source", "or a list of them"]),
        ({"run": {"if_exists": "overwrite"}}, ["run.if_exists", "refuse, replace or resume"]),
    ],
)
def test_errors_name_the_key_and_what_is_allowed(document: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        validate(document)
    for fragment in fragments:
        assert fragment.strip("'") in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainers", 2),
        ("shards", 4),
        ("profile.fingerprints", "layer"),
        ("chaos", [{"kill": 1}]),
    ],
)
def test_values_of_later_versions_are_refused_by_name(key: str, value: Any) -> None:
    document: dict[str, Any] = {}
    inner = document
    *parents, last = key.split(".")
    for parent in parents:
        inner = inner.setdefault(parent, {})
    inner[last] = value
    with pytest.raises(UsageError, match=f"not supported in this version: {key}:"):
        validate(document)


def test_every_key_says_what_is_allowed() -> None:
    assert all(description for _, description in keys())
    assert "feed.workers" in dict(keys())
    assert "data.test.transform.crop" in dict(keys())


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("a: [1, 2\nb: 3\n", ["line 2", "not valid YAML"]),
        ("- net\n- solver\n", ["holds no mapping", "list"]),
        ("just words\n", ["holds no mapping", "just words"]),
        ("net: a\nrun: {seed: 1}\nnet: b\n", ["line 3", "net is given twice"]),
        ("1: a\n", ["line 1", "is no text"]),
    ],
)
def test_yaml_errors_name_the_line(tmp_path: Path, text: str, fragments: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_yaml(path)
    for fragment in ["bad.yaml", *fragments]:
        assert fragment in str(caught.value)


def test_yaml_words_and_numbers_read_as_a_person_means_them(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("a: off\nb: 1e-3\nc: true\nd: no\ne: 12\nf: 1.5\ng: none\nh: .5\ni: 2024-01-02\n")
    assert read_yaml(path) == {
        "a": "off", "b": 1e-3, "c": True, "d": "no", "e": 12, "f": 1.5, "g": "none", "h": 0.5, "i": "2024-01-02",
    }  # fmt: skip
    path.write_text("")
    assert read_yaml(path) == {}


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["--feed.worker", "3"], ["unknown key feed.worker", "did you mean feed.workers?"]),
        (["--workers", "3"], ["unknown key workers", "did you mean feed.workers?"]),
        (["--feed.workers"], ["--feed.workers has no value", "auto or an integer"]),
        (["3"], ["unexpected argument 3"]),
        (["--run.seed", "1", "--run.seed=2"], ["--run.seed is given twice"]),
    ],
)
def test_wrong_flags_are_refused(words: list[str], fragments: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_flags(words)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("yaml", "fragments"),
    [
        ("net: net.prototxt\n", ["a net but no solver"]),
        ("{}\n", ["there is no net", "device.backend: emulated"]),
        ("device: {backend: emulated}\n", ["no length", "run.iterations"]),
        ("device: {backend: emulated}\nrun: {iterations: 3}\n", ["no data.train.source"]),
        ("solver: nothere.prototxt\n", ["solver: nothere.prototxt does not exist"]),
        (
            "device: {backend: emulated}\nrun: {iterations: 3}\ndata: {train: {source: nowhere, batch: 2}}\n",
            ["data.train.source: nowhere does not exist"],
        ),
        (
            "device: {backend: emulated}\nrun: {iterations: 3}\ndata: {train: {source: train_db}}\n",
            ["data.train has no batch"],
        ),
    ],
)
def test_incomplete_jobs_are_refused(job: Path, yaml: str, fragments: list[str]) -> None:
    job.write_text(yaml)
    with pytest.raises(UsageError) as caught:
        load(job)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_a_net_without_data_layer_needs_data(job: Path) -> None:
    text = (job.parent / "net.prototxt").read_text()
    bare = text[text.index('layer { name: "ip"') :]
    (job.parent / "net.prototxt").write_text(
        'input: "data" input_shape { dim: 2 dim: 1 dim: 4 dim: 4 } input: "label" input_shape { dim: 2 }' + bare
    )
    with pytest.raises(UsageError, match=r"no data layer and the configuration has no data\.train\.source"):
        load(job)
    job.write_text("solver: solver.prototxt\ndata: {train: {source: train_db, batch: 2}}\n")
    with pytest.raises(UsageError, match="there is no test set"):
        load(job)


def test_a_job_that_only_feeds_needs_neither_net_nor_solver(job: Path) -> None:
    job.write_text(
        "device: {backend: emulated}\nrun: {iterations: 3}\ndata: {train: {source: 'memory:synthetic', batch: 2}}\n"
    )
    config = load(job)
    assert config.only_feeds
    assert config.source("TRAIN").source == "memory:synthetic"


@pytest.mark.parametrize("word", ["nope", "lr", "xyz"])
def test_a_word_like_no_key_gets_no_guess(word: str) -> None:
    with pytest.raises(UsageError, match=f"unknown key {word}") as caught:
        parse_flags([f"--{word}", "1"])
    assert "did you mean" not in str(caught.value)


def test_arrival_is_noted_and_refused_beside_a_wish_for_equal_runs() -> None:
    order = {"data": {"order": {"emit": "arrival"}}}
    (note,) = validate(order).notes
    assert "the weights, differ from run to run" in note
    assert validate({**order, "device": {"deterministic": False}}).notes == (note,)
    with pytest.raises(UsageError, match="exclude each other"):
        validate({**order, "device": {"deterministic": True}})
    (note,) = validate({**order, "device": {"deterministic": True}, "feed": {"engine": "inline"}}).notes
    assert "changes nothing" in note
    with pytest.raises(UsageError, match="exclude each other"):
        validate({**order, "device": {"deterministic": True}, "feed": {"engine": "inline", "threads": 2}})
    assert validate({"device": {"deterministic": True}}).notes == ()
