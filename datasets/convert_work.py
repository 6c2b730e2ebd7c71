"""The temporary folder of a conversion, from which a killed one goes on.

``.OUT.convert`` beside OUT holds the database so far, what it is made from, and what was skipped. The database itself
says how far it is: each of its transactions is on the disk when it has ended. A run with the same input and options
goes on after the last record; with others it starts over. OUT takes its name only when everything is complete.

    lock          held while a conversion runs; the kernel frees it when the process dies
    state.json    what the conversion is made from; whether the databases are complete
    db, labels    the databases, and beside them, in the end, their manifests
    skipped.jsonl place and reason of each item that was left out
    samples/      the index of an input that can only be read from front to back
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from datasets import publish
from datasets.manifest import checksum_path, remove_manifest, write_whole
from datasets.source import manifest_path
from datasets.targets import check_target
from profiler.errors import StallscopeError, UsageError

SCHEMA = 1
_NAMES = ("db", "labels")
OPTIONS = "the options"
"""Where the options stand in what a conversion is made from."""


def folder_of(out: Path) -> Path:
    return out.with_name(f".{out.name}.convert")


class Work:
    """The temporary folder of one conversion to ``outs``: the database and, if there is one, that of its labels."""

    def __init__(self, outs: list[Path]) -> None:
        self.outs = outs
        self.folder = folder_of(outs[0])
        self._state: dict[str, Any] | None = None

    def database(self, number: int) -> Path:
        """Where the database that will be ``outs[number]`` is made."""
        return self.folder / _NAMES[number]

    @property
    def samples(self) -> Path:
        return self.folder / "samples"

    # ------------------------------------------------------------------------------------------------------ beginning

    def finished(self, told: dict[str, Any], force: bool) -> bool:
        """Whether all was complete when an earlier run with the same input was killed; then it has its name now.

        An earlier run whose databases had their names already, and only lacked a manifest, gets it whatever is asked.
        """
        state = self._read_state()
        if state is None or not state.get("complete"):
            return False
        same = state["told"] == told and [entry["out"] for entry in state["targets"]] == self._out_names()
        if same:
            for number, out in enumerate(self.outs):
                if self.database(number).exists():
                    check_target(out, force)
            self.publish()
        elif not any((self.folder / name).exists() for name in _NAMES):
            self._place()
            (self.folder / "state.json").unlink()
        return same

    def begin(self, told: dict[str, Any], say: Callable[[str], object], force: bool = False) -> bool:
        """Prepare the folder; True if an interrupted run with the same input and options goes on.

        Raises :class:`UsageError` that names the options that are others, where those of the interrupted run would go
        on from there; ``force`` starts over.
        """
        state = self._read_state()
        if state is not None and state["told"] == told and not state.get("complete"):
            return True
        if state is not None:
            changed = [key for key in told if state["told"].get(key) != told[key]]
            if changed == [OPTIONS] and not force and not state.get("complete"):
                raise _other_options(self.outs[0], state["told"][OPTIONS], told[OPTIONS])
            say(
                "an interrupted conversion to the same target is not continued, as "
                + (f"{' and '.join(changed)} changed since" if changed else "it was to another target as well")
                + ": starting over"
            )
        self.restart(told)
        return False

    def restart(self, told: dict[str, Any], *, keep_samples: bool = False) -> None:
        """Remove what there is and begin anew."""
        for path in self.folder.iterdir():
            if path == self.samples and keep_samples:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()
        for number in range(len(self.outs)):
            self.database(number).mkdir()
        self._write_state({"schema": SCHEMA, "told": told, "complete": False})

    # ---------------------------------------------------------------------------------------------------------- skips

    def skip(self, place: int, reason: str) -> None:
        """Note an item that is left out; on the disk before any later item is."""
        with open(self.folder / "skipped.jsonl", "ab") as file:
            file.write((json.dumps([place, reason]) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())

    def skipped(self, before: int) -> Iterator[str]:
        """Reasons of the items left out before that place. What comes later is forgotten: it is tried again."""
        place = self.folder / "skipped.jsonl"
        if not place.exists():
            return
        kept = []
        for line in place.read_bytes().splitlines(keepends=True):
            try:
                number, reason = json.loads(line)
            except ValueError:
                break  # the torn end
            if number < before and line.endswith(b"\n"):
                kept.append(line)
                yield reason
        write_whole(place, b"".join(kept))

    # ------------------------------------------------------------------------------------------------------------ end

    def complete(self) -> None:
        """From here on nothing is missing but the names. Manifests lie beside the databases in the folder."""
        assert self._state is not None
        for number in range(len(self.outs)):
            for path in (self.database(number), *self.database(number).iterdir()):
                publish.sync(path)
        targets = [
            {"out": out, "inode": self.database(number).stat().st_ino} for number, out in enumerate(self._out_names())
        ]
        self._write_state({**self._state, "complete": True, "targets": targets})

    def publish(self) -> None:
        """Give each complete database its name, its manifest the place beside it, and remove the folder."""
        self._place()
        self.remove()

    def _place(self) -> None:
        assert self._state is not None
        for name, target in zip(_NAMES, self._state["targets"], strict=False):
            database, out = self.folder / name, Path(target["out"])
            if database.exists():
                # The old manifest, if any, speaks of a database that is about to be replaced.
                remove_manifest(out)
                publish.publish(database, out)
            if out.exists() and out.stat().st_ino == target["inode"]:
                for beside in (checksum_path, manifest_path):
                    if beside(database).exists():
                        os.replace(beside(database), beside(out))
                publish.sync(out.parent)
            publish.sweep(out)

    def remove(self) -> None:
        """Remove the folder. At any moment, what says how far things are is true of what is still there."""
        state = self.folder / "state.json"
        with suppress(OSError):  # as far as it can be removed
            if self._state is not None and self._state.get("complete"):
                for path in self.folder.iterdir():
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
                    elif path.name not in ("lock", state.name):
                        path.unlink()
            state.unlink(missing_ok=True)  # first, where half of the rest is nothing to go on from
        shutil.rmtree(self.folder, ignore_errors=True)

    def holds_other(self, told: dict[str, Any]) -> bool:
        """Whether an interrupted conversion of other input, or with other options, could go on from here."""
        state = self._read_state()
        return state is not None and state["told"] != told

    # -------------------------------------------------------------------------------------------------------- private

    def _out_names(self) -> list[str]:
        return [str(out.absolute()) for out in self.outs]

    def _read_state(self) -> dict[str, Any] | None:
        try:
            state = json.loads((self.folder / "state.json").read_bytes())
            self._state = state if state["schema"] == SCHEMA and isinstance(state["told"], dict) else None
        except (OSError, ValueError, KeyError, TypeError):
            self._state = None  # killed before there was one, or of another version
        return self._state

    def _write_state(self, state: dict[str, Any]) -> None:
        self._state = state
        write_whole(self.folder / "state.json", json.dumps(state, indent=1).encode())


def _other_options(out: Path, before: dict[str, Any], now: dict[str, Any]) -> UsageError:
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    return UsageError(
        f"an interrupted conversion to {out} was made with other options, so it cannot go on with these",
        expected=", ".join(_option(key, before.get(key)) for key in changed),
        found=", ".join(_option(key, now.get(key)) for key in changed),
        hint="the options that are expected go on where it was; --force starts over",
    )


def _option(name: str, value: Any) -> str:
    """An option as it is given on the command line."""
    if name == "kind":
        return f"the source's kind {value}"
    flag = "--label-db" if name == "pairs" else f"--{name.replace('_', '-')}"
    if value is True:
        return flag
    if name == "shuffle":
        return f"{flag} {'off' if value is None else value}"
    if value is None or value is False:
        return f"no {flag}"
    return f"{flag} {','.join(map(str, value)) if isinstance(value, list) else value}"


@contextmanager
def working(outs: list[Path]) -> Iterator[Work]:
    """The locked temporary folder for ``outs``.

    Raises :class:`UsageError` if another conversion to the same target runs, or nothing can be written there.
    """
    work = Work(outs)
    while True:
        try:
            work.folder.mkdir(exist_ok=True)
            descriptor = os.open(work.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # another conversion was just ending and has removed the folder
        except OSError as error:
            raise UsageError(f"nothing can be written in {outs[0].parent.absolute()}: {error.strerror}") from error
        try:
            _lock(descriptor, outs[0])
            if not _same_file(descriptor, work.folder / "lock"):
                continue
            yield work
            return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip()
        raise UsageError(
            f"another conversion to {out} is running" + (f": {owner}" if owner else ""), hint="wait until it has ended"
        ) from None
    except OSError as error:
        raise StallscopeError(f"no lock can be had in {out.parent.absolute()}: {error.strerror}") from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
