"""How near each type of layer is to Caffe: every golden layer file (tests/data/layers), by type, with the limit held.

    python -m benchmarks.layer_parity          some seconds; writes layer_parity.json, prints the table of docs/nets.md

Figures are relative L2 errors, |ours - Caffe's| / |Caffe's|, the worst of a type's files; NumPy, one BLAS thread.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_nets import Amount, build, cases, load
from benchmarks.machine import machine
from gpu.backend import Backend
from gpu.net import Net

Arrays = dict[str, np.ndarray]
RANDOM = "dropout_train"
"""Its masks come from another generator than Caffe's: held to what they do (tests/gpu/test_layers.py)."""
ROUNDING = 1e-6
"""Where float32 rounds: 17 units in its last place. A sum of k terms is off by about sqrt(k) * 6e-8 from one in another
order, and another machine's BLAS has another order; exp, log and pow of two libraries differ by some units. At
least four times what was measured, and a tenth of what is asked of a single layer."""
STEPS = 4 * ROUNDING
"""Where errors go from one time step into the next."""


@dataclass(frozen=True)
class Limit:
    """Of relative L2: ``outputs`` (statistics that a layer accumulates too), ``gradients`` of inputs and parameters."""

    outputs: float
    gradients: float | None
    why: str


def _moved(why: str = "values are moved", gradients: float | None = 0) -> Limit:
    return Limit(0, gradients, why)


def _rounds(why: str, outputs: float = ROUNDING) -> Limit:
    return Limit(outputs, ROUNDING, why)


LIMITS = {
    "AbsVal": _moved("signs only"),
    "Accuracy": _moved("counts", None),
    "ArgMax": _moved("comparisons only", None),
    "BNLL": _rounds("exp and log of another library"),
    "BatchNorm": _rounds("sums over a channel, a root"),
    "BatchReindex": _moved("values are moved; gradients are added in Caffe's order"),
    "Bias": _rounds("outputs: one sum each, rounded as Caffe's; gradients: sums in another order", outputs=0),
    "Clip": _moved("comparisons only"),
    "Concat": _moved(),
    "ContrastiveLoss": _rounds("sums in another order, a root"),
    "Convolution": _rounds("matrix products: BLAS's order of sums"),
    "Deconvolution": _rounds("matrix products: BLAS's order of sums"),
    "Dropout TEST": _moved("does nothing in TEST"),
    "ELU": _rounds("exp of another library"),
    "Eltwise MAX": _moved("comparisons only"),
    "Eltwise PROD": _rounds("gradients: products in another order"),
    "Eltwise SUM": _rounds("products and sums, which a compiler may fuse"),
    "Embed": _rounds("outputs: one sum each, rounded as Caffe's; gradients: sums in another order", outputs=0),
    "EuclideanLoss": _rounds("a sum of squares in another order"),
    "Exp": _rounds("exp of another library"),
    "Filter": _moved(),
    "Flatten": _moved(),
    "HingeLoss": _rounds("a sum in another order"),
    "Im2col": _moved("values are moved; gradients are added in Caffe's order"),
    "InnerProduct": _rounds("matrix products: BLAS's order of sums"),
    "LRN": _rounds("sums over a region, pow of another library"),
    "LSTM": Limit(STEPS, STEPS, "matrix products and exp, through five time steps"),
    "Log": _rounds("log of another library"),
    "MVN": _rounds("sums over a channel, a root"),
    "MultinomialLogisticLoss": _rounds("log of another library, a sum"),
    "PReLU": _rounds("outputs: one product each, rounded as Caffe's; slopes: sums in another order", outputs=0),
    "Pooling AVE": _rounds("sums over windows, in another order on devices"),
    "Pooling MAX": _rounds("outputs: comparisons only; gradients: windows that overlap are added", outputs=0),
    "Power": _rounds("pow of another library"),
    "RNN": Limit(STEPS, STEPS, "matrix products and tanh, through five time steps"),
    "ReLU": _moved("comparisons, and one product where the slope is not 0"),
    "Reduction": _rounds("sums in another order"),
    "Reshape": _moved(),
    "SPP": _moved("comparisons only; gradients are added in Caffe's order"),
    "Scale": _rounds("products and sums, which a compiler may fuse; gradients: sums in another order"),
    "Sigmoid": _rounds("tanh or exp of another library"),
    "SigmoidCrossEntropyLoss": _rounds("exp and log of another library, a sum"),
    "Slice": _moved(),
    "Softmax": _rounds("exp of another library, sums"),
    "SoftmaxWithLoss": _rounds("exp and log of another library, sums"),
    "Split": _moved("values are copied; gradients: one sum each"),
    "Swish": _rounds("exp of another library"),
    "TanH": _rounds("tanh of another library"),
    "Threshold": _moved("comparisons only", None),
}


def kind(net: Net) -> str:
    """The type of the layer under test, with the variant that decides what rounds."""
    (layer,) = (layer for layer in net.layers if layer.name == "L")
    if layer.type == "Pooling":
        return f"Pooling {'AVE' if 'AVE' in str(layer.spec.pooling_param) else 'MAX'}"
    if layer.type == "Eltwise":
        named = re.search(r"operation: (\w+)", str(layer.spec.eltwise_param))
        return f"Eltwise {named.group(1) if named else 'SUM'}"
    return f"Dropout {net.phase}" if layer.type == "Dropout" else layer.type


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """Relative L2; infinity for another shape, or for values that are no numbers."""
    if found.shape != wanted.shape:
        return math.inf
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    off = float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-12))
    return off if off >= 0 else math.inf  # NaN is neither


def errors(net: Net, golden: Arrays) -> dict[str, dict[str, float]]:
    """Forward and backward of a net of one layer: of outputs, statistics and gradients, how far each array is off."""
    net.forward(**{name: golden[f"in_{name}"] for name in net.inputs})
    params = net.params.get("L", [])
    off: dict[str, dict[str, float]] = {"outputs": {}, "statistics": {}, "gradients": {}}
    for key in golden:
        if key.startswith("out_"):
            off["outputs"][key] = relative(net.blobs[key[4:]].data, golden[key])
        elif re.fullmatch(r"pa\d", key):
            off["statistics"][key] = relative(params[int(key[2:])].data, golden[key])
    diffs = {key[5:]: golden[key] for key in golden if key.startswith("dout_")}
    if not diffs:
        return off
    gradients = net.backward(**diffs)
    gradients |= {name[3:]: blobs[0].diff for name, blobs in net.params.items() if name in golden}
    for key in golden:
        if key.startswith("din_"):
            off["gradients"][key] = relative(gradients[key[4:]], golden[key])
        elif re.fullmatch(r"dp\d", key):
            off["gradients"][key] = relative(params[int(key[2:])].diff, golden[key])
    return off


def measure(names: Iterable[str]) -> dict[str, Any]:
    """By type: files, the worst errors (None: there is no such array in Caffe's files), limits and why."""
    found: dict[str, Any] = {}
    backend = Backend("numpy", np, "reference")
    for name in names:
        golden = load(name)
        net = build(golden, backend)
        of = kind(net)
        limit = LIMITS[of]
        row = found.setdefault(
            of,
            {"files": 0, "outputs": 0.0, "statistics": None, "gradients": None}
            | {"limit": limit.outputs, "limit_of_gradients": limit.gradients, "why": limit.why},
        )
        row["files"] += 1
        for part, arrays in errors(net, golden).items():
            if arrays:
                row[part] = float(f"{max(row[part] or 0.0, *arrays.values()):.2g}")
    return dict(sorted(found.items()))


def table(types: dict[str, Any]) -> str:
    """The rows of docs/nets.md."""

    def shown(value: float | None, limit: float | None) -> str:
        return "–" if value is None else f"{value:g} (≤ {limit:g})"

    lines = ["| type | files | outputs | gradients | why |", "|---|---|---|---|---|"]
    for name, row in types.items():
        outputs = max(row["outputs"], row["statistics"] or 0)
        cells = [shown(outputs, row["limit"]), shown(row["gradients"], row["limit_of_gradients"])]
        lines.append(f"| {name} | {row['files']} | {' | '.join(cells)} | {row['why']} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path(__file__).with_suffix(".json")), help="file for the results")
    given = parser.parse_args(arguments)
    with threadpool_limits(1):
        types = measure(name for name in cases(Amount()) if name != RANDOM)
    results = {"machine": machine("numpy", "numba"), "types": types}
    Path(given.out).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(table(types) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
