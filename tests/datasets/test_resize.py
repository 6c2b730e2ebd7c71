"""Bilinear resizing in OpenCV's fixed point. test_convert.py compares it with images that Caffe resized."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from datasets import resize as module
from datasets.resize import resize


@pytest.fixture(autouse=True, params=["arrays", "kernel"])
def way(request, monkeypatch) -> str:
    """Everything holds for both ways to the same bits."""
    monkeypatch.setattr(module, "_compiled", threading.Event())
    if request.param == "kernel":
        module.prepare()
    return request.param


def test_the_same_size_is_the_same_image() -> None:
    image = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    assert resize(image, 3, 4) is image


@pytest.mark.parametrize("value", [0, 1, 127, 255])
@pytest.mark.parametrize("size", [(1, 1), (3, 11), (40, 2)])
def test_a_flat_image_stays_flat(value: int, size: tuple[int, int]) -> None:
    made = resize(np.full((3, 5, 7), value, np.uint8), *size)
    assert made.shape == (3, *size)
    assert made.dtype == np.uint8
    assert (made == value).all()


def test_known_pixels() -> None:
    # Centres of 4 pixels over 2: -0.25, 0.25, 0.75, 1.25; the outer two lie outside and repeat the edge.
    row = np.array([[[0, 100]]], np.uint8)
    assert resize(row, 1, 4).tolist() == [[[0, 25, 75, 100]]]
    assert resize(row.transpose(0, 2, 1), 4, 1).ravel().tolist() == [0, 25, 75, 100]
    # Halving takes the middle of each pair, and does not smooth over more than that.
    assert resize(np.array([[[0, 10, 200, 100, 7, 9]]], np.uint8), 1, 3).tolist() == [[[5, 150, 8]]]
    assert resize(np.array([[[9]]], np.uint8), 2, 3).tolist() == [[[9, 9, 9], [9, 9, 9]]]


def test_it_is_near_exact_bilinear_interpolation() -> None:
    image = np.random.default_rng(0).integers(0, 256, (1, 13, 17), np.uint8)
    made = resize(image, 29, 8)[0]
    rows = np.clip((np.arange(29) + 0.5) * 13 / 29 - 0.5, 0, 12)
    columns = np.clip((np.arange(8) + 0.5) * 17 / 8 - 0.5, 0, 16)
    across = np.stack([np.interp(columns, np.arange(17), line) for line in image[0]])
    exact = np.stack([np.interp(rows, np.arange(13), line) for line in across.T], axis=1)
    assert np.abs(made - exact).max() <= 1


def in_float64(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """OpenCV's fixed point spelled out with floor and float64, pixel by pixel: no code in common with the module."""

    def taps(old: int, new: int) -> list[tuple[int, int, int]]:
        found = []
        for place in range(new):
            centre = float(np.float32((place + 0.5) * (old / new) - 0.5))
            first = int(np.floor(centre))
            share = 0.0 if first < 0 or first >= old - 1 else float(np.float32(centre) - np.float32(first))
            first = min(max(first, 0), old - 1)
            found.append((first, min(first + 1, old - 1), int(np.rint(np.float32(share) * 2048))))
        return found

    made = np.empty((len(image), height, width), np.float64)
    for y, (upper, under, down) in enumerate(taps(image.shape[1], height)):
        for x, (left, right, along) in enumerate(taps(image.shape[2], width)):
            top, bottom = (
                np.floor((image[:, row, left] * (2048.0 - along) + image[:, row, right] * float(along)) / 16)
                for row in (upper, under)
            )
            total = np.floor(top * (2048 - down) / 65536) + np.floor(bottom * down / 65536)
            made[:, y, x] = np.floor((total + 2) / 4)
    return made


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("old", "new"),
    [((1, 1), (3, 2)), ((2, 9), (9, 2)), ((7, 5), (7, 4)), ((13, 17), (29, 8)), ((40, 3), (3, 40)), ((31, 37), (1, 1))],
)
def test_both_ways_are_the_fixed_point_of_opencv_whatever_lies_next_to_what(channels: int, old, new) -> None:
    pixels = np.random.default_rng(channels).integers(0, 256, (*old, channels), np.uint8)
    pixels[0] = 255  # the largest sums
    together = pixels.transpose(2, 0, 1)
    apart = np.ascontiguousarray(together)
    expected = in_float64(apart.astype(np.float64), *new)
    locked = apart.copy()
    locked.setflags(write=False)
    for view in (together, apart, locked, np.flip(np.flip(apart, 2).copy(), 2), np.repeat(apart, 2, 2)[:, :, ::2]):
        made = resize(view, *new)
        assert made.flags.c_contiguous
        np.testing.assert_array_equal(made, expected)


def test_one_kernel_serves_all_images(way: str) -> None:
    """A second compilation would stop all workers for seconds in the middle of their work."""
    if way == "kernel":
        for shape in ((1, 5, 6), (3, 5, 6)):
            resize(np.zeros(shape, np.uint8), 3, 4)
            resize(np.frombuffer(bytes(90), np.uint8)[: np.prod(shape)].reshape(shape), 3, 4)
            resize(np.zeros((*shape[1:], shape[0]), np.uint8).transpose(2, 0, 1), 3, 4)
        assert module._interpolate.signatures == 1


def test_few_images_do_not_wait_for_a_compiler(way: str) -> None:
    if way == "arrays":
        code = "import sys, numpy, datasets.resize as r; r.resize(numpy.zeros((3, 5, 6), 'u1'), 3, 4)"
        code += "; assert 'numba' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True)
