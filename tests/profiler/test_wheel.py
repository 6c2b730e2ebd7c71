"""The profiler's own wheel: installable beside anybody's loop, and nothing named ``datasets`` comes with it."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, so that no build leaves anything in the checkout.
    shutil.copytree(ROOT / "profiler", folder / "profiler", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", folder, "./profiler"],
        cwd=folder,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_it_holds_the_package_profiler_whole_and_nothing_else(wheel: Path) -> None:
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {name.parts[0] for name in names} == {"profiler", "stallscope_profiler-0.1.0.dist-info"}
    sources = {file.relative_to(ROOT) for file in (ROOT / "profiler").rglob("*.py")}
    templates = {file.relative_to(ROOT) for file in (ROOT / "profiler").glob("templates/**/*") if file.is_file()}
    packed = {name for name in names if name.parts[0] == "profiler"}
    assert sources | templates == packed


def test_it_requires_what_it_imports_at_the_versions_of_the_whole(wheel: Path) -> None:
    own = tomllib.loads((ROOT / "profiler" / "pyproject.toml").read_text())["project"]
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(own["dependencies"]) <= set(whole["dependencies"])
    assert own["version"] == whole["version"]
    assert own["requires-python"] == whole["requires-python"]
    imported = set()
    for file in (ROOT / "profiler").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
    imported -= set(sys.stdlib_module_names) | {"profiler", "__future__"}
    modules = {"nvidia-ml-py": "pynvml"}
    required = {line.split(">")[0] for line in own["dependencies"]}
    assert imported <= {modules.get(name, name) for name in required}


def test_a_foreign_loop_is_watched_and_reported_with_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = """
import json, sys, time
checkout, installed, *rest = json.loads(sys.argv[1])
sys.path = [p for p in sys.path if not p.startswith(checkout)] + [installed, *rest]
import profiler
assert profiler.__file__.startswith(installed), profiler.__file__

def loader():
    for number in range(8):
        time.sleep(0.01)
        yield number

for batch in profiler.watch(loader(), installed + "/../run"):
    time.sleep(0.002)
run = profiler.load_run(installed + "/../run")
assert run.problems == [], run.problems
from profiler.report import summarise
assert "8 steps" in summarise(installed + "/../run")
taken = {"datasets", "gpu", "pipeline", "ray", "cupy", "lmdb", "plyvel"} & set(sys.modules)
assert not taken, taken
"""
    paths = [str(ROOT), str(tmp_path / "installed"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, json.dumps(paths)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
