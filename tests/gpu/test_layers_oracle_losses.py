"""Losses and accuracy against PyTorch: random shapes, axes, normalisations, labels that are ignored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.torch_checks import Case, Pick, as_torch, backends, distinct, precisions

pytestmark = pytest.mark.oracle
sizes = st.integers(1, 4)
classes = st.integers(2, 5)
IGNORED = 9


def labels(pick: Pick, shape: tuple[int, ...], count: int, ignore: bool = False) -> np.ndarray:
    """Labels below ``count``, some of them to be ignored."""
    rng = np.random.default_rng(pick(st.integers(0, 2**31)))
    made = rng.integers(0, count, shape)
    return np.where(rng.random(shape) < 0.3, IGNORED, made) if ignore else made


def loss_settings(pick: Pick, ignore: bool) -> tuple[str, str]:
    """The text of a ``loss_param``, and its normalisation."""
    mode = pick(st.sampled_from(["FULL", "VALID", "BATCH_SIZE", "NONE"]))
    return f"loss_param {{ normalization: {mode}" + f" ignore_label: {IGNORED}" * ignore + " }", mode


def divisor(mode: str, images: int, values: int, valid: int) -> int:
    return max(1, {"FULL": values, "VALID": valid, "BATCH_SIZE": images, "NONE": 1}[mode])


def softmax_loss(pick: Pick) -> Case:
    before, after = ([pick(sizes) for _ in range(pick(st.integers(low, 1 + low)))] for low in (1, 0))
    count, ignore, axis = pick(classes), pick(st.booleans()), len(before)
    picked = labels(pick, (*before, *after), count, ignore)
    text, mode = loss_settings(pick, ignore)

    def wanted(torch: Any, x: Any, which: Any) -> Any:
        total = torch.nn.functional.cross_entropy(
            x.movedim(axis, -1).reshape(-1, count), which.reshape(-1), ignore_index=IGNORED, reduction="sum"
        )
        return total / divisor(mode, math.prod(before), picked.size, int((picked != IGNORED).sum()))

    bottoms = {"x": (*before, count, *after), "l": picked}
    return Case("SoftmaxWithLoss", f"softmax_param {{ axis: {axis} }} {text}", bottoms, wanted, tops=0)


def infogain(pick: Pick) -> Case:
    n, count, inner = pick(sizes), pick(classes), pick(sizes)
    picked = labels(pick, (n, inner), count)
    text, mode = loss_settings(pick, False)
    gains = np.random.default_rng(pick(st.integers(0, 2**31))).integers(0, 9, (1, 1, count, count)) / np.float32(8)

    def wanted(torch: Any, x: Any, which: Any, gain: Any) -> Any:
        rows = gain[0, 0][which].movedim(-1, 1)
        return -(rows * torch.log_softmax(x, 1)).sum() / divisor(mode, n, picked.size, picked.size)

    bottoms = {"x": (n, count, inner), "l": picked, "h": gains}
    return Case("InfogainLoss", text, bottoms, wanted, tops=0, constant=("h",))


def euclidean(pick: Pick) -> Case:
    shape = tuple(pick(st.lists(sizes, min_size=1, max_size=4)))
    return Case("EuclideanLoss", "", {"a": shape, "b": shape},
                lambda torch, a, b: torch.nn.functional.mse_loss(a, b, reduction="sum") / (2 * shape[0]),
                tops=0)  # fmt: skip


def sigmoid_loss(pick: Pick) -> Case:
    shape = tuple(pick(st.lists(sizes, min_size=1, max_size=4)))
    ignore = pick(st.booleans())
    rng = np.random.default_rng(pick(st.integers(0, 2**31)))
    targets = rng.integers(0, 9, shape) / np.float32(8)
    targets[rng.random(shape) < 0.3 * ignore] = IGNORED
    text, mode = loss_settings(pick, ignore)

    def wanted(torch: Any, x: Any, t: Any) -> Any:
        use = t != IGNORED
        total = torch.nn.functional.binary_cross_entropy_with_logits(x[use], t[use], reduction="sum")
        return total / divisor(mode, shape[0], targets.size, int(use.sum()))

    return Case("SigmoidCrossEntropyLoss", text, {"x": shape, "t": targets}, wanted, tops=0, constant=("t",))


def multinomial(pick: Pick) -> Case:
    n, count = pick(sizes), pick(classes)
    shares = np.random.default_rng(pick(st.integers(0, 2**31))).uniform(0.125, 1, (n, count)).astype(np.float32)
    return Case("MultinomialLogisticLoss", "", {"p": shares, "l": labels(pick, (n,), count)},
                lambda torch, p, which: torch.nn.functional.nll_loss(p.log(), which), tops=0)  # fmt: skip


def hinge(pick: Pick) -> Case:
    n, count, square = pick(sizes), pick(classes), pick(st.booleans())

    def wanted(torch: Any, x: Any, which: Any) -> Any:
        sign = 2 * torch.nn.functional.one_hot(which, count) - 1
        return ((1 - sign * x).clamp(min=0) ** (2 if square else 1)).sum() / n

    return Case("HingeLoss", f"hinge_loss_param {{ norm: {'L2' if square else 'L1'} }}",
                {"x": (n, count), "l": labels(pick, (n,), count)}, wanted, tops=0)  # fmt: skip


def contrastive(pick: Pick) -> Case:
    n, size, legacy = pick(sizes), pick(sizes), pick(st.booleans())
    margin = pick(st.sampled_from([0.5, 2.0, 4.0]))

    def wanted(torch: Any, a: Any, b: Any, similar: Any) -> Any:
        square = ((a - b) ** 2).sum(1)
        # Caffe's gradient divides by d + 0.0001: the root's value here, with that slope.
        root = square.detach().sqrt()
        distance = root + (square - square.detach()) / (2 * (root + 1e-4))
        gap = (margin - square).clamp(min=0) if legacy else (margin - distance).clamp(min=0) ** 2
        return torch.where(similar > 0, square, gap).sum() / (2 * n)

    text = f"contrastive_loss_param {{ margin: {margin} legacy_version: {str(legacy).lower()} }}"
    bottoms = {"a": (n, size), "b": (n, size), "s": labels(pick, (n,), 2)}
    return Case("ContrastiveLoss", text, bottoms, wanted, tops=0)


def accuracy(pick: Pick) -> Case:
    n, count, inner, ignore = pick(sizes), pick(classes), pick(sizes), pick(st.booleans())
    k = pick(st.integers(1, count))
    (scores,) = distinct(np.random.default_rng(pick(st.integers(0, 2**31))), (n, count, inner))
    picked = labels(pick, (n, inner), count, ignore)

    def wanted(torch: Any, x: Any, which: Any) -> Any:
        use = which != IGNORED
        right = (x.topk(k, 1)[1] == which[:, None]).any(1) & use
        each = [(right & (which == c)).sum() / (which == c).sum().clamp(min=1) for c in range(count)]
        return right.sum() / use.sum().clamp(min=1), torch.stack(each)

    text = f"accuracy_param {{ top_k: {k}" + f" ignore_label: {IGNORED}" * ignore + " }"
    return Case("Accuracy", text, {"x": scores, "l": picked}, wanted, tops=2, smooth=False)


CASES: dict[str, Callable[[Pick], Case]] = {
    "SoftmaxWithLoss": softmax_loss, "InfogainLoss": infogain, "EuclideanLoss": euclidean,
    "SigmoidCrossEntropyLoss": sigmoid_loss, "MultinomialLogisticLoss": multinomial, "HingeLoss": hinge,
    "ContrastiveLoss": contrastive, "Accuracy": accuracy,
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), backend=backends, precision=precisions, seed=st.integers(0, 99))
def test_as_torch(kind: str, data: st.DataObject, backend: str, precision: str, seed: int) -> None:
    as_torch(CASES[kind](data.draw), backend, precision, seed)
