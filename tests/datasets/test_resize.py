"""Bilinear resizing in OpenCV's fixed point. test_convert.py compares it with images that Caffe resized."""

from __future__ import annotations

import numpy as np
import pytest

from datasets.resize import resize


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
