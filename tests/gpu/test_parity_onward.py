"""On from Caffe's snapshots, beyond the end of its runs: ours beside PyTorch's, loss by loss, from the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from gpu.solver import Solver
from tests.gpu.training import Batch, cifar, crops, lenet, mnist, restored

pytestmark = pytest.mark.oracle
STEPS = 20
Scores = Callable[[Any, Any, list[Any]], Any]


def lenet_scores(f: Any, x: Any, p: list[Any]) -> Any:
    x = f.max_pool2d(f.conv2d(f.max_pool2d(f.conv2d(x, p[0], p[1]), 2), p[2], p[3]), 2)
    return f.linear(f.relu(f.linear(x.flatten(1), p[4], p[5])), p[6], p[7])


def cifar_scores(f: Any, x: Any, p: list[Any]) -> Any:
    x = f.relu(f.max_pool2d(f.conv2d(x, p[0], p[1], padding=2), 3, 2, ceil_mode=True))
    for i in (2, 4):
        x = f.avg_pool2d(f.relu(f.conv2d(x, p[i], p[i + 1], padding=2)), 3, 2, ceil_mode=True)
    return f.linear(f.linear(x.flatten(1), p[6], p[7]), p[8], p[9])


def torchs(solver: Solver, scores: Scores, batches: Callable[[int], list[Batch]]) -> Iterator[float]:
    """Losses of PyTorch's, from what ``solver`` has restored; Caffe's momentum, decay and rates per parameter."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    params = [torch.tensor(param.blob.data).requires_grad_() for param in solver.net.learnable]
    history = [torch.tensor(np.array(array)) for array in solver.history]
    ours, at, policy = list(solver.net.learnable), solver.iter, solver.policy
    decay, momentum, parts = solver.param.weight_decay, solver.param.momentum, solver.rule.iter_size
    for step in range(at, at + STEPS):
        losses = [
            torch.nn.functional.cross_entropy(
                scores(torch.nn.functional, torch.tensor(batch["data"]), params), torch.tensor(batch["label"]).long()
            )
            for batch in batches(step)
        ]
        total = sum(losses) / parts
        gradients = torch.autograd.grad(total, params)
        with torch.no_grad():
            for mine, param, kept, gradient in zip(ours, params, history, gradients, strict=True):
                rate = policy.rate(step) * mine.lr_mult
                kept.mul_(momentum).add_(gradient + decay * mine.decay_mult * param, alpha=rate)
                param.sub_(kept)
        yield float(total.detach())


def check(solver: Solver, scores: Scores, batches: Callable[[int], list[Batch]]) -> None:
    theirs = torchs(solver, scores, batches)
    with threadpool_limits(1):
        for step in range(solver.iter, solver.iter + STEPS):
            wanted = next(theirs)  # before our step: its first one copies what was restored
            assert solver.step_on(batches(step)) == pytest.approx(wanted, rel=1e-3), f"iteration {step}"


def pair(step: int) -> list[Batch]:
    """The two sub-batches of a step."""
    return [mnist(2 * step), mnist(2 * step + 1)]


@pytest.mark.parametrize(
    ("name", "made", "scores", "batches"),
    [
        ("lenet/lenet_iter_100", lenet, lenet_scores, lambda step: [mnist(step)]),
        ("lenet/lenet_iter_200", lenet, lenet_scores, lambda step: [mnist(step)]),
        ("lenet/lenet_h5_iter_20", lambda: lenet("lenet_solver_h5"), lenet_scores, pair),
        ("cifar10_quick/cifar10_quick_iter_300", cifar, cifar_scores, lambda step: [crops(step)]),
    ],
    ids=lambda value: value.rpartition("/")[2] if isinstance(value, str) else "",
)
def test_20_iterations_on_from_a_snapshot_of_caffe(
    name: str, made: Callable[[], Solver], scores: Scores, batches: Callable[[int], list[Batch]], tmp_path: Path
) -> None:
    solver = restored(made(), name, tmp_path)
    assert solver.iter == int(name.rpartition("_")[2])
    assert any(array.any() for array in solver.history)
    check(solver, scores, batches)


def test_20_iterations_of_two_sub_batches_from_the_initial_weights() -> None:
    check(lenet("lenet_solver_h5"), lenet_scores, pair)
