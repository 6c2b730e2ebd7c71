"""Layers of random shapes against PyTorch in float64: values and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.torch_checks import Case, as_torch, backends, precisions

pytestmark = pytest.mark.oracle
small = st.integers(1, 3)
Way = tuple[str, str, int]
ways = st.tuples(backends, precisions, st.integers(0, 99))
many = settings(max_examples=25, deadline=None)


def check(layer: str, shape: tuple[int, ...], function: Callable[..., Any], how: Way, phase: str = "TRAIN") -> None:
    """``function(torch, x, *parameters)`` is what the layer should do."""
    kind, _, rest = layer.removeprefix('type: "').partition('"')
    as_torch(Case(kind, rest, {"x": shape}, function, phase=phase), *how)


@many
@given(data=st.data(), how=ways, n=small, channels=st.integers(2, 5))
def test_depthwise_convolution(data: st.DataObject, how: Way, n: int, channels: int) -> None:
    kernel, stride, dilation, each = (data.draw(small) for _ in range(4))
    pad = data.draw(st.integers(0, 3))
    size = [data.draw(st.integers(max(1, dilation * (kernel - 1) + 1 - 2 * pad), 12)) for _ in "hw"]
    text = f"num_output: {channels * each} group: {channels} kernel_size: {kernel} stride: {stride} pad: {pad}"
    check(
        f'type: "Convolution" convolution_param {{ {text} dilation: {dilation} }}',
        (n, channels, *size),
        lambda torch, x, w, b: torch.nn.functional.conv2d(x, w, b, stride, pad, dilation, channels),
        how,
    )


@many
@given(data=st.data(), how=ways, n=small, group=st.integers(1, 2), bias=st.booleans())
def test_deconvolution(data: st.DataObject, how: Way, n: int, group: int, bias: bool) -> None:
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
        how,
    )


@many
@given(
    data=st.data(),
    how=ways,
    kernel=st.integers(1, 4),
    method=st.sampled_from(["MAX", "AVE"]),
)
def test_pooling(data: st.DataObject, how: Way, kernel: int, method: str) -> None:
    """Overlapping windows, padded, sizes rounded up: PyTorch's ceil_mode has Caffe's rules for both methods."""
    stride, pad = data.draw(st.integers(1, kernel)), data.draw(st.integers(0, kernel // 2))
    size = [data.draw(st.integers(kernel, 17)) for _ in "hw"]
    check(
        f'type: "Pooling" pooling_param {{ pool: {method} kernel_size: {kernel} stride: {stride} pad: {pad} }}',
        (2, 3, *size),
        lambda torch, x: (torch.max_pool2d if method == "MAX" else torch.nn.functional.avg_pool2d)(
            x, kernel, stride, pad, ceil_mode=True
        ),
        how,
    )


@many
@given(
    how=ways,
    half=st.integers(0, 3),
    shape=st.tuples(small, st.integers(1, 9), st.integers(1, 6), st.integers(1, 6)),
    alpha=st.floats(1e-4, 2),
    beta=st.sampled_from([0.5, 0.75, 1.0, 1.3]),
    k=st.floats(0.5, 2),
    within=st.booleans(),
)
def test_response_normalisation(
    how: Way, half: int, shape: Any, alpha: float, beta: float, k: float, within: bool
) -> None:
    size = 2 * half + 1

    def function(torch: Any, x: Any) -> Any:
        if within:
            return x * (1 + alpha * torch.nn.functional.avg_pool2d(x * x, size, 1, half)) ** -beta
        return torch.nn.functional.local_response_norm(x, size, alpha, beta, k)

    text = f"local_size: {size} alpha: {alpha} beta: {beta} "
    text += "norm_region: WITHIN_CHANNEL" if within else f"k: {k}"
    check(f'type: "LRN" lrn_param {{ {text} }}', shape, function, how)


@many
@given(
    how=ways,
    shape=st.tuples(st.integers(2, 5), st.integers(1, 5), st.integers(2, 6), st.integers(2, 6)),
)
def test_batch_normalisation(how: Way, shape: Any) -> None:
    check(
        'type: "BatchNorm"',
        shape,
        lambda torch, x, *_: torch.nn.functional.batch_norm(x, None, None, training=True, eps=1e-5),
        how,
    )


@many
@given(how=ways, shape=st.tuples(small, small, small), outputs=small, flip=st.booleans())
def test_inner_product(how: Way, shape: Any, outputs: int, flip: bool) -> None:
    check(
        f'type: "InnerProduct" inner_product_param {{ num_output: {outputs} transpose: {str(flip).lower()} }}',
        shape,
        lambda torch, x, w, b: x.flatten(1) @ (w if flip else w.T) + b,
        how,
    )
