"""The wheel holds what the packages need besides Python: the CUDA sources, which are compiled at first use."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_cuda_sources_are_in_the_wheel(tmp_path: Path) -> None:
    # A copy, so that no build leaves anything in the checkout.
    for package in ("datasets", "gpu", "pipeline", "profiler"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", "out", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "out").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "gpu/cuda").iterdir() if path.suffix in (".cu", ".cuh")}
    assert len(sources) >= 8
    assert sources <= names
