"""Kernels that run without numba: the same results, and numba for all that does not fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiler import jit, objectcode
from profiler.jit import Kernel, njit


@njit
def _work(image, plane, flags, gain, shift, turn, out):  # type: ignore[no-untyped-def]
    """Slices, a new shape, memory of its own, and every kind of number."""
    spare = np.empty(len(out), np.float64)
    rows = image[1:].reshape(-1)
    for i in range(len(out)):
        spare[i] = rows[i] * gain + plane[i % plane.shape[0], 0] + shift
        if turn and flags[i % len(flags)]:
            spare[i] = -spare[i]
    for i in range(len(out)):
        out[i] = np.float32(spare[len(out) - 1 - i])
    return np.int64(spare.sum()), np.int64(plane.strides[0])


@njit
def _number(values, of):  # type: ignore[no-untyped-def]
    return values[of] + 1


@njit
def _either(values, of):  # type: ignore[no-untyped-def]
    return values[0] > of


@njit
def _share(values, of):  # type: ignore[no-untyped-def]
    return values[0] // of


@njit
def _doubled(values):  # type: ignore[no-untyped-def]
    return values * 2


@njit
def _much(values, times):  # type: ignore[no-untyped-def]
    total = 0
    for i in range(times):
        spare = np.empty(1 << 17, np.int64)
        spare[i % 7] = i
        total += spare[i % 7] + values[0]
    return total


Loaded = Callable[..., list[objectcode.Native]]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """Compiles a kernel for arguments, and gives what another process would load."""
    monkeypatch.setenv("STALLSCOPE_CACHE", str(tmp_path))

    def compiled(kernel: Kernel, *args: Any) -> list[objectcode.Native]:
        fresh(kernel)(*args)
        return list(fresh(kernel)._kept())

    return compiled


def fresh(kernel: Kernel) -> Kernel:
    """The kernel as a process has it that has not called it."""
    return Kernel(kernel.py_func, kernel._options, kernel._packages)


def arguments() -> list[Any]:
    rng = np.random.default_rng(4)
    return [
        rng.integers(0, 256, (4, 3, 5), dtype=np.uint8), rng.normal(size=(6, 8))[:, ::2], np.array([True, False, True]),
        np.float32(1.7), 3, True, np.zeros(20, np.float32),
    ]  # fmt: skip


def test_results_and_memory_are_those_of_numba(loaded: Loaded) -> None:
    (native,) = loaded(_work, *arguments())
    given, wanted = arguments(), arguments()
    assert native(tuple(given)) == _work.dispatcher(*wanted) == (native(tuple(given))[0], 64)
    assert given[-1].tobytes() == wanted[-1].tobytes()
    assert given[-1].any()


@pytest.mark.parametrize("kind", ["bool", "uint8", "int16", "int32", "uint32", "int64", "uint64", "float32", "float64"])
def test_arrays_of_every_kind(loaded: Loaded, kind: str) -> None:
    values = np.arange(7).astype(kind)
    natives = loaded(_either, values, 3)
    assert [native((values, 3)) for native in natives] == [bool(values[0] > 3)]
    assert all(native((values.astype("complex64"), 3)) is objectcode.MISS for native in natives)


def test_numbers_of_every_kind(loaded: Loaded) -> None:
    values = np.arange(9, dtype=np.float64)
    for of in (True, np.bool_(False), 3, np.int64(-2), np.uint64(2**63 + 5), 2.5, np.float64(-1.5), np.float32(0.1)):
        (*_, native) = loaded(_either, values, of)
        natives = fresh(_either)._kept()
        assert [one((values, of)) for one in natives if one((values, of)) is not objectcode.MISS] == [values[0] > of]
        assert native((values, None)) is objectcode.MISS


@njit
def _weighed(values, place, weights):  # type: ignore[no-untyped-def]
    whole, share, negative = weights
    result = values[place[0], place[1]] * share + whole
    return -result if negative else result


def test_tuples_of_numbers(loaded: Loaded) -> None:
    values = np.arange(12, dtype=np.float64).reshape(3, 4)
    good = (values, (1, 2), (10, 0.5, True))
    (native,) = loaded(_weighed, *good)
    assert native(good) == _weighed.py_func(*good) == -13.0
    assert native((values, (2, np.int64(3)), (np.int64(-1), np.float64(2.0), np.bool_(False)))) == 21.0
    for place, weights in (
        ((1, 2, 0), good[2]), ((1,), good[2]), ([1, 2], good[2]), (1, good[2]), ((1, 2.0), good[2]), ((), good[2]),
        (good[1], (10, 0.5)), (good[1], (10, 1, True)), (good[1], (1 << 63, 0.5, True)), (good[1], (10, 0.5, 1)),
    ):  # fmt: skip
        assert native((values, place, weights)) is objectcode.MISS, (place, weights)
    assert native(((values,), *good[1:])) is native((values, 1, 2, 10, 0.5, True)) is objectcode.MISS


@njit
def _planes(planes, places):  # type: ignore[no-untyped-def]
    bytes_of, wide = planes
    for i in range(len(places[0])):
        wide[i] += bytes_of[places[0][i], places[1][i]]
    return wide.sum()


def test_tuples_of_arrays(loaded: Loaded) -> None:
    def good() -> tuple[Any, ...]:
        rows, columns = np.array([2, 0, 1]), np.array([0, 1, 1])
        return (np.arange(6, dtype=np.uint8).reshape(3, 2), np.ones(3, np.float64)), (rows, columns)

    (native,) = loaded(_planes, *good())
    given = good()
    assert native(given) == 3 + 4 + 1 + 3
    assert given[0][1].tolist() == [5, 2, 4]
    planes, places = good()
    for wrong in (
        (planes[::-1], places), (planes, (*places, places[0])), (planes, [*places]), (planes, np.array(places)),
        (planes, (places[0], places[1].astype(np.int32))), ((planes[0].T, planes[1]), places),
        ((planes[0], 1.0), places),
    ):  # fmt: skip
        assert native(wrong) is objectcode.MISS


def test_arguments_of_another_kind_are_left_to_numba(loaded: Loaded) -> None:
    (native,) = loaded(_work, *arguments())
    good = arguments()
    assert native(tuple(good)) is not objectcode.MISS
    frozen = good[0].copy()
    frozen.flags.writeable = False
    subclass = good[2].view(np.recarray)
    others: list[tuple[int, Any]] = [
        (0, good[0].astype(np.int8)), (0, good[0][:, :, 0]), (0, np.asfortranarray(good[0])), (0, good[0][:, :, ::-1]),
        (0, frozen), (0, good[0].tobytes()), (0, None), (1, np.ascontiguousarray(good[1])), (1, good[1].astype(">f8")),
        (2, subclass), (3, 1.7), (3, np.float64(1.7)), (4, 3.0), (4, True), (4, 1 << 63), (4, np.uint64(3)), (5, 1),
        (6, good[6].astype(np.float64)), (6, np.zeros(160, np.uint8)[1:81].view(np.float32)),
    ]  # fmt: skip
    for place, value in others:
        changed = [*good[:place], value, *good[place + 1 :]]
        assert native(tuple(changed)) is objectcode.MISS, (place, value)
    assert native(tuple(good[:-1])) is native((*good, 1)) is objectcode.MISS


def test_layouts_are_told_apart(loaded: Loaded) -> None:
    whole = np.arange(24, dtype=np.int64).reshape(4, 6)
    kinds = [whole, np.asfortranarray(whole), whole[::2, ::2], whole[:, :1], whole[:1, ::2], np.zeros((0, 3), np.int64)]
    for kind in kinds:
        loaded(_strides, kind)
    natives = fresh(_strides)._kept()
    for kind in kinds:
        taken = [native((kind,)) for native in natives]
        assert [result for result in taken if result is not objectcode.MISS] == [_strides.dispatcher(kind)]


@njit
def _strides(values):  # type: ignore[no-untyped-def]
    return values.strides[0] * 1000 + values.strides[1] * 100 + values.size


def test_an_exception_is_numbas(loaded: Loaded) -> None:
    values = np.array([7], np.int64)
    (native,) = loaded(_share, values, 2)
    assert native((values, 2)) == 3
    assert native((values, 0)) is objectcode.MISS
    kernel = fresh(_share)
    assert kernel(values, 2) == 3
    assert kernel._dispatcher is None
    with pytest.raises(ZeroDivisionError):
        kernel(values, 0)


def test_what_does_not_fit_stays_with_numba(loaded: Loaded, tmp_path: Path) -> None:
    values = np.arange(3.0)
    assert loaded(_doubled, values) == []
    assert list(tmp_path.rglob("*.obj")) == []
    assert fresh(_doubled)(values).tolist() == [0, 2, 4]


def test_memory_of_a_kernels_own_is_given_back(loaded: Loaded) -> None:
    def size() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * 4096

    values = np.ones(1, np.int64)
    (native,) = loaded(_much, values, 3)
    before = size()
    assert native((values, 4000)) == sum(range(4000)) + 4000  # 4 GB, one after the other
    assert size() - before < 1 << 30


@pytest.mark.parametrize("place", [0, 30, 80, -1])
def test_a_damaged_file_is_passed_over(loaded: Loaded, tmp_path: Path, place: int) -> None:
    values = np.arange(5, dtype=np.int64)
    assert len(loaded(_number, values, 2)) == 1
    (path,) = tmp_path.rglob("*.obj")
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert fresh(_number)._kept() == []
    path.write_bytes(content[: len(content) // 2])
    assert fresh(_number)._kept() == []
    assert fresh(_number)(values, 2) == 3


def test_settings_of_numbas_and_its_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    def folder() -> Path | None:
        objectcode.environment.cache_clear()
        return jit._cache_folder(_number.py_func, ())

    plain = folder()
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert folder() != plain
    assert objectcode.usable()
    monkeypatch.delenv("NUMBA_CPU_NAME")
    monkeypatch.setenv("NUMBA_NUM_THREADS", "1")  # as worker processes have it: they use what the trainer compiled
    assert folder() == plain
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert not objectcode.usable()
    monkeypatch.undo()
    assert folder() == plain


def test_numbers_out_of_a_thread_each(loaded: Loaded) -> None:
    import threading

    values = np.arange(50, dtype=np.int64)
    (native,) = loaded(_number, values, 2)
    wrong: list[int] = []

    def ask(of: int) -> None:
        wrong.extend(of for _ in itertools.repeat(None, 2000) if native((values, of)) != of + 1)

    threads = [threading.Thread(target=ask, args=(of,)) for of in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
