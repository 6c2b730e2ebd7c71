"""Append-only Arrow streams: written message by message with single system calls, readable at any byte of a cut.

A stream is a schema message, then one message per flush, then an end mark. The end mark is missing when the process
was killed, and the last message may be torn; :func:`read_stream` gives what is whole and says what is not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from profiler import files
from profiler.events import EVENT

_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"

NUMBERS = ("actor", "pid", "monotonic_ns", "wall_ns")
"""Entries of a stream's identity that are integers."""

EVENTS = pa.schema([(name, pa.from_numpy_dtype(EVENT[name])) for name in EVENT.names or ()])
"""Columns of an event stream: the fields of :data:`profiler.events.EVENT`."""

FINGERPRINTS = pa.schema(
    [
        ("step", pa.int64()), ("name", pa.string()), ("ordered", pa.uint64()), ("multiset", pa.uint64()),
        ("max_abs", pa.float64()), ("l2", pa.float64()), ("zeros", pa.int64()), ("subnormals", pa.int64()),
        ("infs", pa.int64()), ("nans", pa.int64()),
    ]
)  # fmt: skip
"""Columns of a fingerprint stream."""

SAMPLES = pa.schema([("t_ns", pa.int64()), ("pid", pa.int64()), ("metric", pa.string()), ("value", pa.float64())])
"""Columns of a sample stream, one row per reading: t_ns is ``time.monotonic_ns``, pid 0 stands for the host."""


MEMORY = pa.schema([(name, pa.int64()) for name in ("step", "t_ns", "used", "reserved", "largest_free", "live_blobs")])
"""Columns of a memory stream, one row per step: bytes, -1 where there is no reading."""


class StreamFile:
    """One stream being written. ``lazy`` creates the file at the first row."""

    def __init__(
        self, folder: Path, stem: str, schema: pa.Schema, identity: dict[str, str], *, lazy: bool = False
    ) -> None:
        self._schema = schema.with_metadata(identity)
        self._folder = folder
        self._stem = stem
        self._torn = False
        self.fd = -1
        self.path: Path | None = None
        if not lazy:
            self._create()

    def append_events(self, data: bytes) -> None:
        """Append rows given as the bytes of an :data:`EVENT` array. Raises OSError."""
        rows = np.frombuffer(data, EVENT)
        columns = [column(rows[field.name], field.type) for field in self._schema]
        self._append(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def append_rows(self, rows: Sequence[Sequence[Any]]) -> None:
        """Append rows given as tuples in the order of the schema. Raises OSError."""
        columns = zip(zip(*rows, strict=True), self._schema, strict=True)
        arrays = [column(values, field.type) for values, field in columns]
        self._append(pa.RecordBatch.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        """Write the end mark and close; idempotent."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            try:
                if not self._torn:
                    files.write_all(fd, _END)
            finally:
                os.close(fd)

    def _create(self) -> None:
        fd, path = files.create(self._folder, self._stem, ".arrows")
        try:
            files.write_all(fd, self._schema.serialize().to_pybytes())
        except OSError:  # what came after half a schema could never be read
            os.close(fd)
            path.unlink()
            raise
        self.fd, self.path = fd, path

    def _append(self, batch: pa.RecordBatch) -> None:
        if self.fd < 0:
            self._create()
        before = os.fstat(self.fd).st_size
        if self._torn:
            raise OSError("an earlier write failed half-way")
        try:
            files.write_all(self.fd, batch.serialize().to_pybytes())
        except OSError:
            # Half a message would hide everything after it: take it back, or write no more if that fails too.
            try:
                os.ftruncate(self.fd, before)
            except OSError:
                self._torn = True
            raise


def column(values: Sequence[Any] | np.ndarray, kind: pa.DataType) -> pa.Array:
    """Values without nulls as an Arrow array of numbers, strings or lists of numbers.

    Built from buffers, because ``pa.array`` imports pandas wherever that is installed: half a second in every process,
    in the flush thread, and an error where the interpreter is already shutting down.
    """
    if pa.types.is_string(kind) or pa.types.is_list(kind):
        text = pa.types.is_string(kind)
        parts = [value.encode() for value in values] if text else list(values)
        ends = np.zeros(len(parts) + 1, np.int32)
        np.cumsum([len(part) for part in parts], out=ends[1:])
        if text:
            return pa.Array.from_buffers(kind, len(parts), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(parts))])
        child = column(np.concatenate(parts) if parts else (), kind.value_type)
        return pa.Array.from_buffers(kind, len(parts), [None, pa.py_buffer(ends)], children=[child])
    dtype = np.float64 if kind == pa.float64() else np.dtype(str(kind))
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values, dtype))])


def repeated(value: int, count: int, kind: pa.DataType) -> pa.Array:
    """One number many times, without ``pa.scalar``, which imports pandas as well."""
    return column(np.full(count, value), kind)


def read_stream(path: Path) -> tuple[pa.Table | None, dict[str, str], str | None, bool]:
    """Read what is whole of a stream.

    Returns (table or None if not even the schema is there, identity, problem or None, whether it was closed properly).
    """
    content = path.read_bytes()
    if not content:
        return None, {}, "empty: the process ended before its first write", False
    closed = content.endswith(_END)
    try:
        reader = pa.ipc.open_stream(pa.py_buffer(content))
        identity = {key.decode(): value.decode() for key, value in (reader.schema.metadata or {}).items()}
        for number in NUMBERS:
            int(identity[number])
        schema = reader.schema.remove_metadata()
        "".join(schema.names)  # damaged names raise here, where it is expected
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        return None, {}, f"unreadable from the start ({_first_line(error)})", False
    batches = []
    problem = None
    while True:
        try:
            batch = reader.read_next_batch()
            batch.validate(full=True)
        except StopIteration:
            break
        except (pa.ArrowException, OSError, ValueError) as error:
            problem = f"cut within a message; everything before it was read ({_first_line(error)})"
            break
        batches.append(batch)
    table = pa.Table.from_batches(batches, schema=schema)
    return table, identity, problem, closed


def identity(path: Path) -> dict[str, str] | None:
    """What the writer of a stream said of itself; None where it cannot be read (yet)."""
    try:
        with pa.OSFile(str(path)) as source:
            found = {key.decode(): value.decode() for key, value in (pa.ipc.read_schema(source).metadata or {}).items()}
        for number in NUMBERS:
            int(found[number])
    except (pa.ArrowException, OSError, ValueError, KeyError):
        return None
    return found


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
