"""Caffe's weights (.caffemodel, .caffemodel.h5) and the telling apart of everything that looks like them.

Weights, solver states and mean files are all protocol buffers, so the wrong one half-parses; :func:`sniff` looks at
what is in a file, not at its name. Layers of all three generations (brought up to date by :mod:`gpu.upgrade`, as nets
are) and both ways of giving a blob its shape are read; what is written is the newest form. :mod:`gpu.hdf5` has the
other format.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from datasets import caffe_pb2
from gpu import hdf5, wire
from gpu.upgrade import upgrade
from gpu.wire import WireError
from profiler.errors import StallscopeError

MAX_BYTES = 2**31 - 1
"""Other readers of the format stop here."""

_BLOBS = 7
"""Number of a layer's field of blobs."""
# name, layers, input, input_dim (either form), force_backward, state, debug_info, input_shape
_NET_FIELDS = {(n, wire.BYTES) for n in (1, 2, 3, 4, 6, 8)} | {(n, wire.VARINT) for n in (4, 5, 7)}
_KINDS = {
    "caffemodel": "weights (caffemodel)",
    "solverstate": "a solver state (solverstate)",
    "blob": "a single blob, such as a mean file (binaryproto)",
    "hdf5": "an HDF5 file that Caffe did not write, or a damaged one",
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
    """A layer of a weights file that has parameters. ``places``: which parameter of the layer each blob is."""

    name: str
    blobs: list[StoredBlob]
    places: tuple[int, ...]


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
    """What kind of file this is: caffemodel, solverstate (either format), blob, hdf5, text, empty or unknown.

    Raises StallscopeError where it cannot be read.
    """
    return _sniff(contents(path))


def _sniff(data: memoryview) -> str:
    if len(data) == 0:
        return "empty"
    start = bytes(data[:4096])
    if hdf5.is_hdf5(start):
        return hdf5.sniff(data)
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
    is_net = wire.BYTES in (kinds.get(1), kinds.get(2))  # a name, a V1 layer; numbers in a blob
    if not is_net and (kinds.get(5) in (wire.BYTES, wire.FIXED32) or wire.BYTES in (kinds.get(7), kinds.get(8))):
        return "blob"
    if b"\0" not in start and not any(byte < 9 or 13 < byte < 32 for byte in start):
        return "text"
    if is_net and set(kinds.items()) <= _NET_FIELDS:
        return "caffemodel"  # V1 layers, or a net without any
    if kinds == {1: wire.VARINT}:
        return "solverstate"
    return "unknown"


def expect(path: str | os.PathLike[str], kind: str, data: memoryview) -> bool:
    """Raise StallscopeError, naming both kinds, unless ``data`` is a file of ``kind``; True where it is HDF5."""
    is_hdf5 = hdf5.is_hdf5(data[:8])
    if is_hdf5:
        hdf5.check(path, data)
    found = _sniff(data)
    if found == kind:
        return is_hdf5
    hint = None
    if {found, kind} == {"caffemodel", "solverstate"}:
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
    if expect(path, "caffemodel", data):
        return [
            StoredLayer(name, [StoredBlob(array, legacy=False) for array in blobs.values()], tuple(blobs))
            for name, blobs in hdf5.read_weights(path, data)
            if blobs
        ]
    try:
        return _read_net(data)
    except WireError as error:
        raise WireError(f"{path}: {error.what}", expected=error.expected, found=error.found, hint=error.hint) from error
    except ValueError as error:
        raise StallscopeError(f"{path}: {error}") from error


def read_weights(path: str | os.PathLike[str]) -> dict[str, list[np.ndarray]]:
    """``{layer name: [float32 array, …]}`` of a weights file; shapes as stored, so old blobs have four axes."""
    return {layer.name: [blob.array for blob in layer.blobs] for layer in read_layers(path)}


def _read_net(data: memoryview) -> list[StoredLayer]:
    """The layers of a net message, upgraded as those of a prototxt are."""
    net = caffe_pb2.NetParameter()
    stored: list[memoryview] = []
    for number, value in _messages(data):
        if number == 100:
            _outline(value, net.layer.add(), stored, name_field=1, blobs_field=7)
        elif number == 2:
            old = net.layers.add()
            nested = [part for inner, part in _messages(value) if inner == 1]
            for part in nested:  # V0: the whole layer is one deeper
                old.layer.SetInParent()
                _outline(part, old.layer, stored, name_field=1, blobs_field=50)
            if not nested:
                _outline(value, old, stored, name_field=4, blobs_field=6)
    upgrade(net, weights=True)
    layers = []
    for layer in net.layer:
        blobs = [read_blob(stored[b.num], f"blob {i} of layer {layer.name!r}") for i, b in enumerate(layer.blobs)]
        if blobs:
            layers.append(StoredLayer(layer.name, blobs, tuple(range(len(blobs)))))
    return layers


def _outline(message: memoryview, layer: Any, stored: list[memoryview], *, name_field: int, blobs_field: int) -> None:
    """Give ``layer`` the name in ``message``, and for each of its blobs one that only holds its place in ``stored``."""
    for number, value in _messages(message):
        if number == name_field:
            layer.name = bytes(value).decode("utf-8", "replace")
        elif number == blobs_field:
            layer.blobs.add(num=len(stored))
            stored.append(value)


def _messages(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The fields of a message that hold bytes: texts, messages, packed numbers."""
    for number, kind, value in wire.fields(data):
        if kind == wire.BYTES and isinstance(value, memoryview):
            yield number, value


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
        # HDF5 files hold a shared parameter once, with the layer that owns it.
        absent = set(range(len(targets))) - set(layer.places)
        if not set(layer.places) <= set(range(len(targets))) or not absent <= _borrowed(net, layer.name):
            problems.append(f"{layer.name}: {len(targets)} blobs in the net, {len(layer.blobs)} in the file")
            continue
        for index, blob in zip(layer.places, layer.blobs, strict=True):
            target = targets[index]
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
    here = set(report.copied)
    report.at_init = [
        name
        for name, blobs in net.params.items()
        if name not in here and not set(range(len(blobs))) <= _borrowed(net, name)
    ]
    if complete:
        problems += [f"{name}: not in the file" for name in report.at_init]
    if problems:
        same_size = all(problem.endswith("(same size)") for problem in problems)
        raise StallscopeError(
            f"{path} does not fit the net in {len(problems)} place(s):\n    " + "\n    ".join(problems),
            hint="Net.copy_from(..., reshape=True) copies blobs of the same size in another shape"
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


def _borrowed(net: Any, layer: str) -> set[int]:
    """Which parameters of a layer belong to an earlier one that shares them with it."""
    owned = {param.name for param in getattr(net, "learnable", ())}
    return {i for i in range(len(net.params[layer])) if owned and f"{layer}.{i}" not in owned}


def write_layers(
    path: str | os.PathLike[str],
    name: str,
    layers: Iterable[tuple[Any, Sequence[np.ndarray]]],
    diffs: Mapping[str, Sequence[np.ndarray]] | None = None,
) -> None:
    """Write a weights file atomically: ``layers`` are ``(caffe.LayerParameter without blobs, [array, …])`` in order.

    ``diffs``: gradients of each layer's blobs by its name, stored beside them where given. Raises StallscopeError where
    the disk is full or the folder is not writable; an older file then stays as it was.
    """
    encoded = name.encode()
    pieces: list[bytes | memoryview] = [wire.header(1, len(encoded)), encoded]
    for layer, arrays in layers:
        before, after = _halves(layer)
        body: list[bytes | memoryview] = [before]
        beside = diffs[layer.name] if diffs is not None else [None] * len(arrays)
        for array, diff in zip(arrays, beside, strict=True):
            body += wire.message_pieces(_BLOBS, wire.blob_pieces(array, diff))
        body.append(after)
        pieces += wire.message_pieces(100, body)
    if (size := sum(len(piece) for piece in pieces)) > MAX_BYTES:
        raise StallscopeError(
            f"{path} would be larger than a protocol buffer may be",
            expected=f"<= {MAX_BYTES} bytes",
            found=size,
            hint="snapshot_format: HDF5 has no such limit",
        )
    write_atomically(path, pieces)


def _halves(layer: Any) -> tuple[bytes, bytes]:
    """A layer's fields before and after its blobs: in the order of their numbers, as Caffe's library writes them."""
    before, after = type(layer)(), type(layer)()
    before.CopyFrom(layer)
    after.CopyFrom(layer)
    for known, _ in layer.ListFields():
        (after if known.number < _BLOBS else before).ClearField(known.name)
    return before.SerializeToString(), after.SerializeToString()


def save(net: Any, path: str | os.PathLike[str], *, diff: bool = False) -> None:
    """Write the weights of a net, with gradients where ``diff``; as HDF5 where the name ends in ``.h5``."""
    if os.fspath(path).endswith(".h5"):
        contents = []
        for layer in net.layers:
            borrowed = _borrowed(net, layer.name) if layer.blobs else set()
            data = {i: blob.data for i, blob in enumerate(layer.blobs) if i not in borrowed}
            contents.append((layer.name, data, [blob.diff for blob in layer.blobs] if diff else None))
        write_atomically(path, [hdf5.weights_image(contents)])
        return
    diffs = {layer.name: [blob.diff for blob in layer.blobs] for layer in net.layers} if diff else None
    write_layers(path, net.name, [(layer.spec, [blob.data for blob in layer.blobs]) for layer in net.layers], diffs)


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
