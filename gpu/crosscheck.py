"""``python -m gpu.crosscheck NET.prototxt [--backends numpy,cupy|float64]``: rounding or bug, layer by layer.

Every backend computes each layer from the same arrays, and the whole net as it is used; float64 judges all of them, the
CPU included. Bounds: :mod:`gpu.error_bounds`. With ``--precision fp16``: which layers need float32
(:mod:`gpu.sensitivity`).

The JSON document::

    schema, net, phase, shapes, seed, weights, versions
    sides     [backend]
    verdict   rounding | beyond | bug: the worst of all; beyond: the whole net is further off than rounding takes it,
              though every layer is right for what it was given: a maximum or a sign fell the other way
    first     {side: {layer, mode, tensor}}, the first offender of each side; null where there is none
    not_finite {layer, tensor}, the first with NaN or infinity that float64 has as well or float32 cannot but have: it
               was given, or the values are too large; or null
    layers    [{layer, type, terms {forward, bottom, param}, problems {side: text},
               tensors [{side, mode: isolated | in net | cumulative, name, absolute, relative, ulp, l2, bound,
                         verdict}]}]
    precision as :mod:`gpu.sensitivity` says, or null
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu.backend import select_backend
from gpu.layer_check import BUG, ROUNDING, Checked, check_layers, overall
from gpu.net import Net
from gpu.probe import add_arguments, bare_graph, load_filtered, quiet_net, random_inputs, shapes_from, versions
from gpu.wiring import Graph
from profiler import cli
from profiler.errors import StallscopeError, UsageError
from profiler.osread import available_memory

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
_BYTES = {True: (72, 64), False: (32, 20)}
"""Of a value and of a parameter, with a backward pass and without: two float64 passes, the net, and what it left."""
_COLOURS = {ROUNDING: "green", "beyond": "yellow", BUG: "red"}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns 1 where a layer is further off than rounding explains."""
    parser = cli.Parser(prog="python -m gpu.crosscheck", description="Compare backends with float64, layer by layer.")
    add_arguments(parser, "TRAIN")
    parser.add_argument(
        "--backends",
        metavar="A,B",
        help="numpy, cupy, emulated; float64 is always the judge (default: numpy, and cupy where it is usable)",
    )
    parser.add_argument("--precision", choices=("fp16",), help="find the layers that need more than 16 bits instead")
    parser.add_argument(
        "--tolerance", type=float, default=0.02, help="with --precision: relative change of the gradient"
    )
    parser.add_argument("--all", action="store_true", help="show every layer, not only the worst of each side")
    parser.add_argument("--json", metavar="F", help="write the results, - for standard output")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.tolerance < 1:
        raise UsageError("--tolerance is out of range", expected="between 0 and 1", found=arguments.tolerance)
    document = examine(arguments)
    if arguments.json == "-":
        sys.stdout.write(cli.dumps(document) + "\n")
    else:
        if arguments.json:
            cli.write_json(arguments.json, document)
        render(document, cli.console(), arguments.all)
    return cli.EXIT_NOT_FINE if document["verdict"] == BUG else cli.EXIT_OK


def examine(arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON document. Raises StallscopeError for nets and arguments that cannot be followed."""
    names = _sides(arguments.backends)
    filtered = load_filtered(arguments)
    shapes = shapes_from(arguments)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "net": arguments.net,
        "phase": arguments.phase,
        "seed": arguments.seed,
        "weights": arguments.weights,
        "versions": versions(),
        "sides": names,
    }

    def build(name: str, precision: str = "fp32", keep_fp32: Collection[str] = ()) -> Net:
        return quiet_net(
            arguments.net,
            arguments.phase,
            arguments.weights,
            tuple(arguments.stage),
            backend=select_backend(name),
            input_shapes=shapes,
            seed=arguments.seed,
            reuse=arguments.phase == "TRAIN" and not arguments.precision,  # the memory of a job
            precision=precision,
            keep_fp32=keep_fp32,
        )

    graph = bare_graph(filtered, shapes, arguments.seed)
    inputs = random_inputs(graph, arguments.seed)
    document["shapes"] = {name: list(array.shape) for name, array in inputs.items()}
    if arguments.precision:
        from gpu.sensitivity import sensitivity

        found = sensitivity(lambda precision, keep: build(names[0], precision, keep), inputs, arguments.tolerance)
        return document | {"verdict": ROUNDING, "first": None, "not_finite": None, "layers": [], "precision": found}
    _check_room(graph, inputs)
    checked = check_layers(filtered, {name: build(name) for name in names}, inputs, shapes, arguments.seed)
    return document | {
        "verdict": overall(checked),
        "first": {name: _first(checked, name) for name in names},
        "not_finite": _not_finite(checked),
        "layers": [_layer(each) for each in checked],
        "precision": None,
    }


def _check_room(graph: Graph, inputs: Mapping[str, np.ndarray]) -> None:
    """Refuse what would end in swapping or be killed. The figures are too low rather than too high."""
    of_value, of_param = _BYTES[any(node.backward for node in graph.nodes)]
    values = of_value * sum(math.prod(top.shape) for node in graph.nodes for top in node.tops)
    params = of_param * sum(math.prod(each.shape) for node in graph.nodes for each in node.layer.param_shapes)
    room = available_memory()
    if values + params <= room:
        return
    batch = max((array.shape[0] for array in inputs.values() if array.ndim), default=1)
    fits = int(batch * max(0, room - params) / max(1, values))
    raise StallscopeError(
        "not enough memory to compare this net with float64",
        expected=f"at least {(values + params) / 2**30:.1f} GiB",
        found=f"{room / 2**30:.1f} GiB available",
        hint=f"--batch {fits}" if fits else "inputs of a smaller --shape, or a machine with more memory",
    )


def _sides(given: str | None) -> list[str]:
    if given is None:
        auto = select_backend("auto")
        return ["numpy", "cupy"] if auto.name == "cupy" else ["numpy"]
    names = list(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    unknown = [name for name in names if name not in ("numpy", "cupy", "emulated", "float64")]
    if unknown or not names:
        raise UsageError(
            "--backends names what is no backend", expected="numpy, cupy, emulated, float64", found=given or "nothing"
        )
    return [name for name in names if name != "float64"] or ["numpy"]


def _first(checked: Sequence[Checked], side: str) -> dict[str, str] | None:
    """The first layer that is wrong by itself; else the first at which the whole net is."""
    for mode in ("isolated", "in net"):
        for each in checked:
            if mode == "isolated" and side in each.problems:
                return {"layer": each.layer, "mode": mode, "tensor": each.problems[side]}
            for tensor in each.tensors:
                if (tensor.side, tensor.mode, tensor.verdict) == (side, mode, BUG):
                    return {"layer": each.layer, "mode": mode, "tensor": tensor.name}
    return None


def _not_finite(checked: Sequence[Checked]) -> dict[str, str] | None:
    """The first layer in which float64 computed NaN or infinity, too, or values that float32 has no number for."""
    found = [
        ("gradient" in tensor.name, {"layer": each.layer, "tensor": tensor.name})
        for each in checked
        for tensor in each.tensors
        if not tensor.finite
    ]
    # What goes forward comes first; gradients spread it back to layers that come before.
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _layer(each: Checked) -> dict[str, Any]:
    return {
        "layer": each.layer,
        "type": each.type,
        "terms": {"forward": each.terms.forward, "bottom": each.terms.bottom, "param": each.terms.param},
        "problems": each.problems,
        "tensors": [
            {
                "side": t.side,
                "mode": t.mode,
                "name": t.name,
                "absolute": t.distance.absolute,
                "relative": t.distance.relative,
                "ulp": t.distance.ulp,
                "l2": t.distance.l2,
                "bound": t.bound,
                "verdict": t.verdict,
            }
            for t in each.tensors
        ],
    }


def render(document: dict[str, Any], console: Console, everything: bool = False) -> None:
    """Show the verdicts as a table: of each layer the tensor that comes nearest to its bound, or is furthest beyond."""
    from rich.markup import escape
    from rich.table import Table

    if document["precision"] is not None:
        from gpu import sensitivity

        sensitivity.render(document["precision"], console)
        return
    for side in document["sides"]:
        table = Table(title=f"{side} against float64", title_justify="left", box=None, pad_edge=False)
        for name in ("layer", "type", "worst tensor", "relative", "ulp", "of bound", "whole net", "verdict"):
            left = name in ("layer", "type", "worst tensor", "verdict")
            table.add_column(name, justify="left" if left else "right", overflow="fold")
        rows = [row for each in document["layers"] if (row := _row(each, side)) is not None]
        shown = rows if everything else [row for row in rows if row[0] == BUG] or _worst(rows)
        for verdict, _, cells in shown:
            colour = _COLOURS[verdict]
            table.add_row(*(escape(cell) for cell in cells), f"[{colour}]{verdict}[/{colour}]")
        console.print(table)
        if len(shown) < len(rows):
            console.print(f"{len(rows) - len(shown)} more layers: --all shows them", style="dim", highlight=False)
        console.print(_sentence(document, side), highlight=False)


def _row(each: dict[str, Any], side: str) -> tuple[str, float, list[str]] | None:
    if side in each["problems"]:
        return BUG, float("inf"), [each["layer"], each["type"], each["problems"][side], "", "", "", ""]
    alone = [t for t in each["tensors"] if t["side"] == side and t["mode"] != "cumulative"]
    if not alone:
        return None
    whole = [t for t in each["tensors"] if (t["side"], t["mode"]) == (side, "cumulative")]

    def share(tensor: dict[str, Any]) -> float:
        return float(tensor["l2"] / tensor["bound"]) if tensor["bound"] else 0.0 if not tensor["l2"] else float("inf")

    worst = max(alone, key=share)
    verdict = max((t["verdict"] for t in [*alone, *whole]), key=(ROUNDING, "beyond", BUG).index)
    total = max((t["relative"] for t in whole), default=None)
    return (
        verdict,
        share(worst),
        [
            each["layer"],
            each["type"],
            worst["name"],
            f"{worst['relative']:.1e}",
            f"{worst['ulp']:,.0f}",
            f"{share(worst):.1%}",
            "-" if total is None else f"{total:.1e}",
        ],
    )


def _worst(rows: list[tuple[str, float, list[str]]]) -> list[tuple[str, float, list[str]]]:
    """The five that come nearest to their bounds, in the net's order."""
    chosen = sorted(rows, key=lambda row: -row[1])[:5]
    return [row for row in rows if row in chosen]


def _sentence(document: dict[str, Any], side: str) -> str:
    first = document["first"][side]
    if first is None:
        further = {
            each["layer"]
            for each in document["layers"]
            for t in each["tensors"]
            if (t["side"], t["verdict"]) == (side, "beyond")
        }
        text = f"{side}: every layer differs from float64 by rounding alone."
        if (given := document["not_finite"]) is not None:
            text += (
                f" Layer {given['layer']!r} is the first with NaN or infinity ({given['tensor']}), and not by a "
                "mistake of its own: its weights or inputs hold it, or values too large for float32."
            )
        if further:
            text += (
                f" In the whole net {len(further)} layers are further off than that takes them: on the way a maximum "
                "or a sign fell the other way. Each is right for what it was given."
            )
        return text
    how = (
        "by itself, fed with the same arrays"
        if first["mode"] == "isolated"
        else "in the whole net, though not by itself"
    )
    return f"{side}: bug. Layer {first['layer']!r} is the first that is wrong {how} ({first['tensor']})."


if __name__ == "__main__":
    cli.run(main)
