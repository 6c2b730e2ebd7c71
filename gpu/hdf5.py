"""Caffe's HDF5 snapshots (.caffemodel.h5, .solverstate.h5), laid out as Caffe's H5 lite calls lay them out.

    weights   data/<layer>/<i>       float32; a group for every layer, a shared parameter only with its owner
              diff/<layer>/<i>       the same for gradients (``snapshot_diff``), shared parameters with each layer
    state     iter, current_step     int32[1]
              learned_net            text with its terminating zero, scalar
              history/<i>            float32
              loss_scale, solver_type  texts of our own, which Caffe does not look for

h5py loads at first use. Nothing in a file is followed out of it: only plain links and data stored in place are read.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from profiler.errors import StallscopeError

OWN_TEXTS = ("loss_scale", "solver_type")
"""Data sets of a state that Caffe does not look for."""
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_DAMAGED = "the file is damaged or its copy was interrupted"
_NUMBER = re.compile(r"0|[1-9]\d{0,8}")
_BROKEN = (OSError, RuntimeError, KeyError, ValueError, TypeError)  # what h5py raises on a damaged file


def is_hdf5(start: bytes | memoryview) -> bool:
    """Whether a file that starts with these bytes is HDF5."""
    return bytes(start[: len(_SIGNATURE)]) == _SIGNATURE


def sniff(data: memoryview) -> str:
    """caffemodel, solverstate, or hdf5 for anything else, damaged files included."""
    with contextlib.suppress(StallscopeError), _opened("", data) as file:
        if "history" in file and "iter" in file:
            return "solverstate"
        if "data" in file and _is_group(file, "data"):
            return "caffemodel"
    return "hdf5"


def check(path: str | os.PathLike[str], data: memoryview) -> None:
    """Raise StallscopeError where the file is cut short or damaged."""
    with _opened(path, data):
        pass


def read_weights(path: str | os.PathLike[str], content: memoryview) -> list[tuple[str, dict[int, np.ndarray]]]:
    """``(layer, {place: float32 array})`` of every layer, by name. Raises StallscopeError for damaged files."""
    with _opened(path, content) as file:
        data = file["data"]
        layers = []
        for name in data:
            if not _is_group(data, name):
                raise StallscopeError(f"{path}: data/{name} is not a layer", expected="a group", found="something else")
            layers.append((name, _arrays(path, data[name])))
        return layers


def read_state(
    path: str | os.PathLike[str], content: memoryview
) -> tuple[int, str, int, list[np.ndarray], dict[str, str]]:
    """iteration, learned_net, current_step, histories, and texts of our own by name, empty where there are none.

    Raises StallscopeError for damaged files.
    """
    with _opened(path, content) as file:
        history = _arrays(path, file["history"])
        if list(history) != list(range(len(history))):
            raise StallscopeError(f"{path}: histories are missing", expected="0 to n − 1", found=list(history))
        count, step = _integer(path, file, "iter"), _integer(path, file, "current_step")
        own = {name: _text(file, name) for name in OWN_TEXTS}
        return count, _text(file, "learned_net"), step, list(history.values()), own


def weights_image(
    layers: Iterable[tuple[str, Mapping[int, np.ndarray], Sequence[np.ndarray] | None]],
) -> memoryview:
    """The bytes of a weights file: ``(layer, {place: data}, [gradient, …] or None)`` in any order.

    Raises StallscopeError for names that HDF5 cannot hold.
    """
    layers = list(layers)
    check_names([name for name, _, _ in layers])
    with _building() as (file, image):
        file.create_group("data")
        if any(diffs is not None for _, _, diffs in layers):
            file.create_group("diff")
        for name, blobs, diffs in layers:
            group = file["data"].create_group(name)
            for place, array in blobs.items():
                _put(group, str(place), array)
            if diffs is not None:
                group = file["diff"].create_group(name)
                for place, array in enumerate(diffs):
                    _put(group, str(place), array)
    return image[0]


def state_image(
    iteration: int, learned_net: str, current_step: int, history: Sequence[np.ndarray], own: Mapping[str, str]
) -> memoryview:
    """The bytes of a solver state; ``own``: texts of our own by name, left out where they are empty."""
    with _building() as (file, image):
        file["iter"] = np.array([iteration], "<i4")
        _put_text(file, "learned_net", learned_net)
        file["current_step"] = np.array([current_step], "<i4")
        for name in OWN_TEXTS:
            if own.get(name):
                _put_text(file, name, own[name])
        group = file.create_group("history")
        for place, array in enumerate(history):
            _put(group, str(place), array)
    return image[0]


def check_names(names: Iterable[str]) -> None:
    """Raise StallscopeError for layer names that are paths to HDF5 (Caffe cannot save such nets either)."""
    wrong = [name for name in names if "/" in name or name in (".", "")]
    if wrong:
        raise StallscopeError(
            f"snapshot_format HDF5 cannot hold {len(wrong)} layer name(s) of this net",
            expected="names without '/'",
            found=", ".join(repr(name) for name in wrong),
            hint="snapshot_format: BINARYPROTO, or other names",
        )


# -- reading ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str], data: memoryview) -> Iterator[Any]:
    import h5py

    if len(data) < (whole := _stored_size(data)):
        raise StallscopeError(
            f"{path}: the file ends at byte {len(data)}", expected=f"{whole} bytes", found=len(data), hint=_DAMAGED
        )
    try:
        # From memory: no lock is taken, and it does not matter whether this process has the file open elsewhere.
        with h5py.File(h5py.h5f.open_file_image(data)) as file:
            yield file
    except _BROKEN as error:
        text = " ".join(str(error).split())
        found = f"{len(data)} bytes without a readable header" if text.startswith("Not a file id") else text
        raise StallscopeError(f"{path} is not a whole HDF5 file", found=found, hint=_DAMAGED) from error


def _stored_size(data: memoryview) -> int:
    """The size that the superblock gives the file; 0 where there is none to be read."""
    start = bytes(data[:64])
    eof = {0: 40, 1: 44, 2: 28, 3: 28}.get(start[8] if len(start) > 8 else -1)
    wide = start[13 if start[8] < 2 else 9] == 8 if eof is not None and len(start) == 64 else False
    return int.from_bytes(start[eof : eof + 8], "little") if eof is not None and wide else 0


def _is_group(parent: Any, name: str) -> bool:
    import h5py

    return parent.get(name, getlink=True).__class__ is h5py.HardLink and parent.get(name, getclass=True) is h5py.Group


def _arrays(path: str | os.PathLike[str], group: Any) -> dict[int, np.ndarray]:
    """The numbered data sets of a group, in the order of their numbers (that of the file is 0, 1, 10, 2, …)."""
    for name in group:
        if not _NUMBER.fullmatch(name):
            raise StallscopeError(f"{path}: {group.name} holds {name!r}", expected="data sets named 0, 1, 2, …")
    return {int(name): _array(path, group, name) for name in sorted(group, key=int)}


def _array(path: str | os.PathLike[str], group: Any, name: str) -> np.ndarray:
    import h5py

    where = f"{path}: {group.name}/{name}"
    link = group.get(name, getlink=True)
    if link.__class__ is not h5py.HardLink or group.get(name, getclass=True) is not h5py.Dataset:
        raise StallscopeError(f"{where} is not an array", expected="a data set of the file itself")
    dataset = group[name]
    if dataset.is_virtual or dataset.external or dataset.shape is None or dataset.dtype.kind not in "fiu":
        raise StallscopeError(f"{where} is not an array of numbers stored in the file", found=dataset.dtype)
    if dataset.chunks is None and dataset.id.get_storage_size() < dataset.nbytes:
        raise StallscopeError(
            f"{where}: shape and contents disagree",
            expected=f"{dataset.nbytes} bytes for {dataset.shape}",
            found=f"{dataset.id.get_storage_size()} bytes",
        )
    return np.asarray(dataset[()], np.float32)


def _text(file: Any, name: str) -> str:
    value = file[name][()] if name in file else ""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _integer(path: str | os.PathLike[str], file: Any, name: str) -> int:
    if name not in file and name == "current_step":  # states from before rates had steps
        return 0
    value = file[name]
    if value.dtype.kind not in "iu" or value.size != 1:
        raise StallscopeError(f"{path}: {name} is not one integer", found=f"{value.dtype} {value.shape}")
    return int(value[()].reshape(()))


# -- writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _building() -> Iterator[tuple[Any, list[memoryview]]]:
    """An HDF5 file in memory, and a list that holds its bytes afterwards: they are then written like any others."""
    import h5py

    image: list[memoryview] = []
    # "earliest" is what Caffe's H5Fcreate makes: any HDF5 library reads it.
    with h5py.File("image", "w", driver="core", backing_store=False, libver=("earliest", "latest")) as file:
        yield file, image
        file.flush()
        image.append(memoryview(file.id.get_file_image()))


def _put(group: Any, name: str, array: np.ndarray) -> None:
    # track_times off: equal snapshots are equal files.
    group.create_dataset(name, data=np.ascontiguousarray(array, "<f4").reshape(array.shape), track_times=False)


def _put_text(file: Any, name: str, text: str) -> None:
    """As H5LTmake_dataset_string does: a scalar of fixed length that counts the terminating zero."""
    import h5py

    encoded = text.encode("utf-8", "surrogateescape") + b"\0"
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(len(encoded))
    kind.set_strpad(h5py.h5t.STR_NULLTERM)
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_obj_track_times(False)
    space = h5py.h5s.create(h5py.h5s.SCALAR)
    dataset = h5py.h5d.create(file.id, name.encode(), kind, space, plist)
    dataset.write(space, space, np.array(encoded, f"S{len(encoded)}"), kind)
