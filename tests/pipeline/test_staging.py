"""Batches on their way to the device: a slot is given back when its copy was over, and not a moment before."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.device import Device, open_device
from pipeline import loop
from pipeline.config import validate
from pipeline.display import Display
from pipeline.feed import Feed
from pipeline.job import Job
from pipeline.maker import Layout
from pipeline.ring import Claim, Ready, Ring
from pipeline.signals import StopRequest
from pipeline.spec import FeedSpec
from pipeline.staging import Staging
from profiler import store
from profiler.errors import StallscopeError
from profiler.events import Stage
from tests.gpu.recording import ListRecorder

ITEMS = 4
RING = re.compile(r"^(\S+) .*stallscope-ring", re.MULTILINE)
SPEC = FeedSpec("memory:records=40,shape=1x32x32", ITEMS, depth=2, poison=True, shuffle="none")


@pytest.fixture(autouse=True)
def nothing_stays_mapped() -> Iterator[None]:
    """No test leaves a ring in this process's memory: neither a feed that was closed nor one that failed."""
    before = set(RING.findall(Path("/proc/self/maps").read_text()))
    yield
    gc.collect()
    assert set(RING.findall(Path("/proc/self/maps").read_text())) <= before


class Producer:
    """An engine whose only worker is a thread: it writes the batch's number into every value of its slot at once."""

    restarts = 0
    pids: list[int] = []  # noqa: RUF012

    def __init__(self, spec: FeedSpec, layout: Layout) -> None:
        self.ring = Ring.create(spec.depth, layout.nbytes, stop_step=spec.stop_step, poison=spec.poison)
        self.slots = [layout.views(self.ring.payload(index)) for index in range(self.ring.depth)]
        self.ring.enter(0)
        self._ended = False
        self._thread = threading.Thread(target=self._produce, daemon=True)
        self._thread.start()

    def _produce(self) -> None:
        while not self._ended:
            claim = self.ring.claim(0)
            if not isinstance(claim, Claim):
                time.sleep(0.0002)
                continue
            slot = self.slots[claim.slot]
            slot.data[...] = claim.step
            slot.labels[...] = claim.step
            slot.ids[...] = claim.step
            self.ring.ready(0, claim, items=ITEMS, epoch=0, hashes={})

    def get(self, step: int) -> Ready:
        while not self.ring.is_ready(step):
            assert self._thread.is_alive()
            time.sleep(0.0002)
        return self.ring.lease(step)

    def get_ready(self, step: int) -> Ready | None:
        return self.ring.lease(step) if self.ring.is_ready(step) else None

    def warm_up(self, *_arguments: Any) -> None: ...

    def delivered(self, ready: Ready, **_times: int) -> None: ...

    def tuning(self) -> None: ...

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        self.slots = []
        self.ring.close()


def fed(monkeypatch: pytest.MonkeyPatch, steps: int, recorder: Any = None) -> Feed:
    """A feed of ``steps`` batches from a :class:`Producer`."""
    feed = Feed(FeedSpec(**{**vars(SPEC), "stop_step": steps}), recorder=recorder or ListRecorder())
    monkeypatch.setattr("pipeline.feed.engine_of", lambda *_: Producer(feed.spec, feed.probe.layout))
    return feed


def mixed(feed: Feed, device: Device) -> list[int]:
    """Run the loop's order of things over the feed; the steps whose arrays were not the batch's own, whole."""
    batches = Staging(feed, device, lambda batch: {"data": batch.data, "label": batch.labels})
    wrong = []
    for batch in batches:
        arrays = batch.on_device()
        batches.copy_ahead()
        with device.compute(step=batch.step):
            copies = {name: np.array(array) for name, array in arrays.items()}  # the net takes them
            batch.taken()
        if not all((array == batch.step).all() for array in copies.values()) or not (batch.ids == batch.step).all():
            wrong.append(batch.step)
    return wrong


@pytest.mark.parametrize("staging", [1, 2, 3])
def test_five_hundred_batches_through_two_slots_are_never_mixed(monkeypatch: pytest.MonkeyPatch, staging: int) -> None:
    feed = fed(monkeypatch, 500)
    with feed, open_device("emulated", h2d_delay_ms=1, step_ms=0.5, staging=staging) as device:
        assert mixed(feed, device) == []
        until = time.monotonic() + 10  # the last copy is over; who waits for that gives its slot back a moment later
        while feed.stats()["slots"]["leased"] and time.monotonic() < until:
            time.sleep(0.001)
        assert feed.stats()["slots"] == {"free": 2, "filling": 0, "ready": 0, "leased": 0, "redo": 0}


def test_a_slot_that_is_given_back_at_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test above: the mistake it is there for does not pass it."""
    monkeypatch.setattr("gpu.device.Upload.when_done", lambda self, call: call())
    feed = fed(monkeypatch, 30)
    with feed, open_device("emulated", h2d_delay_ms=5, step_ms=1) as device:
        assert len(mixed(feed, device)) > 20


def test_poison_alone_shows_a_slot_given_back_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a producer too slow to write over the slot, 0xFF is what arrives."""
    monkeypatch.setattr("gpu.device.Upload.when_done", lambda self, call: call())
    feed = fed(monkeypatch, 2)
    with feed, open_device("emulated", h2d_delay_ms=20) as device:
        batch = next(Staging(feed, device, lambda batch: {"data": batch.data}))
        assert np.isnan(batch.on_device()["data"]).all()


def test_the_host_takes_batches_from_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = ListRecorder()
    feed = fed(monkeypatch, 50, recorder)
    with feed, open_device("numpy", recorder=recorder) as device:
        batches = Staging(feed, device, lambda batch: {"data": batch.data})
        for batch in batches:
            array = batch.on_device()["data"]
            assert np.shares_memory(array, feed.memory)
            batches.copy_ahead()
            with device.compute(step=batch.step):
                assert (array == batch.step).all()
                batch.taken()
    assert recorder.of(Stage.H2D) == recorder.of(Stage.COPY) == recorder.of(Stage.ALLOC) == []


def test_the_next_batch_is_copied_while_this_one_is_computed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 20 ms: a copy of 8 ms hides under it, of one of 30 ms about 10 ms stay. Ratios, and again if disturbed."""

    def median_step_ms(delay_ms: float, staging: int) -> float:
        recorder = ListRecorder()
        feed = fed(monkeypatch, 14, recorder)
        settings = {"step_ms": 20, "h2d_delay_ms": delay_ms, "staging": staging}
        with feed, open_device("emulated", recorder=recorder, **settings) as device:
            assert mixed(feed, device) == []
        ends = [row.t1_ns for row in recorder.of(Stage.DEVICE)]
        return float(np.median(np.diff(ends)[2:])) / 1e6

    for _ in range(5):
        hidden, exposed, long = median_step_ms(8, 2), median_step_ms(8, 1), median_step_ms(30, 2)
        if hidden < 1.15 * 20 and exposed > 1.2 * hidden and 1.3 < long / hidden < 1.8:
            break
    assert hidden < 1.15 * 20
    assert exposed > 1.2 * hidden
    assert 1.3 < long / hidden < 1.8


def test_a_peek_moves_no_position(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = fed(monkeypatch, 3)
    with feed:
        first = next(feed)
        while (second := feed.peek()) is None:
            time.sleep(0.001)
        assert feed.peek() is second
        assert feed.next_step == feed.state_dict()["next_step"] == 1
        assert feed.stats()["batches"] == 1
        assert feed.peek(1) is None, "its slot is that of the first batch, which is not given back yet"
        first.release()
        while (third := feed.peek(1)) is None:
            time.sleep(0.001)
        assert feed.peek(2) is None, "the feed ends after three"
        assert (second.data == 1).all()
        assert (third.data == 2).all()
        assert next(feed) is second
        assert next(feed) is third
        with pytest.raises(StopIteration):
            next(feed)


def test_peek_at_an_inline_feed_makes_nothing() -> None:
    with Feed(FeedSpec(**{**vars(SPEC), "stop_step": 3})) as feed:
        assert feed.peek() is None
        assert next(feed).step == 0
        assert feed.peek() is None


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    with StopRequest() as request:
        yield request


def only_fed(folder: Path, **device: Any) -> Any:
    source = {"source": SPEC.source, "batch": ITEMS}
    return validate(
        {
            "data": {"train": source},
            "feed": {"engine": "inline", "depth": 3, "poison": True},
            "device": {"backend": "emulated", "step_ms": 0, **device},
            "run": {"folder": str(folder), "iterations": 50},
            "profile": {"samplers_hz": 0},
        }
    )


def rings() -> tuple[int, int]:
    """Maps and descriptors of rings that this process has: errors of other tests may still hold some of theirs."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("stallscope-ring")
    fds = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and "-ring" in os.readlink(fd)]
    return maps, len(fds)


def test_a_job_stopped_in_the_middle_of_a_copy_leaves_nothing(tmp_path: Path, stop: StopRequest) -> None:
    """A copy of a minute is dropped and the slots' memory is given back, with no thread left."""
    before = rings()
    config = only_fed(tmp_path, h2d_delay_ms=60_000)
    began = time.monotonic()
    with Job(config, tmp_path, None, stop, Display(0, 50, quiet=True)) as job:
        next(job.batches)
        os.kill(os.getpid(), signal.SIGTERM)
        assert job.done()
    assert time.monotonic() - began < 30
    assert "copy-engine" not in {thread.name for thread in threading.enumerate()}
    assert rings() == before


def test_a_failed_copy_names_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = fed(monkeypatch, 4)
    with feed, open_device("emulated", h2d_delay_ms=1000) as device:
        batch = next(Staging(feed, device, lambda batch: {"data": batch.data}))
        threading.Timer(0.05, device._closing.set).start()
        with pytest.raises(StallscopeError, match="copy of step 0 to the device failed"):
            batch.on_device()


NET = """
layer { name: "in" type: "Data" top: "data" top: "label" data_param { source: "x" batch_size: 4 } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
SOLVER = 'base_lr: 0.01 lr_policy: "fixed" momentum: 0.9 max_iter: 12 random_seed: 3 snapshot_prefix: "x"'


def trained(folder: Path, stop: StopRequest, engine: str, backend: str, staging: int) -> tuple[list[bytes], list[Any]]:
    """Parameters after twelve steps, and the hashes of what each step consumed."""
    (folder / "net.prototxt").write_text(NET)
    (folder / "solver.prototxt").write_text(SOLVER)
    device = {"backend": backend, "staging": staging}
    if backend == "emulated":
        device.update(step_ms=2.0, h2d_delay_ms=1.0)
    config = validate(
        {
            "net": str(folder / "net.prototxt"),
            "solver": str(folder / "solver.prototxt"),
            "data": {"train": {"source": "memory:records=40,shape=1x12x12", "batch": ITEMS}},
            "feed": {"engine": engine, "workers": 1, "depth": 3, "poison": True},
            "device": device,
            "run": {"folder": str(folder / "run"), "iterations": 12},
            "profile": {"samplers_hz": 0},
        }
    )
    with Job(config, folder / "run", None, stop, Display(0, 12, quiet=True)) as job:
        loop.train(job)
        weights = [param.blob.data.tobytes() for param in job.solver.net.learnable]
    prints = store.load_run(folder / "run").fingerprints
    kept = prints.select(["step", "name", "ordered"]).to_pylist()
    return weights, sorted(map(str, kept))


def test_overlap_and_engine_change_no_bit(tmp_path: Path, stop: StopRequest) -> None:
    """With freed slots poisoned: whoever read one too late would show."""
    results = []
    cases = [("inline", "numpy", 2), ("inline", "emulated", 1), ("inline", "emulated", 2)]
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        (folder / "run").mkdir(parents=True)
        results.append(trained(folder, stop, *case))
    assert all(result == results[0] for result in results[1:])


@pytest.mark.long
@pytest.mark.ray
def test_overlap_changes_no_bit_through_workers(tmp_path: Path, stop: StopRequest) -> None:
    results = []
    for number, case in enumerate([("inline", "numpy", 1), ("ray", "emulated", 3)]):
        folder = tmp_path / str(number)
        (folder / "run").mkdir(parents=True)
        results.append(trained(folder, stop, *case))
    assert results[0] == results[1]


def test_a_job_that_does_not_fit_is_told_what_net_and_ring_need(
    tmp_path: Path, stop: StopRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rings()
    monkeypatch.setattr("gpu.net.available_memory", lambda: 20_000)
    (tmp_path / "run").mkdir()
    with pytest.raises(StallscopeError, match="no memory for net") as refused:
        trained(tmp_path, stop, "inline", "numpy", 2)
    assert "the ring of TRAIN (feed.depth 3) takes 0.00 GiB" in str(refused.value)
    assert rings() == before
