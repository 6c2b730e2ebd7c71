"""``emit: arrival`` in whole jobs and through Ray: what is resumed, what one slow worker costs, what a kill loses."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline import Feed, checkpoint, ray_runtime
from pipeline.spec import FeedSpec, TransformSpec
from profiler.errors import StallscopeError
from tests.pipeline.faults import audit
from tests.pipeline.test_iter_size import job

# -- a job -----------------------------------------------------------------------------------------------------------


def records_of(folder: Path) -> list[tuple[int, list[int]]]:
    """(step, record numbers) of all batches that the loop took, part after part, in the order of taking."""
    import pyarrow as pa

    rows: list[tuple[int, list[int]]] = []
    for path in sorted((folder / "records").glob("*.arrows"), key=lambda path: path.stat().st_mtime_ns):
        table = pa.ipc.open_stream(path.read_bytes()).read_all()
        rows += zip(table["step"].to_pylist(), table["ids"].to_pylist(), strict=True)
    return rows


def test_a_job_that_ends_with_a_gap_goes_on_with_what_is_missing(
    gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = checkpoint.write

    def write(folder: Path, iteration: int, *rest: Any) -> Any:
        made = original(folder, iteration, *rest)
        if iteration == 4:
            gate.set()
            raise StallscopeError("the light went out")
        return made

    monkeypatch.setattr(checkpoint, "write", write)
    flags = [
        "--data.order.emit=arrival", "--feed.threads=2", "--feed.depth=4", "--run.checkpoint_every=4",
        "--data.transform.python=tests.pipeline.functions:waits_at_the_gate",
    ]  # fmt: skip
    with pytest.raises(StallscopeError, match="the light went out"):
        job(tmp_path, "job", 2, 1, *flags)
    assert "note: data.order.emit: arrival takes batches as they become ready" in capsys.readouterr().out
    position = json.loads((tmp_path / "job" / "snapshots" / "iter_4.json").read_text())["position"]
    assert position["given"], "there is a gap"
    before = records_of(tmp_path / "job")
    assert len(before) == 4
    for name in ("events", "records"):  # of another process, as after a real end
        for path in (tmp_path / "job" / name).glob("*.arrows"):
            path.rename(path.with_stem(f"{path.stem}0"))
    assert job(tmp_path, "job", 2, 1, *flags, "--run.if_exists=resume") == 0
    taken = records_of(tmp_path / "job")
    assert taken[:4] == before
    assert sorted(step for step, _ in taken) == [*range(9)]
    with Feed(str(tmp_path / "db"), batch=2, seed=1, shuffle="full", stop_step=9) as feed:
        assert sorted(taken) == [(batch.step, batch.ids.tolist()) for batch in feed]
    found = {one["kind"]: one["text"] for one in json.loads((tmp_path / "job" / "report.json").read_text())["findings"]}
    assert "data.order.emit: arrival" in found["emission"]
    assert "this is the cause" in found["emission"]


# -- through Ray -----------------------------------------------------------------------------------------------------

UNEVEN = FeedSpec(
    "memory:records=960,shape=1x4x4", 20, shuffle="full", seed=3, tail="partial", depth=4, stop_step=96,
    fingerprints="step", engine="ray", workers=2, max_restarts=50,
    transform=TransformSpec(python="tests.pipeline.functions:uneven_batches"),
)  # fmt: skip


def run_uneven(spec: FeedSpec, folder: Path, kills: int = 0) -> tuple[float, list[int], list[tuple[int, int]], int]:
    """Seconds from the tenth batch on, the order of steps, (epoch, record) of all samples, and lost workers."""
    order: list[int] = []
    seen: list[tuple[int, int]] = []
    began = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STALLSCOPE_TEST_UNEVEN", str(folder / "slow"))
        patch.setenv("STALLSCOPE_TEST_DRIVER", str(os.getpid()))
        with ray_runtime.running(num_cpus=2), Feed(spec) as feed:
            for batch in feed:
                order.append(batch.step)
                seen += zip(batch.epochs.tolist(), batch.ids.tolist(), strict=True)
                began = time.monotonic() if len(order) == 10 else began
                if kills and len(order) % 25 == 0 and (pids := feed.stats()["workers"]):
                    kills -= 1
                    os.kill(pids[0], signal.SIGKILL)  # the slow one first
            return time.monotonic() - began, order, seen, feed.stats()["restarts"]


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.alone
def test_one_slow_worker_holds_up_strict_order_and_not_arrival(tmp_path: Path) -> None:
    """0.3 s a batch in one worker and 0.02 s in the other: 4 slots in order are worth 4 batches in 0.3 s; as they come
    the fast worker alone makes 15 meanwhile."""
    taken = {}
    for emit in ("strict", "arrival"):
        (tmp_path / emit).mkdir()
        spec = replace(UNEVEN, emit=emit, source="memory:records=1920,shape=1x4x4")  # type: ignore[arg-type]
        taken[emit], order, seen, _ = run_uneven(spec, tmp_path / emit)
        audit(seen, 1920, 1)
        assert (order == sorted(order)) == (emit == "strict")
    assert taken["strict"] > 1.8 * taken["arrival"], taken


@pytest.mark.ray
@pytest.mark.long
def test_killed_workers_lose_and_repeat_nothing(tmp_path: Path) -> None:
    with Feed(replace(UNEVEN, engine="inline", workers="auto")) as feed:
        fills = {batch.step: batch.hashes["fill"] for batch in feed}
    _, order, seen, lost = run_uneven(replace(UNEVEN, emit="arrival"), tmp_path, kills=3)
    assert lost >= 2
    assert sorted(order) == sorted(fills)
    audit(seen, 960, 2)
