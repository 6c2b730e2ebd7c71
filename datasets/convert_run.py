"""Turning inputs into databases: in order, by several threads, from where a killed run has come to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from datasets import convert_stream, datum, decode, publish, resize, writer
from datasets.convert_inputs import Converted, Inputs, Job
from datasets.convert_jobs import outcomes
from datasets.convert_plan import MOST_RECORDS, Plan, already_there, check_names, check_targets, told_hash
from datasets.convert_stream import SampleStream, Unshuffled
from datasets.convert_work import Work, working
from datasets.manifest import Manifest, Tally, read_manifest, write_manifest
from datasets.order import Order
from profiler.errors import StallscopeError, UsageError

_LONGEST_KEY = 511  # LMDB's limit; held for LevelDB as well, so both can hold the same records
_LISTED_SKIPS = 100

Progress = Callable[[str, int, int | None], object]
"""Called now and then with what is being done, the number of items done, and of all items if that is known."""


def convert(
    source: Inputs | SampleStream,
    plan: Plan,
    *,
    progress: Progress = lambda what, done, total: None,
    say: Callable[[str], object] = lambda text: None,
) -> Manifest:
    """Write a source to a new database with its manifest beside it.

    The database appears under its name only when it is complete. A killed run is continued by the next one with the
    same source and options, without a duplicate and without a gap.

    Raises :class:`StallscopeError`: wrong target, unreadable item, full disk, or nothing left to store.
    """
    if not 1 <= plan.workers <= 256:
        raise UsageError("the number of workers is out of range", expected="1 to 256", found=plan.workers)
    told = plan.told(source.fingerprint())
    check_names(plan)
    for out in plan.outs:
        publish.sweep(out)
    with working(plan.outs) as work:
        try:
            if work.finished(told, plan.force):
                say("the interrupted conversion was complete but for its name")
                manifest = read_manifest(plan.out)
                assert manifest is not None
                return manifest
            there = None if plan.force else already_there(plan, told)
            if there is not None:
                say("a complete database of this input is there already; nothing to do (--force makes it again)")
                if not work.holds_other(told):
                    work.remove()
                return there
            check_targets(plan)
        except BaseException:
            if not (work.folder / "state.json").exists():
                work.remove()
            raise
        going_on = work.begin(told, say, plan.force)
        run = None
        try:
            inputs = _addressed(source, plan, work, progress)
            with closing(inputs):
                run = _Run(inputs, plan, work, told)
                with closing(run):
                    run.open(going_on, say)
                    try:
                        return run.write(progress)
                    except BaseException:
                        run.keep(say)
                        raise
        except BaseException as error:
            _leave(work, error, say, 0 if run is None else run.kept)
            raise


def _addressed(source: Inputs | SampleStream, plan: Plan, work: Work, progress: Progress) -> Inputs:
    if isinstance(source, Inputs):
        return source
    if plan.shuffle_seed is None:
        return Unshuffled(source)
    return convert_stream.index(
        source, work.samples, skip=plan.skip, progress=lambda done: progress("reading", done, source.count)
    )


class NothingStored(StallscopeError):
    """Not one item of the input could be read."""


def _leave(work: Work, error: BaseException, say: Callable[[str], object], kept: int) -> None:
    """Keep what a later run can go on from; otherwise nothing at all."""
    if isinstance(error, NothingStored) or not (kept or (work.samples / "index").exists()):
        work.remove()
        return
    records = "1 record is" if kept == 1 else f"{kept} records are"
    what = f"{records} kept" if kept else "no record is stored yet, only the index of the samples is kept,"
    told = f"{what} in {work.folder}: the same command goes on from there"
    if isinstance(error, StallscopeError):
        error.hint = f"{error.hint}\n            ({told})" if error.hint else told
    else:
        say(told)


class _Target:
    """One database that is being written."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.writer = writer.WRITERS[backend](folder)
        self.tally = Tally()
        self.loaded = 0

    def load(self) -> None:
        """Add up what is there already. Raises :class:`StallscopeError` for what no conversion has written."""
        for key, value in self.writer.records():
            parsed = datum.parse(value, key)
            told = decode.probe(parsed, key)
            if not key[:8].isdigit():
                raise StallscopeError(f"{key!r} is no key of a conversion")
            shape = (told.channels, told.height, told.width)
            self.tally.add(key, value, shape, parsed.label, parsed.encoded)
            self.loaded += 1

    @property
    def kept(self) -> int:
        """Records on the disk, those of an earlier run included."""
        return self.loaded + self.writer.committed

    @property
    def next_place(self) -> int:
        return int(self.tally.last_key[:8]) + 1 if self.tally.records else 0

    def put(self, key: bytes, value: bytes, shape: tuple[int, int, int], label: int | None, encoded: bool) -> None:
        # Of two databases that were cut short, one may be ahead.
        if key > self.tally.last_key:
            self.writer.put(key, value)
            self.tally.add(key, value, shape, label, encoded)


class _Run:
    def __init__(self, inputs: Inputs, plan: Plan, work: Work, told: dict[str, Any]) -> None:
        self.inputs = inputs
        self.plan = plan
        self.work = work
        self.told = told
        self.reasons: list[str] = []
        self.skips = 0
        self.start = 0
        self.targets: list[_Target] = []

    def open(self, going_on: bool, say: Callable[[str], object]) -> None:
        """Open the databases, and take over what an interrupted run has committed."""
        try:
            self._open()
            for target in self.targets if going_on else ():
                target.load()
        except StallscopeError as error:
            if not going_on:
                raise
            say(f"what an interrupted conversion left is damaged ({error.what}): starting over")
            self.close()
            self.work.restart(self.told, keep_samples=True)
            self._open()
        self.start = min(target.next_place for target in self.targets)
        for reason in self.work.skipped(self.start):
            self._note(reason)
        if self.start:
            records = min(target.tally.records for target in self.targets)
            say(f"going on after the {records} records of an interrupted conversion")

    def _open(self) -> None:
        self.targets = []
        for number in range(len(self.plan.outs)):
            self.targets.append(_Target(self.work.database(number), self.plan.backend))

    def close(self) -> None:
        """Give the handles back. What is not committed is lost, unless all is complete."""
        for target in self.targets:
            target.writer.abandon()

    @property
    def kept(self) -> int:
        """Records on the disk in all databases, those of an earlier run included."""
        return min((target.kept for target in self.targets), default=0)

    def keep(self, say: Callable[[str], object]) -> None:
        """After an error or Ctrl-C: commit what is complete, so that nothing has to be made again."""
        try:
            for target in self.targets:
                target.writer.keep()
        except StallscopeError as error:
            say(f"the last records could not be kept: {error.what}")

    def _note(self, reason: str) -> None:
        self.skips += 1
        if len(self.reasons) < _LISTED_SKIPS:
            self.reasons.append(reason)

    def write(self, progress: Progress) -> Manifest:
        count = len(self.inputs)
        expected = self.inputs.expected_bytes()
        if expected is not None and not self.start:
            writer.check_free(self.work.folder, expected, f"the {count} records of this input")
        order = Order(max(count, 1), self.plan.shuffle_seed or 0, "none" if self.plan.shuffle_seed is None else "full")
        what = f"writing {self.plan.out.name}"
        done = self.start
        progress(what, done, count or None)
        workers = self.plan.workers if self.inputs.parallel else 1
        for target in self.targets:
            target.writer.behind = workers > 1
        self._load_kernel(count)
        for job, made in outcomes(self.inputs.jobs(order, self.start), workers):
            self._store(job, made)
            done = job.place + 1
            if done % 100 == 0:
                progress(what, done, count or None)
        progress(what, done, count or done)
        return self._complete()

    def _load_kernel(self, count: int) -> None:
        """Let a thread load the resizing kernel while others work, if there is enough to do for it."""
        options = self.inputs.options
        if options is not None and options.size is not None and not 0 < count < self.start + resize.WORTH_LOADING:
            threading.Thread(target=resize.prepare, name="resizing kernel").start()

    def _store(self, job: Job, made: Converted | StallscopeError) -> None:
        try:
            if job.place >= MOST_RECORDS:
                raise UsageError("too many records for one database", expected=f"at most {MOST_RECORDS}")
            if isinstance(made, StallscopeError):
                raise made
            key = f"{job.place:08d}{job.suffix}".encode("utf-8", "surrogateescape")
            if len(key) > _LONGEST_KEY:
                raise UsageError(
                    f"the path {job.suffix[1:]} is too long for a key",
                    expected=f"at most {_LONGEST_KEY} bytes",
                    found=len(key),
                )
        except StallscopeError as error:
            if not self.plan.skip:
                if "--on-error" not in (error.hint or ""):
                    way_out = "--on-error skip leaves it out (exit code 1)"
                    error.hint = f"{error.hint}; {way_out}" if error.hint else way_out
                raise
            reason = str(error).splitlines()[0]
            self._note(reason)
            self.work.skip(job.place, reason)
            return
        self.targets[0].put(key, made.value, made.shape, made.label, made.encoded)
        if made.labels is not None:
            labels = datum.serialize(channels=len(made.labels), height=1, width=1, float_data=made.labels)
            self.targets[1].put(key, labels, (len(made.labels), 1, 1), None, False)

    def _complete(self) -> Manifest:
        left_out = self.inputs.left_out
        if self.targets[0].tally.records == 0:
            found = [*self.reasons, *left_out, "no items"][0]
            raise NothingStored("not one item could be read; no database was made", found=found)
        manifests = []
        for number, target in enumerate(self.targets):
            target.writer.close()
            manifest = target.tally.manifest(
                backend=self.plan.backend,
                classes=self.inputs.classes if number == 0 else None,
                source=self.plan.source,
                options=self.plan.options,
                made_from=told_hash(self.told),
                shuffle_seed=self.plan.shuffle_seed,
                skipped=[*self.reasons, *left_out][:_LISTED_SKIPS],
                skipped_count=self.skips + len(left_out),
            )
            write_manifest(self.work.database(number), manifest, target.tally.crcs)
            manifests.append(manifest)
        self.work.complete()
        self.work.publish()
        return manifests[0]
