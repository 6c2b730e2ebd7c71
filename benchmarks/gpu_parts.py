"""The parts of the acceptance on a GPU. Each takes a backend and how much to do, and returns figures and ``ok``.

They run on NumPy as well, which tests them; only figures of a GPU mean anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu_nets import NET, SOLVERS, Amount, batch, build, cases, large_ops, load, once, op_net, trajectory
from benchmarks.gpu_speed import ceilings, overlap
from gpu import half
from gpu.backend import Backend
from gpu.cudnn import PASSES, ConvolutionShape, Cudnn, algorithms, open_cudnn
from gpu.fingerprint import fingerprint_parts
from gpu.net import Net
from gpu.solver import Solver

HOST = Backend("numpy", np, "reference")
RELATIVE = 1e-5
"""Relative L2 between two backends or to Caffe: single layers in float32, sums of other orders."""


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-12))


def parity(backend: Backend, amount: Amount) -> dict[str, Any]:
    """Each golden layer on the CPU and on the backend: against each other, and both against Caffe."""
    rows: dict[str, Any] = {}
    worst = 0.0
    for case in cases(amount):
        golden = load(case)
        try:
            wanted = once(build(golden, HOST), golden)
            found = {key: backend.to_numpy(array) for key, array in once(build(golden, backend), golden).items()}
        except Exception as error:
            rows[case] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            continue
        between = {key: relative(found[key], wanted[key]) for key in wanted}
        known = {key for key in wanted if key in golden and golden[key].shape == wanted[key].shape}
        to_caffe = {key: relative(found[key], golden[key]) for key in known} if case != "dropout_train" else {}
        largest = max([*between.values(), *to_caffe.values()])
        worst = max(worst, largest)
        ok = largest <= RELATIVE
        rows[case] = {
            "ok": ok,
            "cpu_to_backend": max(between.values()),
            "to_caffe": max(to_caffe.values(), default=None),
        }
        if not ok:
            rows[case]["parts"] = between
    return {"ok": all(row["ok"] for row in rows.values()), "tolerance": RELATIVE, "worst": worst, "layers": rows}


def determinism(backend: Backend, amount: Amount) -> dict[str, Any]:
    """Forward and backward of each operation, repeated; all bits of all results are hashed and must be the same."""
    rows: dict[str, Any] = {}

    def repeat(name: str, make: Callable[[], tuple[Net, dict[str, np.ndarray]]]) -> None:
        try:
            net, values = make()
            hashes = set()
            for _ in range(amount.repeats):
                hashes.add(fingerprint_parts(*once(net, values).values(), xp=backend.xp))
            rows[name] = {"ok": len(hashes) == 1, "different": len(hashes), "algorithms": algorithms(net).get("L", {})}
        except Exception as error:
            rows[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}

    for name, layer, inputs in large_ops(amount):
        repeat(f"large {name}", lambda layer=layer, inputs=inputs: op_net(layer, inputs, backend))  # type: ignore[misc]
    for case in cases(amount):
        golden = load(case)
        repeat(case, lambda golden=golden: (build(golden, backend), golden))  # type: ignore[misc]
    return {"ok": all(row["ok"] for row in rows.values()), "repeats": amount.repeats, "operations": rows}


def solvers(backend: Backend, amount: Amount) -> dict[str, Any]:
    """Each solver for 20 steps: close to the CPU's losses, and the same bits when repeated."""
    steps, rows = 20, {}
    for kind in SOLVERS:
        wanted, _ = trajectory(kind, HOST, steps)
        (found, first), (_, second) = trajectory(kind, backend, steps), trajectory(kind, backend, steps)
        apart = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, wanted, strict=True))
        rows[kind] = {"ok": apart <= 1e-3 and first == second, "relative": apart, "same_bits": first == second}
    return {"ok": all(row["ok"] for row in rows.values()), "tolerance": 1e-3, "solvers": rows}


def memory(backend: Backend, amount: Amount) -> dict[str, Any]:
    """Training for many steps takes no more memory at the end than after its first ones."""
    solver = Solver(SOLVERS["SGD"], net=NET, backend=backend)
    warm = min(20, amount.steps // 2)
    reserved = []
    for step in range(amount.steps):
        solver.step_on(batch(step))
        if step >= warm:
            reserved.append(_reserved(backend))
    return {
        # Of a process's memory only the trend can be told: the allocator keeps what it likes.
        "ok": reserved[-1] == reserved[0] if backend.name == "cupy" else reserved[-1] - reserved[0] < 64 << 20,
        "steps": amount.steps,
        "after_warm_up": reserved[0],
        "at_the_end": reserved[-1],
        "most": max(reserved),
    }


def _reserved(backend: Backend) -> int:
    if backend.name == "cupy":
        return int(backend.xp.get_default_memory_pool().total_bytes())
    import psutil

    return int(psutil.Process().memory_info().rss)


def fingerprints(backend: Backend, amount: Amount) -> dict[str, Any]:
    """Hashes of arrays on the device equal those of the same arrays on the host."""
    rng, wrong = np.random.default_rng(0), []
    special = np.array([0, -0.0, 1e-40, np.inf, -np.inf, np.nan, 1], np.float32)
    for shape in [(), (0,), (1,), (7,), (3, 5), (64, 1, 28, 28), (amount.edge(4096), 1025)]:
        values = np.where(rng.random(shape) < 0.3, rng.choice(special, shape), rng.standard_normal(shape))
        values = np.asarray(values, np.float32)
        there = backend.xp.asarray(values)
        if fingerprint_parts(there, xp=backend.xp) != fingerprint_parts(values):
            wrong.append(list(shape))
    return {"ok": not wrong, "wrong_shapes": wrong}


def float16(backend: Backend, amount: Amount) -> dict[str, Any]:
    """Casts to float16 give the host's bits and counts; training in it keeps near the CPU's, its bits repeat."""
    rng, count = np.random.default_rng(0), amount.edge(1 << 22)
    values = rng.integers(0, 1 << 32, count, np.uint32).view(np.float32)
    values[::2] = rng.standard_normal(values[::2].shape) * np.float32(10) ** rng.integers(-8, 6, values[::2].shape)
    casts = {}
    for name, dtype in (("encode", np.float16), ("rounded", np.float32)):
        results = []
        for xp in (np, backend.xp):
            out, counts = xp.empty(count, dtype), xp.zeros(half.COLUMNS, np.int64)
            getattr(half, name)(xp.asarray(values), out, counts)
            results.append([np.asarray(each if xp is np else xp.asnumpy(each)) for each in (out, counts)])
        (wanted, lost), (found, also) = results
        same = np.array_equal(wanted, found, equal_nan=True) and np.array_equal(np.signbit(wanted), np.signbit(found))
        casts[name] = {"ok": same and lost.tolist() == also.tolist(), "lost": also.tolist()}
    steps = 20
    wanted_losses, _ = trajectory("SGD", HOST, steps, "fp16")
    (losses, first), (_, second) = (trajectory("SGD", backend, steps, "fp16") for _ in range(2))
    apart = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, wanted_losses, strict=True))
    casts["training"] = {"ok": apart <= 1e-2 and first == second, "relative": apart, "same_bits": first == second}
    return {"ok": all(row["ok"] for row in casts.values()), "tolerance": 1e-2, "float16": casts}


def plans(backend: Backend, amount: Amount) -> dict[str, Any]:
    """cuDNN's plans for a few convolutions: the one in use is allowed, and all are listed."""
    opened = open_cudnn(backend)
    if not isinstance(opened, Cudnn):
        return {"ok": True, "skipped": opened}
    rows, ok = [], True
    for n, c, e, o, k, s, p in [(32, 1, 28, 20, 5, 1, 0), (32, 64, 56, 64, 3, 1, 1), (32, 3, 227, 96, 11, 4, 0)]:
        out = (e + 2 * p - k) // s + 1
        shape = ConvolutionShape((n, c, e, e), (o, c, k, k), (n, o, out, out), (s, s), (p, p), (1, 1))
        for direction in PASSES:
            try:
                chosen = opened.convolution(direction, shape).name
            except Exception as error:
                rows.append({"shape": shape.x, "pass": direction, "none": str(error)})
                continue
            listed = opened.candidates(direction, shape)
            mine = [entry for entry in listed if entry.name == chosen and entry.allowed and entry.deterministic]
            ok = ok and bool(mine)
            rows.append({"shape": shape.x, "pass": direction, "chosen": chosen, "plans": [vars(e) for e in listed]})
    return {"ok": ok, "version": opened.version, "convolutions": rows}


PARTS: dict[str, Callable[[Backend, Amount], dict[str, Any]]] = {
    "parity": parity,
    "fingerprints": fingerprints,
    "solvers": solvers,
    "float16": float16,
    "plans": plans,
    "overlap": overlap,
    "ceilings": ceilings,
    "memory": memory,
    "determinism": determinism,
}
