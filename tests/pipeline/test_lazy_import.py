"""Importing a package costs little and pulls in no heavy or optional library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("ray", "cupy", "lmdb", "plyvel", "numba", "torch", "plotly")


def _loaded(statement: str) -> set[str]:
    """Which of HEAVY are in sys.modules after a statement, in a fresh interpreter."""
    code = f"{statement}\nimport sys\nsys.stdout.write(' '.join(n for n in {HEAVY!r} if n in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import datasets, gpu, pipeline, profiler",
        "import pipeline.config, pipeline.settings, pipeline.train",
        "import pipeline.loop, pipeline.checkpoint",
        "from pipeline import Config, load",
    ],
)
def test_packages_load_nothing_heavy(statement: str) -> None:
    assert _loaded(statement) == set()


def test_the_probe_sees_what_is_loaded() -> None:
    assert _loaded("import lmdb") == {"lmdb"}


def test_reading_a_configuration_needs_no_ray_and_no_database() -> None:
    statement = "from pipeline.settings import load; load('examples/lenet_mnist.yaml', {})"
    missing_data = (
        f"try:\n    {statement}\nexcept Exception as error:\n    assert 'does not exist' in str(error), error"
    )
    assert _loaded(missing_data) == set()


def test_unknown_names_are_attribute_errors() -> None:
    import pipeline

    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        pipeline.nothing_of_the_kind  # noqa: B018
    assert "Feed" in dir(pipeline)
