"""Backend choice says what is wrong with cupy, without cupy (fake modules stand in for it)."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from gpu import backend
from gpu.determinism import VARIABLES
from profiler.errors import MissingExtraError, StallscopeError, UsageError
from tests.gpu.test_determinism import core


class FakeCudaError(RuntimeError):
    pass


def fake_cupy(device_count: Any = 1, arange: Any = np.arange) -> types.ModuleType:
    """A module that answers what the probe asks; ``device_count`` may be an exception to raise."""

    def get_device_count() -> int:
        if isinstance(device_count, Exception):
            raise device_count
        return device_count

    module = types.ModuleType("cupy")
    module.__version__ = "14.0.0"
    module.cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(getDeviceCount=get_device_count))
    module.arange = arange
    module.asnumpy = np.asarray
    module.ones, module.matmul = np.ones, np.matmul
    module._core = core()._core
    return module


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make ``import cupy`` give a module or raise an error, with the given distributions installed."""

    def do(found: types.ModuleType | Exception, distributions: list[str] | None = None) -> None:
        names = ["cupy-cuda13x 14.0.0"] if distributions is None else distributions
        monkeypatch.setattr(backend, "cupy_distributions", lambda: names)
        if isinstance(found, Exception):
            real_import = backend.importlib.import_module

            def importing(name: str, *args: Any) -> Any:
                if name == "cupy":
                    raise found
                return real_import(name, *args)

            monkeypatch.setattr(backend.importlib, "import_module", importing)
        else:
            monkeypatch.setitem(sys.modules, "cupy", found)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, variable in VARIABLES.items():
        monkeypatch.setenv(name, variable.value)
    return do


def test_numpy_and_emulated_never_touch_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "probe_cupy", lambda: pytest.fail("cupy was probed"))
    assert backend.select_backend("numpy").xp is np
    emulated = backend.select_backend("emulated")
    assert (emulated.name, emulated.xp) == ("emulated", np)
    assert backend.select_backend(emulated) is emulated


def test_auto_takes_a_usable_cupy(install: Any) -> None:
    module = fake_cupy()
    install(module)
    chosen = backend.select_backend("auto")
    assert chosen.name == "cupy"
    assert chosen.xp is module
    assert "14.0.0" in chosen.reason


FAILURES = [
    pytest.param(ModuleNotFoundError("No module named 'cupy'", name="cupy"), [], "not installed", id="not-installed"),
    pytest.param(
        ImportError("libcuda.so.1: cannot open shared object file: No such file"), None, "libcuda missing", id="libcuda"
    ),
    pytest.param(ImportError("libnvrtc.so.13 not found"), None, "cannot be imported", id="other-library"),
    pytest.param(
        fake_cupy(FakeCudaError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")),
        None,
        "no CUDA driver, or one too old",
        id="old-driver",
    ),
    pytest.param(fake_cupy(0), None, "0 devices", id="no-devices"),
    pytest.param(
        fake_cupy(FakeCudaError("cudaErrorNoDevice: no CUDA-capable device is detected")),
        None,
        "0 devices",
        id="no-device-error",
    ),
    pytest.param(fake_cupy(arange=lambda n: np.zeros(n)), None, "instead of 15", id="wrong-numbers"),
    pytest.param(
        fake_cupy(FakeCudaError('Failure finding "libcublasLt.so.13": No such file')),
        None,
        "a CUDA library is missing",
        id="no-toolkit",
    ),
    pytest.param(
        fake_cupy(),
        ["cupy-cuda12x 13.6.0", "cupy-cuda13x 14.0.0"],
        "2 cupy distributions are installed over each other",
        id="two-distributions",
    ),
]


@pytest.mark.parametrize(("found", "distributions", "words"), FAILURES)
def test_an_unusable_cupy_is_explained(install: Any, found: Any, distributions: Any, words: str) -> None:
    install(found, distributions)
    chosen = backend.select_backend("auto")
    assert chosen.name == "numpy"
    assert words in chosen.reason
    assert "\n" not in chosen.reason
    with pytest.raises(StallscopeError) as caught:
        backend.select_backend("cupy")
    assert words in str(caught.value)


@pytest.mark.parametrize("visible", ["", "-1", "MIG-none"])
def test_hidden_devices_name_the_variable(install: Any, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    install(fake_cupy(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(StallscopeError, match=f"hidden by CUDA_VISIBLE_DEVICES='{visible}'"):
        backend.select_backend("cupy")


def test_the_import_error_is_kept(install: Any) -> None:
    cause = ImportError("libcuda.so.1: cannot open shared object file")
    install(cause)
    with pytest.raises(StallscopeError) as caught:
        backend.select_backend("cupy")
    assert caught.value.__cause__ is cause


def test_determinism_is_arranged_or_refused(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(fake_cupy())
    chosen = backend.select_backend("auto", cudnn="off")
    assert (chosen.deterministic, chosen.cudnn) == (True, "off")
    monkeypatch.setenv("CUPY_TF32", "1")
    for name in ("auto", "cupy"):  # auto must not train on the CPU because of a variable
        with pytest.raises(StallscopeError, match="CUPY_TF32 is set"):
            backend.select_backend(name)
    assert backend.select_backend("numpy").name == "numpy"
    assert not backend.select_backend("cupy", deterministic=False).deterministic
    monkeypatch.setenv("CUPY_TF32", "0")
    switched = fake_cupy()
    switched._core = core(compute=7)._core
    install(switched)
    with pytest.raises(StallscopeError, match="reduced precision"):
        backend.select_backend("cupy")


def test_not_installed_names_the_extra(install: Any) -> None:
    install(ModuleNotFoundError("No module named 'cupy'", name="cupy"), [])
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[gpu\]'"):
        backend.select_backend("cupy")


def test_a_missing_part_of_an_installed_cupy_is_not_called_not_installed(install: Any) -> None:
    install(ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock"))
    assert "fastrlock" in backend.select_backend("auto").reason


def test_installed_distributions_are_found_by_their_metadata(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cupy_cuda12x-13.6.0", "cupy_cuda13x-14.0.0", "cupyx_helpers-1.0"):
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        distribution, version = name.split("-")
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert backend.cupy_distributions() == ["cupy-cuda12x 13.6.0", "cupy-cuda13x 14.0.0"]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match=r"auto \| numpy \| cupy \| emulated"):
        backend.select_backend("cuda")


def test_blas_threads_are_pinned_and_reported() -> None:
    before = backend.blas_pools()
    assert before, "NumPy's BLAS must be seen"
    try:
        for pool in backend.blas_threads(2):
            assert pool.threads == 2
            assert pool.name
            assert pool.version
        assert {pool.threads for pool in backend.blas_threads(1)} == {1}
        assert {pool.threads for pool in backend.blas_pools()} == {1}
    finally:
        backend.blas_threads(max(pool.threads for pool in before))
    with pytest.raises(UsageError):
        backend.blas_threads(0)
