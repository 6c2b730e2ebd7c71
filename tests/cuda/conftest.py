"""A usable GPU, or a skip that says what is missing."""

from __future__ import annotations

from pathlib import Path

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A warning of CUDA's libraries, of which no two versions have the same, fails none of these tests."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
