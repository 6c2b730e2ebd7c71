"""The folder of a run: may it be used, what part of a run this is, and what the manifest says at the beginning."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from datasets.source import Source
from pipeline import checkpoint
from pipeline.checkpoint import Found
from pipeline.config import Config
from pipeline.content import content
from profiler import store
from profiler.errors import StallscopeError, UsageError
from profiler.osread import boot_id

_PARTS = ("events", "fingerprints", "samples", "snapshots", "memory")
_JOB_COPY = "runtime_resources/working_dir_files"  # where Ray unpacks the working directory of a submitted job


class Place(NamedTuple):
    """Where a run goes. ``found``: the snapshot to go on from; ``aside``: where the run it replaces lies for now."""

    folder: Path
    found: Found
    resumed: bool
    aside: Path | None

    def settle(self) -> None:
        """The job has begun: what it replaces is not needed any more."""
        if self.aside is not None:
            shutil.rmtree(self.aside, ignore_errors=True)

    def undo(self) -> bool:
        """The job has not done one step: leave the folder as it was before. False where it must stay as it is."""
        if self.resumed:
            return False
        shutil.rmtree(self.folder)
        if self.aside is not None and self.aside.exists():
            self.aside.rename(self.folder)
        return True


def prepare(config: Config) -> Place:
    """Make the run's folder ready as ``run.if_exists`` says; with ``resume``, the snapshot to go on from.

    A run that is to be replaced is only moved aside: wrong input shall lose nothing.

    Raises :class:`UsageError` when the folder is in use by an earlier run and may not be touched, is no run's, or
    cannot be used at all, and when a run to resume has none but damaged snapshots.
    """
    try:
        return _prepare(config)
    except (OSError, ValueError) as error:  # a name that is too long, no permission, a null byte
        raise UsageError(
            f"run.folder: {config.run.folder} cannot be used: {getattr(error, 'strerror', None) or error}",
            hint="another --run.folder",
        ) from None


def _prepare(config: Config) -> Place:
    folder = Path(config.run.folder).expanduser()
    if not folder.is_absolute() and _JOB_COPY in Path.cwd().as_posix():
        raise UsageError(
            "run.folder: a submitted job runs in a copy of the working directory, which Ray deletes",
            expected="an absolute path that exists after the job",
            found=config.run.folder,
            hint=f"--run.folder /some/where/{config.run.folder}",
        )
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"run.folder: {folder} is a file", expected="a folder, or a path where none exists")
    used = folder.is_dir() and any(folder.iterdir())
    found, aside = Found(None), None
    state, begin = config.run.start_from, None
    if state is not None and not (used and config.run.if_exists == "resume"):
        begin = _start(config, state)  # before anything is moved
    if used:
        _refuse_if_running(folder)
    if used and config.run.if_exists == "refuse":
        raise UsageError(
            f"the run folder {folder} is not empty",
            expected="a new folder",
            found=", ".join(sorted(path.name for path in folder.iterdir())[:6]),
            hint="--run.if_exists replace, --run.if_exists resume, or another --run.folder",
        )
    if used and config.run.if_exists == "replace":
        if not _is_run(folder):
            raise UsageError(
                f"the folder {folder} does not look like a run, so it is not removed",
                expected="a folder with the manifest.json of an earlier run",
                found=", ".join(sorted(path.name for path in folder.iterdir())[:6]),
                hint="choose another --run.folder, or empty it by hand",
            )
        aside = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
        folder.rename(aside)
    elif used:
        found = checkpoint.latest(folder / "snapshots")
        if found.snapshot is None and found.damaged:
            raise UsageError(
                f"no snapshot of the run in {folder} can be used",
                expected="a whole snapshot to resume from",
                found="; ".join(found.damaged),
                hint="restore the file from a copy, or start again from iteration 0 with --run.if_exists replace",
            )
    if found.snapshot is None and state is not None:
        found = Found(begin or _start(config, state), found.ignored)
    elif found.snapshot is not None:
        last = config.run.iterations or 0
        if found.snapshot.iteration >= last:
            raise UsageError(
                f"the run in {folder} has done its {found.snapshot.iteration} iterations already",
                expected=f"run.iterations above {found.snapshot.iteration}",
                found=f"run.iterations: {last}",
                hint=f"--run.iterations {found.snapshot.iteration + last}",
            )
    for name in _PARTS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    return Place(folder, found, used and aside is None, aside)


def _start(config: Config, state: str) -> checkpoint.Snapshot:
    """What ``run.start_from`` names, if there is something left to do."""
    if config.only_feeds:
        raise UsageError("run.start_from: a job without a solver has no use for a solver state")
    snapshot, last = checkpoint.bare(Path(state).expanduser()), config.run.iterations or 0
    if snapshot.iteration >= last:
        raise UsageError(
            f"run.start_from: {state} has {snapshot.iteration} iterations behind it already",
            expected=f"run.iterations above {snapshot.iteration}",
            found=f"run.iterations: {last}",
            hint=f"--run.iterations {snapshot.iteration + last}",
        )
    return snapshot


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A context in which a run folder that cannot be written to ends the job with words: a full disk, most likely."""
    try:
        yield
    except OSError as error:
        raise StallscopeError(
            f"cannot write into the run folder {folder}: {error.strerror or error}",
            hint="free some space, or choose another --run.folder",
        ) from error


def _is_run(folder: Path) -> bool:
    """Whether a folder was made by a run: its manifest says so, or the run died before it wrote one."""
    try:
        return json.loads((folder / "manifest.json").read_text()).get("kind") == store.KIND
    except FileNotFoundError:
        return all(path.name in _PARTS and not any(path.iterdir()) for path in folder.iterdir())
    except (OSError, ValueError, AttributeError):
        return False


def _refuse_if_running(folder: Path) -> None:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        running = manifest["outcome"]["state"] == "running" and manifest["process"]["boot_id"] == boot_id()
        pid, started_s = int(manifest["process"]["pid"]), float(manifest["process"]["started_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return  # no manifest of ours: prepare() looks at what else lies there
    with contextlib.suppress(psutil.NoSuchProcess):
        if running and abs(psutil.Process(pid).create_time() - started_s) < 1.0:
            raise UsageError(
                f"the run in {folder} is still going on",
                expected="a folder that no job writes to",
                found=f"process {pid}",
                hint="wait for it, stop it with SIGINT, or choose another --run.folder",
            )


def stream(config: Config, identity: dict[str, Any]) -> dict[str, Any]:
    """Whatever decides the bytes of a training batch, flat and as plain JSON: what a resume must find unchanged."""
    source, transform = config.source("TRAIN"), config.transform("TRAIN")
    return {
        "records": identity.get("records"),
        "content": identity.get("content"),
        "batch": source.batch,
        **({"iter_size": config.iter_size} if config.iter_size > 1 else {}),
        "tail": source.tail,
        "shuffle": config.data.order.shuffle,
        "seed": config.order_seed,
        "shards": config.shards,
        **_bad_records(config),
        **{f"transform.{key}": value for key, value in transform.model_dump(mode="json").items()},
    }


def _bad_records(config: Config) -> dict[str, Any]:
    """What decides which records are replaced; nothing where the job stops at the first (and may then allow more)."""
    data = config.data
    if data.on_bad_record == "stop":
        return {}
    return {"on_bad_record": data.on_bad_record, **({"max_pixels": data.max_pixels} if data.max_pixels else {})}


def data_identity(source: Source, *, tolerant: bool = False) -> dict[str, Any]:
    """What the source says of itself, and ``content``: see :func:`pipeline.content.content`."""
    return {**source.identity(), "content": content(source, tolerant=tolerant)}


def versions() -> dict[str, str]:
    """Versions of what the numbers of a step depend on."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in ("numpy", "numba")}}


def file_identity(path: str | None) -> dict[str, str] | None:
    """Path and SHA-256 of a file of the job; None where the job has none."""
    if path is None:
        return None
    return {"path": str(Path(path).absolute()), "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}
