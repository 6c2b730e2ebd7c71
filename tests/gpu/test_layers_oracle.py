"""Layers of random shapes against PyTorch in float64: values and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.test_layers import BACKENDS, error, layer_net

pytestmark = pytest.mark.oracle
backends = st.sampled_from(sorted(BACKENDS))
small = st.integers(1, 3)
many = settings(max_examples=25, deadline=None)


def check(
    layer: str, shape: tuple[int, ...], function: Callable[..., Any], backend: str, seed: int, phase: str = "TRAIN"
) -> None:
    """``function(torch, x, *parameters)`` is what the layer should do; parameters are normal."""
    torch = pytest.importorskip("torch")
    net = layer_net(shape, f"{layer} bottom: 'x' top: 'y'", phase=phase, backend=BACKENDS[backend])
    rng = np.random.default_rng(seed)
    learned = [layer_ for layer_ in net.layers if layer_.learned]
    blobs = [blob for layer_ in learned for blob in layer_.blobs]
    for blob in blobs:
        blob.data = rng.standard_normal(blob.shape, np.float32)
    x = rng.standard_normal(shape, np.float32)
    tx, *leaves = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in [x, *(b.data for b in blobs)])
    ty = function(torch, tx, *leaves)
    y = net.forward(x=x)["y"]
    assert y.shape == tuple(ty.shape)
    dy = rng.standard_normal(y.shape, np.float32)
    ty.backward(torch.tensor(dy, dtype=torch.float64))
    dx = net.backward(y=dy)["x"]
    assert error(y, ty.detach().numpy()) <= 1e-5
    for what, have, leaf in [
        ("x", dx, tx),
        *((i, b.diff, leaf) for i, (b, leaf) in enumerate(zip(blobs, leaves, strict=True))),
    ]:
        want = leaf.grad.numpy()
        # A gradient that cancels to nothing is as exact as its terms are.
        assert np.linalg.norm(have - want) <= 1e-5 * np.linalg.norm(want) + 1e-6 * np.sqrt(want.size * dy.size), what


@many
@given(data=st.data(), backend=backends, seed=st.integers(0, 99), n=small, channels=st.integers(2, 5))
def test_depthwise_convolution(data: st.DataObject, backend: str, seed: int, n: int, channels: int) -> None:
    kernel, stride, dilation, each = (data.draw(small) for _ in range(4))
    pad = data.draw(st.integers(0, 3))
    size = [data.draw(st.integers(max(1, dilation * (kernel - 1) + 1 - 2 * pad), 12)) for _ in "hw"]
    text = f"num_output: {channels * each} group: {channels} kernel_size: {kernel} stride: {stride} pad: {pad}"
    check(
        f'type: "Convolution" convolution_param {{ {text} dilation: {dilation} }}',
        (n, channels, *size),
        lambda torch, x, w, b: torch.nn.functional.conv2d(x, w, b, stride, pad, dilation, channels),
        backend,
        seed,
    )


@many
@given(data=st.data(), backend=backends, seed=st.integers(0, 99), n=small, group=st.integers(1, 2), bias=st.booleans())
def test_deconvolution(data: st.DataObject, backend: str, seed: int, n: int, group: int, bias: bool) -> None:
    kernel, stride, dilation, inputs, outputs = (data.draw(small) for _ in range(5))
    pad = data.draw(st.integers(0, 2))
    least = max(1, -(-(2 * pad - dilation * (kernel - 1)) // stride) + 1)
    size = [data.draw(st.integers(least, least + 6)) for _ in "hw"]
    text = f"num_output: {outputs * group} group: {group} kernel_size: {kernel} stride: {stride} pad: {pad}"
    text += f" dilation: {dilation}" + " bias_term: false" * (not bias)
    check(
        f'type: "Deconvolution" convolution_param {{ {text} }}',
        (n, inputs * group, *size),
        lambda torch, x, w, *b: torch.nn.functional.conv_transpose2d(
            x, w, *(b or [None]), stride, pad, 0, group, dilation
        ),
        backend,
        seed,
    )


@many
@given(
    data=st.data(),
    backend=backends,
    seed=st.integers(0, 99),
    kernel=st.integers(1, 4),
    method=st.sampled_from(["MAX", "AVE"]),
)
def test_pooling(data: st.DataObject, backend: str, seed: int, kernel: int, method: str) -> None:
    """Overlapping windows, padded, sizes rounded up: PyTorch's ceil_mode has Caffe's rules for both methods."""
    stride, pad = data.draw(st.integers(1, kernel)), data.draw(st.integers(0, kernel // 2))
    size = [data.draw(st.integers(kernel, 17)) for _ in "hw"]
    check(
        f'type: "Pooling" pooling_param {{ pool: {method} kernel_size: {kernel} stride: {stride} pad: {pad} }}',
        (2, 3, *size),
        lambda torch, x: (torch.max_pool2d if method == "MAX" else torch.nn.functional.avg_pool2d)(
            x, kernel, stride, pad, ceil_mode=True
        ),
        backend,
        seed,
    )


@many
@given(
    backend=backends,
    seed=st.integers(0, 99),
    half=st.integers(0, 3),
    shape=st.tuples(small, st.integers(1, 9), st.integers(1, 6), st.integers(1, 6)),
    alpha=st.floats(1e-4, 2),
    beta=st.sampled_from([0.5, 0.75, 1.0, 1.3]),
    k=st.floats(0.5, 2),
    within=st.booleans(),
)
def test_response_normalisation(
    backend: str, seed: int, half: int, shape: Any, alpha: float, beta: float, k: float, within: bool
) -> None:
    size = 2 * half + 1

    def function(torch: Any, x: Any) -> Any:
        if within:
            return x * (1 + alpha * torch.nn.functional.avg_pool2d(x * x, size, 1, half)) ** -beta
        return torch.nn.functional.local_response_norm(x, size, alpha, beta, k)

    text = f"local_size: {size} alpha: {alpha} beta: {beta} "
    text += "norm_region: WITHIN_CHANNEL" if within else f"k: {k}"
    check(f'type: "LRN" lrn_param {{ {text} }}', shape, function, backend, seed)


@many
@given(
    backend=backends,
    seed=st.integers(0, 99),
    shape=st.tuples(st.integers(2, 5), st.integers(1, 5), st.integers(2, 6), st.integers(2, 6)),
)
def test_batch_normalisation(backend: str, seed: int, shape: Any) -> None:
    check(
        'type: "BatchNorm"',
        shape,
        lambda torch, x: torch.nn.functional.batch_norm(x, None, None, training=True, eps=1e-5),
        backend,
        seed,
    )


@many
@given(
    backend=backends, seed=st.integers(0, 99), shape=st.tuples(small, small, small), outputs=small, flip=st.booleans()
)
def test_inner_product(backend: str, seed: int, shape: Any, outputs: int, flip: bool) -> None:
    check(
        f'type: "InnerProduct" inner_product_param {{ num_output: {outputs} transpose: {str(flip).lower()} }}',
        shape,
        lambda torch, x, w, b: x.flatten(1) @ (w if flip else w.T) + b,
        backend,
        seed,
    )
