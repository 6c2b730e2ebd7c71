"""Snapshots: weights, solver state and a sidecar that says where in the stream of data they belong.

``snapshots/iter_N.{caffemodel,solverstate,json}`` (the first two end in ``.h5`` if the solver says HDF5), N being the
number of updates done. All three are written into a temporary folder beside them, synced and renamed, the sidecar
last: a snapshot without its sidecar does not exist, and one whose files do not have the sizes and hashes of the sidecar
is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from profiler.cli import dumps
from profiler.errors import StallscopeError, UsageError

SCHEMA = 1
_PARTS = (".caffemodel", ".solverstate")
_FORMATS = ("", ".h5")
_LEFT_OUT = {"on_bad_record": "stop", "max_pixels": "the default"}
"""What it means that a part of a stream is not written down."""
_SIDECAR = re.compile(r"iter_(\d+)\.json")
_ANY_PART = re.compile(r"iter_(\d+)\.(?:(?:caffemodel|solverstate)(?:\.h5)?|json)")


class SnapshotWriter(Protocol):
    """What a solver offers: write ``FOLDER/iter_N.caffemodel`` and ``.solverstate``, or both with ``.h5`` behind, and
    return the two paths."""

    def snapshot(self, prefix: Path) -> tuple[Path, Path]: ...


@dataclass(frozen=True)
class Snapshot:
    """A complete snapshot. ``sidecar`` is the document in ``iter_N.json``, empty for Caffe's files (:func:`bare`)."""

    iteration: int
    weights: Path
    state: Path
    sidecar: Mapping[str, Any]

    @property
    def origin(self) -> int:
        """The step that got the first batch of the stream: 0, or the iteration of the state of Caffe's before it."""
        if not self.sidecar:
            return self.iteration
        return int(self.position.get("origin", 0))

    @property
    def position(self) -> Mapping[str, Any]:
        """What the feed's ``state_dict`` said; empty for Caffe's files."""
        position: Mapping[str, Any] = self.sidecar.get("position", {})
        return position


@dataclass(frozen=True)
class Found:
    """What a folder holds: the newest usable snapshot, and a sentence for each one that was passed over.

    ``damaged``: those of them that were complete once. (One without a sidecar was never finished.)
    """

    snapshot: Snapshot | None
    ignored: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def write(folder: Path, iteration: int, solver: SnapshotWriter, position: Mapping[str, Any]) -> Snapshot:
    """Write the snapshot of ``iteration`` into ``folder`` (``.../snapshots``).

    ``position`` goes into the sidecar beside the schema, iteration and file hashes. Raises :class:`StallscopeError`
    when the disk does not take it (full, read-only); older snapshots stay as they were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / ".writing"
    name = f"iter_{iteration}"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        written = solver.snapshot(scratch)
        ending = ".h5" if written[0].name.endswith(".h5") else ""
        made = {name + part + ending: path for part, path in zip(_PARTS, written, strict=True)}
        files = {}
        for final, path in made.items():
            _sync(path)
            files[final] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        sidecar = {"schema": SCHEMA, "iteration": iteration, **position, "files": files}
        text = scratch / "sidecar"
        text.write_text(dumps(sidecar) + "\n", encoding="utf-8")
        _sync(text)
        # An older snapshot of the same iteration stops existing before its files are replaced.
        (folder / f"{name}.json").unlink(missing_ok=True)
        _sync(folder)
        for final, path in made.items():
            path.rename(folder / final)
        for other in {name + part + ending for part in _PARTS for ending in _FORMATS} - set(made):
            (folder / other).unlink(missing_ok=True)  # of an older snapshot in the other format
        _sync(folder)
        text.rename(folder / f"{name}.json")
        _sync(folder)
    except OSError as error:
        kept = latest(folder).snapshot
        raise StallscopeError(
            f"cannot write the snapshot {folder / name}: {error.strerror or error}",
            found=f"{shutil.disk_usage(folder).free / 1e6:.1f} MB free" if folder.exists() else "no folder",
            hint=f"make room and resume from iteration {kept.iteration}" if kept else "make room and start again",
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    weights, state = (folder / final for final in made)
    return Snapshot(iteration, weights, state, json.loads(dumps(sidecar)))


def latest(folder: Path) -> Found:
    """The usable snapshot with the most iterations in ``folder``; a folder that does not exist holds none."""
    ignored: list[str] = []
    damaged: list[str] = []
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    seen = {int(match[1]) for name in names if (match := _ANY_PART.fullmatch(name))}
    complete = {int(match[1]) for name in names if (match := _SIDECAR.fullmatch(name))}
    for iteration in sorted(seen, reverse=True):
        if iteration not in complete:
            ignored.append(f"iter_{iteration} has no sidecar: its writing was interrupted")
            continue
        try:
            return Found(_read(folder, iteration), ignored, damaged)
        except StallscopeError as error:
            damaged.append(f"iter_{iteration} is damaged: {error.what}")
            ignored.append(damaged[-1])
    return Found(None, ignored, damaged)


def bare(state: Path) -> Snapshot:
    """The snapshot of a solver state and its weights alone: Caffe's, or ours without its sidecar.

    Raises :class:`StallscopeError` for a file that is no solver state, and where its weights are gone.
    """
    from gpu.solverstate import find_weights, read_state

    read = read_state(state)
    return Snapshot(read.iteration, find_weights(state, read), state, {})


def _read(folder: Path, iteration: int) -> Snapshot:
    path = folder / f"iter_{iteration}.json"
    try:
        sidecar = json.loads(path.read_text(encoding="utf-8"))
        files = sidecar["files"]
        ending = next((e for e in _FORMATS if f"iter_{iteration}{_PARTS[0]}{e}" in files), "")
        wanted = {part + ending: files[f"iter_{iteration}{part}{ending}"] for part in _PARTS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StallscopeError(f"{path.name} cannot be read ({type(error).__name__}: {error})") from error
    if sidecar.get("schema") != SCHEMA or sidecar.get("iteration") != iteration:
        raise StallscopeError(f"{path.name} belongs to another version or another iteration")
    for suffix, entry in wanted.items():
        part = folder / f"iter_{iteration}{suffix}"
        if not part.exists():
            raise StallscopeError(f"{part.name} is missing")
        if part.stat().st_size != entry["bytes"] or _sha256(part) != entry["sha256"]:
            raise StallscopeError(f"{part.name} is not the file that the sidecar describes")
    weights, state = (folder / f"iter_{iteration}{part}" for part in wanted)
    return Snapshot(iteration, weights, state, sidecar)


def check_same_stream(snapshot: Snapshot, stream: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError` when resuming with ``stream`` would not continue the stream the snapshot was made in.

    ``stream`` is the flat mapping that the sidecar holds under ``stream``: whatever decides the bytes of a batch.
    Engine, workers, ring depth and database kind are not in it.
    """
    if not snapshot.sidecar:
        return  # it has none: the data begin anew
    before = snapshot.sidecar.get("stream", {})
    now = json.loads(dumps(dict(stream)))
    different = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if different:
        raise UsageError(
            f"iter_{snapshot.iteration} was made in another stream of data; what differs: {', '.join(different)}",
            expected=", ".join(f"{key} = {before.get(key, _LEFT_OUT.get(key, 'not set'))}" for key in different),
            found=", ".join(f"{key} = {now.get(key, _LEFT_OUT.get(key, 'not set'))}" for key in different),
            hint="set them as they were, or start a run of its own with --run.folder",
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
