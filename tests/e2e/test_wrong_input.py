"""Whatever a person gets wrong ends with exit code 2 and one readable message, and leaves nothing behind."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import EXAMPLE, Databases, Finished, manifest, report, train, train_forked

NET = EXAMPLE.with_name("lenet_train_test.prototxt").read_text()
SOLVER = EXAMPLE.with_name("lenet_solver.prototxt").read_text()
SMALL = ["--feed.engine=inline", "--run.folder=run", "--profile.samplers_hz=0", "--data.train.batch=16"]


def _without_data_layers(net: str) -> str:
    """The net with its two data layers replaced by plain inputs."""
    first, last = net.index('layer {\n  name: "digits"'), net.index('layer {\n  name: "conv1"')
    inputs = 'input: "data" input_shape { dim: 16 dim: 1 dim: 28 dim: 28 } input: "label" input_shape { dim: 16 }\n'
    return net[:first] + inputs + net[last:]


def _solver(folder: Path) -> str:
    """The example's solver with tests of one batch."""
    path = folder.parent / "solver.prototxt"
    path.write_text(SOLVER.replace("test_iter: 10", "test_iter: 1"))
    return f"--solver={path}"


def _idx(folder: Path, labels: bytes) -> Path:
    """A tiny MNIST in idx files with these labels."""
    images = folder / "bad-images-idx3-ubyte"
    images.write_bytes(struct.pack(">4i", 2051, len(labels), 28, 28) + bytes(len(labels) * 28 * 28))
    (folder / "bad-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, len(labels)) + labels)
    return images


def _check(*arguments: str | Path, cwd: Path, says: list[str], train: Callable[..., Finished] = train_forked) -> None:
    done = train(*arguments, cwd=cwd)
    assert done.code == 2, f"{done.code}: {done.out}{done.err}"
    assert "Traceback" not in done.err + done.out
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.err
    assert len(done.err.splitlines()) <= 8, done.err
    for fragment in says:
        assert fragment in done.err, f"{fragment!r} is not in:\n{done.err}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing.yaml"], ["no configuration file missing.yaml"]),
        ([], ["no configuration given"]),
        ([EXAMPLE, "--data.train.source=nowhere"], ["data.train.source: nowhere does not exist"]),
        ([EXAMPLE, "--data.train.source=empty"], ["empty", "is empty", "data.mdb"]),
        ([EXAMPLE, "--data.train.source=text"], ["holds neither an LMDB nor a LevelDB"]),
        ([EXAMPLE, "--net=missing.prototxt"], ["net: missing.prototxt does not exist"]),
        ([EXAMPLE, "--feed.wrokers=3"], ["unknown key feed.wrokers", "did you mean feed.workers?"]),
        ([EXAMPLE, "--workers", "3"], ["unknown key workers", "did you mean feed.workers?"]),
        ([EXAMPLE, "--feed.workers=0"], ["feed.workers", "auto or an integer from 1 to 256"]),
        ([EXAMPLE, "--feed.workers"], ["--feed.workers", "expected one argument"]),
        ([EXAMPLE, "--trainers=2"], ["not supported in this version: trainers: 2"]),
        (
            [EXAMPLE, "--feed.threads=1", "--data.order.emit=arrival", "--device.deterministic=true"],
            ["data.order.emit: arrival and device.deterministic: true exclude each other"],
        ),
        ([EXAMPLE, "--data.train.backend=leveldb"], ["LMDB", "LEVELDB"]),
        ([EXAMPLE, "--data.train.tail=partial", "--data.train.batch=64"], ["tail: partial", "the last one has 32"]),
        ([EXAMPLE, "--data.transform.crop=29"], ["crop", "at most 28"]),
        ([EXAMPLE, "--data.transform.mean_value=[1,2,3]"], ["mean_value", "1 channel"]),
        ([EXAMPLE, "--data.transform.python=nothere:f"], ["transform.python", "nothere"]),
        (["list.yaml"], ["list.yaml holds no mapping"]),
        (["broken.yaml"], ["broken.yaml, line 2", "not valid YAML"]),
        (["typo.yaml"], ["typo.yaml: unknown key feed.worker", "did you mean feed.workers?"]),
        (["twice.yaml"], ["twice.yaml, line 2", "given twice"]),
        ([EXAMPLE, "--net=bad_field.prototxt"], ["bad_field.prototxt", "num_outputs"]),
        ([EXAMPLE, "--net=bad_bottom.prototxt"], ["pool7"]),
        ([EXAMPLE, "--solver=bad_solver.prototxt"], ["bad_solver.prototxt", "max_iters"]),
        ([EXAMPLE, "--nope=1"], ["unknown key nope"]),
        ([EXAMPLE, f"--run.folder={'x' * 300}"], ["run.folder: xxx", "cannot be used", "too long"]),
        ([EXAMPLE, "--net=huge.prototxt"], ["no memory for net 'LeNet'", "GiB available", "a smaller batch"]),
        ([EXAMPLE, f"--net={'x' * 300}"], ["net: xxx", "does not exist"]),
        (
            [EXAMPLE, "--data.train.source=memory:records=64,shape=3x28x28"],
            ["data.train has 3 channels, data.test has 1, and one net reads both", "layer 'conv1'", "force_gray"],
        ),
        (["no_data.yaml"], ["no data layer and the configuration has no data.train.source"]),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(
    databases: Databases, tmp_path: Path, arguments: list[str], says: list[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "notes.txt").write_text("no database")
    (tmp_path / "list.yaml").write_text("- net\n- solver\n")
    (tmp_path / "broken.yaml").write_text("feed: {workers: 2\nrun: {seed: 1}\n")
    (tmp_path / "typo.yaml").write_text("feed: {worker: 2}\n")
    (tmp_path / "twice.yaml").write_text("trainers: 1\ntrainers: 1\n")
    (tmp_path / "bad_field.prototxt").write_text(NET.replace("num_output: 20", "num_outputs: 20"))
    (tmp_path / "huge.prototxt").write_text(NET.replace("num_output: 500", "num_output: 2000000000"))
    (tmp_path / "bad_bottom.prototxt").write_text(NET.replace('bottom: "pool2"', 'bottom: "pool7"'))
    (tmp_path / "bad_solver.prototxt").write_text(SOLVER.replace("max_iter: 500", "max_iters: 500"))
    (tmp_path / "plain.prototxt").write_text(_without_data_layers(NET))
    (tmp_path / "plain_solver.prototxt").write_text(SOLVER)
    (tmp_path / "no_data.yaml").write_text("net: plain.prototxt\nsolver: plain_solver.prototxt\n")
    given = {str(word).partition("=")[0] for word in arguments}
    data = [flag for flag in databases.flags("lmdb") if flag.partition("=")[0] not in given]
    small = [flag for flag in SMALL if flag.partition("=")[0] not in given]
    flags = [*data, *small] if EXAMPLE in arguments else []
    start = train if arguments[:1] == ["missing.yaml"] else train_forked  # one in an interpreter of its own
    _check(*arguments, *flags, cwd=tmp_path, says=says, train=start)
    assert not (tmp_path / "run").exists(), "the corrected job is not refused because of this one"


def test_a_label_outside_of_the_nets_range(databases: Databases, tmp_path: Path) -> None:
    from datasets.convert import main

    assert main(["idx", str(_idx(tmp_path, bytes([10] * 16))), str(tmp_path / "bad_lmdb")]) == 0
    data = ["--data.train.source=bad_lmdb", databases.flags("lmdb")[1]]
    _check(EXAMPLE, *data, *SMALL, cwd=tmp_path, says=["label", "10"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ["inline", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.long])])
def test_a_failure_in_mid_run_leaves_a_report_of_what_was_done(
    databases: Databases, tmp_path: Path, engine: str
) -> None:
    """Record 70 makes the user's function fail: four batches of 16 are trained on before it comes."""
    from datasets.convert import main

    images = _idx(tmp_path, bytes([1] * 70 + [7] + [1] * 25))
    assert main(["idx", str(images), str(tmp_path / "bad_lmdb"), "--shuffle=off"]) == 0
    job = [EXAMPLE, "--data.train.source=bad_lmdb", databases.flags("lmdb")[1], *SMALL[1:]]
    flags = [
        f"--feed.engine={engine}", "--data.order.shuffle=none", "--data.test.transform.scale=0.00390625",
        "--data.test.transform.crop=24",
        "--data.transform.python=user_transforms:no_sevens",
    ]  # fmt: skip
    says = ["user_transforms:no_sevens", "record 70", "bad_lmdb", "a seven"]
    _check(*job, *flags, cwd=tmp_path, says=says, train=train if engine == "ray" else train_forked)
    outcome = manifest(tmp_path / "run")["outcome"]
    assert outcome["state"] == "failed"
    assert outcome["step"] == 4
    assert "record 70" in outcome["error"]
    document = report(tmp_path / "run")
    assert document["steps"] in (4, 5), "the step that failed may be shown as unfinished"
    assert "record 70" in "".join(finding["text"] for finding in document["findings"])


def test_a_used_run_folder_is_refused_and_a_foreign_folder_never_removed(databases: Databases, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("precious")
    job = [EXAMPLE, *databases.flags("lmdb"), *SMALL]
    _check(*job, cwd=tmp_path, says=["the run folder run is not empty", "--run.if_exists"])
    _check(*job, "--run.if_exists=replace", cwd=tmp_path, says=["does not look like a run"])
    assert (tmp_path / "run" / "thesis.txt").read_text() == "precious"


def test_a_cut_database_is_found_before_the_first_step(databases: Databases, tmp_path: Path) -> None:
    shutil.copytree(databases.folder / "train_lmdb", tmp_path / "cut_lmdb")
    whole = (tmp_path / "cut_lmdb" / "data.mdb").read_bytes()
    (tmp_path / "cut_lmdb" / "data.mdb").write_bytes(whole[: len(whole) // 2])
    data = ["--data.train.source=cut_lmdb", databases.flags("lmdb")[1]]
    _check(EXAMPLE, *data, *SMALL, cwd=tmp_path, says=["cut_lmdb", "copy"])


def test_a_wrong_job_does_not_cost_the_run_it_would_replace(databases: Databases, tmp_path: Path) -> None:
    job = [EXAMPLE, *databases.flags("lmdb"), *SMALL, _solver(tmp_path)]
    assert train_forked(*job, "--run.iterations=2", cwd=tmp_path).code == 0
    _check(*job, "--run.if_exists=replace", "--data.transform.crop=29", cwd=tmp_path, says=["at most 28"])
    assert (tmp_path / "run" / "snapshots" / "iter_2.json").exists()
    assert train_forked(*job, "--run.if_exists=replace", "--run.iterations=3", cwd=tmp_path).code == 0
    assert {path.stem for path in (tmp_path / "run" / "snapshots").iterdir()} == {"iter_3"}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_another_stream_is_not_resumed(databases: Databases, tmp_path: Path) -> None:
    job = [EXAMPLE, *databases.flags("lmdb"), *SMALL, _solver(tmp_path)]
    assert train_forked(*job, "--run.iterations=2", cwd=tmp_path).code == 0
    _check(*job, "--run.if_exists=resume", "--run.iterations=2", cwd=tmp_path, says=["done its 2 iterations"])
    for flag, name in (("--data.order.seed=9", "seed"), ("--data.transform.scale=0.5", "transform.scale")):
        _check(*job, "--run.if_exists=resume", "--run.iterations=4", flag, cwd=tmp_path, says=["iter_2", name])
    _check(
        *[word for word in job if "batch" not in str(word)], "--data.train.batch=8", "--run.if_exists=resume",
        "--run.iterations=4", cwd=tmp_path, says=["batch = 16", "batch = 8"],
    )  # fmt: skip


def test_a_run_whose_snapshots_are_all_damaged_is_not_begun_again(databases: Databases, tmp_path: Path) -> None:
    job = [EXAMPLE, *databases.flags("lmdb"), *SMALL, _solver(tmp_path)]
    assert train_forked(*job, "--run.iterations=2", cwd=tmp_path).code == 0
    weights = tmp_path / "run" / "snapshots" / "iter_2.caffemodel"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    more = [*job, "--run.if_exists=resume", "--run.iterations=4"]
    _check(*more, cwd=tmp_path, says=["iter_2 is damaged", "iter_2.caffemodel", "--run.if_exists replace"])
    weights.write_bytes(whole)
    done = train_forked(*more, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "resuming from iteration 2" in done.out


@pytest.mark.parametrize(("exists", "says"), [(True, "no snapshot in run"), (False, "no run in run to resume")])
def test_a_resume_from_nothing_says_so(databases: Databases, tmp_path: Path, exists: bool, says: str) -> None:
    if exists:
        (tmp_path / "run" / "snapshots").mkdir(parents=True)
    job = [EXAMPLE, *databases.flags("lmdb"), *SMALL, _solver(tmp_path), "--run.if_exists=resume", "--run.iterations=1"]
    done = train_forked(*job, cwd=tmp_path)
    assert done.code == 0, done.err
    assert f"note: {says}: starting at iteration 0" in done.out
