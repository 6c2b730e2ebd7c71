"""The CUDA kernels without a GPU: NVRTC compiles each of them, and a C++ build of the same text does the arithmetic.

Sums are made in the order of the numba kernels and rounded one by one, so results are compared bit for bit; where
another order is meant, the tolerance says so.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.cuda import fingerprint, layers
from gpu.cuda.kernels import FOLDER, KERNELS, OPTIONS, Kernel, Windows, checked, source
from gpu.layers import kernels as compiled
from gpu.layers import pooling_kernels as pooling
from profiler import hashing
from profiler.errors import StallscopeError
from tests.gpu import nvrtc
from tests.gpu.host_kernels import COMPILER, HostLauncher

FILES = sorted({kernel.file for kernel in KERNELS.values()})
needs_nvrtc = pytest.mark.skipif(nvrtc.load() is None, reason="no libnvrtc (pip install nvidia-cuda-nvrtc)")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (g++ or clang++)")


@pytest.mark.skipif(sys.platform != "linux", reason="the wheel of NVRTC is asked for on Linux")
def test_nvrtc_is_there() -> None:
    """Or the tests that compile would all be skipped, and nobody would see it."""
    assert nvrtc.load() is not None, "pip install nvidia-cuda-nvrtc: the extra 'test' brings it"
    assert len({75, 80, 90, 100} & set(nvrtc.architectures())) == 4


def test_every_source_is_listed() -> None:
    assert {path.stem for path in FOLDER.glob("*.cu")} == set(FILES)
    for name, kernel in KERNELS.items():
        declared = re.search(rf"KERNEL {name}\(([^)]*)\)", source(kernel.file))
        assert declared, name
        # The letters, worked out from the C++ declaration.
        types = {"float": "f", "int": "i", "i64": "l", "u64": "q"}
        arrays = {"u16": "H", "float": "F", "double": "D", "int": "I", "i64": "L", "u32": "W", "u64": "Q"}
        letters = ""
        for argument in declared[1].split(","):
            kind, variable = re.fullmatch(r"\s*(?:const )?(\w+) (\*?\w+)\s*", argument).groups()
            letters += arrays[kind] if variable[0] == "*" else "c" if variable == "count" else types[kind]
        assert letters == kernel.arguments, name


def test_there_is_no_kernel_elsewhere() -> None:
    """Text that cupy would wrap into a kernel of its own is neither compiled nor run by these tests."""
    package, makers = FOLDER.parent, {"ElementwiseKernel", "ReductionKernel", "RawKernel", "RawModule", "fuse"}
    used = {
        (str(path.relative_to(package)), name)
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (name := getattr(node, "attr", getattr(node, "id", ""))) in makers
    }
    assert used == {("cuda/kernels.py", "RawModule")}
    assert not [path for path in package.rglob("*.py") if "cupyx" in path.read_text(encoding="utf-8")]


def test_the_arithmetic_of_every_kernel_is_run() -> None:
    """The functions of gpu/cuda that launch a kernel are called by these tests, or a layer's test names the kernel."""
    tests = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_cuda_*.py")]
    called = {ast.unparse(n.func) for text in tests for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)}
    launched = {
        node.value
        for path in FOLDER.glob("*.py")
        for function in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(function, ast.FunctionDef) and f"{path.stem}.{function.name}" in called
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not [name for name in KERNELS if name not in launched and not any(f'"{name}"' in text for text in tests)]


# 7.0 is Volta, which CUDA 12 was the last to compile for; 7.5 Turing, 8.0 Ampere, 9.0 Hopper, 10.0 Blackwell.
@needs_nvrtc
@pytest.mark.parametrize("architecture", [70, 75, 80, 90, 100])
@pytest.mark.parametrize("file", FILES)
def test_compiles_to_ptx_without_atomics(file: str, architecture: int) -> None:
    if architecture not in nvrtc.architectures():
        pytest.skip(f"NVRTC {nvrtc.version()} does not compile for sm_{architecture}")
    ptx = nvrtc.to_ptx(source(file), f"{file}.cu", [*OPTIONS, f"--gpu-architecture=compute_{architecture}"])
    names = {name for name, kernel in KERNELS.items() if kernel.file == file}
    assert set(re.findall(r"\.entry (\w+)", ptx)) == names
    # No atomics of any type, so none on floats.
    assert not re.findall(r"^\s*(?:atom|red)\..*", ptx, re.M)
    # A product and a sum are two roundings, as on the host; powf is the library's own.
    assert "fma.rn.f32" not in ptx or file == "lrn"


@needs_nvrtc
def test_a_source_with_an_error_is_refused_with_its_line() -> None:
    with pytest.raises(nvrtc.CompileError, match="undefined_thing"):
        nvrtc.to_ptx("\nKERNEL() { undefined_thing; }", "wrong.cu", ())


# ---- arguments


def test_arguments_get_the_types_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.zeros((4, 6), np.float32)
    out = checked("sum_rows", 4, (values, np.zeros(4, np.float32), 6))
    assert [type(value) for value in out] == [np.ndarray, np.ndarray, np.int32, np.int32]
    with pytest.raises(StallscopeError, match=r"sum_rows.*cannot read") as caught:
        checked("sum_rows", 4, (values.astype(np.float64), values, 6))
    assert "float64" in str(caught.value.found)
    with pytest.raises(StallscopeError, match="cannot read"):
        checked("sum_rows", 4, (values[:, ::2], values, 3))
    with pytest.raises(StallscopeError, match="wrong number"):
        checked("sum_rows", 4, (values, values))
    with pytest.raises(StallscopeError, match="too many values"):
        checked("sum_rows", 2**31, (values, values, 6))


# ---- arithmetic

WINDOW = st.fixed_dictionaries(
    {
        "size": st.tuples(st.integers(1, 9), st.integers(1, 9)),
        "kernel": st.tuples(st.integers(1, 4), st.integers(1, 4)),
        "stride": st.tuples(st.integers(1, 3), st.integers(1, 3)),
        "pad": st.tuples(st.integers(0, 2), st.integers(0, 2)),
        "dilation": st.tuples(st.integers(1, 2), st.integers(1, 2)),
    }
)
GRIDS = st.sampled_from([(1, 1), (3, 2), (2, 5)])


def convolved(window: dict[str, Any]) -> Windows | None:
    """The windows of a convolution, if the kernel fits."""
    out = []
    for size, k, s, p, d in zip(
        *(window[name] for name in ("size", "kernel", "stride", "pad", "dilation")), strict=True
    ):
        if size + 2 * p < d * (k - 1) + 1:
            return None
        out.append((size + 2 * p - d * (k - 1) - 1) // s + 1)
    return Windows(out=tuple(out), **window)


def pooled(window: dict[str, Any]) -> Windows | None:
    """Caffe's windows of a pooling, if every one has a value."""
    out = []
    for size, k, s, p in zip(*(window[name] for name in ("size", "kernel", "stride", "pad")), strict=True):
        if p >= k or size + 2 * p < k:
            return None
        count = -(-(size + 2 * p - k) // s) + 1
        if any(window["pad"]) and (count - 1) * s >= size + p:
            count -= 1
        if (count - 1) * s - p >= size:
            return None
        out.append(count)
    return Windows(out=tuple(out), **{**window, "dilation": (1, 1)})


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Few different values, so that there are ties, and of several sizes, so that rounding shows."""
    return (rng.integers(-4, 5, shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(np.float32)


def numba_args(w: Windows, *, dilated: bool) -> tuple[int, ...]:
    return (*w.kernel, *w.stride, *w.pad, *(w.dilation if dilated else ()))


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(WINDOW, st.integers(1, 3), st.integers(1, 3), GRIDS, st.integers(0, 99))
def test_unrolled_windows(window: dict[str, Any], n: int, c: int, grid: tuple[int, int], seed: int) -> None:
    w = convolved(window)
    if w is None:
        return
    rng, own = np.random.default_rng(seed), HostLauncher(*grid)
    x, shape = numbers(rng, n, c, *w.size), (c, *w.kernel, n, *w.out)
    col, wanted = np.full(shape, 7, np.float32), np.empty(shape, np.float32)
    layers.im2col(own, w, x, col)
    compiled.im2col(x, wanted, *numba_args(w, dilated=True), 0, c)
    assert col.tobytes() == wanted.tobytes()
    col = numbers(rng, *shape)
    back, wanted = np.full(x.shape, 7, np.float32), np.empty_like(x)
    layers.col2im(own, w, col, back)
    compiled.col2im(col, wanted, *numba_args(w, dilated=True), 0, c)
    np.testing.assert_array_equal(back, wanted)


@needs_compiler
@settings(max_examples=80, deadline=None)
@given(WINDOW, st.integers(1, 4), GRIDS, st.integers(0, 99), st.booleans())
def test_poolings(window: dict[str, Any], planes: int, grid: tuple[int, int], seed: int, special: bool) -> None:
    w = pooled(window)
    if w is None:
        return
    rng, own, args = np.random.default_rng(seed), HostLauncher(*grid), (*numba_args(w, dilated=False), 0, planes)
    x, dy = numbers(rng, planes, *w.size), numbers(rng, planes, *w.out)
    if special:
        x[rng.random(x.shape) < 0.2] = np.nan
        x[rng.random(x.shape) < 0.2] = -np.inf
    y, index = np.empty_like(dy), np.full(dy.shape, -9, np.int32)
    wanted, where = np.empty_like(dy), np.empty_like(index)
    layers.max_pool(own, w, x, y, index)
    pooling.max_pool(x, wanted, where, *args)
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(index, where)
    dx, back = np.full_like(x, 7), np.empty_like(x)
    layers.max_pool_back(own, w, dy, index, dx)
    pooling.max_pool_back(dy.reshape(planes, -1), where.reshape(planes, -1), back.reshape(planes, -1), 0, planes)
    np.testing.assert_array_equal(dx, back)
    x = numbers(rng, *x.shape)
    layers.ave_pool(own, w, x, y)
    pooling.ave_pool(x, wanted, *args)
    np.testing.assert_array_equal(y, wanted)
    dx[...] = 7
    layers.ave_pool_back(own, w, dy, dx)
    pooling.ave_pool_back(dy, back, *args)
    np.testing.assert_array_equal(dx, back)


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(WINDOW, st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.booleans(), GRIDS, st.integers(0, 99))
def test_depthwise(
    window: dict[str, Any], n: int, c: int, each: int, has_bias: bool, grid: tuple[int, int], seed: int
) -> None:
    w = convolved(window)
    if w is None:
        return
    rng, own, args, o = np.random.default_rng(seed), HostLauncher(*grid), numba_args(w, dilated=True)[2:], c * each
    x, weight, bias = numbers(rng, n, c, *w.size), numbers(rng, o, *w.kernel), numbers(rng, o if has_bias else 0)
    planes_x, planes_y = (n * c, *w.size), (n * o, *w.out)
    y, wanted = np.empty((n, o, *w.out), np.float32), np.empty(planes_y, np.float32)
    layers.depthwise(own, w, x, weight, bias, y)
    compiled.depthwise(x.reshape(planes_x), weight, bias, wanted, *args, 0, n * o)
    np.testing.assert_array_equal(y.reshape(planes_y), wanted)
    dy = numbers(rng, *y.shape)
    dx, wanted = np.full_like(x, 7), np.empty(planes_x, np.float32)
    layers.depthwise_back(own, w, dy, weight, dx)
    compiled.depthwise_back(dy.reshape(planes_y), weight, wanted, *args, 0, n * c)
    np.testing.assert_array_equal(dx.reshape(planes_x), wanted)
    dw, wanted = np.full_like(weight, 7), np.empty_like(weight)
    layers.depthwise_weights(own, w, x, dy, dw, np.full(layers.depthwise_columns_shape(o, w), 7, np.float32))
    sums = np.empty((o, w.out[1]), np.float32)
    compiled.depthwise_weights(x.reshape(planes_x), dy.reshape(planes_y), wanted, sums, *args, 0, o)
    # The same sums of columns; numba's vectors may add these up in another order.
    np.testing.assert_allclose(dw, wanted, rtol=1e-5, atol=1e-5 * float(np.abs(wanted).max(initial=0)))


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(0, 3), st.sampled_from([0.75, 0.5, 1.25]), GRIDS, st.integers(0, 99))
def test_lrn_against_float64(channels: int, half: int, beta: float, grid: tuple[int, int], seed: int) -> None:
    rng, own = np.random.default_rng(seed), HostLauncher(*grid)
    x, dy = (rng.standard_normal((2, channels, 3, 2)).astype(np.float32) for _ in range(2))
    scale, y, dx = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    alpha = 0.3
    layers.lrn_forward(own, x, scale, y, half, alpha, 2.0, beta)
    layers.lrn_backward(own, x, y, scale, dy, dx, half, alpha, beta)

    def near(values: np.ndarray) -> np.ndarray:
        return np.stack([values[:, max(0, c - half) : c + half + 1].sum(axis=1) for c in range(channels)], axis=1)

    wide = x.astype(np.float64)
    s = 2.0 + alpha * near(wide**2)
    np.testing.assert_allclose(scale, s, rtol=1e-6)
    np.testing.assert_allclose(y, wide * s**-beta, rtol=1e-5, atol=1e-6)
    wanted = dy * s**-beta - 2 * alpha * beta * wide * near(dy * wide * s ** (-beta - 1))
    np.testing.assert_allclose(dx, wanted, rtol=1e-5, atol=1e-5)


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 30), st.integers(1, 4), GRIDS, st.integers(0, 99))
def test_picked_rows_are_summed_in_their_order(rows: int, picks: int, width: int, grid: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    index, picked = rng.integers(0, rows, picks), numbers(rng, picks, width)
    order = np.argsort(index, kind="stable")
    start = np.searchsorted(index[order], np.arange(rows + 1))
    into, wanted = np.full((rows, width), 7, np.float32), np.zeros((rows, width), np.float32)
    layers.sum_picks(HostLauncher(*grid), picked, order, start, into)
    np.add.at(wanted, index, picked)
    np.testing.assert_array_equal(into, wanted)


SPECIAL = np.array([0, -0.0, 1e-40, -1e-45, np.inf, -np.inf, np.nan, 3.4e38, -1.17549435e-38, 1], np.float32)


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=3), GRIDS, st.integers(0, 99), st.integers(1, 40))
def test_fingerprints_are_those_of_the_host(shape: list[int], grid: Any, seed: int, threads: int) -> None:
    rng = np.random.default_rng(seed)
    values = np.where(rng.random(shape) < 0.5, rng.choice(SPECIAL, shape), rng.standard_normal(shape))
    values = np.asarray(values, np.float32)
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "_THREADS", threads)
        found = fingerprint.device_print(HostLauncher(*grid), np, values)
    assert found.ordered == hashing.ordered(values)
    if values.ndim:
        assert found.multiset == hashing.multiset(values)
    wanted = hashing.stats(values)
    assert found.stats.l2 == pytest.approx(wanted.l2, rel=1e-12)
    for name in ("max_abs", "zeros", "subnormals", "infs", "nans"):
        assert getattr(found.stats, name) == getattr(wanted, name), name


@needs_compiler
def test_one_bit_changes_a_fingerprint() -> None:
    own, values = HostLauncher(), np.arange(35, dtype=np.float32).reshape(5, 7)
    before = fingerprint.device_print(own, np, values)
    swapped = fingerprint.device_print(own, np, values[[1, 0, 2, 3, 4]])
    assert (swapped.ordered == before.ordered, swapped.multiset == before.multiset) == (False, True)
    values.view(np.uint32)[4, 6] ^= 1
    after = fingerprint.device_print(own, np, values)
    assert after.ordered != before.ordered
    assert after.multiset != before.multiset


def test_what_cannot_be_fingerprinted_on_a_device_is_refused() -> None:
    for array in (np.zeros(3), np.zeros((3, 4), np.float32).T):
        with pytest.raises(StallscopeError, match="contiguous float32"):
            fingerprint.device_print(HostLauncher(), np, array)


def test_a_kernel_is_named_once() -> None:
    assert all(isinstance(kernel, Kernel) and kernel.arguments.count("c") == 1 for kernel in KERNELS.values())
