"""Caffe's binary files: weights (.caffemodel) and the telling apart of everything that looks like them.

Weights, solver states and mean files are all protocol buffers, so the wrong one half-parses; :func:`sniff` looks at
which fields are there, not at the file's name. Layers of all three generations (``layer``, the V1 ``layers`` and the V0
ones nested in them) and both ways of giving a blob its shape are read; what is written is the newest form.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpu import wire
from gpu.wire import WireError
from profiler.errors import StallscopeError

MAX_BYTES = 2**31 - 1
"""Other readers of the format stop here."""

_KINDS = {
    "caffemodel": "weights (caffemodel)",
    "solverstate": "a solver state (solverstate)",
    "blob": "a single blob, such as a mean file (binaryproto)",
    "hdf5": "an HDF5 file",
    "text": "a text file, such as a prototxt",
    "empty": "an empty file",
    "unknown": "neither weights nor a solver state",
}


@dataclass(frozen=True)
class StoredBlob:
    """One parameter as stored: float32, and whether its shape was the old num/channels/height/width one."""

    array: np.ndarray
    legacy: bool


@dataclass(frozen=True)
class StoredLayer:
    """A layer of a weights file that has parameters."""

    name: str
    blobs: list[StoredBlob]


@dataclass
class CopyReport:
    """What :func:`copy_weights` did with each layer, by name and in order."""

    copied: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """In the file, not in the net."""
    at_init: list[str] = field(default_factory=list)
    """In the net, not in the file."""

    def __str__(self) -> str:
        parts = [f"{len(self.copied)} layers copied"]
        if self.ignored:
            parts.append(f"ignored, not in the net: {', '.join(self.ignored)}")
        if self.at_init:
            parts.append(f"left at initialisation, not in the file: {', '.join(self.at_init)}")
        return "; ".join(parts)


def sniff(path: str | os.PathLike[str]) -> str:
    """What kind of file this is: caffemodel, solverstate, blob, hdf5, text, empty or unknown.

    Raises StallscopeError where it cannot be read.
    """
    return _sniff(contents(path))


def _sniff(data: memoryview) -> str:
    if len(data) == 0:
        return "empty"
    start = bytes(data[:4096])
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return "hdf5"
    kinds: dict[int, int] = {}
    with contextlib.suppress(WireError):  # a damaged message still shows its kind by its first fields
        for number, kind, _ in wire.fields(data):
            kinds.setdefault(number, kind)
            if number == 100:
                break
    if kinds.get(100) == wire.BYTES:
        return "caffemodel"
    if kinds.get(1) == wire.VARINT and (kinds.get(2) == wire.BYTES or kinds.get(3) == wire.BYTES):
        return "solverstate"
    if kinds.get(5) in (wire.BYTES, wire.FIXED32) or kinds.get(7) == wire.BYTES or kinds.get(8) == wire.BYTES:
        return "blob"
    if b"\0" not in start and not any(byte < 9 or 13 < byte < 32 for byte in start):
        return "text"
    if set(kinds.items()) <= {(1, wire.BYTES), (2, wire.BYTES)} and kinds:
        return "caffemodel"  # V1 layers, or a net without any
    if kinds == {1: wire.VARINT}:
        return "solverstate"
    return "unknown"


def expect(path: str | os.PathLike[str], kind: str, data: memoryview) -> None:
    """Raise StallscopeError, naming both kinds, unless ``data`` is a file of ``kind``."""
    found = _sniff(data)
    if found == kind:
        return
    hint = None
    if found == "hdf5":
        hint = "HDF5 snapshots are not supported; save with snapshot_format: BINARYPROTO"
    elif {found, kind} == {"caffemodel", "solverstate"}:
        hint = "the two files of a snapshot are told apart by their endings: weights .caffemodel, state .solverstate"
    raise StallscopeError(f"{path} is not {_KINDS[kind]}", expected=_KINDS[kind], found=_KINDS[found], hint=hint)


def contents(path: str | os.PathLike[str]) -> memoryview:
    """All bytes of the file, read-only. Raises StallscopeError where there is no file, or none that may be read."""
    path = Path(path)
    if path.is_dir() or not path.exists():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise StallscopeError(f"{path} {what}", expected="a file written by Caffe or by Stallscope")
    try:
        return memoryview(path.read_bytes())
    except OSError as error:
        raise StallscopeError(f"{path} cannot be read: {error.strerror}") from error


def read_layers(path: str | os.PathLike[str]) -> list[StoredLayer]:
    """The layers with parameters of a weights file, in the order of the file.

    Raises StallscopeError for another kind of file, damaged bytes, and blobs whose shape and contents disagree.
    """
    data = contents(path)
    expect(path, "caffemodel", data)
    layers = []
    try:
        for number, kind, value in wire.fields(data):
            if kind == wire.BYTES and number in (2, 100):
                assert isinstance(value, memoryview)
                layer = _layer(value) if number == 100 else _v1_layer(value)
                if layer.blobs:
                    layers.append(layer)
    except WireError as error:
        raise WireError(f"{path}: {error.what}", expected=error.expected, found=error.found, hint=error.hint) from error
    return layers


def read_weights(path: str | os.PathLike[str]) -> dict[str, list[np.ndarray]]:
    """``{layer name: [float32 array, …]}`` of a weights file; shapes as stored, so old blobs have four axes."""
    return {layer.name: [blob.array for blob in layer.blobs] for layer in read_layers(path)}


def _layer(message: memoryview) -> StoredLayer:
    return _layer_by_fields(message, name_field=1, blobs_field=7)


def _v1_layer(message: memoryview) -> StoredLayer:
    for number, kind, value in wire.fields(message):
        if number == 1 and kind == wire.BYTES:  # V0: the whole layer is nested one deeper
            assert isinstance(value, memoryview)
            return _layer_by_fields(value, name_field=1, blobs_field=50)
    return _layer_by_fields(message, name_field=4, blobs_field=6)


def _layer_by_fields(message: memoryview, *, name_field: int, blobs_field: int) -> StoredLayer:
    name, blobs = "", []
    for number, kind, value in wire.fields(message):
        if kind != wire.BYTES:
            continue
        assert isinstance(value, memoryview)
        if number == name_field:
            name = bytes(value).decode("utf-8", "replace")
        elif number == blobs_field:
            blobs.append(value)
    return StoredLayer(name, [read_blob(blob, f"blob {i} of layer {name!r}") for i, blob in enumerate(blobs)])


def read_blob(message: memoryview, where: str) -> StoredBlob:
    """Parse a ``BlobProto``. ``where`` names it in the WireError raised when its shape and contents disagree."""
    legacy: dict[int, int] = {}
    shape: list[int] | None = None
    chunks: dict[int, list[memoryview]] = {5: [], 8: []}
    for number, kind, value in wire.fields(message):
        if number in (1, 2, 3, 4) and kind == wire.VARINT:
            assert isinstance(value, int)
            legacy[number] = value
        elif number in chunks and kind != wire.VARINT:  # packed in one or several runs, or one number at a time
            assert isinstance(value, memoryview)
            chunks[number].append(value)
        elif number == 7 and kind == wire.BYTES:
            assert isinstance(value, memoryview)
            shape = []
            for inner, inner_kind, dim in wire.fields(value):
                if inner == 1:
                    shape += wire.varints(dim) if isinstance(dim, memoryview) and inner_kind == wire.BYTES else [dim]  # type: ignore[list-item]
    number, dtype = (8, "<f8") if chunks[8] and not chunks[5] else (5, "<f4")
    raw = chunks[number][0] if len(chunks[number]) == 1 else b"".join(chunks[number])
    if len(raw) % np.dtype(dtype).itemsize:
        raise WireError(f"{where} holds {len(raw)} bytes, which is no whole number of {np.dtype(dtype).name} values")
    numbers = np.frombuffer(raw, dtype=dtype).astype(np.float32)
    dims = tuple(shape) if shape is not None else tuple(legacy.get(axis, 0) for axis in (1, 2, 3, 4))
    if int(np.prod(dims, dtype=np.int64)) != numbers.size:
        raise WireError(f"{where}: shape and contents disagree", expected=f"{dims} values", found=numbers.size)
    return StoredBlob(numbers.reshape(dims), legacy=shape is None)


def copy_weights(
    net: Any, path: str | os.PathLike[str], *, reshape: bool = False, complete: bool = False
) -> CopyReport:
    """Copy parameters into ``net`` by layer name (Caffe's rule); nothing is changed unless everything fits.

    Old four-axis blobs fit when leading axes of 1 are all that differs. ``reshape`` also accepts another shape with the
    same number of values; ``complete`` refuses a file that leaves layers at their initial values, as a resume must.
    Raises StallscopeError listing every mismatch, or where no layer of the file is in the net.
    """
    stored = read_layers(path)
    report = CopyReport()
    problems: list[str] = []
    todo: list[tuple[Any, np.ndarray]] = []
    for layer in stored:
        if layer.name not in net.params:
            report.ignored.append(layer.name)
            continue
        targets = net.params[layer.name]
        report.copied.append(layer.name)
        if len(targets) != len(layer.blobs):
            problems.append(f"{layer.name}: {len(targets)} blobs in the net, {len(layer.blobs)} in the file")
            continue
        for index, (target, blob) in enumerate(zip(targets, layer.blobs, strict=True)):
            want, have = tuple(target.shape), blob.array.shape
            if want == have or (blob.legacy and have == (1,) * (4 - len(want)) + want):
                todo.append((target, blob.array.reshape(want)))
            elif blob.array.size == int(np.prod(want, dtype=np.int64)):
                if reshape:
                    todo.append((target, blob.array.reshape(want)))
                else:
                    problems.append(f"{layer.name}.{index}: {want} in the net, {have} in the file (same size)")
            else:
                problems.append(f"{layer.name}.{index}: {want} in the net, {have} in the file (another size)")
    report.at_init = [name for name, blobs in net.params.items() if blobs and name not in set(report.copied)]
    if complete:
        problems += [f"{name}: not in the file" for name in report.at_init]
    if problems:
        same_size = all(problem.endswith("(same size)") for problem in problems)
        raise StallscopeError(
            f"{path} does not fit the net in {len(problems)} place(s):\n    " + "\n    ".join(problems),
            hint="--reshape copies blobs of the same size in another shape"
            if same_size
            else "give a layer that is meant to start anew another name in the prototxt",
        )
    if not report.copied:
        raise StallscopeError(
            f"{path} has no layer in common with the net, nothing was copied",
            expected=f"some of: {', '.join(name for name, blobs in net.params.items() if blobs) or 'no parameters'}",
            found=", ".join(report.ignored) or "no layer with parameters",
        )
    for target, array in todo:
        target.data = array
    return report


def write_layers(path: str | os.PathLike[str], name: str, layers: Iterable[tuple[Any, list[np.ndarray]]]) -> None:
    """Write a weights file atomically: ``layers`` are ``(caffe.LayerParameter without blobs, [array, …])`` in order.

    Raises StallscopeError where the disk is full or the folder is not writable; an older file then stays as it was.
    """
    encoded = name.encode()
    pieces: list[bytes | memoryview] = [wire.header(1, len(encoded)), encoded]
    for layer, arrays in layers:
        body: list[bytes | memoryview] = [layer.SerializeToString()]
        for array in arrays:
            body += wire.message_pieces(7, wire.blob_pieces(array))
        pieces += wire.message_pieces(100, body)
    if (size := sum(len(piece) for piece in pieces)) > MAX_BYTES:
        raise StallscopeError(
            f"{path} would be larger than a protocol buffer may be", expected=f"<= {MAX_BYTES} bytes", found=size
        )
    write_atomically(path, pieces)


def write_atomically(path: str | os.PathLike[str], pieces: Iterable[bytes | memoryview]) -> None:
    """Write to a temporary name in the same folder, sync, rename: a reader sees the old file or the new one, whole."""
    path = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines(pieces)
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StallscopeError(
            f"{path} could not be written: {error.strerror}", hint="check the folder and the disk"
        ) from error
