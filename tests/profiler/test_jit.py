"""The kernels' cache: lazy, shared by kernels that call each other, and never stale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from profiler import jit
from profiler.jit import njit

ROOT = Path(__file__).parents[2]


@njit
def _twice(x):  # type: ignore[no-untyped-def]
    return x + x


@njit
def _four_times(x):  # type: ignore[no-untyped-def]
    return _twice(_twice(x))


@njit(boundscheck=True)
def _second(x):  # type: ignore[no-untyped-def]
    return x[1]


def run(folder: Path, code: str, **environment: str) -> str:
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, text=True, capture_output=True, check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", **environment},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


def test_a_kernel_may_call_another_by_its_plain_name() -> None:
    assert _four_times(3) == 12
    assert _four_times(2.5) == 10.0
    assert _four_times.py_func.__name__ == _four_times.__name__ == "_four_times"
    assert _twice.loaded


def test_options_reach_numba_and_fastmath_is_refused() -> None:
    with pytest.raises(IndexError):
        _second(np.zeros(1))
    with pytest.raises(ValueError, match="fastmath"):
        njit(fastmath=True)


def test_nogil_is_on_and_other_users_of_numba_keep_their_cache_setting() -> None:
    import numba

    _twice(1)
    assert _twice.dispatcher.targetoptions["nogil"] is True
    assert "stallscope" not in str(numba.config.CACHE_DIR)


KERNELS = """
from profiler.jit import njit
from mypack.inner import factor

@njit
def scaled(x):
    return factor() * x
"""
INNER = """
from profiler.jit import njit

@njit
def factor():
    return {}
"""
ASK = """
import sys
from mypack.kernels import scaled
assert "numba" not in sys.modules, "numba was imported before the first call"
print(scaled(10), "numba" in sys.modules)
"""


def test_an_edit_in_a_callees_file_is_noticed_and_without_edits_the_cache_is_used(tmp_path: Path) -> None:
    package = tmp_path / "mypack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "kernels.py").write_text(KERNELS)
    (package / "inner.py").write_text(INNER.format(3))
    cache = str(tmp_path / "cache")
    assert run(tmp_path, ASK, STALLSCOPE_CACHE=cache) == "30 True"
    assert run(tmp_path, ASK, STALLSCOPE_CACHE=cache) == "30 False"
    (package / "inner.py").write_text(INNER.format(5))
    assert run(tmp_path, ASK, STALLSCOPE_CACHE=cache) == "50 True"


def test_without_a_writable_cache_kernels_work_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "blocked").touch()
    code = "from profiler.hashing import _mix_numba; import numpy as np; print(int(_mix_numba(np.uint64(0))))"
    assert run(tmp_path, code, STALLSCOPE_CACHE=str(tmp_path / "blocked" / "cache")) == "0"


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STALLSCOPE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert jit.cache_root() == tmp_path / "xdg" / "stallscope"
    monkeypatch.setenv("STALLSCOPE_CACHE", str(tmp_path / "own"))
    assert jit.cache_root() == tmp_path / "own"
    monkeypatch.delenv("STALLSCOPE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert jit.cache_root() == Path.home() / ".cache" / "stallscope"


def test_folders_of_old_sources_go_after_a_month(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STALLSCOPE_CACHE", str(tmp_path))
    old, recent = tmp_path / "numba" / "old", tmp_path / "numba" / "recent"
    old.mkdir(parents=True)
    recent.mkdir()
    os.utime(old, (1, 1))
    folder = jit._cache_folder(_twice.py_func, ())
    assert folder is not None
    assert folder.is_dir()
    assert not old.exists()
    assert recent.exists()
