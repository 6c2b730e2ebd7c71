"""Initial values: Caffe's meaning of every filler, from numbers that depend on seed and name alone."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from datasets import caffe_pb2
from gpu.fillers import FillerError, fill, name_key


def filler(**fields: Any) -> Any:
    return caffe_pb2.FillerParameter(**fields)


def test_the_default_is_constant_zero() -> None:
    values = fill(filler(), (2, 3), 1, "a/0")
    assert values.dtype == np.float32
    assert values.shape == (2, 3)
    assert not values.any()


def test_philox_words_follow_the_contract() -> None:
    """docs/design.md 2.2: key (seed, SHA-256 of "layer/index"), counter (0, stream 2, 0, 0)."""
    key = int.from_bytes(hashlib.sha256(b"conv1/0").digest()[:8], "little")
    assert key == name_key("conv1/0")
    words = np.random.Philox(key=[7, key], counter=[0, 2, 0, 0]).random_raw(6)
    expected = ((words >> np.uint64(11)) * 2.0**-53).astype(np.float32)
    assert np.array_equal(fill(filler(type="uniform"), (2, 3), 7, "conv1/0").ravel(), expected)


def test_values_depend_on_seed_and_name_only() -> None:
    xavier = filler(type="xavier")
    first = fill(xavier, (20, 1, 5, 5), 1, "conv1/0")
    assert np.array_equal(first, fill(xavier, (20, 1, 5, 5), 1, "conv1/0"))
    assert not np.array_equal(first, fill(xavier, (20, 1, 5, 5), 2, "conv1/0"))
    assert not np.array_equal(first, fill(xavier, (20, 1, 5, 5), 1, "conv2/0"))
    assert not np.array_equal(fill(xavier, (4, 4), 0, "a/0"), fill(xavier, (4, 4), -1, "a/0"))


@pytest.mark.parametrize(("norm", "fan"), [("FAN_IN", 30), ("FAN_OUT", 60), ("AVERAGE", 45)])
def test_variance_norm(norm: str, fan: int) -> None:
    shape = (400, 200, 3, 10)  # fan in 6000, fan out 12000
    kind = type(filler()).DESCRIPTOR.fields_by_name["variance_norm"].enum_type.values_by_name[norm].number
    xavier = fill(filler(type="xavier", variance_norm=kind), shape, 3, "w/0")
    bound = np.sqrt(3 / (fan * 200))
    assert np.abs(xavier).max() <= np.float32(bound)
    assert np.abs(xavier).max() > 0.999 * bound
    msra = fill(filler(type="msra", variance_norm=kind), shape, 3, "w/0")
    assert msra.std() == pytest.approx(np.sqrt(2 / (fan * 200)), rel=0.01)


def test_uniform_and_gaussian() -> None:
    uniform = fill(filler(type="uniform", min=-2, max=-1), (50, 200), 1, "w/0")
    assert uniform.min() >= -2
    assert uniform.max() < -1
    assert uniform.mean() == pytest.approx(-1.5, abs=0.02)
    normal = fill(filler(type="gaussian", mean=3, std=0.5), (50, 201), 1, "w/0")
    assert normal.mean() == pytest.approx(3, abs=0.02)
    assert normal.std() == pytest.approx(0.5, rel=0.03)
    assert fill(filler(type="gaussian"), (200, 200), 1, "w/0").std() == pytest.approx(1, rel=0.02)  # Caffe's default


def test_sparse_gaussian_keeps_so_many_of_each_column() -> None:
    values = fill(filler(type="gaussian", sparse=15), (100, 500), 1, "w/0")
    assert np.count_nonzero(values) / 500 == pytest.approx(15, rel=0.05)
    assert values[values != 0].std() == pytest.approx(1, rel=0.05)


def test_positive_unitball_rows_sum_to_one() -> None:
    values = fill(filler(type="positive_unitball"), (5, 7, 2), 1, "w/0")
    assert (values >= 0).all()
    np.testing.assert_allclose(values.reshape(5, -1).sum(axis=1), 1, rtol=1e-6)


def test_bilinear() -> None:
    values = fill(filler(type="bilinear"), (2, 1, 4, 4), 1, "up/0")
    np.testing.assert_array_equal(values[0, 0, 0], np.float32([0.0625, 0.1875, 0.1875, 0.0625]))
    np.testing.assert_array_equal(values[1, 0, 1], np.float32([0.1875, 0.5625, 0.5625, 0.1875]))
    assert values[0].sum() == 4
    np.testing.assert_allclose(fill(filler(type="bilinear"), (1, 1, 3, 3), 1, "up/0")[0, 0, 1], [0.5, 1, 0.5])


def test_fillers_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(FillerError, match=r"'up/0'.*square"):
        fill(filler(type="bilinear"), (1, 1, 3, 4), 1, "up/0")
    with pytest.raises(FillerError, match=r"'w/0'.*'xaver'"):
        fill(filler(type="xaver"), (3, 4), 1, "w/0")
