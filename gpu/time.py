"""``python -m gpu.time NET.prototxt``: times of each layer, memory, and whether repeated passes agree bit for bit.

The JSON document::

    schema, kind: "time", net, phase, backend, seed, weights, iterations, shapes, versions
    net_hash, input_hash, param_hash   of the text, the inputs and the initial parameters
    layers      [{layer, type, forward_ms, backward_ms {median, p5, p95} or null, share, bytes {blobs, params, own},
                 identical, hashes {forward, backward}}]; share: of the whole pass
    total       {forward_ms, backward_ms} as above; backward_ms null where there is none
    memory      {block, unshared, params, own, total} bytes
    repeats     {passes, identical, first {layer, pass} or null}
    not_finite  {layer, pass, values, of}: the first whose results hold NaN or infinity, how many of how many; or null
    algorithms  [{layer, algorithm, forward_ms, backward_ms, workspace, identical, chosen, relative}] or null
    against     as :mod:`gpu.time_compare` says, or null
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu import time_compare
from gpu.backend import blas_threads, select_backend
from gpu.describe import describe
from gpu.fingerprint import fingerprint_params
from gpu.net import Net
from gpu.probe import add_arguments, quiet_net, random_inputs, shapes_from, versions
from gpu.timing import Measured, has_backward, measure
from profiler import cli
from profiler.errors import UsageError
from profiler.hashing import ordered_parts

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns 1 where repeats differ, where bits differ from those of ``--against``, and where results
    are NaN or infinite."""
    parser = cli.Parser(prog="python -m gpu.time", description="Time the layers of a net and compare repeats.")
    add_arguments(parser, "TRAIN")
    parser.add_argument("--iterations", type=int, default=10, metavar="N", help="passes to time, and to compare (10)")
    parser.add_argument("--backend", default="auto", help="auto, numpy, cupy or emulated")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of BLAS and of compiled kernels (default: 1)")
    parser.add_argument("--algorithms", action="store_true", help="try every way of computing each convolution")
    parser.add_argument("--against", metavar="F", help="compare with what --json F wrote, e.g. before an upgrade")
    parser.add_argument("--json", metavar="F", help="write the results, - for standard output")
    arguments = parser.parse_args(argv)
    if arguments.iterations < 2:
        raise UsageError("--iterations is out of range", expected="2 or more", found=arguments.iterations)
    other = time_compare.load(arguments.against) if arguments.against else None
    blas_threads(1 if arguments.threads is None else arguments.threads)
    document = examine(arguments)
    if other is not None:
        document["against"] = time_compare.compare(document, other, arguments.against)
    if arguments.json == "-":
        sys.stdout.write(cli.dumps(document) + "\n")
    else:
        if arguments.json:
            cli.write_json(arguments.json, document)
        render(document, cli.console())
    changed = document["against"] is not None and bool(document["against"]["changed"])
    fine = document["repeats"]["identical"] and document["not_finite"] is None and not changed
    return cli.EXIT_OK if fine else cli.EXIT_NOT_FINE


def examine(arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON document without ``against``. Raises StallscopeError for what cannot be followed."""
    net = quiet_net(
        arguments.net,
        arguments.phase,
        arguments.weights,
        tuple(arguments.stage),
        backend=select_backend(arguments.backend),
        input_shapes=shapes_from(arguments),
        seed=arguments.seed,
        reuse=arguments.phase == "TRAIN",  # the memory of a job
    )
    inputs = random_inputs(net._graph, arguments.seed)
    params = fingerprint_params(net)
    measured = measure(net, inputs, arguments.iterations)
    algorithms = None
    if arguments.algorithms:
        from gpu.algorithms import try_algorithms

        algorithms = [dataclasses.asdict(tried) for tried in try_algorithms(net, arguments.iterations, arguments.seed)]
    return {
        "schema": SCHEMA,
        "kind": "time",
        "net": arguments.net,
        "phase": arguments.phase,
        "backend": net.backend.name,
        "seed": arguments.seed,
        "weights": arguments.weights,
        "iterations": arguments.iterations,
        "shapes": {name: list(array.shape) for name, array in inputs.items()},
        "versions": versions(),
        "net_hash": hashlib.sha256(Path(arguments.net).read_bytes()).hexdigest(),
        "input_hash": f"{ordered_parts(list(inputs.values())):016x}",
        "param_hash": f"{params:016x}",
        **_results(net, measured),
        "repeats": {
            "passes": arguments.iterations,
            "identical": measured.first is None,
            "first": dict(zip(("layer", "pass"), measured.first, strict=True)) if measured.first else None,
        },
        "not_finite": dict(zip(("layer", "pass", "values", "of"), measured.not_finite, strict=True))
        if measured.not_finite
        else None,
        "algorithms": algorithms,
        "against": None,
    }


def _results(net: Net, measured: Measured) -> dict[str, Any]:
    back = has_backward(net)
    of_layers = {row["layer"]: row for row in describe(net)}
    rows = []
    forward = np.sum([times.forward_ms for times in measured.layers.values()], axis=0)
    backs = [times.backward_ms for times in measured.layers.values() if times.backward_ms]
    backward = np.sum(backs, axis=0) if back else None
    whole = float(np.median(forward)) + (float(np.median(backward)) if backward is not None else 0.0)
    for layer in net.layers:
        times, about = measured.layers[layer.name], of_layers[layer.name]
        own = float(np.median(times.forward_ms)) + float(np.median(times.backward_ms) if times.backward_ms else 0)
        hashes = {"forward": _hash(times.forward_hashes), "backward": _hash(times.backward_hashes)}
        rows.append(
            {
                "layer": layer.name,
                "type": layer.type,
                "forward_ms": _spread(times.forward_ms),
                "backward_ms": _spread(times.backward_ms) if times.backward_ms else None,
                "share": own / whole if whole else 0.0,
                "bytes": {
                    "blobs": about["bytes"],
                    "params": about["param_bytes"],
                    "own": about["kept_bytes"],
                },
                "identical": len(set(times.forward_hashes)) == 1 and len(set(times.backward_hashes)) <= 1,
                "hashes": hashes,
            }
        )
    plan = net.memory_plan()
    params = (2 if back else 1) * sum(4 * param.blob.count for param in net.learnable)
    kept = sum(layer.kept_bytes for layer in net.layers)
    memory = {"block": plan.total, "unshared": plan.unshared, "params": params, "own": kept}
    return {
        "layers": rows,
        "total": {
            "forward_ms": _spread(list(forward)),
            "backward_ms": None if backward is None else _spread(list(backward)),
        },
        "memory": memory | {"total": plan.total + params + kept},
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    low, median, high = np.percentile(values, (5, 50, 95))
    return {"median": float(median), "p5": float(low), "p95": float(high)}


def _hash(hashes: Sequence[int]) -> str | None:
    """The hash of all repeats; where they differ, of the first."""
    return f"{hashes[0]:016x}" if hashes else None


def render(document: Mapping[str, Any], console: Console) -> None:
    """Show the results as tables."""
    from rich.markup import escape
    from rich.table import Table

    against = document["against"]
    ratios = {row["layer"]: row for row in against["layers"]} if against else {}
    table = Table(box=None, pad_edge=False)
    names = ["layer", "type", "forward ms (p95)", "backward", "share", "memory", "bits"] + ["ratio"] * bool(against)
    for name in names:
        table.add_column(name, justify="left" if name in ("layer", "type", "bits") else "right", overflow="fold")
    for row in document["layers"]:
        bits = "same" if row["identical"] else "[red]differ[/red]"
        cells = [escape(row["layer"]), escape(row["type"]), _ms(row["forward_ms"]), _ms(row["backward_ms"])]
        cells += [f"{row['share']:.1%}", _size(sum(row["bytes"].values())), bits]
        if against:
            pair = ratios.get(row["layer"], {})
            cells.append(" / ".join(f"{pair[part]:.2f}" if pair.get(part) else "-" for part in ("forward", "backward")))
        table.add_row(*cells)
    total, memory = document["total"], document["memory"]
    table.add_section()
    whole = ["all", "", _ms(total["forward_ms"]), _ms(total["backward_ms"]), "", _size(memory["total"]), ""]
    table.add_row(*whole, *[""] * bool(against), style="bold")
    console.print(table)
    parts = ", ".join(f"{name} {_size(memory[name])}" for name in ("block", "params", "own"))
    console.print(f"memory: {parts} (block without planning {_size(memory['unshared'])})", highlight=False)
    repeats = document["repeats"]
    first = repeats["first"]
    if first is None:
        sentence = f"{repeats['passes']} passes on {document['backend']} agree bit for bit"
    else:
        name = escape(repr(first["layer"]))
        sentence = f"[red]passes differ[/red]: layer {name} is the first, in its {first['pass']} pass"
    console.print(sentence, highlight=False)
    if (wrong := document["not_finite"]) is not None:
        console.print(
            f"[red]not finite[/red]: layer {escape(repr(wrong['layer']))} is the first with NaN or infinity, in its "
            f"{wrong['pass']} pass ({wrong['values']:,} of {wrong['of']:,} values). Such values can take other "
            "times; gpu.crosscheck tells whether it computed or was given them.",
            highlight=False,
        )
    if document["algorithms"] is not None:
        _render_algorithms(document["algorithms"], console)
    if against:
        _render_against(against, console)


def _render_algorithms(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="convolution algorithms (* the layer's own)", title_justify="left", box=None, pad_edge=False)
    for name in ("layer", "algorithm", "forward ms", "backward ms", "work space", "bits", "difference"):
        table.add_column(name, justify="left" if name in ("layer", "algorithm", "bits") else "right", overflow="fold")
    for row in rows:
        backward = "-" if row["backward_ms"] is None else f"{row['backward_ms']:.3f}"
        own = "* " if row["chosen"] else "  "
        bits = "same" if row["identical"] else "[red]differ[/red]"
        cells = [escape(row["layer"]), own + row["algorithm"], f"{row['forward_ms']:.3f}", backward]
        table.add_row(*cells, _size(row["workspace"]), bits, f"{row['relative']:.1e}")
    console.print(table)


def _render_against(against: Mapping[str, Any], console: Console) -> None:
    from rich.markup import escape

    for name, (there, here) in against["versions"].items():
        console.print(f"{escape(name)}: {there or 'absent'} there, {here or 'absent'} here", highlight=False)
    pairs = [f"{part} {against['total'][part]:.2f}" for part in ("forward", "backward") if against["total"][part]]
    shown = f"time here / time there: {', '.join(pairs)}" if pairs else "times are of other work there"
    console.print(shown, highlight=False)
    for key, where in (("only_here", "here"), ("only_there", "there")):
        if against[key]:
            console.print(f"only {where}: {escape(', '.join(against[key]))}", highlight=False)
    if not against["comparable"]:
        console.print(f"bits are not compared: {', '.join(against['different'])} differ", highlight=False)
    elif against["first"] is None:
        console.print("the bits of every layer are the same there and here", highlight=False)
    else:
        first = against["first"]
        console.print(
            f"[red]{len(against['changed'])} results have other bits[/red]; the first is that of layer "
            f"{escape(repr(first['layer']))}, {first['pass']}",
            highlight=False,
        )


def _ms(times: Mapping[str, float] | None) -> str:
    if times is None:
        return "-"
    return f"{times['median']:.3g} ({times['p95']:.3g})"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


if __name__ == "__main__":
    cli.run(main)
