"""What tests of single layers share: a net of one layer, and its gradients against a function in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gpu.backend import Backend
from gpu.net import Net

# The second one takes the code path of devices: the same source, with NumPy's arrays in place of cupy's.
BACKENDS = {"compiled": Backend("numpy", np, "test"), "portable": Backend("portable", np, "test")}

Arrays = Mapping[str, np.ndarray]


def one_layer(layer: str, inputs: Mapping[str, Sequence[int]], **options: Any) -> Net:
    """Inputs by name and shape, and one layer called L."""
    texts = []
    for name, shape in inputs.items():
        dims = " ".join(f"dim: {size}" for size in shape)
        texts.append(f'layer {{ name: "in {name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims} }} }} }}')
    return Net("\n".join(["force_backward: true", *texts, f'layer {{ name: "L" {layer} }}']), **options)


def check_against(
    reference: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
    net: Net,
    inputs: Arrays,
    seed: int,
    smooth: Sequence[str],
    tolerance: float = 1e-4,
) -> None:
    """Forward against ``reference`` in float64, and backward against its differences along random directions.

    ``reference`` takes inputs and parameters (``p0`` ...) and returns the tops; ``smooth``: what it is differentiable
    by. Differences are central, of float64 values, so they are good to about 1e-8.
    """
    rng = np.random.default_rng(seed)
    values = {name: np.asarray(array, np.float64) for name, array in inputs.items()}
    values |= {f"p{i}": blob.data.astype(np.float64) for i, blob in enumerate(net.params.get("L", []))}
    found = net.forward(**inputs)
    wanted = reference(values)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].shape == array.shape, name
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)
    if not smooth:
        return
    weights = {name: rng.standard_normal(array.shape) for name, array in wanted.items()}
    net.clear_param_diffs()
    gradients = net.backward(**{name: array.astype(np.float32) for name, array in weights.items()})
    gradients |= {f"p{i}": blob.diff for i, blob in enumerate(net.params.get("L", []))}

    def total(changed: Arrays) -> float:
        tops = reference({**values, **changed})
        return float(sum((tops[name] * weights[name]).sum() for name in tops))

    step = 1e-6
    for name in smooth:
        along = rng.standard_normal(values[name].shape)
        rise = total({name: values[name] + step * along}) - total({name: values[name] - step * along})
        size = np.linalg.norm(gradients[name]) + 1
        assert abs(rise / (2 * step) - (gradients[name] * along).sum()) <= 10 * tolerance * size, name


def largest_allocation(net: Net, passes: int = 1) -> int:
    """Bytes that forward and backward take on top of what they hold anyway, at the most, once everything is warm."""
    import tracemalloc

    def run() -> None:
        net.forward_only()
        net.backward_only()

    run()
    tracemalloc.start()
    try:
        run()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(passes):
            run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
