"""What people used Caffe's verbose log for: each layer's shapes, memory, fillers and initial values, as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gpu.timing import has_backward

if TYPE_CHECKING:
    from gpu.net import Net


def describe(net: Net) -> list[dict[str, Any]]:
    """One mapping a layer, in order. ``bytes``: of its tops with their gradients (in the last of the layers that work
    in one place), its work space and sums of gradients; ``param_bytes``: of its parameters with theirs; ``kept_bytes``:
    of its own arrays. Parameters: shape, filler, and mean, std, min, max and zeros of their values now."""
    by_layer: dict[str, int] = {}
    homes = {top.name: node.layer.name for node in net._graph.nodes for top in node.tops}
    back = has_backward(net)
    for buffer in net.memory_plan().buffers:
        name = buffer.name.removesuffix(".diff")
        owner = homes.get(name.split(" of ")[0]) if buffer.kind in ("data", "diff") else name.split(" ")[0]
        owner = owner if buffer.kind != "sum" or owner is None else owner.rsplit(".", 1)[0]
        if owner is not None:
            by_layer[owner] = by_layer.get(owner, 0) + buffer.nbytes
    rows = []
    for node in net._graph.nodes:
        layer = node.layer
        params = [
            {
                "name": f"{layer.name}.{i}",
                "shape": list(blob.shape),
                "filler": _filler(wanted.filler),
                **_values(net, blob),
            }
            for i, (blob, wanted) in enumerate(zip(layer.blobs, layer.param_shapes, strict=True))
        ]
        rows.append(
            {
                "layer": layer.name,
                "type": layer.type,
                "phase": net.phase,
                "bottoms": {value.name: list(value.shape) for value in node.bottoms},
                "tops": {value.name: list(value.shape) for value in node.tops},
                "in_place": any(node.in_place),
                "backward": node.backward,
                "bytes": by_layer.get(layer.name, 0),
                "param_bytes": (2 if back and layer.learned else 1) * sum(4 * blob.count for blob in layer.blobs),
                "kept_bytes": layer.kept_bytes,
                "params": params,
            }
        )
    return rows


def line(row: dict[str, Any]) -> str:
    """One layer on one line, for a terminal."""
    shapes = " + ".join(f"{name} {_size(shape)}" for name, shape in row["bottoms"].items()) or "-"
    tops = " + ".join(f"{name} {_size(shape)}" for name, shape in row["tops"].items()) or "-"
    params = "".join(
        f"; {p['name']} {_size(p['shape'])} {p['filler']} mean {p['mean']:.3g} std {p['std']:.3g} "
        f"[{p['min']:.3g}, {p['max']:.3g}] zeros {p['zeros']}"
        for p in row["params"]
    )
    backward = "" if row["backward"] else ", no backward"
    nbytes = row["bytes"] + row["param_bytes"] + row["kept_bytes"]
    return f"{row['phase']} {row['layer']} ({row['type']}): {shapes} -> {tops}, {nbytes:,} bytes{backward}{params}"


def _size(shape: list[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _filler(filler: Any) -> str:
    given = [f"{field.name} {value:g}" for field, value in filler.ListFields() if isinstance(value, float)]
    return " ".join([filler.type, *given])


def _values(net: Net, blob: Any) -> dict[str, Any]:
    values = np.asarray(net.backend.to_numpy(blob.device_data), np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # weights of a run that diverged are shown as they are
        return {
            "mean": float(values.mean()), "std": float(values.std()), "min": float(values.min()),
            "max": float(values.max()), "zeros": int((values == 0).sum()),
        }  # fmt: skip
