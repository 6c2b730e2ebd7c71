"""A usable GPU, or a skip that says what is missing."""

from __future__ import annotations

import pytest

from gpu.backend import Backend, probe_cupy, select_backend


@pytest.fixture(scope="session")
def cuda() -> Backend:
    from gpu import determinism

    determinism.prepare()  # before cupy is imported for the first time
    probe = probe_cupy()
    if probe.module is None:
        pytest.skip(f"cupy is not usable: {probe.problem}")
    return select_backend("cupy")
