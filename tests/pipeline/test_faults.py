"""What goes wrong in the real world while a feed runs, as far as it needs no Ray; test_faults_ray.py has the rest."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from datasets.errors import DatasetChanged, DatasetCorrupt, DatasetTruncated
from pipeline import Feed, autopsy
from pipeline.crew import FeedError
from pipeline.process import Process
from pipeline.ring import Ring, State
from pipeline.shared import RingError
from pipeline.spec import FeedSpec, TransformSpec
from profiler import osread, report, store
from profiler.findings import lost_figures
from profiler.recorder import Recorder
from tests.pipeline import functions
from tests.pipeline.build import photos, picture, raw, write_lmdb
from tests.pipeline.faults import Saboteur, audit
from tests.pipeline.limited import memory_limit
from tests.pipeline.test_crew import both, deliver, engine

FUNCTIONS = "tests.pipeline.functions"
CROPS = "tests/data/db/crops96_raw_40x48_lmdb"
SPEC = FeedSpec(
    CROPS, 7, shuffle="full", seed=9, tail="partial", depth=4, stop_step=28, fingerprints="step", poison=True,
    stall_timeout_s=1.0, max_restarts=50,
    transform=TransformSpec(crop=24, mirror=True, python="tests.pipeline.functions:slow"),
)  # fmt: skip


# -- a step that is made twice -----------------------------------------------------------------------------------------


def dead() -> Process:
    with subprocess.Popen(["true"]) as process:
        return Process(process.pid)


@pytest.mark.parametrize("same_row", [False, True], ids=["by another worker", "by its replacement"])
@pytest.mark.parametrize("moment", ["claimed again", "ready again", "leased", "free again", "next step"])
def test_the_second_answer_for_a_step_is_discarded_whenever_it_comes(moment: str, same_row: bool) -> None:
    """The first worker was given up, its step is made again, and then the first one answers all the same."""
    ring = Ring.create(1, 4096)
    rows = (0, 0 if same_row else 1)
    ring.enter(0)
    late: Any = ring.claim(0)
    gone = dead()
    assert ring.reclaim(0, gone) == 0
    gone.close()
    ring.enter(rows[1])
    again: Any = ring.claim(rows[1])
    assert (again.step, again.slot, again.redo) == (late.step, late.slot, late.redo + 1)

    def answer(row: int, claim: Any, fill: int) -> None:
        ring.ready(row, claim, items=1, epoch=0, hashes={"fill": fill})

    state = State.FILLING
    if moment != "claimed again":
        answer(rows[1], again, 2)
        state = State.READY
    if moment in ("leased", "free again", "next step"):
        assert ring.lease(0).hashes["fill"] == 2
        state = State.LEASED
    if moment in ("free again", "next step"):
        ring.release(0)
        state = State.FREE
    if moment == "next step":
        following: Any = ring.claim(rows[1])
        assert following.step == 1
        state = State.FILLING
    with pytest.raises(RingError, match="which it does not hold"):
        answer(0, late, 1)
    assert ring.counts()[state.name.lower()] == 1, "and it has changed nothing"
    if moment == "next step":
        answer(rows[1], following, 3)
        assert ring.lease(1).hashes["fill"] == 3
    ring.close()


# -- a data set that changes under the feed ----------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def write_into(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))


def exchange(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy(path, other)
    write_into(other)
    os.replace(other, path)


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize(("harm", "error"), [(cut, DatasetTruncated), (write_into, DatasetChanged)])
def test_rows_of_an_hdf5_file_that_is_cut_or_written_to(
    tmp_path: Path, harm: Callable[[Path], None], error: type[Exception], policy: Any, compression: str | None
) -> None:
    """Its library gives zeros for what lies beyond the end."""
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as file:
        values = np.random.default_rng(0).random((256, 1, 8, 8), np.float32)
        file.create_dataset("data", data=values, compression=compression, chunks=(8, 1, 8, 8) if compression else None)
        file["label"] = np.arange(256, dtype=np.float32)
    options: dict[str, Any] = {"batch": 8, "epochs": 1, "on_bad_record": policy, "bad_record_cap": 1.0}
    with Feed(path, **options) as feed:
        next(feed)
        harm(path)
        with pytest.raises(error, match=r"rows\.h5"):
            list(feed)


def test_an_hdf5_file_that_is_exchanged_is_read_to_its_end(tmp_path: Path) -> None:
    """The file that was opened is still there for whoever has it open; who opens it later refuses the other."""
    path = tmp_path / "rows.h5"
    with h5py.File(path, "w") as file:
        file["data"] = np.arange(64, dtype=np.float32).reshape(64, 1, 1, 1)
        file["label"] = np.zeros(64, np.float32)
    with Feed(path, batch=8, epochs=1) as feed:
        got = [next(feed).data.ravel().tolist()]
        exchange(path)
        got += [batch.data.ravel().tolist() for batch in feed]
    assert sum(map(len, got)) == 64
    assert got[-1][-1] == 63.0


@pytest.mark.parametrize(
    ("harm", "error"), [(cut, DatasetChanged), (exchange, DatasetChanged), (os.unlink, DatasetCorrupt)]
)
def test_an_image_of_a_list_that_is_cut_exchanged_or_gone(
    tmp_path: Path, harm: Callable[[Path], None], error: type[Exception]
) -> None:
    path = photos(tmp_path)
    name = path.read_text().splitlines()[5].rsplit(" ", 1)[0]
    options: dict[str, Any] = {"batch": 1, "resize": (16, 16), "root": str(tmp_path / "crops"), "color": "color"}
    with Feed(path, **options) as feed:
        next(feed)
        harm(tmp_path / "crops" / name)
        with pytest.raises(error, match=name):
            list(itertools.islice(feed, 6))


# -- why a worker has died ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "how", "kills", "meaning", "hint"),
    [
        ("SIGKILL", "died", (3, 4), "killed by the kernel: out of memory", "fewer feed.workers"),
        ("unknown", "died", (3, 4), "killed by the kernel: out of memory", "fewer feed.workers"),
        ("SIGKILL", "died", (3, 3), "killed by someone: the kernel has killed nothing here", "a person"),
        ("SIGKILL", "died", (None, None), "killed by someone, or by the kernel for memory", "a person"),
        ("SIGKILL", "no sign of life for 60 s: killed", (3, 3), None, "inline"),
        ("SIGBUS", "died", (3, 3), "a mapped file shrank or is truncated", "verify"),
        ("SIGSEGV", "died", (3, 3), "a crash in native code", "faulthandler"),
        ("exit status 1", "died", (3, 3), None, "inline"),
        ("unknown", "died", (3, 3), None, "inline"),
    ],
)
def test_what_an_exit_status_stands_for(
    status: str, how: str, kills: tuple[Any, Any], meaning: str | None, hint: str
) -> None:
    """Ray calls every one of them 'possibly out of memory'."""
    group = FakeGroup(kills[0])
    vitals = autopsy.Vitals(None, autopsy.Kills(group))  # type: ignore[arg-type]
    group.kills = kills[1]
    found = vitals.meaning(status, how)
    assert (found or "").startswith(meaning or "")
    assert (found is None) == (meaning is None)
    assert hint in autopsy.hint(found or status)


class FakeGroup:
    """A control group in which the kernel has killed so many."""

    def __init__(self, kills: int | None) -> None:
        self.kills = kills

    def oom_kills(self) -> Any:
        return osread.Missing("") if self.kills is None else self.kills

    def memory(self) -> osread.CgroupMemory:
        return osread.CgroupMemory(300 << 20, 400 << 20, 100 << 20)


def test_each_kill_for_memory_accounts_for_one_death(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeGroup(5)
    kills = autopsy.Kills(group)  # type: ignore[arg-type]
    assert kills.claim() is False
    group.kills = 7
    assert [kills.claim(), kills.claim(), kills.claim()] == [True, True, False]
    group.kills = 8  # of somebody else's process, seen while all workers lived
    kills.look()
    now = time.monotonic()
    monkeypatch.setattr(autopsy.time, "monotonic", lambda: now + 60)
    assert kills.claim() is False
    group.kills = None
    assert kills.claim() is None


def test_a_worker_that_dies_is_told_with_its_signal_its_record_and_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case E7, really: SIGBUS, SIGSEGV, SIGKILL."""
    monkeypatch.setenv("STALLSCOPE_TEST_DEATHS", str(tmp_path))
    path = write_lmdb(tmp_path / "db", [raw(picture(i, (1, 8, 8)), i) for i in range(12)])
    spec = FeedSpec(path, 6, stop_step=2, max_restarts=2, transform=TransformSpec(python=f"{FUNCTIONS}:dies_thrice"))
    with Recorder.open(tmp_path / "run", "trainer", "trainer") as recorder:
        made = engine(spec, workers=1, recorder=recorder)
        with pytest.raises(FeedError, match="killed by someone") as caught:
            made.get(0)
        made.close()
    text = str(caught.value)
    assert "'record': 4, 'key': '00000004_img'" in text
    assert re.search(r"when last seen it had \d+ MiB resident, \d+ of them its own \(\d+\.\d s before\)", text)
    run = store.load_run(tmp_path / "run")
    lost = [note for note in run.notes if note["note"] == "worker_lost"]
    assert [note["exit"] for note in lost] == [how.name for how in functions.DEATHS]
    for note, meaning in zip(lost, ("a mapped file shrank or", "a crash in native", "killed by someone"), strict=True):
        assert str(note["meaning"]).startswith(meaning)
        assert (note["step"], note["record"], note["key"], note["records"]) == (0, 4, "00000004_img", [0, 5])
        assert 10 < note["own_mib"] <= note["rss_mib"] < 2000
        assert note["seen_s_before"] < 5
    findings = [finding.text for finding in report.build(run).findings if finding.kind == "worker_lost"]
    assert len(findings) == 3
    assert (
        "(died, SIGBUS, a mapped file shrank or is truncated); it was at record 4 (key '00000004_img')" in findings[0]
    )
    assert f"{lost[0]['rss_mib']} MiB resident" in findings[0]


def test_the_control_group_of_a_lost_worker_is_told() -> None:
    note = autopsy.Vitals(None, autopsy.Kills(FakeGroup(3))).figures()  # type: ignore[arg-type]
    assert lost_figures(note) == (
        "its control group 300 of 400 MiB, 100 of them page cache; processes killed for memory there so far: 3"
    )
    assert lost_figures({}) == ""


HOG = """
import sys
from dataclasses import replace
from pipeline.crew import FeedError
from tests.pipeline.test_crew import engine
from tests.pipeline.test_faults import SPEC
from pipeline.spec import TransformSpec
HOGS = TransformSpec(python="tests.pipeline.functions:hogs")
if __name__ == "__main__":
    made = engine(replace(SPEC, stall_timeout_s=60, max_restarts=0, transform=HOGS), 1)
    try:
        made.get(0)
    except FeedError as error:
        sys.stdout.write(str(error))
    finally:
        made.close()
"""


@pytest.mark.long
def test_a_worker_that_the_kernel_killed_for_memory_is_told_as_that(tmp_path: Path) -> None:
    script = tmp_path / "hog.py"
    script.write_text(HOG)
    with memory_limit(600 << 20) as group:
        done = group.run(str(script), env={**os.environ, "PYTHONPATH": os.getcwd()}, timeout=120, check=False)
        assert group.killed() >= 1, done.stdout + done.stderr
    assert "was lost while it made step 0" in done.stdout, done.stderr
    assert "(killed by the kernel: out of memory)" in done.stdout
    assert "of 600 MiB" in done.stdout, "the limit of its control group"
    assert re.search(r"killed for memory there so far: [1-9]", done.stdout)
    assert "fewer feed.workers" in done.stdout


# -- workers that are killed, stopped, slow ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with Feed(SPEC) as feed:
        return [batch.hashes["fill"] for batch in feed]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_two_epochs_with_a_tail_under_kills_and_stops(expected: list[int], seed: int) -> None:
    made, saboteur = engine(SPEC, workers=2), Saboteur(seed, most=4)
    seen: list[tuple[int, int]] = []
    got = []
    try:
        for step, fill in deliver(made, 0, 28):
            got.append(fill)
            slot, count = made.slots[step % 4], 7 if step % 14 < 13 else 5
            seen += zip(slot.epochs[:count].tolist(), slot.ids[:count].tolist(), strict=True)
            saboteur.after(step, made.pids)
    finally:
        made.close()
    assert got == expected
    audit(seen, 96, 2)
    assert len(saboteur.done) >= 2


@pytest.mark.long
def test_a_slow_worker_changes_neither_order_nor_bytes_and_no_batch_starves(tmp_path: Path) -> None:
    """The first process that asks is fifteen times as slow as the other."""
    path = write_lmdb(tmp_path / "db", [raw(picture(i, (1, 8, 8)), i % 10) for i in range(64)])
    spec = FeedSpec(path, 2, stop_step=64, depth=4, fingerprints="step")
    with Feed(spec) as feed:
        plain = [batch.hashes for batch in feed]
    slow = replace(spec, transform=TransformSpec(python="tests.pipeline.functions:uneven"))
    os.environ["STALLSCOPE_TEST_UNEVEN"] = str(tmp_path / "slow")
    try:
        made = engine(slow, workers=2)
        assert len(both(made)) == 2
        got, owners = [], []
        for step in range(64):
            ready = made.get(step)
            got.append(ready.hashes)
            owners.append(ready.owner)
            made.ring.release(step)
        made.close()
    finally:
        del os.environ["STALLSCOPE_TEST_UNEVEN"]
    assert got == plain
    counts = [owners.count(row) for row in (0, 1)]
    assert min(counts) >= 1, "what the slow one made is used as well"
    assert max(counts) > 1.5 * min(counts), "and the fast one makes more"


def test_workers_that_all_stop_are_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead producer that still has its process: never an endless wait."""
    made = engine(replace(SPEC, stall_timeout_s=0.5, max_restarts=0, stop_step=None), workers=1)
    try:
        made.get(0)
        made.ring.release(0)
        os.kill(made.pids[0], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(FeedError, match=r"worker 1 of the feed .* was lost") as caught:
            list(deliver(made, 1, 40))
        assert time.monotonic() - began < 60
        assert "no sign of life" in str(caught.value)
    finally:
        made.close()
