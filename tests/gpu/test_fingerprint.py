"""Fingerprints change with every bit, and with nothing else."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpu import fingerprint
from gpu.backend import select_backend
from gpu.blob import Blob
from profiler.hashing import ordered, ordered_parts, stats
from tests.gpu.host_kernels import COMPILER, HostLauncher
from tests.gpu.recording import ListRecorder

VALUES = {
    "conv": [np.arange(6, dtype=np.float32).reshape(2, 3), np.float32([1.5, -2])],
    "relu": [],
    "ip": [np.float32([[0, -4]])],
}


def net_of(values: dict[str, list[np.ndarray]]) -> Any:
    return SimpleNamespace(
        params={name: [Blob(array.shape, data=array.copy()) for array in arrays] for name, arrays in values.items()}
    )


def solver_of(*arrays: np.ndarray) -> Any:
    return SimpleNamespace(history=list(arrays), backend=select_backend("numpy"))


def test_equal_parameters_have_equal_fingerprints() -> None:
    assert fingerprint.fingerprint_params(net_of(VALUES)) == fingerprint.fingerprint_params(net_of(VALUES))
    arrays = [array for blobs in VALUES.values() for array in blobs]
    assert fingerprint.fingerprint_params(net_of(VALUES)) == ordered_parts(arrays)
    assert fingerprint.fingerprint_params(net_of({})) == ordered_parts([])
    assert ordered_parts(arrays) != ordered(np.concatenate([array.reshape(-1) for array in arrays]))


@pytest.mark.parametrize("layer", ["conv", "ip"])
def test_one_bit_changes_the_fingerprint(layer: str) -> None:
    net = net_of(VALUES)
    before = fingerprint.fingerprint_params(net)
    bits = net.params[layer][0].data.view(np.uint32)
    bits[0, 0] ^= 1
    assert fingerprint.fingerprint_params(net) != before
    bits[0, 0] ^= 1
    assert fingerprint.fingerprint_params(net) == before


def test_order_of_layers_and_sign_of_zero_count() -> None:
    before = fingerprint.fingerprint_params(net_of(VALUES))
    assert fingerprint.fingerprint_params(net_of(dict(reversed(VALUES.items())))) != before
    net = net_of(VALUES)
    net.params["conv"][0].data[0, 0] = -0.0
    assert fingerprint.fingerprint_params(net) != before


def test_history_is_hashed_in_order() -> None:
    one, other = np.float32([1, 2]), np.float32([3])
    assert fingerprint.fingerprint_history(solver_of(one, other)) == ordered_parts([one, other])
    assert fingerprint.fingerprint_history(solver_of(one, other)) != fingerprint.fingerprint_history(
        solver_of(other, one)
    )


def test_statistics_of_parts_are_those_of_the_whole() -> None:
    draw = np.random.default_rng(3)
    parts = [draw.standard_normal(50).astype(np.float32) for _ in range(3)]
    parts[1][:4] = [0, np.nan, np.inf, 1e-42]
    together, whole = fingerprint.combined(stats(part) for part in parts), stats(np.concatenate(parts))
    assert together.l2 == pytest.approx(whole.l2, rel=1e-12)
    for name in ("max_abs", "zeros", "subnormals", "infs", "nans"):
        assert getattr(together, name) == getattr(whole, name)
    nothing = fingerprint.combined([])
    assert (nothing.max_abs, nothing.l2, nothing.zeros) == (0.0, 0.0, 0)


def test_what_is_recorded() -> None:
    recorder = ListRecorder()
    value = fingerprint.record_params(recorder, 7, net_of(VALUES))
    fingerprint.record_history(recorder, 7, solver_of(np.float32([3, 4])))
    (step, name, ordered_hash, seen), (_, history, _, history_seen) = recorder.fingerprints
    assert (step, name, history) == (7, "params", "history")
    assert ordered_hash == value == fingerprint.fingerprint_params(net_of(VALUES))
    assert seen["max_abs"] == 5.0
    assert seen["zeros"] == 2
    assert seen["l2"] == pytest.approx(math.sqrt(55 + 1.5**2 + 4 + 16))
    assert history_seen["l2"] == 5.0


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_device_records_what_the_host_does(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there, launcher = ListRecorder(), ListRecorder(), HostLauncher()
    fingerprint.record_params(here, 3, net_of(VALUES))
    fingerprint.record_history(here, 3, solver_of(*VALUES["conv"]))
    monkeypatch.setattr(fingerprint, "own_kernels", lambda xp: launcher)
    fingerprint.record_params(there, 3, net_of(VALUES))
    fingerprint.record_history(there, 3, solver_of(*VALUES["conv"]))
    assert here.fingerprints == there.fingerprints
    assert launcher.launched.count("fingerprint") == 5
    assert fingerprint.fingerprint_parts(np.arange(3, dtype=np.int32)) == ordered_parts([np.arange(3, dtype=np.int32)])
