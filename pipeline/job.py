"""One job: opens all that the training loop touches, answers the loop's questions, and closes everything in order."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import checkpoint, emission, runfolder
from pipeline.checkpoint import Snapshot
from pipeline.config import Config, Phase
from pipeline.display import Display
from pipeline.memorylog import MemoryLog
from pipeline.records import RecordLog
from pipeline.remarks import noted, reader_slots
from pipeline.signals import StopRequest
from profiler import hashing, recorder, store
from profiler.errors import StallscopeError, UsageError
from profiler.events import Kind, Stage

if TYPE_CHECKING:
    from gpu.backend import Backend
    from gpu.parameters import ParamShapesError
    from pipeline.feed import Batch, Feed
    from pipeline.staging import StagedBatch


_log = logging.getLogger(__name__)


class NoSolver:
    """Stands where the solver does in a job that only feeds: a step computes nothing and has no loss."""

    lr: float | None = None
    net: Any = None

    def take(self, inputs: Mapping[str, Any]) -> None:
        """There is no net that could take them."""

    def step_on(self, *, epoch: int = -1) -> float:
        return math.nan


class Job:
    """Everything that a training loop touches; a context manager that closes it all, the recorder last.

    Attributes
    ----------
    step: number of updates done, which is also the number of the next step.
    first_step, last_step: where this part of the run began, and how many updates there are in all.
    recorder, feed, device, solver: see docs/design.md, section 5.
    batches: the feed's batches on their way to the device, for the loop.
    test_results: ``{"step": updates done, output: mean, ...}`` of each test so far.
    last_loss: of the newest step, None before the first. feed_stats: the feed's figures at the end.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        start: Snapshot | None,
        stop: StopRequest,
        display: Display,
        address: str | None = None,
    ) -> None:
        self.config, self.folder, self.stop, self.display = config, folder, stop, display
        self.first_step = self.step = start.iteration if start else 0
        self.last_step = config.run.iterations or 0
        self.test_results: list[dict[str, Any]] = []
        self.last_loss: float | None = None
        self.feed_stats: dict[str, Any] = {}
        self._start = start
        self._snapshot_at = start.iteration if start else -1
        self._tested_at = -1
        self._most_loss: float | None = None  # at which a hint is due; None when it was given, or never is
        self._test_interval = self._test_iterations = 0
        self._names: dict[Phase, tuple[str, ...]] = {"TRAIN": ("data", "label"), "TEST": ("data", "label")}
        self._fed: tuple[Phase, np.ndarray, np.ndarray] | None = None  # ids and labels that the net has at hand
        self._feeds: list[Feed] = []  # in the order of opening
        self._stack = ExitStack()
        try:
            self._open(address)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.feed_stats = self.feed.stats()
        try:
            if error is not None and self._fed is not None:
                from pipeline.labels import name_record

                name_record(error, *self._fed, self.config)
        finally:
            self._stack.close()

    # -- what the loop asks ------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """True when all iterations are done or a signal asked to stop."""
        return self.step >= self.last_step or bool(self.stop)

    def learn(self, batch: StagedBatch, arrays: Mapping[str, Any]) -> float:
        """One step of the solver on the batch's arrays, in ``iter_size`` parts. Returns the loss before the update."""
        if self._normalise is not None:
            data, *rest = arrays
            arrays = {data: self._normalise(arrays[data]), **{name: arrays[name] for name in rest}}
        parts = self.config.iter_size
        size = len(batch) // parts
        turns = iter(range(0, parts * size, size or 1))

        def part() -> dict[str, Any]:
            rows = slice(start := next(turns), start + size)
            # Should a label turn out wrong: whose it is.
            self._fed = ("TRAIN", batch.ids[rows], batch.labels[rows])
            return {name: array[rows] for name, array in arrays.items()}

        if parts > 1:
            loss = self.solver.step_on(part, epoch=batch.epoch)
            batch.taken()
            return float(loss)
        self._fed = ("TRAIN", batch.ids, batch.labels)
        self.solver.take(arrays)
        batch.taken()  # the net has copied them: another batch may travel while this one is computed with
        return float(self.solver.step_on(epoch=batch.epoch))

    def test_is_due(self) -> bool:
        """Before step i when i is a multiple of test_interval, as in Caffe; not twice at the same place."""
        if not self._test_interval or self.step == self._tested_at or self.step % self._test_interval:
            return False
        return self.step > 0 or bool(self.solver.param.test_initialization)

    def test(self) -> None:
        """Run the test net over the first ``test_iter`` batches of the test set and show the means of its outputs."""
        self._tested_at = self.step
        outputs = self.solver.test(0, self._test_inputs())
        means = {name: float(np.mean(value)) for name, value in outputs.items()}
        self.test_results.append({"step": self.step, **means})
        self.display.test(self.step, means)

    def fingerprint_inputs(self, batch: StagedBatch, arrays: Mapping[str, Any]) -> None:
        """Log the batch's record numbers and, with ``fingerprints: step``, the hashes of what the step consumes."""
        self._records.add(batch.step, batch.epoch, batch.ids)
        if self.config.profile.fingerprints == "off":
            return
        from gpu.fingerprint import fingerprint_parts

        hashes, write = batch.hashes, self.recorder.fingerprint
        write(batch.step, "ids", hashes["ids"], hashes["ids_set"])
        write(batch.step, "raw", hashes["raw"], hashes["raw_set"])
        write(batch.step, "fill", hashes["fill"])
        data, *rest = arrays.values()
        on_device = [self.device.backend.to_numpy(array) for array in rest]
        # "fill" covers all labels together, used by the net or not.
        labels = [array.reshape(len(batch), -1) for array in on_device]
        if len(labels) != len(self.feed.blob_shapes) - 1 or not labels:
            labels = [batch.labels]
        whole = labels[0] if len(labels) == 1 else np.concatenate(labels, axis=1)
        write(batch.step, "device", fingerprint_parts(data, whole, xp=self.device.backend.xp))

    def fingerprint_outcome(self, loss: float) -> None:
        """With ``fingerprints: step``, log the hashes of the loss and of the parameters after the update."""
        if self.config.profile.fingerprints == "off" or self.config.only_feeds:
            return
        from gpu.fingerprint import record_params

        self.recorder.fingerprint(self.step, "loss", hashing.ordered(np.float32(loss).tobytes()))
        record_params(self.recorder, self.step, self.solver.net)

    def note_memory(self) -> None:
        """Log what the nets of this process use of memory after the step."""
        if self._memory is not None:
            from gpu.arena import blocks

            self._memory.add(self.step, blocks(self.device.backend.xp).usage())

    def show(self, batch_size: int, loss: float) -> None:
        """Progress on the terminal."""
        self.last_loss = None if self.config.only_feeds else loss
        shown = None if self.config.only_feeds else self.solver.smoothed_loss  # the mean of the last average_loss steps
        self.display.step(self.step, shown, self.solver.lr, batch_size)
        if self._most_loss is not None:
            from gpu.saturation import hint

            if said := hint(loss, self._most_loss):
                self._most_loss = None
                self.display.say(f"step {self.step}: {said}")
                self.recorder.note("loss_saturated", step=self.step, text=f"In step {self.step} {said}.")

    def snapshot_is_due(self) -> bool:
        """After every ``checkpoint_every`` updates."""
        every = self.config.run.checkpoint_every
        return every > 0 and self.step % every == 0 and not self.config.only_feeds

    def snapshot(self) -> None:
        """Write weights, solver state and the sidecar of this step."""
        position = {
            "position": self.feed.state_dict(),
            "epoch": self.feed.epoch_of(self.feed.next_step),
            "stream": self.stream,
            "seeds": {"run": self.config.run.seed, "order": self.config.order_seed, "solver": self.solver.seed},
            "net": runfolder.file_identity(self.config.net),
            "solver": runfolder.file_identity(self.config.solver),
            "data": self.identities,
            "versions": runfolder.versions(),
        }
        if (scaler := self.solver.scaler) is not None:
            scaler.note_losses()
            position["loss_scale"] = scaler.loss_scale.state()
        checkpoint.write(self.folder / "snapshots", self.step, self.solver, position)
        self._snapshot_at = self.step

    @property
    def last_snapshot(self) -> Path | None:
        """The newest one that this job wrote, or began with: its solver state. None where there is none."""
        place = self.folder / "snapshots" / f"iter_{self._snapshot_at}.solverstate"
        return next((path for path in (place, place.with_name(place.name + ".h5")) if path.exists()), None)

    def finish(self) -> None:
        """After the loop: the last test (unless stopped) and the last snapshot (unless it has just been written)."""
        if self.config.only_feeds:
            return
        if not self.stop and self._test_interval and self._tested_at != self.step:
            with self.recorder.span(Stage.TEST, step=self.step):
                self.test()
        if self._snapshot_at != self.step:
            with self.recorder.span(Stage.CHECKPOINT, step=self.step):
                self.snapshot()

    # -- opening -----------------------------------------------------------------------------------------------------

    def _open(self, address: str | None) -> None:
        from gpu.backend import select_backend
        from gpu.cudnn import algorithms
        from gpu.device import open_device
        from gpu.doctor import about, text_of

        began_ns = time.monotonic_ns()
        config, stack = self.config, self._stack
        self._open_recorder()
        device = config.device
        backend = select_backend(device.backend, deterministic=device.deterministic, cudnn=device.cudnn)
        chosen = about(backend)
        if chosen["device"] is not None:
            _log.info("device %s", text_of(chosen["device"]))
        nominal = {"step_ms": device.step_ms, "h2d_gbps": device.h2d_gbps, "h2d_delay_ms": device.h2d_delay_ms}
        emulated = nominal if backend.name == "emulated" else {}
        self.device = stack.enter_context(
            open_device(backend, staging=device.staging, recorder=self.recorder, **emulated)
        )
        self._look_at_data()
        if config.feed.engine == "ray":
            from pipeline import ray_runtime

            stack.enter_context(ray_runtime.running(config, address))
        position = self._start.position if self._start is not None else {}
        begin, stop, given = emission.resumed(self.step, self.last_step, position)
        self.feed = self._make_feed("TRAIN", begin, stop)
        self.feed.begin_at(begin, given, position.get("bad_records", ()))
        self.feed.known_content = self.identities["train"]["content"]
        # Before any memory of the rings is taken: a job that is too large is told what all of it needs.
        self.solver: Any = NoSolver() if config.only_feeds else self._open_solver(backend)
        for feed in self._feeds:
            stack.enter_context(feed)
        self._open_staging()
        if not config.only_feeds:
            from gpu.saturation import ceiling
            from gpu.warm import warm_up

            self._most_loss = ceiling(self.solver.net)
            warm_up(backend)  # beside the start of the workers
        self._records = stack.enter_context(contextlib.closing(RecordLog(self.folder, self.recorder)))
        watched = config.profile.detail != "off" and not config.only_feeds
        self._memory = stack.enter_context(contextlib.closing(MemoryLog(self.folder))) if watched else None
        # Here and not at their first batch: that the workers had to start is no part of a step or of a test.
        for feed in self._feeds:
            feed.warm_up(lambda: bool(self.stop))
        self.recorder.add(Kind.SPAN, Stage.START, began_ns, time.monotonic_ns())
        with runfolder.writing(self.folder):
            store.update_manifest(
                self.folder,
                data=self.identities,
                backend=chosen | {"algorithms": {} if config.only_feeds else algorithms(self.solver.net)},
            )

    def _open_recorder(self) -> None:
        from profiler.sampler import Sampler

        profile, stack = self.config.profile, self._stack
        self.recorder = recorder.Recorder.open(
            self.folder, "trainer", "trainer", 0, profile.detail, profile.fingerprints
        )
        stack.callback(self.recorder.close)
        recorder.set_current(self.recorder)
        stack.callback(recorder.set_current, recorder.NULL)
        self.recorder.watch_gc()
        stack.enter_context(noted(self.recorder))
        if profile.samplers_hz and profile.detail != "off":
            sampler = Sampler(self.folder, profile.samplers_hz)
            sampler.start()
            stack.callback(sampler.stop)

    def _look_at_data(self) -> None:
        """Open each data set once: a wrong path fails before any process starts, and a resume must find the same."""
        from pipeline.spec import feed_spec
        from pipeline.worker import open_data

        self.identities = {}
        phases: tuple[Phase, ...] = ("TRAIN", "TEST") if self.config.tests else ("TRAIN",)
        for phase in phases:
            with open_data(feed_spec(self.config, phase)) as source:
                sniffed = not self.config.source(phase).backend and source.backend not in ("memory", "python")
                told = " (no backend named: told by what lies there)" if sniffed else ""
                self.display.say(f"data.{phase.lower()}: {source.name}, {len(source):,} records{told}")
                for line in reader_slots(self.recorder):
                    self.display.say(line)
                self.identities[phase.lower()] = runfolder.data_identity(
                    source, tolerant=self.config.data.on_bad_record != "stop"
                )
        self.stream = runfolder.stream(self.config, self.identities["train"])
        if self._start is not None:
            checkpoint.check_same_stream(self._start, self.stream)

    def _make_feed(self, phase: Phase, start: int, stop: int | None, cycle: int | None = None) -> Feed:
        from pipeline.feed import Feed

        origin = self._start.origin if self._start is not None and phase == "TRAIN" else 0
        feed = Feed(self.config, phase, start, stop, self.recorder, cycle=cycle, origin=origin)
        self._feeds.append(feed)
        return feed

    def _open_staging(self) -> None:
        """Page-lock the slots, allocate where batches are copied to, and see to it that no copy outlives the slots."""
        from pipeline.staging import Staging

        feed, device = self.feed, self.device
        self.batches = Staging(feed, device, lambda batch: self._named(batch, "TRAIN"))
        self._stack.callback(device.close)
        pinned = device.pins and device.register(feed.memory)  # which reserves all slots that there may come to be
        self.recorder.note("staging", buffers=device.ahead + 1, pinned_bytes=feed.memory.nbytes if pinned else 0)
        self._normalise = None
        if feed.spec.pixels == "uint8" and not self.config.only_feeds:
            from gpu.normalise import Normalise

            self._normalise = Normalise(device.backend.xp, feed.mean, feed.spec.transform.scale)
        shapes = feed.blob_shapes[: len(self._names["TRAIN"])]
        dtypes = [np.dtype(feed.spec.pixels), np.float32 if len(feed.label_shape) > 1 else np.int32]
        device.reserve(
            {name: (shape, dtype) for name, shape, dtype in zip(self._names["TRAIN"], shapes, dtypes, strict=False)}
        )

    def _open_solver(self, backend: Backend) -> Any:
        from gpu.loss_scale import LossScale
        from gpu.parameters import ParamShapesError
        from gpu.solver import Solver
        from pipeline.solverdata import read_solver

        config = self.config
        param = read_solver(str(config.solver))
        self.display.interval = int(param.display) or self.display.interval
        shapes, test_shapes = self._input_shapes("TRAIN", self.feed, param), None
        if config.tests:
            self._test_iterations, self._test_interval = int(param.test_iter[0]), int(param.test_interval)
            self._test_feed = self._make_feed("TEST", 0, None, cycle=self._test_iterations)
            test_shapes = self._input_shapes("TEST", self._test_feed, param)
        try:
            solver = Solver(
                Path(str(config.solver)),
                net=Path(str(config.net)),
                backend=backend,
                input_shapes=shapes,
                test_input_shapes=test_shapes,
                seed=None if param.random_seed >= 0 else config.run.seed,
                reuse=config.profile.fingerprints != "layer",  # those look at every blob after the step
                precision=config.device.precision,
                keep_fp32=config.device.keep_fp32,
                loss_scale=LossScale.of(
                    config.device.loss_scale,
                    start=config.device.loss_scale_start,
                    growth=config.device.loss_scale_growth,
                ),
                beside={f"the ring of {f.spec.phase} (feed.depth {f.spec.depth})": f.memory_bytes for f in self._feeds},
            )
        except ParamShapesError as error:
            raise self._other_samples(error) from error
        for path, report in solver.loaded.items() if self._start is None else ():
            self.display.say(f"weights {path}: {report}")
            self.recorder.note("weights_copied", path=path, **asdict(report))
        if self._start is not None:
            solver.restore(self._start.state, weights=self._start.weights)
            if solver.scaler is not None and (scale := self._start.sidecar.get("loss_scale")):
                solver.scaler.loss_scale.load(scale)
        self._describe(solver)
        return solver

    def _describe(self, solver: Any) -> None:
        """With ``run.log_level: debug``: shapes, memory, fillers and initial values of each layer, as notes."""
        if not _log.isEnabledFor(logging.DEBUG):
            return
        from gpu.describe import describe, line

        for net in (solver.net, *solver.test_nets):
            for row in describe(net):
                _log.debug("%s", line(row))
                self.recorder.note("layer", **row)
            plan = net.memory_plan()
            _log.debug("%s %s: %s", net.phase, net.name, plan.table().splitlines()[-1])

    def _other_samples(self, error: ParamShapesError) -> StallscopeError:
        """The same error in terms of the two data sets, where it is they that differ."""
        train, test = self._feeds[0].sample_shape, self._feeds[-1].sample_shape
        different = [axis for axis in range(3) if train[axis] != test[axis]]
        if not different:
            return error
        axis = different[0]
        what = ("channels", "rows", "columns")[axis]
        side = min(*train[1:], *test[1:])
        shapes = [
            f"samples of {c} x {h} x {w} (channels x rows x columns) in data.{phase}, {data.source}"
            for phase, data, (c, h, w) in (
                ("train", self.config.data.train, train),
                ("test", self.config.data.test, test),
            )
        ]
        return UsageError(
            f"data.train has {train[axis]} {what}, data.test has {test[axis]}, and one net reads both",
            expected=shapes[0],
            found=f"{shapes[1]}; {error.what}",
            hint="data.transform.force_gray or force_color makes image files alike; convert raw pixels again"
            if axis == 0
            else f"data.transform.crop: {side} (or less) makes both one size, or convert one set again with --resize",
        )

    def _input_shapes(self, phase: Phase, feed: Feed, solver: Any) -> dict[str, tuple[int, ...]]:
        """Shapes of the net's inputs in a phase, and their names, which :meth:`_named` uses from then on."""
        from pipeline.solverdata import phase_net

        tail, batch = self.config.source(phase).tail, feed.shape[0]
        if tail == "partial" and feed.records % batch:
            raise UsageError(
                f"not supported in this version: data.{phase.lower()}.tail: partial with a net, which keeps one size",
                expected="tail: wrap or drop, or a batch that divides the number of records",
                found=f"{feed.records} records in batches of {batch}: the last one has {feed.records % batch}",
            )
        net = phase_net(str(self.config.net), solver, self.config.solver, phase)
        layers, inputs = net.data_layers(), net.inputs()
        names = layers[0].tops if layers else tuple(top for layer in inputs for top in layer.top)
        if not layers:
            _check_memory(inputs, feed.sample_shape, phase)
        parts = self.config.iter_size if phase == "TRAIN" else 1
        shapes = [(shape[0] // parts, *shape[1:]) for shape in feed.blob_shapes]
        if not 1 <= len(names) <= len(shapes):
            raise UsageError(
                f"{net.path}: the feed cannot fill the inputs of the net in {phase}",
                expected="one input (data) or two (data, label)" if len(shapes) == 2 else f"{len(shapes)} at most",
                found=", ".join(names) or "none",
            )
        self._names[phase] = names
        return dict(zip(names, shapes, strict=False))

    # -- batches -----------------------------------------------------------------------------------------------------

    def _named(self, batch: Batch, phase: Phase) -> dict[str, np.ndarray]:
        """The host arrays of a batch by the names of the net's inputs."""
        return dict(zip(self._names[phase], batch.blobs, strict=False))

    def _test_inputs(self) -> Iterator[dict[str, np.ndarray]]:
        for _ in range(self._test_iterations):
            batch = next(self._test_feed)
            self._fed = ("TEST", batch.ids.copy(), batch.labels.copy())  # as in hand_over
            yield self._named(batch, "TEST")
            batch.release()


def _check_memory(inputs: list[Any], sample: tuple[int, ...], phase: Phase) -> None:
    """A MemoryData layer says how large its images are, and Caffe takes no others."""
    for layer in inputs[:1]:
        p = layer.memory_data_param
        if layer.type == "MemoryData" and sample != (p.channels, p.height, p.width):
            raise UsageError(
                f"data.{phase.lower()} does not fit layer {layer.name!r} (MemoryData)",
                expected=f"samples of {p.channels} x {p.height} x {p.width} (channels x rows x columns)",
                found=" x ".join(map(str, sample)),
                hint="change channels, height and width of the layer, or data.transform.crop",
            )
