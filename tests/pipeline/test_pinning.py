"""Whole jobs whose device page-locks the ring's slots, or is refused it: same bits, told once, nothing left."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu import arena
from gpu.emulated import EmulatedDevice
from gpu.pinned import PAGE, PinnedRanges, PinningWarning
from pipeline.run import run
from pipeline.settings import load
from profiler import report, store
from tests.pipeline.test_staging import NET, SOLVER

RING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*stallscope-ring", re.MULTILINE)
TESTS = " test_iter: 2 test_interval: 5"
STEPS = 12
SOURCE = "memory:records=40,shape=1x12x12"


def mapped() -> list[tuple[int, int]]:
    """Where rings lie in this process's memory."""
    return [(int(a, 16), int(b, 16)) for a, b in RING.findall(Path("/proc/self/maps").read_text())]


class Driver:
    """CUDA's two calls, as the emulated accelerator gets them: they know only memory of rings that is mapped now."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.asked, self.cleared = refuses, 0, 0
        self.held: dict[int, int] = {}

    def _fail(self, call: str) -> None:
        if call == self.refuses:
            raise RuntimeError(f"cudaErrorMemoryAllocation: {call}")

    def register(self, address: int, nbytes: int, flags: int) -> None:
        self.asked += 1
        assert address % PAGE == nbytes % PAGE == 0
        assert any(start <= address and address + nbytes <= end for start, end in mapped())
        self._fail("register")
        self.held[address] = nbytes

    def unregister(self, address: int) -> None:
        assert any(start <= address < end for start, end in mapped()), "unmapped before it was unpinned"
        del self.held[address]
        self._fail("unregister")

    def clear_error(self) -> None:
        self.cleared += 1


@pytest.fixture(autouse=True)
def nothing_stays_mapped() -> Iterator[None]:
    gc.collect()
    before = set(mapped())
    yield
    gc.collect()
    assert set(mapped()) <= before


def trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, driver: Driver | None
) -> tuple[list[Any], list[str], store.Run]:
    """What a job left that has to be the same in each, the warnings of pinning that were shown, and its run."""
    if driver is not None:
        made = EmulatedDevice.__init__

        def pinning(self: EmulatedDevice, *given: Any, **more: Any) -> None:
            made(self, *given, **more)
            self._pinned = PinnedRanges(driver.register, driver.unregister, driver.clear_error)

        monkeypatch.setattr(EmulatedDevice, "__init__", pinning)
    folder.mkdir()
    (folder / "net.prototxt").write_text(NET)
    (folder / "solver.prototxt").write_text(SOLVER + TESTS)
    flags = {
        "net": folder / "net.prototxt", "solver": folder / "solver.prototxt", "run.folder": folder / "run",
        "data.train.source": SOURCE, "data.train.batch": 4, "data.test.source": SOURCE, "data.test.batch": 4,
        "feed.engine": "inline", "feed.depth": 3, "feed.poison": "true", "run.iterations": STEPS,
        "device.backend": "emulated", "device.step_ms": 1, "device.h2d_delay_ms": 0.5,
        "run.log_level": "error", "profile.samplers_hz": 0,
    }  # fmt: skip
    config = load(None, [f"--{key}={value}" for key, value in flags.items()])
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert run(config) == 0
    monkeypatch.undo()
    done = store.load_run(folder / "run")
    prints = sorted(map(str, done.fingerprints.select(["step", "name", "ordered"]).to_pylist()))
    weights = (folder / "run" / "snapshots" / f"iter_{STEPS}.caffemodel").read_bytes()
    same = [weights, prints, done.manifest["tests"]]
    return same, [str(each.message) for each in shown if issubclass(each.category, PinningWarning)], done


def told(run: store.Run) -> list[str]:
    """What is noted of pinning in the run folder; the report says the same."""
    noted = [note["text"] for note in run.notes if note["note"] == "pinning_warning"]
    found = [each for each in report.build(run).findings if each.kind == "pinning_warning"]
    assert [(each.level, each.text) for each in found] == [("warning", text) for text in noted]
    return noted


def pinned_bytes(run: store.Run) -> int:
    (staging,) = (note for note in run.notes if note["note"] == "staging")
    return int(staging["pinned_bytes"])


def test_a_job_that_is_refused_pinning_trains_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, pins, refused = None, Driver(), Driver("register")
    without, said, run_without = trained(tmp_path / "without", monkeypatch, plain)
    assert said == told(run_without) == []

    with_, said, run_with = trained(tmp_path / "with", monkeypatch, pins)
    assert said == told(run_with) == []
    assert (pins.asked, pins.held, pins.cleared) == (1, {}, 0)
    assert pinned_bytes(run_with) > 0

    pageable, said, run_pageable = trained(tmp_path / "refused", monkeypatch, refused)
    assert len(said) == 1
    assert "stays pageable" in said[0]
    assert "CUDA refused: cudaErrorMemoryAllocation: register" in said[0]
    assert told(run_pageable) == said
    assert (refused.asked, refused.held, refused.cleared) == (1, {}, 1)
    assert pinned_bytes(run_pageable) == 0
    assert without == with_ == pageable


def test_a_job_whose_memory_cannot_be_unpinned_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver("unregister")
    _, said, done = trained(tmp_path / "job", monkeypatch, driver)
    assert len(said) == 1
    assert "could not be unpinned: cudaErrorMemoryAllocation: unregister" in said[0]
    assert told(done) == said
    assert (driver.held, driver.cleared) == ({}, 1)
    assert done.manifest["outcome"]["state"] == "finished"


def test_the_blobs_of_a_job_are_those_of_its_nets_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tests between the steps, and no collector to tidy up after what the job made to warm up."""
    gc.collect()
    others = arena.blocks(np).usage().live_blobs
    gc.disable()
    try:
        _, _, done = trained(tmp_path / "job", monkeypatch, None)
    finally:
        gc.enable()
    tops, params = 4, 2  # data, label, ip, loss; weights and bias, which the test net shares
    assert done.memory.column("live_blobs").to_pylist() == [others + 2 * tops + params] * STEPS
    assert [tested["step"] for tested in done.manifest["tests"]] == [0, 5, 10, 12]
