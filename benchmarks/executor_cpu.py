"""Forward and backward passes of whole nets on the CPU, ours and PyTorch's in turns.

    python benchmarks/executor_cpu.py                      LeNet, cifar10_quick, CaffeNet; 1 and 2 threads, five minutes

Both sides get the same batch, accumulate no history, and run forward and backward in TRAIN. Each number of threads has
a process of its own; in it the two take turns and change who begins, so that what else the machine does meets both.
With several threads a turn is a pause and then some steps: idle threads of either side spin for up to a fifth of a
second, on the core that the other side wants. A ratio above 1 means that PyTorch took longer. PyTorch's nets are
composed here of its functions, layer for layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"lenet": (1, 28), "cifar10_quick": (3, 32), "caffenet": (3, 227), "mobilenet": (3, 224), "resnet50": (3, 224)}
CAFFE_MS = {"lenet": {1: 20.5, 2: 19.8}, "cifar10_quick": {1: 101, 2: 84}, "caffenet": {1: 2922, 2: 1979}}
"""Caffe 1.0 with OpenBLAS, batch 32, on another machine of the same kind (2 cores, AMD EPYC), give or take 25 %."""

IDLE_S, BLOCK_S = 0.3, 0.3
"""With several threads: the pause before a turn and its length."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=SIZES, default=["lenet", "cifar10_quick", "caffenet"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=30, help="for each net and number of threads")
    parser.add_argument(
        "--layers", action="store_true", help="print the time of each layer, ours and PyTorch's, instead"
    )
    parser.add_argument("--out", default=str(Path(__file__).with_suffix(".json")), help="file for the results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one or given.layers:
        for name in [given.one] if given.one else given.nets:
            result = (profile if given.layers else compare)(name, given.threads[0], given.batch, given.seconds)
            sys.stdout.write(result if isinstance(result, str) else json.dumps(result) + "\n")
        return 0
    results: dict[str, Any] = {"machine": machine("numpy", "numba", "torch"), "batch": given.batch}
    for name in given.nets:
        for threads in given.threads:
            command = [sys.executable, __file__, "--one", name, "--threads", str(threads)]
            command += ["--batch", str(given.batch), "--seconds", str(given.seconds)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row = results[f"{name}, {threads} threads"] = json.loads(done.stdout.splitlines()[-1])
            sys.stdout.write(f"{name:14} {threads} threads  {json.dumps(row)}\n")
            sys.stdout.flush()
    Path(given.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def our_net(name: str, batch: int, threads: int) -> tuple[Any, Callable[[], None]]:
    import numpy as np

    import gpu
    from gpu.backend import blas_threads

    channels, size = SIZES[name]
    shapes = {"data": (batch, channels, size, size), "label": (batch,)}
    net = gpu.Net(ROOT / "examples" / "nets" / f"{name}.prototxt", "TRAIN", input_shapes=shapes, seed=1)
    blas_threads(threads)
    rng = np.random.default_rng(1)
    net.blobs["data"].data = rng.standard_normal(shapes["data"], np.float32)
    net.blobs["label"].data = rng.integers(0, 10, batch)

    def step() -> None:
        net.forward_only()
        net.clear_param_diffs()
        net.backward_only()

    return net, step


def torch_net(name: str, net: Any, threads: int) -> Callable[[], None]:
    """The same net with the same weights, of PyTorch's functions."""
    import torch

    torch.set_num_threads(threads)
    leaves = {
        layer.name: [torch.tensor(blob.data, requires_grad=layer.learned) for blob in layer.blobs]
        for layer in net.layers
        if layer.blobs
    }
    data = torch.tensor(net.blobs["data"].data)
    labels = torch.tensor(net.blobs["label"].data).long()
    plan = [(layer, list(layer.spec.bottom), list(layer.spec.top)) for layer in net.layers]
    calls = [(_torch_layer(torch, layer, leaves.get(layer.name, [])), *ends) for layer, *ends in plan]
    learned = [leaf for group in leaves.values() for leaf in group if leaf.requires_grad]

    def step() -> None:
        blobs = {"data": data, "label": labels}
        for call, bottoms, tops in calls:
            if bottoms:
                blobs[tops[0]] = call(*[blobs[bottom] for bottom in bottoms])
        for leaf in learned:
            leaf.grad = None
        blobs["loss"].backward()

    return step


def _torch_layer(torch: Any, layer: Any, leaves: list[Any]) -> Callable[..., Any]:
    """The function of one layer of ours."""
    f = torch.nn.functional
    spec = layer.spec
    if layer.type == "Convolution":
        p = spec.convolution_param
        bias = leaves[1] if len(leaves) > 1 else None
        stride, pad = (list(p.stride) or [1])[0], (list(p.pad) or [0])[0]
        return lambda x: f.conv2d(x, leaves[0], bias, stride, pad, 1, p.group)
    if layer.type == "InnerProduct":
        return lambda x: f.linear(x.flatten(1), *leaves)
    if layer.type == "Pooling":
        p = spec.pooling_param
        if p.global_pooling:
            return lambda x: x.mean((2, 3), keepdim=True)
        if p.pool == 0:
            return lambda x: f.max_pool2d(x, p.kernel_size, p.stride, p.pad, ceil_mode=True)
        return lambda x: f.avg_pool2d(x, p.kernel_size, p.stride, p.pad, ceil_mode=True)
    if layer.type == "LRN":
        p = spec.lrn_param
        return lambda x: f.local_response_norm(x, p.local_size, p.alpha, p.beta, p.k)
    if layer.type == "BatchNorm":
        return lambda x: f.batch_norm(x, leaves[0].detach(), leaves[1].detach(), training=True, eps=1e-5)
    if layer.type == "Scale":
        return lambda x: x * leaves[0][:, None, None] + leaves[1][:, None, None]
    if layer.type == "SoftmaxWithLoss":
        return lambda x, label: f.cross_entropy(x.flatten(1), label)
    simple = {"ReLU": torch.relu, "Dropout": lambda x: f.dropout(x, 0.5), "Eltwise": torch.add, "Data": None}
    return simple[layer.type]  # type: ignore[return-value]


def compare(name: str, threads: int, batch: int, seconds: float) -> dict[str, Any]:
    """Median milliseconds of a step on both sides, and the median of the ratios of neighbours."""
    net, ours = our_net(name, batch, threads)
    sides = {"ours": ours, "torch": torch_net(name, net, threads)}
    taken: dict[str, list[float]] = {side: [] for side in sides}
    busy: dict[str, list[float]] = {side: [] for side in sides}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 6 or (time.perf_counter() < end and rounds < 200):
        for side in list(sides)[:: -1 if rounds % 2 else 1]:
            if threads > 1:
                time.sleep(IDLE_S)
            elapsed, cpu = _block(sides[side], BLOCK_S if threads > 1 else 0)
            taken[side].append(elapsed)
            busy[side].append(cpu)
        rounds += 1
    ratios = [theirs / own for own, theirs in zip(taken["ours"], taken["torch"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        **{f"{side}_ms": round(statistics.median(values), 2) for side, values in taken.items()},
        **{f"{side}_cpu_ms": round(statistics.median(values), 2) for side, values in busy.items()},
        "torch_over_ours": round(statistics.median(ratios), 3),
        "torch_over_ours_quartiles": [round(low, 3), round(high, 3)],
        "rounds": rounds,
        "caffe_ms_elsewhere": CAFFE_MS.get(name, {}).get(threads),
    }


def _block(step: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Median milliseconds and CPU milliseconds of one step after another for this long, after a first one."""
    if seconds:
        step()
    both: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while not both or time.perf_counter() < end:
        began, began_cpu = time.perf_counter(), time.process_time()
        step()
        both.append(((time.perf_counter() - began) * 1e3, (time.process_time() - began_cpu) * 1e3))
    return statistics.median(wall for wall, _ in both), statistics.median(cpu for _, cpu in both)


def profile(name: str, threads: int, batch: int, seconds: float) -> str:
    """Least milliseconds of CPU time (of all threads) of each layer, forward and backward, ours beside PyTorch's."""
    net, step = our_net(name, batch, threads)
    rows: dict[tuple[str, str], list[float]] = {}
    theirs = {
        layer.name: (0.0, 0.0) if layer.type == "Data" else _torch_times(layer, net, threads) for layer in net.layers
    }

    def timed(layer: Any, way: str) -> Callable[..., None]:
        inner = getattr(layer, way)
        times = rows.setdefault((layer.name, way), [])

        def call(*arrays: Any) -> None:
            began = time.process_time()
            inner(*arrays)
            times.append((time.process_time() - began) * 1e3)

        return call

    step()
    for layer in net.layers:
        for way in ("forward", "backward"):
            setattr(layer, way, timed(layer, way))
    whole = []
    end = time.perf_counter() + seconds
    while len(whole) < 3 or (time.perf_counter() < end and len(whole) < 100):
        began = time.process_time()
        step()
        whole.append((time.process_time() - began) * 1e3)
    lines = [
        f"{name}, {threads} threads, milliseconds of CPU time (least of {len(whole)} steps): {min(whole):.2f}",
        f"  {'':45} {'ours: forward':>14} {'backward':>9} {'PyTorch: forward':>17} {'backward':>9}",
    ]
    total = [0.0] * 4
    for layer in net.layers:
        both = [min(rows[layer.name, way] or [0.0]) for way in ("forward", "backward")]
        both += theirs[layer.name]
        total = [a + b for a, b in zip(total, both, strict=True)]
        lines.append(f"  {layer.name:28} {layer.type:16} " + "{:14.3f} {:9.3f} {:17.3f} {:9.3f}".format(*both))
    lines.append(f"  {'sum':45} " + "{:14.3f} {:9.3f} {:17.3f} {:9.3f}".format(*total))
    lines.append(f"  {'between layers':45} {max(0.0, min(whole) - sum(total[:2])):14.3f}")
    return "\n".join(lines) + "\n"


def _torch_times(layer: Any, net: Any, threads: int) -> tuple[float, float]:
    """Least milliseconds of CPU time of one layer in PyTorch, alone with its inputs: forward, backward."""
    import torch

    torch.set_num_threads(threads)
    first = layer is next(each for each in net.layers if each.type != "Data")
    leaves = [torch.tensor(blob.data, requires_grad=layer.learned) for blob in layer.blobs]
    call = _torch_layer(torch, layer, leaves)
    inputs = []
    for name in layer.spec.bottom:
        value = torch.tensor(net.blobs[name].data)
        inputs.append(value.long() if name == "label" else value.requires_grad_(not first))
    times: list[tuple[float, float]] = []
    while len(times) < 3 or (sum(map(sum, times)) < 1000 and len(times) < 30):
        began = time.process_time()
        y = call(*inputs)
        between = time.process_time()
        gradient = torch.ones_like(y)
        for leaf in [*leaves, *inputs]:
            leaf.grad = None
        start = time.process_time()
        y.backward(gradient)
        times.append(((between - began) * 1e3, (time.process_time() - start) * 1e3))
    return min(forward for forward, _ in times), min(backward for _, backward in times)


if __name__ == "__main__":
    raise SystemExit(main())
