"""The run folder: what the processes of a run wrote, read back as one value, whether the run ended well or was killed.

Nothing here raises for damage: what is whole is read, and every torn or missing part is named in ``Run.problems``.
Only a folder that is no run at all is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from profiler import files, streams
from profiler.cli import dumps
from profiler.errors import StallscopeError
from profiler.events import LATER, MISSING
from profiler.osread import boot_id

SCHEMA = 1
KIND = "stallscope-run"
_COMPACT = "events.parquet"
_PROCESSES = b"stallscope.processes"
_OF_EVENTS = ("process", "name", "role", "pid")
_OF_FINGERPRINTS = ("process", "role", "actor")
_OF_SAMPLES = ("process", "host")
_OF_MEMORY = ("process",)


@dataclass(frozen=True)
class Run:
    """One run folder, read.

    Attributes
    ----------
    manifest: contents of manifest.json, {} if it is not there.
    events: columns of :data:`profiler.events.EVENT`, then ``process`` ("trainer-4711", unique in the run), ``name`` and
        ``role`` (dictionary strings) and ``pid`` (int64). Rows of a process are in the order they were written. Times
        are monotonic ns of the process's host: compare them only between processes of the same ``boot_id``.
    notes: the lines of all notes by wall time, each with ``process``, ``name``, ``role``, ``actor`` and ``pid`` of the
        writer added where the note has no such field itself.
    fingerprints: columns of :data:`profiler.streams.FINGERPRINTS` (name as a dictionary), then ``process``, ``role``
        (dictionaries) and ``actor``.
    samples: columns of :data:`profiler.streams.SAMPLES` (metric as a dictionary), then ``process`` (the sampling one)
        and ``host`` (dictionaries).
    memory: columns of :data:`profiler.streams.MEMORY`, then ``process``.
    processes: what each process said of itself: name, role, actor, pid, host, boot_id, monotonic_ns, wall_ns, detail
        and ``closed``, which is False for one that was killed or still runs.
    problems: a sentence for each torn, missing or unreadable part.
    """

    folder: Path
    manifest: dict[str, Any]
    events: pa.Table
    notes: list[dict[str, Any]]
    fingerprints: pa.Table
    samples: pa.Table
    memory: pa.Table = field(default_factory=lambda: pa.Table.from_batches([], schema=streams.MEMORY))
    processes: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def write_manifest(folder: str | os.PathLike[str], manifest: dict[str, Any]) -> None:
    """Write manifest.json in one step (temporary file, sync, rename), without NaN; adds ``kind`` and ``schema``."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    document = {"kind": KIND, "schema": SCHEMA, **manifest}
    files.replace(path / "manifest.json", dumps(document).encode() + b"\n")


def update_manifest(folder: str | os.PathLike[str], **changes: Any) -> None:
    """Set top-level keys of manifest.json, in one step. One process of a run (the trainer) does this."""
    manifest, _ = _read_manifest(Path(folder))
    write_manifest(folder, {**manifest, **changes})


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run folder: finished, still being written, or cut short at any byte.

    Raises StallscopeError if it is not a run folder, or was written by a newer version.
    """
    path = Path(folder)
    _check_kind(path)
    manifest, problems = _read_manifest(path)
    processes: dict[str, dict[str, Any]] = {}
    events = _load_events(path, processes, problems)
    fingerprints = _load_streams(path / "fingerprints", streams.FINGERPRINTS, _OF_FINGERPRINTS, problems)
    samples = _load_streams(path / "samples", streams.SAMPLES, _OF_SAMPLES, problems)
    return Run(
        folder=path,
        manifest=manifest,
        events=events,
        notes=_load_notes(path / "events", processes, problems),
        fingerprints=fingerprints,
        samples=samples,
        memory=_load_streams(path / "memory", streams.MEMORY, _OF_MEMORY, problems),
        processes=processes,
        problems=problems,
    )


def compact(folder: str | os.PathLike[str]) -> Path | None:
    """Merge the event streams into ``events/events.parquet`` and remove them; for the clean end of a run.

    Streams of processes that are alive, and damaged ones, stay as they are. Interrupted at any point, no event is
    lost or counted twice. Returns the file, or None when there was nothing to merge.
    """
    events = Path(folder) / "events"
    processes, table = _read_compact(events, [])
    done: list[Path] = []
    tables = [table] if table is not None else []
    for path in sorted(events.glob("*.arrows")):
        part, identity, problem, closed = streams.read_stream(path)
        if part is None or problem or not (closed or _is_dead(identity)):
            continue
        part = _with_later_columns(part)
        done.append(path)
        if path.stem not in processes:  # else an earlier merge was interrupted before it removed this stream
            processes[path.stem] = {**_plain(identity), "closed": closed}
            tables.append(_with_identity(part, path.stem, identity, _OF_EVENTS))
    if not done:
        return None
    merged = pa.concat_tables(tables).unify_dictionaries()
    merged = merged.replace_schema_metadata({_PROCESSES: json.dumps(processes).encode()})
    target = events / _COMPACT
    temporary = events / f".{_COMPACT}.{os.getpid()}"
    pq.write_table(merged, temporary, compression="zstd")
    files.sync(temporary)
    temporary.rename(target)
    files.sync(events)
    for path in done:
        path.unlink()
    return target


def _check_kind(folder: Path) -> None:
    if not folder.is_dir():
        raise StallscopeError(
            f"no run folder at {folder}",
            found="a file" if folder.exists() else "nothing",
            hint="give the folder that holds manifest.json and events/",
        )
    manifest, _ = _read_manifest(folder)
    kind = manifest.get("kind")
    if (kind is not None and kind != KIND) or (kind is None and not (folder / "events").is_dir()):
        inside = ", ".join(sorted(entry.name for entry in folder.iterdir())[:6]) or "an empty folder"
        raise StallscopeError(
            f"{folder} is not a run folder",
            expected=f"manifest.json of kind {KIND!r} or a folder events/",
            found=inside if kind is None else f"manifest.json of kind {kind!r}",
            hint="give the run.folder of a job",
        )
    schema = manifest.get("schema", SCHEMA)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise StallscopeError(
            f"{folder} was written by a newer version", expected=f"schema <= {SCHEMA}", found=schema,
            hint="update stallscope",
        )  # fmt: skip


def _read_manifest(folder: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except FileNotFoundError:
        return {}, ["manifest.json is missing: configuration and environment are not known"]
    except (OSError, ValueError) as error:
        return {}, [f"manifest.json is unreadable ({error})"]
    if not isinstance(manifest, dict):
        return {}, ["manifest.json is unreadable (not an object)"]
    return manifest, []


def _load_events(folder: Path, processes: dict[str, dict[str, Any]], problems: list[str]) -> pa.Table:
    known, merged = _read_compact(folder / "events", problems)
    processes.update(known)
    table = _load_streams(folder / "events", streams.EVENTS, _OF_EVENTS, problems, processes)
    if merged is not None:
        table = pa.concat_tables([merged, table]).unify_dictionaries().combine_chunks()
    if not table.num_rows:
        problems.append("events/ holds no events")
    return table


def _read_compact(events: Path, problems: list[str]) -> tuple[dict[str, dict[str, Any]], pa.Table | None]:
    path = events / _COMPACT
    if not path.exists():
        return {}, None
    try:
        table = pq.read_table(path)
        processes = json.loads((table.schema.metadata or {})[_PROCESSES])
        wanted = _schema(streams.EVENTS, _OF_EVENTS)
        table = _with_later_columns(table.replace_schema_metadata(None)).select(wanted.names).cast(wanted)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        problems.append(f"events/{_COMPACT} is unreadable ({error})")
        return {}, None
    return processes, table


def _load_streams(
    folder: Path, schema: pa.Schema, extras: tuple[str, ...], problems: list[str],
    processes: dict[str, dict[str, Any]] | None = None,
) -> pa.Table:  # fmt: skip
    """All streams of a folder as one table. With ``processes``, streams named there are skipped, others added to it."""
    tables = [pa.Table.from_batches([], schema=_schema(schema, extras))]
    for path in sorted(folder.glob("*.arrows")):
        where = f"{folder.name}/{path.name}"
        if processes is not None and path.stem in processes:
            continue  # merged already: compaction was interrupted before it removed the stream
        try:
            table, identity, problem, closed = streams.read_stream(path)
        except OSError as error:
            problems.append(f"{where}: {error}")
            continue
        if table is not None and schema == streams.EVENTS:
            table = _with_later_columns(table)
        if table is not None and table.schema != schema:
            table, problem = None, "other columns than expected, left out"
        if problem:
            problems.append(f"{where}: {problem}")
        if table is None:
            continue
        if processes is not None:
            processes[path.stem] = {**_plain(identity), "closed": closed}
            if not closed and not problem:
                problems.append(f"{where}: not closed, the process was killed or still runs")
        tables.append(_with_identity(table, path.stem, identity, extras))
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def _load_notes(folder: Path, processes: dict[str, dict[str, Any]], problems: list[str]) -> list[dict[str, Any]]:
    notes = []
    for path in sorted(folder.glob("*.jsonl")):
        who = processes.get(path.stem, {})
        whose = {"process": path.stem, **{key: who.get(key) for key in ("name", "role", "actor", "pid")}}
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            problems.append(f"events/{path.name}: {error}")
            continue
        for number, line in enumerate(lines, 1):
            try:
                if line:
                    notes.append({**whose, **json.loads(line)})
            except (ValueError, TypeError):
                problems.append(f"events/{path.name}: line {number} is torn")
    return sorted(notes, key=lambda note: note.get("wall_ns") or 0)


def _with_later_columns(table: pa.Table) -> pa.Table:
    """A table of events with the columns that older versions did not write, as missing readings."""
    for name in LATER:
        if name not in table.column_names:
            kind = streams.EVENTS.field(name).type
            table = table.append_column(name, streams.repeated(MISSING, table.num_rows, kind))
    return table


def _schema(schema: pa.Schema, extras: Iterable[str]) -> pa.Schema:
    """Columns of a loaded table: those of the stream, strings as dictionaries, and those of the process."""
    text = pa.dictionary(pa.int32(), pa.string())
    fields = [pa.field(column.name, text if column.type == pa.string() else column.type) for column in schema]
    return pa.schema(fields + [pa.field(name, pa.int64() if name in streams.NUMBERS else text) for name in extras])


def _with_identity(table: pa.Table, process: str, identity: dict[str, str], extras: Iterable[str]) -> pa.Table:
    schema = _schema(table.schema, extras)
    columns = [column.dictionary_encode() if column.type == pa.string() else column for column in table.itercolumns()]
    values = {"process": process, **_plain(identity)}
    for name in extras:
        if name in streams.NUMBERS:
            columns.append(streams.repeated(values[name], table.num_rows, pa.int64()))
        else:
            index = streams.repeated(0, table.num_rows, pa.int32())
            columns.append(
                pa.DictionaryArray.from_arrays(index, streams.column([str(values.get(name, ""))], pa.string()))
            )
    return pa.table(columns, schema=schema)


def _plain(identity: dict[str, str]) -> dict[str, Any]:
    return {key: int(value) if key in streams.NUMBERS else value for key, value in identity.items()}


def _is_dead(identity: dict[str, str]) -> bool:
    """Whether a process is known to have ended: it ran under this boot of this kernel and is there no more."""
    if identity.get("boot_id") != boot_id():
        return False
    try:
        os.kill(int(identity["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
