"""A run that begins at a solver state of real Caffe: the data restart, as they do in Caffe, and the run says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from threadpoolctl import threadpool_limits

from datasets.convert import main as convert
from gpu.solverstate import read_state
from tests.e2e.conftest import IDX, ROOT
from tests.e2e.conftest import train_forked as train
from tests.gpu.training import lenet, mnist

DATA = ROOT / "tests" / "data"


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """MNIST in the order of Caffe's own tool: that of the source."""
    folder = tmp_path_factory.mktemp("mnist")
    for name, prefix in (("train", "train"), ("test", "t10k")):
        images = str(IDX / f"{prefix}-images-idx3-ubyte.gz")
        assert convert(["idx", images, str(folder / name), "--backend", "lmdb", "--shuffle", "off"]) == 0
    return [f"--data.{name}.source={folder / name}" for name in ("train", "test")]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Caffe's snapshot at 100, its net, and its solver, with the loss of every step on the terminal."""
    for ending in ("caffemodel", "solverstate"):
        shutil.copy(DATA / "lenet" / f"lenet_iter_100.{ending}", tmp_path)
    shutil.copy(DATA / "proto" / "lenet_train_test.prototxt", tmp_path / "net.prototxt")
    text = (DATA / "proto" / "lenet_solver.prototxt").read_text()
    text = (
        text.replace("proto/lenet_train_test.prototxt", "net.prototxt")
        .replace("display: 10", "display: 1")
        .replace("test_iter: 10", "test_iter: 1")
    )
    (tmp_path / "solver.prototxt").write_text(text)
    return tmp_path


def job(
    databases: list[str], files: Path, iterations: int, *more: str, state: str = "lenet_iter_100.solverstate"
) -> list[str]:
    return [
        *databases, f"--solver={files / 'solver.prototxt'}", f"--run.folder={files / 'run'}",
        f"--run.start_from={files / state}", f"--run.iterations={iterations}",
        "--data.order.shuffle=none", "--feed.engine=inline", "--profile.samplers_hz=0",
        "--profile.fingerprints=off", *more,
    ]  # fmt: skip


def ids(folder: Path) -> dict[int, list[int]]:
    import pyarrow as pa

    rows: dict[int, list[int]] = {}
    for path in (folder / "records").glob("ids-*.arrows"):
        table = pa.ipc.open_stream(path).read_all()
        rows.update(zip(table["step"].to_pylist(), table["ids"].to_pylist(), strict=True))
    return rows


def test_a_state_of_caffe_is_gone_on_from_with_data_at_record_0(databases: list[str], files: Path) -> None:
    done = train(*job(databases, files, 121), cwd=files)
    assert done.code == 0, done.err + done.out
    assert "resuming from iteration 100" in done.out
    assert "lenet_iter_100.solverstate says nothing of the data: they restart at record 0" in done.out
    assert ids(files / "run")[100] == list(range(64))
    sidecar = json.loads((files / "run" / "snapshots" / "iter_121.json").read_text())
    assert sidecar["position"]["origin"] == 100
    assert sidecar["epoch"] == 0
    assert read_state(files / "run" / "snapshots" / "iter_121.solverstate").iteration == 121
    # Caffe's log of the same resume: losses at 100, 110 and 120, accuracy at 100.
    shown = {}
    for line in done.out.splitlines():
        words = line.split()
        if words[:1] == ["step"] and "loss" in words:
            shown[int(words[1])] = float(words[words.index("loss") + 1])
    for step, loss in ((100, 0.202155), (110, 0.197337), (120, 0.152994)):
        assert shown[step + 1] == pytest.approx(loss, rel=2e-3), done.out
    # A resume of this run goes on in its own stream: the data do not restart again.
    done = train(*job(databases, files, 123, "--run.if_exists=resume"), cwd=files)
    assert done.code == 0, done.err + done.out
    assert "resuming from iteration 121" in done.out
    assert "restart at record 0" not in done.out
    assert ids(files / "run")[121] == list(range(21 * 64, 22 * 64))


def test_a_state_of_caffe_in_hdf5_is_gone_on_from(databases: list[str], files: Path) -> None:
    """Its own files at 20, two sub-batches a step."""
    for ending in ("solverstate.h5", "caffemodel.h5"):
        shutil.copy(DATA / "lenet" / f"lenet_h5_iter_20.{ending}", files)
    solver = lenet("lenet_solver_h5")
    text = (DATA / "proto" / "lenet_solver_h5.prototxt").read_text()
    (files / "solver.prototxt").write_text(text.replace("proto/lenet_train_test.prototxt", "net.prototxt"))
    state = "lenet_h5_iter_20.solverstate.h5"
    done = train(*job(databases, files, 22, state=state), cwd=files)
    assert done.code == 0, done.err + done.out
    assert "resuming from iteration 20" in done.out
    solver.restore(files / state)
    with threadpool_limits(1):
        for step in range(2):
            solver.step_on([mnist(2 * step), mnist(2 * step + 1)])
    found = read_state(files / "run" / "snapshots" / "iter_22.solverstate.h5")
    assert (found.iteration, found.solver_type) == (22, "SGD")
    for ours, theirs in zip(found.history, solver.history, strict=True):
        assert ours.tobytes() == theirs.tobytes()
    again = train(*job(databases, files, 23, "--run.if_exists=resume", state=state), cwd=files)
    assert again.code == 0, again.err + again.out
    assert "resuming from iteration 22" in again.out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda files: (files / "lenet_iter_100.caffemodel").unlink(), "the weights that belong to"),
        (lambda files: (files / "lenet_iter_100.solverstate").unlink(), "run.start_from"),
        (
            lambda files: shutil.copy(files / "lenet_iter_100.caffemodel", files / "lenet_iter_100.solverstate"),
            "is not a solver state",
        ),
    ],
)
def test_a_wrong_state_is_one_message_and_leaves_no_run(
    databases: list[str], files: Path, change: Callable[[Path], object], says: str
) -> None:
    change(files)
    done = train(*job(databases, files, 121), cwd=files)
    assert done.code == 2, done.out + done.err
    assert says in done.err
    assert "Traceback" not in done.err
    assert not (files / "run").exists()


def test_a_state_beyond_the_last_iteration(databases: list[str], files: Path) -> None:
    done = train(*job(databases, files, 100), cwd=files)
    assert done.code == 2, done.out + done.err
    assert "has 100 iterations behind it already" in done.err
    assert "--run.iterations 200" in done.err
