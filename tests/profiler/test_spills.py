"""A stall in a time in which Ray wrote objects to disk is told as that, and no more of it than the disk has cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from profiler import report, store
from profiler.events import Kind, Stage
from tests.profiler.synthetic import Job, Log, simulate, wall_s, write_run
from tests.profiler.test_stalls import blame, seconds

USUAL = 15.0
"""ms that a batch takes from the other node when nothing is wrong; a step computes for 20."""


def spilling(step: int) -> dict[str, float]:
    return {"augment": 45.0} if 80 <= step < 120 else {}


JOB = Job(augment=USUAL, slow=spilling)


def travelling(job: Job, spans: list[tuple[int, int]]) -> Log:
    """Batches that come from another node: what the simulation calls AUGMENT is the way. ``spans``: first and last
    step of the times in which Ray wrote to disk."""
    log = simulate(job)
    log.rows[:] = [(row[0], Stage.TRANSFER, *row[2:]) if row[1] == Stage.AUGMENT else row for row in log.rows]
    times = {row[6]: (row[7], row[8]) for row in log.rows if row[1] == Stage.BATCH}
    for first, last in spans:
        row = list(log.rows[0])
        row[:9] = Kind.SPAN, Stage.SPILL, 0, 0, -1, -1, -1, times[first][0], times[last][1]
        row[9:12] = -1, -1, -1
        row[12], row[13] = 5 << 20, 80 << 20
        log.rows.append(tuple(row))
    return log


def test_what_spilling_has_cost_is_named_with_its_figures_and_what_to_do() -> None:
    found = blame(JOB, travelling(JOB, [(80, 119)]))
    truth = wall_s(simulate(JOB)) - wall_s(simulate(JOB.without(slow=None)))
    top = found.causes[0]
    assert (top.where, top.why) == ("transfer", "spill")
    assert top.seconds == pytest.approx(truth, rel=0.05)
    assert top.evidence["spilled_mib"] == 80
    assert top.evidence["restored_mib"] == 5
    assert top.evidence["transfer_ms_usual"] == pytest.approx(USUAL, rel=0.01)
    assert {worst["step"] for worst in top.evidence["worst_steps"]} <= set(range(79, 122))
    assert "--object-store-memory" in top.remedy
    assert "80 MiB were written" in top.remedy
    assert "wrote objects to disk" in top.text
    assert sum(cause.share for cause in found.causes) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(
    ("job", "spans"),
    [
        (JOB, []),  # slow, and nothing was written
        (JOB, [(150, 180)]),  # written at another time
        (JOB.without(augment=60.0, slow=None), [(80, 119)]),  # written, and no slower for it than ever
    ],
)
def test_what_spilling_has_not_cost_is_not_blamed_on_it(job: Job, spans: list[tuple[int, int]]) -> None:
    found = blame(job, travelling(job, spans))
    assert seconds(found, "transfer") > 0.5
    assert seconds(found, "transfer", "spill") == 0


def test_spilling_all_the_time_is_blamed_and_that_no_transfer_was_usual_is_said() -> None:
    job = JOB.without(augment=60.0, slow=None)
    found = blame(job, travelling(job, [(0, 199)]))
    top = found.causes[0]
    assert (top.where, top.why) == ("transfer", "spill")
    assert top.share > 0.9
    assert top.evidence["transfer_ms_usual"] is None
    assert "every transfer" in top.evidence["transfer_ms_usual_reason"]


def test_the_report_says_so_in_its_first_sentence(tmp_path: Path) -> None:
    job = JOB.without(augment=60.0, slow=None)
    log = travelling(job, [(0, 199)])
    note: dict[str, Any] = {"note": "objects_spilled", "node": "host2", "store_mib": 100, "wall_ns": 1, "t_ns": 1}
    log.notes.append(note)
    made = report.build(store.load_run(write_run(tmp_path / "run", log)))
    assert "for data: transfer" in made.headline
    assert "; Ray wrote objects to disk." in made.headline
    assert [finding.level for finding in made.findings if finding.kind == "objects_spilled"] == ["warning"]
