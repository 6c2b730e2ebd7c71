"""Page-locking by CUDA's rules, enforced by a stand-in for the two CUDA calls."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from gpu.pinned import PAGE, PinnedRanges


class StubCuda:
    """cudaHostRegister and cudaHostUnregister: strict, per process, and with an error state that sticks."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.sticky: str | None = None
        self.refuse = False

    def _fail(self, why: str) -> None:
        self.sticky = why
        raise RuntimeError(why)

    def register(self, address: int, nbytes: int, flags: int) -> None:
        assert self.sticky is None, "an earlier error surfaces in an unrelated call"
        if self.refuse:
            self._fail("cudaErrorMemoryAllocation: out of memory")
        if nbytes <= 0 or address % PAGE or nbytes % PAGE or flags != 0:
            self._fail("cudaErrorInvalidValue: invalid argument")
        if any(address < start + size and start < address + nbytes for start, size in self.ranges.items()):
            self._fail("cudaErrorHostMemoryAlreadyRegistered")
        self.ranges[address] = nbytes

    def unregister(self, address: int) -> None:
        assert self.sticky is None, "an earlier error surfaces in an unrelated call"
        if address not in self.ranges:
            self._fail("cudaErrorHostMemoryNotRegistered")
        del self.ranges[address]

    def clear(self) -> None:
        self.sticky = None


@pytest.fixture
def cuda() -> StubCuda:
    return StubCuda()


@pytest.fixture
def pinned(cuda: StubCuda) -> PinnedRanges:
    return PinnedRanges(cuda.register, cuda.unregister, cuda.clear)


@pytest.fixture
def pages() -> np.ndarray:
    """Eight pages of page-aligned memory."""
    mapping = mmap.mmap(-1, 8 * PAGE)
    return np.frombuffer(mapping, np.uint8)


def test_a_range_is_registered_once_and_counted(cuda: StubCuda, pinned: PinnedRanges, pages: np.ndarray) -> None:
    assert pinned.register(pages)
    assert pinned.register(pages)
    assert pinned.register(pages[PAGE : 2 * PAGE])  # a part of it: nothing new for CUDA
    assert cuda.ranges == {pages.ctypes.data: 8 * PAGE}
    assert pinned.nbytes == 8 * PAGE
    for _ in range(2):
        pinned.unregister(pages)
        assert cuda.ranges
    pinned.unregister(pages)
    assert cuda.ranges == {}
    pinned.unregister(pages)  # unknown by now


def test_the_last_page_is_registered_whole(cuda: StubCuda, pinned: PinnedRanges, pages: np.ndarray) -> None:
    part = pages[: PAGE + 100]
    assert pinned.register(part)
    assert cuda.ranges == {pages.ctypes.data: 2 * PAGE}
    assert pinned.covers(part)
    assert pinned.covers(pages[100 : 2 * PAGE])
    assert not pinned.covers(pages[: 2 * PAGE + 1])
    assert not pinned.covers(pages[2 * PAGE :])


def test_neighbours_are_separate_ranges(cuda: StubCuda, pinned: PinnedRanges, pages: np.ndarray) -> None:
    assert pinned.register(pages[2 * PAGE : 4 * PAGE])
    assert pinned.register(pages[: 2 * PAGE])
    assert pinned.register(pages[4 * PAGE :])
    assert len(cuda.ranges) == 3
    pinned.unregister(pages[2 * PAGE : 4 * PAGE])
    assert len(cuda.ranges) == 2
    pinned.close()
    pinned.close()
    assert cuda.ranges == {}
    assert pinned.nbytes == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda pages: pages[:0], "empty"),
        (lambda pages: pages[1 : PAGE + 1], "not page-aligned"),
        (lambda pages: pages.reshape(8, PAGE)[:, :10], "not contiguous"),
        (lambda pages: np.frombuffer(bytes(PAGE), np.uint8), "read-only"),
        (lambda pages: pages[PAGE : 8 * PAGE], "overlaps"),
        (lambda pages: pages[3 * PAGE : 6 * PAGE], "overlaps"),
    ],
)
def test_what_cuda_would_refuse_stays_pageable(cuda: StubCuda, pinned: PinnedRanges, pages, make, words) -> None:
    assert pinned.register(pages[2 * PAGE : 4 * PAGE])
    memory = make(pages)
    with pytest.warns(RuntimeWarning, match=words):
        assert not pinned.register(memory)
    assert len(cuda.ranges) == 1
    assert cuda.sticky is None


def test_a_refusal_is_cleared_and_the_next_call_works(cuda: StubCuda, pinned: PinnedRanges, pages: np.ndarray) -> None:
    cuda.refuse = True
    with pytest.warns(RuntimeWarning, match="CUDA refused: cudaErrorMemoryAllocation"):
        assert not pinned.register(pages)
    assert not pinned.covers(pages)
    cuda.refuse = False
    assert pinned.register(pages)


def test_a_failing_unregister_is_said_and_forgotten(cuda: StubCuda, pinned: PinnedRanges, pages: np.ndarray) -> None:
    assert pinned.register(pages)
    cuda.ranges.clear()  # somebody reset the device
    with pytest.warns(RuntimeWarning, match="could not be unpinned"):
        pinned.unregister(pages)
    assert pinned.register(pages)


def test_a_forked_child_starts_from_nothing(
    cuda: StubCuda, pinned: PinnedRanges, pages: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pinned.register(pages)
    cuda.ranges.clear()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not pinned.covers(pages)
    pinned.unregister(pages)
    pinned.close()
    assert pinned.register(pages)
