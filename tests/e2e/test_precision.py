"""Jobs in fp16: the same bits whoever feeds them and across a resume, and a report that explains lost gradients."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.e2e import conftest
from tests.e2e.conftest import EXAMPLE, Databases, report
from tests.e2e.conftest import train_forked as train

STEPS = 24


@pytest.fixture(scope="module")
def solver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's solver with two test batches at the start and the end."""
    text = EXAMPLE.with_name("lenet_solver.prototxt").read_text()
    path = tmp_path_factory.mktemp("solver") / "solver.prototxt"
    path.write_text(text.replace("test_iter: 10", "test_iter: 2"))
    return path


def job(databases: Databases, solver: Path, folder: Path, *more: str, engine: str = "inline") -> list[str]:
    return [
        str(EXAMPLE), *databases.flags("lmdb"), f"--solver={solver}", f"--run.folder={folder}",
        "--data.train.batch=32", "--profile.samplers_hz=0", "--run.checkpoint_every=0", "--device.precision=fp16",
        f"--feed.engine={engine}", *more,
    ]  # fmt: skip


def result(folder: Path) -> list[str]:
    """Hashes of the weights and the state after all steps, and the loss scale."""
    files = [folder / "snapshots" / f"iter_{STEPS}{ending}" for ending in (".caffemodel", ".solverstate")]
    return [*(hashlib.sha256(file.read_bytes()).hexdigest() for file in files), sidecar(folder, STEPS)["loss_scale"]]


def sidecar(folder: Path, step: int) -> dict:
    return json.loads((folder / "snapshots" / f"iter_{step}.json").read_text())


@pytest.fixture(scope="module")
def reference(databases: Databases, solver: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("reference")
    done = train(*job(databases, solver, folder / "run", f"--run.iterations={STEPS}"), cwd=folder)
    assert done.code == 0, done.err + done.out
    assert "Warning" not in done.err
    return result(folder / "run")


@pytest.mark.ray
@pytest.mark.long
def test_worker_processes_change_no_bit(
    databases: Databases, solver: Path, reference: list[str], tmp_path: Path
) -> None:
    more = [f"--run.iterations={STEPS}", "--feed.workers=2"]
    done = conftest.train(*job(databases, solver, tmp_path / "run", *more, engine="ray"), cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    assert result(tmp_path / "run") == reference


@pytest.mark.long
def test_a_run_that_was_resumed_changes_no_bit_and_goes_on_with_its_scale(
    databases: Databases, solver: Path, reference: list[str], tmp_path: Path
) -> None:
    run, half = tmp_path / "run", STEPS // 2
    first = train(*job(databases, solver, run, f"--run.iterations={half}"), cwd=tmp_path)
    assert first.code == 0, first.err + first.out
    assert sidecar(run, half)["loss_scale"] == {"scale": 65536.0, "good": half, "skipped": 0, "in_a_row": 0}
    done = train(*job(databases, solver, run, f"--run.iterations={STEPS}", "--run.if_exists=resume"), cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    assert result(run) == reference
    assert reference[-1] == {"scale": 65536.0, "good": STEPS, "skipped": 0, "in_a_row": 0}

    # Told that the scale is its largest, the next part overflows, skips and backs off from there.
    path = run / "snapshots" / f"iter_{STEPS}.json"
    path.write_text(json.dumps(sidecar(run, STEPS) | {"loss_scale": {**reference[-1], "scale": 2.0**24}}))
    done = train(*job(databases, solver, run, f"--run.iterations={STEPS + 6}", "--run.if_exists=resume"), cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    last = sidecar(run, STEPS + 6)["loss_scale"]
    assert last["skipped"] >= 1
    assert last["scale"] == 2.0 ** (24 - last["skipped"])
    found = {finding["kind"]: finding for finding in report(run)["findings"]}
    assert f"it went from 1.67772e+07 to {last['scale']:g}" in found["loss_scale"]["text"]
    assert found["skipped_steps"]["step"] == STEPS
    assert "(gradients that are not finite, first in ip2.diff of layer ip2)" in found["skipped_steps"]["text"]


def test_the_report_names_lost_gradients_and_the_key_that_saves_them(
    databases: Databases, solver: Path, tmp_path: Path
) -> None:
    net = EXAMPLE.with_name("lenet_train_test.prototxt").read_text()
    assert 'type: "SoftmaxWithLoss"' in net
    path = tmp_path / "net.prototxt"
    path.write_text(net.replace('type: "SoftmaxWithLoss"', 'type: "SoftmaxWithLoss" loss_weight: 1e-7'))
    more = ["--run.iterations=4", f"--net={path}", "--device.loss_scale=1", "--device.keep_fp32=[conv1]"]
    done = train(*job(databases, solver, tmp_path / "run", *more), cwd=tmp_path)
    assert done.code == 0, done.err + done.out
    (found,) = [finding for finding in report(tmp_path / "run")["findings"] if finding["kind"] == "fp16_underflow"]
    assert found["level"] == "warning"
    assert "first at step 0 in ip2.diff of layer ip2 (backward)" in found["text"]
    assert "100 % of the gradients of ip2" in found["text"]
    assert "device.loss_scale: dynamic" in found["text"]


def test_a_layer_that_does_not_exist_is_named_before_anything_starts(
    databases: Databases, solver: Path, tmp_path: Path
) -> None:
    more = ["--run.iterations=4", "--device.keep_fp32=[conv9]"]
    done = train(*job(databases, solver, tmp_path / "run", *more), cwd=tmp_path)
    assert done.code == 2
    assert "keep_fp32 names layers that the net lacks" in done.err
    assert "conv9" in done.err
