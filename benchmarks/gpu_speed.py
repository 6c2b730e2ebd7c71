"""The parts of the acceptance that measure: ceilings of the device, what layers reach of them, copies under compute."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu_nets import Amount, large_ops, once, op_net
from gpu.backend import Backend
from gpu.device import open_device


def seconds(backend: Backend, work: Callable[[], Any], repeats: int = 5) -> float:
    """The median time of ``work``, the device's own end included."""
    taken = []
    for attempt in range(repeats + 1):
        _wait(backend)
        began = time.perf_counter()
        work()
        _wait(backend)
        if attempt:
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def _wait(backend: Backend) -> None:
    if backend.name == "cupy":
        backend.xp.cuda.get_current_stream().synchronize()


def ceilings(backend: Backend, amount: Amount) -> dict[str, Any]:
    """What a plain copy and a plain product reach here, and the share of it that layers reach."""
    xp, edge = backend.xp, amount.edge(4096)
    source = xp.zeros(amount.edge(1 << 26), np.float32)
    target = xp.empty_like(source)
    bandwidth = 2 * source.nbytes / seconds(backend, lambda: xp.copyto(target, source))
    a, b, c = (xp.ones((edge, edge), np.float32) for _ in range(3))
    gemm = 2 * edge**3 / seconds(backend, lambda: xp.matmul(a, b, out=c))
    rows = {}
    for name, layer, inputs in large_ops(amount):
        net, values = op_net(layer, inputs, backend)
        once(net, values)
        forward, backward = seconds(backend, net.forward_only), seconds(backend, net.backward_only)
        row: dict[str, Any] = {"forward_ms": 1e3 * forward, "backward_ms": 1e3 * backward}
        x, y = (int(np.prod(net.blobs[key].shape)) for key in ("x", "y"))
        weight = net.params["L"][0].shape if net.params.get("L") else ()
        if name.startswith("convolution") and "depthwise" not in name:
            flops = 2 * y * int(np.prod(weight[1:]))
            row |= {"gemm_share_forward": flops / forward / gemm, "gemm_share_backward": 2 * flops / backward / gemm}
        elif name == "InnerProduct":
            flops = 2 * int(np.prod(weight)) * values["in_x"].shape[0]
            row |= {"gemm_share_forward": flops / forward / gemm, "gemm_share_backward": 2 * flops / backward / gemm}
        else:
            row["bandwidth_share_forward"] = 4 * (x + y) / forward / bandwidth
        rows[name] = row
    return {"ok": True, "copy_bytes_per_s": bandwidth, "gemm_flop_per_s": gemm, "layers": rows}


def overlap(backend: Backend, amount: Amount) -> dict[str, Any]:
    """Uploads from pinned memory run beside compute: the time of both together against each alone."""
    xp, nbytes = backend.xp, 4 * amount.edge(1 << 24)
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    with open_device(backend) as device:
        slot = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        alone_pageable = _upload_seconds(device, slot)
        pinned = device.register(slot)
        copy = _upload_seconds(device, slot)
        edge = amount.edge(4096)
        a, b, c = (xp.ones((edge, edge), np.float32) for _ in range(3))
        product = seconds(backend, lambda: xp.matmul(a, b, out=c))
        rounds = max(1, round(copy / product))

        def compute() -> None:
            with device.compute():
                for _ in range(rounds):
                    xp.matmul(a, b, out=c)

        alone = seconds(backend, compute)
        together = []
        for _ in range(6):
            began = time.perf_counter()
            upload = device.upload({"data": slot})
            compute()
            upload.wait()
            together.append(time.perf_counter() - began)
        device.unregister(slot)
    both = statistics.median(together[1:])
    share = (copy + alone - both) / min(copy, alone)
    return {
        "ok": backend.name != "cupy" or (pinned and share > 0.5),
        "pinned": pinned,
        "pinned_bytes_per_s": size / copy,
        "pageable_bytes_per_s": size / alone_pageable,
        "copy_s": copy,
        "compute_s": alone,
        "both_s": both,
        "overlapped_share": share,
    }


def _upload_seconds(device: Any, slot: np.ndarray) -> float:
    taken = []
    for step in range(6):
        began = time.perf_counter()
        device.upload({"data": slot}, step=step).wait()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])
