"""The bounds of gpu.crosscheck, counted by hand, and that a verdict turns where they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpu.backend import Backend
from gpu.error_bounds import Lengths, bound, lengths
from gpu.layer_check import BEYOND, BUG, ROUNDING
from gpu.probe import bare_graph
from gpu.prototxt import filter_net, load_net
from tests.gpu.nets import inputs, layer
from tests.gpu.test_crosscheck import NET, SIDES, broken, check, forward_off_by

ONE = {"portable": Backend("portable", np, "test")}


@pytest.mark.parametrize(("terms", "factor"), [(0, 1), (1, 1), (9, 3), (10_000, 100)])
def test_a_bound_is_8_roots_of_the_terms(terms: int, factor: float) -> None:
    values = np.array([3.0, -4.0, np.inf])
    assert bound(values, 0.0, terms) == pytest.approx(8 * factor * 2.0**-24 * 5, rel=1e-12)
    assert bound(values, 0.5, terms) == pytest.approx(8 * factor * (2.0**-24 * 5 + 0.5), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "extra", "forward", "bottom", "param"),
    [
        ("Convolution", "convolution_param { num_output: 8 kernel_size: 3 group: 2 }", 2 * 9, 4 * 9, 2 * 4 * 5),
        ("Deconvolution", "convolution_param { num_output: 8 kernel_size: 3 group: 2 }", 2 * 9, 4 * 9, 2 * 6 * 7),
        ("InnerProduct", "inner_product_param { num_output: 5 }", 4 * 6 * 7, 5, 2),
        ("Pooling", "pooling_param { pool: AVE kernel_h: 3 kernel_w: 2 }", 6, 6, 1),
        ("Pooling", "pooling_param { kernel_size: 3 }", 1, 9, 1),
        ("Pooling", "pooling_param { pool: AVE global_pooling: true }", 42, 42, 1),
        ("LRN", "lrn_param { local_size: 5 }", 5, 5, 1),
        ("LRN", "lrn_param { local_size: 3 norm_region: WITHIN_CHANNEL }", 9, 9, 1),
        ("Scale", "scale_param { bias_term: true }", 1, 1, 2 * 6 * 7),
        ("Softmax", "", 4, 4, 1),
        ("BatchNorm", "", 2 * 6 * 7, 2 * 6 * 7, 1),
        ("ReLU", "", 1, 1, 2 * 4 * 6 * 7),
    ],
)
def test_the_terms_of_a_sum(kind: str, extra: str, forward: int, bottom: int, param: int) -> None:
    """Of an input of 2 images, 4 channels, 6 rows and 7 columns."""
    text = "force_backward: true\n" + inputs(x=(2, 4, 6, 7)) + layer(kind, "L", ["x"], ["y"], extra)
    node = bare_graph(filter_net(load_net(text), "TRAIN"), {}, 0).nodes[-1]
    found = lengths(node)
    assert found == Lengths(forward, bottom, param)
    names = ("top 0", "statistic 0", "bottom 0 gradient", "parameter 1 gradient")
    assert [found.of(name) for name in names] == [forward, forward, bottom, param]


def test_what_one_rounding_of_each_input_does_is_part_of_the_bound() -> None:
    """y = 3 x moves by 3 u |x|, as much as its own rounding."""
    text = "force_backward: true\n" + inputs(x=(50, 40)) + layer("Power", "L", ["x"], ["y"], "power_param { scale: 3 }")
    tensors = [t for each in check(text, ONE) for t in each.tensors if t.name == "top 0" and t.mode != "cumulative"]
    assert [t.mode for t in tensors] == ["isolated", "in net"]
    for tensor in tensors:
        size = tensor.distance.l2 / tensor.distance.relative
        assert tensor.bound == pytest.approx(16 * 2.0**-24 * size, rel=0.01)


@pytest.mark.parametrize("name", ["conv", "pool", "ip"])
@pytest.mark.parametrize(("share", "verdict"), [(0.9, ROUNDING), (1.1, BUG)])
def test_the_verdict_turns_at_the_bound(name: str, share: float, verdict: str) -> None:
    """One value is moved by that share of the bound (of which sound layers use about 2 %)."""
    [sound] = [
        t for each in check(NET, ONE) if each.layer == name for t in each.tensors
        if (t.name, t.mode) == ("top 0", "isolated")
    ]  # fmt: skip

    def change(it: Any) -> None:
        class Off(type(it)):  # type: ignore[misc]
            def forward(self, bottoms: Any, tops: Any) -> None:
                super().forward(bottoms, tops)
                # On the smallest value, where float32 can hold the difference.
                values = tops[0].reshape(-1)
                values[np.abs(values).argmin()] += share * sound.bound

        it.__class__ = Off

    checked = check(NET, ONE, prepare=broken(name, change))
    for each in checked:
        assert each.verdict("isolated") == (verdict if each.layer == name else ROUNDING), each.layer


def test_what_follows_a_wrong_layer_is_beyond_and_no_bug_of_its_own() -> None:
    checked = {each.layer: each for each in check(NET, SIDES, prepare=broken("conv", forward_off_by(2)))}
    for name in ("norm", "ip", "loss"):
        assert checked[name].verdict("cumulative", "portable") == BEYOND, name
        assert checked[name].verdict("cumulative", "compiled") == ROUNDING, name
        assert checked[name].verdict("isolated") == checked[name].verdict("in net") == ROUNDING, name
