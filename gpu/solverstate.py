"""Caffe's solver state files: iteration, histories, and where the weights of the same moment are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpu import hdf5, wire
from gpu.caffemodel import contents, expect, read_blob, write_atomically
from gpu.loss_scale import LEAST, MOST
from gpu.wire import WireError
from profiler.errors import StallscopeError

_OWN = {"solver_type": 999, "loss_scale": 1000}
"""Our own fields of ``SolverState``, texts, by name and number: beyond Caffe's, which skips what it does not know."""
_COUNTS = ("good", "skipped", "in_a_row")


@dataclass(frozen=True)
class SolverState:
    """``iteration``: updates done. ``history``: float32, in Caffe's order. ``current_step``: steps of the rate.

    In fields of our own, which Caffe skips: ``loss_scale``, state of fp16's (:meth:`gpu.loss_scale.LossScale.state`);
    ``solver_type``, ``SGD`` or another, empty in Caffe's files.
    """

    iteration: int
    learned_net: str
    history: list[np.ndarray]
    current_step: int = 0
    loss_scale: Mapping[str, Any] = field(default_factory=dict)
    solver_type: str = ""


def read_state(path: str | os.PathLike[str]) -> SolverState:
    """Read a .solverstate, of either format. Raises StallscopeError for another kind of file and for damaged bytes."""
    data = contents(path)
    if expect(path, "solverstate", data):
        count, learned_net, current_step, history, own = hdf5.read_state(path, data)
        scale = _scale_of(path, own["loss_scale"])
        return SolverState(count, learned_net, history, current_step, scale, own["solver_type"])
    iteration = current_step = 0
    learned_net = ""
    own = dict.fromkeys(_OWN, "")
    names = {number: name for name, number in _OWN.items()}
    history = []
    try:
        for number, kind, value in wire.fields(data):
            if number == 1 and isinstance(value, int):
                iteration = value
            elif number == 4 and isinstance(value, int):
                current_step = value
            elif number == 2 and kind == wire.BYTES and isinstance(value, memoryview):
                learned_net = bytes(value).decode("utf-8", "surrogateescape")
            elif number == 3 and kind == wire.BYTES and isinstance(value, memoryview):
                history.append(read_blob(value, f"history {len(history)}").array)
            elif number in names and kind == wire.BYTES and isinstance(value, memoryview):
                own[names[number]] = bytes(value).decode("utf-8", "replace")
    except WireError as error:
        raise WireError(f"{path}: {error.what}", expected=error.expected, found=error.found, hint=error.hint) from error
    scale = _scale_of(path, own["loss_scale"])
    return SolverState(iteration, learned_net, history, current_step, scale, own["solver_type"])


def write_state(path: str | os.PathLike[str], state: SolverState) -> None:
    """Write a state that Caffe can read, atomically: as HDF5 where the name ends in ``.h5``, which Caffe goes by.

    Raises StallscopeError where that is not possible.
    """
    scale = json.dumps(dict(state.loss_scale), sort_keys=True) if state.loss_scale else ""
    own = {"loss_scale": scale, "solver_type": state.solver_type}
    if os.fspath(path).endswith(".h5"):
        image = hdf5.state_image(state.iteration, state.learned_net, state.current_step, state.history, own)
        write_atomically(path, [image])
        return
    learned_net = state.learned_net.encode("utf-8", "surrogateescape")
    pieces: list[bytes | memoryview] = [wire.varint(1 << 3) + wire.varint(state.iteration)]
    pieces += [wire.header(2, len(learned_net)), learned_net]
    for array in state.history:
        pieces += wire.message_pieces(3, wire.blob_pieces(array))
    pieces.append(wire.varint(4 << 3) + wire.varint(state.current_step))
    for name, number in _OWN.items():
        if text := own[name].encode():
            pieces += [wire.header(number, len(text)), text]
    write_atomically(path, pieces)


def _scale_of(path: str | os.PathLike[str], text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        found = json.loads(text)
        if LEAST <= float(found["scale"]) <= MOST and all(int(found[name]) >= 0 for name in _COUNTS):
            return dict(found)
    except (ValueError, TypeError, KeyError, OverflowError):
        pass
    raise StallscopeError(
        f"{path}: the loss scale is damaged",
        expected=f"scale from 2^-16 to 2^24, {', '.join(_COUNTS)}",
        found=repr(text[:80]),
    )


def find_weights(state_path: str | os.PathLike[str], state: SolverState) -> Path:
    """The weights that belong to a state: beside it if they are there, else where the state says they were written.

    Beside comes first because a folder that was copied or moved must resume from its own files, even while the
    original still exists. Raises StallscopeError naming every place that was tried.
    """
    state_path = Path(state_path)
    stored = Path(state.learned_net) if state.learned_net else None
    candidates = [state_path.parent / stored.name] if stored else []
    plain, ending = state_path.name.removesuffix(".h5"), ".h5" if state_path.name.endswith(".h5") else ""
    candidates += [state_path.with_name(Path(plain).with_suffix(".caffemodel").name + ending)]
    if stored and stored.parent != Path():  # a bare name means a neighbour, not whatever lies in the working directory
        candidates.append(stored)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise StallscopeError(
        f"the weights that belong to {state_path} are gone",
        expected=" or ".join(dict.fromkeys(str(candidate) for candidate in candidates)),
        hint="put the .caffemodel of the same snapshot beside the .solverstate",
    )
