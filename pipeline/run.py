"""A run from its folder to its report: what is written before the first step and after the last, however it ends."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from gpu.backend import blas_threads
from pipeline import loop, runfolder
from pipeline.config import Config
from pipeline.display import Display
from pipeline.job import Job
from pipeline.signals import StopRequest
from profiler import store
from profiler.environment import environment
from profiler.errors import StallscopeError
from profiler.osread import boot_id

_log = logging.getLogger(__name__)


def run(config: Config, *, address: str | None = None) -> int:
    """Run a job; returns the exit code: 0, or 130 and 143 after SIGINT and SIGTERM.

    ``address``: the Ray cluster to join. Raises :class:`StallscopeError` for whatever a person can act on. Once a step
    has been done, the run folder then says ``failed`` and why, and holds a report; before that no folder is left.
    """
    place = runfolder.prepare(config)
    folder, found = place.folder, place.found
    quiet = config.run.log_level in ("warning", "error")
    display = Display(found.snapshot.iteration if found.snapshot else 0, config.run.iterations or 0, quiet=quiet)
    for note in (*config.notes, *found.ignored):
        display.say(f"note: {note}")
    if found.snapshot is not None:
        display.say(f"resuming from iteration {found.snapshot.iteration}")
        if not found.snapshot.sidecar:
            display.say(f"note: {found.snapshot.state} says nothing of the data: they restart at record 0")
    elif config.run.if_exists == "resume":
        where = f"no snapshot in {folder}" if place.resumed else f"no run in {folder} to resume"
        display.say(f"note: {where}: starting at iteration 0")
    # Before the environment is looked at: the manifest shall say what the numbers were made with.
    pools = blas_threads(config.device.blas_threads)
    manifest = {**_manifest(config, folder, found.ignored), "blas": [vars(pool) for pool in pools]}
    try:
        with runfolder.writing(folder):
            store.write_manifest(folder, manifest)
    except StallscopeError:
        place.undo()
        raise
    job: Job | None = None
    recorded = config.profile.detail != "off"
    with StopRequest() as stop:
        try:
            with Job(config, folder, found.snapshot, stop, display, address) as job:
                place.settle()
                display.start()
                loop.train(job)
                job.finish()
            outcome = {"state": "interrupted", "signal": stop.signal.name} if stop.signal else {"state": "finished"}
        except KeyboardInterrupt:
            name = stop.signal.name if stop.signal else signal.SIGINT.name
            outcome = {"state": "interrupted", "signal": f"{name}: aborted, no snapshot was written"}
        except BaseException as error:
            display.stop()
            begun = job is not None and job.step > job.first_step
            if begun or not place.undo():
                _end(folder, {"state": "failed", "error": _in_words(error)}, job, recorded)
            if job is not None and (kept := job.last_snapshot) is not None:
                display.say(f"the last snapshot is {kept}: run.if_exists: resume goes on from it")
            raise
        display.stop()
        _end(folder, outcome, job, recorded)
        _summary(folder, outcome, display, job, recorded)
        return stop.exit_code


def _manifest(config: Config, folder: Path, ignored: list[str]) -> dict[str, Any]:
    return {
        "run": folder.name,
        "config": config.model_dump(mode="json"),
        "notes": [*config.notes, *ignored],
        "environment": environment(),
        "net": runfolder.file_identity(config.net),
        "solver": runfolder.file_identity(config.solver),
        "started_wall_ns": time.time_ns(),
        "process": {"pid": os.getpid(), "boot_id": boot_id(), "started_s": psutil.Process().create_time()},
        "outcome": {"state": "running"},
    }


def _end(folder: Path, outcome: dict[str, Any], job: Job | None, recorded: bool) -> None:
    """Say how the run ended, merge its event streams and write its report. Nothing here hides how it ended."""
    figures, at = {}, {}
    if job is not None:
        figures, at = {"tests": job.test_results, "feed": job.feed_stats}, {"step": job.step, "loss": job.last_loss}
    try:
        store.update_manifest(folder, **figures, outcome={**outcome, **at}, ended_wall_ns=time.time_ns())
    except OSError as error:  # what ended the run, perhaps, and not to be shown in its place
        _log.warning("how the run ended cannot be written into %s: %s", folder, error.strerror or error)
    if not recorded:
        return
    try:
        from profiler.report import write_default

        store.compact(folder)
        write_default(folder, outcome)
    except (StallscopeError, OSError, ValueError) as error:
        _log.warning("no report was written: %s; python -m profiler.report %s tries again", error, folder)


def _summary(folder: Path, outcome: dict[str, Any], display: Display, job: Job | None, recorded: bool) -> None:
    from profiler.report import summarise

    display.say("")
    nothing = "profile.detail is off: nothing was recorded, so there is no report."
    display.say(summarise(folder, outcome) if recorded else nothing)
    files = {"report": folder / "report.html", "figures": folder / "report.json", "run folder": folder}
    if job is not None and not job.config.only_feeds:
        weights = folder / "snapshots" / f"iter_{job.step}.caffemodel"
        files["weights"] = weights if weights.exists() else weights.with_name(weights.name + ".h5")
    display.say("")
    display.files({name: path for name, path in files.items() if path.exists()})


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, StallscopeError) else f"{type(error).__name__}: {error}"
